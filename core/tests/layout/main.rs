//! Tests of `core::layout` that read files.

mod broken;
mod dtensor;
mod hostile;
mod listing;
mod naive;
mod preset;
mod recording;
mod reference;
