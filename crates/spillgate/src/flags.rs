//! Flags that several commands share, as they are typed. What they mean is checked in [`crate::settings`].
//!
//! The same flag has the same name, default and unit wherever it appears; the README has them all in one table.

use clap::{Args, ValueEnum};

/// A switch that is named both ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnOff {
    On,
    Off,
}

/// Number formats of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CacheType {
    F16,
    Bf16,
    #[value(name = "q8_0")]
    Q8_0,
    #[value(name = "q4_0")]
    Q4_0,
}

/// How the machine is used.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Machine")]
pub struct MachineFlags {
    /// Threads that compute [default: the physical cores this process may use]
    #[arg(short, long, value_name = "N")]
    pub threads: Option<usize>,
    /// Instruction set: auto, scalar, avx2, avx512 or amx; results are the same to the last bit
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub isa: String,
    /// Whether each thread is tied to one core
    #[arg(
        long,
        value_enum,
        value_name = "on|off",
        default_value = "off",
        hide_possible_values = true
    )]
    pub pin_threads: OnOff,
    /// Whether the model's file is mapped into memory; off for files that may change or be cut while in use
    #[arg(
        long,
        value_enum,
        value_name = "on|off",
        default_value = "on",
        hide_possible_values = true
    )]
    pub mmap: OnOff,
}

/// How much a model remembers, and in which form.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Context")]
pub struct ContextFlags {
    /// Tokens of context [default: the smaller of trained length, 8192 and what fits into memory]
    #[arg(short, long, value_name = "TOKENS")]
    pub ctx: Option<usize>,
    /// Most prompt tokens computed at a time
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    pub ubatch: usize,
    /// Number format of the keys [default: f16; for run and chat less, where a --ctx has no room otherwise]
    #[arg(long, value_enum, value_name = "TYPE")]
    pub cache_type_k: Option<CacheType>,
    /// Number format of the values [default: as for the keys]
    #[arg(long, value_enum, value_name = "TYPE")]
    pub cache_type_v: Option<CacheType>,
}

/// How the next token is chosen.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingFlags {
    /// Temperature; 0 always takes the most likely token
    #[arg(long, value_name = "X", default_value_t = 0.7)]
    pub temp: f32,
    /// Keep the K most likely tokens; 0 keeps all
    #[arg(long, value_name = "K", default_value_t = 40)]
    pub top_k: u32,
    /// Keep the most likely tokens that together reach this probability; 1 keeps all
    #[arg(long, value_name = "P", default_value_t = 0.95)]
    pub top_p: f32,
    /// Keep tokens at least this likely, relative to the most likely one; 0 keeps all
    #[arg(long, value_name = "P", default_value_t = 0.05)]
    pub min_p: f32,
    /// Keep the most typical tokens that together reach this probability; 1 keeps all
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    pub typical: f32,
    /// Divide the logits of repeated tokens by this; 1 is off
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    pub repeat_penalty: f32,
    /// Tokens that the three penalties look back at; -1 is all
    #[arg(
        long,
        value_name = "TOKENS",
        default_value_t = 64,
        allow_negative_numbers = true
    )]
    pub repeat_last_n: i32,
    /// Subtract this from the logits of tokens that occurred
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    pub presence_penalty: f32,
    /// Subtract this from a token's logit for each time that it occurred
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    pub frequency_penalty: f32,
    /// Strength of DRY, which discourages repeated sequences; 0 is off
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub dry_multiplier: f32,
    /// Growth of the DRY penalty with each token of a repeated sequence
    #[arg(long, value_name = "X", default_value_t = 1.75)]
    pub dry_base: f32,
    /// Longest repeated sequence that DRY leaves alone
    #[arg(long, value_name = "TOKENS", default_value_t = 2)]
    pub dry_allowed_length: u32,
    /// Tokens that DRY searches for repetitions; -1 is all
    #[arg(long, value_name = "TOKENS", default_value_t = -1, allow_negative_numbers = true)]
    pub dry_last_n: i32,
    /// Text that no repetition reaches past; may be repeated [default: the end of a line]
    #[arg(long, value_name = "TEXT")]
    pub dry_breaker: Vec<String>,
    /// Add BIAS to a token's logit; may be repeated
    #[arg(long, value_name = "ID=BIAS", allow_hyphen_values = true)]
    pub logit_bias: Vec<String>,
    /// Seed of the random choice; the same seed gives the same text
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
}

/// What is generated, and when it ends.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Generation")]
pub struct GenerationFlags {
    /// Most tokens to generate [default: until the model ends or the context is full]
    #[arg(short = 'n', long, value_name = "TOKENS")]
    pub predict: Option<usize>,
    /// End when this text appears; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// A system message before the conversation
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
}
