//! Tests of `core::layout` that read files.

mod listing;
mod reference;
