//! `serve`: a model behind an HTTP API.

use std::env;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use clap::builder::RangedU64ValueParser;
use clap::{Args, ValueEnum};
use engine::embed::{self, Pool};
use engine::sampler::Sampler;
use engine::session::{SequenceId, Session};
use engine::template::{ChatTemplate, TemplateError};
use serde::Serialize;
use server::{ApiKey, Hosts, Options, Served, limits};

use crate::cli::Common;
use crate::failure::{Advised, Interrupted};
use crate::flags::{ContextFlags, MachineFlags, RecordFlags, SamplingFlags};
use crate::output::{print_json, println};
use crate::running::{self, Note};
use crate::settings::{Loaded, Need};
use crate::{experts, interrupt, settings};

/// Where a key is looked for that is not typed, which other processes could see.
pub const KEY_VARIABLE: &str = "SPILLGATE_API_KEY";

/// The time that running answers have to come to their end when the server is to end.
const GRACE: Duration = Duration::from_secs(30);

/// Answers over HTTP, in OpenAI's forms
///
/// /v1/chat/completions, /v1/completions and /v1/models as clients of that API expect them, whole or streamed; /tokenize,
/// /detokenize, /health, /metrics (Prometheus) and /v1/plan beside them. Several requests are answered side by side, and share the
/// context's cells; others wait in a queue. What a prompt has in common with an earlier one is not computed twice. Sampling flags are what
/// holds where a request does not say. What is asked and answered is not logged; -v logs how many tokens it was, and how fast.
///
/// Ctrl-C or SIGTERM: nothing more is accepted, and running answers have 30 seconds; Ctrl-C again ends at once.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  spillgate serve smollm2
  spillgate serve model.gguf --port 9000 --ctx 16384
  SPILLGATE_API_KEY=secret spillgate serve model.gguf --host 0.0.0.0")]
pub struct ServeArgs {
    /// Path of a GGUF file, a known name, or hf:OWNER/REPO/FILE.gguf
    model: String,
    #[command(flatten)]
    server: ServerFlags,
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    context: ContextFlags,
    #[command(flatten)]
    records: RecordFlags,
    #[command(flatten)]
    machine: MachineFlags,
}

/// Who may ask, and how much.
#[derive(Debug, Args)]
#[command(next_help_heading = "Server")]
struct ServerFlags {
    /// Address to listen on; other machines reach 0.0.0.0, which takes a key
    #[arg(long, value_name = "ADDRESS", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    host: IpAddr,
    /// Port to listen on; 0 takes one that is free
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    port: u16,
    /// Key that requests must carry [default: the variable SPILLGATE_API_KEY, which other processes do not see]
    #[arg(long, value_name = "KEY")]
    api_key: Option<String>,
    /// Listen on any address without a key, and answer to any name
    #[arg(long)]
    insecure: bool,
    /// Requests that are answered at the same time at most [default: 8; fewer where memory leaves each less than 1024 tokens, and --ctx is not given]
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..=limits::PARALLEL_MAX as u64))]
    parallel: Option<usize>,
    /// On a GPU: compute an earlier answer anew, as the prompt that it then is, instead of going on from its cells
    #[arg(long)]
    exact_reuse: bool,
    /// A file that '--session' of run or chat has written: requests that begin like it begin with its cells; may be repeated
    #[arg(long, value_name = "FILE")]
    prefix: Vec<PathBuf>,
    /// What '/v1/embeddings' makes of the tokens' outputs [default: what the model's file says]
    #[arg(long, value_name = "WAY")]
    pooling: Option<Pooling>,
    /// Requests that wait at most; further ones are refused with status 429
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = RangedU64ValueParser::<usize>::new().range(1..=limits::QUEUE_MAX as u64))]
    queue: usize,
    /// Longest time of a request, its wait included
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = RangedU64ValueParser::<u64>::new().range(1..=86_400))]
    timeout: u64,
}

/// How a text becomes a vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Pooling {
    /// No embeddings
    None,
    /// Their mean
    Mean,
    /// The last one
    Last,
}

/// Where the model is to be found.
#[derive(Serialize)]
struct Ready<'a> {
    url: String,
    model: &'a str,
    n_ctx: usize,
}

pub fn run(args: &ServeArgs, common: &Common) -> Result<()> {
    // What is wrong with the address is said before anything is loaded.
    let flags = &args.server;
    let key = key(flags)?;
    check_safe(flags, key.is_some())?;
    let address = SocketAddr::new(flags.host, flags.port);
    let listener = TcpListener::bind(address).map_err(|error| {
        let what = format!("cannot listen on {address}: {error}");
        match error.kind() {
            io::ErrorKind::AddrInUse => {
                let hint = "'--port 0' takes a port that is free; 'spillgate ps' shows the servers of this machine";
                Advised::new(what, hint).into()
            }
            _ => anyhow!(what),
        }
    })?;
    let url = format!("http://{}", listener.local_addr()?);

    let loaded = settings::open(&args.model, &args.machine)?
        .load(&args.context, Need::Shared(flags.parallel))?;
    let template = match ChatTemplate::from_gguf(loaded.file.metadata(), &loaded.tokenizer) {
        Ok(template) => Some(template),
        Err(TemplateError::Missing) => {
            tracing::warn!("the model has no chat template: /v1/chat/completions will refuse");
            None
        }
        Err(error) => return Err(error.into()),
    };
    let sampling = settings::sampler_params(&args.sampling, &loaded.tokenizer)?;
    // Flags out of range are the user's mistake, not the clients'.
    Sampler::new(sampling.clone(), loaded.tokenizer.n_vocab())?;
    let id = model_id(&args.model, &loaded.path);
    let served = Served {
        id: id.clone(),
        tokenizer: loaded.tokenizer.clone(),
        template,
        sampling,
        embedder: embedder(flags.pooling, &loaded)?,
        plan: serde_json::to_value(loaded.plan())?,
    };
    let (mut session, _) = loaded.session()?;
    let parallel = session.options().n_seq;
    // Cells are shared; a text that is longer than those that the model has seen is a choice of who alone has them all.
    let n_ctx = session.n_ctx();
    let trained = session.model().config().n_ctx_train;
    let options = Options {
        parallel,
        n_ctx: n_ctx.min(trained.max(n_ctx / parallel)),
        exact_reuse: flags.exact_reuse,
        hosts: if flags.insecure {
            Hosts::Any
        } else {
            Hosts::Local
        },
        key,
        queue_len: flags.queue,
        timeout: Duration::from_secs(flags.timeout),
        grace: GRACE,
    };
    experts::record(&mut session, &args.records)?;
    let begun = begun(&mut session, &flags.prefix)?;
    if interrupt::asked() {
        return Err(Interrupted.into());
    }
    let ready = Ready {
        url,
        model: &id,
        n_ctx: options.n_ctx,
    };
    let note = Note {
        pid: std::process::id(),
        url: ready.url.clone(),
        model: id.clone(),
    };
    // 'spillgate ps' does not find it then, and all else is as it should be.
    let _left = running::leave(&note).inspect_err(|error| {
        tracing::warn!("'spillgate ps' will not know of this server: {error}")
    });
    if common.json {
        print_json(&ready)?;
    } else {
        let Ready { url, model, n_ctx } = &ready;
        println(&format!(
            "listening on {url}: model {model}, {n_ctx} tokens of context"
        ))?;
        eprintln!(
            "clients take {url}/v1 as their base URL; {url} is a page to chat and to watch; Ctrl-C ends"
        );
    }
    server::run(
        listener,
        &mut session,
        begun,
        served,
        options,
        server::asked_to_end(),
    )?;
    loaded.remember(&session);
    experts::recorded(session.finish_records())
}

/// What makes embeddings, if anything does.
fn embedder(asked: Option<Pooling>, loaded: &Loaded) -> Result<Option<Pool>> {
    let pooling = match asked {
        Some(Pooling::None) => None,
        Some(Pooling::Mean) => Some(embed::Pooling::Mean),
        Some(Pooling::Last) => Some(embed::Pooling::Last),
        None => embed::Pooling::of(loaded.file.metadata())?,
    };
    let width = loaded.model.config().width;
    Ok(pooling.map(|pooling| Pool::new(pooling, width)))
}

/// Sequences from files, and their tokens.
fn begun(session: &mut Session<'_>, files: &[PathBuf]) -> Result<Vec<(SequenceId, Vec<u32>)>> {
    let mut begun = Vec::new();
    for file in files {
        let tokens = session
            .restore(file)
            .with_context(|| format!("cannot restore {}", file.display()))?
            .tokens;
        let (sequence, kept) = session.branch(session.selected(), tokens.len());
        session.truncate(0);
        tracing::info!("{kept} tokens from {}", file.display());
        begun.push((sequence, tokens));
    }
    Ok(begun)
}

/// The key, typed or from the environment.
fn key(flags: &ServerFlags) -> Result<Option<ApiKey>> {
    let (text, from) = match &flags.api_key {
        Some(key) => (key.clone(), "--api-key"),
        None => match env::var(KEY_VARIABLE) {
            Ok(key) => (key, KEY_VARIABLE),
            Err(env::VarError::NotPresent) => return Ok(None),
            Err(error) => return Err(error).context(KEY_VARIABLE),
        },
    };
    let Some(key) = ApiKey::new(&text) else {
        let what = format!("{from} is empty");
        return Err(Advised::new(what, "leave it out to ask for no key").into());
    };
    Ok(Some(key))
}

/// Refuses to let everybody in by accident.
fn check_safe(flags: &ServerFlags, has_key: bool) -> Result<()> {
    if flags.host.is_loopback() || has_key || flags.insecure {
        return Ok(());
    }
    let what = format!(
        "--host {} without a key: whoever reaches this machine could use the model",
        flags.host
    );
    let hint = format!("set {KEY_VARIABLE} or --api-key, or say --insecure if that is meant");
    Err(Advised::new(what, hint).into())
}

/// What clients call the model: the name that was typed, or that of the file.
fn model_id(name: &str, path: &Path) -> String {
    if !Path::new(name).exists() && !name.contains('/') {
        return name.to_owned();
    }
    let stem = path.file_stem().unwrap_or(path.as_os_str());
    stem.to_string_lossy().into_owned()
}
