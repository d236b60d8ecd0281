//! The resource WeightRefit and the documents that come with it: types, strict reading, rules, resolution.
//!
//! Order of reading: `refit` and `policy` (the types), `check` (the rules), `documents` (files to documents).

pub mod check;
pub mod documents;
pub mod mistaken;
pub mod policy;
pub mod problem;
pub mod ranks;
pub mod refit;
pub mod resolve;
mod sample;
mod strict;
pub mod supported;
mod wire;
mod yaml;
