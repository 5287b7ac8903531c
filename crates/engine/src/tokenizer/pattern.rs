//! Reads the patterns of a pre-tokenizer into what [`super::splitter`] runs.

use unicode_general_category::GeneralCategory;

use super::splitter::{Alternative, CharSet, Item, SETS_MAX, Stage};

/// Reads a pattern.
pub(super) struct Parser<'p> {
    pattern: &'p str,
    rest: std::iter::Peekable<std::str::Chars<'p>>,
    sets: Vec<CharSet>,
    ignore_case: bool,
    run_to_end: u32,
}

impl<'p> Parser<'p> {
    pub(super) fn compile(pattern: &'p str) -> Result<Stage, String> {
        let mut parser = Parser {
            pattern,
            rest: pattern.chars().peekable(),
            sets: Vec::new(),
            ignore_case: false,
            run_to_end: 0,
        };
        let sequences = parser.alternatives()?;
        if parser.rest.peek().is_some() {
            return Err(parser.error("a `)` too many"));
        }
        let mut alternatives = Vec::new();
        for items in sequences {
            let (first, empty) = first_sets(&items, parser.run_to_end);
            if empty {
                return Err(parser.error("an alternative that matches nothing"));
            }
            alternatives.push(Alternative { first, items });
        }
        let mut stage = Stage {
            sets: parser.sets,
            ascii: [0; 128],
            alternatives,
            run_to_end: parser.run_to_end,
        };
        for code in 0..128_u8 {
            stage.ascii[usize::from(code)] = stage.mask(char::from(code));
        }
        Ok(stage)
    }

    fn error(&self, what: &str) -> String {
        format!("{what} in the pattern {:?}", self.pattern)
    }

    fn eat(&mut self, c: char) -> bool {
        self.rest.next_if_eq(&c).is_some()
    }

    fn expect(&mut self, text: &str) -> Result<(), String> {
        for c in text.chars() {
            if !self.eat(c) {
                return Err(self.error(&format!("expected {text:?}")));
            }
        }
        Ok(())
    }

    fn bit(&mut self, set: CharSet) -> Result<u32, String> {
        let at = self.sets.iter().position(|s| *s == set).unwrap_or_else(|| {
            self.sets.push(set);
            self.sets.len() - 1
        });
        if at >= SETS_MAX {
            Err(self.error("too many character sets"))
        } else {
            Ok(1 << at)
        }
    }

    fn alternatives(&mut self) -> Result<Vec<Vec<Item>>, String> {
        let mut all = vec![Vec::new()];
        while let Some(&c) = self.rest.peek() {
            match c {
                ')' => break,
                '|' => {
                    self.rest.next();
                    all.push(Vec::new());
                }
                _ => {
                    let item = self.item()?;
                    all.last_mut().expect("it starts with one").push(item);
                }
            }
        }
        Ok(all)
    }

    fn item(&mut self) -> Result<Item, String> {
        if self.eat('(') {
            return self.group();
        }
        let set = if self.eat('[') {
            self.set()?
        } else {
            self.single()?
        };
        let bit = self.bit(set)?;
        let (min, max) = self.repetition()?;
        if self.eat('$') {
            return match (min, max) {
                (1, u32::MAX) if self.run_to_end == 0 => {
                    self.run_to_end = bit;
                    Ok(Item::RunToEnd)
                }
                _ => Err(self.error("`$` twice, or after anything but `+`")),
            };
        }
        Ok(Item::Repeat { bit, min, max })
    }

    /// What follows `(`.
    fn group(&mut self) -> Result<Item, String> {
        self.expect("?")?;
        if self.eat('!') {
            let set = self.single()?;
            let bit = self.bit(set)?;
            self.expect(")")?;
            return Ok(Item::NotFollowedBy { bit });
        }
        let outer = self.ignore_case;
        self.ignore_case |= self.eat('i');
        self.expect(":")?;
        let alternatives = self.alternatives()?;
        self.expect(")")?;
        self.ignore_case = outer;
        let fixed = |item: &Item| matches!(item, Item::Repeat { min, max, .. } if min == max);
        if !alternatives.iter().flatten().all(fixed) {
            return Err(self.error("a group of anything but literals"));
        }
        let optional = self.eat('?');
        Ok(Item::Group {
            alternatives,
            optional,
        })
    }

    fn repetition(&mut self) -> Result<(u32, u32), String> {
        if self.eat('?') {
            return Ok((0, 1));
        }
        if self.eat('*') {
            return Ok((0, u32::MAX));
        }
        if self.eat('+') {
            return Ok((1, u32::MAX));
        }
        if !self.eat('{') {
            return Ok((1, 1));
        }
        let min = self.number()?;
        let max = if self.eat(',') { self.number()? } else { min };
        self.expect("}")?;
        Ok((min, max))
    }

    fn number(&mut self) -> Result<u32, String> {
        let mut digits = String::new();
        while let Some(c) = self.rest.next_if(char::is_ascii_digit) {
            digits.push(c);
        }
        digits.parse().map_err(|_| self.error("expected a number"))
    }

    /// One character or escape outside of brackets.
    fn single(&mut self) -> Result<CharSet, String> {
        let mut set = CharSet::default();
        match self.rest.next() {
            Some('\\') => self.escape(&mut set)?,
            Some(c) => set.ranges.push((c, c)),
            None => return Err(self.error("an unexpected end")),
        }
        if self.ignore_case {
            // ASCII only: the other letters that Unicode folds to these occur in no contraction.
            let other = |c: char| {
                if c.is_ascii_lowercase() {
                    c.to_ascii_uppercase()
                } else {
                    c.to_ascii_lowercase()
                }
            };
            let folded: Vec<_> = set
                .ranges
                .iter()
                .map(|&(c, _)| (other(c), other(c)))
                .collect();
            set.ranges.extend(folded);
            set.ranges.dedup();
        }
        Ok(set)
    }

    /// What follows `[`.
    fn set(&mut self) -> Result<CharSet, String> {
        let mut set = CharSet {
            negated: self.eat('^'),
            ..CharSet::default()
        };
        loop {
            let n_ranges = set.ranges.len();
            match self.rest.next() {
                Some(']') => return Ok(set),
                Some('\\') => self.escape(&mut set)?,
                Some(c) => set.ranges.push((c, c)),
                None => return Err(self.error("a `[` without `]`")),
            }
            if set.ranges.len() == n_ranges || !self.eat('-') {
                continue;
            }
            let mut last = CharSet::default();
            match self.rest.next() {
                Some('\\') => self.escape(&mut last)?,
                Some(c) => last.ranges.push((c, c)),
                None => {}
            }
            let range = set.ranges.last_mut().expect("just pushed");
            match last.ranges.first() {
                Some(&(c, _)) if c >= range.0 => range.1 = c,
                _ => return Err(self.error("a range that ends before it begins")),
            }
        }
    }

    /// What follows `\`.
    fn escape(&mut self, set: &mut CharSet) -> Result<(), String> {
        let literal = match self.rest.next() {
            Some('r') => '\r',
            Some('n') => '\n',
            Some('s') => {
                set.space = true;
                return Ok(());
            }
            Some('S') => {
                set.not_space = true;
                return Ok(());
            }
            Some('p') => {
                self.expect("{")?;
                let mut name = String::new();
                while let Some(c) = self.rest.next_if(|&c| c != '}') {
                    name.push(c);
                }
                self.expect("}")?;
                set.categories |= categories(&name)
                    .ok_or_else(|| self.error(&format!("unknown class {name:?}")))?;
                return Ok(());
            }
            Some('u') => {
                let digits: String = self.rest.by_ref().take(4).collect();
                let code = u32::from_str_radix(&digits, 16)
                    .ok()
                    .filter(|_| digits.len() == 4);
                code.and_then(char::from_u32)
                    .ok_or_else(|| self.error("expected four hexadecimal digits after `\\u`"))?
            }
            Some(c) if c.is_ascii_punctuation() => c,
            _ => return Err(self.error("an unknown escape")),
        };
        set.ranges.push((literal, literal));
        Ok(())
    }
}

/// The sets that the first character of a match may be in, and whether a match may be empty.
fn first_sets(items: &[Item], run_to_end: u32) -> (u32, bool) {
    let mut first = 0;
    for item in items {
        let (sets, may_be_empty) = match item {
            Item::Repeat { bit, min, .. } => (*bit, *min == 0),
            Item::RunToEnd => (run_to_end, false),
            Item::NotFollowedBy { .. } => (0, true),
            Item::Group {
                alternatives,
                optional,
            } => alternatives
                .iter()
                .fold((0, *optional), |(sets, empty), a| {
                    let (more, nothing) = first_sets(a, run_to_end);
                    (sets | more, empty || nothing)
                }),
        };
        first |= sets;
        if !may_be_empty {
            return (first, false);
        }
    }
    (first, true)
}

/// The categories that a class name such as `L` or `Lu` stands for, as bits.
fn categories(name: &str) -> Option<u32> {
    use GeneralCategory as G;
    let members: &[G] = match name {
        "L" => &[
            G::UppercaseLetter,
            G::LowercaseLetter,
            G::TitlecaseLetter,
            G::ModifierLetter,
            G::OtherLetter,
        ],
        "Lu" => &[G::UppercaseLetter],
        "Ll" => &[G::LowercaseLetter],
        "Lt" => &[G::TitlecaseLetter],
        "Lm" => &[G::ModifierLetter],
        "Lo" => &[G::OtherLetter],
        "M" => &[G::NonspacingMark, G::SpacingMark, G::EnclosingMark],
        "N" => &[G::DecimalNumber, G::LetterNumber, G::OtherNumber],
        "P" => &[
            G::ConnectorPunctuation,
            G::DashPunctuation,
            G::OpenPunctuation,
            G::ClosePunctuation,
            G::InitialPunctuation,
            G::FinalPunctuation,
            G::OtherPunctuation,
        ],
        "S" => &[
            G::MathSymbol,
            G::CurrencySymbol,
            G::ModifierSymbol,
            G::OtherSymbol,
        ],
        _ => return None,
    };
    Some(members.iter().fold(0, |bits, &c| bits | (1 << (c as u32))))
}
