//! Rounds that have ended, as the status shows them.

use crate::api::status::{PhaseMilliseconds, RoundBytes, RoundStatus};
use crate::controller::record::{PodName, counter, version, whole_second};
use crate::controller::validate::short;
use crate::coordinator::{EndedRound, View};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use std::time::UNIX_EPOCH;
use weightrefit_core::membership::{Member, Seat};
use weightrefit_proto::report::{ReplicaReport, RoundOutcome, RoundReport};

/// A round for the status; `pods` names the pod of a UID.
pub(super) fn round(ended: &EndedRound, view: &View, pods: &PodName) -> RoundStatus {
    let report = &ended.report;
    let phases = phases(report);
    let completed = whole_second(heard(ended));
    let took = SignedDuration::from_millis(phases.values().iter().fold(0, |sum, ms| sum.saturating_add(*ms)));
    let aborted = report.outcome == RoundOutcome::Aborted;
    let blamed = report.member.as_ref().and_then(|seat| member(view, seat));
    RoundStatus {
        epoch: counter(report.epoch),
        id: counter(report.id),
        version: version(report.version.run, report.version.step),
        outcome: report.outcome,
        reason: report.reason.filter(|_| aborted).map(|code| code.name().to_owned()),
        pod: blamed.and_then(|member| pods(&member.pod_uid)).filter(|_| aborted),
        rank: blamed.map(|member| rank(&member.seat)).filter(|_| aborted),
        message: aborted.then(|| message(report)),
        start_time: Time(whole_second(completed.checked_sub(took).unwrap_or(completed))),
        completion_time: Time(completed),
        bytes: RoundBytes {
            sent: counter(report.bytes.sent),
            received: counter(report.bytes.received),
            skipped: counter(report.bytes.skipped),
        },
        phase_milliseconds: phases.0,
    }
}

/// What the newest report says of a replica.
pub(super) fn of_replica<'a>(view: &'a View, pool: &str, replica: &str) -> Option<&'a ReplicaReport> {
    let round = view.last_round.as_ref()?;
    round.report.replicas.iter().find(|report| report.pool == pool && report.replica == replica)
}

pub(super) fn member<'a>(view: &'a View, seat: &str) -> Option<&'a Member> {
    view.membership.as_ref()?.members().iter().find(|member| member.seat.to_string() == seat)
}

pub(super) fn rank(seat: &Seat) -> i32 {
    let (Seat::Training { rank } | Seat::Inference { rank, .. }) = seat;
    i32::try_from(rank.0).unwrap_or(i32::MAX)
}

fn message(report: &RoundReport) -> String {
    let sentence = report.reason.map_or("The round was aborted.", |code| code.sentence());
    let remedy = report.reason.map_or("", |code| code.remedy());
    let place = report.member.as_ref().map(|seat| format!(" Rank {seat} is to blame.")).unwrap_or_default();
    short(&format!("{sentence}{place} Replicas go on serving what they served. {remedy}"))
}

fn heard(ended: &EndedRound) -> Timestamp {
    let since = ended.heard.duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_second(i64::try_from(since.as_secs()).unwrap_or_default()).unwrap_or_default()
}

struct Phases(PhaseMilliseconds);

impl Phases {
    fn values(&self) -> [i64; 6] {
        let PhaseMilliseconds { prepare, transfer, verify, pause, apply: _, commit, reset: _, resume } =
            self.0;
        [prepare, transfer, verify, pause, commit, resume].map(Option::unwrap_or_default)
    }
}

fn phases(report: &RoundReport) -> Phases {
    let phases = report.phase_milliseconds;
    let phase = |milliseconds: Option<u64>| milliseconds.map(counter);
    Phases(PhaseMilliseconds {
        prepare: phase(phases.prepare),
        transfer: phase(phases.transfer),
        verify: phase(phases.verify),
        pause: phase(phases.pause),
        apply: None,
        commit: phase(phases.commit),
        reset: None,
        resume: phase(phases.resume),
    })
}
