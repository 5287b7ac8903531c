//! Models in the shapes of known ones, with random weights: for measurements where the real ones are not at hand, or do not fit the disk.
//!
//! | module | what it is |
//! |---|---|
//! | `shape` | headers of known models, by name, with other types where wanted |
//! | `generator` | bytes of a tensor, wherever one begins |
//! | `random` | numbers by their place, so that threads and pieces do not matter |

mod generator;
pub(crate) mod random;
mod shape;
#[cfg(test)]
mod tests;

pub use generator::{Generator, Recipe};
pub use shape::Shape;

/// Why there is no such model.
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    /// No shape has this name.
    #[error("there is no shape {name:?}; there are {} and any GGUF file, each with :TYPE behind it for other types", .known.join(", "))]
    Unknown {
        /// As asked for.
        name: String,
        /// Names that exist.
        known: Vec<&'static str>,
    },
    /// No type has this name, or none whose blocks can be made.
    #[error("weights of type {name:?} cannot be made; types are {known}")]
    Type {
        /// As asked for.
        name: String,
        /// Names of those that can.
        known: String,
    },
    /// The shape's file is not what it should be.
    #[error(transparent)]
    Gguf(#[from] gguf::Error),
    /// A skew that is no number from 0 on.
    #[error("a router skew of {0}: expected 0 or more")]
    Skew(f32),
}
