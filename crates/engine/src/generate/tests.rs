use std::cell::Cell;
use std::convert::Infallible;

use gguf::{Metadata, StringArray};

use super::*;
use crate::sampler::SamplerParams;

const END: u32 = 2;
const N_VOCAB: usize = 3 + 256;

/// One token a byte: byte `b` is token `b + 3`; token 2 ends a text.
fn bytes_tokenizer() -> Tokenizer {
    let bytes = (0..=255).map(|b| format!("<0x{b:02X}>"));
    let tokens: StringArray = ["<unk>", "<s>", "</s>"]
        .into_iter()
        .map(str::to_owned)
        .chain(bytes)
        .collect();
    let kinds: Box<[i32]> = [2, 3, 3]
        .into_iter()
        .chain(std::iter::repeat_n(6, 256))
        .collect();
    let mut metadata = Metadata::new();
    metadata.set("tokenizer.ggml.model", "llama");
    metadata.set("tokenizer.ggml.tokens", tokens);
    metadata.set(
        "tokenizer.ggml.scores",
        vec![0.0f32; N_VOCAB].into_boxed_slice(),
    );
    metadata.set("tokenizer.ggml.token_type", kinds);
    metadata.set("tokenizer.ggml.eos_token_id", END);
    Tokenizer::from_gguf(&metadata).unwrap()
}

fn ids(text: &[u8]) -> Vec<u32> {
    text.iter().map(|&b| u32::from(b) + 3).collect()
}

/// A model that recites: after n tokens it expects the n-th of its script, after that the end.
struct Reciter {
    script: Vec<u32>,
    held: Vec<u32>,
    n_ctx: usize,
    logits: Vec<f32>,
    /// All tokens that it was ever given.
    computed: usize,
    /// The logit of rows that no token has.
    padding: f32,
}

impl Reciter {
    fn new(script: &[u8], n_ctx: usize) -> Self {
        Self {
            script: ids(script),
            held: Vec::new(),
            n_ctx,
            logits: vec![0.0; N_VOCAB],
            computed: 0,
            padding: 0.0,
        }
    }

    fn take(&mut self, token: u32) {
        assert!(self.held.len() < self.n_ctx, "the loop minds the context");
        self.held.push(token);
        self.computed += 1;
        self.logits.fill(0.0);
        self.logits[N_VOCAB..].fill(self.padding);
        let next = self.script.get(self.held.len()).copied().unwrap_or(END);
        self.logits[next as usize] = 10.0;
    }
}

impl Decoder for Reciter {
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
        for &token in tokens {
            if interrupted() {
                return Ok(false);
            }
            self.take(token);
        }
        Ok(true)
    }

    fn decode(&mut self, token: u32) -> Result<(), Infallible> {
        self.take(token);
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

struct Setup {
    tokenizer: Tokenizer,
}

/// What came, and the pieces in which it came.
type Outcome = (Generated, Vec<String>);

fn generate(
    generator: &mut Generator<'_, Reciter>,
    prompt: &[u8],
    tokens_max: Option<usize>,
    stop: &[&str],
) -> Outcome {
    let stop: Vec<String> = stop.iter().map(|&s| s.to_owned()).collect();
    let mut sampler = Sampler::new(SamplerParams::greedy(), N_VOCAB).unwrap();
    let mut pieces = Vec::new();
    let request = Request {
        prompt: &ids(prompt),
        tokens_max,
        stop: &stop,
    };
    let generated = generator
        .generate(request, &mut sampler, &|| false, &mut |piece| {
            pieces.push(piece.to_owned());
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(
        pieces.concat(),
        generated.text,
        "what is shown is what is returned"
    );
    (generated, pieces)
}

impl Setup {
    fn new() -> Self {
        Self {
            tokenizer: bytes_tokenizer(),
        }
    }

    fn recite(&self, script: &str, n_ctx: usize) -> Generator<'_, Reciter> {
        Generator::new(Reciter::new(script.as_bytes(), n_ctx), &self.tokenizer)
    }
}

#[test]
fn an_answer_ends_with_the_models_end() {
    let setup = Setup::new();
    let (g, pieces) = generate(&mut setup.recite("Hi! Grüß", 100), b"Hi!", None, &[]);
    assert_eq!((g.text.as_str(), g.finish), (" Grüß", Finish::End));
    assert_eq!(g.tokens, ids(" Grüß".as_bytes()));
    assert_eq!(
        pieces,
        [" ", "G", "r", "ü", "ß"],
        "whole characters as they come"
    );
    assert_eq!((g.timing.prompt_tokens, g.timing.generated_tokens), (3, 8));
    assert!(g.timing.ttft_s >= g.timing.prompt_s && g.timing.prompt_s > 0.0);
}

#[test]
fn who_watches_sees_every_token_and_what_it_was_chosen_from() {
    let setup = Setup::new();
    let mut generator = setup.recite("aüb", 100);
    let mut sampler = Sampler::new(SamplerParams::greedy(), N_VOCAB).unwrap();
    let request = Request {
        prompt: &ids(b"a"),
        tokens_max: None,
        stop: &["bc".to_owned()],
    };
    let mut seen = Vec::new();
    generator
        .generate_watched(request, &mut sampler, &|| false, &mut |progress| {
            let chosen = progress.chosen.map(|(token, logits)| {
                assert_eq!((logits.len(), logits[token as usize]), (N_VOCAB, 10.0));
                token
            });
            seen.push((chosen, progress.text.to_owned()));
            ControlFlow::Continue(())
        })
        .unwrap();
    let tokens = ids("üb".as_bytes());
    // Half a character is no text; b may begin the stop string until the end, which is no token of the text.
    let expected = [
        (Some(tokens[0]), ""),
        (Some(tokens[1]), "ü"),
        (Some(tokens[2]), ""),
        (None, "b"),
        (None, ""),
    ];
    assert_eq!(seen, expected.map(|(token, text)| (token, text.to_owned())));
}

#[test]
fn rows_beyond_the_vocabulary_are_never_chosen() {
    let setup = Setup::new();
    let mut generator = setup.recite("abc", 100);
    generator.decoder.logits = vec![0.0; N_VOCAB + 5];
    // The padding would win every time.
    generator.decoder.padding = 99.0;
    let (g, _) = generate(&mut generator, b"a", None, &[]);
    assert_eq!((g.text.as_str(), g.finish), ("bc", Finish::End));
}

#[test]
fn limits_end_it() {
    let setup = Setup::new();
    let (g, _) = generate(&mut setup.recite("abcdef", 100), b"a", Some(2), &[]);
    assert_eq!((g.text.as_str(), g.finish), ("bc", Finish::Length));
    let (g, _) = generate(&mut setup.recite("abcdef", 100), b"a", Some(0), &[]);
    assert_eq!(
        (g.text.as_str(), g.finish, g.timing.ttft_s),
        ("", Finish::Length, 0.0)
    );
    // Four cells: the prompt has two, b and c are computed, d needs no cell.
    let (g, _) = generate(&mut setup.recite("aabcdef", 4), b"aa", None, &[]);
    assert_eq!((g.text.as_str(), g.finish), ("bcd", Finish::ContextFull));
    // A character that is cut in the middle is seen as such.
    let (g, _) = generate(&mut setup.recite("aü", 100), b"a", Some(1), &[]);
    assert_eq!((g.text.as_str(), g.finish), ("\u{FFFD}", Finish::Length));
}

#[test]
fn stop_strings_are_never_shown() {
    let setup = Setup::new();
    let (g, pieces) = generate(
        &mut setup.recite("a: one two three", 100),
        b"a:",
        None,
        &["two", "xyz"],
    );
    assert_eq!((g.text.as_str(), g.finish), (" one ", Finish::StopString));
    assert!(pieces.iter().all(|p| !p.contains('t')), "{pieces:?}");
    // What only looked like a stop string is shown in the end.
    let (g, _) = generate(&mut setup.recite("a: on tw", 100), b"a:", None, &["two"]);
    assert_eq!((g.text.as_str(), g.finish), (" on tw", Finish::End));
}

#[test]
fn a_prompt_that_goes_on_is_not_computed_twice() {
    let setup = Setup::new();
    let mut generator = setup.recite("ab cd ef", 100);
    let (g, _) = generate(&mut generator, b"ab", Some(3), &[]);
    assert_eq!(g.text, " cd");
    // a, b, the space and c were computed; d was chosen last and never computed.
    assert_eq!(generator.decoder().computed, 4);
    let (g, _) = generate(&mut generator, b"ab cd e", None, &[]);
    assert_eq!(
        (
            g.text.as_str(),
            g.timing.reused_tokens,
            g.timing.prompt_tokens
        ),
        ("f", 4, 3)
    );
    // The same prompt again: its last token alone is computed, for the logits.
    let (g, _) = generate(&mut generator, b"ab cd e", None, &[]);
    assert_eq!(
        (
            g.text.as_str(),
            g.timing.reused_tokens,
            g.timing.prompt_tokens
        ),
        ("f", 6, 1)
    );
    // Another beginning: nothing is kept beyond what is common.
    let (g, _) = generate(&mut generator, b"abX", None, &[]);
    assert_eq!((g.timing.reused_tokens, g.timing.prompt_tokens), (2, 1));
    generator.clear();
    let (g, _) = generate(&mut generator, b"abX", None, &[]);
    assert_eq!(g.timing.reused_tokens, 0);
}

#[test]
fn an_interruption_leaves_a_state_that_can_go_on() {
    let setup = Setup::new();
    let mut sampler = Sampler::new(SamplerParams::greedy(), N_VOCAB).unwrap();
    let prompt = ids(b"abcd");
    let request = Request {
        prompt: &prompt,
        tokens_max: None,
        stop: &[],
    };
    for patience in 0..8 {
        let mut generator = setup.recite("abcdefg", 100);
        let asked = Cell::new(0);
        let interrupted = || {
            asked.set(asked.get() + 1);
            asked.get() > patience
        };
        let g = generator
            .generate(request, &mut sampler, &interrupted, &mut |_| {
                ControlFlow::Continue(())
            })
            .unwrap();
        // Four questions in the prompt, then one before each token.
        let expected = ["", "", "", "", "", "e", "ef", "efg"][patience];
        assert_eq!(
            (g.text.as_str(), g.finish),
            (expected, Finish::Interrupted),
            "{patience}"
        );
        assert_eq!(g.timing.prompt_tokens, patience.min(4));
        let (again, _) = generate(&mut generator, b"abcd", None, &[]);
        assert_eq!(
            (again.text.as_str(), again.finish),
            ("efg", Finish::End),
            "{patience}"
        );
    }
    let mut generator = setup.recite("abcdefg", 100);
    let g = generator
        .generate(request, &mut sampler, &|| false, &mut |_| {
            ControlFlow::Break(())
        })
        .unwrap();
    assert_eq!((g.text.as_str(), g.finish), ("e", Finish::Interrupted));
}

#[test]
fn prompts_that_cannot_be_answered_are_refused() {
    let setup = Setup::new();
    let mut sampler = Sampler::new(SamplerParams::greedy(), N_VOCAB).unwrap();
    let mut ask = |prompt: &[u32], stop: &[String]| {
        let request = Request {
            prompt,
            tokens_max: None,
            stop,
        };
        let mut generator = setup.recite("abc", 3);
        generator
            .generate(request, &mut sampler, &|| false, &mut |_| {
                ControlFlow::Continue(())
            })
            .unwrap_err()
    };
    assert!(matches!(ask(&[], &[]), GenerateError::EmptyPrompt));
    assert!(matches!(
        ask(&ids(b"abc"), &[]),
        GenerateError::PromptTooLong {
            tokens: 3,
            n_ctx: 3
        }
    ));
    assert!(matches!(
        ask(&ids(b"a"), &[String::new()]),
        GenerateError::Stop(_)
    ));
    assert!(matches!(ask(&[9999], &[]), GenerateError::Sampler(_)));
}

#[test]
fn rates_leave_out_the_token_that_costs_no_step() {
    let timing = Timing {
        prompt_tokens: 10,
        prompt_s: 2.0,
        generated_tokens: 5,
        decode_s: 2.0,
        ..Timing::default()
    };
    assert_eq!((timing.prompt_tok_s(), timing.decode_tok_s()), (5.0, 2.0));
    assert_eq!(Timing::default().decode_tok_s(), 0.0);
}
