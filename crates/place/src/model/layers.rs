//! What each layer keeps of past tokens.

use super::arch::{Arch, Windows};
use super::metadata::{Keys, PerLayer};
use super::{Cells, Form, Keeps, Tensor};
use crate::error::Error;

/// Keys and tensors that the layers are read from.
pub(super) struct Source<'a> {
    pub(super) keys: &'a Keys<'a>,
    pub(super) arch: &'a Arch,
    pub(super) tensors: &'a [Tensor<'a>],
    /// Layers of the file.
    pub(super) layers: usize,
    /// The first ones, which decoding runs.
    pub(super) running: usize,
    pub(super) width: u64,
    pub(super) heads: PerLayer,
    pub(super) heads_kv: PerLayer,
    pub(super) ff: PerLayer,
    pub(super) head_k: u64,
    pub(super) head_v: u64,
    pub(super) rope_dims: u64,
}

impl Source<'_> {
    /// What each layer keeps, and the bytes of its state.
    pub(super) fn layers(&self, assumptions: &mut Vec<String>) -> Result<Vec<(Keeps, u64)>, Error> {
        let windows = self.windows(assumptions)?;
        let latent = self.latent()?;
        let caching_first = self.caching_first()?;
        let stateful = self.stateful(assumptions)?;
        let (head_k_swa, head_v_swa) = (
            self.keys.unsigned("attention.key_length_swa")?,
            self.keys.unsigned("attention.value_length_swa")?,
        );
        let mut layers: Vec<(Keeps, u64)> = Vec::with_capacity(self.layers);
        for i in 0..self.running {
            let heads = self.heads_kv.of(i);
            let window = windows[i];
            let linear = stateful[i] == State::Instead;
            let state = match stateful[i] {
                State::None => 0,
                State::Instead | State::Beside => self.state_bytes(i)?,
            };
            let keeps = if linear || heads == 0 {
                Keeps::Nothing
            } else if i >= caching_first {
                match shared_with(&layers[..caching_first], window) {
                    Some(layer) => Keeps::SharedWith { layer },
                    None => {
                        return Err(self.keys.bad(
                            "attention.shared_kv_layers",
                            format!("leaves no layer whose cells layer {i} could use"),
                        ));
                    }
                }
            } else if let Some(cells) = latent {
                Keeps::Cells(Cells { window, ..cells })
            } else {
                let swa = |of_swa: Option<u64>, of_full| match window {
                    Some(_) => of_swa.unwrap_or(of_full),
                    None => of_full,
                };
                let head_k = swa(head_k_swa, self.head_k);
                if head_k == 0 {
                    let problem = format!("makes heads of 0 values in layer {i}");
                    return Err(self.keys.bad("attention.key_length", problem));
                }
                Keeps::Cells(Cells {
                    heads,
                    head_k,
                    head_v: swa(head_v_swa, self.head_v),
                    form: Form::Heads,
                    window,
                })
            };
            layers.push((keeps, state));
        }
        let silent = |i: usize| stateful[i] != State::None && layers[i].1 == 0;
        if (0..self.running).any(silent) {
            assumptions.push(
                "the size of the recurrent state is not in the keys that are known: it is not counted"
                    .to_owned(),
            );
        }
        layers.resize(self.layers, (Keeps::Unused, 0));
        Ok(layers)
    }

    /// The window of each layer that has one.
    fn windows(&self, assumptions: &mut Vec<String>) -> Result<Vec<Option<u64>>, Error> {
        const PATTERN: &str = "attention.sliding_window_pattern";
        let stated = self.keys.unsigned("attention.sliding_window")?;
        let arch = self.arch;
        let by_arch = match arch.windows_only_at {
            Some(layers) if layers != self.running => Windows::None,
            _ => arch.windows,
        };
        let default = arch.window_default.filter(|_| by_arch != Windows::None);
        // A window of 0 is none.
        let Some(window) = stated.or(default).filter(|&n| n > 0) else {
            return Ok(vec![None; self.running]);
        };
        let pattern = self
            .keys
            .flags_or_number(PATTERN, self.layers, self.running)?;
        let has: Vec<bool> = match pattern {
            Some(Ok(flags)) => flags,
            Some(Err(period)) => {
                let windows = by_arch.with_period(period);
                (0..self.running).map(|i| windows.has(i)).collect()
            }
            None => {
                if by_arch == Windows::None && arch.name == "gemma4" {
                    assumptions.push(format!(
                        "{}.{PATTERN} is missing: every layer is taken to see everything",
                        arch.name
                    ));
                }
                (0..self.running).map(|i| by_arch.has(i)).collect()
            }
        };
        let window = |&has: &bool| has.then_some(window);
        Ok(has[..self.running].iter().map(window).collect())
    }

    /// The cells of layers that keep a latent vector: both lengths of the heads that are made from it tell.
    fn latent(&self) -> Result<Option<Cells>, Error> {
        let made = |key| Ok::<_, Error>(self.keys.unsigned(key)?.filter(|&n| n > 0));
        let k = made("attention.key_length_mla")?;
        let v = made("attention.value_length_mla")?;
        if k.is_none() || v.is_none() {
            return Ok(None);
        }
        let rank = self.keys.require("attention.kv_lora_rank")?;
        let head_k = rank
            .checked_add(self.rope_dims)
            .ok_or(Error::Overflow { what: "a cell" })?;
        Ok(Some(Cells {
            heads: 1,
            head_k,
            head_v: 0,
            form: Form::Latent,
            window: None,
        }))
    }

    /// How many layers from the start have cells of their own.
    fn caching_first(&self) -> Result<usize, Error> {
        const SHARED: &str = "attention.shared_kv_layers";
        if let Some(first) = self.arch.caching_first {
            return Ok(first.min(self.running));
        }
        let shared = self.keys.unsigned(SHARED)?.unwrap_or(0);
        let first = usize::try_from(shared)
            .ok()
            .and_then(|shared| self.layers.checked_sub(shared));
        match first {
            Some(first) if first > 0 => Ok(first.min(self.running)),
            _ => Err(self.keys.bad(
                SHARED,
                format!("is {shared}, expected fewer than {} layers", self.layers),
            )),
        }
    }

    /// Which layers have a recurrent state.
    fn stateful(&self, assumptions: &mut Vec<String>) -> Result<Vec<State>, Error> {
        const LISTED: &str = "attention.recurrent_layers";
        const INTERVAL: &str = "full_attention_interval";
        let n = self.running;
        let linear = |has: &dyn Fn(usize) -> bool| {
            let state = |i| if has(i) { State::Instead } else { State::None };
            Ok((0..n).map(state).collect())
        };
        match self.keys.flags_or_number(LISTED, self.layers, n)? {
            Some(Ok(flags)) => return linear(&|i| flags[i]),
            Some(Err(all)) => return linear(&|_| all != 0),
            None => {}
        }
        let interval = match self.keys.unsigned(INTERVAL)? {
            Some(0) => return Err(self.keys.bad(INTERVAL, "is 0, expected 1 or more")),
            stated => stated.or(self.arch.attention_interval),
        };
        if let Some(interval) = interval {
            return linear(&|i| !(i as u64 + 1).is_multiple_of(interval));
        }
        let mut states = vec![State::None; n];
        for tensor in self.tensors {
            let Some((i, rest)) = tensor.layer() else {
                continue;
            };
            let named = ["ssm_", "time_mix_", "shortconv."];
            if let Some(state) = states.get_mut(i as usize)
                && named.iter().any(|prefix| rest.starts_with(prefix))
            {
                *state = State::Beside;
            }
        }
        // Without a word on the layers, those without key heads are the ones with state, unless they are a feed-forward layer
        // alone, as lists of both say.
        if !states.contains(&State::Beside) && self.has_state_keys()? {
            let mixes = |i| matches!(self.ff, PerLayer::Same(_)) || self.ff.of(i) == 0;
            for (i, state) in states.iter_mut().enumerate() {
                if self.heads_kv.of(i) == 0 && mixes(i) {
                    *state = State::Beside;
                }
            }
            assumptions.push("layers without key heads are taken to be recurrent".to_owned());
        }
        Ok(states)
    }

    fn has_state_keys(&self) -> Result<bool, Error> {
        for key in [
            "ssm.inner_size",
            "kda.head_dim",
            "wkv.head_size",
            "shortconv.l_cache",
        ] {
            if self.keys.unsigned(key)?.unwrap_or(0) > 0 {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Bytes of layer `i`'s state, `f32`, of one sequence: past inputs of its convolution and the recurrence itself.
    fn state_bytes(&self, i: usize) -> Result<u64, Error> {
        let key = |key| Ok::<u128, Error>(self.keys.unsigned(key)?.unwrap_or(0).into());
        let past = key("ssm.conv_kernel")?.saturating_sub(1);
        let kda = key("kda.head_dim")?;
        let (wkv, short) = (key("wkv.head_size")?, key("shortconv.l_cache")?);
        let width = u128::from(self.width);
        // Every factor is below 2^64, so a product of two cannot overflow; more go through `product`.
        let (conv, state) = if kda > 0 {
            // Kimi's delta attention: Q, K and V each pass a convolution.
            let heads = u128::from(self.heads.of(i));
            (
                product(&[3, past, heads, kda])?,
                product(&[heads, kda, kda])?,
            )
        } else if wkv > 0 {
            let shifts = self.keys.unsigned("token_shift_count")?.unwrap_or(2);
            (product(&[shifts.into(), width])?, product(&[width, wkv])?)
        } else if short > 0 {
            (product(&[width, short.saturating_sub(1)])?, 0)
        } else {
            let (inner, state) = (key("ssm.inner_size")?, key("ssm.state_size")?);
            let groups = product(&[2, key("ssm.group_count")?, state])?;
            let conv = product(&[past, sum(inner, groups)?])?;
            (conv, product(&[state, inner])?)
        };
        let bytes = product(&[4, sum(conv, state)?])?;
        u64::try_from(bytes).map_err(|_| STATE)
    }
}

const STATE: Error = Error::Overflow {
    what: "a layer's state",
};

fn product(factors: &[u128]) -> Result<u128, Error> {
    factors
        .iter()
        .try_fold(1_u128, |product, &n| product.checked_mul(n))
        .ok_or(STATE)
}

fn sum(a: u128, b: u128) -> Result<u128, Error> {
    a.checked_add(b).ok_or(STATE)
}

/// Whether a layer has a recurrent state, and whether it attends too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    None,
    /// Instead of attention.
    Instead,
    /// Beside attention, if it has key heads.
    Beside,
}

/// The last of some layers with cells of the same kind: windowed or not.
fn shared_with(layers: &[(Keeps, u64)], window: Option<u64>) -> Option<usize> {
    layers.iter().rposition(|(keeps, _)| {
        matches!(keeps, Keeps::Cells(cells) if cells.window.is_some() == window.is_some())
    })
}
