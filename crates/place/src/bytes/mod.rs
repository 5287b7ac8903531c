//! How many bytes things take.

mod kv_type;

pub use kv_type::KvType;
