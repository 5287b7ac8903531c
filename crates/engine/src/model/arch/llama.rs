//! `llama`: Llama 1 to 3, Mistral, SmolLM and their kin, and Mixtral. Q and K are stored for rope over neighbours.

use super::{Arch, Config, Error, Keys, Parts, Presence};
use cpu::mixture::Weighing;
use cpu::ops::RopePairs;

pub(super) static ARCH: Arch = Arch {
    name: "llama",
    parts: Parts {
        qkv_bias: Presence::Optional,
        ..Parts::PLAIN
    },
    adjust,
};

fn adjust(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    config.rope_pairs = RopePairs::Neighbours;
    if keys.zero_or_count("expert_count", u32::MAX)?.is_some() {
        config.read_experts(keys, Weighing::SoftmaxOfChosen)?;
    }
    Ok(())
}
