//! The stream to the coordinator: enrols, joins, reports, and hands its instructions to the round driver.
//!
//! Invariants:
//! - C1: rounds need none of this: while the coordinator is away the stream is dialled again, nothing else stops.
//! - C2: a membership reaches the round driver together with the plan that follows from it, or not at all.
//! - C3: what goes wrong again and again is told once, and tried again with growing pauses.

use crate::identity::{EnrolError, Enrolment, Identity};
use crate::limits;
use crate::planned::{Planned, PlannedError};
use prometheus::IntGauge;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use weightrefit_core::code::Code;
use weightrefit_core::id::Incarnation;
use weightrefit_core::membership::Seat;
use weightrefit_core::round::io::Slot;
use weightrefit_proto::v1;
use weightrefit_proto::v1::agent_message::Kind;
use weightrefit_proto::v1::coordinator_client::CoordinatorClient;
use weightrefit_proto::v1::instruction::Kind as Instructed;

/// Range of protocols that this agent speaks.
const PROTOCOLS: (u32, u32) = (1, 1);

/// What the coordinator wants of the round driver.
#[derive(Debug)]
pub enum Control {
    /// A membership, planned.
    Configure(Box<Planned>),
    /// Leave.
    Drain,
    /// End the round in progress.
    Cancel,
}

/// What the round driver has to tell besides its state.
#[derive(Debug)]
pub enum Upward {
    /// Answer to a Configure.
    Accepted(v1::Accepted),
    /// Leader: JSON of a round.
    RoundEnded(String),
}

/// Why a stream ended.
#[derive(Debug, thiserror::Error)]
enum StreamError {
    #[error(transparent)]
    Enrol(#[from] EnrolError),
    #[error("coordinator ended the stream: {}", .0.message())]
    Status(Box<tonic::Status>),
    #[error("coordinator did not answer the join in time")]
    Silent,
    #[error("coordinator refused the join: {}: {}; {}", .0.code, .0.message, .0.hint)]
    Refused(Box<v1::Fault>),
    #[error("coordinator takes no more messages")]
    Closed,
    #[error("coordinator told no ranks that are any")]
    Seats,
    #[error("planning broke")]
    Planning,
    #[error("the round driver is gone")]
    Stopping,
}

impl StreamError {
    /// Whether the coordinator knows our certificate no more, as after its authority was replaced.
    fn is_unknown_here(&self) -> bool {
        matches!(self, Self::Status(status) if status.code() == tonic::Code::Unauthenticated)
    }
}

impl From<tonic::Status> for StreamError {
    fn from(status: tonic::Status) -> Self {
        Self::Status(Box::new(status))
    }
}

impl From<mpsc::error::SendError<v1::AgentMessage>> for StreamError {
    fn from(_: mpsc::error::SendError<v1::AgentMessage>) -> Self {
        Self::Closed
    }
}

/// Who joins.
#[derive(Debug)]
pub struct Joiner {
    /// The refit claimed, `namespace/name`.
    pub refit: String,
    /// This process.
    pub incarnation: Incarnation,
    /// Ranks of this pod.
    pub seats: Vec<Seat>,
    /// Whether the coordinator told them, which may tell others later.
    pub is_told: bool,
    /// `host:port` of `Round`.
    pub round_addresses: Vec<String>,
    /// `host:port` of the byte server.
    pub byte_addresses: Vec<String>,
}

/// The round driver's ends of the stream.
#[derive(Debug)]
pub struct Line {
    /// To the round driver.
    pub control: mpsc::Sender<Control>,
    /// From it.
    pub upward: mpsc::Receiver<Upward>,
    /// From it: always its present state.
    pub state: watch::Receiver<v1::State>,
    /// From it: what its clients have recorded.
    pub recordings: watch::Receiver<Recordings>,
}

/// Pages of what clients have recorded, by slot.
pub type Recordings = BTreeMap<Slot, Arc<[v1::Recorded]>>;

/// Since when the agent has its present certificate, and when to renew it.
#[derive(Debug, Clone, Copy)]
pub struct Enrolled {
    at: Instant,
    renew_at: Instant,
}

impl Enrolled {
    fn for_now(renew_after: Duration) -> Self {
        let at = Instant::now();
        Self { at, renew_at: at + renew_after }
    }

    /// The coordinator knows our certificate no more: another one is due, though not with every try.
    fn doubt(&mut self) {
        self.renew_at = self.renew_at.min(self.at + limits::RENEWAL_INTERVAL_MIN);
    }

    async fn renew_if_due(&mut self, enrolment: &Enrolment, identity: &Identity) {
        if Instant::now() >= self.renew_at {
            *self = Self::for_now(renewed(enrolment, identity).await);
        }
    }
}

/// Enrols for the first time, however long it takes.
///
/// # Errors
/// The enrolment was refused: this agent has nothing to do here.
pub async fn enrol(enrolment: &Enrolment, identity: &Identity) -> Result<Enrolled, EnrolError> {
    Ok(Enrolled::for_now(first_enrolment(enrolment, identity).await?))
}

/// Asks which ranks `refit` gives this pod, until it is told. Meanwhile the certificate is renewed as it must be.
pub async fn told_seats(
    enrolment: &Enrolment,
    identity: &Identity,
    refit: &str,
    enrolled: &mut Enrolled,
) -> Vec<Seat> {
    let mut pause = limits::COORDINATOR_PAUSE_MIN;
    let mut told = Told::default();
    loop {
        match ask_seats(enrolment, identity, refit).await {
            Ok(seats) => return seats,
            Err(error) => {
                if error.is_unknown_here() {
                    enrolled.doubt();
                }
                match told.is_news(&error) {
                    true => tracing::warn!(error = %error, "ranks of this pod are not known yet"),
                    false => tracing::debug!(error = %error, "ranks of this pod are not known yet"),
                }
            }
        }
        enrolled.renew_if_due(enrolment, identity).await;
        sleep(pause).await;
        pause = (pause * 2).min(limits::COORDINATOR_PAUSE_MAX);
    }
}

async fn ask_seats(
    enrolment: &Enrolment,
    identity: &Identity,
    refit: &str,
) -> Result<Vec<Seat>, StreamError> {
    let channel = enrolment.dial(identity).await?;
    let mut client = CoordinatorClient::new(channel).max_decoding_message_size(limits::INSTRUCTION_BYTES_MAX);
    let asked = client.seats(v1::SeatsRequest { refit: refit.to_owned() });
    let answer = timeout(limits::DIAL_TIMEOUT, asked).await.map_err(|_| StreamError::Silent)??.into_inner();
    match answer.claims.iter().map(v1::Claim::seat).collect::<Option<Vec<_>>>() {
        Some(seats) if !seats.is_empty() => Ok(seats),
        _ => Err(StreamError::Seats),
    }
}

/// Keeps the stream up until the round driver is gone, or until the refit gives this pod other ranks than it has.
/// `connected` is 1 while it is up.
///
/// # Errors
/// The first enrolment was refused: this agent has nothing to do here.
pub async fn run(
    enrolment: &Enrolment,
    identity: &Identity,
    joiner: &Joiner,
    mut line: Line,
    mut enrolled: Enrolled,
    connected: &IntGauge,
) -> Result<(), EnrolError> {
    let mut pause = limits::COORDINATOR_PAUSE_MIN;
    let mut told = Told::default();
    while !line.control.is_closed() {
        let started = Instant::now();
        let ended = stream_once(enrolment, identity, joiner, &mut line, enrolled.renew_at, connected).await;
        connected.set(0);
        if let Err(error) = ended {
            if joiner.is_told && matches!(error, StreamError::Refused(_)) {
                match ask_seats(enrolment, identity, &joiner.refit).await {
                    Ok(seats) if seats != joiner.seats => {
                        tracing::warn!(seats = shown(&seats), "this pod has other ranks now; beginning anew");
                        return Ok(());
                    }
                    Ok(_) => {}
                    Err(error) => tracing::debug!(error = %error, "cannot ask for the ranks of this pod"),
                }
            }
            if error.is_unknown_here() {
                enrolled.doubt();
            }
            match told.is_news(&error) {
                true => tracing::warn!(error = %error, "coordinator stream ended"),
                false => tracing::debug!(error = %error, "coordinator stream ended"),
            }
        }
        enrolled.renew_if_due(enrolment, identity).await;
        if started.elapsed() > limits::COORDINATOR_PAUSE_MAX {
            pause = limits::COORDINATOR_PAUSE_MIN;
            told = Told::default();
        }
        sleep(pause).await;
        pause = (pause * 2).min(limits::COORDINATOR_PAUSE_MAX);
    }
    Ok(())
}

/// What was told last (C3).
#[derive(Debug, Default)]
struct Told(Option<String>);

impl Told {
    fn is_news(&mut self, error: &impl std::fmt::Display) -> bool {
        let text = error.to_string();
        let is_news = self.0.as_ref() != Some(&text);
        self.0 = Some(text);
        is_news
    }
}

async fn first_enrolment(enrolment: &Enrolment, identity: &Identity) -> Result<Duration, EnrolError> {
    let mut pause = limits::COORDINATOR_PAUSE_MIN;
    let mut told = Told::default();
    loop {
        match enrolment.enrol(identity).await {
            Ok(renew_after) => return Ok(renew_after),
            Err(error) if error.is_final() => return Err(error),
            Err(error) if told.is_news(&error) => tracing::warn!(error = %error, "cannot enrol yet"),
            Err(error) => tracing::debug!(error = %error, "cannot enrol yet"),
        }
        sleep(pause).await;
        pause = (pause * 2).min(limits::COORDINATOR_PAUSE_MAX);
    }
}

/// Time until the next renewal, whether or not this one succeeded: peers look at the key only.
async fn renewed(enrolment: &Enrolment, identity: &Identity) -> Duration {
    match enrolment.enrol(identity).await {
        Ok(renew_after) => renew_after,
        Err(error) => {
            tracing::warn!(error = %error, "cannot renew the certificate");
            limits::RENEWAL_INTERVAL_MIN
        }
    }
}

async fn stream_once(
    enrolment: &Enrolment,
    identity: &Identity,
    joiner: &Joiner,
    line: &mut Line,
    renew_at: Instant,
    connected: &IntGauge,
) -> Result<(), StreamError> {
    let channel = enrolment.dial(identity).await?;
    let mut client = CoordinatorClient::new(channel).max_decoding_message_size(limits::INSTRUCTION_BYTES_MAX);
    let (outgoing, queue) = mpsc::channel(limits::COORDINATOR_MESSAGES_MAX);
    let state = line.state.borrow_and_update().clone();
    outgoing.send(say(Kind::Joining(joining(enrolment, joiner, &state)))).await?;
    let joined = client.join(ReceiverStream::new(queue));
    let mut instructions =
        timeout(limits::DIAL_TIMEOUT, joined).await.map_err(|_| StreamError::Silent)??.into_inner();
    tracing::debug!(coordinator = enrolment.coordinator, "stream to the coordinator is open");
    connected.set(1);
    outgoing.send(say(Kind::State(state))).await?;
    tell_recordings(outgoing.clone(), line).await?;
    converse(&mut instructions, &outgoing, joiner, line, renew_at).await
}

async fn tell_recordings(
    outgoing: mpsc::Sender<v1::AgentMessage>,
    line: &mut Line,
) -> Result<(), StreamError> {
    let recordings = line.recordings.borrow_and_update().clone();
    for page in recordings.values().flat_map(|pages| pages.iter()) {
        outgoing.send(say(Kind::Recorded(page.clone()))).await?;
    }
    Ok(())
}

async fn converse(
    instructions: &mut Streaming<v1::Instruction>,
    outgoing: &mpsc::Sender<v1::AgentMessage>,
    joiner: &Joiner,
    line: &mut Line,
    renew_at: Instant,
) -> Result<(), StreamError> {
    let mut report_at = Instant::now();
    let mut changed = false;
    loop {
        tokio::select! {
            instruction = instructions.message() => {
                let Some(instruction) = instruction? else { return Ok(()) };
                follow(instruction, outgoing, joiner, &line.control).await?;
            }
            upward = line.upward.recv() => {
                let Some(upward) = upward else { return Ok(()) };
                // What happened before comes before: a round's last state, then its end.
                let state = line.state.borrow_and_update().clone();
                outgoing.send(say(Kind::State(state))).await?;
                outgoing.send(say(match upward {
                    Upward::Accepted(accepted) => Kind::Accepted(accepted),
                    Upward::RoundEnded(json) => Kind::RoundEnded(v1::RoundEnded { json }),
                })).await?;
            }
            state = line.state.changed(), if !changed => {
                state.map_err(|_| StreamError::Stopping)?;
                changed = true;
            }
            recordings = line.recordings.changed() => {
                recordings.map_err(|_| StreamError::Stopping)?;
                tell_recordings(outgoing.clone(), line).await?;
            }
            () = sleep_until(report_at), if changed => {
                changed = false;
                let state = line.state.borrow_and_update().clone();
                outgoing.send(say(Kind::State(state))).await?;
                report_at = Instant::now() + limits::STATE_INTERVAL_MIN;
            }
            () = sleep_until(renew_at) => return Ok(()),
        }
    }
}

async fn follow(
    instruction: v1::Instruction,
    outgoing: &mpsc::Sender<v1::AgentMessage>,
    joiner: &Joiner,
    control: &mpsc::Sender<Control>,
) -> Result<(), StreamError> {
    let order = match instruction.kind {
        None => return Ok(()),
        Some(Instructed::Configure(configure)) => {
            let epoch = configure.epoch;
            let (incarnation, seats) = (joiner.incarnation, joiner.seats.clone());
            let planned = tokio::task::spawn_blocking(move || {
                Planned::new(&configure.membership, &configure.refit, incarnation, &seats)
            });
            match planned.await.map_err(|_| StreamError::Planning)? {
                Ok(planned) => Control::Configure(Box::new(planned)),
                Err(error) => {
                    tracing::warn!(code = %error.code(), error = %error, "configuration refused");
                    outgoing.send(say(Kind::Accepted(refused(epoch, &error)))).await?;
                    return Ok(());
                }
            }
        }
        Some(Instructed::Drain(v1::Drain {})) => Control::Drain,
        Some(Instructed::Cancel(v1::Cancel {})) => Control::Cancel,
        Some(Instructed::Refused(fault)) => return Err(StreamError::Refused(Box::new(fault))),
    };
    control.send(order).await.map_err(|_| StreamError::Stopping)
}

fn refused(epoch: u64, error: &PlannedError) -> v1::Accepted {
    v1::Accepted { epoch, refused: Some(fault(error.code(), error.to_string())), ..v1::Accepted::default() }
}

/// A fault with the remedy of its code.
#[must_use]
pub fn fault(code: Code, message: String) -> v1::Fault {
    v1::Fault { code: code.name().to_owned(), message, hint: code.remedy().to_owned() }
}

fn shown(seats: &[Seat]) -> String {
    seats.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

fn joining(enrolment: &Enrolment, joiner: &Joiner, state: &v1::State) -> v1::Joining {
    v1::Joining {
        refit: joiner.refit.clone(),
        pod_uid: enrolment.pod_uid.clone(),
        incarnation: joiner.incarnation.0.to_be_bytes().to_vec(),
        claims: joiner.seats.iter().map(v1::Claim::from).collect(),
        round_addresses: joiner.round_addresses.clone(),
        byte_addresses: joiner.byte_addresses.clone(),
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        protocol_min: PROTOCOLS.0,
        protocol_max: PROTOCOLS.1,
        planner_version: crate::planned::PLANNER_VERSION,
        epoch_seen: state.epoch_seen,
        version_seen: state.version_seen,
    }
}

fn say(kind: Kind) -> v1::AgentMessage {
    v1::AgentMessage { kind: Some(kind) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_that_repeats_is_told_once_and_a_new_one_again() {
        let refused = |message: &str| {
            let fault =
                v1::Fault { code: "Unauthorized".into(), message: message.into(), hint: "Grant it.".into() };
            StreamError::Refused(Box::new(fault))
        };
        let mut told = Told::default();
        let news = ["no consent", "no consent", "no seat", "no consent"]
            .map(|message| told.is_news(&refused(message)));
        assert_eq!(news, [true, false, true, true]);
        let text = "coordinator refused the join: Unauthorized: no consent; Grant it.";
        assert_eq!(refused("no consent").to_string(), text);
    }

    #[test]
    fn only_a_certificate_that_is_unknown_asks_for_another() {
        for (status, want) in
            [(tonic::Status::unauthenticated("who"), true), (tonic::Status::unavailable("stopping"), false)]
        {
            assert_eq!(StreamError::from(status).is_unknown_here(), want);
        }
        assert!(!StreamError::Silent.is_unknown_here());
    }
}
