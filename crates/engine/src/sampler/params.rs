//! Sampling settings.

use serde::{Deserialize, Serialize};

use super::error::SamplerError;

/// How tokens are chosen. The defaults are those of llama.cpp; see the module for what the stages do and in which order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplerParams {
    /// Added to the logits of these tokens; minus infinity forbids one.
    pub logit_bias: Vec<(u32, f32)>,
    /// Divides the logits of tokens that occurred (multiplies negative ones). 1 is off.
    pub repeat_penalty: f32,
    /// Taken from the logits of tokens that occurred. 0 is off.
    pub presence_penalty: f32,
    /// Taken from the logits of tokens for each time they occurred. 0 is off.
    pub frequency_penalty: f32,
    /// How many of the last tokens these three look at. -1 is all, 0 is none.
    pub penalty_last_n: i32,
    /// Penalty of a token that continues a repetition. 0 is off.
    pub dry_multiplier: f32,
    /// Factor of the penalty for each token more that is repeated.
    pub dry_base: f32,
    /// Repetitions of fewer tokens are free.
    pub dry_allowed_length: u32,
    /// How many of the last tokens are searched for repetitions. -1 is all, 0 is none.
    pub dry_last_n: i32,
    /// Tokens that no repetition reaches past, such as line ends.
    pub dry_breakers: Vec<u32>,
    /// Only so many of the likeliest tokens stay. 0 is off.
    pub top_k: u32,
    /// Tokens whose surprise is nearest to the expected one stay, up to this probability in sum. 1 is off.
    pub typical_p: f32,
    /// The likeliest tokens stay, up to this probability in sum. 1 is off.
    pub top_p: f32,
    /// Tokens stay that have at least this share of the likeliest token's probability. 0 is off.
    pub min_p: f32,
    /// Divides the logits before the draw. 0 takes the likeliest token.
    pub temperature: f32,
    /// Of the random numbers.
    pub seed: u64,
}

impl Default for SamplerParams {
    fn default() -> Self {
        SamplerParams {
            logit_bias: Vec::new(),
            repeat_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            penalty_last_n: 64,
            dry_multiplier: 0.0,
            dry_base: 1.75,
            dry_allowed_length: 2,
            dry_last_n: -1,
            dry_breakers: Vec::new(),
            top_k: 40,
            typical_p: 1.0,
            top_p: 0.95,
            min_p: 0.05,
            temperature: 0.8,
            seed: 0,
        }
    }
}

impl SamplerParams {
    /// Always the likeliest token.
    pub fn greedy() -> Self {
        SamplerParams {
            temperature: 0.0,
            ..SamplerParams::default()
        }
    }

    /// Whether occurrences change logits.
    pub(super) fn penalises(&self) -> bool {
        let neutral = self.repeat_penalty == 1.0
            && self.presence_penalty == 0.0
            && self.frequency_penalty == 0.0;
        !neutral && self.penalty_last_n != 0
    }

    /// Whether repetitions change logits.
    pub(super) fn penalises_repetitions(&self) -> bool {
        self.dry_multiplier != 0.0 && self.dry_last_n != 0
    }

    /// Checks every setting against its range.
    pub(super) fn check(&self, n_vocab: usize) -> Result<(), SamplerError> {
        let within = |name, value: f32, ok: bool, expected| {
            if ok {
                return Ok(());
            }
            Err(SamplerError::Setting {
                name,
                found: value.to_string(),
                expected,
            })
        };
        let share = |x: f32| (0.0..=1.0).contains(&x);
        within(
            "temperature",
            self.temperature,
            self.temperature >= 0.0 && self.temperature.is_finite(),
            "0 or more",
        )?;
        within("top-p", self.top_p, share(self.top_p), "0 to 1")?;
        within("min-p", self.min_p, share(self.min_p), "0 to 1")?;
        within("typical-p", self.typical_p, share(self.typical_p), "0 to 1")?;
        let positive = self.repeat_penalty > 0.0 && self.repeat_penalty.is_finite();
        within(
            "repeat-penalty",
            self.repeat_penalty,
            positive,
            "more than 0",
        )?;
        within(
            "presence-penalty",
            self.presence_penalty,
            self.presence_penalty.is_finite(),
            "a number",
        )?;
        within(
            "frequency-penalty",
            self.frequency_penalty,
            self.frequency_penalty.is_finite(),
            "a number",
        )?;
        let multiplier = self.dry_multiplier >= 0.0 && self.dry_multiplier.is_finite();
        within(
            "dry-multiplier",
            self.dry_multiplier,
            multiplier,
            "0 or more",
        )?;
        within(
            "dry-base",
            self.dry_base,
            self.dry_base >= 1.0 && self.dry_base.is_finite(),
            "1 or more",
        )?;
        for (name, n) in [
            ("penalty-last-n", self.penalty_last_n),
            ("dry-last-n", self.dry_last_n),
        ] {
            if n < -1 {
                return Err(SamplerError::Setting {
                    name,
                    found: n.to_string(),
                    expected: "-1 (all) or more",
                });
            }
        }
        for &(id, bias) in &self.logit_bias {
            within(
                "logit-bias",
                bias,
                bias < f32::INFINITY,
                "a number or minus infinity",
            )?;
            token_in_range("logit-bias", id, n_vocab)?;
        }
        self.dry_breakers
            .iter()
            .try_for_each(|&id| token_in_range("dry-breakers", id, n_vocab))
    }
}

/// Checks that a token is one.
pub(super) fn token_in_range(
    name: &'static str,
    id: u32,
    n_vocab: usize,
) -> Result<(), SamplerError> {
    if (id as usize) < n_vocab {
        Ok(())
    } else {
        Err(SamplerError::TokenOutOfRange { name, id, n_vocab })
    }
}
