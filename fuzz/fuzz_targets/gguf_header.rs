//! Any bytes as a model file. In the folder `fuzz`, with real headers as seeds:
//!
//! ```text
//! mkdir -p corpus/gguf_header
//! cargo +nightly fuzz run gguf_header corpus/gguf_header ../crates/gguf/tests/data -- -dict=gguf.dict -max_len=40000
//! ```

#![no_main]

// The same checks as the crate's own mutation tests make.
#[path = "../../crates/gguf/tests/suite/explore.rs"]
mod explore;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| explore::explore(bytes));
