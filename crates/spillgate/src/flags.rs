//! Flags that several commands share, as they are typed.

use clap::ValueEnum;

/// A switch that is named both ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnOff {
    On,
    Off,
}
