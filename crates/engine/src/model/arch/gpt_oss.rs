//! `gpt-oss`: every other layer has a window, the first among them; heads have sinks; a clamped gate; biases everywhere; weights are those of
//! a softmax over the chosen experts.

use super::{Arch, Config, Error, Keys, Parts, Presence};
use cpu::mixture::Weighing;
use cpu::ops::Gate;

pub(super) static ARCH: Arch = Arch {
    name: "gpt-oss",
    parts: Parts {
        qkv_bias: Presence::Always,
        sinks: Presence::Always,
        // Files name it after its place.
        ffn_norm: "post_attention_norm.weight",
        ..Parts::PLAIN
    },
    adjust,
};

/// Of so many layers the last sees everything.
const PATTERN: usize = 2;

fn adjust(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    config.gate = Gate::Clamped;
    config.window = keys.optional_count("attention.sliding_window", u32::MAX)?;
    config.windowed = keys.windowed(config.n_layer, PATTERN)?;
    config.read_experts(keys, Weighing::SoftmaxOfChosen)
}
