use super::*;
use serde_json::json;

fn expected(reasons: bool, tools: &[&str]) -> Expected {
    let tool = |name: &&str| Tool {
        name: (*name).to_owned(),
        parameters: json!({"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}),
    };
    Expected {
        reasons,
        tools: tools.iter().map(tool).collect(),
        ..Expected::default()
    }
}

/// What a text says, neighbours of a kind as one.
fn read(expected: &Expected, pieces: &[&str]) -> Vec<Said> {
    let mut reader = Reader::new(expected.clone());
    let mut said = Vec::new();
    for piece in pieces {
        reader.push(piece, &mut said);
    }
    reader.finish(&mut said);
    let calls = said.iter().filter(|s| matches!(s, Said::Call(_))).count();
    assert_eq!(reader.has_called(), calls > 0);
    let mut joined: Vec<Said> = Vec::new();
    for one in said {
        match (joined.last_mut(), one) {
            (Some(Said::Text(a)), Said::Text(b))
            | (Some(Said::Reasoning(a)), Said::Reasoning(b))
            | (Some(Said::Arguments(a)), Said::Arguments(b)) => a.push_str(&b),
            (_, one) => joined.push(one),
        }
    }
    joined
}

/// The same whole, by characters, and by threes.
fn check(expected: &Expected, text: &str, wanted: &[Said]) {
    assert_eq!(read(expected, &[text]), wanted, "whole: {text}");
    let chars: Vec<char> = text.chars().collect();
    for size in [1, 3] {
        let pieces: Vec<String> = chars.chunks(size).map(|c| c.iter().collect()).collect();
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        assert_eq!(read(expected, &pieces), wanted, "by {size}: {text}");
    }
}

fn text(text: &str) -> Said {
    Said::Text(text.to_owned())
}

fn thought(text: &str) -> Said {
    Said::Reasoning(text.to_owned())
}

fn call(name: &str, arguments: &str) -> [Said; 2] {
    [
        Said::Call(name.to_owned()),
        Said::Arguments(arguments.to_owned()),
    ]
}

#[test]
fn without_expectations_text_is_text() {
    let plain = Expected::default();
    let odd = " <think>a</think> <tool_call>{} \n";
    check(&plain, odd, &[text(odd)]);
}

#[test]
fn reasoning_is_told_apart() {
    let reasons = expected(true, &[]);
    check(
        &reasons,
        "<think>\nwell, 1 < 2\n</think>\n\nYes. a </b> <th",
        &[thought("well, 1 < 2\n"), text("Yes. a </b> <th")],
    );
    check(&reasons, "<think>\n\n</think>\n\nYes.", &[text("Yes.")]);
    check(&reasons, "No thought. ", &[text("No thought. ")]);
    check(&reasons, "<think>cut off", &[thought("cut off")]);
    let midst = Expected {
        begins_reasoning: true,
        ..reasons
    };
    check(&midst, "hm</think>Yes", &[thought("hm"), text("Yes")]);
}

#[test]
fn calls_as_hermes_writes_them() {
    let tools = expected(true, &["weather", "time"]);
    let [a, b] = call("weather", r#"{"city": "Bonn", "days": 2}"#);
    let one = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bonn\", \"days\": 2}}\n</tool_call>";
    check(&tools, one, &[a.clone(), b.clone()]);
    let [c, d] = call("time", "{}");
    let two =
        format!("<think>x</think>I look.\n{one}\n<tool_call>{{\"name\": \"time\"}}</tool_call>");
    check(
        &tools,
        &two,
        &[thought("x"), text("I look."), a.clone(), b.clone(), c, d],
    );
    // Cut off in the midst of the arguments: as far as they go.
    let [a, _] = call("weather", "");
    let cut = "<tool_call>{\"name\": \"weather\", \"arguments\": {\"ci";
    check(&tools, cut, &[a, Said::Arguments("{\"ci".to_owned())]);
    // What is no call is text.
    let none = "<tool_call>{\"name\": \"unknown\", \"arguments\": {}}";
    let read = read(&tools, &[none]);
    assert!(
        matches!(&read[..], [Said::Text(text)] if text.contains("unknown")),
        "{read:?}"
    );
}

#[test]
fn calls_as_llama_and_mistral_write_them() {
    let tools = expected(false, &["weather"]);
    let [a, b] = call("weather", r#"{"city": "Bonn"}"#);
    let llama = r#"{"name": "weather", "parameters": {"city": "Bonn"}}"#;
    check(&tools, llama, &[a.clone(), b.clone()]);
    check(
        &tools,
        &format!("<|python_tag|>{llama}"),
        &[a.clone(), b.clone()],
    );
    let both = [a.clone(), b.clone(), a.clone(), b.clone()];
    check(&tools, &format!("{llama}; {llama}"), &both);
    let mistral = r#"[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bonn"}}, {"arguments": {"city": "Bonn"}, "name": "weather"}]"#;
    let read = read(&tools, &[mistral]);
    assert_eq!(read, both);
    let newer = r#"[TOOL_CALLS]weather[ARGS]{"city": "Bonn"}[TOOL_CALLS]weather{"city": "Bonn"}"#;
    check(&tools, newer, &both);
    // JSON that is an answer.
    let json = r#"{"answer": 3, "list": [1]} and more"#;
    check(&tools, json, &[text(json)]);
}

#[test]
fn calls_as_qwen_coder_writes_them() {
    let tools = expected(false, &["weather"]);
    let xml = "Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>";
    let [a, b] = call("weather", r#"{"city":"Bonn","days":2}"#);
    check(&tools, xml, &[text("Let me see."), a.clone(), b.clone()]);
    let bare = "<function=weather>\n<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>";
    check(&tools, bare, &[a, b]);
}

#[test]
fn channels_are_followed() {
    let channels = Expected {
        reasons: false,
        has_channels: true,
        ..expected(false, &["weather"])
    };
    let spoken = "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>final<|message|>Yes.";
    check(&channels, spoken, &[thought("I think."), text("Yes.")]);
    let called = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"city\": \"Bonn\"}";
    let [a, b] = call("weather", r#"{"city": "Bonn"}"#);
    check(&channels, called, &[thought("Hm"), a, b]);
}

#[test]
fn nothing_makes_it_fail() {
    let all = Expected {
        has_channels: true,
        begins_reasoning: false,
        ..expected(true, &["weather"])
    };
    let marks = [
        THINK,
        THOUGHT,
        CALL,
        CALLED,
        FUNCTION,
        CALLS,
        ARGS,
        PYTHON,
        CHANNEL,
        MESSAGE,
        START,
        END,
        "{",
        "}",
        "[",
        "\"",
        "name",
        "weather",
        ":",
        "é",
        "\\",
        " ",
        "<",
        "to=functions.weather",
    ];
    let mut x = 1u64;
    for _ in 0..3000 {
        let mut pieces = Vec::new();
        for _ in 0..12 {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            pieces.push(marks[(x >> 33) as usize % marks.len()]);
        }
        for expected in [&all, &expected(true, &["weather"])] {
            read(expected, &pieces);
        }
    }
}
