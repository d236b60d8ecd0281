//! The resource WeightRefit and the documents that come with it: types, strict reading, rules, resolution.
//!
//! Order of reading: `refit` (the types, with `source`, `workload`, `policy`, `timeouts`), `status`, `schema` (what
//! an API server is told of them), `check` (the rules, for files), `documents` (files to documents).

pub mod check;
pub mod condition;
pub mod documents;
pub mod manifest;
pub mod mistaken;
pub mod policy;
pub mod problem;
pub mod ranks;
pub mod refit;
pub mod resolve;
mod sample;
mod schema;
pub mod source;
pub mod status;
mod strict;
pub mod supported;
pub mod timeouts;
mod wire;
pub mod workload;
mod yaml;
