//! The controller: watches pods and refits of a cluster, decides who is a member, and tells what it found.
//!
//! Order of reading: `dispatch` (a task per refit), `relation` (the task), its steps `dereference`, `validate`, `build`,
//! `apply` and `update_status`; `pods`, `seats` and `gate` say who is who and who may be.

pub mod apply;
pub mod build;
pub mod bundles;
pub mod consent;
pub mod dereference;
pub mod dispatch;
pub mod events;
pub mod figures;
pub mod gate;
mod marks;
pub mod ownership;
pub mod pod;
pub mod pod_facts;
pub mod pods;
pub mod readiness;
pub mod reason;
pub mod record;
pub mod refits;
pub mod relation;
pub mod scope;
pub mod seats;
pub mod status;
pub mod update_status;
pub mod validate;
pub mod watch;
pub mod workload;
