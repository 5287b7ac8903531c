//! Needles in haystacks for real vocabularies and templates, and readers that find everything, nothing, or some of it.

mod common;

use std::cell::Cell;
use std::convert::Infallible;
use std::time::Instant;

use engine::eval::niah::{
    ANSWER_TOKENS_MAX, Asked, Format, NiahError, Outcome, Prompt, PromptError, Report, Task, run,
};
use engine::generate::{Decoder, Generator};
use engine::tokenizer::{DecodeOptions, EncodeOptions, Tokenizer};
use gguf::GgufFile;

const MODELS: [&str; 3] = ["smollm2", "qwen2.5-0.5b", "gemma3-270m"];

fn load(name: &str) -> (GgufFile, Tokenizer) {
    let file = common::model(name);
    let tokenizer = Tokenizer::from_gguf(file.metadata()).expect("a tokenizer");
    (file, tokenizer)
}

fn prompt(format: &Format<'_>, task: Task, tokens_max: usize) -> Prompt {
    let count = &mut |q: &str, p: &str| Ok(format.tokens(q, p)?.len());
    Prompt::generate(task, 0, 0, tokens_max, count).unwrap_or_else(|e| panic!("{task}: {e}"))
}

#[test]
fn prompts_fill_the_room_in_the_tokens_of_each_model() {
    for model in MODELS {
        let (file, tokenizer) = load(model);
        let chat = Format::of_file(file.metadata(), &tokenizer).unwrap();
        for format in [&chat, &Format::raw(&tokenizer)] {
            for task in Task::ALL {
                let p = prompt(format, task, 3000);
                let tokens = format.tokens(&p.question, &p.prefix).unwrap();
                assert_eq!(tokens.len(), p.tokens, "{model} {task}");
                // The longest sentence of the book has 220 tokens, and the average one 30.
                assert!(
                    (2750..=3000).contains(&p.tokens),
                    "{model} {task}: {}",
                    p.tokens
                );
                let options = DecodeOptions::default();
                let text = tokenizer.decode(&tokens, options).unwrap();
                let text = String::from_utf8(text).unwrap();
                assert!(text.contains(&p.question), "{model} {task}");
                assert!(text.ends_with(&p.prefix), "{model} {task}");
            }
        }
    }
}

#[test]
fn the_answer_begins_in_the_models_own_turn() {
    let (file, tokenizer) = load("qwen2.5-0.5b");
    let format = Format::of_file(file.metadata(), &tokenizer).unwrap();
    assert!(format.is_chat());
    let tokens = format.tokens("Where?", "It is").unwrap();
    let end = tokenizer
        .encode(
            "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\nIt is",
            EncodeOptions::VERBATIM,
        )
        .unwrap();
    assert!(tokens.ends_with(&end), "{tokens:?}");
    // A model that was not taught to chat goes on with the text.
    let (_, tokenizer) = load("gemma3-270m");
    let raw = Format::raw(&tokenizer).tokens("Where?", "It is").unwrap();
    assert_eq!(
        raw,
        tokenizer
            .encode("Where? It is", EncodeOptions::default())
            .unwrap()
    );
    assert_eq!(raw[0], tokenizer.bos().unwrap());
}

#[test]
fn long_prompts_are_made_in_no_time() {
    let (_, tokenizer) = load("smollm2");
    let format = Format::raw(&tokenizer);
    let begun = Instant::now();
    let p = prompt(&format, Task::MultiQuery, 300_000);
    assert!((299_700..=300_000).contains(&p.tokens), "{}", p.tokens);
    // The book was repeated.
    assert_eq!(
        p.question
            .matches("Sir Walter Elliot, of Kellynch Hall")
            .count(),
        3
    );
    // Seconds here; a search that is not logarithmic takes hours.
    assert!(begun.elapsed().as_secs() < 120, "{:?}", begun.elapsed());
}

/// What a reader does with a question.
#[derive(Clone, Copy, PartialEq)]
enum Reader {
    /// Says every answer.
    Finds,
    /// Says the first answer, and stops.
    FindsOne,
    /// Says the needle of another key, where there is one.
    Misses,
    /// Says every answer, and goes on for ever.
    Rambles,
}

/// Reads the whole text as a person would, and says what it says about the keys asked for.
struct Reading<'t> {
    tokenizer: &'t Tokenizer,
    reader: Reader,
    n_ctx: usize,
    held: Vec<u32>,
    answer: Vec<u32>,
    said: usize,
    logits: Vec<f32>,
    decoded: &'t Cell<usize>,
}

impl Reading<'_> {
    fn say(&mut self) {
        self.logits.fill(0.0);
        let token = match self.answer.get(self.said) {
            Some(&token) => token,
            None if self.reader == Reader::Rambles => self.answer[0],
            None => self.tokenizer.eos().unwrap(),
        };
        self.said += 1;
        self.logits[token as usize] = 1.0;
    }

    fn answer(&self, text: &str) -> String {
        let (text, asked) = text
            .rsplit_once("According to the text, the secret ")
            .unwrap();
        let asked = asked.split_once(" of ").unwrap().1;
        let asked = asked.trim_end_matches(" is").trim_end_matches(" are");
        let keys: Vec<&str> = asked
            .split([' ', ','])
            .filter(|k| k.contains('-'))
            .collect();
        let mut found = Vec::new();
        for part in text.split("secret ").skip(1) {
            let Some((key, rest)) = part
                .split_once(" of ")
                .and_then(|(_, r)| r.split_once(" is "))
            else {
                continue;
            };
            let value = rest.split_once('.').map_or("", |(value, _)| value);
            if value.len() <= 36 && keys.contains(&key) != (self.reader == Reader::Misses) {
                found.push(value);
            }
        }
        if self.reader == Reader::FindsOne {
            found.truncate(1);
        }
        format!(
            " {}.",
            found
                .iter()
                .take(4)
                .copied()
                .collect::<Vec<_>>()
                .join(" and ")
        )
    }
}

impl Decoder for Reading<'_> {
    type Error = Infallible;

    fn n_ctx(&self) -> usize {
        self.n_ctx
    }
    fn n_past(&self) -> usize {
        self.held.len()
    }
    fn prefill(
        &mut self,
        tokens: &[u32],
        interrupted: &dyn Fn() -> bool,
    ) -> Result<bool, Infallible> {
        if interrupted() {
            return Ok(false);
        }
        self.held.extend_from_slice(tokens);
        let text = self
            .tokenizer
            .decode(&self.held, DecodeOptions::default())
            .unwrap();
        let answer = self.answer(&String::from_utf8(text).unwrap());
        self.answer = self
            .tokenizer
            .encode(answer, EncodeOptions::VERBATIM)
            .unwrap();
        self.said = 0;
        self.say();
        Ok(true)
    }
    fn decode(&mut self, token: u32) -> Result<(), Infallible> {
        self.held.push(token);
        self.decoded.set(self.decoded.get() + 1);
        self.say();
        Ok(())
    }
    fn logits(&self) -> &[f32] {
        &self.logits
    }
    fn truncate(&mut self, n: usize) -> usize {
        self.held.truncate(n);
        self.held.len()
    }
}

/// A run of all tasks, three prompts each; interrupted when so many answers are there. Also the steps decoded.
fn read(
    reader: Reader,
    n_ctx: usize,
    answers_max: usize,
) -> (Result<Report, NiahError<Infallible>>, Vec<Outcome>, usize) {
    let (_, tokenizer) = load("smollm2");
    let decoded = Cell::new(0);
    let reading = Reading {
        tokenizer: &tokenizer,
        reader,
        n_ctx,
        held: Vec::new(),
        answer: Vec::new(),
        said: 0,
        logits: vec![0.0; tokenizer.n_vocab()],
        decoded: &decoded,
    };
    let asked = Asked {
        tasks: &Task::ALL,
        samples: 3,
        seed: 0,
    };
    let n_answers = Cell::new(0);
    let mut outcomes = Vec::new();
    let report = run(
        &mut Generator::new(reading, &tokenizer),
        &Format::raw(&tokenizer),
        &asked,
        &|| n_answers.get() >= answers_max,
        &mut |outcome| {
            outcomes.push(outcome.clone());
            n_answers.set(outcomes.len());
        },
    );
    (report, outcomes, decoded.get())
}

fn percents(report: &Report) -> Vec<f64> {
    report.tasks.iter().map(|t| t.score_percent).collect()
}

#[test]
fn who_finds_everything_has_all_points_and_who_finds_nothing_none() {
    let (report, outcomes, _) = read(Reader::Finds, 1500, usize::MAX);
    let report = report.unwrap();
    assert_eq!(percents(&report), [100.0; 8], "{outcomes:?}");
    assert_eq!(
        (report.score_percent_mean, report.complete),
        (Some(100.0), true)
    );
    let tasks: Vec<_> = report.tasks.iter().map(|t| (t.task, t.samples)).collect();
    assert_eq!(tasks, Task::ALL.map(|t| (t, 3)));
    for outcome in &outcomes {
        let room = 1500 - ANSWER_TOKENS_MAX;
        assert!(
            (room - 250..=room).contains(&outcome.prompt_tokens),
            "{outcome:?}"
        );
    }
    let (report, outcomes, _) = read(Reader::Misses, 1500, usize::MAX);
    assert_eq!(percents(&report.unwrap()), [0.0; 8], "{outcomes:?}");
}

#[test]
fn a_part_of_the_answers_is_a_part_of_the_points() {
    let (report, _, _) = read(Reader::FindsOne, 1500, usize::MAX);
    let report = report.unwrap();
    let expected = [100.0, 100.0, 100.0, 100.0, 100.0, 100.0, 25.0, 25.0];
    assert_eq!(percents(&report), expected);
    assert_eq!(report.score_percent_mean, Some(650.0 / 8.0));
}

#[test]
fn nothing_is_generated_that_cannot_change_the_score() {
    let (report, rambling, steps) = read(Reader::Rambles, 1500, usize::MAX);
    assert_eq!(percents(&report.unwrap()), [100.0; 8]);
    let (_, finding, steps_finding) = read(Reader::Finds, 1500, usize::MAX);
    assert_eq!(steps, steps_finding);
    let texts = |outcomes: &[Outcome]| {
        outcomes
            .iter()
            .map(|o| o.output.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(texts(&rambling), texts(&finding));
    for outcome in &rambling {
        let last = outcome
            .answers
            .iter()
            .max_by_key(|a| outcome.output.find(a.as_str()));
        assert!(
            outcome.output.ends_with(last.unwrap().as_str()),
            "{outcome:?}"
        );
    }
}

#[test]
fn an_interrupted_run_reports_what_is_done() {
    let (report, outcomes, _) = read(Reader::Finds, 1500, 5);
    let report = report.unwrap();
    assert!(!report.complete);
    assert_eq!(outcomes.len(), 5);
    let tasks: Vec<_> = report.tasks.iter().map(|t| (t.task, t.samples)).collect();
    assert_eq!(tasks, [(Task::Single1, 3), (Task::Single2, 2)]);
    assert_eq!(report.score_percent_mean, Some(100.0));
    let (report, _, _) = read(Reader::Finds, 1500, 0);
    let report = report.unwrap();
    assert_eq!((report.tasks.len(), report.score_percent_mean), (0, None));
}

#[test]
fn a_context_without_room_is_refused() {
    for n_ctx in [1, ANSWER_TOKENS_MAX, 180] {
        let (report, _, _) = read(Reader::Finds, n_ctx, usize::MAX);
        let error = report.unwrap_err();
        assert!(
            matches!(error, NiahError::Prompt(PromptError::TooShort { .. })),
            "{error}"
        );
    }
}
