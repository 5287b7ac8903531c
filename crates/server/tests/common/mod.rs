//! A server within the test, of a model that is made up.

#![allow(dead_code, reason = "each test binary uses some of the helpers")]

pub mod client;

use std::net::TcpListener;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use engine::generate::Decoder;
use engine::sampler::SamplerParams;
use engine::template::ChatTemplate;
use engine::tokenizer::Tokenizer;
use gguf::{Metadata, StringArray};
use serde_json::json;
use server::{ApiKey, Error, Hosts, Options, Served};
use tokio::sync::oneshot;

use client::Client;

pub const N_CTX: usize = 200;
const END: u32 = 2;
const N_VOCAB: usize = 3 + 256;

/// One token a byte: byte `b` is token `b + 3`; token 2 ends a text.
fn bytes_tokenizer() -> Tokenizer {
    let bytes = (0..=255).map(|b| format!("<0x{b:02X}>"));
    let tokens: StringArray = ["<unk>", "<s>", "</s>"]
        .into_iter()
        .map(str::to_owned)
        .chain(bytes)
        .collect();
    let kinds: Box<[i32]> = [2, 3, 3]
        .into_iter()
        .chain(std::iter::repeat_n(6, 256))
        .collect();
    let mut metadata = Metadata::new();
    metadata.set("tokenizer.ggml.model", "llama");
    metadata.set("tokenizer.ggml.tokens", tokens);
    metadata.set(
        "tokenizer.ggml.scores",
        vec![0.0f32; N_VOCAB].into_boxed_slice(),
    );
    metadata.set("tokenizer.ggml.token_type", kinds);
    metadata.set("tokenizer.ggml.eos_token_id", END);
    metadata.set("tokenizer.ggml.add_bos_token", false);
    metadata.set("tokenizer.ggml.add_space_prefix", false);
    Tokenizer::from_gguf(&metadata).unwrap()
}

/// A model that knows the alphabet: after a letter comes the next, after z the end. A digit is repeated until the context
/// is full, `!` is an error of the model and `?` a bug in it; after everything else comes a.
pub struct Alphabet {
    pub token_ms: u64,
    held: Vec<u32>,
    logits: Vec<f32>,
}

#[derive(Debug, thiserror::Error)]
#[error("the model stumbled")]
pub struct Stumbled;

impl Alphabet {
    pub fn new(token_ms: u64) -> Self {
        Self {
            token_ms,
            held: Vec::new(),
            logits: vec![0.0; N_VOCAB],
        }
    }

    fn take(&mut self, token: u32) -> Result<(), Stumbled> {
        let next = match u8::try_from(token.saturating_sub(3)).expect("a byte") {
            b'!' => return Err(Stumbled),
            b'?' => panic!("a bug, for a test"),
            b'z' => END,
            letter @ b'a'..=b'y' => u32::from(letter) + 4,
            digit @ b'0'..=b'9' => u32::from(digit) + 3,
            _ => u32::from(b'a') + 3,
        };
        self.held.push(token);
        self.logits.fill(0.0);
        self.logits[next as usize] = 10.0;
        Ok(())
    }
}

impl Decoder for Alphabet {
    type Error = Stumbled;

    fn n_ctx(&self) -> usize {
        N_CTX
    }

    fn n_past(&self) -> usize {
        self.held.len()
    }

    fn prefill(
        &mut self,
        tokens: &[u32],
        interrupted: &dyn Fn() -> bool,
    ) -> Result<bool, Stumbled> {
        for &token in tokens {
            if interrupted() {
                return Ok(false);
            }
            self.take(token)?;
        }
        Ok(true)
    }

    fn decode(&mut self, token: u32) -> Result<(), Stumbled> {
        thread::sleep(Duration::from_millis(self.token_ms));
        self.take(token)
    }

    fn logits(&self) -> &[f32] {
        &self.logits
    }

    fn truncate(&mut self, n: usize) -> usize {
        self.held.truncate(n);
        self.held.len()
    }
}

/// A running server. Dropped, it is asked to end, and waited for.
pub struct Running {
    pub client: Client,
    shutdown: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Result<(), Error>>>,
}

/// What most tests want.
pub fn options() -> Options {
    Options {
        key: None,
        hosts: Hosts::Local,
        queue_len: 16,
        timeout: Duration::from_secs(60),
        grace: Duration::from_secs(10),
    }
}

pub fn with_key(key: &str) -> Options {
    Options {
        key: ApiKey::new(key),
        ..options()
    }
}

pub fn start(options: Options, token_ms: u64) -> Running {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (shutdown, asked) = oneshot::channel::<()>();
    let template = "{% for m in messages %}{{ m.role }} says {{ m.content }}{% endfor %}{% if tools %} with {{ tools|length }} tools {% endif %}";
    let served = Served {
        id: "alphabet".to_owned(),
        tokenizer: Arc::new(bytes_tokenizer()),
        template: Some(ChatTemplate::from_source(template, "", "").unwrap()),
        sampling: SamplerParams::greedy(),
        plan: json!({"fits": true}),
    };
    let thread = thread::spawn(move || {
        server::run(listener, Alphabet::new(token_ms), served, options, async {
            // A test that ended without a word wants the server to end.
            let _ = asked.await;
        })
    });
    Running {
        client: Client::new(address),
        shutdown: Some(shutdown),
        thread: Some(thread),
    }
}

impl Running {
    /// Asks it to end.
    pub fn ask_to_end(&mut self) {
        let shutdown = self.shutdown.take().expect("asked once");
        shutdown.send(()).expect("the server waits for this");
    }

    /// Waits for the end; what became of the thread.
    pub fn ended(&mut self) -> thread::Result<Result<(), Error>> {
        self.thread.take().expect("waited for once").join()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.shutdown.take());
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            if !thread::panicking() {
                ended.expect("no panic").expect("the server ended well");
            }
        }
    }
}
