//! What a plan must know of a model.
