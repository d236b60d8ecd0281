//! The round protocol as sans-IO machines: a `Node` is fed inputs and returns effects as data.

pub mod engine;
mod head;
pub mod io;
mod leader;
mod member;
pub mod message;
pub mod node;
mod recovery;
mod scope;
mod source;
pub mod topology;
