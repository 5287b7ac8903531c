//! From a request's body to tokens and settings.

use engine::sampler::{Sampler, SamplerError, SamplerParams};
use engine::stop::Stopper;
use engine::tokenizer::{EncodeOptions, Tokenizer, TokenizerError};
use serde_json::{Map, Value, json};

use crate::answer::Usage;
use crate::constraint::{Constraint, Rule};
use crate::conversation::{Conversation, Written};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::limits;
use crate::read::Expected;
use crate::state::State;
use crate::{messages, responses};

/// What is asked for, in which form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Text,
    /// `/v1/responses`
    Responses,
    /// `/v1/messages`
    Messages,
}

/// A request that makes sense.
#[derive(Debug)]
pub struct Prepared {
    pub prompt: Vec<u32>,
    pub tokens_max: Option<usize>,
    pub stop: Vec<String>,
    /// What each of the answers has of its own.
    pub choices: Vec<Own>,
    pub logprobs: Option<usize>,
    pub expected: Expected,
    pub delivery: Delivery,
    pub usage: Usage,
    /// The request, for answers that repeat parts of it.
    pub asked: Map<String, Value>,
}

/// What is one answer's own.
#[derive(Debug)]
pub struct Own {
    pub sampler: Sampler,
    pub constraint: Option<Constraint>,
}

/// How the answer is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// When it is complete.
    Whole,
    /// As it comes.
    Streamed,
}

/// Fields that would change the answer, and that nothing here heeds yet.
const UNSUPPORTED: [&str; 9] = [
    "audio",
    "best_of",
    "echo",
    "function_call",
    "functions",
    "prediction",
    "previous_response_id",
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
pub fn prepare(form: Form, body: &[u8], state: &State) -> Result<Prepared, ApiError> {
    let object = object(body)?;
    let fields = Fields(&object);
    check_model(fields, state)?;
    check_supported(fields)?;
    let n = fields.integer("n", 1, limits::CHOICES_MAX)?.unwrap_or(1);

    let sampling = sampling(fields, &state.served.sampling)?;
    let stop = fields.texts(match form {
        Form::Messages => "stop_sequences",
        _ => "stop",
    })?;
    Stopper::new(&[], &stop, None).map_err(|e| ApiError::field("stop", e.to_string()))?;
    let logprobs = match form {
        Form::Chat => chat_logprobs(fields)?,
        Form::Text => fields.integer("logprobs", 0, limits::TOP_LOGPROBS_MAX)?,
        Form::Responses | Form::Messages => None,
    };
    let delivery = if fields.flag("stream")? {
        Delivery::Streamed
    } else {
        Delivery::Whole
    };

    let mut rule = rule(form, fields)?;
    let Written { tokens, expected } = match form {
        Form::Text => Written {
            tokens: text_prompt(fields, &state.served.tokenizer)?,
            expected: Expected::default(),
        },
        Form::Chat => conversation(Conversation::of_chat(fields)?, &mut rule, state)?,
        Form::Responses => conversation(responses::conversation(fields)?, &mut rule, state)?,
        Form::Messages => conversation(messages::conversation(fields)?, &mut rule, state)?,
    };
    if tokens.is_empty() {
        return Err(ApiError::invalid("the prompt has no tokens"));
    }
    if tokens.len() >= state.n_ctx {
        return Err(ApiError::too_long(tokens.len(), state.n_ctx));
    }
    let constraint = match &rule {
        Some((name, rule)) => Some(state.grammars.constraint(name, rule)?),
        None => None,
    };
    let own = |i: i64| -> Result<Own, ApiError> {
        // Each answer has its own random numbers.
        let params = SamplerParams {
            seed: sampling.seed.wrapping_add(i as u64),
            ..sampling.clone()
        };
        Ok(Own {
            sampler: Sampler::new(params, state.served.tokenizer.n_vocab())
                .map_err(bad_sampling)?,
            constraint: constraint.as_ref().and_then(Constraint::copy),
        })
    };
    Ok(Prepared {
        prompt: tokens,
        tokens_max: tokens_max(form, fields)?,
        stop,
        choices: (0..n).map(own).collect::<Result<_, _>>()?,
        logprobs: logprobs.map(|n| n as usize),
        expected,
        delivery,
        usage: match fields.object("stream_options")? {
            Some(options) if options.flag("include_usage")? => Usage::Told,
            _ => Usage::Untold,
        },
        asked: object,
    })
}

/// Writes a conversation. A call that is to be made is a rule, too.
fn conversation(
    conversation: Conversation,
    rule: &mut Option<(&'static str, Rule)>,
    state: &State,
) -> Result<Written, ApiError> {
    if let Some(call) = conversation.tools.rule(&state.style) {
        *rule = Some(("tools", call));
    }
    conversation.write(&state.served)
}

fn check_supported(fields: Fields<'_>) -> Result<(), ApiError> {
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
    Ok(())
}

/// The most tokens of an answer. More than the context holds is as good as no limit.
fn tokens_max(form: Form, fields: Fields<'_>) -> Result<Option<usize>, ApiError> {
    let names: &[&str] = match form {
        Form::Chat | Form::Text => &["max_completion_tokens", "max_tokens"],
        Form::Responses => &["max_output_tokens"],
        Form::Messages => &["max_tokens"],
    };
    for name in names {
        if let Some(n) = fields.integer(name, 1, i64::MAX)? {
            return Ok(Some(usize::try_from(n).unwrap_or(usize::MAX)));
        }
    }
    Ok(None)
}

/// A rule, and the field that says it.
type Named = (&'static str, Rule);

/// What the answer has to follow. Of two rules one would not be followed, so there can be one.
fn rule(form: Form, fields: Fields<'_>) -> Result<Option<Named>, ApiError> {
    let mut rules = Vec::new();
    rules.extend(format(form, fields)?);
    for name in ["json_schema", "guided_json"] {
        match fields.get(name) {
            None => {}
            // As a text, too.
            Some(Value::String(text)) => {
                let schema = serde_json::from_str(text)
                    .map_err(|e| ApiError::field(name, format!("'{name}' is not JSON: {e}")))?;
                rules.push((name, Rule::Schema(schema)));
            }
            Some(schema) => rules.push((name, schema_rule(name, schema)?)),
        }
    }
    if let Some(regex) = fields.text("guided_regex")? {
        rules.push(("guided_regex", Rule::Regex(regex.to_owned())));
    }
    for name in ["grammar", "guided_grammar"] {
        match fields.text(name)? {
            None | Some("") => {}
            Some(grammar) if grammar.contains("::=") => {
                let message = format!("'{name}': expected a grammar in Lark, not in GBNF");
                return Err(ApiError::unsupported(name, message));
            }
            Some(grammar) => rules.push((name, Rule::Lark(grammar.to_owned()))),
        }
    }
    if let [(first, _), (second, _), ..] = rules[..] {
        let message = format!("'{second}': the answer has to follow '{first}' already");
        return Err(ApiError::unsupported(second, message));
    }
    Ok(rules.pop())
}

/// The rule of the API's own field for it.
fn format(form: Form, fields: Fields<'_>) -> Result<Option<Named>, ApiError> {
    let (name, format) = match form {
        Form::Responses => {
            let text = fields.object("text")?;
            let format = text.map(|text| text.object("format")).transpose()?;
            ("text.format", format.flatten())
        }
        Form::Messages => {
            let config = fields.object("output_config")?;
            let format = config.map(|config| config.object("format")).transpose()?;
            match format.flatten() {
                Some(format) => ("output_config.format", Some(format)),
                // As it was called before.
                None => ("output_format", fields.object("output_format")?),
            }
        }
        Form::Chat | Form::Text => ("response_format", fields.object("response_format")?),
    };
    let rule = format.map(|format| format_rule(name, format)).transpose()?;
    Ok(rule.flatten().map(|rule| (name, rule)))
}

fn format_rule(name: &str, format: Fields<'_>) -> Result<Option<Rule>, ApiError> {
    match format.text("type")? {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(Rule::Schema(json!({"type": "object"})))),
        Some("json_schema") => {
            // Here, or one further down, as the API has it.
            let inner = format.object("json_schema")?.unwrap_or(format);
            let Some(schema) = inner.get("schema") else {
                let message = format!("'{name}': expected a 'schema'");
                return Err(ApiError::field(name, message));
            };
            schema_rule(name, schema).map(Some)
        }
        _ => {
            let message = format!("'{name}': expected type 'text', 'json_object' or 'json_schema'");
            Err(ApiError::field(name, message))
        }
    }
}

fn schema_rule(name: &str, schema: &Value) -> Result<Rule, ApiError> {
    if schema.is_object() || schema.is_boolean() {
        return Ok(Rule::Schema(schema.clone()));
    }
    let message = format!("'{name}': expected a schema, which is an object");
    Err(ApiError::field(name, message))
}

/// Refuses a model that is not here. Without a name the one that is here is meant.
pub fn check_model(fields: Fields<'_>, state: &State) -> Result<(), ApiError> {
    let id = &state.served.id;
    match fields.text("model")? {
        Some(name) if name != id => Err(ApiError::unknown_model(name, id)),
        _ => Ok(()),
    }
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
