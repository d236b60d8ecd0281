//! What the reference trainer and engine tell the run that started them: one JSON object a line on standard output.
//! A trainer takes `publish STEP` lines on standard input; both end when it ends.

use serde::{Deserialize, Serialize};
use weightrefit_core::code::Code;
use weightrefit_core::round::message::EngineState;

/// One line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "camelCase", rename_all_fields = "camelCase")]
#[expect(missing_docs, reason = "fields are named by the vocabulary and explained at their variant")]
pub enum Told {
    /// The rank's memory is there; bytes of its tensors.
    Loaded { bytes: u64 },
    /// The agent has taken the rank's registration.
    Registered {},
    /// Trainer: the memory of a step is the trainer's again.
    Released { step: i64 },
    /// Trainer: the agent did not take the step, and will not.
    PublishRefused { step: i64, code: Code, message: String },
    /// Engine: the record's state has changed.
    State { state: EngineState },
    /// Engine: live tensors of a version that has just begun to be served, against the weights file.
    Checked {
        run: u64,
        step: i64,
        /// Elements that have a source.
        checked: u64,
        /// Of those, how many differ.
        mismatched: u64,
        /// Elements of padding.
        pads: u64,
        /// Of those, how many are not zero.
        pads_not_zero: u64,
    },
    /// Engine, first rank of a replica: all ranks have completed a forward step together since this one last began
    /// to serve.
    Stepped {},
    /// Engine: standard input has ended; nothing comes after this. Steps and torn reads are those that this rank
    /// scheduled, so they are zero on all ranks of a replica but the first.
    Ended { steps: u64, torn_reads: u64 },
}
