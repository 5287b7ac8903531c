//! `llama`: Llama 1 to 3, Mistral, SmolLM and their kin. Q and K are stored for rope over neighbours.

use super::{Arch, Config, Error, Keys, Parts, Presence};
use cpu::ops::RopePairs;

pub(super) static ARCH: Arch = Arch {
    name: "llama",
    parts: Parts {
        qkv_bias: Presence::Optional,
        qk_norm: Presence::Never,
        post_norms: Presence::Never,
    },
    adjust,
};

fn adjust(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    config.rope_pairs = RopePairs::Neighbours;
    if let Some(n) = keys.optional_count("expert_count", u32::MAX)? {
        return Err(keys.bad(
            "expert_count",
            format!("is {n}: mixtures of experts are not supported yet"),
        ));
    }
    Ok(())
}
