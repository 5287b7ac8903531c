//! The definition of a mixture of experts, for one token: readable, slow, exact (docs/arithmetic.md). What computes many tokens at
//! once equals it bit for bit.

use super::{Expert, Routing, Weighing};
use crate::isa::Isa;
use crate::math;
use crate::ops::{Gate, gated};
use crate::simd::{F32x16, Scalar16};
use quant::act::{ActRow, Passes};
use quant::product::{act_block, dot_float, dot_quantised, down_passes};
use quant::tile::TileMatrix;

/// The experts that a token uses, ascending, with their weights, by its scores.
pub fn choose(routing: &Routing, z: &[f32]) -> Vec<(usize, f32)> {
    let all: Vec<usize> = (0..z.len()).collect();
    let allowed = match routing.groups {
        None => all.clone(),
        Some(groups) => {
            let size = z.len() / groups.total;
            let s = exponentials(routing, z, &all);
            let mut scored: Vec<(usize, f32)> = s
                .chunks(size)
                .map(|s| {
                    let mut s = s.to_vec();
                    s.sort_by(|a, b| order(*b, *a));
                    s.iter().take(2).fold(0.0, |sum, s| sum + s)
                })
                .enumerate()
                .collect();
            scored.sort_by(|a, b| order(b.1, a.1));
            let mut allowed: Vec<usize> = scored[..groups.used]
                .iter()
                .flat_map(|&(g, _)| g * size..(g + 1) * size)
                .collect();
            allowed.sort_unstable();
            allowed
        }
    };
    let mut chosen = allowed;
    // Stable, so that lower ids stay in front of their equals.
    chosen.sort_by(|&a, &b| order(z[b], z[a]));
    chosen.truncate(routing.used);
    chosen.sort_unstable();
    let is_of_all = routing.weighing == Weighing::Softmax;
    let s = exponentials(routing, z, if is_of_all { &all } else { &chosen });
    let sum = match routing.weighing {
        Weighing::Softmax => {
            let mut lanes = [0.0; 16];
            s.iter().enumerate().for_each(|(e, s)| lanes[e % 16] += s);
            Scalar16::load(&lanes).sum()
        }
        Weighing::Sigmoid => 1.0,
        Weighing::SoftmaxOfChosen | Weighing::SigmoidOfChosen => {
            s.iter().fold(0.0, |sum, s| sum + s)
        }
    };
    let of = |i: usize, e: usize| if is_of_all { s[e] } else { s[i] };
    let weight = |(i, e)| (e, of(i, e) / sum * routing.scale);
    chosen.into_iter().enumerate().map(weight).collect()
}

/// Order of scores, NaN below every number.
fn order(a: f32, b: f32) -> std::cmp::Ordering {
    a.partial_cmp(&b)
        .unwrap_or_else(|| b.is_nan().cmp(&a.is_nan()))
}

/// `s` of some experts, as one sum has them.
fn exponentials(routing: &Routing, z: &[f32], experts: &[usize]) -> Vec<f32> {
    let m = experts.iter().fold(f32::NEG_INFINITY, |m, &e| m.max(z[e]));
    let one = |e: &usize| match routing.weighing {
        Weighing::Softmax | Weighing::SoftmaxOfChosen => math::exp(Scalar16::splat(z[*e] - m)),
        Weighing::Sigmoid | Weighing::SigmoidOfChosen => math::sigmoid(Scalar16::splat(z[*e])),
    };
    experts.iter().map(|e| one(e).to_array()[0]).collect()
}

/// An expert's output, without its weight.
pub fn expert(f: Gate, expert: &Expert<'_>, x: &[f32]) -> Vec<f32> {
    let bias = |i: usize| expert.biases.map(|biases| biases[i]);
    let mut gate = product(&expert.gate, x, Passes::One, bias(0));
    let up = product(&expert.up, x, Passes::One, bias(1));
    gated(Isa::Scalar, f, &mut gate, &up);
    product(&expert.down, &gate, down_passes(expert.down.ty()), bias(2))
}

/// What the chosen experts add to `y`.
pub fn add(f: Gate, chosen: &[(usize, Expert<'_>, f32)], x: &[f32], y: &mut [f32]) {
    for (_, weights, w) in chosen {
        for (y, o) in y.iter_mut().zip(expert(f, weights, x)) {
            *y = w.mul_add(o, *y);
        }
    }
}

fn product(w: &TileMatrix<'_>, x: &[f32], passes: Passes, bias: Option<&[u8]>) -> Vec<f32> {
    let first = act_block(w.ty()).map(|block| ActRow::new(x, block));
    let second = match (&first, passes) {
        (Some(first), Passes::Two) => Some(first.second(x)),
        _ => None,
    };
    let row = |r: usize| {
        let y = match &first {
            None => dot_float(w, r, x),
            Some(first) => dot_quantised(w, r, first),
        };
        let y = second
            .as_ref()
            .map_or(y, |second| y + dot_quantised(w, r, second));
        bias.map_or(y, |bias| y + super::value(bias, r))
    };
    (0..w.n()).map(row).collect()
}
