//! A step over tokens of several sequences.

use super::forward::{Tokens, Work};
use super::{Part, Run, SessionOptions, TokenOrigin, Wanted, Wants};
use crate::backend::{Backend, LOGIT_ROWS};
use crate::error::Error;
use crate::kv::{Cache, Taking};
use crate::model::Model;

/// What gets a part's number, and what it wants.
type Each<'e> = dyn FnMut(usize, &[f32]) + 'e;

impl<B: Backend> Run<B> {
    /// Takes all parts, as many at a time as go together.
    pub(super) fn step(
        &mut self,
        model: &Model,
        options: &SessionOptions,
        parts: &[Part<'_>],
        each: &mut Each<'_>,
    ) -> Result<(), Error> {
        let selected = self.cache.selected();
        let mut done = 0;
        let mut result = Ok(());
        while done < parts.len() && result.is_ok() {
            let n = together(&self.cache, options, &parts[done..]);
            let each = &mut |part: usize, logits: &[f32]| each(done + part, logits);
            result = match &parts[done..done + n] {
                [part] => self.alone(model, options, part, each),
                parts => self.together(model, options, parts, each),
            };
            done += n;
        }
        self.cache.select(selected);
        result
    }

    fn alone(
        &mut self,
        model: &Model,
        options: &SessionOptions,
        part: &Part<'_>,
        each: &mut Each<'_>,
    ) -> Result<(), Error> {
        self.cache.select(part.sequence.0);
        let by_one = part.origin == TokenOrigin::Generated && part.wants != Wants::Outputs;
        if by_one && (!B::ALIKE || part.tokens.len() == 1) {
            for &token in part.tokens {
                self.decode(model, options, token)?;
            }
            if part.wants.is_logits() {
                each(0, self.backend.logits(1));
            }
            return Ok(());
        }
        let mut outputs = Vec::new();
        let mut wanted = match part.wants {
            Wants::Nothing => Wanted::None,
            Wants::Logits | Wants::Largest(_) => Wanted::Last,
            Wants::Outputs => Wanted::Outputs(&mut outputs),
        };
        self.prefill(model, options, part.tokens, &mut wanted)?;
        match part.wants {
            Wants::Nothing => {}
            Wants::Logits | Wants::Largest(_) => each(0, self.backend.logits(1)),
            Wants::Outputs => each(0, &outputs),
        }
        Ok(())
    }

    fn together(
        &mut self,
        model: &Model,
        options: &SessionOptions,
        parts: &[Part<'_>],
        each: &mut Each<'_>,
    ) -> Result<(), Error> {
        let Self {
            backend,
            cache,
            work,
            ..
        } = self;
        let takings: Vec<Taking> = parts.iter().map(taking).collect();
        let tokens: Vec<u32> = parts.iter().flat_map(|part| part.tokens).copied().collect();
        if let Some(store) = backend.experts_mut() {
            // Experts are served as for a prompt, which several tokens at once are like.
            store.begin_prompt(tokens.len());
        }
        cache.begin_all(backend, &takings)?;
        let rotation = options.rotation(model.config());
        let n = parts.len();
        if n <= LOGIT_ROWS && parts.iter().all(is_answering) {
            let (positions, again) = (cache.positions().to_vec(), cache.again());
            backend.step(&positions, &tokens, again, |backend| {
                work.forward(backend, model, cache, rotation, &tokens, Tokens::All);
                match largest(parts) {
                    Some(of) => work.compute_largest(backend, n, of),
                    None => work.compute_logits(backend, n),
                }
            });
            backend.finish()?;
            cache.advance();
            let logits = backend.logits(n).chunks_exact(model.config().n_vocab);
            for (part, logits) in logits.enumerate() {
                each(part, logits);
            }
            return Ok(());
        }
        work.forward(backend, model, cache, rotation, &tokens, Tokens::All);
        backend.finish()?;
        cache.advance();

        let mut wanted = Vec::with_capacity(parts.len());
        let mut row = 0;
        for (i, part) in parts.iter().enumerate() {
            let rows = row..row + part.tokens.len();
            row = rows.end;
            match part.wants {
                Wants::Nothing => {}
                Wants::Logits | Wants::Largest(_) => wanted.push((i, row - 1)),
                Wants::Outputs => {
                    let mut outputs = Vec::new();
                    work.outputs(backend, rows, &mut outputs)?;
                    each(i, &outputs);
                }
            }
        }
        let neighbours = wanted.chunk_by(|(_, a), (_, b)| a + 1 == *b);
        for rows in neighbours.flat_map(|rows| rows.chunks(LOGIT_ROWS)) {
            give_logits(backend, work, rows, model.config().n_vocab, each)?;
        }
        Ok(())
    }
}

/// Gives the logits of parts whose last tokens are neighbours, as pairs of part and row.
fn give_logits<B: Backend>(
    backend: &mut B,
    work: &Work<B>,
    rows: &[(usize, usize)],
    n_vocab: usize,
    each: &mut Each<'_>,
) -> Result<(), Error> {
    let (first, last) = (rows[0].1, rows[rows.len() - 1].1);
    let logits = work.logits(backend, first..last + 1)?;
    for ((part, _), logits) in rows.iter().zip(logits.chunks_exact(n_vocab)) {
        each(*part, logits);
    }
    Ok(())
}

/// Whether a part is a generated token, behind which another one is wanted.
fn is_answering(part: &Part<'_>) -> bool {
    part.origin == TokenOrigin::Generated && part.tokens.len() == 1 && part.wants.is_logits()
}

/// Of how many logits each part wants the largest alone, if all do.
fn largest(parts: &[Part<'_>]) -> Option<usize> {
    let Wants::Largest(of) = parts[0].wants else {
        return None;
    };
    let all = parts.iter().all(|part| part.wants == Wants::Largest(of));
    all.then_some(of)
}

fn taking(part: &Part<'_>) -> Taking {
    Taking {
        sequence: part.sequence.0,
        tokens: part.tokens.len(),
        generated: part.origin == TokenOrigin::Generated,
    }
}

/// How many of the parts, from the first on, go through the layers together: their rows fit into a ubatch, and what they write into
/// device memory.
fn together<B: Backend>(cache: &Cache<B>, options: &SessionOptions, parts: &[Part<'_>]) -> usize {
    let (mut rows, mut blocks) = (0, 0);
    let fits = |part: &&Part<'_>| {
        // Generated tokens that are computed again have the bits of steps of one.
        if !B::ALIKE && part.origin == TokenOrigin::Generated && part.tokens.len() > 1 {
            return false;
        }
        let (written, room) = cache.blocks_written(&taking(part));
        rows += part.tokens.len();
        blocks += written;
        rows <= options.ubatch && blocks <= room
    };
    parts.iter().take_while(fits).count().max(1)
}
