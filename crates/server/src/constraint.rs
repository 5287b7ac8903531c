//! Answers that follow a grammar: which tokens may come next.
//!
//! What may follow a token is found on a thread of its own while the model computes, so that steps rarely wait for it.

use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread;

use engine::tokenizer::{TokenKind, Tokenizer};
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{
    ApproximateTokEnv, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie,
};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::limits;

/// What an answer has to follow.
#[derive(Debug, Clone, PartialEq)]
pub enum Rule {
    /// JSON of this schema.
    Schema(Value),
    /// A grammar in the library's form of Lark.
    Lark(String),
    /// A regular expression.
    Regex(String),
}

/// Makes constraints for a vocabulary, and finds what may follow.
pub struct Grammars {
    tokenizer: Arc<Tokenizer>,
    /// Made when the first answer wants it: it takes a while for large vocabularies.
    factory: OnceLock<Result<ParserFactory, String>>,
    tasks: Sender<Task>,
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Grammars")
    }
}

/// A matcher that has to take a token, if there is one, and then to say what may follow.
struct Task {
    matcher: Box<Matcher>,
    token: Option<u32>,
    reply: SyncSender<Found>,
}

struct Found {
    matcher: Box<Matcher>,
    allowed: Result<SimpleVob, String>,
}

impl Grammars {
    /// Begins a thread, which ends when this is gone.
    pub fn new(tokenizer: Arc<Tokenizer>) -> std::io::Result<Self> {
        let (tasks, given) = channel::<Task>();
        thread::Builder::new()
            .name("grammar".to_owned())
            .spawn(move || given.into_iter().for_each(find))?;
        Ok(Self {
            tokenizer,
            factory: OnceLock::new(),
            tasks,
        })
    }

    /// A constraint. Grammars come from anywhere: what they cost is bounded.
    pub fn constraint(&self, name: &str, rule: &Rule) -> Result<Constraint, ApiError> {
        let factory = self
            .factory
            .get_or_init(|| factory(&self.tokenizer).map_err(|e| e.to_string()));
        let factory = factory
            .as_ref()
            .map_err(|e| ApiError::internal(e.clone()))?;
        let grammar = match rule {
            Rule::Schema(schema) => {
                check_depth(name, schema)?;
                TopLevelGrammar::from_json_schema(compact(schema))
            }
            Rule::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
            Rule::Regex(regex) => TopLevelGrammar::from_regex(regex),
        };
        let bad = |why: &str| {
            let why: String = why.chars().take(300).collect();
            ApiError::field(name, format!("'{name}' cannot be followed: {why}"))
        };
        let mut matcher = Matcher::new(factory.create_parser(grammar));
        // Some errors show only now.
        matcher
            .compute_mask_or_eos()
            .map_err(|e| bad(&e.to_string()))?;
        Ok(Constraint {
            state: Some(State::Here(Box::new(matcher))),
            tasks: self.tasks.clone(),
            masked: Vec::new(),
        })
    }
}

fn find(task: Task) {
    let Task {
        mut matcher,
        token,
        reply,
    } = task;
    let taken = match token {
        // After the end of the grammar only the end of the text follows, and takes nothing.
        Some(token) if !matcher.is_stopped() => matcher.consume_token(token),
        _ => Ok(()),
    };
    let allowed = taken.and_then(|()| matcher.compute_mask_or_eos());
    let allowed = allowed.map_err(|e| e.to_string());
    // Whoever asked may be gone.
    let _ = reply.send(Found { matcher, allowed });
}

/// Follows one answer.
pub struct Constraint {
    /// Always there between calls.
    state: Option<State>,
    tasks: Sender<Task>,
    masked: Vec<f32>,
}

enum State {
    Here(Box<Matcher>),
    Away(Receiver<Found>),
}

impl std::fmt::Debug for Constraint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Constraint")
    }
}

impl Constraint {
    /// Another one in the same state; only before the first token.
    pub fn copy(&self) -> Option<Self> {
        let Some(State::Here(matcher)) = &self.state else {
            return None;
        };
        Some(Self {
            state: Some(State::Here(Box::new(matcher.deep_clone()))),
            tasks: self.tasks.clone(),
            masked: Vec::new(),
        })
    }

    /// The logits, those of tokens that may not follow being minus infinity.
    pub fn mask(&mut self, logits: &[f32]) -> Result<&[f32], ApiError> {
        let found = match self.state.take() {
            Some(State::Away(found)) => found.recv().map_err(|_| gone())?,
            Some(State::Here(matcher)) => self.ask(matcher, None)?.recv().map_err(|_| gone())?,
            None => return Err(gone()),
        };
        let allowed = found.allowed.map_err(|why| {
            ApiError::internal(format!("the grammar cannot be followed any further: {why}"))
        })?;
        self.state = Some(State::Here(found.matcher));
        self.masked.clear();
        self.masked.resize(logits.len(), f32::NEG_INFINITY);
        allowed.iter_set_entries(|token| {
            if let (Some(masked), Some(&logit)) = (self.masked.get_mut(token), logits.get(token)) {
                *masked = logit;
            }
        });
        Ok(&self.masked)
    }

    /// Says which token was chosen. What may follow it is found meanwhile.
    pub fn take(&mut self, token: u32) -> Result<(), ApiError> {
        let Some(State::Here(matcher)) = self.state.take() else {
            return Err(gone());
        };
        self.state = Some(State::Away(self.ask(matcher, Some(token))?));
        Ok(())
    }

    fn ask(&self, matcher: Box<Matcher>, token: Option<u32>) -> Result<Receiver<Found>, ApiError> {
        let (reply, found) = sync_channel(1);
        let task = Task {
            matcher,
            token,
            reply,
        };
        self.tasks.send(task).map_err(|_| gone())?;
        Ok(found)
    }
}

fn gone() -> ApiError {
    ApiError::internal("the grammar is lost")
}

/// Every token's bytes as the library wants them.
fn factory(tokenizer: &Arc<Tokenizer>) -> Result<ParserFactory, Box<dyn std::error::Error>> {
    let n_vocab = tokenizer.n_vocab() as u32;
    let words: Vec<Vec<u8>> = (0..n_vocab)
        .map(|id| {
            let bytes = tokenizer.token_bytes(id).unwrap_or_default();
            let is_text = matches!(
                tokenizer.kind(id),
                Some(TokenKind::Normal | TokenKind::UserDefined | TokenKind::Byte)
            );
            if is_text && !bytes.is_empty() && !tokenizer.is_eog(id) {
                return bytes.to_vec();
            }
            let mut special = vec![TokTrie::SPECIAL_TOKEN_MARKER];
            special.extend_from_slice(format!("<[{id}]>").as_bytes());
            special
        })
        .collect();
    let ends = tokenizer.eog();
    let end = tokenizer.eot().or(tokenizer.eos());
    let end = end
        .or(ends.first().copied())
        .ok_or("the vocabulary has no token that ends a text")?;
    let trie = TokTrie::from(&TokRxInfo::new(n_vocab, end), &words);
    let trie = if ends.contains(&end) {
        trie.with_eos_tokens(ends)
    } else {
        trie
    };
    let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let slices = llguidance::earley::SlicedBiasComputer::general_slices();
    let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)?;
    factory.quiet();
    Ok(factory)
}

/// A schema whose answers have one space after commas and colons, and no other: small models would go on with spaces forever.
pub fn compact(schema: &Value) -> Value {
    let spaces =
        json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
    match schema {
        Value::Object(object) => {
            let mut object = object.clone();
            object.entry("x-guidance").or_insert(spaces);
            Value::Object(object)
        }
        // `true` is a schema: anything.
        _ => json!({"x-guidance": spaces}),
    }
}

/// Refuses what is nested more than anybody means.
fn check_depth(name: &str, schema: &Value) -> Result<(), ApiError> {
    let mut level = vec![schema];
    for _ in 0..limits::SCHEMA_DEPTH_MAX {
        level = level
            .into_iter()
            .flat_map(|value| -> Box<dyn Iterator<Item = &Value>> {
                match value {
                    Value::Array(items) => Box::new(items.iter()),
                    Value::Object(object) => Box::new(object.values()),
                    _ => Box::new(std::iter::empty()),
                }
            })
            .collect();
        if level.is_empty() {
            return Ok(());
        }
    }
    let message = format!(
        "'{name}' is nested more than {} times",
        limits::SCHEMA_DEPTH_MAX
    );
    Err(ApiError::field(name, message))
}
