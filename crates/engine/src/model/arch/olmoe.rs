//! `olmoe`: a token's Q heads are normed together, and its K heads; weights are those of a softmax over all experts.

use super::{Arch, Config, Error, Keys, Parts, QkNorm};
use cpu::mixture::Weighing;

pub(super) static ARCH: Arch = Arch {
    name: "olmoe",
    parts: Parts {
        qk_norm: QkNorm::AllHeads,
        ..Parts::PLAIN
    },
    adjust,
};

fn adjust(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    config.read_experts(keys, Weighing::Softmax)
}
