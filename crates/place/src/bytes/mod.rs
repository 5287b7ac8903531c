//! How many bytes things take.
//!
//! Two figures of a cache: [`kv_bytes`] is what other engines' logs print, for comparison; [`kv_alloc_bytes`] what our blocks
//! take, for plans. [`recurrent_bytes`] is state that takes the cache's place in layers of linear attention, and
//! [`work_bytes`] what a session computes in.

mod cache;
mod device;
mod kv_type;
mod work;

pub use cache::{
    BLOCK_CELLS, Cache, GROUP_BLOCKS, KvAlloc, KvBytes, Streams, check_types, kv_alloc_bytes,
    kv_bytes, recurrent_bytes,
};
pub use device::device_alloc_bytes;
pub(crate) use device::{device_padding_bytes, device_tensor_bytes};
pub use kv_type::KvType;
pub use work::{SEQUENCE_LISTS, WorkBytes, carried_bytes, device_work_bytes, work_bytes};
