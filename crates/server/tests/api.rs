//! What is asked and answered: forms, settings, errors.

mod common;

use common::client::chunks;
use common::{N_CTX, options, start, with_key};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn user(content: &str) -> Value {
    json!([{"role": "user", "content": content}])
}

#[test]
fn a_text_is_continued_whole_and_streamed() {
    let server = start(options(), 0);
    let request = json!({"model": "alphabet", "prompt": "tu"});
    let whole = server.client.post(TEXT, &request).ok();
    assert_eq!(whole["object"], "text_completion");
    assert_eq!(whole["choices"][0]["text"], "vwxyz");
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    // The end is a token, too.
    let usage = json!({"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0}});
    assert_eq!(whole["usage"], usage);

    let (pieces, text) = chunks(server.client.stream(TEXT, &request).rest());
    assert_eq!(text, "vwxyz");
    assert_eq!(pieces.len(), 6, "a token a chunk, and the end: {pieces:?}");
    assert_eq!(pieces[5]["choices"][0]["finish_reason"], "stop");
    assert!(
        pieces
            .iter()
            .all(|p| p["id"] == pieces[0]["id"] && p.get("usage").is_none())
    );
    assert_ne!(pieces[0]["id"], whole["id"]);

    // As tokens, and in a list.
    for prompt in [json!([119, 120]), json!([[119, 120]]), json!(["tu"])] {
        let whole = server.client.post(TEXT, &json!({"prompt": prompt})).ok();
        assert_eq!(whole["choices"][0]["text"], "vwxyz");
    }
}

#[test]
fn a_conversation_is_answered_whole_and_streamed() {
    let server = start(options(), 0);
    let request = json!({"messages": user("tu"), "stream_options": {"include_usage": true}});
    let whole = server.client.post(CHAT, &request).ok();
    assert_eq!(whole["object"], "chat.completion");
    let message = &whole["choices"][0]["message"];
    assert_eq!(
        (&message["role"], &message["content"]),
        (&json!("assistant"), &json!("vwxyz"))
    );

    let (pieces, text) = chunks(server.client.stream(CHAT, &request).rest());
    assert_eq!(text, "vwxyz");
    assert_eq!(pieces[0]["object"], "chat.completion.chunk");
    assert_eq!(pieces[0]["choices"][0]["delta"]["role"], "assistant");
    let [.., end, usage] = &pieces[..] else {
        panic!("{pieces:?}")
    };
    assert_eq!(
        end["choices"][0],
        json!({"index": 0, "delta": {}, "logprobs": null, "finish_reason": "stop"})
    );
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], 6);
    // The whole prompt but its last token is there from before.
    let n = "user says tu".len();
    assert_eq!(usage["usage"]["prompt_tokens"], n);
    assert_eq!(
        usage["usage"]["prompt_tokens_details"]["cached_tokens"],
        n - 1
    );
}

#[test]
fn messages_come_in_parts_with_calls_and_with_tools() {
    let server = start(options(), 0);
    let prompt_tokens = |request: Value| {
        server.client.post(CHAT, &request).ok()["usage"]["prompt_tokens"]
            .as_u64()
            .unwrap()
    };
    let parts = json!([{"role": "developer", "content": [{"type": "text", "text": "t"}, {"type": "text", "text": "u"}]}]);
    assert_eq!(
        prompt_tokens(json!({"messages": parts})),
        "system says tu".len() as u64
    );
    let calls = json!([
        {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function",
            "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "u"},
    ]);
    let n = "assistant says tool says u".len() as u64;
    assert_eq!(prompt_tokens(json!({"messages": calls})), n);
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let with = " with 1 tools ".len() as u64;
    assert_eq!(
        prompt_tokens(json!({"messages": calls, "tools": tools})),
        n + with
    );
    assert_eq!(
        prompt_tokens(json!({"messages": calls, "tools": tools, "tool_choice": "auto"})),
        n + with
    );
    assert_eq!(
        prompt_tokens(json!({"messages": calls, "tools": tools, "tool_choice": "none"})),
        n
    );
}

#[test]
fn settings_shape_the_answer() {
    let server = start(options(), 0);
    let answer = |settings: Value| {
        let mut request = json!({"prompt": "a"});
        request
            .as_object_mut()
            .unwrap()
            .extend(settings.as_object().unwrap().clone());
        let answer = server.client.post(TEXT, &request).ok();
        let choice = &answer["choices"][0];
        let text = |key: &str| choice[key].as_str().unwrap().to_owned();
        (text("text"), text("finish_reason"))
    };
    let is = |text: &str, finish: &str| (text.to_owned(), finish.to_owned());
    assert_eq!(answer(json!({"max_tokens": 3})), is("bcd", "length"));
    assert_eq!(
        answer(json!({"max_tokens": 9, "max_completion_tokens": 2})),
        is("bc", "length")
    );
    assert_eq!(answer(json!({"stop": "ef"})), is("bcd", "stop"));
    assert_eq!(
        answer(json!({"stop": ["x", "d"], "max_tokens": null})),
        is("bc", "stop")
    );
    // The end instead of c, which is forbidden.
    assert_eq!(
        answer(json!({"logit_bias": {"102": -100, "2": 5}})),
        is("b", "stop")
    );
    let random = |seed: i64| {
        answer(json!({"temperature": 50, "top_k": 0, "top_p": 1, "min_p": 0, "seed": seed, "max_tokens": 20})).0
    };
    assert_eq!(random(1), random(1));
    assert_ne!(random(1), random(-2));
    // Whatever switches off what is not supported, or changes no answer.
    let harmless = json!({"n": 1, "best_of": 1, "echo": false, "user": "x", "store": true, "max_tokens": 1,
        "response_format": {"type": "text"}, "stream_options": null, "parallel_tool_calls": true});
    assert_eq!(answer(harmless), is("b", "length"));
    let (text, finish) = {
        let full = server.client.post(TEXT, &json!({"prompt": "7"})).ok();
        let choice = full["choices"][0].clone();
        (
            choice["text"].as_str().unwrap().len(),
            choice["finish_reason"].clone(),
        )
    };
    assert_eq!((text, finish), (N_CTX, json!("length")));
}

#[test]
fn probabilities_are_listed() {
    let server = start(options(), 0);
    let request = json!({"messages": user("x"), "logprobs": true, "top_logprobs": 2});
    let whole = server.client.post(CHAT, &request).ok();
    let content = whole["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap();
    assert_eq!(content.len(), 2, "y and z, not the end: {content:?}");
    assert_eq!(
        (&content[0]["token"], &content[0]["bytes"]),
        (&json!("y"), &json!([121]))
    );
    // One logit of 10 and 258 of 0.
    let logprob = -(1.0 + 258.0 * (-10.0f64).exp()).ln();
    let found = content[0]["logprob"].as_f64().unwrap();
    assert!((found - logprob).abs() < 1e-5, "{found} {logprob}");
    let top = content[0]["top_logprobs"].as_array().unwrap();
    assert_eq!((top.len(), &top[0]["token"]), (2, &json!("y")));
    assert!((top[1]["logprob"].as_f64().unwrap() - (logprob - 10.0)).abs() < 1e-5);

    let (pieces, _) = chunks(server.client.stream(CHAT, &request).rest());
    let streamed = pieces
        .iter()
        .filter_map(|p| p["choices"][0]["logprobs"]["content"].as_array());
    assert_eq!(streamed.flatten().cloned().collect::<Vec<_>>(), *content);

    let text = json!({"prompt": "x", "logprobs": 1});
    let lists = server.client.post(TEXT, &text).ok()["choices"][0]["logprobs"].clone();
    assert_eq!(lists["tokens"], json!(["y", "z"]));
    assert_eq!(lists["text_offset"], json!([0, 1]));
    assert_eq!(lists["top_logprobs"][1].as_object().unwrap().len(), 1);
    assert_eq!(lists["token_logprobs"].as_array().unwrap().len(), 2);
}

#[test]
fn what_makes_no_sense_is_refused_in_the_apis_form_and_harms_nobody() {
    let server = start(options(), 0);
    let client = &server.client;
    let long = "x".repeat(N_CTX);
    let refused = [
        (json!({}), "messages", ""),
        (json!({"messages": []}), "messages", ""),
        (json!({"messages": "hello"}), "messages", ""),
        (json!({"messages": [1]}), "messages[0]", ""),
        (
            json!({"messages": [{"content": "x"}]}),
            "messages[0].role",
            "",
        ),
        (
            json!({"messages": [{"role": "king", "content": "x"}]}),
            "messages[0].role",
            "",
        ),
        (
            json!({"messages": [{"role": "user"}]}),
            "messages[0].content",
            "",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            "messages[0].content",
            "unsupported_parameter",
        ),
        (
            json!({"messages": user(&long)}),
            "",
            "context_length_exceeded",
        ),
        (json!({"messages": user("x"), "model": 3}), "model", ""),
        (json!({"messages": user("x"), "n": 17}), "n", ""),
        (json!({"messages": user("x"), "n": 0}), "n", ""),
        (
            json!({"messages": user("x"), "max_tokens": 0}),
            "max_tokens",
            "",
        ),
        (
            json!({"messages": user("x"), "max_tokens": -1}),
            "max_tokens",
            "",
        ),
        (
            json!({"messages": user("x"), "max_tokens": 1.5}),
            "max_tokens",
            "",
        ),
        (
            json!({"messages": user("x"), "temperature": "hot"}),
            "temperature",
            "",
        ),
        (
            json!({"messages": user("x"), "temperature": -1}),
            "temperature",
            "",
        ),
        (
            json!({"messages": user("x"), "temperature": 1e300}),
            "temperature",
            "",
        ),
        (json!({"messages": user("x"), "top_p": 2}), "top_p", ""),
        (
            json!({"messages": user("x"), "stream": "yes"}),
            "stream",
            "",
        ),
        (json!({"messages": user("x"), "stop": 3}), "stop", ""),
        (json!({"messages": user("x"), "stop": [""]}), "stop", ""),
        (
            json!({"messages": user("x"), "logit_bias": {"x": 1}}),
            "logit_bias",
            "",
        ),
        (
            json!({"messages": user("x"), "logit_bias": {"99999": 1}}),
            "logit_bias",
            "",
        ),
        (
            json!({"messages": user("x"), "logprobs": true, "top_logprobs": 21}),
            "top_logprobs",
            "",
        ),
        (
            json!({"messages": user("x"), "top_logprobs": 1}),
            "top_logprobs",
            "",
        ),
        (
            json!({"messages": user("x"), "tool_choice": "required"}),
            "tool_choice",
            "",
        ),
        (
            json!({"messages": user("x"), "response_format": {"type": "yaml"}}),
            "response_format",
            "",
        ),
        (json!({"messages": user("x"), "tools": [1]}), "tools", ""),
    ];
    for (request, param, code) in refused {
        for stream in [false, true] {
            let mut request = request.clone();
            if stream && request.get("stream").is_none() {
                request["stream"] = true.into();
            }
            let error = client.post(CHAT, &request).error(400);
            let found = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
            assert_eq!(
                (found("param").as_str(), found("code").as_str()),
                (param, code),
                "{request}: {error}"
            );
        }
    }
    for prompt in [
        json!(null),
        json!([]),
        json!([-1]),
        json!([259]),
        json!(["a", "b"]),
        json!({"a": 1}),
        json!(""),
    ] {
        client.post(TEXT, &json!({"prompt": prompt})).error(400);
    }
    let json = client.with("Content-Type", "application/json");
    let deep = "[".repeat(100_000);
    let bodies: [&[u8]; 7] = [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{\"messages\": \"\xff\"}",
        b"{\"max_tokens\": 1e999}",
        deep.as_bytes(),
    ];
    for body in bodies {
        json.raw("POST", CHAT, body).error(400);
    }
    let error = client
        .post(CHAT, &json!({"model": "gpt-4", "messages": user("x")}))
        .error(404);
    assert_eq!(error["code"], "model_not_found");
    assert!(error["message"].as_str().unwrap().contains("alphabet"));
    client.raw("POST", CHAT, b"{}").error(415);
    json.raw("POST", CHAT, &vec![b' '; 2 << 20]).error(413);
    client.get("/v1/nothing").error(404);
    client.get("/v1/models/other").error(404);
    client.get(CHAT).error(405);
    client.post("/health", &json!({})).error(405);
    // It still answers.
    let whole = client.post(TEXT, &json!({"prompt": "y"})).ok();
    assert_eq!(whole["choices"][0]["text"], "z");
}

#[test]
fn only_the_right_key_opens() {
    let server = start(with_key("secret"), 0);
    let client = &server.client;
    client.get("/health").ok();
    let request = json!({"prompt": "y"});
    let refused = client.post(TEXT, &request);
    assert_eq!(refused.error(401)["code"], "invalid_api_key");
    assert!(
        refused
            .head
            .iter()
            .any(|line| line == "www-authenticate: bearer")
    );
    for path in ["/metrics", "/v1/models", "/v1/plan", "/v1/nothing"] {
        client
            .with("Authorization", "Bearer secrets")
            .get(path)
            .error(401);
    }
    client
        .with("Authorization", "Bearer secret")
        .post(TEXT, &request)
        .ok();
    client.with("x-api-key", "secret").post(TEXT, &request).ok();
}

#[test]
fn web_pages_are_kept_out() {
    let server = start(options(), 0);
    let client = &server.client;
    client
        .with("Host", "evil.example")
        .get("/v1/models")
        .error(403);
    let reply = client
        .with("Host", "localhost")
        .with("Origin", "http://evil.example")
        .get("/v1/models");
    assert!(
        !reply
            .head
            .iter()
            .any(|line| line.starts_with("access-control")),
        "{reply:?}"
    );
    reply.ok();
}

#[test]
fn what_is_beside_the_answers() {
    let server = start(options(), 0);
    let client = &server.client;
    assert_eq!(client.get("/health").ok(), json!({"status": "ok"}));
    assert_eq!(client.get("/v1/models").ok()["data"][0]["id"], "alphabet");
    assert_eq!(
        client.get("/v1/models/alphabet").ok()["context_length"],
        N_CTX
    );
    assert_eq!(client.get("/v1/plan").ok(), json!({"fits": true}));
    let tokens = client.post("/tokenize", &json!({"content": "tu"})).ok();
    assert_eq!(tokens, json!({"tokens": [119, 120], "count": 2}));
    let text = client
        .post("/detokenize", &json!({"tokens": [119, 120]}))
        .ok();
    assert_eq!(text, json!({"content": "tu"}));
    client.post("/tokenize", &json!({})).error(400);
    client
        .post("/detokenize", &json!({"tokens": [259]}))
        .error(400);
    client
        .post("/detokenize", &json!({"tokens": "x"}))
        .error(400);

    client.post(TEXT, &json!({"prompt": "tu"})).ok();
    client.post(TEXT, &json!({"prompt": "tuv"})).ok();
    let expected = [
        ("prompt_tokens_total", 3.0),
        ("cached_tokens_total", 2.0),
        ("generated_tokens_total", 11.0),
        ("answers_total{outcome=\"done\"}", 2.0),
        ("http_responses_total{class=\"4xx\"}", 3.0),
        ("time_to_first_token_seconds_count", 2.0),
        ("time_to_first_token_seconds_bucket{le=\"+Inf\"}", 2.0),
        ("queue_length ", 0.0),
    ];
    for (name, value) in expected {
        client.until(&format!("spillgate_{name}"), value);
    }
}
