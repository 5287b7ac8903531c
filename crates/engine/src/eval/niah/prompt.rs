//! From a task to a prompt of a given length.

use super::draws::{Draws, Kind};
use super::{Haystack, PromptError, Shape, Task};
use crate::eval::book::SENTENCES;

/// What says nothing, over and over.
const NOISE: &str =
    "The snow is white. The night is dark. The road is long. We walk on. Then we come home again.";

/// A question about a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// The text, and what is asked about it.
    pub question: String,
    /// How the answer begins: the model is to go on from here.
    pub prefix: String,
    /// What the rest of the answer should contain.
    pub answers: Vec<String>,
    /// Tokens of question and prefix, as counted.
    pub tokens: usize,
}

impl Prompt {
    /// A prompt of at most `tokens_max` tokens, and no more than a sentence of its text below. `count` gets a question and
    /// the begin of an answer and says how many tokens they make together, with everything that goes around them.
    pub fn generate(
        task: Task,
        seed: u64,
        index: usize,
        tokens_max: usize,
        count: &mut dyn FnMut(&str, &str) -> Result<usize, PromptError>,
    ) -> Result<Self, PromptError> {
        let riddle = Riddle::new(task, seed, index);
        let mut of = |sentences: usize| -> Result<Self, PromptError> {
            let question = riddle.question(sentences);
            let prefix = riddle.prefix();
            let tokens = count(&question, &prefix)?;
            Ok(Self {
                question,
                prefix,
                answers: riddle.answers().to_vec(),
                tokens,
            })
        };
        let mut best = of(0)?;
        if best.tokens > tokens_max {
            return Err(PromptError::TooShort {
                task,
                needed: best.tokens,
                room: tokens_max,
            });
        }
        // `fits` sentences fit; so many more are looked at.
        let mut fits = 0;
        let mut too_many = tokens_max / 64 + 1;
        loop {
            let longer = of(too_many)?;
            if longer.tokens > tokens_max {
                break;
            }
            // A sentence has a token at least.
            if too_many > tokens_max {
                return Err(PromptError::TextIgnored { task });
            }
            (fits, best) = (too_many, longer);
            too_many *= 2;
        }
        while too_many - fits > 1 {
            let middle = fits + (too_many - fits) / 2;
            let prompt = of(middle)?;
            if prompt.tokens > tokens_max {
                too_many = middle;
            } else {
                (fits, best) = (middle, prompt);
            }
        }
        Ok(best)
    }
}

/// What is hidden and what is asked, before it has a length.
struct Riddle {
    shape: Shape,
    keys: Vec<String>,
    /// `values_per_key` for each key.
    values: Vec<String>,
    /// Where in the text each value is: a share of it.
    depths: Vec<f64>,
    /// Names the sequence of draws that each other needle comes from.
    seed: u64,
    names: [u64; 2],
}

impl Riddle {
    fn new(task: Task, seed: u64, index: usize) -> Self {
        let shape = task.shape();
        let names = [task as u64, index as u64];
        let mut draws = Draws::new(seed, &names);
        let n_values = shape.keys * shape.values_per_key;
        Self {
            keys: shape.key.draw_different(shape.keys, &mut draws),
            values: shape.value.draw_different(n_values, &mut draws),
            depths: (0..n_values).map(|_| draws.share()).collect(),
            shape,
            seed,
            names,
        }
    }

    /// The values of the keys asked for, which come first.
    fn answers(&self) -> &[String] {
        &self.values[..self.shape.keys_asked * self.shape.values_per_key]
    }

    fn asks_for_one(&self) -> bool {
        self.answers().len() == 1
    }

    /// What values are called.
    fn noun(&self) -> &'static str {
        match self.shape.value {
            Kind::Code => "code",
            Kind::Number | Kind::Words => "number",
        }
    }

    fn needle(&self, key: &str, value: &str) -> String {
        let noun = self.noun();
        if self.shape.values_per_key == 1 {
            format!("The secret {noun} of {key} is {value}.")
        } else {
            format!("One secret {noun} of {key} is {value}.")
        }
    }

    /// A needle that nobody asks for, with neither a key nor a value of those that somebody does.
    fn other_needle(&self, index: usize) -> String {
        let mut draws = Draws::new(self.seed, &[self.names[0], self.names[1], index as u64]);
        let mut other = |kind: Kind, taken: &[String]| loop {
            let one = kind.draw(&mut draws);
            if !taken.contains(&one) {
                break one;
            }
        };
        let key = other(self.shape.key, &self.keys);
        let value = other(self.shape.value, &self.values);
        self.needle(&key, &value)
    }

    /// So many sentences with the needles between them.
    fn text(&self, sentences: usize) -> String {
        let mut needles: Vec<(usize, String)> = self
            .values
            .iter()
            .enumerate()
            .map(|(i, value)| {
                // A needle may be before the first sentence, after the last, or between any two.
                let at = (self.depths[i] * (sentences + 1) as f64) as usize;
                let key = &self.keys[i / self.shape.values_per_key];
                (at, self.needle(key, value))
            })
            .collect();
        needles.sort_by_key(|(at, _)| *at);
        let between = match self.shape.haystack {
            Haystack::Book => " ",
            Haystack::Noise | Haystack::Needles => "\n",
        };
        let mut needles = needles.into_iter().peekable();
        let mut text = String::new();
        let mut push = |part: &str| {
            if !text.is_empty() {
                text.push_str(between);
            }
            text.push_str(part);
        };
        for i in 0..=sentences {
            while let Some((_, needle)) = needles.next_if(|(at, _)| *at == i) {
                push(&needle);
            }
            if i < sentences {
                match self.shape.haystack {
                    Haystack::Noise => push(NOISE),
                    Haystack::Book => push(SENTENCES[i % SENTENCES.len()]),
                    Haystack::Needles => push(&self.other_needle(i)),
                }
            }
        }
        text
    }

    fn question(&self, sentences: usize) -> String {
        let noun = self.noun();
        let intro = if self.asks_for_one() {
            format!("Somewhere in the following text it says what a certain secret {noun} is.")
        } else {
            format!(
                "In several places of the following text it says what certain secret {noun}s are."
            )
        };
        let text = self.text(sentences);
        let asked = self.asked();
        let question = if self.asks_for_one() {
            format!("What is the secret {noun} of {asked}, according to the text?")
        } else {
            format!("What are all the secret {noun}s of {asked}, according to the text?")
        };
        format!("{intro} Read it with care; you will be asked about it.\n\n{text}\n\n{question}")
    }

    fn prefix(&self) -> String {
        let (noun, asked) = (self.noun(), self.asked());
        if self.asks_for_one() {
            format!("According to the text, the secret {noun} of {asked} is")
        } else {
            format!("According to the text, the secret {noun}s of {asked} are")
        }
    }

    /// The keys asked for, as a list in words.
    fn asked(&self) -> String {
        match &self.keys[..self.shape.keys_asked] {
            [one] => one.clone(),
            [first @ .., last] => format!("{} and {last}", first.join(", ")),
            [] => unreachable!("every task asks for a key"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sha2::{Digest, Sha256};

    /// A tokenizer for which every word is a token.
    fn words(question: &str, prefix: &str) -> Result<usize, PromptError> {
        Ok(question.split_whitespace().count() + prefix.split_whitespace().count())
    }

    fn prompt(task: Task, seed: u64, index: usize, tokens_max: usize) -> Prompt {
        Prompt::generate(task, seed, index, tokens_max, &mut words).unwrap()
    }

    fn hash(prompts: impl Iterator<Item = Prompt>) -> String {
        let mut hash = Sha256::new();
        for p in prompts {
            hash.update(p.question);
            hash.update(p.prefix);
            hash.update(p.answers.join("\n"));
        }
        hash.finalize()[..8]
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect()
    }

    #[test]
    fn frozen() {
        // A change here makes scores of before and after incomparable.
        let all = |seed| {
            let each = move |task| (0..3).map(move |index| prompt(task, seed, index, 2000));
            hash(Task::ALL.into_iter().flat_map(each))
        };
        assert_eq!([all(0), all(1)], ["e0562098a4912600", "0a1d2dc121fc3d10"]);
    }

    #[test]
    fn seeds_and_indices_make_other_prompts_of_the_same_text() {
        for task in Task::ALL {
            let one = prompt(task, 0, 0, 600);
            assert_eq!(one, prompt(task, 0, 0, 600));
            for other in [prompt(task, 1, 0, 600), prompt(task, 0, 1, 600)] {
                assert_ne!(one.answers, other.answers);
                assert_ne!(one.prefix, other.prefix);
            }
        }
    }

    #[test]
    fn needles_are_in_the_text_as_often_as_they_must() {
        for task in Task::ALL {
            let shape = task.shape();
            for index in 0..20 {
                let p = prompt(task, 3, index, 3000);
                let riddle = Riddle::new(task, 3, index);
                assert_eq!(p.answers, riddle.answers());
                let expected = shape.keys_asked * shape.values_per_key;
                assert_eq!(p.answers.len(), expected, "{task}");
                let times = |part: &str| p.question.matches(part).count();
                for (i, value) in riddle.values.iter().enumerate() {
                    let key = &riddle.keys[i / shape.values_per_key];
                    assert_eq!(times(value), 1, "{task} {index}: {value}");
                    let needle = format!("secret {} of {key} is {value}.", riddle.noun());
                    assert_eq!(times(&needle), 1, "{task} {index}: {needle}");
                }
                for (i, key) in riddle.keys.iter().enumerate() {
                    let asked = usize::from(i < shape.keys_asked);
                    assert_eq!(
                        times(key),
                        shape.values_per_key + asked,
                        "{task} {index}: {key}"
                    );
                    assert_eq!(
                        p.prefix.matches(key.as_str()).count(),
                        asked,
                        "{task}: {key}"
                    );
                }
                // What is asked is the only thing that is told of it.
                assert!(p.answers.iter().all(|a| !p.prefix.contains(a.as_str())));
                let facts = times(&format!("secret {} of", riddle.noun()));
                let others = facts - riddle.values.len();
                let asks = usize::from(expected == 1);
                match shape.haystack {
                    Haystack::Needles => assert!(others > 100, "{task}: {others}"),
                    Haystack::Noise | Haystack::Book => assert_eq!(others, asks, "{task}"),
                }
            }
        }
    }

    #[test]
    fn needles_lie_at_all_depths() {
        let mut tenths = [0; 10];
        for task in Task::ALL {
            for index in 0..50 {
                let p = prompt(task, 0, index, 2000);
                for answer in &p.answers {
                    let at = p.question.find(answer.as_str()).unwrap();
                    tenths[10 * at / p.question.len()] += 1;
                }
            }
        }
        // 700 needles: 70 a tenth, standard deviation 8. The question takes some of the first and of the last.
        assert!(tenths.iter().all(|&n| (35..110).contains(&n)), "{tenths:?}");
    }

    #[test]
    fn a_prompt_is_as_long_as_it_may_be() {
        let longest = SENTENCES
            .iter()
            .map(|s| s.split_whitespace().count())
            .max()
            .unwrap();
        for task in Task::ALL {
            for tokens_max in [200, 201, 999, 5000, 120_000] {
                let p = prompt(task, 0, 0, tokens_max);
                assert_eq!(p.tokens, words(&p.question, &p.prefix).unwrap());
                assert!(p.tokens <= tokens_max, "{task} {tokens_max}: {}", p.tokens);
                // No further sentence has room.
                let unit = match task.shape().haystack {
                    Haystack::Book => longest,
                    Haystack::Noise | Haystack::Needles => NOISE.split_whitespace().count(),
                };
                assert!(
                    p.tokens + unit > tokens_max,
                    "{task} {tokens_max}: {}",
                    p.tokens
                );
            }
        }
    }

    #[test]
    fn what_has_no_room_is_refused() {
        for task in Task::ALL {
            let error = Prompt::generate(task, 0, 0, 20, &mut words).unwrap_err();
            let PromptError::TooShort {
                needed, room: 20, ..
            } = error
            else {
                panic!("{error}");
            };
            let smallest = prompt(task, 0, 0, needed);
            assert_eq!(smallest.tokens, needed);
            assert!(Prompt::generate(task, 0, 0, needed - 1, &mut words).is_err());
        }
    }

    #[test]
    fn a_template_that_ignores_the_text_ends_the_search() {
        let error = Prompt::generate(Task::Single1, 0, 0, 500, &mut |_, _| Ok(7)).unwrap_err();
        assert!(matches!(error, PromptError::TextIgnored { .. }), "{error}");
    }
}
