//! Tests of the crate from outside, in one program.

mod explore;
mod headers;
mod hostile;
mod hostile_split;
mod mutate;
mod raw;
mod round_trip;
