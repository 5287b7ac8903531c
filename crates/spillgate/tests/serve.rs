//! The server with a real model, as a user starts it.

#[path = "../../server/tests/common/client.rs"]
mod client;
mod common;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use client::{Client, chunks};
use common::{smollm2, spillgate, stderr};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

/// A server on a port of its own. Dropped, it is killed.
struct Serving {
    child: Child,
    client: Client,
    id: String,
}

impl Serving {
    fn start(model: &str) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_spillgate"))
            .args([
                "serve", model, "--port", "0", "--temp", "0", "--ctx", "2048", "--json",
            ])
            .env_remove("SPILLGATE_API_KEY")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the program was built");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("stdout is piped"))
            .read_line(&mut line)
            .unwrap();
        let ready: Value = serde_json::from_str(&line).expect("a line of JSON once it listens");
        assert_eq!(ready["n_ctx"], 2048);
        let url = ready["url"].as_str().unwrap();
        let address = url.strip_prefix("http://").unwrap().parse().unwrap();
        Self {
            child,
            client: Client::new(address),
            id: ready["model"].as_str().unwrap().to_owned(),
        }
    }

    /// Waits for its end.
    fn ended(&mut self) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(begun.elapsed() < Duration::from_secs(30), "it does not end");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What `spillgate run` says, greedily.
fn run(model: &str, extra: &[&str], prompt: &str) -> Value {
    let mut args = vec!["run", model, "--temp", "0", "-n", "24", "--json"];
    args.extend(extra);
    args.push(prompt);
    let output = spillgate(&args);
    assert!(output.status.success(), "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn user(content: &str) -> Value {
    json!([{"role": "user", "content": content}])
}

#[test]
fn answers_are_those_of_the_program_whole_streamed_and_among_others() {
    let Some(model) = smollm2("answers_are_those_of_the_program_whole_streamed_and_among_others")
    else {
        return;
    };
    let model = model.to_str().unwrap();
    let questions = [
        "Why is the sky blue?",
        "Name three colours.",
        "What is 2 + 2?",
    ];
    let mut expected: Vec<String> = Vec::new();
    for question in questions {
        expected.push(
            run(model, &[], question)["text"]
                .as_str()
                .unwrap()
                .to_owned(),
        );
    }
    let raw = run(model, &["--raw"], "Once upon a time");

    let mut serving = Serving::start(model);
    let client = &serving.client;
    // All at the same time, twice: the second time most of a prompt may be there from before.
    thread::scope(|scope| {
        for _ in 0..2 {
            for (question, expected) in questions.iter().zip(&expected) {
                scope.spawn(move || {
                    let request = json!({"messages": user(question), "max_tokens": 24});
                    let whole = client.post(CHAT, &request).ok();
                    let text = whole["choices"][0]["message"]["content"].as_str();
                    assert_eq!(text, Some(expected.as_str()), "{question}");
                    let (_, text) = chunks(client.stream(CHAT, &request).rest());
                    assert_eq!(text, *expected, "{question}");
                });
            }
        }
    });
    let request = json!({"model": serving.id, "prompt": "Once upon a time", "max_tokens": 24});
    let whole = client.post(TEXT, &request).ok();
    assert_eq!(whole["choices"][0]["text"], raw["text"]);
    assert_eq!(whole["usage"]["completion_tokens"], raw["decode_tokens"]);
    let again = client.post(TEXT, &request).ok();
    assert_eq!(again["choices"][0]["text"], raw["text"]);
    let prompt_tokens = whole["usage"]["prompt_tokens"].as_u64().unwrap();
    let cached = &again["usage"]["prompt_tokens_details"]["cached_tokens"];
    assert_eq!(*cached, prompt_tokens - 1);

    // One who leaves does not hold the others.
    let mut stream = client.stream(
        TEXT,
        &json!({"prompt": "1, 2, 3, 4,", "logit_bias": {"0": -100, "2": -100}}),
    );
    stream.next().expect("it begins");
    drop(stream);
    client.until("spillgate_answers_total{outcome=\"cancelled\"}", 1.0);
    let long = "word ".repeat(3000);
    let error = client.post(TEXT, &json!({"prompt": long})).error(400);
    assert_eq!(error["code"], "context_length_exceeded");
    client
        .post(TEXT, &json!({"model": "other", "prompt": "x"}))
        .error(404);
    assert_eq!(client.get("/v1/plan").ok()["n_ctx"], 2048);

    end_by_a_signal(&mut serving);
}

/// What a service manager does: the running answer comes to its end.
#[cfg(unix)]
fn end_by_a_signal(serving: &mut Serving) {
    let request = json!({"prompt": "Once upon a time", "max_tokens": 40});
    let mut stream = serving.client.stream(TEXT, &request);
    stream.next().expect("it begins");
    let pid = serving.child.id().to_string();
    let sent = Command::new("kill").arg(&pid).status().unwrap();
    assert!(sent.success());
    let (pieces, _) = chunks(stream.rest());
    let last = pieces.last().unwrap();
    assert!(last["choices"][0]["finish_reason"].is_string(), "{last}");
    assert!(serving.ended().success());
}

#[cfg(not(unix))]
fn end_by_a_signal(_: &mut Serving) {}

#[test]
fn a_port_that_is_taken_is_told_before_anything_is_loaded() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let output = spillgate(&["serve", "no-such-model", "--port", &port]);
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    assert!(text.contains("cannot listen on 127.0.0.1:"), "{text}");
    assert!(
        text.contains("\nhint: ") && text.contains("--port 0"),
        "{text}"
    );
}

#[test]
fn nobody_is_let_in_by_accident() {
    for args in [
        &["--host", "0.0.0.0"][..],
        &["--host", "::"],
        &["--api-key", ""],
    ] {
        let mut all = vec!["serve", "smollm2", "--port", "0"];
        all.extend(args);
        let output = spillgate(&all);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        let text = stderr(&output);
        assert!(text.contains("key") && text.contains("\nhint: "), "{text}");
    }
    // What holds for every request is checked before it listens.
    if let Some(model) = smollm2("nobody_is_let_in_by_accident") {
        let model = model.to_str().unwrap();
        let output = spillgate(&["serve", model, "--port", "0", "--temp=-1"]);
        assert_eq!(output.status.code(), Some(1));
        assert!(output.stdout.is_empty() && stderr(&output).contains("temperature"));
    }
    for bad in [["--queue", "0"], ["--timeout", "0"], ["--host", "here"]] {
        let output = spillgate(&["serve", "smollm2", bad[0], bad[1]]);
        assert_eq!(output.status.code(), Some(2), "{bad:?}");
    }
}
