//! A whole refit on this machine: a coordinator, real agents over TCP on the loopback interface, a reference
//! trainer and reference engines as processes of their own, and a driver that awaits each round.
//!
//! Invariants:
//! - L1: whatever ends a run, no process and no directory of it stays.
//! - L2: what a run reports is what its processes said: round reports of the leader, checks of the engines.

mod checks;
mod directory;
mod driver;
mod fault;
mod launch;
mod process;
mod progress;
mod report;
mod resolved;
mod run;
mod stage;
mod weights;
mod world;

pub use fault::{Fault, FaultError};
pub use launch::{Broken, BrokenError};
pub use report::{LeftOut, LocalReport, PlanPart, RoundLine, Verdict};
pub(crate) use resolved::settings;
pub use run::{LocalError, Options, prepare, run};
pub(crate) use world::World;
