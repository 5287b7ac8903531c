//! Several clients, impatient ones, and the end.

mod common;

use std::thread;
use std::time::{Duration, Instant};

use common::client::chunks;
use common::{options, start};
use serde_json::json;
use server::Options;

const TEXT: &str = "/v1/completions";
const BUSY: &str = "spillgate_busy";
const WAITING: &str = "spillgate_queue_length ";
const CANCELLED: &str = "spillgate_answers_total{outcome=\"cancelled\"}";

#[test]
fn everybody_gets_their_own_answer() {
    let server = start(options(), 1);
    let alphabet = "abcdefghijklmnopqrstuvwxyz";
    thread::scope(|scope| {
        for first in 0..8 {
            let client = &server.client;
            scope.spawn(move || {
                for turn in 0..3 {
                    let at = 3 * first + turn;
                    let request = json!({"prompt": &alphabet[at..=at]});
                    let text = if turn == 1 {
                        chunks(client.stream(TEXT, &request).rest()).1
                    } else {
                        let whole = client.post(TEXT, &request).ok();
                        whole["choices"][0]["text"].as_str().unwrap().to_owned()
                    };
                    assert_eq!(text, alphabet[at + 1..]);
                }
            });
        }
    });
    server.client.until(WAITING, 0.0);
    server.client.until(BUSY, 0.0);
}

#[test]
fn a_full_queue_refuses_and_who_leaves_makes_room() {
    let server = start(
        Options {
            queue_len: 1,
            ..options()
        },
        20,
    );
    let client = &server.client;
    let endless = json!({"prompt": "7"});
    // The first one is being answered, the second one waits.
    let mut running = client.stream(TEXT, &endless);
    assert_eq!(running.status, 200);
    running.next().unwrap();
    let waiting = {
        let client = client.clone();
        thread::spawn(move || client.post(TEXT, &json!({"prompt": "x"})).ok())
    };
    client.until(WAITING, 1.0);
    let refused = client.post(TEXT, &endless);
    assert_eq!(refused.error(429)["code"], "queue_full");
    assert!(
        refused
            .head
            .iter()
            .any(|line| line.starts_with("retry-after: ")),
        "{refused:?}"
    );
    assert_eq!(client.metric("spillgate_queue_full_total"), 1.0);
    drop(running);
    let answer = waiting.join().unwrap();
    assert_eq!(answer["choices"][0]["text"], "yz");
    client.until(CANCELLED, 1.0);
}

#[test]
fn who_leaves_is_not_answered_any_further() {
    let server = start(options(), 20);
    let client = &server.client;
    // Streamed, and whole: a connection that closes without reading.
    let mut stream = client.stream(TEXT, &json!({"prompt": "7"}));
    stream.next().unwrap();
    drop(stream);
    client.until(CANCELLED, 1.0);
    let body = json!({"prompt": "7"}).to_string();
    let head = format!(
        "POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut socket = std::net::TcpStream::connect(client.address).unwrap();
    std::io::Write::write_all(&mut socket, head.as_bytes()).unwrap();
    client.until(BUSY, 1.0);
    drop(socket);
    client.until(CANCELLED, 2.0);
    client.until(BUSY, 0.0);
}

#[test]
fn time_is_limited_for_who_runs_and_who_waits() {
    let server = start(
        Options {
            timeout: Duration::from_secs(1),
            ..options()
        },
        20,
    );
    let client = &server.client;
    let mut running = client.stream(TEXT, &json!({"prompt": "7"}));
    running.next().unwrap();
    let second = {
        let client = client.clone();
        thread::spawn(move || client.post(TEXT, &json!({"prompt": "8"})))
    };
    let last = running.rest().pop().unwrap();
    assert!(
        last.contains("\"code\":\"timeout\""),
        "told in the stream: {last}"
    );
    // It had some milliseconds left, or none.
    second.join().unwrap().error(504);
    client.until(BUSY, 0.0);
    assert_eq!(
        client.post(TEXT, &json!({"prompt": "x"})).ok()["choices"][0]["text"],
        "yz"
    );
}

#[test]
fn a_model_that_fails_is_told_of_and_the_next_one_is_answered() {
    let server = start(options(), 0);
    let error = server
        .client
        .post(TEXT, &json!({"prompt": "ab!"}))
        .error(500);
    assert_eq!(error["message"], "the model stumbled");
    let next = server.client.post(TEXT, &json!({"prompt": "ab"})).ok();
    assert_eq!(
        next["usage"]["prompt_tokens_details"]["cached_tokens"], 0,
        "it began anew"
    );
}

#[test]
fn a_bug_in_the_model_ends_the_server_instead_of_leaving_clients_alone() {
    let mut server = start(options(), 0);
    server.client.post(TEXT, &json!({"prompt": "?"})).error(500);
    assert!(server.ended().is_err(), "the panic is not swallowed");
}

#[test]
fn at_the_end_the_running_answer_is_finished_and_who_waits_is_told() {
    let mut server = start(options(), 40);
    let client = server.client.clone();
    // A connection that stays open, and is idle, does not hold the end.
    let mut idle = std::net::TcpStream::connect(client.address).unwrap();
    std::io::Write::write_all(
        &mut idle,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    )
    .unwrap();
    let mut running = client.stream(TEXT, &json!({"prompt": "a"}));
    running.next().unwrap();
    let waiting = {
        let client = client.clone();
        thread::spawn(move || client.post(TEXT, &json!({"prompt": "x"})))
    };
    client.until(WAITING, 1.0);
    server.ask_to_end();
    let refused = waiting.join().unwrap();
    assert_eq!(refused.error(503)["code"], "shutting_down");
    let (_, rest) = chunks(running.rest());
    assert!(rest.ends_with("xyz"), "{rest}");
    let begun = Instant::now();
    server.ended().unwrap().unwrap();
    assert!(
        begun.elapsed() < Duration::from_secs(2),
        "{:?}",
        begun.elapsed()
    );
    assert!(std::net::TcpStream::connect(client.address).is_err());
}

#[test]
fn an_answer_that_takes_longer_than_its_grace_is_cut_and_told() {
    let mut server = start(
        Options {
            grace: Duration::from_millis(200),
            ..options()
        },
        20,
    );
    let mut running = server.client.stream(TEXT, &json!({"prompt": "7"}));
    running.next().unwrap();
    server.ask_to_end();
    let last = running.rest().pop().unwrap();
    assert!(last.contains("\"code\":\"shutting_down\""), "{last}");
    server.ended().unwrap().unwrap();
}
