//! What a run has to show: the plan's bytes, each round, and the engines' verdict.

use serde::Serialize;
use std::fmt;
use weightrefit_core::code::Code;
use weightrefit_core::plan::PlanBytes;
use weightrefit_proto::report::{
    PhaseMilliseconds, ReplicaOutcome, RoundBytes, RoundOutcome, RoundReport, VersionReport,
};

/// Value of the key `schema`.
pub(super) const SCHEMA: &str = "weightrefit.local/v1";

/// The whole run, as `-o json` prints it.
#[derive(Debug, Clone, Serialize)]
pub struct LocalReport {
    /// Always `weightrefit.local/v1`.
    pub schema: &'static str,
    /// The plan's figures.
    pub plan: PlanPart,
    /// In the order of the steps.
    pub rounds: Vec<RoundLine>,
    /// What carried the bytes of each replica in the end, where it may be NCCL.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub carriers: Vec<Carrier>,
    /// What the engines found.
    pub verdict: Verdict,
}

/// What carried the bytes of a replica.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Carrier {
    /// Its pool.
    pub pool: String,
    /// Its name.
    pub replica: String,
    /// `nccl`, `tcp`, or `forming` where its lane is not decided.
    pub transport: String,
    /// Code of the reason for which it is not NCCL; empty where there is none.
    pub code: String,
    /// That reason.
    pub reason: String,
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
    /// Why it did not commit; where it did, why nobody but its engines tells of its end.
    pub reason: Option<Code>,
    /// Phases that ran.
    pub phase_milliseconds: PhaseMilliseconds,
    /// What moved.
    pub bytes: RoundBytes,
    /// Replicas of the run that do not serve the version after it.
    pub left_out: Vec<LeftOut>,
}

/// A replica that a round went without.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    /// Its pool.
    pub pool: String,
    /// Its name.
    pub replica: String,
    /// How its part ended; `None` where it had none, as it was not ready when the round began.
    pub outcome: Option<ReplicaOutcome>,
    /// Why.
    pub reason: Option<Code>,
    /// The member to blame, as its seat.
    pub member: Option<String>,
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pool, replica, outcome, reason, member } = self;
        write!(f, "{pool}/{replica}: ")?;
        let how = match outcome {
            None => "it was not ready when the round began",
            Some(ReplicaOutcome::Committed) => "it committed and does not serve",
            Some(ReplicaOutcome::NotCommitted) => "it serves what it served",
            Some(ReplicaOutcome::Held) => "it is paused until recovery",
            Some(ReplicaOutcome::Aborted) => "it fell out before the commit",
            Some(ReplicaOutcome::Unknown) => "nothing was heard of its commit",
        };
        f.write_str(how)?;
        reason.map_or(Ok(()), |reason| write!(f, ", {reason}"))?;
        member.as_ref().map_or(Ok(()), |member| write!(f, " of {member}"))
    }
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
    /// `replicas` are the pool and the name of each replica of the run.
    pub(super) fn of(report: &RoundReport, replicas: impl IntoIterator<Item = (String, String)>) -> Self {
        let left_out = replicas.into_iter().filter_map(|(pool, replica)| {
            let part = report.replicas.iter().find(|part| part.pool == pool && part.replica == replica);
            let outcome = part.map(|part| part.outcome);
            let (reason, member) = part.map_or((None, None), |part| (part.reason, part.member.clone()));
            let whole = outcome == Some(ReplicaOutcome::Committed) && reason.is_none();
            (!whole).then_some(LeftOut { pool, replica, outcome, reason, member })
        });
        Self {
            id: report.id,
            version: report.version,
            outcome: report.outcome,
            reason: report.reason,
            phase_milliseconds: report.phase_milliseconds,
            bytes: report.bytes,
            left_out: left_out.collect(),
        }
    }

    /// A step whose end nobody could tell, for this reason. It is committed where an engine serves it: `replicas` are pool,
    /// name and what each serves now.
    pub(super) fn untold(
        step: i64,
        reason: Code,
        replicas: impl Iterator<Item = (String, String, Option<VersionReport>)>,
    ) -> Self {
        let mut committed = None;
        let mut left_out = Vec::new();
        for (pool, replica, live) in replicas {
            match live.filter(|live| live.step == step) {
                Some(live) => committed = Some(live),
                None => left_out.push(LeftOut {
                    pool,
                    replica,
                    outcome: Some(ReplicaOutcome::Unknown),
                    reason: None,
                    member: None,
                }),
            }
        }
        Self {
            id: 0,
            version: committed.unwrap_or(VersionReport { run: 0, step }),
            outcome: if committed.is_some() { RoundOutcome::Committed } else { RoundOutcome::Aborted },
            reason: Some(reason),
            phase_milliseconds: PhaseMilliseconds::default(),
            bytes: RoundBytes::default(),
            left_out: if committed.is_some() { left_out } else { Vec::new() },
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
                continue;
            }
            if let Some(reason) = round.reason {
                complaints.push(format!("the end of step {step} is told by engines alone: {reason}"));
            }
            let left_out = round.left_out.iter().map(|replica| format!("step {step} left out {replica}"));
            complaints.extend(left_out);
            if round.reason.is_none() && round.left_out.is_empty() && bytes.received != minimum {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_replica_that_a_round_went_without_is_named_with_its_reason() {
        let text = r#"{"id": 3, "epoch": 2, "version": {"run": 0, "step": 5}, "outcome": "Committed", "reason": null,
            "member": null, "phaseMilliseconds": {}, "bytes": {"sent": 8, "received": 8, "skipped": 0}, "replicas": [
            {"pool": "p", "replica": "a", "outcome": "Committed", "reason": null, "member": null},
            {"pool": "p", "replica": "b", "outcome": "Aborted", "reason": "PeerLost", "member": "inference/p/b/1"},
            {"pool": "p", "replica": "c", "outcome": "Committed", "reason": "ResumeTimeout", "member": null}]}"#;
        let report: RoundReport = serde_json::from_str(text).expect(text);
        let replicas = ["a", "b", "c", "d"].map(|replica| ("p".to_owned(), replica.to_owned()));
        let round = RoundLine::of(&report, replicas);
        let want = [
            "p/b: it fell out before the commit, PeerLost of inference/p/b/1",
            "p/c: it committed and does not serve, ResumeTimeout",
            "p/d: it was not ready when the round began",
        ];
        assert_eq!(round.left_out.iter().map(ToString::to_string).collect::<Vec<_>>(), want);
        let bytes = PlanBytes { minimum: 8, ..PlanBytes::default() };
        let report = LocalReport {
            schema: SCHEMA,
            plan: PlanPart { bytes },
            rounds: vec![round],
            carriers: Vec::new(),
            verdict: Verdict::default(),
        };
        assert_eq!(report.complaints(), want.map(|line| format!("step 5 left out {line}")));
    }

    #[test]
    fn a_round_whose_end_is_not_told_is_what_its_engines_serve() {
        let at = |step| Some(VersionReport { run: 1, step });
        let complaints = |live: [Option<VersionReport>; 2]| {
            let replicas = ["a", "b"].into_iter().zip(live);
            let replicas = replicas.map(|(replica, live)| ("p".to_owned(), replica.to_owned(), live));
            let report = LocalReport {
                schema: SCHEMA,
                plan: PlanPart { bytes: PlanBytes::default() },
                rounds: vec![RoundLine::untold(5, Code::PeerLost, replicas)],
                carriers: Vec::new(),
                verdict: Verdict::default(),
            };
            report.complaints().join("; ")
        };
        let by_engines = "the end of step 5 is told by engines alone: PeerLost";
        for (live, want) in [
            ([at(5), at(5)], by_engines.to_owned()),
            ([at(5), at(4)], format!("{by_engines}; step 5 left out p/b: nothing was heard of its commit")),
            ([None, at(4)], "step 5 was not committed: PeerLost".to_owned()),
        ] {
            assert_eq!(complaints(live), want);
        }
    }
}
