//! `qwen2moe`: Qwen 1.5 and 2 with experts. As `qwen2`; weights are those of a softmax over all experts, and a shared expert has a gate.

use super::{Arch, Config, Error, Keys, Parts, Presence};
use crate::model::limits::WIDTH_MAX;
use cpu::mixture::Weighing;

pub(super) static ARCH: Arch = Arch {
    name: "qwen2moe",
    parts: Parts {
        qkv_bias: Presence::Always,
        ..Parts::PLAIN
    },
    adjust,
};

fn adjust(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    config.read_experts(keys, Weighing::Softmax)?;
    let shared_ff = keys.optional_count("expert_shared_feed_forward_length", WIDTH_MAX)?;
    if let Some(experts) = &mut config.experts {
        experts.shared_ff = Some(shared_ff.unwrap_or(config.ff));
    }
    Ok(())
}
