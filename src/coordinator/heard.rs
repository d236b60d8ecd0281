//! What an agent may say on its stream: everything else is refused before it reaches anybody's view.
//!
//! Invariants:
//! - H1: an agent speaks of the seats that it holds, and of no others.
//! - H2: only the leader's agent reports rounds, and only of epochs that there were.
//! - H3: what is late, since a newer membership is in force by now, is left out and no fault.
//! - H4: text of an agent is bounded before it is kept.

use super::wire::{self, fault};
use std::collections::BTreeSet;
use weightrefit_core::code::Code;
use weightrefit_core::id::{Epoch, Incarnation, Sha256};
use weightrefit_core::membership::roster::{Joining, Roster};
use weightrefit_core::membership::{Seat, VersionFloor};
use weightrefit_proto::report::RoundReport;
use weightrefit_proto::v1;
use weightrefit_proto::v1::agent_message::Kind;

/// A message that may be believed.
#[derive(Debug)]
pub(super) enum Heard {
    State(v1::State),
    Accepted { epoch: Epoch, plan_digest: String },
    Refused(v1::Fault),
    Round(Box<RoundReport>),
    Recorded { seat: Seat, page: v1::Recorded },
}

/// What an agent may say of a replica's bytes.
const CARRIERS: [&str; 3] = ["nccl", "tcp", "forming"];

/// States that an engine can be in; empty for training ranks and without a client.
const ENGINE_STATES: [&str; 6] = ["", "Cold", "Serving", "Quiet", "Applied", "Dirty"];

/// What the message of a present agent says; `None` where it comes too late to matter (H3).
///
/// # Errors
/// What the agent is told before its stream ends.
pub(super) fn heard(roster: &mut Roster, by: Incarnation, message: Kind) -> Result<Option<Heard>, v1::Fault> {
    let Some(agent) = roster.agents().get(&by) else { return Ok(None) };
    match message {
        Kind::Joining(_) => Err(fault(Code::Unsupported, "joined twice on one stream")),
        Kind::State(mut state) => {
            check_state(agent, &mut state)?;
            if let Some(version) = state.version_seen.filter(|version| !wire::is_step(version.step)) {
                return Err(fault(Code::Unsupported, format!("no status can hold step {}", version.step)));
            }
            let live = state.ranks.iter().filter_map(|rank| rank.live);
            let newest = live.chain(state.version_seen).map(wire::version_floor).max();
            roster
                .hear(Epoch(state.epoch_seen), newest)
                .map_err(|error| fault(error.code(), error.to_string()))?;
            Ok(Some(Heard::State(state)))
        }
        Kind::Accepted(accepted) => check_accepted(roster, by, accepted),
        Kind::RoundEnded(round) => check_round(roster, by, &round.json),
        Kind::Recorded(page) => {
            let claim =
                page.claim.as_ref().ok_or_else(|| fault(Code::Unsupported, "recording of no rank"))?;
            let seat = wire::seat(claim)?;
            if !agent.seats.contains(&seat) {
                let text = format!(
                    "recording of {}, which the agent of pod {} does not hold",
                    short(&seat),
                    agent.pod
                );
                return Err(fault(Code::Unauthorized, text));
            }
            Ok(Some(Heard::Recorded { seat, page }))
        }
    }
}

fn check_state(agent: &Joining, state: &mut v1::State) -> Result<(), v1::Fault> {
    let refuse = |text: String| Err(fault(Code::Unsupported, text));
    let mut told = BTreeSet::new();
    for rank in &mut state.ranks {
        let Some(claim) = &rank.claim else { return refuse("state of no rank".to_owned()) };
        let seat = wire::seat(claim)?;
        if !agent.seats.contains(&seat) {
            let text =
                format!("state of {}, which the agent of pod {} does not hold", short(&seat), agent.pod);
            return Err(fault(Code::Unauthorized, text));
        }
        if !ENGINE_STATES.contains(&rank.engine_state.as_str()) {
            return refuse(format!("state of {seat}: no engine is `{}`", wire::shown(&rank.engine_state)));
        }
        let live = rank.live.map(|live| live.step);
        if let Some(step) = live.into_iter().chain(rank.published_step).find(|step| !wire::is_step(*step)) {
            return refuse(format!("state of {seat}: no status can hold step {step}"));
        }
        if let Some(fault) = &mut rank.fault {
            wire::bound(fault);
        }
        if !told.insert(seat) {
            return refuse(format!("two states of {}", short(&wire::seat(claim)?)));
        }
    }
    check_carriers(agent, &mut state.carriers)
}

fn check_carriers(agent: &Joining, carriers: &mut [v1::Carrier]) -> Result<(), v1::Fault> {
    let mut told = BTreeSet::new();
    for carrier in carriers {
        let name = wire::shown(&format!("{}/{}", carrier.pool, carrier.replica));
        let is_of = |seat: &Seat| match seat {
            Seat::Inference { pool, replica, .. } => (pool, replica) == (&carrier.pool, &carrier.replica),
            Seat::Training { .. } => false,
        };
        if !agent.seats.iter().any(is_of) {
            let text = format!("carrier of {name}, of which the agent of pod {} holds no rank", agent.pod);
            return Err(fault(Code::Unauthorized, text));
        }
        if !CARRIERS.contains(&carrier.transport.as_str()) {
            let text = format!("bytes of {name} do not go by `{}`", wire::shown(&carrier.transport));
            return Err(fault(Code::Unsupported, text));
        }
        for text in [&mut carrier.code, &mut carrier.reason] {
            wire::bound_text(text);
        }
        if !told.insert((&carrier.pool, &carrier.replica)) {
            return Err(fault(Code::Unsupported, format!("two carriers of {name}")));
        }
    }
    Ok(())
}

fn check_accepted(
    roster: &Roster,
    by: Incarnation,
    accepted: v1::Accepted,
) -> Result<Option<Heard>, v1::Fault> {
    let epoch = Epoch(accepted.epoch);
    if epoch > roster.epoch_seen() {
        let text = format!("epoch {epoch} is answered to, and there is none above {}", roster.epoch_seen());
        return Err(fault(Code::StaleEpoch, text));
    }
    let Some(current) = roster.current().filter(|current| current.epoch() == epoch) else { return Ok(None) };
    if !current.members().iter().any(|member| member.incarnation == by) {
        let text = format!("epoch {epoch} is answered to by an agent that is no member of it");
        return Err(fault(Code::StaleEpoch, text));
    }
    if let Some(mut refused) = accepted.refused {
        wire::bound(&mut refused);
        return Ok(Some(Heard::Refused(refused)));
    }
    if accepted.membership_digest.parse() != Ok(current.digest()) {
        let text = format!(
            "epoch {epoch} is accepted as membership {}, and is {}",
            wire::shown(&accepted.membership_digest),
            current.digest()
        );
        return Err(fault(Code::StaleEpoch, text));
    }
    match accepted.plan_digest.parse::<Sha256>() {
        Ok(plan) => Ok(Some(Heard::Accepted { epoch, plan_digest: plan.to_string() })),
        Err(error) => Err(fault(Code::Unsupported, error.to_string())),
    }
}

fn check_round(roster: &mut Roster, by: Incarnation, json: &str) -> Result<Option<Heard>, v1::Fault> {
    if !roster.leads(by) {
        let pod = roster.agents().get(&by).map_or("?", |agent| agent.pod.as_str());
        let text = format!("report of a round by the agent of pod {pod}, which does not lead");
        return Err(fault(Code::Unauthorized, text));
    }
    let report: RoundReport = serde_json::from_str(json)
        .map_err(|error| fault(Code::Unsupported, format!("report of a round cannot be read: {error}")))?;
    let epoch = Epoch(report.epoch);
    if epoch > roster.epoch_seen() {
        let text =
            format!("report of a round of epoch {epoch}, and there is none above {}", roster.epoch_seen());
        return Err(fault(Code::StaleEpoch, text));
    }
    if !wire::is_step(report.version.step) {
        return Err(fault(Code::Unsupported, format!("no status can hold step {}", report.version.step)));
    }
    let version = VersionFloor { run: report.version.run, step: report.version.step };
    roster.hear(epoch, Some(version)).map_err(|error| fault(error.code(), error.to_string()))?;
    Ok(Some(Heard::Round(Box::new(report))))
}

fn short(seat: &Seat) -> String {
    wire::shown(&seat.to_string())
}
