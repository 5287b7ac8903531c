//! A server within the test, of a model that is made up.

#![allow(dead_code, reason = "each test binary uses some of the helpers")]

pub mod client;

use std::collections::HashMap;
use std::net::TcpListener;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use engine::embed::{Pool, Pooling};
use engine::generate::{CacheBytes, GateNow, Sequences};
use engine::sampler::SamplerParams;
use engine::session::{Part, TokenOrigin, Wants};
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
/// is full, `!` is an error of the model and `?` a bug in it; after everything else comes a. After a prompt with `SAY:..:YAS` it says
/// what stands there.
pub struct Alphabet {
    /// Time of a step with a generated token, and of one token of a prompt.
    pub token_ms: u64,
    pub prompt_token_ms: u64,
    pub n_ctx: usize,
    pub step_max: usize,
    /// Tokens that all sequences have room for.
    pub cells: usize,
    held: HashMap<u32, Held>,
    next: u32,
}

/// A sequence: its tokens, and how many of them came as generated.
#[derive(Default)]
struct Held {
    tokens: Vec<u32>,
    generated: usize,
}

impl Held {
    /// What the prompt wants to hear next.
    fn said(&self) -> Option<u32> {
        let bytes = self
            .tokens
            .iter()
            .map(|&token| token.saturating_sub(3) as u8);
        let text = String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned();
        let (_, script) = text.split_once("SAY:")?;
        let (script, _) = script.split_once(":YAS")?;
        let next = script.as_bytes().get(self.generated);
        Some(next.map_or(END, |&byte| u32::from(byte) + 3))
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the model stumbled")]
pub struct Stumbled;

impl Alphabet {
    pub fn new(token_ms: u64) -> Self {
        Self {
            token_ms,
            prompt_token_ms: 0,
            n_ctx: N_CTX,
            step_max: 512,
            cells: 100_000,
            held: HashMap::new(),
            next: 0,
        }
    }
}

/// What the last norm is said to give for a token.
pub fn output(token: u32) -> [f32; 2] {
    [token as f32, 1.0]
}

fn after(token: u32) -> Result<u32, Stumbled> {
    Ok(
        match u8::try_from(token.saturating_sub(3)).expect("a byte") {
            b'!' => return Err(Stumbled),
            b'?' => panic!("a bug, for a test"),
            b'z' => END,
            letter @ b'a'..=b'y' => u32::from(letter) + 4,
            digit @ b'0'..=b'9' => u32::from(digit) + 3,
            _ => u32::from(b'a') + 3,
        },
    )
}

impl Sequences for Alphabet {
    type Error = Stumbled;
    type Id = u32;

    fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    fn step_max(&self) -> usize {
        self.step_max
    }

    fn computes_alike(&self) -> bool {
        true
    }

    /// A token is a byte.
    fn bytes(&self) -> CacheBytes {
        CacheBytes {
            device: self.held.values().map(|h| h.tokens.len() as u64).sum(),
            host: 0,
            most: self.cells as u64,
            streamed: 0,
        }
    }

    fn gate(&self) -> Option<GateNow> {
        None
    }

    fn has_room(&self, growing: &mut dyn Iterator<Item = (u32, usize)>) -> bool {
        let held = self.bytes().device as usize;
        held + growing.map(|(_, tokens)| tokens).sum::<usize>() <= self.cells
    }

    fn create(&mut self) -> u32 {
        self.next += 1;
        self.held.insert(self.next, Held::default());
        self.next
    }

    fn branch(&mut self, of: u32, n: usize) -> (u32, usize) {
        let tokens = self.held[&of].tokens[..n].to_vec();
        let branch = self.create();
        let generated = 0;
        self.held.insert(branch, Held { tokens, generated });
        (branch, n)
    }

    fn forget(&mut self, sequence: u32) {
        self.held.remove(&sequence).expect("it exists");
    }

    fn step(
        &mut self,
        parts: &[Part<'_, u32>],
        each: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), Stumbled> {
        let of = |origin| {
            let parts = parts.iter().filter(move |part| part.origin == origin);
            parts.map(|part| part.tokens.len() as u64).sum::<u64>()
        };
        let generated = of(TokenOrigin::Generated).min(1);
        let ms = generated * self.token_ms + of(TokenOrigin::Prompt) * self.prompt_token_ms;
        thread::sleep(Duration::from_millis(ms));
        let all: usize = parts.iter().map(|part| part.tokens.len()).sum();
        assert!(all <= self.step_max, "{all} tokens");
        for (i, part) in parts.iter().enumerate() {
            let held = self.held.get_mut(&part.sequence).expect("it exists");
            held.tokens.extend_from_slice(part.tokens);
            if part.origin == TokenOrigin::Generated {
                held.generated += part.tokens.len();
            }
            assert!(held.tokens.len() <= self.n_ctx, "the context is minded");
            let last = *part.tokens.last().expect("something to take");
            let next = match held.said() {
                Some(next) => next,
                None => after(last)?,
            };
            match part.wants {
                Wants::Nothing => {}
                Wants::Logits | Wants::Largest(_) => {
                    let mut logits = vec![0.0; N_VOCAB];
                    logits[next as usize] = 10.0;
                    each(i, &logits);
                }
                Wants::Outputs => {
                    let outputs = part.tokens.iter().flat_map(|&token| output(token));
                    each(i, &outputs.collect::<Vec<f32>>());
                }
            }
        }
        assert!(self.bytes().device <= self.bytes().most, "no room");
        Ok(())
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
        parallel: 4,
        n_ctx: usize::MAX,
        exact_reuse: false,
        timeout: Duration::from_secs(60),
        grace: Duration::from_secs(10),
    }
}

/// One request at a time.
pub fn one_by_one() -> Options {
    Options {
        parallel: 1,
        ..options()
    }
}

pub fn with_key(key: &str) -> Options {
    Options {
        key: ApiKey::new(key),
        ..options()
    }
}

pub fn start(options: Options, token_ms: u64) -> Running {
    start_model(options, Alphabet::new(token_ms))
}

pub fn start_model(options: Options, model: Alphabet) -> Running {
    start_embedder(options, model, None)
}

/// A model that makes embeddings.
pub fn start_embedder(options: Options, model: Alphabet, pooling: Option<Pooling>) -> Running {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (shutdown, asked) = oneshot::channel::<()>();
    let template = "{# <think></think> #}{% for m in messages %}{{ m.role }} says {{ m.content }}{% endfor %}{% if tools %} with {{ tools|length }} tools {% endif %}";
    let served = Served {
        id: "alphabet".to_owned(),
        tokenizer: Arc::new(bytes_tokenizer()),
        template: Some(ChatTemplate::from_source(template, "", "").unwrap()),
        sampling: SamplerParams::greedy(),
        embedder: pooling.map(|pooling| Pool::new(pooling, output(0).len())),
        plan: json!({"fits": true}),
    };
    let thread = thread::spawn(move || {
        server::run(listener, model, Vec::new(), served, options, async {
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
