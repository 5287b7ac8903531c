//! `eval niah`: whether a model finds what was hidden in a long text.

use anyhow::Result;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use engine::eval::niah::{self, Asked, Format, Outcome, Report, Task};
use engine::generate::Generator;
use engine::plan::session::Taken;
use serde::Serialize;

use crate::cli::Common;
use crate::failure::{Advised, Interrupted};
use crate::flags::{ContextFlags, MachineFlags};
use crate::output::{print, print_json, table};
use crate::progress::Samples;
use crate::settings::Need;
use crate::{interrupt, settings};

/// The context that is filled when none is asked for, if the model was trained with at least as much.
pub const N_CTX_DEFAULT: usize = 4096;

/// Hides needles in long texts and scores what the model finds
///
/// The eight retrieval tasks of RULER, over a text that is part of the program. Prompts fill the context up to the 128
/// tokens of an answer; a score is the mean share of the expected answers that were given. The model's chat template is
/// used where the file has one, and the most likely token is always taken. Ctrl-C ends it and prints what is done.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  spillgate eval niah qwen2.5-0.5b --ctx 4096
  spillgate eval niah qwen2.5-0.5b --ctx 8192 --cache-type-k q8_0 --cache-type-v q4_0 --samples 20
  spillgate eval niah smollm2 --ctx 1024 --task niah_single_1 --task niah_multivalue --json")]
pub struct NiahArgs {
    /// Path of a GGUF file, a known name, or hf:OWNER/REPO/FILE.gguf
    model: String,
    /// A task; may be repeated [default: all eight]
    #[arg(long, value_name = "NAME", value_parser = task_parser())]
    task: Vec<Task>,
    /// Prompts a task
    #[arg(long, value_name = "N", default_value_t = 5)]
    samples: usize,
    /// Seed of what is hidden and where; the same seed gives the same prompts
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Continue the text as it is, without chat template
    #[arg(long)]
    raw: bool,
    #[command(flatten)]
    context: ContextFlags,
    #[command(flatten)]
    machine: MachineFlags,
}

pub fn task_parser() -> impl TypedValueParser<Value = Task> {
    PossibleValuesParser::new(Task::ALL.map(Task::name))
        .map(|name| name.parse().expect("the parser lets only names pass"))
}

/// What is printed as JSON.
#[derive(Serialize)]
struct Scores {
    model: String,
    n_ctx: usize,
    seed: u64,
    chat_template: bool,
    #[serde(flatten)]
    report: Report,
    samples: Vec<Outcome>,
    memory: Taken,
}

pub fn run(args: &NiahArgs, common: &Common) -> Result<()> {
    if args.samples == 0 {
        return Err(Advised::new("--samples 0 asks nothing", "give at least 1").into());
    }
    let tasks = tasks(&args.task, &Task::ALL);
    let opened = settings::open(&args.model, &args.machine)?;
    let usual = opened.config.n_ctx_train.min(N_CTX_DEFAULT);
    let n_ctx = args.context.ctx.unwrap_or(usual);
    let loaded = opened.load(&args.context, Need::Cells(n_ctx))?;
    let format = if args.raw {
        Format::raw(&loaded.tokenizer)
    } else {
        Format::of_file(loaded.file.metadata(), &loaded.tokenizer)?
    };
    let (session, memory) = loaded.session()?;
    let mut generator = Generator::new(session, &loaded.tokenizer);

    let asked = Asked {
        tasks: &tasks,
        samples: args.samples,
        seed: args.seed,
    };
    let mut progress = Samples::new(tasks.len(), args.samples);
    let mut samples = Vec::new();
    let report = niah::run(
        &mut generator,
        &format,
        &asked,
        &interrupt::asked,
        &mut |outcome| {
            tracing::info!(
                "{} {}: {:.2} of {:?} in {:?}",
                outcome.task,
                outcome.index,
                outcome.score,
                outcome.answers,
                outcome.output
            );
            progress.done(outcome.task.name(), outcome.score);
            samples.push(outcome.clone());
        },
    )?;
    progress.clear();
    let complete = report.complete;
    if common.json {
        print_json(&Scores {
            model: loaded.path.display().to_string(),
            n_ctx,
            seed: args.seed,
            chat_template: format.is_chat(),
            report,
            samples,
            memory,
        })?;
    } else {
        print(&text(&report))?;
    }
    if complete {
        Ok(())
    } else {
        Err(Interrupted.into())
    }
}

/// Each task that was named once, or the usual ones.
pub fn tasks(named: &[Task], usual: &[Task]) -> Vec<Task> {
    let mut tasks = Vec::with_capacity(Task::ALL.len());
    let wanted = if named.is_empty() { usual } else { named };
    for &task in wanted {
        if !tasks.contains(&task) {
            tasks.push(task);
        }
    }
    tasks
}

fn text(report: &Report) -> String {
    let mut rows = vec![
        ["task", "samples", "score %", "prompt tokens"]
            .map(str::to_owned)
            .to_vec(),
    ];
    for t in &report.tasks {
        rows.push(vec![
            t.task.to_string(),
            t.samples.to_string(),
            format!("{:.1}", t.score_percent),
            format!("{:.0}", t.prompt_tokens_mean),
        ]);
    }
    if let Some(mean) = report.score_percent_mean {
        let samples: usize = report.tasks.iter().map(|t| t.samples).sum();
        rows.push(vec![
            "mean".to_owned(),
            samples.to_string(),
            format!("{mean:.1}"),
        ]);
    }
    table(&rows, &[1, 2, 3])
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::eval::niah::TaskScore;

    #[test]
    fn a_task_is_run_once() {
        assert_eq!(tasks(&[], &Task::ALL), Task::ALL);
        let named = [Task::MultiValue, Task::Single1, Task::MultiValue];
        assert_eq!(tasks(&named, &Task::ALL), [Task::MultiValue, Task::Single1]);
    }

    #[test]
    fn the_table_ends_with_the_mean() {
        let score = |task, samples, score_percent| TaskScore {
            task,
            samples,
            score_percent,
            prompt_tokens_mean: 3959.6,
        };
        let mut report = Report {
            tasks: vec![
                score(Task::Single1, 5, 100.0),
                score(Task::MultiKey3, 2, 12.5),
            ],
            score_percent_mean: Some(56.25),
            complete: false,
        };
        assert_eq!(
            text(&report),
            "task             samples  score %  prompt tokens\n\
             niah_single_1          5    100.0           3960\n\
             niah_multikey_3        2     12.5           3960\n\
             mean                   7     56.2\n"
        );
        report.tasks.clear();
        report.score_percent_mean = None;
        assert_eq!(text(&report).lines().count(), 1);
    }
}
