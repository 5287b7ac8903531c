//! Chat templates against what Python's jinja2 makes of them, and with real tokenizers.

mod common;

use std::time::{Duration, UNIX_EPOCH};

use engine::template::{ChatRequest, ChatTemplate, GenerationPrompt, TemplateError, message};
use engine::tokenizer::{EncodeOptions, Tokenizer};
use serde::Deserialize;
use serde_json::{Map, Value};

#[derive(Deserialize)]
struct Case {
    template: String,
    messages: Vec<Value>,
    tools: Vec<Value>,
    generation_prompt: bool,
    variables: Map<String, Value>,
    prompt: Option<String>,
    refused: Option<String>,
}

fn of_model(name: &str) -> Result<(ChatTemplate, Tokenizer), TemplateError> {
    let file = common::model(name);
    let tokenizer = Tokenizer::from_gguf(file.metadata()).unwrap_or_else(|e| panic!("{name}: {e}"));
    Ok((
        ChatTemplate::from_gguf(file.metadata(), &tokenizer)?,
        tokenizer,
    ))
}

fn written(source: &str) -> ChatTemplate {
    ChatTemplate::from_source(source, "<s>", "</s>").unwrap_or_else(|e| panic!("{e}"))
}

fn template(name: &str) -> ChatTemplate {
    match name {
        "smollm2" | "qwen2.5-0.5b" => of_model(name).unwrap_or_else(|e| panic!("{name}: {e}")).0,
        "chatml" => written(include_str!("data/templates/chatml.jinja")),
        "llama3" => written(include_str!("data/templates/llama3.jinja")),
        "gemma" => written(include_str!("data/templates/gemma.jinja")),
        "mistral" => written(include_str!("data/templates/mistral.jinja")),
        "thinking" => written(include_str!("data/templates/thinking.jinja")),
        "python" => written(include_str!("data/templates/python.jinja")),
        _ => panic!("no template {name}"),
    }
}

#[test]
fn prompts_equal_those_of_jinja2() {
    let cases: Vec<Case> =
        serde_json::from_str(include_str!("data/templates/cases.json")).expect("the cases");
    assert!(cases.len() >= 40, "only {} cases", cases.len());
    let mut wrong = Vec::new();
    for case in cases {
        let request = ChatRequest {
            messages: &case.messages,
            tools: &case.tools,
            generation_prompt: if case.generation_prompt {
                GenerationPrompt::Add
            } else {
                GenerationPrompt::Omit
            },
            variables: case.variables,
            now: UNIX_EPOCH + Duration::from_secs(1_735_743_599),
        };
        let result = template(&case.template).render(&request);
        let right = match (&result, &case.prompt, &case.refused) {
            (Ok(prompt), Some(expected), _) => prompt == expected,
            (Err(TemplateError::Refused { message }), _, Some(expected)) => message == expected,
            _ => false,
        };
        if !right {
            let expected = case.prompt.or(case.refused);
            wrong.push(format!(
                "{}:\n  expected {expected:?}\n  got      {result:?}",
                case.template
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} differ:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

#[test]
fn a_prompt_becomes_control_tokens() {
    let (template, tokenizer) = of_model("qwen2.5-0.5b").expect("it has a template");
    let messages = [message("system", "Be brief."), message("user", "hi")];
    let prompt = template
        .render(&ChatRequest::new(&messages))
        .expect("renders");
    let ids = tokenizer
        .encode(&prompt, EncodeOptions::CHAT)
        .expect("encodes");
    assert_eq!(
        ids,
        [
            151_644, 8948, 198, 3430, 9814, 13, 151_645, 198, 151_644, 872, 198, 6023, 151_645,
            198, 151_644, 77_091, 198
        ]
    );
}

#[test]
fn a_base_model_has_no_template() {
    let error = of_model("gemma3-270m").expect_err("it is no chat model");
    assert!(matches!(error, TemplateError::Missing));
    assert!(error.to_string().contains("--raw"), "{error}");
}
