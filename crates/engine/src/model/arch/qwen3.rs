//! `qwen3`: each head of Q and K is normed before rope; no biases.

use super::{Arch, Config, Error, Keys, Parts, Presence};

pub(super) static ARCH: Arch = Arch {
    name: "qwen3",
    parts: Parts {
        qkv_bias: Presence::Never,
        qk_norm: Presence::Always,
        post_norms: Presence::Never,
    },
    adjust,
};

fn adjust(_: &Keys<'_>, _: &mut Config) -> Result<(), Error> {
    Ok(())
}
