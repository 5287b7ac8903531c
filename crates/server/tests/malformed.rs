//! A thousand requests that make no sense: each gets a 4xx in its API's form, and the server goes on.

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use common::client::{Client, Reply};
use common::{options, start};
use serde_json::{Value, json};

/// Numbers that look random.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) as usize % n
    }

    fn of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }
}

/// A request that is fine.
fn good(path: &str) -> Value {
    match path {
        "/v1/completions" => json!({"prompt": "xy"}),
        "/v1/responses" => json!({"input": "xy"}),
        "/v1/messages" => json!({"max_tokens": 5, "messages": [{"role": "user", "content": "xy"}]}),
        "/tokenize" => json!({"content": "xy"}),
        "/detokenize" => json!({"tokens": [119, 120]}),
        _ => json!({"messages": [{"role": "user", "content": "xy"}]}),
    }
}

/// What to ask is missing, or is not what it must be.
fn essential(path: &str) -> &'static str {
    match path {
        "/v1/completions" => "prompt",
        "/v1/responses" => "input",
        "/tokenize" => "content",
        "/detokenize" => "tokens",
        _ => "messages",
    }
}

const PATHS: [&str; 6] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/tokenize",
    "/detokenize",
];

fn check(reply: &Reply, path: &str, what: &str) {
    assert!(
        (400..500).contains(&reply.status),
        "{path}: {what}: {} {}",
        reply.status,
        String::from_utf8_lossy(&reply.body)
    );
    let error = reply.json();
    let message = error["error"]["message"].as_str().unwrap_or_default();
    assert!(
        !message.is_empty() && message.len() < 2000,
        "{path}: {what}: {error}"
    );
}

/// A body, and what is wrong with it.
fn body(random: &mut Random, path: &str) -> (Vec<u8>, String) {
    let good = good(path).to_string().into_bytes();
    match random.below(6) {
        // Cut off.
        0 => {
            let at = random.below(good.len());
            (good[..at].to_vec(), format!("cut at {at}"))
        }
        // No UTF-8, in the midst of a text.
        1 => {
            let mut bytes = good.clone();
            let at = bytes.windows(2).position(|w| w == b"xy");
            let at = at.unwrap_or(bytes.len() / 2);
            let byte = 0x80 + random.below(0x80) as u8;
            bytes[at] = byte;
            (bytes, format!("byte {byte:x}"))
        }
        // Something in place of what is asked.
        2 | 3 => {
            let odd: [Value; 9] = [
                json!(null),
                json!(true),
                json!(-1),
                json!(1.5),
                json!({}),
                json!([]),
                json!([null]),
                json!([[[[]]]]),
                json!({"a": {"b": "c"}}),
            ];
            let mut value: Value = serde_json::from_slice(&good).unwrap();
            let odd = match random.of(&odd) {
                // No tokens have a text, which is empty.
                Value::Array(list) if list.is_empty() && path == "/detokenize" => json!(-1),
                odd => odd.clone(),
            };
            value[essential(path)] = odd;
            (value.to_string().into_bytes(), value.to_string())
        }
        // Deep, or no object.
        4 => {
            let depth = 200 + random.below(50_000);
            let text = match random.below(3) {
                0 => "[".repeat(depth),
                1 => "{\"a\":".repeat(depth),
                _ => format!("{}{}", "[".repeat(depth), "]".repeat(depth)),
            };
            (text.into_bytes(), format!("{depth} deep"))
        }
        // Junk.
        _ => {
            let n = random.below(300);
            let bytes: Vec<u8> = (0..n).map(|_| random.below(256) as u8).collect();
            (bytes, "junk".to_owned())
        }
    }
}

/// A field whose value no request has, for those paths where it is read.
fn field(random: &mut Random) -> (&'static str, Value) {
    let schema = |schema: Value| json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}});
    let mut deep = json!({"type": "string"});
    for _ in 0..90 {
        deep = json!({"type": "array", "items": deep});
    }
    let all = [
        ("temperature", json!(1e300)),
        ("temperature", json!("hot")),
        ("temperature", json!(-3)),
        ("top_p", json!(7)),
        ("top_p", json!([])),
        ("min_p", json!(-0.1)),
        ("top_k", json!(-7)),
        ("top_k", json!(1e18)),
        ("seed", json!(1e40)),
        ("stream", json!(1)),
        ("stream", json!("true")),
        ("stop", json!([1, 2])),
        ("stop", json!(vec!["a"; 1000])),
        ("stop", json!("x".repeat(100_000))),
        ("max_tokens", json!(0)),
        ("max_tokens", json!(-5)),
        ("max_tokens", json!(18_446_744_073_709_551_615u64)),
        ("n", json!(1_000_000)),
        ("n", json!(0)),
        ("logit_bias", json!({"99999999999": 1})),
        ("logit_bias", json!([1])),
        ("logprobs", json!("many")),
        ("top_logprobs", json!(1000)),
        ("presence_penalty", json!("x")),
        ("model", json!("another")),
        ("model", json!(["alphabet"])),
        ("tools", json!([1])),
        ("tools", json!([{"type": "function"}])),
        ("tools", json!("all")),
        ("tool_choice", json!("perhaps")),
        ("tool_choice", json!("required")),
        ("response_format", json!("json")),
        ("response_format", json!({"type": 3})),
        ("response_format", schema(json!(3))),
        ("response_format", schema(deep)),
        (
            "response_format",
            schema(json!({"type": "string", "pattern": "((((("})),
        ),
        ("response_format", schema(json!({"$ref": "#/nowhere"}))),
        (
            "response_format",
            schema(json!({"type": "array", "minItems": 10, "maxItems": 2})),
        ),
        ("grammar", json!("start: ((((")),
        ("guided_regex", json!("[")),
        ("chat_template_kwargs", json!("x")),
    ];
    random.of(&all).clone()
}

#[test]
fn a_thousand_requests_without_sense() {
    let server = start(options(), 0);
    let client = server.client.with("Content-Type", "application/json");
    let mut random = Random(7);
    for i in 0..1000 {
        if i % 2 == 0 {
            let path = *random.of(&PATHS);
            let (body, what) = body(&mut random, path);
            check(&client.raw("POST", path, &body), path, &what);
        } else {
            let path = "/v1/chat/completions";
            let (key, value) = field(&mut random);
            let mut request = good(path);
            request[key] = value;
            let what = format!(
                "{key}: {}",
                &request[key].to_string()[..request[key].to_string().len().min(60)]
            );
            check(
                &client.raw("POST", path, request.to_string().as_bytes()),
                path,
                &what,
            );
        }
        if i % 100 == 0 {
            let answer = server
                .client
                .post("/v1/completions", &json!({"prompt": "x"}))
                .ok();
            assert_eq!(answer["choices"][0]["text"], "yz");
        }
    }
    server.client.until("spillgate_running ", 0.0);
}

/// More than any context holds, in one piece and in pieces that never end.
#[test]
fn large_bodies_are_refused_and_not_kept() {
    let server = start(options(), 0);
    let client = server.client.with("Content-Type", "application/json");
    let body = vec![b'['; 50 << 20];
    let reply = client.raw("POST", "/v1/chat/completions", &body);
    assert_eq!(reply.error(413)["code"], "request_too_large");
    server.client.get("/health").ok();
}

/// Heads that are none: the connection ends, or is told so.
#[test]
fn what_is_not_http_harms_nobody() {
    let server = start(options(), 0);
    let Client { address, .. } = server.client;
    let mut random = Random(3);
    for i in 0..50 {
        let mut socket = TcpStream::connect(address).unwrap();
        socket
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        let junk: Vec<u8> = match i % 4 {
            0 => (0..200).map(|_| random.below(256) as u8).collect(),
            1 => b"GET / HTTP/9.9\r\n\r\n".to_vec(),
            2 => b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n"
                .to_vec(),
            _ => format!(
                "GET /{} HTTP/1.1\r\nHost: localhost\r\n\r\n",
                "x".repeat(100_000)
            )
            .into_bytes(),
        };
        // It may be closed already.
        let _ = socket.write_all(&junk);
        let _ = socket.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = socket.read_to_end(&mut answer);
        let status = answer.get(9..12);
        assert!(
            status.is_none_or(|s| s[0] == b'4' || s == b"505"),
            "{:?}",
            String::from_utf8_lossy(&answer)
        );
    }
    server.client.get("/health").ok();
}
