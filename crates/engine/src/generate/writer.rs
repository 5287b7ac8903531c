//! An answer in the making: what becomes of the logits of each step.

use super::{Finish, GenerateError, Request};
use crate::sampler::Sampler;
use crate::stop::{Step, StopReason, Stopper};
use crate::tokenizer::{DecodeOptions, Detokenizer, Tokenizer};

/// From logits to tokens and their text, until something says stop. Who computes the logits does not matter here.
#[derive(Debug)]
pub struct Writer<'t> {
    tokenizer: &'t Tokenizer,
    stopper: Stopper,
    detokenizer: Detokenizer<&'t Tokenizer>,
    tokens_max: Option<usize>,
    /// Tokens that the context has room for.
    room: usize,
    tokens: Vec<u32>,
}

/// What came of a step.
#[derive(Debug)]
pub struct Chosen<'w> {
    /// The token.
    pub token: u32,
    /// The text that is complete now. It may belong to earlier tokens, and may be empty.
    pub text: &'w str,
    /// Why the answer ends with it, if it does. With [`Finish::End`] the token is no part of the text.
    pub finish: Option<Finish>,
}

impl<'t> Writer<'t> {
    /// The begin of an answer in a context of `n_ctx` tokens. Settings are checked, and the sampler learns of the prompt.
    ///
    /// # Errors
    /// If the prompt is empty or leaves no room, or settings make no sense.
    pub fn new<E: std::error::Error>(
        tokenizer: &'t Tokenizer,
        n_ctx: usize,
        request: Request<'_>,
        sampler: &mut Sampler,
    ) -> Result<Self, GenerateError<E>> {
        let Request {
            prompt,
            tokens_max,
            stop,
        } = request;
        if prompt.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        if prompt.len() >= n_ctx {
            return Err(GenerateError::PromptTooLong {
                tokens: prompt.len(),
                n_ctx,
            });
        }
        let stopper = Stopper::new(tokenizer.eog(), stop, tokens_max.map(|n| n as u64))?;
        for &token in prompt {
            sampler.accept(token)?;
        }
        // The last token needs no cell: nothing is computed from it.
        let room = n_ctx - prompt.len() + 1;
        Ok(Self {
            tokenizer,
            stopper,
            detokenizer: Detokenizer::new(tokenizer, DecodeOptions::CONTINUATION),
            tokens_max,
            room,
            tokens: Vec::with_capacity(tokens_max.map_or(room, |n| n.min(room))),
        })
    }

    /// Why it ends before its first token, if it does.
    pub fn finished(&self) -> Option<Finish> {
        (self.tokens_max == Some(0)).then_some(Finish::Length)
    }

    /// Those of logits that tokens have: rows beyond the tokenizer's vocabulary are padding.
    pub fn of_tokens<'l>(&self, logits: &'l [f32]) -> &'l [f32] {
        &logits[..self.n_tokens().min(logits.len())]
    }

    /// How many tokens there are to choose from.
    pub fn n_tokens(&self) -> usize {
        self.tokenizer.n_vocab()
    }

    /// Chooses a token.
    ///
    /// # Errors
    /// If there is none to choose.
    pub fn choose<E: std::error::Error>(
        &mut self,
        logits: &[f32],
        sampler: &mut Sampler,
    ) -> Result<Chosen<'_>, GenerateError<E>> {
        let token = sampler.sample(self.of_tokens(logits))?;
        sampler.accept(token)?;
        let Step { text, stop } = self.stopper.step(token, self.detokenizer.push(token)?);
        let finish = match stop {
            Some(StopReason::EndToken(_)) => Some(Finish::End),
            Some(StopReason::StopString(_)) => Some(Finish::StopString),
            Some(StopReason::MaxTokens) => Some(Finish::Length),
            None => None,
        };
        if finish != Some(Finish::End) {
            self.tokens.push(token);
        }
        let is_full = finish.is_none() && self.tokens.len() >= self.room;
        Ok(Chosen {
            token,
            text,
            finish: finish.or(is_full.then_some(Finish::ContextFull)),
        })
    }

    /// Ends the answer: the text that was held back until now, and why it ended, which may be a stop string in that text.
    pub fn end(&mut self, finish: Finish) -> (&str, Finish) {
        if finish == Finish::StopString {
            return ("", finish);
        }
        let Step { text, stop } = self.stopper.finish(self.detokenizer.finish());
        match stop {
            Some(_) => (text, Finish::StopString),
            None => (text, finish),
        }
    }

    /// The tokens so far, without one that ended the text.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The tokens.
    pub fn into_tokens(self) -> Vec<u32> {
        self.tokens
    }
}
