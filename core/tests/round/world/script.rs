//! The language of transcripts: commands to a made-up world, and what they make visible.

use super::{Chance, Happening, Place, Shape, World};
use std::fmt::Write;
use weightrefit_core::id::{Epoch, Incarnation, MemberId};
use weightrefit_core::membership::Seat;
use weightrefit_core::round::engine::EngineInput;
use weightrefit_core::round::io::{Input, ReplicaEnd, Slot};
use weightrefit_core::round::message::{Blame, EngineRecord, Message, Version};
use weightrefit_core::round::topology::OnReplicaFailure;

/// Everything at once, in order; bytes may be made to arrive wrong.
#[derive(Default)]
pub(crate) struct Calm {
    corrupt: bool,
}

impl Chance for Calm {
    fn delay(&mut self, _: &Happening) -> Option<u64> {
        Some(0)
    }
    fn corrupt(&mut self) -> bool {
        self.corrupt
    }
}

pub(crate) struct Script {
    pub(crate) world: World,
    calm: Calm,
    /// Words that a happening must all contain to be held back.
    holds: Vec<String>,
    rounds_shown: usize,
    out: String,
}

impl Script {
    pub(crate) fn new() -> Self {
        let (world, calm) = (World::new(Shape::new(1, 1, 2)), Calm::default());
        Self { world, calm, holds: Vec::new(), rounds_shown: 0, out: String::new() }
    }

    /// Runs one command; what it made visible.
    pub(crate) fn command(&mut self, line: &str) -> String {
        let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
        let words: Vec<&str> = rest.split(' ').collect();
        let number = |at: usize| words[at].parse::<u64>().unwrap_or_else(|_| panic!("no number in `{line}`"));
        match verb {
            "world" => self.build(&words),
            "start" => self.start(),
            "serve" => {
                self.start();
                self.world.publish(&mut self.calm, 1);
                self.run();
                self.out.clear();
            }
            "epoch" => {
                self.world.enact_all(number(0));
                for agent in 0..self.world.agents.len() {
                    let (incarnation, epoch) = (self.world.agents[agent].incarnation, Epoch(number(0)));
                    self.world.push(&mut self.calm, None, Happening::Configure { agent, incarnation, epoch });
                }
            }
            "publish" => self.world.publish(&mut self.calm, number(0).try_into().expect("small")),
            "corrupt" => self.calm.corrupt = rest == "on",
            "hold" => self.holds.push(rest.to_owned()),
            "free" => self.holds.retain(|hold| hold != rest && !rest.is_empty()),
            "drop" => {
                let gone: Vec<_> = self.world.pending.iter().map(|p| self.show(&p.what)).collect();
                let mut gone = gone.into_iter();
                self.world.pending.retain(|_| !matches(&gone.next().unwrap_or_default(), rest));
            }
            "crash" => self.crash(&words),
            "lost" | "found" => {
                let (at, other) = (self.agent(words[0]), self.agent(words[1]));
                let (incarnation, other) =
                    (self.world.agents[at].incarnation, self.world.agents[other].incarnation);
                let what = Happening::Peer { agent: at, incarnation, other, lost: verb == "lost" };
                self.happen(what);
            }
            "wait" => {
                let agent = self.agent(words[0]);
                self.world.agents[agent].skew += number(1);
                self.happen(Happening::Wake { agent });
            }
            "cancel" => self.input(0, Input::Cancel),
            "paused" => self.input(0, Input::SetPaused { paused: rest == "on" }),
            "drain" => self.input(self.agent(words[0]), Input::Drain),
            "copy-fails" => self.copy_fails(self.place(words[0])),
            "state" => return self.state(),
            "quiet" => {
                self.run();
                self.out.clear();
            }
            other => panic!("unknown command `{other}`"),
        }
        self.run();
        self.rounds();
        let out = std::mem::take(&mut self.out);
        if out.is_empty() { "ok\n".into() } else { out }
    }

    fn start(&mut self) {
        self.world.enact_all(1);
        (0..self.world.agents.len()).for_each(|at| self.world.configure(&mut self.calm, at, Epoch(1)));
        self.world.connect_all(&mut self.calm);
        self.run();
    }

    fn build(&mut self, words: &[&str]) {
        let mut shape = Shape::new(1, 1, 2);
        for word in words {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            match key {
                "trainers" => shape.trainers = value.parse().expect("a number"),
                "replicas" => shape.replicas = value.parse().expect("a number"),
                "ranks" => shape.ranks = value.parse().expect("a number"),
                "min" => shape.min_replicas = value.parse().expect("a number"),
                "together" => shape.together = true,
                "AbortRound" => shape.policy = OnReplicaFailure::AbortRound,
                other => panic!("unknown shape `{other}`"),
            }
        }
        *self = Self { world: World::new(shape), ..Self::new() };
    }

    fn crash(&mut self, words: &[&str]) {
        let place = self.place(words[1]);
        match words[0] {
            "agent" => self.world.crash_agent(&mut self.calm, place.0),
            "engine" => self.world.crash_engine(&mut self.calm, place),
            "trainer" => self.world.crash_trainer(&mut self.calm, place, words[2]),
            other => panic!("nothing called `{other}` can crash"),
        }
    }

    fn copy_fails(&mut self, place: Place) {
        let at = self.world.pending.iter().position(|pending| match &pending.what {
            Happening::EngineDid { place: of, input: EngineInput::Copied, .. } => *of == place,
            _ => false,
        });
        let at = at.expect("a copy that is held back");
        if let Happening::EngineDid { input, .. } = &mut self.world.pending[at].what {
            *input = EngineInput::CopyFailed;
        }
    }

    fn input(&mut self, agent: usize, input: Input) {
        self.world.input(&mut self.calm, agent, input);
    }

    /// Until nothing is left but what is held back.
    fn run(&mut self) {
        for _ in 0..10_000 {
            let next = self.world.enabled().into_iter().find(|at| {
                let shown = self.show(&self.world.pending[*at].what);
                !self.holds.iter().any(|hold| matches(&shown, hold))
            });
            let Some(at) = next else { return };
            let what = self.world.take(at);
            self.happen(what);
        }
        panic!("livelock: {}", self.out);
    }

    fn happen(&mut self, what: Happening) {
        let shown = self.show(&what);
        if !shown.is_empty() {
            writeln!(self.out, "{shown}").expect("strings grow");
        }
        self.world.happen(&mut self.calm, what);
        self.rounds();
    }

    fn rounds(&mut self) {
        for (place, step, outcome) in self.world.released.drain(..).collect::<Vec<_>>() {
            writeln!(self.out, "  {} has step {step} back: {outcome:?}", self.name(place))
                .expect("strings grow");
        }
        for round in &self.world.rounds[self.rounds_shown..] {
            let (epoch, id) = (round.round.epoch, round.round.round);
            let ends: Vec<_> =
                round.replicas.iter().map(|(r, end)| format!("r{r} {}", self.end(end))).collect();
            let all = if round.committed { "committed" } else { "aborted" };
            let bytes = (round.sent, round.received);
            writeln!(self.out, "  round {epoch}.{id} {all}: {}; sent, received {bytes:?}", ends.join(", "))
                .expect("strings grow");
        }
        self.rounds_shown = self.world.rounds.len();
    }

    fn end(&self, end: &ReplicaEnd) -> String {
        match end {
            ReplicaEnd::Committed { version, serving: true } => format!("serves {}", brief(version)),
            ReplicaEnd::Committed { version, serving: false } => {
                format!("committed {}, not serving", brief(version))
            }
            ReplicaEnd::NotCommitted(blame) => format!("not committed ({})", self.blame(blame)),
            ReplicaEnd::Held(blame) => format!("held ({})", self.blame(blame)),
            ReplicaEnd::Aborted(blame) => format!("aborted ({})", self.blame(blame)),
            ReplicaEnd::Unknown(blame) => format!("unknown ({})", self.blame(blame)),
        }
    }

    fn blame(&self, blame: &Blame) -> String {
        let member = blame.member.map_or_else(String::new, |member| format!(" of {}", self.member(member)));
        format!("{}{member}", blame.code)
    }

    fn state(&self) -> String {
        let mut out = String::new();
        for (place, engine) in &self.world.engines {
            writeln!(out, "{} {}", self.name(*place), record(&engine.client.record())).expect("strings grow");
        }
        for (place, trainer) in &self.world.trainers {
            let owner = if trainer.owns { "the trainer's" } else { "published" };
            writeln!(out, "{} step {} {owner}", self.name(*place), trainer.step).expect("strings grow");
        }
        out
    }

    fn seat(seat: &Seat) -> String {
        match seat {
            Seat::Training { rank } => format!("t{rank}"),
            Seat::Inference { replica, rank, .. } => format!("{replica}.{rank}"),
        }
    }

    fn name(&self, (agent, Slot(slot)): Place) -> String {
        Self::seat(&self.world.agents[agent].seats[slot as usize])
    }

    fn member(&self, member: MemberId) -> String {
        let newest = self.world.memberships.values().next_back();
        let seat = newest.and_then(|(membership, _)| membership.member(member)).map(|m| Self::seat(&m.seat));
        seat.unwrap_or_else(|| format!("member {member}"))
    }

    fn place(&self, name: &str) -> Place {
        let all = self.world.engines.keys().chain(self.world.trainers.keys()).copied();
        all.clone()
            .find(|place| self.name(*place) == name)
            .unwrap_or_else(|| panic!("nobody is called `{name}`"))
    }

    fn agent(&self, name: &str) -> usize {
        self.place(name).0
    }

    fn agent_name(&self, incarnation: Incarnation) -> String {
        let agent = self.world.agents.iter().find(|agent| agent.incarnation == incarnation);
        agent.map_or_else(|| "a dead agent".into(), |agent| Self::seat(&agent.seats[0]))
    }

    /// One line, or nothing for what only makes noise.
    fn show(&self, what: &Happening) -> String {
        match what {
            Happening::Net { header, message, .. } => {
                let (from, to) = (self.member(header.from), self.member(header.to));
                format!("{from} > {to}: {}", self.message(message))
            }
            Happening::ToEngine { place, input, .. } => {
                format!("{} engine: {}", self.name(*place), frame(input))
            }
            Happening::EngineDid { place, input, .. } => {
                format!("{} engine: {}", self.name(*place), frame(input))
            }
            Happening::ToAgent { place, input, .. } => answer(&self.name(*place), input),
            Happening::Plane { agent, input, .. } => match input {
                Input::ReceiversJoined { slot, .. } => {
                    format!("{} receivers joined", self.name((*agent, *slot)))
                }
                Input::SendersJoined { slot, replica, .. } => {
                    format!("{} senders to r{replica} joined", self.name((*agent, *slot)))
                }
                _ => String::new(),
            },
            Happening::Chunk { from, to, round } => {
                format!(
                    "bytes {} > {} of {}.{}",
                    self.member(*from),
                    self.member(*to),
                    round.epoch,
                    round.round
                )
            }
            Happening::Configure { agent, epoch, incarnation } => {
                let _ = agent;
                format!("{} configure {epoch}", self.agent_name(*incarnation))
            }
            Happening::Digest { .. }
            | Happening::Wake { .. }
            | Happening::Peer { .. }
            | Happening::Reconnect { .. }
            | Happening::Rejoin { .. }
            | Happening::Operator => String::new(),
        }
    }

    fn message(&self, message: &Message) -> String {
        match message {
            Message::Propose { round, version, replicas, .. } => {
                format!("Propose {round} {} to replicas {replicas:?}", brief(version))
            }
            Message::Transfer { round } => format!("Transfer {round}"),
            Message::Abort { round, replicas, blame } => {
                format!("Abort {round} of replicas {replicas:?} ({})", self.blame(blame))
            }
            Message::Authorise { round, version } => format!("Authorise {round} {}", brief(version)),
            Message::Release { step, world, .. } => format!("Release {world}/{step}"),
            Message::Query {} => "Query".into(),
            Message::Prepared { round, .. } => format!("Prepared {round}"),
            Message::Refused { round, code, retryable, .. } => {
                format!("Refused {round} ({code}{})", if *retryable { ", ask again" } else { "" })
            }
            Message::Landed { round, received, .. } => format!("Landed {round}, {received} bytes"),
            Message::Sent { round, replica, bytes } => format!("Sent {round} to r{replica}, {bytes} bytes"),
            Message::TransferFailed { round, replica, blame } => {
                format!("TransferFailed {round} of r{replica} ({})", self.blame(blame))
            }
            Message::Published { step, world, .. } => format!("Published {world}/{step}"),
            Message::Outcome { round, result, blame, .. } => {
                let blame =
                    blame.as_ref().map_or_else(String::new, |blame| format!(" ({})", self.blame(blame)));
                format!("Outcome {round} {result:?}{blame}")
            }
            Message::Settled { round, held, .. } => {
                format!("Settled {round}{}", if *held { ", held" } else { "" })
            }
            Message::Reported { report } => {
                let engine = report.engine.as_ref().map_or_else(|| "no engine".into(), record);
                let staged = report.staging.filter(|tag| tag.authorised);
                let staged =
                    staged.map_or_else(String::new, |tag| format!(", staged {}", brief(&tag.version)));
                format!("Reported {engine}{staged}")
            }
            Message::Pause { round, version } => format!("Pause {round} {}", brief(version)),
            Message::Apply { round } => format!("Apply {round}"),
            Message::Resume { round, version } => format!("Resume {round} {}", brief(version)),
            Message::GiveUp { round, blame } => format!("GiveUp {round} ({})", self.blame(blame)),
            Message::Paused { round, .. } => format!("Paused {round}"),
            Message::Applied { round, version, .. } => format!("Applied {round} {}", brief(version)),
            Message::Resumed { round } => format!("Resumed {round}"),
            Message::Failed { round, code, .. } => format!("Failed {round} ({code})"),
        }
    }
}

/// Whether all words of `pattern` are in the line, in any order.
fn matches(line: &str, pattern: &str) -> bool {
    !line.is_empty() && pattern.split(' ').all(|word| line.split([' ', ':']).any(|part| part == word))
}

fn brief(version: &Version) -> String {
    format!("v{}.{}", version.run, version.step)
}

fn record(record: &EngineRecord) -> String {
    let live = record.live.as_ref().map_or_else(|| "nothing".into(), brief);
    format!("{:?} {live}", record.state)
}

fn frame(input: &EngineInput) -> String {
    match input {
        EngineInput::Pause { .. } => "pause".into(),
        EngineInput::Commit { version, .. } => format!("commit {}", brief(version)),
        EngineInput::Resume { version, .. } => format!("resume {}", brief(version)),
        EngineInput::Abort { .. } => "abort".into(),
        EngineInput::Stopped => "has stopped".into(),
        EngineInput::Copied => "has copied".into(),
        EngineInput::CopyFailed => "could not copy".into(),
        EngineInput::AgentGone => "lost its agent".into(),
    }
}

fn answer(name: &str, input: &Input) -> String {
    match input {
        Input::EngineConnected { record: of, .. } => format!("{name} engine connects: {}", record(of)),
        Input::Failed { record: of, .. } => format!("{name} engine failed: {}", record(of)),
        Input::Publish { step, world, .. } => format!("{name} publishes {world}/{step}"),
        _ => String::new(),
    }
}
