//! The round protocol as sans-IO machines: a `Node` is fed inputs and returns effects as data.

pub mod io;
pub mod message;
pub mod topology;
