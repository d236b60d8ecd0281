//! The one task that owns the roster: streams feed it, it records epochs and sends them out.

use super::heard::{Heard, heard};
use super::record::EpochRecord;
use super::recordings::Recordings;
use super::refusals::{At, Refusals};
use super::server::Desk;
use super::wire;
use crate::limits;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;
use weightrefit_core::code::Code;
use weightrefit_core::id::{Epoch, Incarnation};
use weightrefit_core::membership::roster::{Cause, Joining, Roster, Spec, Standing};
use weightrefit_core::membership::{Member, Membership, Seat};
use weightrefit_proto::report::{RoundOutcome, RoundReport};
use weightrefit_proto::v1;
use weightrefit_proto::v1::instruction::Kind;

/// What a coordinator must know of its refit.
#[derive(Debug, Clone)]
pub struct Settings {
    /// namespace/name.
    pub refit: String,
    /// UID of the resource.
    pub refit_uid: String,
    /// Sizes.
    pub spec: Spec,
    /// JSON of the resolved refit, as every agent gets it.
    pub resolved: Vec<u8>,
}

/// What the coordinator knows.
#[derive(Debug, Clone)]
pub struct View {
    /// The membership in force.
    pub membership: Option<Arc<Membership>>,
    /// Why it is in force.
    pub cause: Option<Cause>,
    /// Whether one can be made, and which seats lack an agent.
    pub standing: Standing,
    /// Agents with an open stream.
    pub agents: BTreeMap<Incarnation, AgentView>,
    /// The round that ended last.
    pub last_round: Option<Arc<EndedRound>>,
    /// The aborted round that ended last.
    pub last_failed_round: Option<Arc<EndedRound>>,
    /// Why pods' agents were refused last, by UID; gone once one of the pod is taken in.
    pub refused: BTreeMap<String, Refused>,
}

/// An agent's message or claim was refused.
#[derive(Debug, Clone, PartialEq)]
pub struct Refused {
    /// What the agent was told.
    pub fault: v1::Fault,
    /// When.
    pub at: SystemTime,
}

/// A round, as its leader reported it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndedRound {
    /// The leader's report.
    pub report: RoundReport,
    /// When it came.
    pub heard: SystemTime,
}

/// What one agent has said.
#[derive(Debug, Clone, Default)]
pub struct AgentView {
    /// UID of its pod.
    pub pod_uid: String,
    /// Its version.
    pub version: String,
    /// Ranks that it hosts.
    pub seats: Vec<Seat>,
    /// Newest epoch that it has accepted.
    pub accepted: Option<Epoch>,
    /// Digest of the plan that it made of it, `sha256:…`.
    pub plan_digest: Option<String>,
    /// Why it refused the newest one, where it did.
    pub refused: Option<v1::Fault>,
    /// What its clients do.
    pub state: v1::State,
}

impl View {
    /// Whether every agent has accepted the membership in force and a fitting client owns every rank.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        let Some(membership) = &self.membership else { return false };
        membership.members().iter().all(|member| {
            let accepted = self.agents.get(&member.incarnation).and_then(|agent| agent.accepted);
            let owned = self.rank(member).is_some_and(|rank| rank.registered);
            accepted == Some(membership.epoch()) && owned
        })
    }

    /// What the member's agent says of its rank; `None` while the agent is not connected or has not said anything.
    #[must_use]
    pub fn rank(&self, member: &Member) -> Option<&v1::RankState> {
        let of_member = |rank: &&v1::RankState| {
            rank.claim.as_ref().and_then(|claim| wire::seat(claim).ok()).as_ref() == Some(&member.seat)
        };
        self.agents.get(&member.incarnation)?.state.ranks.iter().find(of_member)
    }
}

/// The coordinator of one refit; it ends when this is dropped, and its agents' streams with it.
#[derive(Debug)]
pub struct Coordinator {
    refit: String,
    view: watch::Receiver<View>,
    inputs: mpsc::Sender<Input>,
    desk: Desk,
    task: AbortHandle,
}

/// From the streams to the hub.
#[derive(Debug)]
pub(super) enum Input {
    /// A stream says who it is.
    Join {
        session: u64,
        joining: Joining,
        agent_version: String,
        instructions: Instructions,
        answer: oneshot::Sender<Result<Present, v1::Fault>>,
    },
    /// And what happens there.
    Heard { session: u64, message: v1::agent_message::Kind },
    /// Its message was not understood.
    Misunderstood { session: u64, fault: v1::Fault },
    /// It ended.
    Left { session: u64 },
    /// An agent of the pod was not let in.
    Refused { pod_uid: String, fault: v1::Fault },
    /// From the owner of the coordinator, to all agents.
    Tell(Kind),
    /// The resource has changed.
    Respec { spec: Spec, resolved: Vec<u8> },
    /// A pod may take part no more.
    Dismiss { pod_uid: String, fault: v1::Fault },
}

/// Ends when the hub has let go of a stream.
pub(super) type Present = oneshot::Receiver<Infallible>;

pub(super) type Instructions = mpsc::Sender<Result<v1::Instruction, tonic::Status>>;

impl Coordinator {
    pub(super) fn start(settings: Settings, record: impl EpochRecord, desk: Desk) -> Self {
        let Settings { refit, refit_uid, spec, resolved } = settings;
        let (inputs, queue) = mpsc::channel(limits::HUB_INPUTS_MAX);
        let roster = Roster::new(refit_uid, spec, record.recorded());
        let first = View {
            membership: None,
            cause: None,
            standing: roster.standing(),
            agents: BTreeMap::new(),
            last_round: None,
            last_failed_round: None,
            refused: BTreeMap::new(),
        };
        let refusals = desk.refusals();
        let (publish, view) = watch::channel(first);
        let (sessions, start) = (BTreeMap::new(), Instant::now());
        let recordings = Recordings::default();
        let hub =
            Hub { roster, record, resolved, recordings, sessions, publish, refusals, start, retry_ms: None };
        let task = tokio::spawn(hub.run(queue)).abort_handle();
        Self { refit, view, inputs, desk, task }
    }

    pub(super) fn inputs(&self) -> mpsc::Sender<Input> {
        self.inputs.clone()
    }

    /// What the coordinator knows, whenever it changes.
    #[must_use]
    pub fn view(&self) -> watch::Receiver<View> {
        self.view.clone()
    }

    /// Tells all agents to leave: they finish what must be finished.
    pub async fn drain(&self) {
        self.say(Input::Tell(Kind::Drain(v1::Drain {}))).await;
    }

    /// Ends the round in progress, if it still can be ended.
    pub async fn cancel(&self) {
        self.say(Input::Tell(Kind::Cancel(v1::Cancel {}))).await;
    }

    /// The resource has changed: the next membership has these sizes, and its agents this resolved refit.
    pub async fn respec(&self, spec: Spec, resolved: Vec<u8>) {
        self.say(Input::Respec { spec, resolved }).await;
    }

    /// The pod is gone or may take part no more: its stream ends after `fault` was said.
    pub async fn dismiss(&self, pod_uid: String, fault: v1::Fault) {
        self.say(Input::Dismiss { pod_uid, fault }).await;
    }

    async fn say(&self, input: Input) {
        // The hub ends only with the coordinator.
        let _ = self.inputs.send(input).await;
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        self.desk.close(&self.refit, &self.inputs);
        self.task.abort();
    }
}

struct Session {
    incarnation: Incarnation,
    instructions: Instructions,
    /// Dropped with the session, which ends its stream.
    _present: oneshot::Sender<Infallible>,
}

struct Hub<R> {
    roster: Roster,
    record: R,
    resolved: Vec<u8>,
    recordings: Recordings,
    sessions: BTreeMap<u64, Session>,
    publish: watch::Sender<View>,
    refusals: Refusals,
    start: Instant,
    /// When to try again to record an epoch.
    retry_ms: Option<u64>,
}

impl<R: EpochRecord> Hub<R> {
    async fn run(mut self, mut queue: mpsc::Receiver<Input>) {
        loop {
            let now_ms = self.now_ms();
            let deadline_ms = self.retry_ms.unwrap_or_else(|| self.roster.next_deadline_ms(now_ms));
            let wait = Duration::from_millis(deadline_ms.saturating_sub(now_ms));
            let idle = wait.is_zero() && self.retry_ms.is_none();
            tokio::select! {
                input = queue.recv() => match input {
                    Some(input) => self.handle(input),
                    None => return,
                },
                () = tokio::time::sleep(wait), if !idle => {}
            }
            self.advance().await;
            let standing = self.roster.standing();
            self.publish
                .send_if_modified(|view| std::mem::replace(&mut view.standing, standing.clone()) != standing);
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn handle(&mut self, input: Input) {
        match input {
            Input::Join { session, joining, agent_version, instructions, answer } => {
                let joined = self.join(session, joining, agent_version, instructions);
                // A stream that broke meanwhile says so with `Left`.
                let _ = answer.send(joined);
            }
            Input::Heard { session, message } => self.heard(session, message),
            Input::Misunderstood { session, fault } => self.refuse(session, fault),
            Input::Left { session } => self.leave(session),
            Input::Refused { pod_uid, fault } => self.note(pod_uid, fault),
            Input::Tell(kind) => {
                let sessions: Vec<u64> = self.sessions.keys().copied().collect();
                sessions.into_iter().for_each(|session| self.instruct(session, kind.clone()));
            }
            Input::Respec { spec, resolved } => {
                self.roster.respec(spec);
                self.resolved = resolved;
            }
            Input::Dismiss { pod_uid, fault } => self.dismiss(&pod_uid, &fault),
        }
    }

    fn dismiss(&mut self, pod_uid: &str, fault: &v1::Fault) {
        let agents = self.roster.agents();
        let of_pod = |session: &Session| {
            agents.get(&session.incarnation).is_some_and(|joining| joining.pod_uid == pod_uid)
        };
        let gone: Vec<u64> =
            self.sessions.iter().filter(|(_, session)| of_pod(session)).map(|(id, _)| *id).collect();
        gone.into_iter().for_each(|session| self.dismiss_one(session, fault.clone()));
    }

    /// The session ends after `fault` was said.
    fn dismiss_one(&mut self, session: u64, fault: v1::Fault) {
        self.instruct(session, Kind::Refused(fault));
        self.leave(session);
    }

    /// What an agent said is wrong (C3).
    fn refuse(&mut self, session: u64, fault: v1::Fault) {
        let Some(incarnation) = self.sessions.get(&session).map(|session| session.incarnation) else {
            return;
        };
        self.refusals.count(At::Stream, &fault);
        if let Some(agent) = self.roster.agents().get(&incarnation) {
            tracing::warn!(pod = agent.pod, code = fault.code, message = fault.message, "agent refused");
            self.note(agent.pod_uid.clone(), fault.clone());
        }
        self.dismiss_one(session, fault);
    }

    /// Keeps it for whoever looks; of more pods than are kept the oldest is forgotten.
    fn note(&self, pod_uid: String, fault: v1::Fault) {
        self.publish.send_modify(|view| {
            view.refused.insert(pod_uid, Refused { fault, at: SystemTime::now() });
            if view.refused.len() > limits::REFUSED_PODS_MAX
                && let Some(oldest) = view.refused.iter().min_by_key(|(_, refused)| refused.at)
            {
                let oldest = oldest.0.clone();
                view.refused.remove(&oldest);
            }
        });
    }

    fn join(
        &mut self,
        session: u64,
        joining: Joining,
        version: String,
        instructions: Instructions,
    ) -> Result<Present, v1::Fault> {
        if self.sessions.len() >= limits::AGENTS_MAX {
            return Err(wire::fault(
                Code::Busy,
                format!("{} agents are connected already", self.sessions.len()),
            ));
        }
        let incarnation = joining.incarnation;
        let (pod_uid, seats) = (joining.pod_uid.clone(), joining.seats.clone());
        let replaced = self
            .roster
            .join(self.now_ms(), joining)
            .map_err(|error| wire::fault(error.code(), error.to_string()))?;
        self.publish.send_modify(|view| drop(view.refused.remove(&pod_uid)));
        for (gone, why) in replaced {
            self.replace(gone, &wire::fault(why.code(), why.to_string()));
        }
        // An older stream of the same process has nothing more to say.
        self.sessions.retain(|_, old| old.incarnation != incarnation);
        let (kept, present) = oneshot::channel();
        self.sessions.insert(session, Session { incarnation, instructions, _present: kept });
        self.publish.send_modify(|view| {
            let agent = AgentView { pod_uid, version, seats, ..AgentView::default() };
            view.agents.insert(incarnation, agent);
        });
        if let Some(current) = self.roster.current().cloned()
            && current.members().iter().any(|member| member.incarnation == incarnation)
        {
            self.configure(session, &current);
        }
        Ok(present)
    }

    /// Another agent has the seats of this one.
    fn replace(&mut self, gone: Incarnation, fault: &v1::Fault) {
        let pod_uid = self.publish.borrow().agents.get(&gone).map(|agent| agent.pod_uid.clone());
        if let Some(pod_uid) = pod_uid {
            self.note(pod_uid, fault.clone());
        }
        let session = self.sessions.iter().find(|(_, session)| session.incarnation == gone);
        if let Some(session) = session.map(|(id, _)| *id) {
            self.dismiss_one(session, fault.clone());
        }
    }

    fn heard(&mut self, session: u64, message: v1::agent_message::Kind) {
        let Some(incarnation) = self.sessions.get(&session).map(|session| session.incarnation) else {
            return;
        };
        let heard = match heard(&mut self.roster, incarnation, message) {
            Ok(Some(Heard::Recorded { seat, page })) => return self.recorded(session, seat, page),
            Ok(Some(heard)) => heard,
            Ok(None) => return,
            Err(fault) => return self.refuse(session, fault),
        };
        // It belongs to another resource, of the same name perhaps, and can only begin anew.
        if matches!(&heard, Heard::Refused(fault) if fault.code == Code::Unauthorized.name()) {
            self.instruct(session, Kind::Drain(v1::Drain {}));
        }
        self.publish.send_modify(|view| {
            let Some(agent) = view.agents.get_mut(&incarnation) else { return };
            match heard {
                Heard::State(state) => agent.state = state,
                Heard::Refused(fault) => {
                    tracing::warn!(pod = agent.pod_uid, ?fault, "membership refused");
                    agent.refused = Some(fault);
                }
                Heard::Accepted { epoch, plan_digest } => {
                    (agent.accepted, agent.plan_digest) = (Some(epoch), Some(plan_digest));
                    agent.refused = None;
                }
                Heard::Round(report) => {
                    let ended = Arc::new(EndedRound { report: *report, heard: SystemTime::now() });
                    if ended.report.outcome == RoundOutcome::Aborted {
                        view.last_failed_round = Some(Arc::clone(&ended));
                    }
                    view.last_round = Some(ended);
                }
                Heard::Recorded { .. } => {} // no view shows it
            }
        });
    }

    fn leave(&mut self, session: u64) {
        let Some(gone) = self.sessions.remove(&session) else { return };
        if let Some(agent) = self.roster.agents().get(&gone.incarnation) {
            agent.seats.iter().for_each(|seat| self.recordings.forget(seat));
        }
        self.roster.depart(gone.incarnation);
        self.publish.send_modify(|view| drop(view.agents.remove(&gone.incarnation)));
    }

    /// Brings the next membership into force, if there is one (C1).
    async fn advance(&mut self) {
        if self.retry_ms.is_some_and(|retry_ms| self.now_ms() < retry_ms) {
            return;
        }
        self.retry_ms = None;
        let round_open = self.publish.borrow().agents.values().any(|agent| agent.state.round_open);
        let next = match self.roster.next(self.now_ms(), round_open) {
            Ok(Some(next)) => next,
            Ok(None) => return,
            Err(error) => return tracing::error!(%error, "agents present make no membership"),
        };
        let membership = Arc::clone(&next.membership);
        if let Some(cause) = next.cause {
            if let Err(error) = self.record.record(&next).await {
                // What somebody else wrote meanwhile counts as heard of (R2).
                if let Some(recorded) = self.record.recorded()
                    && let Err(error) = self.roster.hear(recorded.epoch, recorded.floor)
                {
                    tracing::error!(%error, "the record is out of all proportion");
                }
                self.retry_ms = Some(self.now_ms().saturating_add(limits::RECORD_RETRY_MS));
                return tracing::error!(%error, "no new epoch");
            }
            let epoch = membership.epoch();
            tracing::info!(%epoch, ?cause, members = membership.members().len(), "new epoch");
        } else {
            tracing::info!(epoch = %membership.epoch(), members = membership.members().len(), "epoch goes on");
        }
        self.roster.enact(Arc::clone(&membership));
        self.publish.send_modify(|view| {
            view.membership = Some(Arc::clone(&membership));
            view.cause = next.cause;
        });
        let sessions: Vec<u64> = self.sessions.keys().copied().collect();
        sessions.into_iter().for_each(|session| self.configure(session, &membership));
    }

    /// The last page of a recording may be what the agents of the membership wait for.
    fn recorded(&mut self, session: u64, seat: Seat, page: v1::Recorded) {
        match self.recordings.hear(seat, page) {
            Err(fault) => self.refuse(session, fault),
            Ok(false) => {}
            Ok(true) => {
                let Some(current) = self.roster.current().cloned() else { return };
                if !self.recordings.have_told(current.epoch()) {
                    let sessions: Vec<u64> = self.sessions.keys().copied().collect();
                    sessions.into_iter().for_each(|session| self.configure(session, &current));
                }
            }
        }
    }

    /// Tells an agent its membership, as soon as the engines have recorded what is to be planned.
    fn configure(&mut self, session: u64, membership: &Membership) {
        let epoch = membership.epoch().0;
        let Some(refit) = self.recordings.resolve(&self.resolved, membership) else {
            return tracing::debug!(epoch, "no engine of a pool without a layout has registered yet");
        };
        let membership = serde_json::to_vec(membership).expect("a membership has only text keys");
        self.instruct(session, Kind::Configure(v1::Configure { membership, refit, epoch }));
    }

    /// An agent that does not read its few instructions is as good as gone; it joins again when it recovers.
    fn instruct(&mut self, session: u64, kind: Kind) {
        let Some(to) = self.sessions.get(&session) else { return };
        if to.instructions.try_send(Ok(v1::Instruction { kind: Some(kind) })).is_err() {
            self.leave(session);
        }
    }
}
