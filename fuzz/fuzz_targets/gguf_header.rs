//! Any bytes as a model file: `cargo +nightly fuzz run gguf_header -- -dict=gguf.dict`.

#![no_main]

// The same checks as the crate's own mutation tests make.
#[path = "../../crates/gguf/tests/suite/explore.rs"]
mod explore;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| explore::explore(bytes));
