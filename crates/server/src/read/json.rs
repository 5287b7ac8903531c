//! A call of a tool in JSON, as it comes: `{"name": "f", "arguments": {...}}`, in any order, with the usual names for the two.

/// Keys of the tool's name, and of its arguments.
const NAME_KEYS: [&str; 2] = ["name", "function"];
const ARGUMENT_KEYS: [&str; 2] = ["arguments", "parameters"];

/// Names are short. What goes on for longer is no call.
const NAME_BYTES_MAX: usize = 256;

/// Lists and objects in one another.
const DEPTH_MAX: usize = 128;

/// What a character came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The call goes on.
    More,
    /// It is complete.
    Complete,
    /// This is no call.
    No,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Before,
    /// Before a key, or the end.
    Key,
    InKey,
    Colon,
    Value,
    /// In a value that is a text.
    InText,
    /// In a value that is anything.
    InTree,
    /// After a value.
    Comma,
    Done,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Name,
    Arguments,
    Other,
}

/// Reads one call, character by character.
#[derive(Debug)]
pub struct Scanner {
    place: Place,
    what: What,
    /// A key, or a text, as it is written.
    text: String,
    in_quotes: bool,
    is_escaped: bool,
    depth: usize,
    /// Whether there is nothing but the arguments.
    is_bare: bool,
    has_arguments: bool,
    /// The name, once it is known.
    pub name: Option<String>,
    /// The arguments so far, as they are written.
    pub arguments: String,
}

impl Scanner {
    pub fn new() -> Self {
        Self {
            place: Place::Before,
            what: What::Other,
            text: String::new(),
            in_quotes: false,
            is_escaped: false,
            depth: 0,
            is_bare: false,
            has_arguments: false,
            name: None,
            arguments: String::new(),
        }
    }

    /// A call whose name is known, and whose arguments follow.
    pub fn named(name: &str) -> Self {
        Self {
            place: Place::Value,
            what: What::Arguments,
            is_bare: true,
            name: Some(name.to_owned()),
            ..Self::new()
        }
    }

    /// Takes the next character.
    pub fn take(&mut self, c: char) -> Step {
        match (self.place, c) {
            (Place::InKey, c) => {
                if self.is_end_of_text(c) {
                    self.what = self.what_is(&self.text);
                    self.place = Place::Colon;
                }
                self.short()
            }
            (Place::InText, c) => {
                if !self.is_end_of_text(c) {
                    return match self.what {
                        What::Name => self.short(),
                        _ => Step::More,
                    };
                }
                let Ok(text) = serde_json::from_str(&format!("\"{}\"", self.text)) else {
                    return Step::No;
                };
                match self.what {
                    What::Name => self.name = Some(text),
                    _ => self.arguments = text,
                }
                self.after_value()
            }
            (Place::InTree, c) => self.tree(c),
            (Place::Done, _) => Step::No,
            (_, c) if c.is_whitespace() => Step::More,
            (Place::Before, '{') | (Place::Comma, ',') => self.go(Place::Key),
            (Place::Key, '"') => self.begin_text(Place::InKey),
            (Place::Colon, ':') => self.go(Place::Value),
            (Place::Key | Place::Comma, '}') => self.end(),
            (Place::Value, '"') if self.what != What::Other => self.begin_text(Place::InText),
            (Place::Value, c)
                if self.what == What::Other || self.what == What::Arguments && c == '{' =>
            {
                self.depth = 0;
                self.place = Place::InTree;
                self.tree(c)
            }
            _ => Step::No,
        }
    }

    fn go(&mut self, place: Place) -> Step {
        self.place = place;
        Step::More
    }

    fn begin_text(&mut self, place: Place) -> Step {
        self.text.clear();
        self.is_escaped = false;
        self.go(place)
    }

    /// Takes a character within quotes, as it is written; whether it is the closing one.
    fn is_end_of_text(&mut self, c: char) -> bool {
        if c == '"' && !self.is_escaped {
            return true;
        }
        self.is_escaped = c == '\\' && !self.is_escaped;
        self.text.push(c);
        false
    }

    fn short(&self) -> Step {
        if self.text.len() > NAME_BYTES_MAX {
            Step::No
        } else {
            Step::More
        }
    }

    fn what_is(&self, key: &str) -> What {
        if NAME_KEYS.contains(&key) && self.name.is_none() {
            What::Name
        } else if ARGUMENT_KEYS.contains(&key) && !self.has_arguments {
            What::Arguments
        } else {
            What::Other
        }
    }

    fn tree(&mut self, c: char) -> Step {
        if self.depth == 0 && !self.in_quotes && matches!(c, ',' | '}') {
            // A number or a word ends with what follows it.
            self.place = Place::Comma;
            return self.take(c);
        }
        if self.what == What::Arguments {
            self.arguments.push(c);
        }
        if self.in_quotes {
            if c == '"' && !self.is_escaped {
                self.in_quotes = false;
            }
            self.is_escaped = c == '\\' && !self.is_escaped;
        } else {
            match c {
                '"' => (self.in_quotes, self.is_escaped) = (true, false),
                '{' | '[' => self.depth += 1,
                '}' | ']' if self.depth == 0 => return Step::No,
                '}' | ']' => self.depth -= 1,
                _ => {}
            }
        }
        if self.depth > DEPTH_MAX {
            return Step::No;
        }
        let closes = self.depth == 0 && !self.in_quotes && matches!(c, '}' | ']' | '"');
        if closes {
            self.after_value()
        } else {
            Step::More
        }
    }

    fn after_value(&mut self) -> Step {
        self.has_arguments |= self.what == What::Arguments;
        if self.is_bare {
            return self.end();
        }
        self.go(Place::Comma)
    }

    fn end(&mut self) -> Step {
        self.place = Place::Done;
        if self.name.as_deref().unwrap_or_default().is_empty() {
            return Step::No;
        }
        if !self.has_arguments {
            self.arguments.push_str("{}");
        }
        Step::Complete
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The name and the arguments of a complete call; what is left of the text.
    fn scan(text: &str) -> Result<(String, String, String), String> {
        let mut scanner = Scanner::new();
        for (at, c) in text.char_indices() {
            match scanner.take(c) {
                Step::More => {}
                Step::Complete => {
                    let rest = text[at + c.len_utf8()..].to_owned();
                    return Ok((scanner.name.unwrap(), scanner.arguments, rest));
                }
                Step::No => return Err(text[at..].to_owned()),
            }
        }
        Err(String::new())
    }

    fn is(name: &str, arguments: &str, rest: &str) -> Result<(String, String, String), String> {
        Ok((name.to_owned(), arguments.to_owned(), rest.to_owned()))
    }

    #[test]
    fn calls_are_read_however_they_are_written() {
        let call = r#" {"name": "f", "arguments": {"x": [1, {"y": "}\"]"}], "z": null}} rest"#;
        let arguments = r#"{"x": [1, {"y": "}\"]"}], "z": null}"#;
        assert_eq!(scan(call), is("f", arguments, " rest"));
        let other = r#"{"type":"function","id":3,"parameters":{},"name":"g\u0041","is":true}"#;
        assert_eq!(scan(other), is("gA", "{}", ""));
        assert_eq!(scan(r#"{"name": "f"}"#), is("f", "{}", ""));
        // Arguments as a text with JSON in it.
        let text = r#"{"name":"f","arguments":"{\"x\": \"}\"}"}"#;
        assert_eq!(scan(text), is("f", r#"{"x": "}"}"#, ""));
    }

    #[test]
    fn what_is_no_call_is_seen_early() {
        assert_eq!(scan("[1]"), Err("[1]".to_owned()));
        assert_eq!(scan(r#"{"name": 3}"#), Err("3}".to_owned()));
        assert_eq!(scan(r#"{"arguments": [3]}"#), Err("[3]}".to_owned()));
        assert_eq!(scan(r#"{"x": 1}"#), Err("}".to_owned()));
        assert_eq!(scan(r#"{"x": ]"#), Err("]".to_owned()));
        assert!(scan(&format!("{{\"{}", "k".repeat(300))).is_err());
        assert!(scan(&format!("{{\"x\": {}", "[".repeat(1000))).is_err());
        assert_eq!(scan(r#"{"name": "f", "argu"#), Err(String::new()));
    }

    #[test]
    fn arguments_alone_follow_a_known_name() {
        let mut scanner = Scanner::named("f");
        let steps: Vec<Step> = r#" {"x": "}"}"#.chars().map(|c| scanner.take(c)).collect();
        assert!(
            steps[..steps.len() - 1]
                .iter()
                .all(|&step| step == Step::More)
        );
        assert_eq!(steps.last(), Some(&Step::Complete));
        assert_eq!(scanner.arguments, r#"{"x": "}"}"#);
    }
}
