//! The controller: watches pods and refits of a cluster, decides who is a member, and tells what it found.

pub mod apply;
pub mod build;
pub mod dereference;
pub mod events;
pub mod pod_facts;
pub mod pods;
pub mod reason;
pub mod record;
pub mod seats;
pub mod status;
pub mod update_status;
pub mod validate;
