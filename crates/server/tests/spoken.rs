//! Tools, reasoning, answers that follow a rule, several answers, and the other APIs.

mod common;

use common::client::{Client, chunks};
use common::{Alphabet, N_CTX, options, output, start, start_embedder, start_model};
use engine::embed::Pooling;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

const CALL: &str = r#"<tool_call>
{"name": "weather", "arguments": {"city": "Bonn"}}
</tool_call>"#;

fn server() -> common::Running {
    let mut model = Alphabet::new(0);
    model.n_ctx = 2000;
    start_model(options(), model)
}

fn say(text: &str) -> Value {
    json!([{"role": "user", "content": format!("SAY:{text}:YAS")}])
}

fn parameters() -> Value {
    json!({"type": "object", "properties": {"city": {"enum": ["Bonn", "Ulm"]}},
        "required": ["city"], "additionalProperties": false})
}

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "weather", "parameters": parameters()}}])
}

/// The data of a stream's events, each with its name as its type.
fn events(client: &Client, path: &str, request: &Value) -> Vec<Value> {
    let stream = client.stream(path, request);
    assert_eq!(stream.status, 200);
    let data = stream.rest();
    data.iter()
        .map(|data| serde_json::from_str(data).unwrap())
        .collect()
}

#[test]
fn calls_are_taken_out_of_the_text() {
    let server = server();
    let text = format!("<think>Hm.</think>I look.\n{CALL}");
    let request = json!({"messages": say(&text), "tools": tools()});
    let whole = server.client.post(CHAT, &request).ok();
    let choice = &whole["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    let message = &choice["message"];
    assert_eq!(message["content"], "I look.");
    assert_eq!(message["reasoning_content"], "Hm.");
    let call = &message["tool_calls"][0];
    assert_eq!(
        call["function"],
        json!({"name": "weather", "arguments": r#"{"city": "Bonn"}"#})
    );
    assert!(call["id"].as_str().unwrap().starts_with("call_"));

    let (pieces, text) = chunks(server.client.stream(CHAT, &request).rest());
    assert_eq!(text, "I look.");
    let deltas = || pieces.iter().map(|piece| &piece["choices"][0]["delta"]);
    let thought: String = deltas()
        .filter_map(|d| d["reasoning_content"].as_str())
        .collect();
    assert_eq!(thought, "Hm.");
    let calls: Vec<&Value> = deltas().filter_map(|d| d["tool_calls"].get(0)).collect();
    assert_eq!(calls[0]["function"]["name"], "weather");
    assert_eq!(calls[0]["index"], 0);
    let arguments: String = calls
        .iter()
        .filter_map(|c| c["function"]["arguments"].as_str())
        .collect();
    assert_eq!(arguments, r#"{"city": "Bonn"}"#);
    assert!(calls.len() > 5, "as they come: {calls:?}");
    let finish = pieces.last().unwrap()["choices"][0]["finish_reason"].clone();
    assert_eq!(finish, "tool_calls");

    // Without tools, or if none is to be called, a call is text.
    for request in [
        json!({"messages": say(CALL)}),
        json!({"messages": say(CALL), "tools": tools(), "tool_choice": "none"}),
    ] {
        let message = server.client.post(CHAT, &request).ok()["choices"][0]["message"].clone();
        assert_eq!(message["content"], CALL);
        assert!(message.get("tool_calls").is_none());
    }
}

#[test]
fn a_call_can_be_demanded() {
    let server = server();
    for choice in [
        json!("required"),
        json!({"type": "function", "function": {"name": "weather"}}),
    ] {
        let request = json!({"messages": [{"role": "user", "content": "abc"}], "tools": tools(), "tool_choice": choice});
        let whole = server.client.post(CHAT, &request).ok();
        let message = &whole["choices"][0]["message"];
        assert_eq!(message["content"], Value::Null, "{whole}");
        assert_eq!(
            message["tool_calls"][0]["function"],
            json!({"name": "weather", "arguments": r#"{"city": "Bonn"}"#})
        );
        assert_eq!(whole["choices"][0]["finish_reason"], "tool_calls");
    }
    let request = json!({"messages": say("x"), "tools": tools(), "tool_choice": {"type": "function", "function": {"name": "other"}}});
    assert_eq!(
        server.client.post(CHAT, &request).error(400)["param"],
        "tool_choice"
    );
}

#[test]
fn answers_follow_schemas_and_grammars() {
    let server = server();
    let schema = json!({"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
        "required": ["a", "b"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": true}});
    let request = json!({"messages": [{"role": "user", "content": "abc"}], "response_format": format, "logprobs": true});
    for _ in 0..2 {
        let whole = server.client.post(CHAT, &request).ok();
        let choice = &whole["choices"][0];
        assert_eq!(choice["message"]["content"], r#"{"a": "x", "b": false}"#);
        assert_eq!(choice["finish_reason"], "stop");
        // Probabilities are the model's own.
        assert!(
            choice["logprobs"]["content"][0]["logprob"]
                .as_f64()
                .unwrap()
                < -5.0
        );
    }
    let (_, streamed) = chunks(server.client.stream(CHAT, &request).rest());
    assert_eq!(streamed, r#"{"a": "x", "b": false}"#);
    let text = |rule: Value| {
        let mut request = json!({"prompt": "abc"});
        request
            .as_object_mut()
            .unwrap()
            .extend(rule.as_object().unwrap().clone());
        server.client.post(TEXT, &request).ok()["choices"][0]["text"].clone()
    };
    assert_eq!(text(json!({"guided_regex": "[x-z]{2}d"})), "xyd");
    assert_eq!(text(json!({"grammar": "start: \"q\" /[0-9]/"})), "q0");
    assert_eq!(
        text(json!({"guided_json": "{\"const\": [1, \"a\"]}"})),
        r#"[1, "a"]"#
    );

    let mut deep = json!({});
    for _ in 0..100 {
        deep = json!({"items": deep});
    }
    let many: Vec<Value> = (0..300).map(|i| json!({"const": "x".repeat(i)})).collect();
    for (key, rule) in [
        ("json_schema", json!({"type": "nothing"})),
        ("json_schema", json!([1])),
        ("json_schema", deep),
        ("json_schema", json!({"$ref": "https://example.org/schema"})),
        ("json_schema", json!({"anyOf": many, "not": {}})),
        (
            "json_schema",
            json!({"type": "integer", "minimum": 5, "maximum": 1}),
        ),
        ("guided_json", json!("{")),
        ("guided_regex", json!("(")),
        ("grammar", json!("start: nothing")),
        ("grammar", json!("root ::= \"a\"")),
        ("response_format", json!({"type": "json_schema"})),
    ] {
        let error = server
            .client
            .post(TEXT, &json!({"prompt": "a", key: rule}))
            .error(400);
        assert_eq!(error["param"], key, "{error}");
    }
    // Of two rules one would not be followed.
    let two = json!({"prompt": "a", "guided_regex": "a", "grammar": "start: \"b\""});
    let error = server.client.post(TEXT, &two).error(400);
    assert_eq!(error["param"], "grammar", "{error}");
    let one = json!({"response_format": {"type": "text"}, "guided_regex": "b"});
    assert_eq!(text(one), "b");
    assert_eq!(
        text(json!({})),
        "defghijklmnopqrstuvwxyz",
        "it still answers"
    );
}

#[test]
fn several_answers_to_one_prompt() {
    let server = server();
    let request =
        json!({"prompt": "SAY:hello:YAS", "n": 3, "stream_options": {"include_usage": true}});
    let whole = server.client.post(TEXT, &request).ok();
    let choices = whole["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!(
            (&choice["index"], &choice["text"]),
            (&json!(index), &json!("hello"))
        );
    }
    assert_eq!(whole["usage"]["prompt_tokens"], 13);
    assert_eq!(whole["usage"]["completion_tokens"], 18);
    let mut data = server.client.stream(TEXT, &request).rest();
    assert_eq!(data.pop().unwrap(), "[DONE]");
    let pieces: Vec<Value> = data
        .iter()
        .map(|d| serde_json::from_str(d).unwrap())
        .collect();
    for index in 0..3 {
        let of = |p: &&Value| p["choices"][0]["index"] == index;
        let texts = pieces
            .iter()
            .filter(of)
            .filter_map(|p| p["choices"][0]["text"].as_str());
        assert_eq!(texts.collect::<String>(), "hello");
    }
    assert_eq!(pieces.last().unwrap()["usage"]["completion_tokens"], 18);
    // With random numbers of their own.
    let random = json!({"prompt": "a", "n": 4, "temperature": 50, "top_k": 0, "top_p": 1, "min_p": 0, "max_tokens": 20, "logit_bias": {"36": -1e6, "66": -1e6}});
    let whole = server.client.post(TEXT, &random).ok();
    let choices = whole["choices"].as_array().unwrap();
    assert!(
        choices
            .iter()
            .skip(1)
            .all(|choice| choice["text"] != choices[0]["text"])
    );
}

#[test]
fn the_responses_api() {
    let server = server();
    let client = &server.client;
    let request = json!({"model": "alphabet", "instructions": "abc", "input": "SAY:hello:YAS", "max_output_tokens": 50});
    let whole = client.post(RESPONSES, &request).ok();
    assert_eq!(
        (&whole["object"], &whole["status"]),
        (&json!("response"), &json!("completed"))
    );
    let message = &whole["output"][0];
    assert_eq!(
        (&message["type"], &message["role"]),
        (&json!("message"), &json!("assistant"))
    );
    assert_eq!(message["content"][0]["text"], "hello");
    assert_eq!(whole["usage"]["output_tokens"], 6);

    let tools = json!([{"type": "function", "name": "weather", "parameters": parameters()}]);
    let input = json!([
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": format!("SAY:<think>Hm</think>Yes.{CALL}:YAS")},
    ]);
    let request = json!({"input": input, "tools": tools});
    let whole = client.post(RESPONSES, &request).ok();
    let kinds: Vec<&str> = whole["output"]
        .as_array()
        .unwrap()
        .iter()
        .map(|o| o["type"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert_eq!(whole["output"][2]["arguments"], r#"{"city": "Bonn"}"#);

    let events = events(client, RESPONSES, &request);
    for (n, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], n);
    }
    let of = |kind: &str| {
        events
            .iter()
            .filter(move |e| e["type"] == kind)
            .collect::<Vec<_>>()
    };
    let text: String = of("response.output_text.delta")
        .iter()
        .map(|e| e["delta"].as_str().unwrap())
        .collect();
    assert_eq!(text, "Yes.");
    assert_eq!(of("response.output_text.done")[0]["text"], "Yes.");
    let arguments: String = of("response.function_call_arguments.delta")
        .iter()
        .map(|e| e["delta"].as_str().unwrap())
        .collect();
    assert_eq!(arguments, r#"{"city": "Bonn"}"#);
    assert_eq!(of("response.output_item.added").len(), 3);
    let done: Vec<Value> = of("response.output_item.done")
        .iter()
        .map(|e| e["item"]["type"].clone())
        .collect();
    assert_eq!(done, ["reasoning", "message", "function_call"]);
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.completed");
    assert_eq!(last["response"]["output"].as_array().unwrap().len(), 3);

    let cut = client
        .post(RESPONSES, &json!({"input": "a", "max_output_tokens": 2}))
        .ok();
    assert_eq!(cut["status"], "incomplete");
    let format = json!({"format": {"type": "json_schema", "name": "s", "schema": {"const": 7}}});
    let ruled = client
        .post(RESPONSES, &json!({"input": "a", "text": format}))
        .ok();
    assert_eq!(ruled["output"][0]["content"][0]["text"], "7");
    for wrong in [
        json!({}),
        json!({"input": 3}),
        json!({"input": [{"type": "image"}]}),
        json!({"input": [{"role": "king", "content": "x"}]}),
        json!({"input": "x", "tools": [{"type": "web_search"}]}),
        json!({"input": "x", "previous_response_id": "resp_1"}),
    ] {
        client.post(RESPONSES, &wrong).error(400);
    }
}

#[test]
fn the_messages_api() {
    let server = server();
    let client = &server.client;
    let request =
        json!({"model": "alphabet", "max_tokens": 100, "system": "abc", "messages": say("hello")});
    let whole = client.post(MESSAGES, &request).ok();
    assert_eq!(
        (&whole["type"], &whole["stop_reason"]),
        (&json!("message"), &json!("end_turn"))
    );
    assert_eq!(whole["content"], json!([{"type": "text", "text": "hello"}]));
    let input = whole["usage"]["input_tokens"].as_u64().unwrap();
    let counted = client.post("/v1/messages/count_tokens", &request).ok();
    assert_eq!(counted["input_tokens"], input);

    let tools = json!([{"name": "weather", "input_schema": parameters()}]);
    let messages = json!([
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}, {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Ulm"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "rain"}]},
            {"type": "text", "text": format!("SAY:<think>Hm</think>Yes.{CALL}:YAS")}]},
    ]);
    let request = json!({"max_tokens": 200, "messages": messages, "tools": tools});
    let whole = client.post(MESSAGES, &request).ok();
    assert_eq!(whole["stop_reason"], "tool_use");
    let kinds: Vec<&str> = whole["content"]
        .as_array()
        .unwrap()
        .iter()
        .map(|o| o["type"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["thinking", "text", "tool_use"]);
    assert_eq!(whole["content"][2]["input"], json!({"city": "Bonn"}));

    let events = events(client, MESSAGES, &request);
    assert_eq!(events[0]["type"], "message_start");
    assert_eq!(events.last().unwrap()["type"], "message_stop");
    let starts: Vec<&Value> = events
        .iter()
        .filter(|e| e["type"] == "content_block_start")
        .collect();
    assert_eq!(starts.len(), 3);
    assert_eq!(
        events
            .iter()
            .filter(|e| e["type"] == "content_block_stop")
            .count(),
        3
    );
    let deltas = |key: &str| -> String {
        events
            .iter()
            .filter_map(|e| e["delta"][key].as_str())
            .collect()
    };
    assert_eq!(deltas("thinking"), "Hm");
    assert_eq!(deltas("text"), "Yes.");
    assert_eq!(deltas("partial_json"), r#"{"city": "Bonn"}"#);
    let end = &events[events.len() - 2];
    assert_eq!(end["delta"]["stop_reason"], "tool_use");

    let any = json!({"max_tokens": 200, "messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": {"type": "any"}});
    assert_eq!(
        client.post(MESSAGES, &any).ok()["content"][0]["input"],
        json!({"city": "Bonn"})
    );
    let stop = json!({"max_tokens": 200, "messages": [{"role": "user", "content": "a"}], "stop_sequences": ["f"]});
    let stopped = client.post(MESSAGES, &stop).ok();
    assert_eq!(
        (&stopped["stop_reason"], &stopped["stop_sequence"]),
        (&json!("stop_sequence"), &json!("f"))
    );
    // The scripted model answers what it is told, were it not for the rule.
    let format = json!({"type": "json_schema", "schema": {"const": {"a": 1}}});
    for ruled in [
        json!({"output_config": {"format": format}}),
        json!({"output_format": format}),
    ] {
        let mut request = json!({"max_tokens": 50, "messages": say("hello")});
        let fields = ruled.as_object().unwrap().clone();
        request.as_object_mut().unwrap().extend(fields);
        let answer = client.post(MESSAGES, &request).ok();
        assert_eq!(answer["content"][0]["text"], r#"{"a": 1}"#);
    }
    let wrong = client.post(MESSAGES, &json!({"messages": []}));
    assert_eq!(wrong.status, 400);
    let error = wrong.json();
    assert_eq!(
        (&error["type"], &error["error"]["type"]),
        (&json!("error"), &json!("invalid_request_error"))
    );
}

#[test]
fn a_model_that_continues_text_makes_no_embeddings() {
    let server = start(options(), 0);
    let error = server
        .client
        .post("/v1/embeddings", &json!({"input": "x"}))
        .error(400);
    assert_eq!(error["code"], "unsupported_model");
}

#[test]
fn texts_become_vectors_of_length_one() {
    for pooling in [Pooling::Mean, Pooling::Last] {
        // Prompts come in chunks of 16 tokens at most, and a prompt has the begin of another.
        let mut model = Alphabet::new(0);
        model.step_max = 16;
        let server = start_embedder(options(), model, Some(pooling));
        let texts: Vec<String> = (1..8).map(|n| "abcdefghij".repeat(n)).collect();
        let tokens = |text: &str| -> Vec<u32> { text.bytes().map(|b| u32::from(b) + 3).collect() };
        let wanted = |text: &str| -> [f32; 2] {
            let mut outputs = tokens(text).into_iter().map(output);
            let [x, y] = match pooling {
                Pooling::Mean => outputs.fold([0.0; 2], |a, b| [a[0] + b[0], a[1] + b[1]]),
                Pooling::Last => outputs.next_back().unwrap(),
            };
            let length = x.hypot(y);
            [x / length, y / length]
        };
        let asked = |input: Value| {
            let answer = server
                .client
                .post("/v1/embeddings", &json!({"input": input}));
            answer.ok()
        };
        for input in [
            json!(texts),
            json!(texts.iter().map(|t| tokens(t)).collect::<Vec<_>>()),
        ] {
            let answer = asked(input);
            let data = answer["data"].as_array().unwrap();
            assert_eq!(data.len(), texts.len());
            for (i, (one, text)) in data.iter().zip(&texts).enumerate() {
                assert_eq!(one["index"], i);
                let vector = one["embedding"].as_array().unwrap();
                for (found, wanted) in vector.iter().zip(wanted(text)) {
                    assert!((found.as_f64().unwrap() as f32 - wanted).abs() < 1e-6);
                }
            }
            assert_eq!(answer["usage"]["prompt_tokens"], 280);
        }
        let one = asked(json!("abc"));
        assert_eq!(one, asked(json!(tokens("abc"))));
        // The first value alone is of length one.
        let short = json!({"input": "abc", "dimensions": 1, "encoding_format": "base64"});
        let short = server.client.post("/v1/embeddings", &short).ok();
        assert_eq!(short["data"][0]["embedding"], "AACAPw==");
        for (wrong, field) in [
            (json!({}), "input"),
            (json!({"input": []}), "input"),
            (json!({"input": ["a", 1]}), "input"),
            (json!({"input": ["a", ""]}), "input"),
            (json!({"input": [1, "a"]}), "input"),
            (json!({"input": "a", "dimensions": 3}), "dimensions"),
            (
                json!({"input": "a", "encoding_format": "hex"}),
                "encoding_format",
            ),
        ] {
            let error = server.client.post("/v1/embeddings", &wrong).error(400);
            assert_eq!(error["param"], field, "{wrong}");
        }
        let long = json!({"input": "a".repeat(N_CTX)});
        let error = server.client.post("/v1/embeddings", &long).error(400);
        assert_eq!(error["code"], "context_length_exceeded");
        // Answers go on beside them.
        let text = server
            .client
            .post("/v1/completions", &json!({"prompt": "x"}));
        assert_eq!(text.ok()["choices"][0]["text"], "yz");
    }
}
