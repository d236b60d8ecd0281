//! A whole refit in one process: real nodes and engine clients, with network, sockets, memory and time made up.
//! Everything that may happen next is a [`Pending`]; a simulation takes the earliest, an exploration any.

pub(crate) mod check;
pub(crate) mod ledger;
mod plane;
pub(crate) mod script;
pub(crate) mod shape;

use check::Checker;
pub(crate) use shape::Shape;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use weightrefit_core::id::{Epoch, Incarnation, MemberId, Sha256};
use weightrefit_core::membership::{Membership, Seat, VersionFloor};
use weightrefit_core::round::engine::{EngineAction, EngineAnswer, EngineClient, EngineInput};
use weightrefit_core::round::io::{Effect, Event, Input, ReleaseOutcome, RoundSummary, Slot};
use weightrefit_core::round::message::{Header, Message, RoundKey, Timeouts};
use weightrefit_core::round::node::Node;
use weightrefit_core::round::topology::Topology;

/// Bytes between each source and each destination rank.
pub(crate) const PAIR_BYTES: u64 = 100;

pub(crate) const TIMEOUTS: Timeouts = Timeouts {
    publish_ms: 20_000,
    prepare_ms: 4_000,
    pause_ms: 3_000,
    transfer_ms: 6_000,
    verify_ms: 2_000,
    commit_ms: 4_000,
    resume_ms: 2_000,
    total_ms: 60_000,
};

/// An agent process and its pod.
#[derive(Clone, Hash)]
pub(crate) struct Agent {
    pub(crate) node: Node,
    pub(crate) seats: Vec<Seat>,
    pub(crate) incarnation: Incarnation,
    /// Stopped (SIGSTOP) until then.
    pub(crate) frozen_until: u64,
    /// Added to the world's time: in an exploration each process has its own.
    pub(crate) skew: u64,
}

/// An engine or trainer process, by agent and slot.
pub(crate) type Place = (usize, Slot);

#[derive(Clone, Hash)]
pub(crate) struct Engine {
    pub(crate) client: EngineClient,
    /// What the live tensors really hold.
    pub(crate) live: Option<u64>,
    /// Staging of an agent that died: its memory lives as long as the engine has it mapped.
    pub(crate) orphan: Option<u64>,
    /// The connection to the agent; frames of older ones are dropped.
    pub(crate) connection: u32,
}

#[derive(Clone, Hash)]
pub(crate) struct Trainer {
    pub(crate) instance: Incarnation,
    pub(crate) world: Arc<str>,
    pub(crate) step: i64,
    /// What the buffer really holds.
    pub(crate) buffer: u64,
    /// The trainer may write.
    pub(crate) owns: bool,
    /// Goes up with every connection to the agent, and with the end of one.
    pub(crate) connection: u32,
    pub(crate) connected: bool,
}

#[derive(Debug, Clone, Hash, PartialEq, Eq)]
pub(crate) enum Happening {
    Net { to: usize, incarnation: Incarnation, header: Header, message: Message },
    ToEngine { place: Place, connection: u32, input: EngineInput },
    ToAgent { place: Place, connection: u32, input: Input },
    EngineDid { place: Place, instance: Incarnation, input: EngineInput },
    Plane { agent: usize, incarnation: Incarnation, input: Input },
    Digest { agent: usize, incarnation: Incarnation, slot: Slot, round: RoundKey },
    Chunk { from: MemberId, to: MemberId, round: RoundKey },
    Wake { agent: usize },
    Peer { agent: usize, incarnation: Incarnation, other: Incarnation, lost: bool },
    Reconnect { place: Place },
    Rejoin { agent: usize },
    Configure { agent: usize, incarnation: Incarnation, epoch: Epoch },
    Operator,
}

#[derive(Clone)]
pub(crate) struct Pending {
    pub(crate) due: u64,
    pub(crate) seq: u64,
    /// Happenings of one channel keep their order.
    pub(crate) channel: Option<(u8, usize, Slot)>,
    pub(crate) what: Happening,
}

/// How long things take and what goes wrong, asked for every message and task.
pub(crate) trait Chance {
    /// Milliseconds until it happens; `None`: it is lost.
    fn delay(&mut self, what: &Happening) -> Option<u64>;
    /// A second copy arrives as well.
    fn duplicate(&mut self) -> Option<u64> {
        None
    }
    /// The bytes that arrive are not those that were sent.
    fn corrupt(&mut self) -> bool {
        false
    }
}

/// Everything at once, in order.
#[derive(Clone)]
pub(crate) struct AtOnce;

impl Chance for AtOnce {
    fn delay(&mut self, _: &Happening) -> Option<u64> {
        Some(0)
    }
}

#[derive(Clone)]
pub(crate) struct World {
    pub(crate) shape: Shape,
    pub(crate) now: u64,
    pub(crate) agents: Vec<Agent>,
    pub(crate) engines: BTreeMap<Place, Engine>,
    pub(crate) trainers: BTreeMap<Place, Trainer>,
    pub(crate) plane: plane::Plane,
    pub(crate) memberships: BTreeMap<Epoch, (Arc<Membership>, Arc<Topology>)>,
    pub(crate) pending: Vec<Pending>,
    pub(crate) check: Checker,
    pub(crate) rounds: Vec<RoundSummary>,
    pub(crate) released: Vec<(Place, i64, ReleaseOutcome)>,
    /// The largest version in what agents have told the coordinator.
    pub(crate) heard: Option<VersionFloor>,
    seq: u64,
    drawn: u128,
}

pub(crate) fn key_of(incarnation: Incarnation) -> Sha256 {
    let mut key = [7; 32];
    key[..16].copy_from_slice(&incarnation.0.to_le_bytes());
    Sha256(key)
}

impl World {
    pub(crate) fn new(shape: Shape) -> Self {
        let mut world = Self {
            now: 0,
            agents: Vec::new(),
            engines: BTreeMap::new(),
            trainers: BTreeMap::new(),
            plane: plane::Plane::default(),
            memberships: BTreeMap::new(),
            pending: Vec::new(),
            check: Checker::default(),
            rounds: Vec::new(),
            released: Vec::new(),
            heard: None,
            seq: 0,
            drawn: 0,
            shape,
        };
        for (at, seats) in world.shape.seats().into_iter().enumerate() {
            let incarnation = world.draw();
            for (slot, seat) in (0..).map(Slot).zip(&seats) {
                let instance = world.draw();
                match seat {
                    Seat::Training { .. } => drop(world.trainers.insert((at, slot), trainer(instance, "w0"))),
                    Seat::Inference { .. } => drop(world.engines.insert((at, slot), engine(instance))),
                }
            }
            let node = Node::new(incarnation, seats.clone());
            world.agents.push(Agent { node, seats, incarnation, frozen_until: 0, skew: 0 });
        }
        world
    }

    /// Epoch 1 is accepted by all agents, and nothing is under way.
    pub(crate) fn configured(shape: Shape) -> Self {
        let mut world = Self::new(shape);
        world.enact_all(1);
        (0..world.agents.len()).for_each(|agent| world.configure(&mut AtOnce, agent, Epoch(1)));
        world.pending.clear();
        world
    }

    /// Of a message in epoch 1 between agents that host one member each.
    pub(crate) fn header(&self, from: usize, to: usize) -> Header {
        let (membership, _) = &self.memberships[&Epoch(1)];
        let member = |agent: usize| MemberId(u32::try_from(agent).expect("small"));
        Header {
            refit_uid: "uid".into(),
            epoch: Epoch(1),
            membership: membership.digest(),
            from_incarnation: self.agents[from].incarnation,
            to_incarnation: self.agents[to].incarnation,
            from: member(from),
            to: member(to),
        }
    }

    pub(crate) fn draw(&mut self) -> Incarnation {
        self.drawn += 1;
        Incarnation(self.drawn)
    }

    pub(crate) fn clock(&self, agent: usize) -> u64 {
        self.now + self.agents[agent].skew
    }

    pub(crate) fn push(
        &mut self,
        chance: &mut dyn Chance,
        channel: Option<(u8, usize, Slot)>,
        what: Happening,
    ) {
        let is_net = matches!(what, Happening::Net { .. });
        let again = if is_net { chance.duplicate() } else { None };
        for delay in chance.delay(&what).into_iter().chain(again) {
            let in_order = self.pending.iter().filter(|p| channel.is_some() && p.channel == channel);
            let due = in_order.map(|p| p.due).max().unwrap_or(0).max(self.now + delay);
            self.seq += 1;
            self.pending.push(Pending { due, seq: self.seq, channel, what: what.clone() });
        }
    }

    /// Indices of what may happen next: of each channel the first.
    pub(crate) fn enabled(&self) -> Vec<usize> {
        let mut channels = BTreeSet::new();
        let first = |pending: &Pending| pending.channel.is_none_or(|channel| channels.insert(channel));
        let mut first = first;
        self.pending.iter().enumerate().filter(|(_, p)| first(p)).map(|(at, _)| at).collect()
    }

    pub(crate) fn earliest(&self) -> Option<usize> {
        (0..self.pending.len()).min_by_key(|at| (self.pending[*at].due, self.pending[*at].seq))
    }

    pub(crate) fn take(&mut self, at: usize) -> Happening {
        let pending = self.pending.remove(at);
        self.now = self.now.max(pending.due);
        pending.what
    }

    /// One happening, and what follows at once.
    pub(crate) fn happen(&mut self, chance: &mut dyn Chance, what: Happening) {
        match what {
            Happening::Net { to, incarnation, header, message } => {
                let peer_key = key_of(header.from_incarnation);
                if self.agents[to].incarnation == incarnation {
                    self.input(chance, to, Input::Message { header, peer_key, message });
                }
            }
            Happening::ToEngine { place, connection, input } => {
                if self.engines[&place].connection == connection {
                    self.engine(chance, place, input);
                }
            }
            Happening::ToAgent { place, connection, input } => {
                let now = self.engines.get(&place).map(|engine| engine.connection);
                let now = now.or(self.trainers.get(&place).map(|trainer| trainer.connection));
                if now == Some(connection) {
                    if let (Input::Publish { .. }, Some(trainer)) = (&input, self.trainers.get(&place)) {
                        self.plane.take(place, trainer.instance);
                    }
                    if matches!(input, Input::ClientGone { .. })
                        && self.agents[place.0].node.membership().is_none()
                    {
                        self.plane.unmap(place); // nobody has been told of what it published
                    }
                    self.input(chance, place.0, input);
                }
            }
            Happening::EngineDid { place, instance, input } => {
                if self.engines[&place].client.record().instance == instance {
                    self.engine(chance, place, input);
                }
            }
            Happening::Plane { agent, incarnation, input } => {
                if self.agents[agent].incarnation == incarnation {
                    self.plane_input(chance, agent, input);
                }
            }
            Happening::Digest { agent, incarnation, slot, round } => {
                if self.agents[agent].incarnation == incarnation {
                    self.digest(chance, agent, slot, round);
                }
            }
            Happening::Chunk { from, to, round } => self.chunk(chance, from, to, round),
            Happening::Wake { agent } => self.input(chance, agent, Input::Tick),
            Happening::Peer { agent, incarnation, other, lost } => {
                let of =
                    |m: &Arc<Membership>| m.iter().find(|(_, m)| m.incarnation == other).map(|(id, _)| id);
                let member = self.agents[agent].node.membership().and_then(of);
                if let Some(member) = member.filter(|_| self.agents[agent].incarnation == incarnation) {
                    let input = if lost { Input::PeerLost { member } } else { Input::PeerFound { member } };
                    self.input(chance, agent, input);
                }
            }
            Happening::Reconnect { place } => self.connect(chance, place),
            Happening::Configure { agent, incarnation, epoch } => {
                if self.agents[agent].incarnation == incarnation {
                    self.configure(chance, agent, epoch);
                }
            }
            Happening::Rejoin { .. } | Happening::Operator => {} // the simulation's own
        }
        self.check.engines(self.now, &self.engines, &self.agents);
    }

    pub(crate) fn configure(&mut self, chance: &mut dyn Chance, agent: usize, epoch: Epoch) {
        let (membership, topology) = self.memberships[&epoch].clone();
        let (now, mut out) = (self.clock(agent), Vec::new());
        // A refusal is an answer too; what may be taken is the business of other tests.
        drop(self.agents[agent].node.configure(now, membership, topology, &mut out));
        self.effects(chance, agent, out);
    }

    /// The client of a place connects (again) to its agent.
    pub(crate) fn connect(&mut self, chance: &mut dyn Chance, place: Place) {
        let channel = Some((1, place.0, place.1));
        let slot = place.1;
        if let Some(engine) = self.engines.get_mut(&place) {
            engine.connection += 1;
            let (record, layout, connection) = (engine.client.record(), Sha256([0; 32]), engine.connection);
            let input = Input::EngineConnected { slot, record, layout };
            self.push(chance, channel, Happening::ToAgent { place, connection, input });
        } else if let Some(trainer) = self.trainers.get_mut(&place) {
            trainer.connection += 1;
            trainer.connected = true;
            let (instance, connection) = (trainer.instance, trainer.connection);
            let publish = (!trainer.owns).then(|| (trainer.step, trainer.world.clone()));
            let input = Input::TrainerConnected { slot, instance };
            self.push(chance, channel, Happening::ToAgent { place, connection, input });
            if let Some((step, world)) = publish {
                let input = Input::Publish { slot, step, world };
                self.push(chance, channel, Happening::ToAgent { place, connection, input });
            }
        }
    }

    /// The optimizer has made a step on every rank; all publish it.
    pub(crate) fn publish(&mut self, chance: &mut dyn Chance, step: i64) {
        for place in self.trainers.keys().copied().collect::<Vec<_>>() {
            let Some(trainer) = self.trainers.get_mut(&place).filter(|trainer| trainer.owns) else {
                continue;
            };
            assert!(!self.plane.is_read(place), "I8: the optimizer writes while a round reads");
            trainer.step = step;
            trainer.buffer = ledger::content(&trainer.world, step);
            trainer.owns = false;
            if !trainer.connected {
                continue; // said when it has connected
            }
            let (connection, world) = (trainer.connection, trainer.world.clone());
            let input = Input::Publish { slot: place.1, step, world };
            self.push(chance, Some((1, place.0, place.1)), Happening::ToAgent { place, connection, input });
        }
    }

    pub(crate) fn crash_engine(&mut self, chance: &mut dyn Chance, place: Place) {
        let instance = self.draw();
        let Some(old) = self.engines.get_mut(&place) else { return };
        let (gone, connection) = (old.client.record().instance, old.connection + 1);
        *old = Engine { connection, ..engine(instance) };
        self.client_gone(chance, place, connection, gone);
        self.push(chance, None, Happening::Reconnect { place });
    }

    pub(crate) fn crash_trainer(&mut self, chance: &mut dyn Chance, place: Place, world: &str) {
        let instance = self.draw();
        let Some(old) = self.trainers.get_mut(&place) else { return };
        let (gone, connection) = (old.instance, old.connection + 1);
        let kept = (!old.owns).then_some(old.buffer);
        *old = Trainer { connection, ..trainer(instance, world) };
        self.plane.keep_mapped(place, gone, kept);
        self.client_gone(chance, place, connection, gone);
        self.push(chance, None, Happening::Reconnect { place });
    }

    /// The agent reads the end of the connection, unless the next one replaces it first.
    fn client_gone(&mut self, chance: &mut dyn Chance, place: Place, connection: u32, gone: Incarnation) {
        let input = Input::ClientGone { slot: place.1, instance: gone };
        self.push(chance, Some((1, place.0, place.1)), Happening::ToAgent { place, connection, input });
    }

    /// SIGKILL of an agent: its node, staging, tasks and connections are gone; a new process has started.
    pub(crate) fn crash_agent(&mut self, chance: &mut dyn Chance, agent: usize) {
        let incarnation = self.draw();
        let seats = self.agents[agent].seats.clone();
        let node = Node::new(incarnation, seats.clone());
        let skew = self.agents[agent].skew;
        self.agents[agent] = Agent { node, seats, incarnation, frozen_until: 0, skew };
        for (place, engine) in self.engines.iter_mut().filter(|(place, _)| place.0 == agent) {
            engine.orphan = engine.orphan.or(self.plane.staged(*place)); // a copy goes on from the first
        }
        self.plane.agent_gone(agent);
        let places: Vec<Place> = self.engines.keys().chain(self.trainers.keys()).copied().collect();
        for place in places.into_iter().filter(|place| place.0 == agent) {
            if let Some(engine) = self.engines.get_mut(&place) {
                engine.connection += 1;
                self.engine(chance, place, EngineInput::AgentGone);
            }
            if let Some(trainer) = self.trainers.get_mut(&place) {
                trainer.connection += 1;
                trainer.connected = false;
            }
            self.push(chance, None, Happening::Reconnect { place });
        }
    }

    /// Feeds a node and does what it says.
    pub(crate) fn input(&mut self, chance: &mut dyn Chance, agent: usize, input: Input) {
        let now = self.clock(agent);
        let mut out = Vec::new();
        self.check.message(now, &mut self.agents[agent].node, &input, &mut out);
        self.agents[agent].node.handle(now, input, &mut out);
        self.effects(chance, agent, out);
    }

    fn effects(&mut self, chance: &mut dyn Chance, agent: usize, out: Vec<Effect>) {
        let mut out = VecDeque::from(out);
        while let Some(effect) = out.pop_front() {
            self.check.effect(agent, &self.agents[agent].node, &effect);
            let incarnation = self.agents[agent].incarnation;
            let frame = |slot: Slot, input| ((agent, slot), input);
            let (place, input) = match effect {
                Effect::Send { header, message } => {
                    let to = self.agents.iter().position(|a| a.incarnation == header.to_incarnation);
                    if let Some(to) = to {
                        let incarnation = header.to_incarnation;
                        self.push(chance, None, Happening::Net { to, incarnation, header, message });
                    }
                    continue;
                }
                Effect::Pause { slot, round, .. } => frame(slot, EngineInput::Pause { round }),
                Effect::Commit { slot, round, version } => {
                    frame(slot, EngineInput::Commit { round, version })
                }
                Effect::Resume { slot, round, version } => {
                    frame(slot, EngineInput::Resume { round, version })
                }
                Effect::AbortClient { slot, round } => frame(slot, EngineInput::Abort { round }),
                Effect::Released { slot, step, world, outcome } => {
                    self.take_back((agent, slot), step, Some(world), outcome);
                    continue;
                }
                Effect::RefusePublish { slot, step, .. } => {
                    self.take_back((agent, slot), step, None, ReleaseOutcome::Dropped);
                    continue;
                }
                Effect::Event(event) => {
                    let version = match &event {
                        Event::Accepted { version } => Some(*version),
                        Event::Record { record, .. } => record.and_then(|record| record.live),
                        _ => None,
                    };
                    let floor = version.map(|v| VersionFloor { run: v.run, step: v.step });
                    self.heard = self.heard.max(floor);
                    if let Event::RoundEnded(summary) = event {
                        self.rounds.push(*summary);
                    }
                    continue;
                }
                plane => {
                    self.plane_effect(chance, agent, incarnation, plane);
                    continue;
                }
            };
            let connection = self.engines[&place].connection;
            let channel = Some((0, place.0, place.1));
            self.push(chance, channel, Happening::ToEngine { place, connection, input });
        }
    }

    fn take_back(&mut self, place: Place, step: i64, world: Option<Arc<str>>, outcome: ReleaseOutcome) {
        if world.is_some() {
            self.check.released(&self.plane, place);
            self.plane.unmap(place);
        }
        let meant = |trainer: &Trainer| {
            trainer.step == step && world.as_ref().is_none_or(|world| *world == trainer.world)
        };
        if let Some(trainer) = self.trainers.get_mut(&place).filter(|trainer| meant(trainer)) {
            trainer.owns = true;
        }
        self.released.push((place, step, outcome));
    }

    fn engine(&mut self, chance: &mut dyn Chance, place: Place, input: EngineInput) {
        let mut actions = Vec::new();
        let staged = self.plane.staged(place);
        let Some(engine) = self.engines.get_mut(&place) else { return };
        let instance = engine.client.record().instance;
        match input {
            EngineInput::Copied => engine.live = engine.orphan.take().or(staged),
            EngineInput::CopyFailed => engine.live = None,
            _ => {}
        }
        engine.client.handle(input, &mut actions);
        for action in actions {
            let (connection, slot) = (self.engines[&place].connection, place.1);
            match action {
                EngineAction::Serve => {}
                EngineAction::Stop => {
                    let input = EngineInput::Stopped;
                    self.push(chance, None, Happening::EngineDid { place, instance, input });
                }
                EngineAction::Copy(_) => {
                    if let Some(engine) = self.engines.get_mut(&place) {
                        engine.orphan = None;
                        engine.live = None; // half written from the first byte on
                    }
                    let input = EngineInput::Copied;
                    self.push(chance, None, Happening::EngineDid { place, instance, input });
                }
                EngineAction::Answer(answer) => {
                    let input = match answer {
                        EngineAnswer::Paused { round, record } => Input::Paused { slot, round, record },
                        EngineAnswer::Committed { round, record } => Input::Committed { slot, round, record },
                        EngineAnswer::Resumed { round, record } => Input::Resumed { slot, round, record },
                        EngineAnswer::Aborted { round, record } => Input::Aborted { slot, round, record },
                        EngineAnswer::Failed { round, record, .. } => Input::Failed { slot, round, record },
                    };
                    let channel = Some((1, place.0, place.1));
                    self.push(chance, channel, Happening::ToAgent { place, connection, input });
                }
            }
        }
    }

    /// Connects all clients.
    pub(crate) fn connect_all(&mut self, chance: &mut dyn Chance) {
        for place in self.engines.keys().chain(self.trainers.keys()).copied().collect::<Vec<_>>() {
            self.connect(chance, place);
        }
    }
}

fn engine(instance: Incarnation) -> Engine {
    Engine { client: EngineClient::new(instance), live: Some(0), orphan: None, connection: 0 }
}

fn trainer(instance: Incarnation, world: &str) -> Trainer {
    Trainer { instance, world: world.into(), step: 0, buffer: 0, owns: true, connection: 0, connected: false }
}

/// Explored worlds are told apart by what processes, tensors and channels hold, not by when it came about.
impl Hash for World {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&self.agents, &self.engines, &self.trainers, &self.plane).hash(state);
        let mut free = 0_u64;
        for pending in &self.pending {
            let mut one = std::hash::DefaultHasher::new();
            pending.what.hash(&mut one);
            match pending.channel {
                Some(channel) => (channel, one.finish()).hash(state),
                None => free = free.wrapping_add(one.finish()),
            }
        }
        free.hash(state);
        self.check.hash(state);
    }
}
