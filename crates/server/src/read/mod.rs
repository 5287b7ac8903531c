//! What an answer's text says: text, reasoning, and calls of tools, taken apart as it comes.
//!
//! | written as | by |
//! |---|---|
//! | `<think>reasoning</think>` | Qwen 3, DeepSeek R1 and their relatives; some templates write the first mark themselves |
//! | `<tool_call>{"name": .., "arguments": ..}</tool_call>` | Hermes, Qwen 2.5 and 3 |
//! | `<tool_call><function=f><parameter=x>..</parameter></function></tool_call>` | Qwen 3 Coder |
//! | `{"name": .., "parameters": ..}` at the very begin, perhaps after `<\|python_tag\|>` | Llama 3 |
//! | `[TOOL_CALLS][{"name": .., "arguments": ..}]`, `[TOOL_CALLS]f[ARGS]{..}` | Mistral |
//! | `<\|channel\|>analysis<\|message\|>..`, `<\|channel\|>commentary to=functions.f<\|message\|>{..}` | gpt-oss |
//!
//! Marks are looked for across the borders of pieces. What looks like a call and is none stays text.

mod json;
#[cfg(test)]
mod tests;
mod xml;

use json::{Scanner, Step};

/// Something that is said. Several of a kind in a row belong together.
#[derive(Debug, Clone, PartialEq)]
pub enum Said {
    Text(String),
    Reasoning(String),
    /// A call of this tool begins.
    Call(String),
    /// The last call's arguments go on: JSON.
    Arguments(String),
}

/// A tool that may be called.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    pub name: String,
    /// The schema of its arguments, or null.
    pub parameters: serde_json::Value,
}

/// What to look for.
#[derive(Debug, Clone, Default)]
pub struct Expected {
    /// Whether the model marks its reasoning.
    pub reasons: bool,
    /// Whether the answer begins in the midst of reasoning.
    pub begins_reasoning: bool,
    /// Whether the model speaks in channels.
    pub has_channels: bool,
    /// Tools that it may call.
    pub tools: Vec<Tool>,
}

/// Bytes of a call that may be held back until it is complete.
const CALL_BYTES_MAX: usize = 1 << 20;

const THINK: &str = "<think>";
const THOUGHT: &str = "</think>";
const CALL: &str = "<tool_call>";
const CALLED: &str = "</tool_call>";
const FUNCTION: &str = "<function=";
const CALLS: &str = "[TOOL_CALLS]";
const ARGS: &str = "[ARGS]";
const PYTHON: &str = "<|python_tag|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const START: &str = "<|start|>";
const END: &str = "<|end|>";

/// Texts of tokens that are usually not shown, and that say what is what.
pub const MARKS: [&str; 8] = [
    CALLS,
    ARGS,
    PYTHON,
    CHANNEL,
    MESSAGE,
    START,
    END,
    "<|constrain|>",
];

/// Where the text is.
#[derive(Debug)]
enum Place {
    Text,
    Reasoning,
    /// In a call in JSON. `told` bytes of its arguments are told, if its name is.
    Json {
        scanner: Scanner,
        raw: String,
        told: Option<usize>,
        opener: &'static str,
    },
    /// In a call in XML, to the end of it.
    Xml {
        closing: &'static str,
    },
    /// Between the calls of a list.
    Between,
    /// Before the arguments of a call whose name comes first.
    Named,
    /// In the head of a channel's message.
    Head,
    /// Between messages.
    Outside,
}

/// Takes an answer apart.
#[derive(Debug)]
pub struct Reader {
    expected: Expected,
    place: Place,
    /// What is not decided yet.
    held: String,
    /// Whether nothing but space was said so far, beside reasoning.
    is_fresh: bool,
    /// Whether nothing but space was thought so far.
    is_blank: bool,
    /// Calls so far.
    calls: usize,
}

impl Reader {
    pub fn new(expected: Expected) -> Self {
        let place = match &expected {
            expected if expected.begins_reasoning => Place::Reasoning,
            expected if expected.has_channels => Place::Outside,
            _ => Place::Text,
        };
        Self {
            expected,
            place,
            held: String::new(),
            is_fresh: true,
            is_blank: true,
            calls: 0,
        }
    }

    /// Whether tools were called.
    pub fn has_called(&self) -> bool {
        self.calls > 0
    }

    /// Takes the next piece of the text.
    pub fn push(&mut self, text: &str, said: &mut Vec<Said>) {
        self.held.push_str(text);
        while self.advance(said) {}
    }

    /// Nothing follows: what is held back is what it looks like.
    pub fn finish(&mut self, said: &mut Vec<Said>) {
        while self.advance(said) {}
        let held = std::mem::take(&mut self.held);
        match std::mem::replace(&mut self.place, Place::Text) {
            // Space after a call is nobody's.
            Place::Text if self.calls > 0 => self.say(held.trim_end(), said),
            Place::Text => self.say(&held, said),
            Place::Reasoning => self.think(&held, said),
            // A call that was cut off is one all the same, if its name is known.
            Place::Json { told: Some(_), .. } => {}
            Place::Json { raw, opener, .. } => self.say(&format!("{opener}{raw}"), said),
            Place::Xml { closing } => match xml::call(&held, &self.expected.tools) {
                Some(call) => self.tell_call(call, said),
                None => {
                    let opener = if closing == CALLED { CALL } else { "" };
                    self.say(&format!("{opener}{held}"), said);
                }
            },
            Place::Named => self.say(&held, said),
            Place::Between | Place::Head | Place::Outside => {}
        }
    }

    /// Does one step; whether another can follow.
    fn advance(&mut self, said: &mut Vec<Said>) -> bool {
        match &self.place {
            Place::Text => self.text(said),
            Place::Reasoning => self.reasoning(said),
            Place::Json { .. } => self.json(said),
            Place::Xml { closing } => {
                let closing = *closing;
                self.xml(closing, said)
            }
            Place::Between => self.between(said),
            Place::Named => self.named(),
            Place::Head => self.head(),
            Place::Outside => self.outside(),
        }
    }

    /// Marks that end a text.
    fn marks(&self) -> Vec<&'static str> {
        let mut marks = Vec::new();
        if self.expected.reasons {
            // One that ends what was not begun is dropped.
            marks.extend([THINK, THOUGHT]);
        }
        if !self.expected.tools.is_empty() {
            marks.extend([CALL, CALLED, FUNCTION, CALLS, PYTHON]);
        }
        if self.expected.has_channels {
            marks.extend([END, CHANNEL, START]);
        }
        marks
    }

    fn text(&mut self, said: &mut Vec<Said>) -> bool {
        let has_tools = !self.expected.tools.is_empty();
        let marks = self.marks();
        if marks.is_empty() {
            let held = std::mem::take(&mut self.held);
            self.say(&held, said);
            return false;
        }
        if has_tools && self.is_fresh && self.held.trim_start().starts_with('{') {
            self.begin_json("");
            return true;
        }
        if let Some((at, mark)) = first_of(&self.held, &marks) {
            let before = self.held[..at].to_owned();
            self.held.drain(..at + mark.len());
            let before = if self.is_fresh || [CALL, CALLED, FUNCTION].contains(&mark) {
                before.trim_end()
            } else {
                before.as_str()
            };
            self.say(before, said);
            match mark {
                THINK => self.place = Place::Reasoning,
                CALL => self.begin_json(CALL),
                FUNCTION => {
                    self.held.insert_str(0, FUNCTION);
                    self.place = Place::Xml {
                        closing: "</function>",
                    };
                }
                CALLS => self.place = Place::Between,
                PYTHON => self.begin_json(PYTHON),
                END | START => self.place = Place::Outside,
                CHANNEL => self.place = Place::Head,
                _ => {}
            }
            return true;
        }
        // Space may stand before a mark, and is dropped then.
        let undecided = undecided(&self.held, &marks);
        let clear = &self.held[..self.held.len() - undecided];
        let clear = clear.trim_end().len();
        let text: String = self.held.drain(..clear).collect();
        self.say(&text, said);
        false
    }

    /// Says text. After reasoning, and before calls, it does not begin with space.
    fn say(&mut self, text: &str, said: &mut Vec<Said>) {
        let is_plain = self.marks().is_empty();
        let text = if self.is_fresh && !is_plain {
            text.trim_start()
        } else {
            text
        };
        if !text.is_empty() {
            self.is_fresh = false;
            said.push(Said::Text(text.to_owned()));
        }
    }

    fn reasoning(&mut self, said: &mut Vec<Said>) -> bool {
        let marks: &[&'static str] = if self.expected.has_channels {
            &[END, CHANNEL, START]
        } else {
            &[THOUGHT]
        };
        let (until, mark) = match first_of(&self.held, marks) {
            Some((at, mark)) => (at, Some(mark)),
            None => (self.held.len() - undecided(&self.held, marks), None),
        };
        let text: String = self.held.drain(..until).collect();
        self.think(&text, said);
        let Some(mark) = mark else { return false };
        self.held.drain(..mark.len());
        self.place = match mark {
            THOUGHT => Place::Text,
            CHANNEL => Place::Head,
            _ => Place::Outside,
        };
        true
    }

    /// Tells reasoning, which does not begin with space.
    fn think(&mut self, text: &str, said: &mut Vec<Said>) {
        let text = if self.is_blank {
            text.trim_start()
        } else {
            text
        };
        if !text.is_empty() {
            self.is_blank = false;
            said.push(Said::Reasoning(text.to_owned()));
        }
    }

    fn begin_json(&mut self, opener: &'static str) {
        self.place = Place::Json {
            scanner: Scanner::new(),
            raw: String::new(),
            told: None,
            opener,
        };
    }

    fn json(&mut self, said: &mut Vec<Said>) -> bool {
        let Place::Json {
            scanner,
            raw,
            told,
            opener,
        } = &mut self.place
        else {
            return false;
        };
        let opener = *opener;
        if opener == CALL && raw.trim().is_empty() {
            let begin = self.held.trim_start();
            if begin.starts_with('<') || begin.is_empty() {
                if !begin.is_empty() {
                    self.place = Place::Xml { closing: CALLED };
                    return true;
                }
                return false;
            }
        }
        let mut step = Step::More;
        let mut taken = 0;
        for c in self.held.chars() {
            taken += c.len_utf8();
            step = scanner.take(c);
            raw.push(c);
            if told.is_none()
                && let Some(name) = &scanner.name
            {
                if self.expected.tools.iter().all(|tool| tool.name != *name) {
                    step = Step::No;
                } else if !scanner.arguments.is_empty() || step == Step::Complete {
                    // Whatever is no call after this was one.
                    said.push(Said::Call(name.clone()));
                    self.calls += 1;
                    *told = Some(0);
                }
            }
            if step != Step::More || raw.len() > CALL_BYTES_MAX {
                break;
            }
        }
        self.held.drain(..taken);
        if let Some(told) = told
            && *told < scanner.arguments.len()
        {
            said.push(Said::Arguments(scanner.arguments[*told..].to_owned()));
            *told = scanner.arguments.len();
        }
        match step {
            Step::More if raw.len() > CALL_BYTES_MAX => {}
            Step::More => return false,
            Step::Complete => {
                self.is_fresh = false;
                self.place = match opener {
                    CALL => Place::Text,
                    _ if self.expected.has_channels => Place::Outside,
                    _ => Place::Between,
                };
                return true;
            }
            Step::No => {}
        }
        let (raw, told) = (std::mem::take(raw), *told);
        self.place = Place::Text;
        if told.is_none() {
            // It is text, and is not looked at again.
            self.say(&format!("{opener}{raw}"), said);
            self.is_fresh = false;
        }
        true
    }

    fn xml(&mut self, closing: &str, said: &mut Vec<Said>) -> bool {
        let Some(at) = self.held.find(closing) else {
            if self.held.len() > CALL_BYTES_MAX {
                let held = std::mem::take(&mut self.held);
                self.place = Place::Text;
                self.say(&held, said);
            }
            return false;
        };
        let text: String = self.held.drain(..at + closing.len()).collect();
        self.place = Place::Text;
        match xml::call(&text, &self.expected.tools) {
            Some(call) => self.tell_call(call, said),
            None => {
                let opener = if closing == CALLED { CALL } else { "" };
                self.say(&format!("{opener}{text}"), said);
                self.is_fresh = false;
            }
        }
        true
    }

    fn tell_call(&mut self, (name, arguments): (String, String), said: &mut Vec<Said>) {
        self.calls += 1;
        self.is_fresh = false;
        said.push(Said::Call(name));
        said.push(Said::Arguments(arguments));
    }

    /// Between calls: a list's marks, or the end of calls.
    fn between(&mut self, said: &mut Vec<Said>) -> bool {
        if self.held.starts_with(CALLS) {
            self.held.drain(..CALLS.len());
            return true;
        }
        if CALLS.starts_with(self.held.as_str()) {
            // The mark, or the begin of a list.
            return false;
        }
        let Some(c) = self.held.chars().next() else {
            return false;
        };
        match c {
            '{' => self.begin_json(""),
            '[' | ',' | ';' | ']' => {
                self.held.drain(..1);
            }
            c if c.is_whitespace() => {
                self.held.drain(..c.len_utf8());
            }
            c if c.is_alphanumeric() || c == '_' => self.place = Place::Named,
            _ => {
                self.place = Place::Text;
                return !self.held.is_empty() && self.text(said);
            }
        }
        true
    }

    /// A name, and then its arguments.
    fn named(&mut self) -> bool {
        let Some(at) = self.held.find(['{', '[']) else {
            return false;
        };
        let rest = &self.held[at..];
        if !rest.starts_with(ARGS) && ARGS.starts_with(rest) {
            return false;
        }
        let name = self.held[..at].trim().to_owned();
        let is_known = self.expected.tools.iter().any(|tool| tool.name == name);
        if !is_known {
            self.is_fresh = false;
            self.place = Place::Text;
            return true;
        }
        let skipped = if rest.starts_with(ARGS) {
            at + ARGS.len()
        } else {
            at
        };
        self.held.drain(..skipped);
        self.begin_named(&name);
        true
    }

    fn begin_named(&mut self, name: &str) {
        self.place = Place::Json {
            scanner: Scanner::named(name),
            raw: String::new(),
            told: None,
            opener: "",
        };
    }

    /// A message's head, up to its text.
    fn head(&mut self) -> bool {
        let Some(at) = self.held.find(MESSAGE) else {
            return false;
        };
        let head: String = self.held.drain(..at + MESSAGE.len()).collect();
        let called = head.split_once("to=functions.").map(|(_, rest)| rest);
        let name = called.and_then(|rest| rest.split([' ', '<']).next());
        match name {
            Some(name) if self.expected.tools.iter().any(|tool| tool.name == name) => {
                let name = name.to_owned();
                self.begin_named(&name);
            }
            _ if head.trim_start().starts_with("analysis") => self.place = Place::Reasoning,
            _ => self.place = Place::Text,
        }
        true
    }

    /// Between messages: whatever stands there is about the next one.
    fn outside(&mut self) -> bool {
        match self.held.find(CHANNEL) {
            Some(at) => {
                self.held.drain(..at + CHANNEL.len());
                self.place = Place::Head;
                true
            }
            None => false,
        }
    }
}

/// The mark that comes first.
fn first_of<'m>(text: &str, marks: &[&'m str]) -> Option<(usize, &'m str)> {
    let found = marks
        .iter()
        .filter_map(|mark| Some((text.find(mark)?, *mark)));
    found.min_by_key(|(at, _)| *at)
}

/// Bytes at the end of a text that may be the begin of a mark.
fn undecided(text: &str, marks: &[&str]) -> usize {
    let longest = marks.iter().map(|mark| mark.len()).max().unwrap_or(0);
    let from = text.len().saturating_sub(longest);
    let may_begin = |&at: &usize| {
        text.is_char_boundary(at) && marks.iter().any(|mark| mark.starts_with(&text[at..]))
    };
    let first = (from..text.len()).find(may_begin);
    first.map_or(0, |at| text.len() - at)
}
