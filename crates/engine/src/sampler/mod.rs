//! From logits to a token.
//!
//! The stages, always in this order; each sees what the one before left:
//!
//! 1. `logit_bias` is added.
//! 2. `repeat_penalty`, then `frequency_penalty` and `presence_penalty`, over the last `penalty_last_n` tokens.
//! 3. DRY: continuing a repetition costs `dry_multiplier * dry_base ^ (length - dry_allowed_length)`.
//! 4. With temperature 0 the highest logit wins here, of equals the lower id.
//! 5. `top_k`, 6. `typical_p`, 7. `top_p`, 8. `min_p` take tokens away, at temperature 1.
//! 9. `temperature`, and the draw.
//!
//! The result depends on the logits, the settings (with the seed) and the tokens accepted before, and on nothing else: the
//! random number is a function of the seed and of how many tokens were accepted, `exp`, `log` and `pow` come from a pure
//! Rust library rather than the platform, and sums are taken in f64 in order of id.

mod candidates;
mod error;
mod history;
mod params;
pub(crate) mod random;

pub use error::SamplerError;
pub use params::SamplerParams;

use candidates::Candidates;
use history::{History, replace};
use params::token_in_range;

/// Chooses tokens, one after another.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplerParams,
    n_vocab: usize,
    /// Sorted.
    breakers: Vec<u32>,
    history: History,
    /// The logits with penalties, where there are any.
    changed: Vec<f32>,
    candidates: Candidates,
}

impl Sampler {
    /// A sampler for a vocabulary of this size; the settings are checked.
    pub fn new(params: SamplerParams, n_vocab: usize) -> Result<Self, SamplerError> {
        params.check(n_vocab)?;
        let mut breakers = params.dry_breakers.clone();
        breakers.sort_unstable();
        Ok(Sampler {
            params,
            n_vocab,
            breakers,
            history: History::default(),
            changed: Vec::new(),
            candidates: Candidates::default(),
        })
    }

    /// The settings.
    pub fn params(&self) -> &SamplerParams {
        &self.params
    }

    /// How many tokens were accepted: the position that the next random number belongs to.
    pub fn position(&self) -> usize {
        self.history.len()
    }

    /// Says that a token is part of the text now, be it sampled, forced, or the prompt's.
    pub fn accept(&mut self, token: u32) -> Result<(), SamplerError> {
        token_in_range("accept", token, self.n_vocab)?;
        self.history.push(token, &self.params);
        Ok(())
    }

    /// Forgets the accepted tokens: the next text is as from a new sampler.
    pub fn reset(&mut self) {
        self.history.clear();
    }

    /// Whether logits stay as they are.
    fn stay(&self) -> bool {
        let params = &self.params;
        params.logit_bias.is_empty() && !params.penalises() && !params.penalises_repetitions()
    }

    /// Whether the token of the largest logit is chosen, whatever the others are.
    pub fn is_greedy(&self) -> bool {
        self.stay() && self.params.temperature == 0.0
    }

    /// Chooses a token. It is not accepted by that; asking again gives the same token.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, SamplerError> {
        let params = &self.params;
        let stay = self.stay();
        if self.is_greedy() && logits.len() == self.n_vocab {
            // It looks at all of them by itself.
            return greedy(logits);
        }
        check_logits(logits, self.n_vocab)?;
        let logits = if stay {
            logits
        } else {
            self.changed.clear();
            self.changed.extend_from_slice(logits);
            for &(id, bias) in &params.logit_bias {
                let logit = &mut self.changed[id as usize];
                if bias == f32::NEG_INFINITY {
                    *logit = bias;
                }
                replace(logit, f64::from(*logit) + f64::from(bias));
            }
            if params.penalises() {
                self.history.penalise(&mut self.changed, params);
            }
            if params.penalises_repetitions() {
                self.history
                    .penalise_repetitions(&mut self.changed, params, &self.breakers);
            }
            &self.changed
        };
        if params.temperature == 0.0 {
            return greedy(logits);
        }
        let candidates = &mut self.candidates;
        candidates.fill(logits, params.top_k as usize);
        if candidates.is_empty() {
            return Err(SamplerError::NothingLeft);
        }
        if params.typical_p < 1.0 {
            candidates.keep_typical(params.typical_p);
        }
        if params.top_p < 1.0 {
            candidates.keep_top_p(params.top_p);
        }
        if params.min_p > 0.0 {
            candidates.keep_min_p(params.min_p);
        }
        let u = random::uniform(params.seed, self.history.len() as u64);
        Ok(candidates.draw(params.temperature, u))
    }
}

/// Not NaN, not plus infinity.
fn is_logit(x: f32) -> bool {
    x < f32::INFINITY
}

/// Refuses what no model gives: NaN, plus infinity, another length.
fn check_logits(logits: &[f32], n_vocab: usize) -> Result<(), SamplerError> {
    if logits.len() != n_vocab {
        return Err(SamplerError::Length {
            found: logits.len(),
            expected: n_vocab,
        });
    }
    // Without an early end, so that it is a vector loop.
    if logits.iter().fold(false, |bad, &x| bad | !is_logit(x)) {
        let id = logits
            .iter()
            .position(|&x| !is_logit(x))
            .expect("there is one");
        return Err(SamplerError::BadLogit {
            id: id as u32,
            logit: logits[id],
        });
    }
    Ok(())
}

/// Logits that are looked at again for the place of the highest.
const GREEDY_CHUNK: usize = 4096;

/// The highest logit; of equals the lower id. Refuses what [`check_logits`] refuses.
fn greedy(logits: &[f32]) -> Result<u32, SamplerError> {
    // One pass over all: they may lie far away, where a device has put them.
    let (mut highest, mut chunk_of_highest, mut is_bad) = (f32::NEG_INFINITY, 0, false);
    for (i, chunk) in logits.chunks(GREEDY_CHUNK).enumerate() {
        // Several maxima side by side, so that it is a vector loop.
        let (rows, rest) = chunk.as_chunks::<16>();
        let (mut lanes, mut bad) = ([f32::NEG_INFINITY; 16], [0u32; 16]);
        for row in rows {
            for ((lane, bad), &x) in lanes.iter_mut().zip(&mut bad).zip(row) {
                *lane = if x > *lane { x } else { *lane };
                *bad |= u32::from(!is_logit(x));
            }
        }
        is_bad |= bad != [0; 16] || !rest.iter().all(|&x| is_logit(x));
        let of_chunk = lanes.iter().chain(rest).copied();
        let of_chunk = of_chunk.fold(f32::NEG_INFINITY, f32::max);
        if of_chunk > highest {
            (highest, chunk_of_highest) = (of_chunk, i);
        }
    }
    if is_bad {
        check_logits(logits, logits.len())?;
    }
    let first = chunk_of_highest * GREEDY_CHUNK;
    if highest == f32::NEG_INFINITY {
        return Err(SamplerError::NothingLeft);
    }
    let at = logits[first..].iter().position(|&x| x == highest);
    Ok((first + at.expect("it is one of them")) as u32)
}

/// Natural logarithms of probabilities, from the model's own logits (no penalty, no temperature).
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// Of the token asked for.
    pub token: f32,
    /// Of the likeliest tokens, likeliest first, of equals the lower id.
    pub top: Vec<(u32, f32)>,
}

/// The logarithm of the probability of `token`, and of the `n_top` likeliest tokens.
pub fn logprobs(logits: &[f32], token: u32, n_top: usize) -> Result<Logprobs, SamplerError> {
    check_logits(logits, logits.len())?;
    token_in_range("logprobs", token, logits.len())?;
    let highest = f64::from(logits[greedy(logits)? as usize]);
    let sum: f64 = logits
        .iter()
        .map(|&x| libm::exp(f64::from(x) - highest))
        .sum();
    let log_sum = highest + libm::log(sum);
    let of = |logit: f32| (f64::from(logit) - log_sum) as f32;
    let mut top = Vec::new();
    if n_top > 0 {
        let mut candidates = Candidates::default();
        candidates.fill(logits, n_top);
        top = candidates
            .likeliest_first()
            .map(|c| (c.id, of(c.logit)))
            .collect();
    }
    Ok(Logprobs {
        token: of(logits[token as usize]),
        top,
    })
}

#[cfg(test)]
mod tests;
