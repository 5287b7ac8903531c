//! Plans: what decisions about memory are made from, and what becomes of them.

pub mod describe;
pub mod machine;
pub mod session;
