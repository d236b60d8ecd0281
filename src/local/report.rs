//! What a run has to show: the plan's bytes, each round, and the engines' verdict.

use serde::Serialize;
use weightrefit_core::code::Code;
use weightrefit_core::plan::PlanBytes;
use weightrefit_proto::report::{PhaseMilliseconds, RoundBytes, RoundOutcome, RoundReport, VersionReport};

/// The whole run, as `-o json` prints it.
#[derive(Debug, Clone, Serialize)]
pub struct LocalReport {
    /// The plan's figures.
    pub plan: PlanPart,
    /// In the order of the steps.
    pub rounds: Vec<RoundLine>,
    /// What the engines found.
    pub verdict: Verdict,
}

/// The plan's part of the report.
#[derive(Debug, Clone, Serialize)]
pub struct PlanPart {
    /// Its figures.
    pub bytes: PlanBytes,
}

/// One round.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RoundLine {
    /// Number inside its epoch.
    pub id: u64,
    /// What was to be committed.
    pub version: VersionReport,
    /// How it ended.
    pub outcome: RoundOutcome,
    /// Why, where it did not commit.
    pub reason: Option<Code>,
    /// Phases that ran.
    pub phase_milliseconds: PhaseMilliseconds,
    /// What moved.
    pub bytes: RoundBytes,
}

/// What the engines found when they compared their live tensors with the weights file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Verdict {
    /// Elements with a source, over all rounds, replicas and ranks.
    pub checked_elements: u64,
    /// Of those, how many differed from the trainer's weights of that version, and pads that were not zero.
    pub mismatched_elements: u64,
    /// Forward steps that read two versions.
    pub torn_reads: u64,
    /// Forward steps of all ranks of a replica together.
    #[serde(skip)]
    pub steps: u64,
    /// Commits of a replica after which its ranks completed no forward step together before the next one.
    #[serde(skip)]
    pub unread_commits: u64,
    /// Elements of padding that were checked to be zero.
    #[serde(skip)]
    pub pads: u64,
    /// Elements of replicas that committed, which their rank did not compare, each round.
    #[serde(skip)]
    pub unchecked_elements: u64,
}

impl RoundLine {
    pub(super) fn of(report: &RoundReport) -> Self {
        Self {
            id: report.id,
            version: report.version,
            outcome: report.outcome,
            reason: report.reason,
            phase_milliseconds: report.phase_milliseconds,
            bytes: report.bytes,
        }
    }

    /// A step whose end nobody could tell.
    pub(super) fn lost(step: i64, reason: Code) -> Self {
        Self {
            id: 0,
            version: VersionReport { run: 0, step },
            outcome: RoundOutcome::Aborted,
            reason: Some(reason),
            phase_milliseconds: PhaseMilliseconds::default(),
            bytes: RoundBytes::default(),
        }
    }

    /// Gigabytes (10^9) that arrived in a second of the transfer phase.
    #[must_use]
    pub fn gigabytes_per_second(&self) -> Option<f64> {
        let ms = self.phase_milliseconds.transfer.filter(|ms| *ms > 0)?;
        Some(self.bytes.received as f64 / ms as f64 / 1e6)
    }
}

impl LocalReport {
    /// What is not as it must be, in sentences; nothing where all is well.
    #[must_use]
    pub fn complaints(&self) -> Vec<String> {
        let mut complaints = Vec::new();
        let minimum = self.plan.bytes.minimum;
        for round in &self.rounds {
            let RoundLine { version: VersionReport { step, .. }, bytes, .. } = round;
            if round.outcome != RoundOutcome::Committed {
                let reason = round.reason.map_or_else(String::new, |reason| format!(": {reason}"));
                complaints.push(format!("step {step} was not committed{reason}"));
            } else if bytes.received != minimum {
                let received = bytes.received;
                complaints.push(format!("step {step} received {received} bytes, the minimum is {minimum}"));
            }
        }
        let Verdict {
            checked_elements,
            mismatched_elements,
            torn_reads,
            unchecked_elements,
            unread_commits,
            ..
        } = self.verdict;
        if mismatched_elements > 0 {
            complaints.push(format!(
                "{mismatched_elements} of {checked_elements} elements differ from the trainer's"
            ));
        }
        if torn_reads > 0 {
            complaints.push(format!("{torn_reads} forward steps read two versions"));
        }
        if unread_commits > 0 {
            complaints.push(format!("{unread_commits} commits were read by no forward step"));
        }
        if unchecked_elements > 0 {
            complaints.push(format!("{unchecked_elements} elements that were committed were never compared"));
        }
        complaints
    }
}
