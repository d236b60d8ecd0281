//! Layouts: where each element of each HF tensor lies on each rank of one side (`layout: v1`).
//!
//! A [`Document`] says it in general, a tensor table says for which model; [`Layout::new`] binds the two once,
//! and [`Layout::rank_regions`] then yields what one rank holds.
//!
//! Invariants:
//! - L1: every HF tensor has exactly one rule, or is ignored, or is the alias of another one.
//! - L2: on every rank, no two pieces claim a local element, and what no piece claims is pad or grain.
//! - L3: over all ranks, the pieces of a tensor tile it exactly once, replicas counted once.
//!
//! L1 holds for every `Layout`; L2 for every rank that [`Layout::rank_regions`] answers for; L3 and both others
//! on all ranks are what [`Layout::check`] proves.

mod bind;
mod canonical;
mod check;
mod document;
pub mod dtensor;
mod error;
mod evaluate;
mod expression;
mod grid;
mod pattern;
pub mod preset;
mod read;
pub mod recording;
mod resolve;
mod spans;
mod stages;
mod stripe;

pub use bind::Layout;
pub use document::{
    At, Cut, Division, Document, Entry, Expert, Named, Pack, Prefix, RoundUp, Rule, Stages, Suffix,
};
pub use error::{LayoutError, RuleId};
pub use evaluate::RankLayout;
pub use expression::ExpressionError;
pub use spans::CutError;
