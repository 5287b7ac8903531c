//! Which experts a token uses, and how much each counts (docs/arithmetic.md).

use crate::math;
use crate::simd::{F32x16, simd_kernel};

/// Experts of a layer at most: twice as many as any published model has.
pub const EXPERTS_MAX: usize = 1024;

/// How scores become weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weighing {
    /// Softmax over all experts; weights of the chosen ones come to less than 1.
    Softmax,
    /// Softmax over the chosen ones.
    SoftmaxOfChosen,
    /// Sigmoid of each.
    Sigmoid,
    /// The same, divided by their sum.
    SigmoidOfChosen,
}

/// Groups of neighbouring experts, of which a token uses a few only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    /// All of them. They divide the experts.
    pub total: usize,
    /// Those whose experts may be chosen.
    pub used: usize,
}

/// How a layer routes its tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    /// Experts E.
    pub experts: usize,
    /// Experts that a token uses.
    pub used: usize,
    /// How their scores become weights.
    pub weighing: Weighing,
    /// What weights are multiplied with.
    pub scale: f32,
    /// Groups, if not all experts may be chosen together.
    pub groups: Option<Groups>,
}

impl Routing {
    /// Whether these numbers can be those of a layer; else what is wrong.
    ///
    /// # Errors
    /// If a number has no meaning beside the others.
    pub fn check(&self) -> Result<(), String> {
        let Self { experts, used, .. } = *self;
        if experts == 0 || experts > EXPERTS_MAX {
            return Err(format!("{experts} experts, expected 1 to {EXPERTS_MAX}"));
        }
        if used == 0 || used > experts {
            return Err(format!("{used} of {experts} experts are used"));
        }
        let Some(groups) = self.groups else {
            return Ok(());
        };
        if groups.total == 0 || !experts.is_multiple_of(groups.total) {
            return Err(format!(
                "{} groups do not divide {experts} experts",
                groups.total
            ));
        }
        if groups.used > groups.total || groups.used * (experts / groups.total) < used {
            return Err(format!(
                "{} of {} groups are used, which have to have the {used} experts of a token",
                groups.used, groups.total
            ));
        }
        Ok(())
    }
}

/// Whether a score comes before another one of a higher id.
fn is_above(a: f32, b: f32) -> bool {
    a > b || b.is_nan() && !a.is_nan()
}

/// The `best.len()` best of `n` scores, in order: of equal ones those with lower ids; NaN is below every number.
fn select(n: usize, score: impl Fn(usize) -> f32, best: &mut [u32]) {
    let mut len = 0;
    for id in 0..n {
        let z = score(id);
        if len == best.len() && !is_above(z, score(best[len - 1] as usize)) {
            continue;
        }
        let mut at = len.min(best.len() - 1);
        while at > 0 && is_above(z, score(best[at - 1] as usize)) {
            best[at] = best[at - 1];
            at -= 1;
        }
        best[at] = id as u32;
        len = best.len().min(len + 1);
    }
}

simd_kernel! {
    /// Chooses a token's experts by its scores `z` `[E]`: their `ids`, ascending, and their `weights`, as many as a token uses.
    pub fn route(routing: &Routing, z: &[f32], ids: &mut [u32], weights: &mut [f32]) = route_with;
}
#[inline(always)]
fn route_with<V: F32x16>(routing: &Routing, z: &[f32], ids: &mut [u32], weights: &mut [f32]) {
    assert_eq!(
        (z.len(), ids.len(), weights.len()),
        (routing.experts, routing.used, routing.used),
        "scores of all experts, room for the chosen ones"
    );
    match routing.groups {
        None => select(z.len(), |e| z[e], ids),
        Some(groups) => select_in_groups::<V>(routing.weighing, groups, z, ids),
    }
    ids.sort_unstable();
    for (w, &id) in weights.iter_mut().zip(&*ids) {
        *w = z[id as usize];
    }
    let sum = match routing.weighing {
        Weighing::Softmax => {
            let m = largest(z);
            exp_all::<V>(weights, m);
            Some(sum_of_exp::<V>(z, m))
        }
        Weighing::SoftmaxOfChosen => {
            exp_all::<V>(weights, largest(weights));
            Some(weights.iter().fold(0.0, |sum, w| sum + w))
        }
        Weighing::Sigmoid => {
            sigmoid_all::<V>(weights);
            None
        }
        Weighing::SigmoidOfChosen => {
            sigmoid_all::<V>(weights);
            Some(weights.iter().fold(0.0, |sum, w| sum + w))
        }
    };
    if let Some(sum) = sum {
        weights.iter_mut().for_each(|w| *w /= sum);
    }
    if routing.scale != 1.0 {
        weights.iter_mut().for_each(|w| *w *= routing.scale);
    }
}

#[inline(always)]
fn select_in_groups<V: F32x16>(weighing: Weighing, groups: Groups, z: &[f32], ids: &mut [u32]) {
    let size = z.len() / groups.total;
    let mut s = [0.0; EXPERTS_MAX];
    let s = &mut s[..z.len()];
    s.copy_from_slice(z);
    match weighing {
        Weighing::Softmax | Weighing::SoftmaxOfChosen => exp_all::<V>(s, largest(z)),
        Weighing::Sigmoid | Weighing::SigmoidOfChosen => sigmoid_all::<V>(s),
    }
    let mut scores = [0.0; EXPERTS_MAX];
    for (score, s) in scores.iter_mut().zip(s.chunks(size)) {
        let mut two = [0; 2];
        let two = &mut two[..size.min(2)];
        select(size, |e| s[e], two);
        *score = two.iter().fold(0.0, |sum, &e| sum + s[e as usize]);
    }
    let mut best = [0; EXPERTS_MAX];
    let best = &mut best[..groups.used];
    select(groups.total, |g| scores[g], best);
    best.sort_unstable();
    let id = |i: usize| best[i / size] as usize * size + i % size;
    select(groups.used * size, |i| z[id(i)], ids);
    for i in ids {
        *i = id(*i as usize) as u32;
    }
}

/// The largest; NaN is passed over.
fn largest(z: &[f32]) -> f32 {
    z.iter()
        .fold(f32::NEG_INFINITY, |m, &z| if z > m { z } else { m })
}

/// `exp(z - m)` of each.
#[inline(always)]
fn exp_all<V: F32x16>(z: &mut [f32], m: f32) {
    for z in z.chunks_mut(16) {
        let e = math::exp(V::load_part(z).sub(V::splat(m))).to_array();
        z.copy_from_slice(&e[..z.len()]);
    }
}

#[inline(always)]
fn sigmoid_all<V: F32x16>(z: &mut [f32]) {
    for z in z.chunks_mut(16) {
        let s = math::sigmoid(V::load_part(z)).to_array();
        z.copy_from_slice(&s[..z.len()]);
    }
}

/// The sum of `exp(z - m)`, expert `e` in lane `e mod 16`.
#[inline(always)]
fn sum_of_exp<V: F32x16>(z: &[f32], m: f32) -> f32 {
    let mut sum = V::splat(0.0);
    for z in z.chunks(16) {
        let mut part = [0.0; 16];
        let e = math::exp(V::load_part(z).sub(V::splat(m))).to_array();
        part[..z.len()].copy_from_slice(&e[..z.len()]);
        sum = sum.add(V::load(&part));
    }
    sum.sum()
}
