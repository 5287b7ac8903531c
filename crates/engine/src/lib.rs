//! Models, their state and everything around them: from a name to tokens.
pub mod eval;
pub mod fetch;
pub mod sampler;
pub mod stop;
pub mod tokenizer;
