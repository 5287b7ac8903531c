//! Pure decisions about memory: what a model takes, what lies where, and why.
//!
//! Nothing here has a clock, reads a file, asks a device or knows another crate: a decision is a function of what it is given,
//! so that it can be tested, explained and replayed on another machine.

#![forbid(unsafe_code)]

pub mod bytes;
pub mod cost;
pub mod decide;
pub mod drop;
mod error;
pub mod experts;
mod explain;
pub mod gate;
pub mod limits;
pub mod model;
pub mod plot;
pub mod profile;
pub mod replay;
pub mod routing;
pub mod tier;
pub mod windows;

pub use error::Error;
