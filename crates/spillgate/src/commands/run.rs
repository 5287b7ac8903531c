//! `run`: one prompt, one answer.

use std::io::{self, IsTerminal, Read};
use std::ops::ControlFlow;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use engine::generate::{Finish, Generated, Generator, Request, memory};
use engine::plan::session::Taken;
use engine::sampler::Sampler;
use engine::tokenizer::EncodeOptions;
use serde::Serialize;

use crate::cli::Common;
use crate::failure::{Advised, Interrupted};
use crate::flags::{ContextFlags, GenerationFlags, MachineFlags, RecordFlags, SamplingFlags};
use crate::output::{human_bytes, print, print_json};
use crate::prompt::Chat;
use crate::settings::Need;
use crate::{experts, interrupt, kept, settings};

/// Answers one prompt
///
/// The prompt is put into the model's own chat template unless --raw is given. The answer streams to stdout; a closing
/// line on stderr says how fast it was. Ctrl-C ends the answer, a second time the program.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  spillgate run smollm2 \"Why is the sky blue?\"
  spillgate run smollm2 -f question.txt -n 200 --temp 0
  spillgate run gemma3-270m --raw \"Once upon a time\" < /dev/null
  git diff | spillgate run qwen2.5-coder-1.5b --system 'Review this change.'")]
pub struct RunArgs {
    /// Path of a GGUF file, a known name, or hf:OWNER/REPO/FILE.gguf
    model: String,
    /// The prompt; without it and without -f it is read from stdin
    prompt: Option<String>,
    /// Read the prompt from a file
    #[arg(short, long, value_name = "FILE", conflicts_with = "prompt")]
    file: Option<PathBuf>,
    /// Continue the text as it is, without chat template
    #[arg(long)]
    raw: bool,
    #[command(flatten)]
    generation: GenerationFlags,
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    context: ContextFlags,
    #[command(flatten)]
    records: RecordFlags,
    #[command(flatten)]
    machine: MachineFlags,
}

/// The figures of the closing line.
#[derive(Serialize)]
pub struct Figures {
    prompt_tokens: usize,
    reused_tokens: usize,
    prompt_tok_s: f64,
    decode_tokens: usize,
    decode_tok_s: f64,
    ttft_ms: f64,
    peak_bytes: Option<u64>,
}

#[derive(Serialize)]
struct Answer<'a> {
    model: String,
    text: &'a str,
    tokens: &'a [u32],
    finish: Finish,
    #[serde(flatten)]
    figures: Figures,
    memory: Taken,
}

impl Figures {
    pub fn new(generated: &Generated) -> Self {
        let t = &generated.timing;
        Self {
            prompt_tokens: t.prompt_tokens,
            reused_tokens: t.reused_tokens,
            prompt_tok_s: t.prompt_tok_s(),
            decode_tokens: t.generated_tokens,
            decode_tok_s: t.decode_tok_s(),
            ttft_ms: t.ttft_s * 1e3,
            peak_bytes: memory::peak_bytes(),
        }
    }

    /// The closing line.
    pub fn line(&self) -> String {
        let reused = match self.reused_tokens {
            0 => String::new(),
            n => format!(" (and {n} kept)"),
        };
        let peak = self.peak_bytes.map_or("unknown".to_owned(), human_bytes);
        format!(
            "prompt {} tok{reused}, {:.1} tok/s | decode {} tok, {:.1} tok/s | first token {:.0} ms | peak memory {peak}",
            self.prompt_tokens,
            self.prompt_tok_s,
            self.decode_tokens,
            self.decode_tok_s,
            self.ttft_ms,
        )
    }
}

pub fn run(args: &RunArgs, common: &Common) -> Result<()> {
    let prompt = prompt(args)?;
    kept::check(args.generation.session.as_deref())?;
    let loaded = settings::open(&args.model, &args.machine)?.load(&args.context, Need::Chosen)?;
    let mut sampler = Sampler::new(
        settings::sampler_params(&args.sampling, &loaded.tokenizer)?,
        loaded.tokenizer.n_vocab(),
    )?;

    let tokens = if args.raw {
        loaded.tokenizer.encode(&prompt, EncodeOptions::default())?
    } else {
        let system = args.generation.system.as_deref();
        let mut chat = Chat::new(loaded.file.metadata(), &loaded.tokenizer, system)?;
        chat.ask(&prompt);
        chat.tokens()?
    };

    let (mut session, memory) = loaded.session()?;
    experts::record(&mut session, &args.records)?;
    let mut generator = Generator::new(session, &loaded.tokenizer);
    kept::restore(&mut generator, args.generation.session.as_deref())?;
    let request = Request {
        prompt: &tokens,
        tokens_max: args.generation.predict,
        stop: &args.generation.stop,
    };
    let mut closed = None;
    let generated = generator.generate(request, &mut sampler, &interrupt::asked, &mut |piece| {
        if common.json {
            return ControlFlow::Continue(());
        }
        match print(piece) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                closed = Some(error);
                ControlFlow::Break(())
            }
        }
    })?;
    if let Some(error) = closed {
        return Err(error);
    }
    loaded.remember(generator.decoder());
    kept::save(&generator, "", args.generation.session.as_deref())?;
    let figures = Figures::new(&generated);
    if common.json {
        print_json(&Answer {
            model: loaded.path.display().to_string(),
            text: &generated.text,
            tokens: &generated.tokens,
            finish: generated.finish,
            figures,
            memory,
        })?;
    } else {
        print("\n")?;
        eprintln!("{}", figures.line());
        if let Some(note) = note(generated.finish) {
            eprintln!("note: {note}");
        }
    }
    experts::recorded(generator.finish_records())?;
    if generated.finish == Finish::Interrupted {
        Err(Interrupted.into())
    } else {
        Ok(())
    }
}

/// What a user may want to know about an end that was not the model's.
pub fn note(finish: Finish) -> Option<&'static str> {
    match finish {
        Finish::ContextFull => Some("the context is full; --ctx makes it larger"),
        Finish::Length => Some("the limit of -n was reached"),
        Finish::End | Finish::StopString | Finish::Interrupted => None,
    }
}

fn prompt(args: &RunArgs) -> Result<String> {
    if let Some(prompt) = &args.prompt {
        return Ok(prompt.clone());
    }
    if let Some(file) = &args.file {
        let text = std::fs::read_to_string(file)
            .with_context(|| format!("cannot read {}", file.display()))?;
        return some(text, &file.display().to_string());
    }
    if io::stdin().is_terminal() {
        return Err(Advised::new(
            "there is no prompt",
            "give one as an argument, with -f FILE, or on stdin",
        )
        .into());
    }
    let mut text = String::new();
    io::stdin()
        .lock()
        .read_to_string(&mut text)
        .context("cannot read the prompt from stdin")?;
    some(text, "stdin")
}

/// A file with nothing in it, or an stdin that nobody writes to, is rather a mistake than a prompt.
fn some(text: String, from: &str) -> Result<String> {
    if text.trim().is_empty() {
        let hint = "give one as an argument, with -f FILE, or on stdin";
        return Err(Advised::new(format!("there is no prompt: {from} is empty"), hint).into());
    }
    Ok(text)
}
