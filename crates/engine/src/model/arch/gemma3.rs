//! `gemma3`: five windowed layers, then one that sees everything, with a rope of its own; norms before and after; GELU;
//! embeddings times the square root of the width. Norm weights are stored with their 1 added.

use super::{Arch, Config, Error, Keys, Parts, Presence, QkNorm};
use crate::model::config::freq_base;
use cpu::ops::Gate;

pub(super) static ARCH: Arch = Arch {
    name: "gemma3",
    parts: Parts {
        qk_norm: QkNorm::EachHead,
        post_norms: Presence::Always,
        ..Parts::PLAIN
    },
    adjust,
};

/// One layer in this many sees everything.
const PATTERN: usize = 6;

/// Layers of the 27B model, whose scores are scaled by the width a head has of the model, not by its own size.
const LAYERS_27B: usize = 62;

fn adjust(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    config.gate = Gate::Gelu;
    config.embedding_scale = (config.width as f32).sqrt();
    config.window = keys.optional_count("attention.sliding_window", u32::MAX)?;
    config.windowed = keys.windowed(config.n_layer, PATTERN)?;
    // Windowed layers keep the base and the positions that all Gemma models before had.
    config.rope_windowed.freq_base = freq_base(keys, "rope.freq_base_swa")?;
    config.rope_windowed.scaling = super::super::rope::Scaling::None;
    if config.n_layer == LAYERS_27B {
        config.attention_scale = 1.0 / ((config.width / config.heads) as f32).sqrt();
    }
    config.logit_soft_cap = keys.positive("final_logit_softcapping")?;
    config.attention_soft_cap = keys.positive("attn_logit_softcapping")?;
    Ok(())
}
