//! Device compute on NVIDIA GPUs: the operations of the CPU, with the same bits.
//!
//! Building needs no CUDA: the driver's library is loaded when a [`Device`] is opened, and kernels are PTX that lies beside
//! its source in `kernels/`. Without a driver, or with one that is too old, opening fails with one [`Error`].
//!
//! | module | what it is |
//! |---|---|
//! | `driver` | the functions of the driver that are used, found at run time |
//! | [`device`], [`stream`], [`memory`], [`kernel`], [`graph`] | safe handles to what the driver has |
//! | [`doorbell`] | work handed to the CPU in the midst of a step |
//! | [`ptx`] | the compiled kernels, by name and target |
//! | [`staging`] | pinned memory on its way to a device |
//! | [`weights`], [`acts`], [`product`] | weights in tiles, activations in 8-bit blocks, their products |
//! | [`experts`] | mixtures of experts: who is chosen, products of the chosen, their sum |
//! | [`measure`] | how fast the device is, for plans |
//! | [`selftest`] | every kernel against the scalar definition |
//!
//! **Order.** Work is done in the order in which it was given to a [`Stream`]; different streams are ordered by [`Event`]s.
//! A [`Buffer`] that is dropped is freed when all work given before is done, for the driver waits for it.

pub mod acts;
pub mod attention;
pub mod device;
pub mod doorbell;
mod driver;
pub mod error;
pub mod experts;
pub mod graph;
pub mod kernel;
pub mod measure;
pub mod memory;
pub mod ops;
pub mod outbox;
pub mod pace;
pub mod product;
pub mod ptx;
pub mod selftest;
pub mod spilled;
pub mod staging;
pub mod stream;
pub mod weights;

pub use acts::{Acts, Quantiser};
pub use device::Device;
pub use doorbell::Doorbell;
pub use error::Error;
pub use graph::Graph;
pub use kernel::{Arg, Kernel, Launch, Module};
pub use memory::{Buffer, Mailbox, Pinned, Plain};
pub use outbox::Outbox;
pub use pace::Pace;
pub use product::Product;
pub use spilled::Spilled;
pub use staging::Slot;
pub use stream::{Capture, Event, Stream};
pub use weights::Weights;
