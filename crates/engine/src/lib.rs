//! Models, their state and everything around them: from a name to tokens.

#![forbid(unsafe_code)]

mod backend;
pub mod embed;
mod error;
pub mod eval;
pub mod experts;
pub mod fetch;
pub mod generate;
pub mod gpu;
mod kv;
pub mod model;
pub mod plan;
pub mod probe;
pub mod remembered;
pub mod sampler;
pub mod session;
pub mod stop;
pub mod synth;
pub mod template;
pub mod tokenizer;

pub use error::Error;
