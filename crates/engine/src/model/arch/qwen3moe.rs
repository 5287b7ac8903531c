//! `qwen3moe`: as `qwen3`; weights are those of a softmax over the chosen experts.

use super::{Arch, Config, Error, Keys, Parts, QkNorm};
use cpu::mixture::Weighing;

pub(super) static ARCH: Arch = Arch {
    name: "qwen3moe",
    parts: Parts {
        qk_norm: QkNorm::EachHead,
        ..Parts::PLAIN
    },
    adjust,
};

fn adjust(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    config.read_experts(keys, Weighing::SoftmaxOfChosen)
}
