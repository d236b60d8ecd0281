//! The round driver: one task that owns the `Node`, feeds it everything that happens and does what it says.
//!
//! Invariants:
//! - R1: effects of one step are done in their order before the next step (D1 of the node).
//! - R2: nothing here waits for a peer, a client or the byte path; who does not take what is sent loses its
//!   connection.
//! - R3: plan, peers and data plane change membership exactly at the node's `Configured`.

mod applying;
mod clients;
mod data;
mod effects;
mod events;
mod extras;
mod observer;
mod report;
mod source;
mod staging;
#[cfg(test)]
mod testing;
mod waiters;

use crate::coordinator::{Control, Recordings, Upward, fault};
use crate::limits;
use crate::metrics::Metrics;
use crate::peers::{PeerEvent, Peers, Reach};
use crate::planned::Planned;
use crate::readiness::Health;
use crate::session::{ClientEvent, Registration};
use crate::transport::nccl::Settings;
use crate::transport::tcp::{ByteServer, Security};
use clients::{Clients, News, Who};
use data::{Data, DataEvent};
use extras::Extras;
use observer::Observer;
use source::Source;
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, sleep_until, timeout};
use weightrefit_core::code::Code;
use weightrefit_core::id::{Incarnation, Rank, Sha256};
use weightrefit_core::membership::Seat;
use weightrefit_core::round::io::{Effect, Input, Slot};
use weightrefit_core::round::message::{Header, Message};
use weightrefit_core::round::node::Node;
use weightrefit_proto::socket::ClientFrame;
use weightrefit_proto::v1;

/// What the driver is made of.
pub struct Parts {
    /// This process.
    pub incarnation: Incarnation,
    /// Ranks of this pod, by slot.
    pub seats: Vec<Seat>,
    /// Streams with other agents.
    pub peers: Peers,
    /// Listens for destinations.
    pub bytes: ByteServer,
    /// How byte streams are protected.
    pub security: Security,
    /// Devices and NCCL.
    pub fabric: Settings,
    /// What is counted.
    pub metrics: Metrics,
    /// What probes ask.
    pub health: Arc<Health>,
    /// To the coordinator.
    pub upward: mpsc::Sender<Upward>,
    /// To the coordinator.
    pub state: watch::Sender<v1::State>,
    /// To the coordinator.
    pub recordings: watch::Sender<Recordings>,
}

/// What the driver hears.
pub struct Inbox {
    /// The coordinator.
    pub control: mpsc::Receiver<Control>,
    /// The agent socket.
    pub clients: mpsc::Receiver<ClientEvent>,
    /// Streams with other agents.
    pub peers: mpsc::Receiver<PeerEvent>,
    /// Set once the process must stop.
    pub stop: watch::Receiver<bool>,
}

/// One rank's client, beside what [`Clients`] knows.
#[derive(Debug, Default)]
struct Desk {
    /// Waits for a membership, or for its memory to be mapped.
    registration: Option<Arc<Registration>>,
    /// Publications that were neither released nor refused: world and step.
    outstanding: BTreeSet<(Arc<str>, i64)>,
    /// The trainer is gone; its memory and socket wait for the last release.
    leaving: bool,
}

/// The driver.
pub struct RoundDriver {
    node: Node,
    started: Instant,
    clients: Clients,
    desks: Vec<Desk>,
    data: Data,
    peers: Peers,
    /// In effect.
    plan: Option<Arc<Planned>>,
    /// Given to the node, not yet in effect.
    pending: Option<Arc<Planned>>,
    observer: Observer,
    extras: Extras,
    upward: mpsc::Sender<Upward>,
    seats: Vec<Seat>,
    recordings: watch::Sender<Recordings>,
    events: mpsc::UnboundedReceiver<DataEvent>,
    inputs: VecDeque<Input>,
    /// Clients to look at again after this step.
    late: VecDeque<Slot>,
    drained: bool,
}

impl RoundDriver {
    /// Before any membership.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        let Parts {
            incarnation,
            seats,
            peers,
            bytes,
            security,
            fabric,
            metrics,
            health,
            upward,
            state,
            recordings,
        } = parts;
        let (sender, events) = mpsc::unbounded_channel();
        Self {
            node: Node::new(incarnation, seats.clone()),
            started: Instant::now(),
            clients: Clients::new(seats.clone()),
            desks: seats.iter().map(|_| Desk::default()).collect(),
            data: Data::new(bytes, security, fabric, seats.len(), sender),
            peers,
            plan: None,
            pending: None,
            observer: Observer::new(seats.clone(), metrics, health, state),
            extras: Extras::default(),
            upward,
            seats,
            recordings,
            events,
            inputs: VecDeque::new(),
            late: VecDeque::new(),
            drained: false,
        }
    }

    /// Runs until told to stop and drained.
    pub async fn run(mut self, mut inbox: Inbox) {
        let mut ticks = interval(limits::DRIVER_TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut leave_by = None;
        while !self.drained {
            let deadline = self.next_deadline();
            tokio::select! {
                Ok(()) = inbox.stop.changed(), if leave_by.is_none() => {
                    leave_by = Some(tokio::time::Instant::now() + limits::DRAIN_MAX);
                    self.drain();
                }
                () = at(leave_by) => wedged(),
                Some(control) = inbox.control.recv() => self.control(control),
                Some(event) = self.events.recv() => {
                    if let Some(input) = self.data.handle(event) {
                        self.feed(input);
                    }
                }
                Some(event) = inbox.peers.recv() => self.peer(event),
                Some(event) = inbox.clients.recv() => {
                    let news = self.clients.handle(Instant::now(), event);
                    self.hear(news);
                }
                () = at(deadline) => self.feed(Input::Tick),
                _ = ticks.tick() => self.tick(&inbox),
            }
        }
        self.leave(inbox).await;
    }

    fn next_deadline(&self) -> Option<tokio::time::Instant> {
        let after = std::time::Duration::from_millis(self.node.next_deadline()?);
        Some(tokio::time::Instant::from_std(self.started + after))
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Feeds one input and all that follows from its effects at once.
    fn feed(&mut self, input: Input) {
        self.inputs.push_back(input);
        self.settle();
    }

    /// Feeds what is left to feed.
    fn settle(&mut self) {
        loop {
            if let Some(input) = self.inputs.pop_front() {
                let mut effects = Vec::new();
                self.observer.before(&input, &self.data);
                self.node.handle(self.now_ms(), input, &mut effects);
                self.perform(effects);
            } else if let Some(slot) = self.late.pop_front() {
                self.try_admit(slot);
            } else {
                break;
            }
        }
        self.observer.publish(&self.node, &self.data);
    }

    fn perform(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            self.act(effect);
        }
    }

    fn control(&mut self, control: Control) {
        match control {
            Control::Configure(planned) => self.configure(Arc::new(*planned)),
            // Who is no member has nothing to finish, and waits for a refit that wants it.
            Control::Drain if self.plan.is_none() => {}
            Control::Drain => self.drain(),
            Control::Cancel => self.feed(Input::Cancel),
        }
    }

    fn configure(&mut self, planned: Arc<Planned>) {
        let (membership, topology) = (Arc::clone(&planned.membership), Arc::clone(&planned.topology));
        let mut effects = Vec::new();
        let epoch = planned.epoch();
        self.pending = Some(Arc::clone(&planned));
        match self.node.configure(self.now_ms(), membership, topology, &mut effects) {
            Ok(_) => {
                let accepted = v1::Accepted {
                    epoch: epoch.0,
                    membership_digest: planned.membership.digest().to_string(),
                    plan_digest: planned.topology.plan.to_string(),
                    refused: None,
                };
                self.tell_coordinator(Upward::Accepted(accepted));
            }
            Err(error) => {
                tracing::warn!(code = %error.code(), error = %error, "membership refused");
                self.pending = None;
                let refused = Some(fault(error.code(), error.to_string()));
                let accepted = v1::Accepted { epoch: epoch.0, refused, ..v1::Accepted::default() };
                self.tell_coordinator(Upward::Accepted(accepted));
            }
        }
        self.perform(effects);
        self.settle();
    }

    fn tell_coordinator(&self, upward: Upward) {
        // Full only while the coordinator is away for long: it asks agents for their state when it is back.
        if self.upward.try_send(upward).is_err() {
            tracing::warn!("coordinator does not hear of this");
        }
    }

    fn peer(&mut self, event: PeerEvent) {
        match event {
            PeerEvent::Message { key, header, message, extras } => {
                self.hear_extras(key, &header, &message, extras);
                self.feed(Input::Message { header, peer_key: key, message: *message });
            }
            PeerEvent::Up { key, sender } => {
                let reach = self.peers.up(key, sender);
                self.reached(key, reach);
            }
            PeerEvent::Down { key, link } => {
                let reach = self.peers.down(key, link);
                self.reached(key, reach);
            }
        }
    }

    /// Of the leader alone, which says them with each `propose`.
    fn hear_extras(&mut self, key: Sha256, header: &Header, message: &Message, extras: Option<String>) {
        let (Message::Propose { version, .. }, Some(plan)) = (message, &self.plan) else { return };
        let leader = plan.membership.member(plan.membership.leader());
        if header.epoch == plan.epoch() && leader.is_some_and(|leader| leader.key == key) {
            self.extras.hear(version, extras);
        }
    }

    fn reached(&mut self, key: Sha256, reach: Reach) {
        self.observer.events.look(|key| self.peers.reaches(key));
        let Some(plan) = &self.plan else { return };
        let Some((member, _)) = plan.membership.iter().find(|(_, member)| member.key == key) else { return };
        match reach {
            Reach::Found => self.feed(Input::PeerFound { member }),
            Reach::Lost => self.feed(Input::PeerLost { member }),
            Reach::Same => {}
        }
    }

    fn hear(&mut self, news: Vec<News>) {
        for news in news {
            match news {
                News::Registered { slot, registration } => {
                    if let Some(seat) = self.seats.get(slot.0 as usize)
                        && let Some(pages) = crate::session::recorded(&registration, seat)
                    {
                        self.recordings.send_modify(|all| drop(all.insert(slot, pages)));
                    }
                    if let Some(desk) = self.desks.get_mut(slot.0 as usize) {
                        desk.registration = Some(Arc::new(registration));
                    }
                    self.late.push_back(slot);
                }
                News::Said { slot, frame } => self.said(slot, frame),
                News::EngineGone { slot, instance } => {
                    self.desk(slot).registration = None;
                    self.feed(Input::ClientGone { slot, instance });
                }
                News::TrainerGone { slot, instance } => {
                    let desk = self.desk(slot);
                    desk.registration = None;
                    desk.leaving = true;
                    self.feed(Input::ClientGone { slot, instance });
                    self.let_go_if_free(slot);
                }
                News::Hello { record } => self.observer.hear(&record),
                News::Asked { client, frame } => self.asked(client, frame),
                News::DriverGone { client } => self.observer.waiters.forget(client),
                News::Refused { code } => self.observer.metrics.refuse_client(code),
                News::ExecutorFound { slot, client, device, outbox } => {
                    self.data.executors().executor_found(slot.0 as usize, client, device, outbox);
                }
                News::ExecutorSaid { slot, client, said } => {
                    self.data.executors().executor_said(slot.0 as usize, client, said);
                }
                News::ExecutorGone { slot, client } => {
                    self.data.executors().executor_gone(slot.0 as usize, client);
                }
            }
            self.settle();
        }
    }

    /// Admits the slot's client if it has registered, a membership is in effect, and the two fit.
    fn try_admit(&mut self, slot: Slot) {
        let Some(plan) = self.plan.clone() else { return };
        let Some(expected) = plan.slots.get(slot.0 as usize) else { return };
        let Some(registration) = self.desk(slot).registration.clone() else { return };
        let Some((instance, who)) = self.clients.who(slot) else { return };
        let (input, result) = match *who {
            Who::Engine(record) => {
                let fits =
                    crate::session::compare_recorded(&registration.tensors, &expected.regions, &plan.table);
                let fits = fits.map_err(|e| (e.code(), e.to_string()));
                let placed = fits.and_then(|()| self.place_staging(slot, &registration));
                (Input::EngineConnected { slot, record, layout: expected.layout }, placed)
            }
            Who::Trainer => {
                // Mapping reserves addresses and touches no page, so it is quick whatever the size.
                let gpu_called = |uuid: &str| self.data.gpu_called(slot, uuid);
                let adopt = || Source::adopt(&registration, &expected.regions.locals, gpu_called);
                let source = tokio::task::block_in_place(adopt);
                let adopted = source.map(|source| self.data.adopt(slot, Arc::new(source)));
                (Input::TrainerConnected { slot, instance }, adopted.map_err(|e| (e.code(), e.to_string())))
            }
            // It has no place that it could register for.
            Who::Executor => return,
        };
        self.desk(slot).registration = None;
        match result {
            Ok(()) => {
                self.compile(slot);
                self.desk(slot).leaving = false;
                self.observer.groups(slot, registration.groups.clone());
                self.clients.admit(slot);
                if let Some(staging) = self.data.staging(slot) {
                    staging.told = false;
                }
                self.observer.registered(slot, Ok(()));
                self.inputs.push_back(input);
            }
            Err((code, message)) => {
                self.observer.metrics.refuse_client(code);
                self.observer.registered(slot, Err(fault(code, message.clone())));
                self.clients.refuse(slot, code, message);
            }
        }
    }

    /// Where an engine wants its staging, which is one of its agent's GPUs or the host.
    fn place_staging(&mut self, slot: Slot, registration: &Registration) -> Result<(), (Code, String)> {
        let found = |uuid: &String| tokio::task::block_in_place(|| self.data.gpu_called(slot, uuid));
        let gpu = registration.staging_device.as_ref().map(found).transpose();
        self.data.place_staging(slot, gpu.map_err(|reason| (reason.code, reason.text))?);
        Ok(())
    }

    /// Compiles the programs of a source ahead of the first round that needs them.
    fn compile(&self, slot: Slot) {
        let (Some(plan), Some(source)) = (self.plan.clone(), self.data.source(slot).cloned()) else { return };
        tokio::task::spawn_blocking(move || {
            if let Err(error) = source.programs(&plan, slot) {
                tracing::error!(%slot, error = %error, "registered memory does not fit the plan");
            }
        });
    }

    fn said(&mut self, slot: Slot, frame: ClientFrame) {
        let input = match frame {
            ClientFrame::Publish { step, world, extras } => {
                let world: Arc<str> = world.into();
                if matches!(self.seats.get(slot.0 as usize), Some(Seat::Training { rank: Rank(0) })) {
                    self.extras.publish(step, extras);
                } else if extras.is_some() {
                    let message = "extras are training rank 0's to publish".to_owned();
                    return self.clients.refuse(slot, Code::Unsupported, message);
                }
                self.desk(slot).outstanding.insert((Arc::clone(&world), step));
                self.observer.publishing(slot, step);
                Input::Publish { slot, step, world }
            }
            ClientFrame::Paused { round, record } => Input::Paused { slot, round, record },
            ClientFrame::Applied { round, group } => {
                if let Err(error) = self.observer.applied(slot, round, group) {
                    self.clients.refuse(slot, Code::Unsupported, error.to_string());
                }
                return;
            }
            ClientFrame::Committed { round, record, caches_invalidated } => {
                if let Some(group) = self.observer.committed(slot, round) {
                    let message =
                        format!("the engine says that it has committed, and has not applied `{group}`");
                    return self.clients.refuse(slot, Code::ApplyFailed, message);
                }
                tracing::info!(%slot, epoch = round.epoch.0, round = round.round.0, ?caches_invalidated, "engine committed");
                Input::Committed { slot, round, record }
            }
            ClientFrame::Resumed { round, record } => Input::Resumed { slot, round, record },
            ClientFrame::Aborted { round, record } => Input::Aborted { slot, round, record },
            ClientFrame::Failed { round, record, message } => {
                let group = self.observer.committed(slot, round);
                tracing::warn!(%slot, epoch = round.epoch.0, round = round.round.0, group, error = message, "engine failed");
                Input::Failed { slot, round, record }
            }
            // The session lets no rank send these.
            ClientFrame::Hello { .. }
            | ClientFrame::Register { .. }
            | ClientFrame::Refit { .. }
            | ClientFrame::Status { .. }
            | ClientFrame::Events { .. }
            | ClientFrame::Said { .. } => return,
        };
        self.feed(input);
    }

    /// The trainer is gone and nothing holds its memory: unmap it, then close its socket.
    fn let_go_if_free(&mut self, slot: Slot) {
        let desk = self.desk(slot);
        if desk.leaving && desk.outstanding.is_empty() {
            desk.leaving = false;
            self.data.let_go(slot);
            self.clients.let_go(slot);
        }
    }

    fn tick(&mut self, inbox: &Inbox) {
        let now = Instant::now();
        let news = self.clients.refuse_duplicates(now);
        self.hear(news);
        let late = self.observer.waiters.expire(now);
        self.answer(late);
        let depths = [
            ("control", inbox.control.len(), limits::EVENTS_MAX),
            ("clients", inbox.clients.len(), limits::EVENTS_MAX),
            ("peers", inbox.peers.len(), limits::EVENTS_MAX),
            ("events", self.observer.events.waiting(), limits::DRIVER_EVENTS_MAX),
        ];
        self.observer.tick(&depths, self.clients.counts(), &self.data, self.peers.reachable());
        self.observer.publish(&self.node, &self.data);
    }

    fn drain(&mut self) {
        tracing::info!("draining");
        match self.plan {
            Some(_) => self.feed(Input::Drain),
            None => self.drained = true,
        }
    }

    /// Unmaps everything, then lets the sockets close: their end is a promise.
    async fn leave(self, mut inbox: Inbox) {
        let Self { data, mut clients, peers, .. } = self;
        drop(peers);
        // The drain ended all that ran on it.
        drop(data);
        clients.end_all();
        let closed = async {
            while !clients.is_empty() {
                let Some(event) = inbox.clients.recv().await else { return };
                let _ = clients.handle(Instant::now(), event);
                clients.end_all();
            }
        };
        let _ = timeout(limits::FRAME_WRITE_TIMEOUT, closed).await;
        tracing::info!("stopped");
    }

    fn desk(&mut self, slot: Slot) -> &mut Desk {
        // Slots are indices of the seats that desks were made for.
        &mut self.desks[slot.0 as usize]
    }
}

/// Something still runs on memory of clients, so their sockets may not close before it is unmapped: only the end
/// of the process does both in that order.
fn wedged() -> ! {
    tracing::error!(code = %Code::AgentWedged, "drain did not end in time");
    std::process::exit(3)
}

async fn at(deadline: Option<tokio::time::Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// A step that the leader did not take, as its trainer is told.
fn not_taken(step: i64, code: Code) -> String {
    format!("step {step} was not taken: {}", code.sentence())
}
