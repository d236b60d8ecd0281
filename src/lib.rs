//! Root package of weightrefit: the resource, its offline resolution, and the command line.

#![forbid(unsafe_code)]

pub mod api;
pub mod cli;
pub mod limits;
