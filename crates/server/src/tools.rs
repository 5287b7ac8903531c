//! Tools: which may be called, how the model writes calls, and how a call is enforced.

use engine::tokenizer::{TokenKind, Tokenizer};
use serde_json::{Value, json};

use crate::constraint::{Rule, compact};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::read::{MARKS, Tool};

/// Whether tools are called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Choice {
    /// As the model likes.
    Auto,
    None,
    /// Some tool.
    Required,
    /// This one.
    Named(String),
}

/// Tools in the form of the chat API, which templates expect.
#[derive(Debug, Clone, PartialEq)]
pub struct Tools {
    pub given: Vec<Value>,
    pub choice: Choice,
}

impl Tools {
    /// Reads what a chat request says.
    pub fn of_chat(fields: Fields<'_>) -> Result<Self, ApiError> {
        let given = fields.list("tools")?.unwrap_or_default().to_vec();
        let choice = match fields.get("tool_choice") {
            None => Choice::Auto,
            Some(Value::String(choice)) => named_choice(choice)?,
            Some(Value::Object(object)) => {
                let name = object.get("function").and_then(|f| f["name"].as_str());
                Choice::Named(name.ok_or_else(wrong_choice)?.to_owned())
            }
            Some(_) => return Err(wrong_choice()),
        };
        Self::checked(given, choice)
    }

    /// Tools and a choice that belong together.
    pub fn checked(given: Vec<Value>, choice: Choice) -> Result<Self, ApiError> {
        for (index, tool) in given.iter().enumerate() {
            let name = tool["function"]["name"].as_str().unwrap_or_default();
            if name.is_empty() || name.len() > 200 {
                let message = format!(
                    "'tools[{index}]': expected an object of type 'function' with the name of a function"
                );
                return Err(ApiError::field("tools", message));
            }
        }
        if choice == Choice::Required && given.is_empty() {
            let message = "'tool_choice': there are no tools to call";
            return Err(ApiError::field("tool_choice", message));
        }
        if let Choice::Named(name) = &choice
            && given.iter().all(|tool| tool["function"]["name"] != *name)
        {
            let name: String = name.chars().take(80).collect();
            let message = format!("'tool_choice': there is no tool '{name}'");
            return Err(ApiError::field("tool_choice", message));
        }
        Ok(Self { given, choice })
    }

    /// Those that the template shows to the model.
    pub fn shown(&self) -> &[Value] {
        match self.choice {
            Choice::None => &[],
            _ => &self.given,
        }
    }

    /// Those that may be called.
    pub fn callable(&self) -> Vec<Tool> {
        let tools = self.shown().iter().map(|tool| Tool {
            name: tool["function"]["name"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
            parameters: tool["function"]["parameters"].clone(),
        });
        match &self.choice {
            Choice::Named(name) => tools.filter(|tool| tool.name == *name).collect(),
            _ => tools.collect(),
        }
    }

    /// What enforces a call, if one is wanted.
    pub fn rule(&self, style: &Style) -> Option<Rule> {
        match self.choice {
            Choice::Required | Choice::Named(_) => Some(style.rule(&self.callable())),
            Choice::Auto | Choice::None => None,
        }
    }
}

fn wrong_choice() -> ApiError {
    let message = "'tool_choice': expected 'auto', 'none', 'required', or a function by its name";
    ApiError::field("tool_choice", message)
}

/// A choice that is a word.
pub fn named_choice(choice: &str) -> Result<Choice, ApiError> {
    match choice {
        "auto" => Ok(Choice::Auto),
        "none" => Ok(Choice::None),
        "required" => Ok(Choice::Required),
        _ => Err(wrong_choice()),
    }
}

/// How a model writes calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Style {
    /// `<tool_call>{"name": .., "arguments": ..}</tool_call>`, also of models that were not taught any.
    Hermes,
    /// `{"name": .., "parameters": ..}`
    Llama,
    /// `[TOOL_CALLS][{"name": .., "arguments": ..}]`
    Mistral { mark: Mark },
    /// `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{..}`
    Channels {
        channel: Mark,
        constrain: Mark,
        message: Mark,
    },
}

/// A mark in a grammar: the token, where there is one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark(String);

impl Mark {
    fn new(text: &str, tokenizer: &Tokenizer) -> Self {
        Self(match token(text, tokenizer) {
            Some(id) => format!("<[{id}]>"),
            None => json!(text).to_string(),
        })
    }
}

fn token(text: &str, tokenizer: &Tokenizer) -> Option<u32> {
    let all = tokenizer.tokens_with(text);
    all.into_iter()
        .find(|&id| tokenizer.token_bytes(id) == Some(text.as_bytes()))
        .filter(|&id| tokenizer.kind(id) == Some(TokenKind::Control))
}

/// Tokens that are structure and not shown, but that say what a call is.
pub fn marks(tokenizer: &Tokenizer) -> Vec<(u32, &'static str)> {
    let all = MARKS
        .iter()
        .filter_map(|text| Some((token(text, tokenizer)?, *text)));
    all.filter(|(id, _)| !tokenizer.is_eog(*id)).collect()
}

impl Style {
    /// What a template shows.
    pub fn of_template(source: &str, tokenizer: &Tokenizer) -> Self {
        let mark = |text: &str| Mark::new(text, tokenizer);
        if source.contains("<|channel|>") {
            Self::Channels {
                channel: mark("<|channel|>"),
                constrain: mark("<|constrain|>"),
                message: mark("<|message|>"),
            }
        } else if source.contains("[TOOL_CALLS]") {
            Self::Mistral {
                mark: mark("[TOOL_CALLS]"),
            }
        } else if source.contains("<|python_tag|>") && !source.contains("<tool_call>") {
            Self::Llama
        } else {
            Self::Hermes
        }
    }

    fn rule(&self, tools: &[Tool]) -> Rule {
        let schema = |tool: &Tool| match &tool.parameters {
            Value::Null => json!({"type": "object"}),
            parameters => parameters.clone(),
        };
        let one_of = |key: &str| {
            let calls: Vec<Value> = tools
                .iter()
                .map(|tool| {
                    json!({
                        "type": "object",
                        "properties": {"name": {"const": tool.name}, key: schema(tool)},
                        "required": ["name", key],
                        "additionalProperties": false,
                    })
                })
                .collect();
            match &calls[..] {
                [call] => compact(call),
                calls => compact(&json!({"anyOf": calls})),
            }
        };
        Rule::Lark(match self {
            Self::Hermes => format!(
                "start: \"<tool_call>\\n\" call \"\\n</tool_call>\"\ncall: %json {}\n",
                one_of("arguments")
            ),
            Self::Llama => format!("start: call\ncall: %json {}\n", one_of("parameters")),
            Self::Mistral { mark } => format!(
                "start: {} \"[\" call \"]\"\ncall: %json {}\n",
                mark.0,
                one_of("arguments")
            ),
            Self::Channels {
                channel,
                constrain,
                message,
            } => {
                let calls: Vec<String> = (0..tools.len()).map(|i| format!("call_{i}")).collect();
                let mut lark = format!("start: {} ({})\n", channel.0, calls.join(" | "));
                for (i, tool) in tools.iter().enumerate() {
                    let head = json!(format!("commentary to=functions.{} ", tool.name));
                    let schema = compact(&schema(tool));
                    lark += &format!(
                        "call_{i}: {head} {} \"json\" {} args_{i}\nargs_{i}: %json {schema}\n",
                        constrain.0, message.0
                    );
                }
                lark
            }
        })
    }
}

/// What a model that was not taught to call tools is told of them, at the begin.
pub fn description(tools: &[Value]) -> String {
    let list: Vec<String> = tools.iter().map(Value::to_string).collect();
    format!(
        "You can call functions. These are their signatures:\n{}\nTo call one, answer with nothing but\n<tool_call>\n{{\"name\": <its name>, \"arguments\": <an object of its arguments>}}\n</tool_call>",
        list.join("\n")
    )
}
