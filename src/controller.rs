//! The controller: watches pods and refits of a cluster, decides who is a member, and tells what it found.

pub mod consent;
pub mod gate;
pub mod pod_facts;
pub mod pods;
pub mod seats;
