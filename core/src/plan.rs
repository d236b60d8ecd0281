//! The transfer plan: for every destination element the one source that sends it, grouped by pair, in order.

pub mod moves;
