//! `qwen2`: Qwen 1.5, 2 and 2.5. Q, K and V have biases. A window key in such files is not used by the models.

use super::{Arch, Config, Error, Keys, Parts, Presence};

pub(super) static ARCH: Arch = Arch {
    name: "qwen2",
    parts: Parts {
        qkv_bias: Presence::Always,
        ..Parts::PLAIN
    },
    adjust,
};

fn adjust(_: &Keys<'_>, _: &mut Config) -> Result<(), Error> {
    Ok(())
}
