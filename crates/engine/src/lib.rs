//! Models, their state and everything around them: from a name to tokens.
pub mod fetch;
