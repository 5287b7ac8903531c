//! From a prompt to an answer: prefill, choose, decode, until something says stop.
//!
//! Start reading at [`Generator::generate`]. The loop knows nothing of models: it drives a [`Decoder`], which a session
//! is, and a few lines of test code are too.

pub mod memory;
mod sequences;
mod writer;

pub use sequences::{CacheBytes, GateNow, Sequences};
pub use writer::{Chosen, Writer};

use std::io;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::sampler::{Sampler, SamplerError};
use crate::session::{Session, SessionFileError, Wanted};
use crate::stop::StopError;
use crate::tokenizer::{Tokenizer, TokenizerError};

/// What the loop needs of a model's state.
pub trait Decoder {
    /// Why it could not go on.
    type Error: std::error::Error;

    /// Tokens that it can hold.
    fn n_ctx(&self) -> usize;
    /// Tokens that it holds.
    fn n_past(&self) -> usize;
    /// Takes tokens; afterwards [`logits`](Self::logits) are those of the last one. `interrupted` is asked now and then;
    /// after a yes the decoder holds what it got so far, and returns `false`.
    fn prefill(
        &mut self,
        tokens: &[u32],
        interrupted: &dyn Fn() -> bool,
    ) -> Result<bool, Self::Error>;
    /// Takes one token.
    fn decode(&mut self, token: u32) -> Result<(), Self::Error>;
    /// The logits after the last token.
    fn logits(&self) -> &[f32];
    /// Forgets all tokens but the first `n`, or more where fewer cannot be kept. Returns how many are kept.
    fn truncate(&mut self, n: usize) -> usize;
}

impl Decoder for Session<'_> {
    type Error = crate::Error;

    fn n_ctx(&self) -> usize {
        Session::n_ctx(self)
    }

    fn n_past(&self) -> usize {
        Session::n_past(self)
    }

    fn prefill(
        &mut self,
        tokens: &[u32],
        interrupted: &dyn Fn() -> bool,
    ) -> Result<bool, Self::Error> {
        // In the session's own chunks, so that asking costs nothing and changes nothing.
        let chunks = tokens.chunks(self.ubatch());
        let last = chunks.len().saturating_sub(1);
        for (index, chunk) in chunks.enumerate() {
            if interrupted() {
                return Ok(false);
            }
            let wanted = if index == last {
                Wanted::Last
            } else {
                Wanted::None
            };
            Session::prefill(self, chunk, wanted)?;
        }
        Ok(true)
    }

    fn decode(&mut self, token: u32) -> Result<(), Self::Error> {
        Session::decode(self, token)
    }

    fn logits(&self) -> &[f32] {
        Session::logits(self)
    }

    fn truncate(&mut self, n: usize) -> usize {
        Session::truncate(self, n)
    }
}

impl Generator<'_, Session<'_>> {
    /// Ends all records, as [`Session::finish_records`] does.
    ///
    /// # Errors
    /// The first one of writing them.
    pub fn finish_records(&mut self) -> io::Result<()> {
        self.decoder.finish_records()
    }

    /// Writes the cells of what is held to a file, in place of an older one, and a note beside them.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn save(&self, note: &str, path: &Path) -> Result<(), SessionFileError> {
        self.decoder.save(&self.held, note, path)
    }

    /// Holds what a file holds. Returns the note beside it.
    ///
    /// # Errors
    /// If the file is damaged, of another model or cache type, or has no room.
    pub fn restore(&mut self, path: &Path) -> Result<String, SessionFileError> {
        match self.decoder.restore(path) {
            Ok(restored) => {
                self.held = restored.tokens;
                Ok(restored.note)
            }
            Err(error) => {
                // Nothing is left if memory ran out.
                self.held.truncate(self.decoder.n_past());
                Err(error)
            }
        }
    }
}

impl<D: Decoder> Decoder for &mut D {
    type Error = D::Error;

    fn n_ctx(&self) -> usize {
        D::n_ctx(self)
    }

    fn n_past(&self) -> usize {
        D::n_past(self)
    }

    fn prefill(
        &mut self,
        tokens: &[u32],
        interrupted: &dyn Fn() -> bool,
    ) -> Result<bool, Self::Error> {
        D::prefill(self, tokens, interrupted)
    }

    fn decode(&mut self, token: u32) -> Result<(), Self::Error> {
        D::decode(self, token)
    }

    fn logits(&self) -> &[f32] {
        D::logits(self)
    }

    fn truncate(&mut self, n: usize) -> usize {
        D::truncate(self, n)
    }
}

/// Why a generation failed.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError<E: std::error::Error> {
    /// There is nothing to begin with.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// The prompt leaves no room for an answer.
    #[error(
        "the prompt has {tokens} tokens, the context holds {n_ctx}, one of which the answer needs"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// What the context holds.
        n_ctx: usize,
    },
    /// The model failed.
    #[error(transparent)]
    Decoder(E),
    /// A token cannot be turned into text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// No token can be chosen.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    /// The stop strings cannot be used.
    #[error(transparent)]
    Stop(#[from] StopError),
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// The model ended its text.
    End,
    /// A stop string appeared.
    StopString,
    /// As many tokens as were asked for.
    Length,
    /// The context is full.
    ContextFull,
    /// The caller asked to stop.
    Interrupted,
}

/// How long it took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Timing {
    /// Prompt tokens that were computed.
    pub prompt_tokens: usize,
    /// Prompt tokens that were there from before.
    pub reused_tokens: usize,
    /// Tokens generated, the one that ended the text included.
    pub generated_tokens: usize,
    /// Time for the prompt.
    pub prompt_s: f64,
    /// Time from the first generated token to the last.
    pub decode_s: f64,
    /// Time from the beginning to the first generated token.
    pub ttft_s: f64,
}

impl Timing {
    /// Prompt tokens a second.
    pub fn prompt_tok_s(&self) -> f64 {
        rate(self.prompt_tokens, self.prompt_s)
    }

    /// Generated tokens a second. The first one costs no step: it comes out of the prompt.
    pub fn decode_tok_s(&self) -> f64 {
        rate(self.generated_tokens.saturating_sub(1), self.decode_s)
    }
}

fn rate(count: usize, seconds: f64) -> f64 {
    if count == 0 || seconds <= 0.0 {
        0.0
    } else {
        count as f64 / seconds
    }
}

/// What came out.
#[derive(Debug, Clone, PartialEq)]
pub struct Generated {
    /// The tokens, without one that ended the text.
    pub tokens: Vec<u32>,
    /// Their text, up to a stop string.
    pub text: String,
    /// Why it ended.
    pub finish: Finish,
    /// How long it took.
    pub timing: Timing,
}

/// What is asked for.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The prompt.
    pub prompt: &'a [u32],
    /// Most tokens to generate.
    pub tokens_max: Option<usize>,
    /// Texts that end the generation.
    pub stop: &'a [String],
}

/// A step of a generation, for those who watch it.
#[derive(Debug)]
pub struct Progress<'a> {
    /// The token that was chosen, and what it was chosen from: one logit for each token of the vocabulary. `None` for one
    /// that ended the text, and for text that was held back until the end.
    pub chosen: Option<(u32, &'a [f32])>,
    /// The text that is complete now. It may belong to earlier tokens, and may be empty.
    pub text: &'a str,
}

/// A decoder, and the tokens that it holds, so that a prompt which begins like the last one is not computed twice.
pub struct Generator<'t, D> {
    decoder: D,
    tokenizer: &'t Tokenizer,
    /// What the decoder holds: always `decoder.n_past()` tokens.
    held: Vec<u32>,
}

impl<'t, D: Decoder> Generator<'t, D> {
    /// Begins with whatever the decoder holds forgotten.
    pub fn new(mut decoder: D, tokenizer: &'t Tokenizer) -> Self {
        decoder.truncate(0);
        Self {
            held: Vec::with_capacity(decoder.n_ctx()),
            decoder,
            tokenizer,
        }
    }

    /// The decoder.
    pub fn decoder(&self) -> &D {
        &self.decoder
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.decoder.truncate(0);
        self.held.clear();
    }

    /// Generates an answer. `on_text` gets the text as it comes, in whole characters; with
    /// [`Break`](ControlFlow::Break) it ends the generation. `interrupted` is asked before each token.
    pub fn generate(
        &mut self,
        request: Request<'_>,
        sampler: &mut Sampler,
        interrupted: &dyn Fn() -> bool,
        on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Generated, GenerateError<D::Error>> {
        self.generate_watched(request, sampler, interrupted, &mut |progress| {
            if progress.text.is_empty() {
                ControlFlow::Continue(())
            } else {
                on_text(progress.text)
            }
        })
    }

    /// The same for those who want to see every token: `on_step` is called for each, also where no text is complete yet.
    pub fn generate_watched(
        &mut self,
        request: Request<'_>,
        sampler: &mut Sampler,
        interrupted: &dyn Fn() -> bool,
        on_step: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
    ) -> Result<Generated, GenerateError<D::Error>> {
        let prompt = request.prompt;
        // Settings are checked before any work is done.
        let mut writer = Writer::new(self.tokenizer, self.decoder.n_ctx(), request, sampler)?;

        let begun = Instant::now();
        let mut timing = Timing {
            reused_tokens: self.keep_common(prompt),
            ..Timing::default()
        };
        let prompt_done = self.prefill(&prompt[timing.reused_tokens..], interrupted)?;
        timing.prompt_tokens = self.held.len() - timing.reused_tokens;
        timing.prompt_s = begun.elapsed().as_secs_f64();

        let mut text = String::new();
        let mut show = |progress: Progress<'_>| {
            text.push_str(progress.text);
            on_step(progress)
        };
        let mut first: Option<Instant> = None;
        let finish = loop {
            if !prompt_done || interrupted() {
                break Finish::Interrupted;
            }
            if let Some(finish) = writer.finished() {
                break finish;
            }
            let logits = self.decoder.logits();
            let of_tokens = writer.of_tokens(logits);
            let chosen = writer.choose(logits, sampler)?;
            timing.generated_tokens += 1;
            let now = Instant::now();
            timing.decode_s = now.duration_since(*first.get_or_insert(now)).as_secs_f64();

            let (token, finish) = (chosen.token, chosen.finish);
            let is_end = finish == Some(Finish::End);
            let shown = show(Progress {
                chosen: (!is_end).then_some((token, of_tokens)),
                text: chosen.text,
            });
            match finish {
                None | Some(Finish::ContextFull) if shown.is_break() => break Finish::Interrupted,
                Some(finish) => break finish,
                None => {}
            }
            self.decoder.decode(token).map_err(GenerateError::Decoder)?;
            self.held.push(token);
        };
        timing.ttft_s = first
            .map_or(Duration::ZERO, |f| f.duration_since(begun))
            .as_secs_f64();
        let (rest, finish) = writer.end(finish);
        if finish != Finish::StopString || !rest.is_empty() {
            // Nothing is left to end.
            let _ = show(Progress {
                chosen: None,
                text: rest,
            });
        }
        Ok(Generated {
            tokens: writer.into_tokens(),
            text,
            finish,
            timing,
        })
    }

    /// Keeps the cells of the longest common beginning; the last token of the prompt is computed in any case, for its
    /// logits. Returns how many are kept.
    fn keep_common(&mut self, prompt: &[u32]) -> usize {
        let common = self
            .held
            .iter()
            .zip(prompt)
            .take_while(|(a, b)| a == b)
            .count();
        let kept = self.decoder.truncate(common.min(prompt.len() - 1));
        self.held.truncate(kept);
        kept
    }

    fn prefill(
        &mut self,
        tokens: &[u32],
        interrupted: &dyn Fn() -> bool,
    ) -> Result<bool, GenerateError<D::Error>> {
        let before = self.held.len();
        let done = self.decoder.prefill(tokens, interrupted);
        // Also after an error: what the decoder holds is what counts.
        let taken = self.decoder.n_past() - before;
        self.held.extend_from_slice(&tokens[..taken]);
        done.map_err(GenerateError::Decoder)
    }
}

#[cfg(test)]
mod tests;
