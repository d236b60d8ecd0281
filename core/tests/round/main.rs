//! Tests of `core::round` and `core::membership`: rules of single machines, transcripts, every order of what may
//! happen to one replica, and seeded faults on a made-up cluster.

mod exploration;
mod leader_rules;
mod member_rules;
mod membership_rules;
mod simulation;
mod source_rules;
mod tables;
mod transcripts;
mod world;
