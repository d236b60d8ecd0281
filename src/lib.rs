//! Root package of weightrefit: the resource, its offline resolution, membership, the operator, and the command line.

#![forbid(unsafe_code)]

pub mod api;
pub mod cli;
pub mod controller;
pub mod coordinate;
pub mod coordinator;
pub mod identity;
pub mod injection;
pub mod limits;
pub mod local;
pub mod operator;
pub mod safetensors;
pub mod stop;
