//! What can be asked on the command line.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{ArgAction, Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::commands::bench::BenchArgs;
use crate::commands::chat::ChatArgs;
use crate::commands::eval::EvalArgs;
use crate::commands::info::InfoArgs;
use crate::commands::plan::PlanArgs;
use crate::commands::probe::ProbeArgs;
use crate::commands::ps::PsArgs;
use crate::commands::pull::PullArgs;
use crate::commands::replay::ReplayArgs;
use crate::commands::run::RunArgs;
use crate::commands::selftest::SelftestArgs;
use crate::commands::serve::ServeArgs;
use crate::commands::shell::{CompletionsArgs, ManArgs};
use crate::commands::tokenize::TokenizeArgs;

/// Runs language models on this machine
#[derive(Debug, Parser)]
#[command(
    name = "spillgate",
    version,
    propagate_version = true,
    args_override_self = true,
    after_help = "\
MODEL is the path of a GGUF file, a known name (see 'spillgate pull'), or
hf:OWNER/REPO/FILE.gguf; what is missing is fetched into the cache (SPILLGATE_CACHE).
Results go to stdout, everything else to stderr.

Examples:
  spillgate run smollm2 \"Why is the sky blue?\"
  spillgate chat qwen2.5-0.5b
  spillgate serve qwen2.5-0.5b
  spillgate info model.gguf
  echo -n 'Hello world' | spillgate tokenize smollm2"
)]
pub struct Cli {
    #[command(flatten)]
    pub common: Common,
    #[command(subcommand)]
    pub command: Command,
}

/// Flags of every command.
#[derive(Debug, Args)]
pub struct Common {
    /// Print the result as JSON
    #[arg(long, global = true)]
    pub json: bool,
    /// Say more on stderr; twice for details
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub verbose: u8,
    /// Flags that hold where they are not typed, a section a command [default: spillgate/config.toml in the user's configuration, or the variable SPILLGATE_CONFIG]
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Pull(PullArgs),
    Run(RunArgs),
    Chat(ChatArgs),
    Bench(BenchArgs),
    Eval(EvalArgs),
    Info(InfoArgs),
    Plan(PlanArgs),
    Probe(ProbeArgs),
    Ps(PsArgs),
    Replay(ReplayArgs),
    Selftest(SelftestArgs),
    Serve(ServeArgs),
    Tokenize(TokenizeArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
}

impl Cli {
    /// Reads a command line; help and errors end the process.
    pub fn read(words: Vec<OsString>) -> Self {
        Self::try_read(words).unwrap_or_else(|error| error.exit())
    }

    fn try_read(words: Vec<OsString>) -> Result<Self, clap::Error> {
        let mut command = with_negative_values(Self::command());
        let matches = command.try_get_matches_from_mut(words)?;
        Self::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
    }
}

/// A negative number behind a flag that takes a value is its value, so that it is told why it will not do, and not a flag that nobody knows.
fn with_negative_values(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|arg| {
        let takes = arg.get_long().is_some() && arg.get_action().takes_values();
        if takes {
            arg.allow_negative_numbers(true)
        } else {
            arg
        }
    });
    command.mut_subcommands(with_negative_values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_negative_number_is_the_value_of_the_flag_before_it() {
        let told = |words: &[&str]| {
            let words = words.iter().map(OsString::from).collect();
            Cli::try_read(words).unwrap_err().to_string()
        };
        for flag in ["--predict", "-n", "--threads", "--seed", "--ubatch"] {
            let error = told(&["spillgate", "run", "m", "hi", flag, "-1"]);
            assert!(error.contains("invalid value '-1' for '"), "{error}");
        }
        let error = told(&["spillgate", "eval", "logits", "m", "--top", "-1"]);
        assert!(error.contains("invalid value '-1' for '--top"), "{error}");
        let error = told(&["spillgate", "run", "m", "-1"]);
        assert!(error.contains("unexpected argument '-1'"), "{error}");
        let words = [
            "spillgate",
            "run",
            "m",
            "--temp",
            "-0.5",
            "--logit-bias",
            "5=-1",
        ];
        Cli::try_read(words.iter().map(OsString::from).collect()).unwrap();
    }

    #[test]
    fn the_flags_are_consistent() {
        Cli::command().debug_assert();
    }

    /// Every flag of a command and of those below it.
    fn flags(command: &clap::Command) -> Vec<String> {
        let own = command
            .get_arguments()
            .filter_map(|a| a.get_long())
            .map(str::to_owned);
        own.chain(command.get_subcommands().flat_map(flags))
            .collect()
    }

    #[test]
    fn no_command_has_a_flag_twice() {
        fn check(command: &clap::Command) {
            let mut names: Vec<&str> = command
                .get_arguments()
                .map(|a| a.get_id().as_str())
                .collect();
            names.sort_unstable();
            for pair in names.windows(2) {
                assert_ne!(pair[0], pair[1], "{}", command.get_name());
            }
            command.get_subcommands().for_each(check);
        }
        check(&Cli::command());
    }

    #[test]
    fn the_readme_has_every_flag_in_its_table() {
        let readme = include_str!("../../../README.md");
        let table: Vec<&str> = readme
            .lines()
            .filter(|line| line.starts_with("| `"))
            .collect();
        for flag in flags(&Cli::command()) {
            let cell = format!("--{flag}");
            let listed = table.iter().any(|row| {
                let first = row.split('|').nth(1).unwrap_or_default();
                first.split([' ', '`', ',']).any(|word| word == cell)
            });
            assert!(listed, "{cell} is not in the README's table of flags");
        }
    }

    #[test]
    fn the_readme_lists_no_flag_that_is_gone() {
        let known = flags(&Cli::command());
        let readme = include_str!("../../../README.md");
        for row in readme.lines().filter(|line| line.starts_with("| `-")) {
            let first = row.split('|').nth(1).unwrap_or_default();
            let long = first
                .split([' ', '`', ','])
                .find_map(|word| word.strip_prefix("--"));
            let long = long.unwrap_or_else(|| panic!("no long flag in {row}"));
            assert!(
                known.iter().any(|k| k == long),
                "--{long} is in the README and nowhere else"
            );
        }
    }
}
