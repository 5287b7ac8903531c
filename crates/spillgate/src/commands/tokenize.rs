//! `tokenize`: the ids of a text.

use std::io::{self, Read};

use anyhow::{Context, Result};
use clap::Args;
use engine::tokenizer::{Affix, EncodeOptions, Specials, Tokenizer};
use serde::Serialize;

use crate::cli::Common;
use crate::flags::OnOff;
use crate::output::{print_json, println};

/// Prints the token ids of a text
///
/// Only the file's header is read. Ids are separated by spaces, the form that 'eval --tokens' takes.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  spillgate tokenize smollm2 'Hello world'
  spillgate tokenize smollm2 --json < README.md
  spillgate tokenize gemma3-270m --bos off --special off '<start_of_turn>'")]
pub struct TokenizeArgs {
    /// Path of a GGUF file, a known name, or hf:OWNER/REPO/FILE.gguf
    model: String,
    /// The text; without it stdin is taken byte for byte
    text: Option<String>,
    /// Whether the texts of special tokens, such as <|im_start|>, mean those tokens
    #[arg(
        long,
        value_enum,
        default_value = "on",
        value_name = "on|off",
        hide_possible_values = true
    )]
    special: OnOff,
    /// Whether the begin-of-text token goes first [default: as the model expects it]
    #[arg(long, value_enum, value_name = "on|off", hide_possible_values = true)]
    bos: Option<OnOff>,
}

#[derive(Serialize)]
struct Ids {
    ids: Vec<u32>,
}

pub fn run(args: &TokenizeArgs, common: &Common) -> Result<()> {
    let file = super::open_header(&args.model)?;
    let tokenizer = Tokenizer::from_gguf(file.metadata())?;
    let text = match &args.text {
        Some(text) => text.clone().into_bytes(),
        None => {
            let mut bytes = Vec::new();
            io::stdin()
                .lock()
                .read_to_end(&mut bytes)
                .context("cannot read stdin")?;
            bytes
        }
    };
    let options = EncodeOptions {
        specials: match args.special {
            OnOff::On => Specials::Parse,
            OnOff::Off => Specials::Text,
        },
        bos: match args.bos {
            None => Affix::AsModel,
            Some(OnOff::On) => Affix::Always,
            Some(OnOff::Off) => Affix::Never,
        },
        eos: Affix::Never,
    };
    let ids = tokenizer.encode(text, options)?;
    if common.json {
        return print_json(&Ids { ids });
    }
    let words: Vec<String> = ids.iter().map(u32::to_string).collect();
    println(&words.join(" "))
}
