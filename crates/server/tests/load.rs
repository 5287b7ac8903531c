//! Several clients, impatient ones, and the end.

mod common;

use std::thread;
use std::time::{Duration, Instant};

use common::client::chunks;
use common::{Alphabet, one_by_one, options, start, start_model};
use serde_json::json;
use server::Options;

const TEXT: &str = "/v1/completions";
const BUSY: &str = "spillgate_busy";
const WAITING: &str = "spillgate_queue_length ";
const RUNNING: &str = "spillgate_running ";
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
            ..one_by_one()
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
            ..one_by_one()
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
    let mut server = start(one_by_one(), 40);
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

#[test]
fn answers_come_side_by_side() {
    let server = start(options(), 20);
    let client = &server.client;
    let mut endless: Vec<_> = (0..3)
        .map(|i| client.stream(TEXT, &json!({"prompt": i.to_string()})))
        .collect();
    for stream in &mut endless {
        stream.next().unwrap();
    }
    client.until(RUNNING, 3.0);
    // While they run, another one begins and ends.
    let answer = client.post(TEXT, &json!({"prompt": "x"})).ok();
    assert_eq!(answer["choices"][0]["text"], "yz");
    client.until(RUNNING, 3.0);
    // Places are for four: the fifth waits, and leaves one when it may not be patient.
    let mut fourth = client.stream(TEXT, &json!({"prompt": "8"}));
    fourth.next().unwrap();
    let fifth = {
        let client = client.clone();
        thread::spawn(move || client.post(TEXT, &json!({"prompt": "w"})).ok())
    };
    client.until(WAITING, 1.0);
    drop(endless.pop());
    assert_eq!(fifth.join().unwrap()["choices"][0]["text"], "xyz");
    for (i, stream) in endless.into_iter().enumerate() {
        let (_, text) = chunks(stream.rest());
        assert!(text.chars().all(|c| c.to_string() == i.to_string()));
    }
}

#[test]
fn a_short_prompt_does_not_wait_for_a_long_one() {
    // 2000 tokens of 1 ms, a chunk of 100 at a time.
    let mut model = Alphabet::new(1);
    (model.n_ctx, model.step_max, model.prompt_token_ms) = (3000, 100, 1);
    let server = start_model(options(), model);
    let client = &server.client;
    let long = {
        let client = client.clone();
        thread::spawn(move || {
            let begun = Instant::now();
            let answer = client.post(TEXT, &json!({"prompt": "y".repeat(2000)})).ok();
            assert_eq!(answer["choices"][0]["text"], "z");
            begun.elapsed()
        })
    };
    client.until(RUNNING, 1.0);
    let begun = Instant::now();
    let mut short = client.stream(TEXT, &json!({"prompt": "abcd"}));
    short.next().unwrap();
    let ttft = begun.elapsed();
    let (_, rest) = chunks(short.rest());
    assert!(rest.ends_with("xyz"), "{rest}");
    let all = begun.elapsed();
    let long = long.join().unwrap();
    assert!(long > Duration::from_secs(2), "{long:?}");
    // Two chunks, and some time for a busy machine.
    assert!(ttft < Duration::from_millis(600), "{ttft:?}");
    // Its twenty tokens came with chunks that take no longer than 100 ms.
    assert!(all < long, "{all:?} {long:?}");
}

#[test]
fn beginnings_are_shared_with_whoever_has_them() {
    let server = start(options(), 0);
    let client = &server.client;
    let cached = |prompt: &str| {
        let answer = client.post(TEXT, &json!({"prompt": prompt})).ok();
        let usage = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
        usage.as_u64().unwrap()
    };
    assert_eq!(cached("one x"), 0);
    assert_eq!(cached("two w"), 0);
    // Both are still there, with their answers, but the last token is computed for its logits.
    assert_eq!(cached("one xyz"), 6);
    assert_eq!(cached("two wx"), 5);
    assert_eq!(cached("one xyz"), 6);
    // The beginning that is common, though it ends differently.
    assert_eq!(cached("one v"), 4);
    // Of one that is being answered.
    let mut running = client.stream(TEXT, &json!({"prompt": "three 7"}));
    running.next().unwrap();
    assert_eq!(cached("three x"), 6);
}

#[test]
fn who_has_no_room_waits_or_gives_way_and_loses_nothing() {
    // Slow enough that all are there before the first has its answer.
    let mut model = Alphabet::new(1);
    (model.n_ctx, model.cells) = (500, 700);
    let server = start_model(options(), model);
    let client = &server.client;
    let answers: Vec<String> = thread::scope(|scope| {
        let ask = |i: usize| {
            let answer = client.post(TEXT, &json!({"prompt": i.to_string()})).ok();
            assert_eq!(answer["choices"][0]["finish_reason"], "length");
            answer["choices"][0]["text"].as_str().unwrap().to_owned()
        };
        let threads: Vec<_> = (0..4).map(|i| scope.spawn(move || ask(i))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    for (i, answer) in answers.iter().enumerate() {
        assert_eq!(*answer, i.to_string().repeat(500));
    }
    assert!(client.metric("spillgate_gave_way_total") >= 1.0);
    client.until(RUNNING, 0.0);
    client.until(WAITING, 0.0);
}
