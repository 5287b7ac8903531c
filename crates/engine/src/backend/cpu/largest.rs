//! Logits of which only the largest is looked at.
//!
//! Their first pass leaves out what the activations' codes lose. What the second one would add is at most the norm of a row of weights times that of
//! what it is multiplied with: a logit that such sums can not raise to what the one that is largest in the first pass has in the end needs no second
//! pass. Those that are left, mostly a few, get theirs by the definition, and with it the bits of two passes; where too many are left of a token, all
//! of its logits do.

use crate::model::Model;
use cpu::product::row_norms;
use quant::act::ActRow;
use quant::product::{act_block, dot_quantised};
use quant::tile::TileMatrix;
use std::sync::{Mutex, PoisonError};

/// What rounding adds to a bound is far less: some thousand operations, of 2^-24 each.
const SLACK: f64 = 1.01;

/// More logits of a token than this are cheaper in a second pass of all.
const SETTLED_MAX: usize = 512;

/// Steps for which all get two passes after most tokens were left.
const PAUSE_STEPS: usize = 32;

#[derive(Debug, Default)]
pub(super) struct Largest {
    /// Of the output matrix' rows, once they are known.
    norms: Option<Vec<f32>>,
    pause: usize,
}

impl Largest {
    /// Adds the second pass, where it may matter, to the first `of` logits of each of `n` tokens, whose activations are `last` `[n, D]`. Returns those
    /// tokens, in order, of which it may matter for too many, or it is not known.
    pub(super) fn settle(
        &mut self,
        model: &Model,
        last: &[f32],
        n: usize,
        of: usize,
        logits: &mut [f32],
    ) -> Vec<usize> {
        let (width, n_vocab) = (model.config().width, model.config().n_vocab);
        let w = model.output().view(&model.weights);
        if self.norms.is_none() {
            self.norms = row_norms(&model.pool, &w);
        }
        let (Some(norms), Some(block)) = (&self.norms, act_block(w.ty())) else {
            return (0..n).collect();
        };
        let left = Mutex::new(Vec::new());
        let logits = &mut logits[..n * n_vocab];
        model.pool.chunks_mut(logits, n_vocab, |t, logits| {
            let x = &last[t * width..][..width];
            let lost = ActRow::new(x, block).second(x);
            if !settle(&w, norms, &lost, &mut logits[..of.min(n_vocab)]) {
                left.lock().unwrap_or_else(PoisonError::into_inner).push(t);
            }
        });
        let mut left = left.into_inner().unwrap_or_else(PoisonError::into_inner);
        left.sort_unstable();
        left
    }

    /// Says that most tokens were left.
    pub(super) fn pause(&mut self) {
        self.pause = PAUSE_STEPS;
    }

    /// Whether it is worth a try.
    pub(super) fn serves(&mut self, model: &Model) -> bool {
        let is_paused = self.pause > 0;
        self.pause = self.pause.saturating_sub(1);
        let w = model.output().view(&model.weights);
        // A soft-cap may make equals of unequal ones, of which the first is the largest then.
        !is_paused && act_block(w.ty()).is_some() && model.config().logit_soft_cap.is_none()
    }
}

/// The norm of a row of activations.
fn norm_of(act: &ActRow) -> f64 {
    let blocks = act.q.chunks(act.block).zip(&act.d);
    let squares = blocks.map(|(q, d)| {
        let squares: i32 = q.iter().map(|&q| i32::from(q).pow(2)).sum();
        f64::from(*d).powi(2) * f64::from(squares)
    });
    squares.sum::<f64>().sqrt()
}

/// Logits that are looked at side by side.
const LANES: usize = 64;

fn settle(w: &TileMatrix<'_>, norms: &[f32], lost: &ActRow, logits: &mut [f32]) -> bool {
    let length = (norm_of(lost) * SLACK) as f32;
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for logits in logits.chunks(LANES) {
        for (lane, &x) in lanes.iter_mut().zip(logits) {
            *lane = if x > *lane { x } else { *lane };
        }
    }
    let first = lanes.into_iter().fold(f32::NEG_INFINITY, f32::max);
    let Some(row) = logits.iter().position(|&x| x == first) else {
        return false;
    };
    // What the largest becomes at least. Rounding keeps the order: what stays below that stays below the largest.
    let least = first + dot_quantised(w, row, lost);
    if !(length.is_finite() && least.is_finite()) {
        return false;
    }
    let mut left = Vec::new();
    let rows = logits.chunks(LANES).zip(norms.chunks(LANES));
    for (i, (logits, norms)) in rows.enumerate() {
        let may_be = |(x, norm): (&f32, &f32)| {
            let is_below = x + norm * length < least;
            !is_below
        };
        let any = logits
            .iter()
            .zip(norms)
            .fold(false, |any, x| any | may_be(x));
        if any {
            let rows = (i * LANES..).zip(logits.iter().zip(norms));
            left.extend(rows.filter(|(_, x)| may_be(*x)).map(|(row, _)| row));
            if left.len() > SETTLED_MAX {
                return false;
            }
        }
    }
    for row in left {
        logits[row] += dot_quantised(w, row, lost);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use cpu::Pool;
    use cpu::pool::Pinning;
    use gguf::TensorType;

    /// The first of the largest.
    fn best(logits: &[f32]) -> (usize, f32) {
        let first =
            |best: (usize, f32), (i, &x): (usize, &f32)| if x > best.1 { (i, x) } else { best };
        logits
            .iter()
            .enumerate()
            .fold((0, f32::NEG_INFINITY), first)
    }

    /// Rows of random weights, some twice, times tokens along some of them: what is settled is what two passes give, and the second one matters.
    #[test]
    fn the_largest_is_that_of_two_passes() {
        let (n, k, block) = (3000, 256, 32);
        let bytes = k / 32 * TensorType::Q8_0.block_bytes();
        let mut state = 7u64;
        let mut random = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) as u32
        };
        // Rows as files have them: a half, then 32 codes, block by block.
        let mut rows: Vec<u8> = (0..n * bytes)
            .map(|i| match i % 34 {
                0 => random() as u8,
                1 => 0x20,
                _ => random() as u8,
            })
            .collect();
        for r in (0..n - 1).step_by(5) {
            // The next row differs from this one in one code, or in none.
            rows.copy_within(r * bytes..(r + 1) * bytes, (r + 1) * bytes);
            rows[(r + 1) * bytes + 2] ^= u8::from(r % 2 == 0);
        }
        let layout = quant::tile::Layout::of(TensorType::Q8_0).unwrap();
        let mut data = Vec::new();
        for rows in rows.chunks(16 * bytes) {
            let mut tile = vec![0; rows.len()];
            quant::tile::permute_tile(layout, rows.len() / bytes, rows, &mut tile);
            data.extend(tile);
        }
        let w = TileMatrix::new(TensorType::Q8_0, n, k, &data);
        let pool = Pool::new(2, Pinning::Free).unwrap();
        let norms = row_norms(&pool, &w).unwrap();
        let (mut changed, mut row) = (0, vec![0.0; k]);
        for token in 0..60 {
            w.decode_row(token * 50, &mut row);
            let mut x: Vec<f32> = row
                .iter()
                .map(|x| x + (random() % 1000) as f32 * 1e-6)
                .collect();
            // Which of two rows is larger only the second pass says.
            x[0] = (random() % 1000) as f32 * 1e-6 - 5e-4;
            let first = ActRow::new(&x, block);
            let lost = first.second(&x);
            let mut logits: Vec<f32> = (0..n).map(|r| dot_quantised(&w, r, &first)).collect();
            let of_first = best(&logits);
            let both: Vec<f32> = (0..n)
                .map(|r| logits[r] + dot_quantised(&w, r, &lost))
                .collect();
            assert!(settle(&w, &norms, &lost, &mut logits), "token {token}");
            let (got, want) = (best(&logits), best(&both));
            assert_eq!((got.0, got.1.to_bits()), (want.0, want.1.to_bits()));
            let left = logits.iter().zip(&both).filter(|(a, b)| a != b).count();
            assert!(left > n / 2, "most get one pass: {left}");
            changed += usize::from(of_first.0 != want.0);
        }
        assert!(changed > 10, "the first pass alone errs: {changed}");
    }

    #[test]
    fn what_cannot_be_bounded_is_not_settled() {
        let data = vec![0x20; 64 * TensorType::Q8_0.block_bytes()];
        let w = TileMatrix::new(TensorType::Q8_0, 64, 32, &data);
        let lost = ActRow::new(&[1e-3; 32], 32);
        let (ones, norms) = ([1.0; SETTLED_MAX + 1], [2.0; SETTLED_MAX + 1]);
        // Too many equal ones; an infinity.
        assert!(!settle(&w, &norms, &lost, &mut ones.clone()));
        assert!(!settle(&w, &norms, &lost, &mut [f32::INFINITY; 64]));
        // Where a norm is none, the second pass is computed.
        let mut all = [1.0; 64];
        assert!(settle(&w, &[f32::NAN; 64], &lost, &mut all));
        let second = |row| dot_quantised(&w, row, &lost);
        assert!((0..64).all(|row| all[row] == 1.0 + second(row) && all[row] > 1.0));
    }
}
