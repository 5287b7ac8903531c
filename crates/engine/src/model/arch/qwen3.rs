//! `qwen3`: each head of Q and K is normed before rope; no biases.

use super::{Arch, Config, Error, Keys, Parts, QkNorm};

pub(super) static ARCH: Arch = Arch {
    name: "qwen3",
    parts: Parts {
        qk_norm: QkNorm::EachHead,
        ..Parts::PLAIN
    },
    adjust,
};

fn adjust(_: &Keys<'_>, _: &mut Config) -> Result<(), Error> {
    Ok(())
}
