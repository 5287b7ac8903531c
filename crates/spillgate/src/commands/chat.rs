//! `chat`: a conversation on the terminal.

use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use engine::fetch;
use engine::generate::{GenerateError, Generator, Request};
use engine::sampler::Sampler;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use super::run::{Figures, note};
use crate::cli::Common;
use crate::failure::Advised;
use crate::flags::{ContextFlags, GenerationFlags, MachineFlags, SamplingFlags};
use crate::output::{print, println};
use crate::prompt::Chat;
use crate::settings::Need;
use crate::{interrupt, kept, settings};

const HELP: &str = "\
/help    this list
/clear   forget the conversation
/quit    leave (also Ctrl-D)
Ctrl-C   stop the answer";

/// Holds a conversation
///
/// What was said stays computed: each turn costs only its own tokens. Ctrl-C stops an answer, and the conversation goes
/// on; /help lists what else can be typed. Lines are edited as in a shell, and remembered.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  spillgate chat smollm2
  spillgate chat qwen2.5-0.5b --system 'Answer in one sentence.' --ctx 4096")]
pub struct ChatArgs {
    /// Path of a GGUF file, a known name, or hf:OWNER/REPO/FILE.gguf
    model: String,
    #[command(flatten)]
    generation: GenerationFlags,
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    context: ContextFlags,
    #[command(flatten)]
    machine: MachineFlags,
}

pub fn run(args: &ChatArgs, common: &Common) -> Result<()> {
    if common.json {
        return Err(Advised::new(
            "chat has no JSON form",
            "use 'spillgate run --json' for one answer",
        )
        .into());
    }
    kept::check(args.generation.session.as_deref())?;
    let loaded = settings::open(&args.model, &args.machine)?.load(&args.context, Need::Chosen)?;
    let params = settings::sampler_params(&args.sampling, &loaded.tokenizer)?;
    let system = args.generation.system.as_deref();
    let mut chat = Chat::new(loaded.file.metadata(), &loaded.tokenizer, system)?;
    let (session, _) = loaded.session()?;
    let n_ctx = session.n_ctx();
    let mut generator = Generator::new(session, &loaded.tokenizer);
    let kept = kept::restore(&mut generator, args.generation.session.as_deref())?;
    let said = chat.resume(kept.as_deref().unwrap_or_default())?;

    let mut editor = DefaultEditor::new().context("cannot edit lines here")?;
    let history = history_file();
    if let Some(file) = &history {
        // A first conversation has no history yet.
        let _ = editor.load_history(file);
    }
    eprintln!(
        "{}, {} tokens of context; /help for help",
        loaded.path.display(),
        n_ctx
    );
    if said > 0 {
        eprintln!("the conversation goes on after {said} messages; /clear begins anew");
    }

    loop {
        interrupt::reset();
        let line = match editor.readline("> ") {
            Ok(line) => line,
            Err(ReadlineError::Interrupted) => {
                eprintln!("(/quit or Ctrl-D leaves)");
                continue;
            }
            Err(ReadlineError::Eof) => break,
            Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => {
                eprintln!("that line is not UTF-8, and is passed over");
                continue;
            }
            Err(error) => return Err(error).context("cannot read a line"),
        };
        match line.trim() {
            "" => continue,
            "/quit" | "/exit" => break,
            "/help" => {
                eprintln!("{HELP}");
                continue;
            }
            "/clear" => {
                chat.clear();
                generator.clear();
                continue;
            }
            command if command.starts_with('/') && !command.contains(char::is_whitespace) => {
                eprintln!("{command} is not known; /help lists what is");
                continue;
            }
            _ => {}
        }
        // A history that cannot be kept is no reason to stop talking.
        let _ = editor.add_history_entry(&line);
        if let Some(file) = &history {
            let _ = editor.save_history(file);
        }

        chat.ask(&line);
        let tokens = chat.tokens()?;
        let request = Request {
            prompt: &tokens,
            tokens_max: args.generation.predict,
            stop: &args.generation.stop,
        };
        // A new sampler a turn: an answer depends on the conversation and the seed alone.
        let mut sampler = Sampler::new(params.clone(), loaded.tokenizer.n_vocab())?;
        interrupt::reset();
        let mut closed = None;
        let generated = generator.generate(
            request,
            &mut sampler,
            &interrupt::asked,
            &mut |piece| match print(piece) {
                Ok(()) => ControlFlow::Continue(()),
                Err(error) => {
                    closed = Some(error);
                    ControlFlow::Break(())
                }
            },
        );
        if let Some(error) = closed {
            return Err(error);
        }
        let generated = match generated {
            Err(error @ GenerateError::PromptTooLong { .. }) => {
                eprintln!("{error}\n/clear begins anew, --ctx makes the context larger");
                chat.take_back();
                continue;
            }
            generated => generated?,
        };
        println("")?;
        eprintln!("[{}]", Figures::new(&generated).line());
        if let Some(note) = note(generated.finish) {
            eprintln!("note: {note}");
        }
        chat.answered(&generated.text);
    }
    loaded.remember(generator.decoder());
    kept::save(
        &generator,
        &chat.note()?,
        args.generation.session.as_deref(),
    )
}

/// Where typed lines are remembered: beside the models.
fn history_file() -> Option<PathBuf> {
    let dir = fetch::cache_dir().ok()?;
    std::fs::create_dir_all(&dir).ok()?;
    Some(dir.join("chat-history.txt"))
}
