//! What the round driver tells others: the JSON of a round, and the state for the coordinator.

use crate::metrics::phase_name;
use weightrefit_core::id::MemberId;
use weightrefit_core::membership::Membership;
use weightrefit_core::round::io::{Phase, ReplicaEnd, RoundSummary};
use weightrefit_core::round::message::{Blame, Version};
use weightrefit_proto::report::{
    PhaseMilliseconds, ReplicaOutcome, ReplicaReport, RoundBytes, RoundOutcome, RoundReport, VersionReport,
};

/// The JSON of a round, with seats and names for the membership's indices.
pub(super) fn round(summary: &RoundSummary, membership: &Membership) -> RoundReport {
    let seat = |member: Option<MemberId>| {
        member.and_then(|id| membership.member(id)).map(|member| member.seat.to_string())
    };
    let names = membership.replicas();
    let replicas = summary.replicas.iter().map(|&(index, end)| {
        let (outcome, blame) = replica_outcome(end);
        let named = names.get(index as usize);
        let pool = named.and_then(|replica| membership.pools().get(replica.pool as usize));
        ReplicaReport {
            pool: pool.cloned().unwrap_or_default(),
            replica: named.map(|replica| replica.name.clone()).unwrap_or_default(),
            outcome,
            reason: blame.map(|blame| blame.code),
            member: seat(blame.and_then(|blame| blame.member)),
        }
    });
    let blame = summary.blame.filter(|_| !summary.committed);
    RoundReport {
        id: summary.round.round.0,
        epoch: summary.round.epoch.0,
        version: named(&summary.version),
        outcome: if summary.committed { RoundOutcome::Committed } else { RoundOutcome::Aborted },
        reason: blame.map(|blame| blame.code),
        member: seat(blame.and_then(|blame| blame.member)),
        phase_milliseconds: phases(&summary.phases),
        bytes: RoundBytes { sent: summary.sent, received: summary.received, skipped: summary.skipped },
        replicas: replicas.collect(),
    }
}

fn replica_outcome(end: ReplicaEnd) -> (ReplicaOutcome, Option<Blame>) {
    use weightrefit_core::code::Code::ResumeTimeout;
    match end {
        ReplicaEnd::Committed { serving: true, .. } => (ReplicaOutcome::Committed, None),
        ReplicaEnd::Committed { serving: false, .. } => {
            (ReplicaOutcome::Committed, Some(Blame { code: ResumeTimeout, member: None }))
        }
        ReplicaEnd::NotCommitted(blame) => (ReplicaOutcome::NotCommitted, Some(blame)),
        ReplicaEnd::Held(blame) => (ReplicaOutcome::Held, Some(blame)),
        ReplicaEnd::Aborted(blame) => (ReplicaOutcome::Aborted, Some(blame)),
        ReplicaEnd::Unknown(blame) => (ReplicaOutcome::Unknown, Some(blame)),
    }
}

fn phases(phases: &[(Phase, u64)]) -> PhaseMilliseconds {
    let of = |wanted: Phase| phases.iter().find(|(phase, _)| *phase == wanted).map(|&(_, ms)| ms);
    PhaseMilliseconds {
        prepare: of(Phase::Prepare),
        transfer: of(Phase::Transfer),
        verify: of(Phase::Verify),
        pause: of(Phase::Pause),
        commit: of(Phase::Commit),
        resume: of(Phase::Resume),
    }
}

/// One line for people and the log.
pub(super) fn log(report: &RoundReport) {
    let (outcome, reason) = (format!("{:?}", report.outcome), report.reason.map(|code| code.name()));
    tracing::info!(
        epoch = report.epoch,
        round = report.id,
        run = report.version.run,
        step = report.version.step,
        outcome,
        reason,
        member = report.member,
        received = report.bytes.received,
        "round ended"
    );
}

/// Seconds of each phase that ran.
pub(super) fn phase_seconds(summary: &RoundSummary) -> impl Iterator<Item = (&'static str, f64)> {
    summary.phases.iter().map(|&(phase, ms)| (phase_name(phase), ms as f64 / 1000.0))
}

/// A version as people name it.
pub(super) fn named(version: &Version) -> VersionReport {
    VersionReport { run: version.run, step: version.step }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rounds::testing::{engine, member};
    use weightrefit_core::code::Code;
    use weightrefit_core::id::{Epoch, Rank, RoundId};
    use weightrefit_core::membership::Seat;
    use weightrefit_core::round::message::{ContentSum, RoundKey};

    #[test]
    fn a_round_reads_as_the_documents_say() {
        let members = vec![
            member(Seat::Training { rank: Rank(0) }, 1),
            member(engine("a", 0), 2),
            member(engine("b", 0), 3),
        ];
        let membership = Membership::new("uid", Epoch(4), None, vec!["p".into()], members).expect("is valid");
        let version = Version { run: 1, step: 5, origin: Epoch(4), sum: ContentSum::default() };
        let blame = Blame { code: Code::DigestMismatch, member: Some(MemberId(2)) };
        let summary = RoundSummary {
            round: RoundKey { epoch: Epoch(4), round: RoundId(9) },
            version,
            committed: true,
            blame: Some(blame),
            replicas: vec![
                (0, ReplicaEnd::Committed { version, serving: true }),
                (1, ReplicaEnd::Aborted(blame)),
            ],
            phases: vec![(Phase::Prepare, 4), (Phase::Transfer, 160)],
            sent: 12,
            received: 10,
            skipped: 2,
        };
        let json = serde_json::to_string(&round(&summary, &membership)).expect("is JSON");
        assert_eq!(
            json,
            r#"{"id":9,"epoch":4,"version":{"run":1,"step":5},"outcome":"Committed","reason":null,"member":null,"#
                .to_owned()
                + r#""phaseMilliseconds":{"prepare":4,"transfer":160},"bytes":{"sent":12,"received":10,"skipped":2},"#
                + r#""replicas":[{"pool":"p","replica":"a","outcome":"Committed","reason":null,"member":null},"#
                + r#"{"pool":"p","replica":"b","outcome":"Aborted","reason":"DigestMismatch","member":"inference/p/b/0"}]}"#
        );
        let aborted = RoundSummary { committed: false, ..summary };
        let report = round(&aborted, &membership);
        assert_eq!(report.outcome, RoundOutcome::Aborted);
        assert_eq!(
            (report.reason, report.member.as_deref()),
            (Some(Code::DigestMismatch), Some("inference/p/b/0"))
        );
    }
}
