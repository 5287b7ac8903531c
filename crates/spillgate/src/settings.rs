//! What the shared flags mean: checked, and in the engine's own types.

use std::path::{Path, PathBuf};

use anyhow::Result;
use cpu::Isa;
use cpu::pool::Pinning;
use engine::generate::memory;
use engine::model::{Config, LoadOptions, Model};
use engine::sampler::SamplerParams;
use engine::session::{KvType, N_CTX_DEFAULT, Session, SessionOptions};
use engine::tokenizer::{EncodeOptions, Tokenizer};
use gguf::{GgufFile, MapMode};

use crate::failure::Advised;
use crate::flags::{CacheType, ContextFlags, MachineFlags, OnOff, SamplingFlags};
use crate::interrupt;

use crate::progress::Bar;

/// Contexts smaller than a block of cells are not tried: they would save nothing.
const CTX_STEP: usize = engine::session::BLOCK_CELLS;

/// A model ready to be used, and what its file says beside the weights.
pub struct Loaded {
    pub path: PathBuf,
    pub model: Model,
    pub tokenizer: Tokenizer,
    pub file: GgufFile,
}

/// Fetches a model where it is missing, and loads it.
pub fn load(name: &str, flags: &MachineFlags) -> Result<Loaded> {
    interrupt::catch()?;
    let path = crate::commands::model_path(name)?;
    // The tokenizer first: a file that cannot be used should be refused before its weights are read.
    let options = load_options(flags)?;
    let file = GgufFile::open(&path, options.map)?;
    let tokenizer = Tokenizer::from_gguf(file.metadata())?;
    for warning in tokenizer.warnings() {
        tracing::warn!("{warning}");
    }
    check_vocabulary(&Model::read_config(&file)?, &tokenizer)?;
    let model = load_model(&path, &file, &options)?;
    Ok(Loaded {
        path,
        model,
        tokenizer,
        file,
    })
}

/// Every token of the tokenizer needs a row of the embedding. Rows beyond the last token are padding, and never chosen.
pub fn check_vocabulary(config: &Config, tokenizer: &Tokenizer) -> Result<()> {
    let (rows, tokens) = (config.n_vocab, tokenizer.n_vocab());
    if rows < tokens {
        let what = format!("the tokenizer has {tokens} tokens, the embedding rows for {rows}");
        return Err(Advised::new(what, "the file is damaged, or was put together wrongly").into());
    }
    Ok(())
}

/// Loads the weights, with a bar.
fn load_model(path: &Path, file: &GgufFile, options: &LoadOptions) -> Result<Model> {
    let mut bar = Bar::on_terminal("loading");
    let name = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let mut started = false;
    let model = Model::from_file(file, options, &mut |progress| {
        if !started {
            bar.start(&name, 0, progress.total_bytes);
            started = true;
        }
        bar.set(progress.done_bytes);
    })?;
    bar.clear();
    Ok(model)
}

pub fn load_options(flags: &MachineFlags) -> Result<LoadOptions> {
    if flags.threads == Some(0) {
        return Err(Advised::new("--threads 0", "leave it out to use every physical core").into());
    }
    Ok(LoadOptions {
        threads: flags.threads,
        isa: match flags.isa.as_str() {
            "auto" => None,
            name => Some(name.parse::<Isa>()?),
        },
        pinning: match flags.pin_threads {
            OnOff::On => Pinning::Pinned,
            OnOff::Off => Pinning::Free,
        },
        map: match flags.mmap {
            OnOff::On => MapMode::Mmap,
            OnOff::Off => MapMode::Read,
        },
    })
}

/// An empty session as the flags ask for it. Without `--ctx`: `needed` tokens where that is known, else the smaller of
/// the trained length, 8192 and what fits.
pub fn session<'m>(
    flags: &ContextFlags,
    model: &'m Model,
    needed: Option<usize>,
) -> Result<Session<'m>> {
    let mut options = SessionOptions {
        n_ctx: flags
            .ctx
            .or(needed)
            .unwrap_or_else(|| model.config().n_ctx_train.min(N_CTX_DEFAULT)),
        type_k: kv_type(flags.cache_type_k),
        type_v: kv_type(flags.cache_type_v),
        ubatch: flags.ubatch,
    };
    if let (Some(n_ctx), Some(needed)) = (flags.ctx, needed)
        && n_ctx < needed
    {
        let what = format!("--ctx {n_ctx} is too small: {needed} tokens are needed");
        return Err(Advised::new(what, "leave --ctx out to have it chosen").into());
    }
    let mut session = Session::new(model, &options)?;
    if flags.ctx.is_none() && needed.is_none() {
        // Cells are taken as the context grows, so a session that would not fit has not cost anything yet.
        while let Some(smaller) =
            smaller_ctx(options.n_ctx, session.kv_bytes(), memory::available_bytes())
        {
            options.n_ctx = smaller;
            session = Session::new(model, &options)?;
        }
    }
    Ok(session)
}

/// The context to try next where a cache of `kv_bytes` does not fit into what is free; one block at least.
fn smaller_ctx(n_ctx: usize, kv_bytes: u64, free_bytes: Option<u64>) -> Option<usize> {
    let fits = free_bytes.is_none_or(|free| kv_bytes <= free);
    (!fits && n_ctx > CTX_STEP).then(|| (n_ctx / 2).next_multiple_of(CTX_STEP))
}

fn kv_type(ty: CacheType) -> KvType {
    match ty {
        CacheType::F16 => KvType::F16,
        CacheType::Bf16 => KvType::Bf16,
        CacheType::Q8_0 => KvType::Q8_0,
        CacheType::Q4_0 => KvType::Q4_0,
    }
}

/// The sampling that the flags ask for. Ranges are checked by the sampler, which knows them.
pub fn sampler_params(flags: &SamplingFlags, tokenizer: &Tokenizer) -> Result<SamplerParams> {
    let end_of_line = ["\n".to_owned()];
    let breakers = if flags.dry_breaker.is_empty() {
        &end_of_line[..]
    } else {
        &flags.dry_breaker
    };
    let mut dry_breakers = Vec::new();
    for text in breakers {
        dry_breakers.extend(tokenizer.encode(text, EncodeOptions::VERBATIM)?);
    }
    Ok(SamplerParams {
        logit_bias: flags
            .logit_bias
            .iter()
            .map(|text| logit_bias(text))
            .collect::<Result<_>>()?,
        repeat_penalty: flags.repeat_penalty,
        presence_penalty: flags.presence_penalty,
        frequency_penalty: flags.frequency_penalty,
        penalty_last_n: flags.repeat_last_n,
        dry_multiplier: flags.dry_multiplier,
        dry_base: flags.dry_base,
        dry_allowed_length: flags.dry_allowed_length,
        dry_last_n: flags.dry_last_n,
        dry_breakers,
        top_k: flags.top_k,
        typical_p: flags.typical,
        top_p: flags.top_p,
        min_p: flags.min_p,
        temperature: flags.temp,
        seed: flags.seed,
    })
}

/// `ID=BIAS` as a token and what is added to its logit.
fn logit_bias(text: &str) -> Result<(u32, f32)> {
    let parsed = text
        .split_once('=')
        .and_then(|(id, bias)| Some((id.parse().ok()?, bias.parse().ok()?)));
    parsed.ok_or_else(|| {
        let what = format!("--logit-bias {text} is not ID=BIAS");
        Advised::new(
            what,
            "for example --logit-bias 13=-5, or 13=-inf to forbid a token",
        )
        .into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn biases_are_a_token_and_a_number() {
        assert_eq!(logit_bias("13=-2.5").unwrap(), (13, -2.5));
        assert_eq!(logit_bias("13=-inf").unwrap(), (13, f32::NEG_INFINITY));
        for bad in ["13", "=1", "13=", "-1=2", "x=1"] {
            assert!(logit_bias(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_context_shrinks_until_it_fits() {
        assert_eq!(smaller_ctx(8192, 100, None), None);
        assert_eq!(smaller_ctx(8192, 100, Some(100)), None);
        assert_eq!(smaller_ctx(8192, 101, Some(100)), Some(4096));
        assert_eq!(smaller_ctx(1000, 1, Some(0)), Some(512));
        assert_eq!(smaller_ctx(257, 1, Some(0)), Some(256));
        assert_eq!(
            smaller_ctx(256, 1, Some(0)),
            None,
            "one block at least: what fails then says why"
        );
    }
}
