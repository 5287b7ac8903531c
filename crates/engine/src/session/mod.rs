//! A session: one sequence's cache, and the calls that extend it.
//!
//! What a token's logits are depends on the tokens before it, the cache's types and the model alone: not on how the tokens
//! were cut into calls or chunks.

mod forward;
mod kv;

pub use cpu::attention::KvType;

use crate::error::Error;
use crate::model::{Config, Model};
use cpu::attention::CELLS;
use forward::{LOGIT_ROWS, Work};
use kv::Cache;
use std::ops::ControlFlow;

/// The context that is taken when none is asked for, if the model was trained with at least as much.
pub const N_CTX_DEFAULT: usize = 8192;

/// Tokens of a prompt that go through the layers at a time unless told otherwise.
pub const UBATCH_DEFAULT: usize = 512;

/// The largest ubatch: beyond it work space outgrows what caches hold, for nothing.
pub const UBATCH_MAX: usize = 16_384;

/// How a session is set up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionOptions {
    /// Cells.
    pub n_ctx: usize,
    /// Type of K.
    pub type_k: KvType,
    /// Type of V.
    pub type_v: KvType,
    /// Tokens a chunk.
    pub ubatch: usize,
}

impl SessionOptions {
    /// The defaults for a model: its trained context up to [`N_CTX_DEFAULT`], f16.
    pub fn for_model(config: &Config) -> Self {
        Self {
            n_ctx: config.n_ctx_train.min(N_CTX_DEFAULT),
            type_k: KvType::F16,
            type_v: KvType::F16,
            ubatch: UBATCH_DEFAULT,
        }
    }
}

/// Which logits a prefill is for.
pub enum Wanted<'f> {
    /// None.
    None,
    /// Those of the last token, afterwards in [`Session::logits`].
    Last,
    /// Those of every token: the callback gets its position and `[V]` logits, and may end the prefill.
    All(&'f mut dyn FnMut(usize, &[f32]) -> ControlFlow<()>),
}

impl std::fmt::Debug for Wanted<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::None => "None",
            Self::Last => "Last",
            Self::All(_) => "All",
        })
    }
}

/// One sequence in computation.
#[derive(Debug)]
pub struct Session<'m> {
    model: &'m Model,
    options: SessionOptions,
    cache: Cache,
    work: Work,
    n_past: usize,
}

impl<'m> Session<'m> {
    /// An empty session.
    ///
    /// # Errors
    /// If the options are impossible or there is no memory for the work space. Cells are taken as the context grows.
    pub fn new(model: &'m Model, options: &SessionOptions) -> Result<Self, Error> {
        let mut options = options.clone();
        if options.n_ctx == 0 {
            return Err(Error::Options(
                "a context of 0 tokens holds nothing".to_owned(),
            ));
        }
        if options.ubatch == 0 || options.ubatch > UBATCH_MAX {
            return Err(Error::Options(format!(
                "a ubatch of {} tokens: expected 1 to {UBATCH_MAX}",
                options.ubatch
            )));
        }
        options.ubatch = options.ubatch.min(options.n_ctx);
        let cache = Cache::new(
            model.config(),
            options.n_ctx,
            options.type_k,
            options.type_v,
        )?;
        let work = Work::new(model, &cache, options.ubatch, options.n_ctx)?;
        Ok(Self {
            model,
            options,
            cache,
            work,
            n_past: 0,
        })
    }

    /// The model.
    pub fn model(&self) -> &'m Model {
        self.model
    }

    /// Cells.
    pub fn n_ctx(&self) -> usize {
        self.options.n_ctx
    }

    /// Cells taken.
    pub fn n_past(&self) -> usize {
        self.n_past
    }

    /// Tokens a chunk.
    pub fn ubatch(&self) -> usize {
        self.options.ubatch
    }

    /// Type of K.
    pub fn type_k(&self) -> KvType {
        self.options.type_k
    }

    /// Type of V.
    pub fn type_v(&self) -> KvType {
        self.options.type_v
    }

    /// Bytes of the cache when the context is full.
    pub fn kv_bytes(&self) -> u64 {
        self.cache.bytes()
    }

    /// Bytes of the work space.
    pub fn work_bytes(&self) -> u64 {
        self.work.bytes()
    }

    /// Takes tokens, a ubatch at a time.
    ///
    /// # Errors
    /// If they do not fit, one is not in the vocabulary, or memory for cells is refused. The session then holds the tokens
    /// of the chunks that were done.
    pub fn prefill(&mut self, tokens: &[u32], mut wanted: Wanted<'_>) -> Result<(), Error> {
        self.check(tokens)?;
        let chunks = tokens.chunks(self.options.ubatch);
        let last = chunks.len().saturating_sub(1);
        for (i, chunk) in chunks.enumerate() {
            let position = self.n_past;
            self.cache.reserve(position + chunk.len())?;
            self.work
                .forward(self.model, &mut self.cache, position, chunk);
            self.n_past += chunk.len();
            match &mut wanted {
                Wanted::None => {}
                Wanted::Last if i == last => {
                    self.work.logits(self.model, chunk.len() - 1, 1);
                }
                Wanted::Last => {}
                Wanted::All(each) => {
                    let n_vocab = self.model.config().n_vocab;
                    for first in (0..chunk.len()).step_by(LOGIT_ROWS) {
                        let rows = LOGIT_ROWS.min(chunk.len() - first);
                        let logits = self.work.logits(self.model, first, rows);
                        for (t, logits) in logits.chunks_exact(n_vocab).enumerate() {
                            if each(position + first + t, logits).is_break() {
                                return Ok(());
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Takes one token; its logits are in [`Session::logits`] afterwards.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn decode(&mut self, token: u32) -> Result<(), Error> {
        self.prefill(&[token], Wanted::Last)
    }

    /// The logits `[V]` of the last token that [`Wanted::Last`] or [`Session::decode`] was for.
    pub fn logits(&self) -> &[f32] {
        &self.work.logits[..self.model.config().n_vocab]
    }

    /// Forgets all tokens but the first `n`.
    pub fn truncate(&mut self, n: usize) {
        self.n_past = self.n_past.min(n);
    }

    fn check(&self, tokens: &[u32]) -> Result<(), Error> {
        let n_vocab = self.model.config().n_vocab;
        if let Some(&token) = tokens.iter().find(|&&t| t as usize >= n_vocab) {
            return Err(Error::Token { token, n_vocab });
        }
        if tokens.len() > self.options.n_ctx - self.n_past {
            return Err(Error::ContextFull {
                n_ctx: self.options.n_ctx,
                n_past: self.n_past,
                tokens: tokens.len(),
            });
        }
        Ok(())
    }
}

/// Cells a block of the cache.
pub const BLOCK_CELLS: usize = CELLS;
