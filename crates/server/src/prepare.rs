//! From a request's body to tokens and settings.

use std::time::SystemTime;

use engine::sampler::{Sampler, SamplerError, SamplerParams};
use engine::stop::Stopper;
use engine::template::{ChatRequest, GenerationPrompt, TemplateError};
use engine::tokenizer::{EncodeOptions, Tokenizer, TokenizerError};
use serde_json::{Map, Value, json};

use crate::Served;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::limits;

/// What is asked for, in which form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Text,
}

/// A request that makes sense.
#[derive(Debug)]
pub struct Prepared {
    pub prompt: Vec<u32>,
    pub tokens_max: Option<usize>,
    pub stop: Vec<String>,
    pub sampler: Sampler,
    pub logprobs: Option<usize>,
    pub delivery: Delivery,
}

/// How the answer is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// When it is complete.
    Whole,
    /// As it comes.
    Streamed(Usage),
}

/// Whether a stream ends with what was used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Usage {
    Told,
    Untold,
}

/// Fields that would change the answer, and that nothing here heeds yet.
const UNSUPPORTED: [&str; 12] = [
    "audio",
    "best_of",
    "echo",
    "function_call",
    "functions",
    "grammar",
    "guided_json",
    "guided_grammar",
    "json_schema",
    "prediction",
    "suffix",
    "web_search_options",
];

/// The object that a body is.
pub fn object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    match serde_json::from_slice(body) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(ApiError::invalid("the body is not a JSON object")),
        Err(error) => Err(ApiError::invalid(format!("the body is not JSON: {error}"))),
    }
}

/// Reads a request.
pub fn prepare(
    form: Form,
    body: &[u8],
    served: &Served,
    n_ctx: usize,
) -> Result<Prepared, ApiError> {
    let object = object(body)?;
    let fields = Fields(&object);
    check_model(fields, served)?;
    for name in UNSUPPORTED {
        // What is switched off or empty asks for nothing.
        let asks = match fields.get(name) {
            None | Some(Value::Bool(false)) => false,
            Some(Value::Number(n)) => n.as_u64() != Some(1),
            Some(Value::String(text)) => !text.is_empty(),
            Some(_) => true,
        };
        if asks {
            let message = format!("'{name}' is not supported");
            return Err(ApiError::unsupported(name, message));
        }
    }
    if fields.integer("n", 1, i64::MAX)?.is_some_and(|n| n > 1) {
        let message = "'n': one answer a request is supported";
        return Err(ApiError::unsupported("n", message));
    }
    if let Some(format) = fields.object("response_format")?
        && format.text("type")? != Some("text")
    {
        let message = "'response_format': only type 'text' is supported";
        return Err(ApiError::unsupported("response_format", message));
    }

    let sampling = sampling(fields, &served.sampling)?;
    let sampler = Sampler::new(sampling, served.tokenizer.n_vocab()).map_err(bad_sampling)?;
    let stop = fields.texts("stop")?;
    Stopper::new(&[], &stop, None).map_err(|e| ApiError::field("stop", e.to_string()))?;
    let max = |name| fields.integer(name, 1, i64::MAX);
    let tokens_max = match max("max_completion_tokens")? {
        Some(n) => Some(n),
        None => max("max_tokens")?,
    };
    let logprobs = match form {
        Form::Chat => chat_logprobs(fields)?,
        Form::Text => fields.integer("logprobs", 0, limits::TOP_LOGPROBS_MAX)?,
    };
    let delivery = delivery(fields)?;

    let prompt = match form {
        Form::Chat => chat_prompt(fields, served)?,
        Form::Text => text_prompt(fields, &served.tokenizer)?,
    };
    if prompt.is_empty() {
        return Err(ApiError::invalid("the prompt has no tokens"));
    }
    if prompt.len() >= n_ctx {
        return Err(ApiError::too_long(prompt.len(), n_ctx));
    }
    Ok(Prepared {
        prompt,
        // More than the context holds is as good as no limit.
        tokens_max: tokens_max.map(|n| usize::try_from(n).unwrap_or(usize::MAX)),
        stop,
        sampler,
        logprobs: logprobs.map(|n| n as usize),
        delivery,
    })
}

/// Refuses a model that is not here. Without a name the one that is here is meant.
fn check_model(fields: Fields<'_>, served: &Served) -> Result<(), ApiError> {
    match fields.text("model")? {
        Some(name) if name != served.id => Err(ApiError::unknown_model(name, &served.id)),
        _ => Ok(()),
    }
}

fn delivery(fields: Fields<'_>) -> Result<Delivery, ApiError> {
    let options = fields.object("stream_options")?;
    if !fields.flag("stream")? {
        return Ok(Delivery::Whole);
    }
    let told = match options {
        Some(options) => options.flag("include_usage")?,
        None => false,
    };
    Ok(Delivery::Streamed(if told {
        Usage::Told
    } else {
        Usage::Untold
    }))
}

fn chat_logprobs(fields: Fields<'_>) -> Result<Option<i64>, ApiError> {
    let wanted = fields.flag("logprobs")?;
    let top = fields.integer("top_logprobs", 0, limits::TOP_LOGPROBS_MAX)?;
    match (wanted, top) {
        (false, Some(n)) if n > 0 => Err(ApiError::field(
            "top_logprobs",
            "'top_logprobs' needs 'logprobs': true",
        )),
        (false, _) => Ok(None),
        (true, top) => Ok(Some(top.unwrap_or(0))),
    }
}

fn sampling(fields: Fields<'_>, base: &SamplerParams) -> Result<SamplerParams, ApiError> {
    let mut params = base.clone();
    let numbers = [
        ("temperature", &mut params.temperature),
        ("top_p", &mut params.top_p),
        ("min_p", &mut params.min_p),
        ("typical_p", &mut params.typical_p),
        ("repeat_penalty", &mut params.repeat_penalty),
        ("presence_penalty", &mut params.presence_penalty),
        ("frequency_penalty", &mut params.frequency_penalty),
    ];
    for (name, setting) in numbers {
        if let Some(value) = fields.number(name)? {
            *setting = value;
        }
    }
    if let Some(k) = fields.integer("top_k", -1, i64::from(u32::MAX))? {
        // Others say -1 for all.
        params.top_k = u32::try_from(k).unwrap_or(0);
    }
    if let Some(n) = fields.integer("repeat_last_n", -1, i64::from(i32::MAX))? {
        params.penalty_last_n = i32::try_from(n).expect("within the range");
    }
    if let Some(seed) = fields.integer("seed", i64::MIN, i64::MAX)? {
        // Any number will do.
        params.seed = seed as u64;
    }
    if let Some(biases) = fields.object("logit_bias")? {
        if biases.0.len() > limits::LOGIT_BIAS_MAX {
            let message = format!(
                "'logit_bias' has {} tokens, at most {} are allowed",
                biases.0.len(),
                limits::LOGIT_BIAS_MAX
            );
            return Err(ApiError::field("logit_bias", message));
        }
        for id in biases.0.keys() {
            let wrong = |what: &str| {
                let id: String = id.chars().take(20).collect();
                ApiError::field("logit_bias", format!("'logit_bias': '{id}' is no {what}"))
            };
            let token = id.parse().map_err(|_| wrong("token id"))?;
            let bias = biases.number(id).ok().flatten();
            params
                .logit_bias
                .push((token, bias.ok_or_else(|| wrong("number's key"))?));
        }
    }
    Ok(params)
}

fn bad_sampling(error: SamplerError) -> ApiError {
    match &error {
        SamplerError::Setting { name, .. } => {
            ApiError::field(name.replace('-', "_"), error.to_string())
        }
        SamplerError::TokenOutOfRange { .. } => ApiError::field("logit_bias", error.to_string()),
        _ => ApiError::invalid(error.to_string()),
    }
}

fn bad_text(error: TokenizerError) -> ApiError {
    ApiError::invalid(error.to_string())
}

/// What is to be continued: a text, or tokens; also as a list of one.
fn text_prompt(fields: Fields<'_>, tokenizer: &Tokenizer) -> Result<Vec<u32>, ApiError> {
    let wrong = || {
        let message =
            "'prompt': expected a text, or a list of token ids, or a list of one of these";
        ApiError::field("prompt", message)
    };
    let mut prompt = fields.get("prompt").ok_or_else(wrong)?;
    if let Value::Array(items) = prompt
        && items.first().is_some_and(|first| !first.is_number())
    {
        if items.len() > 1 {
            let message = "'prompt': one prompt a request is supported";
            return Err(ApiError::unsupported("prompt", message));
        }
        prompt = &items[0];
    }
    match prompt {
        Value::String(text) => tokenizer
            .encode(text, EncodeOptions::default())
            .map_err(bad_text),
        Value::Array(ids) => token_ids("prompt", ids, tokenizer),
        _ => Err(wrong()),
    }
}

/// Tokens of the vocabulary.
pub fn token_ids(name: &str, ids: &[Value], tokenizer: &Tokenizer) -> Result<Vec<u32>, ApiError> {
    let n_vocab = tokenizer.n_vocab();
    let id = |value: &Value| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.filter(|&id| (id as usize) < n_vocab).ok_or_else(|| {
            let message = format!(
                "'{name}': every token is a number from 0 to {}",
                n_vocab - 1
            );
            ApiError::field(name, message)
        })
    };
    ids.iter().map(id).collect()
}

/// The conversation as the model's template writes it.
fn chat_prompt(fields: Fields<'_>, served: &Served) -> Result<Vec<u32>, ApiError> {
    let Some(template) = &served.template else {
        let message = "this model has no chat template; /v1/completions continues a text";
        return Err(ApiError::invalid(message));
    };
    let given = fields.list("messages")?.unwrap_or_default();
    if given.is_empty() {
        let message = "'messages': expected a list of at least one message";
        return Err(ApiError::field("messages", message));
    }
    let messages = given
        .iter()
        .enumerate()
        .map(|(index, message)| usual_message(index, message))
        .collect::<Result<Vec<_>, _>>()?;
    let mut variables = match fields.object("chat_template_kwargs")? {
        Some(variables) => variables.0.clone(),
        None => Map::new(),
    };
    // Templates that know it call it the same.
    if let Some(effort) = fields.text("reasoning_effort")? {
        variables.insert("reasoning_effort".to_owned(), json!(effort));
    }
    let text = template
        .render(&ChatRequest {
            messages: &messages,
            tools: tools(fields)?,
            generation_prompt: GenerationPrompt::Add,
            variables,
            now: SystemTime::now(),
        })
        .map_err(|error| {
            let what = match error {
                TemplateError::Refused { message } => format!("refuses these messages: {message}"),
                TemplateError::Render { why, place } => format!("fails: {why}{place}"),
                TemplateError::Endless { place } => format!("does not come to an end{place}"),
                error => format!("cannot be used: {error}"),
            };
            ApiError::field("messages", format!("the model's chat template {what}"))
        })?;
    served
        .tokenizer
        .encode(text, EncodeOptions::CHAT)
        .map_err(bad_text)
}

/// Tools that the template shows to the model. What the model says of them stays text.
fn tools<'a>(fields: Fields<'a>) -> Result<&'a [Value], ApiError> {
    let tools = fields.list("tools")?.unwrap_or_default();
    if tools.iter().any(|tool| !tool.is_object()) {
        let message = "'tools': expected a list of objects";
        return Err(ApiError::field("tools", message));
    }
    match fields.get("tool_choice") {
        None => Ok(tools),
        Some(Value::String(choice)) if choice == "auto" => Ok(tools),
        Some(Value::String(choice)) if choice == "none" => Ok(&[]),
        Some(_) => {
            let message = "'tool_choice': 'auto' and 'none' are supported; a call cannot be enforced, and calls are not taken out of the text yet";
            Err(ApiError::unsupported("tool_choice", message))
        }
    }
}

/// A message as templates expect it: plain text, arguments of calls as objects, and the roles that they know.
fn usual_message(index: usize, message: &Value) -> Result<Value, ApiError> {
    let name = |rest: &str| format!("messages[{index}]{rest}");
    let Some(object) = message.as_object() else {
        let message = format!("'{}': expected an object", name(""));
        return Err(ApiError::field(name(""), message));
    };
    let mut object = object.clone();
    let role = match object.get("role").and_then(Value::as_str) {
        Some("developer") => "system",
        Some(role @ ("system" | "user" | "assistant" | "tool")) => role,
        _ => {
            let message = format!(
                "'{}': expected system, developer, user, assistant or tool",
                name(".role")
            );
            return Err(ApiError::field(name(".role"), message));
        }
    };
    let role = json!(role);
    let content = match object.get("content") {
        Some(Value::String(text)) => json!(text),
        Some(Value::Array(parts)) => {
            let texts = parts.iter().map(|part| {
                let is_text = part.get("type").and_then(Value::as_str) == Some("text");
                part.get("text").and_then(Value::as_str).filter(|_| is_text)
            });
            let text: Option<String> = texts.collect();
            json!(text.ok_or_else(|| {
                let message = format!(
                    "'{}': only parts of type 'text' are supported",
                    name(".content")
                );
                ApiError::unsupported(&name(".content"), message)
            })?)
        }
        // An answer that was nothing but calls.
        None | Some(Value::Null) if object.contains_key("tool_calls") => json!(""),
        _ => {
            let message = format!("'{}': expected a text", name(".content"));
            return Err(ApiError::field(name(".content"), message));
        }
    };
    object.insert("role".to_owned(), role);
    object.insert("content".to_owned(), content);
    if let Some(calls) = object.get_mut("tool_calls").and_then(Value::as_array_mut) {
        for call in calls {
            let arguments = call.pointer_mut("/function/arguments");
            if let Some(arguments) = arguments
                && let Some(parsed) = arguments
                    .as_str()
                    .and_then(|text| serde_json::from_str::<Map<_, _>>(text).ok())
            {
                *arguments = Value::Object(parsed);
            }
        }
    }
    Ok(Value::Object(object))
}
