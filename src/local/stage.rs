//! The run itself, on one task: starts every process, publishes step after step, restarts what a signal ended, and
//! gathers what was said.

use super::checks::Checks;
use super::driver::{Answer, Driver};
use super::fault::{Action, Fault, Moment};
use super::launch::Launch;
use super::process::{Happening, Processes, ending};
use super::progress::Progress;
use super::report::{Carrier, LocalReport, PlanPart, RoundLine, SCHEMA};
use super::run::LocalError;
use super::world::{Key, World};
use crate::api::timeouts::Timeouts;
use crate::coordinator::{Coordinator, Server, View};
use crate::identity::Tokens;
use crate::limits;
use rustix::process::Signal;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use weightrefit_core::code::Code;
use weightrefit_core::id::Incarnation;
use weightrefit_core::membership::Seat;
use weightrefit_core::plan::PlanBytes;
use weightrefit_core::round::message::EngineState;
use weightrefit_proto::reference::Told;
use weightrefit_proto::report::VersionReport;
use weightrefit_proto::v1;

/// What a run consists of.
pub(super) struct Parts {
    pub(super) world: World,
    pub(super) launch: Launch,
    pub(super) tokens: Arc<Tokens>,
    pub(super) server: Server,
    pub(super) coordinator: Coordinator,
    pub(super) plan: PlanBytes,
    /// Elements with a source, of each inference rank.
    pub(super) elements: BTreeMap<Seat, u64>,
    pub(super) timeouts: Timeouts,
    pub(super) faults: Vec<Fault>,
}

/// A run in progress.
pub(super) struct Stage {
    world: World,
    launch: Launch,
    tokens: Arc<Tokens>,
    // Kept for its streams.
    _coordinator: Coordinator,
    _server: Server,
    plan: PlanBytes,
    step_limit: Duration,
    faults: Vec<Fault>,
    processes: Processes,
    view: watch::Receiver<View>,
    happenings: mpsc::UnboundedReceiver<Happening>,
    answers: mpsc::UnboundedReceiver<Answer>,
    ask: mpsc::Sender<i64>,
    interrupts: mpsc::Receiver<()>,
    progress: Progress,
    checks: Checks,
    /// Trainer starts so far; the world token of the present one follows from it.
    worlds: u32,
    restarts: u32,
    /// Training ranks whose memory is their own since the step was published.
    released: BTreeSet<Seat>,
    registered: BTreeSet<Key>,
    step: i64,
    moment: Option<Moment>,
    bytes_before: u64,
    /// Times that the driver has asked for the present step.
    asked: u32,
    /// The end of the present step, or why nobody tells it.
    answer: Option<Result<RoundLine, Code>>,
    republish: bool,
    /// Processes that are stopped, and until when at most.
    stopped: Vec<Key>,
    resume_at: Option<Instant>,
}

impl Stage {
    pub(super) fn new(parts: Parts) -> Result<Self, LocalError> {
        // All fields by name, so that none is forgotten.
        let Parts { world, launch, tokens, server, coordinator, plan, elements, timeouts, faults } = parts;
        let (happened, happenings) = mpsc::unbounded_channel();
        let (answered, answers) = mpsc::unbounded_channel();
        let (ask, steps) = mpsc::channel(1);
        let total = Duration::from_secs(timeouts.total_seconds.unsigned_abs().into());
        let driver = Driver { socket: launch.socket(world.leader()), instance: instance()?, timeout: total };
        tokio::spawn(driver.run(steps, answered));
        let processes = Processes::new(&launch.directory, happened);
        Ok(Self {
            view: coordinator.view(),
            interrupts: interrupts()?,
            progress: Progress::new(plan.minimum),
            checks: Checks::new(elements),
            step_limit: total + limits::STEP_MARGIN,
            processes,
            world,
            launch,
            tokens,
            _coordinator: coordinator,
            _server: server,
            plan,
            faults,
            happenings,
            answers,
            ask,
            worlds: 0,
            restarts: 0,
            released: BTreeSet::new(),
            registered: BTreeSet::new(),
            step: -1,
            moment: None,
            bytes_before: 0,
            asked: 0,
            answer: None,
            republish: false,
            stopped: Vec::new(),
            resume_at: None,
        })
    }

    /// Publishes `rounds` steps, and reports.
    pub(super) async fn run(&mut self, rounds: u32) -> Result<LocalReport, LocalError> {
        self.progress.say("starting");
        for key in self.world.keys() {
            self.start(&key)?;
        }
        let mut lines = Vec::new();
        for step in 0..i64::from(rounds) {
            lines.push(self.publish(step).await?);
        }
        // A check that never comes is missed in the verdict.
        self.until_or_late("the engines' checks", limits::CHECK_LIMIT, |stage| stage.checks.are_complete())
            .await?;
        // States are told four times a second, so that of the last round may be on its way.
        self.until_or_late("the choice of every carrier", limits::CHECK_LIMIT, |stage| {
            stage.carriers().iter().all(|carrier| carrier.transport != "forming")
        })
        .await?;
        let carriers = self.carriers();
        self.end().await?;
        let verdict = self.checks.verdict();
        Ok(LocalReport {
            schema: SCHEMA,
            plan: PlanPart { bytes: self.plan },
            rounds: lines,
            carriers,
            verdict,
        })
    }

    /// One step, from the trainer's publish to the driver's answer.
    async fn publish(&mut self, step: i64) -> Result<RoundLine, LocalError> {
        self.until("every agent and rank being ready", limits::READY_LIMIT, Self::is_ready).await?;
        (self.step, self.moment, self.asked, self.answer) = (step, None, 0, None);
        self.bytes_before = self.bytes_received();
        self.released.clear();
        self.checks.begin_step();
        self.progress.restart(format!("step {step}: publish"));
        // One step at a time is asked, so the queue of one has room.
        let _ = self.ask.send(step).await;
        self.tell_trainers();
        self.reach(Moment::Publish);
        self.until("the end of a round", self.step_limit, |stage| stage.answer.is_some() || stage.is_lost())
            .await?;
        self.resume_stopped();
        // No rank trains on before all have their memory back, as the ranks of a trainer step together.
        self.until("the release of the trainer's memory", self.step_limit, Self::is_released).await?;
        // Torn reads say nothing where nobody reads. What stays unread is missed in the verdict.
        self.until_or_late("a forward step", limits::FIRST_STEP_LIMIT, |stage| stage.checks.are_read())
            .await?;
        match self.answer.take().unwrap_or(Err(Code::PeerLost)) {
            Ok(line) => Ok(line),
            Err(reason) => {
                let what = "the engines' word on a round whose end is not told";
                self.until_or_late(what, limits::CHECK_LIMIT, Self::engines_serve).await?;
                let replicas = self.world.replicas().map(|(pool, replica)| {
                    let version = self.live(&pool, &replica);
                    (pool, replica, version)
                });
                Ok(RoundLine::untold(step, reason, replicas))
            }
        }
    }

    fn tell_trainers(&mut self) {
        self.republish = false;
        self.released.clear();
        let line = format!("publish {}", self.step);
        for seat in self.world.seats().filter(|seat| matches!(seat, Seat::Training { .. })) {
            self.processes.tell(&Key::Trainer(seat.clone()), &line);
        }
    }

    fn is_ready(&self) -> bool {
        let registered = self.world.seats().all(|seat| self.registered.contains(&Key::of_rank(seat.clone())));
        registered && self.view.borrow().is_ready()
    }

    /// The agent that led is gone and nobody holds the step any more: its end will never be told.
    fn is_lost(&self) -> bool {
        self.asked > 1 && self.is_ready() && self.is_released()
    }

    /// Whether the agents know of every engine rank that it serves.
    fn engines_serve(&self) -> bool {
        self.world.replicas().all(|(pool, replica)| self.live(&pool, &replica).is_some())
    }

    /// The version that all ranks of a replica serve, as their agents told last; `None` while they serve none together.
    fn live(&self, pool: &str, replica: &str) -> Option<VersionReport> {
        let view = self.view.borrow();
        let states = || view.agents.values().flat_map(|agent| &agent.state.ranks);
        let of_replica = |seat: &&Seat| matches!(seat, Seat::Inference { pool: of, replica: name, .. } if of == pool && name == replica);
        let live = self.world.seats().filter(of_replica).map(|seat| {
            let is_of = |state: &&v1::RankState| {
                state.claim.as_ref().and_then(v1::Claim::seat).as_ref() == Some(seat)
            };
            states().find(is_of).filter(|state| state.engine_state == "Serving")?.live
        });
        let live: Vec<Option<v1::VersionName>> = live.collect();
        let first = (*live.first()?)?;
        let is_one = live.iter().all(|live| *live == Some(first));
        is_one.then_some(VersionReport { run: first.run, step: first.step })
    }

    /// Whether every training rank has its memory back.
    fn is_released(&self) -> bool {
        let mut trainers = self.world.seats().filter(|seat| matches!(seat, Seat::Training { .. }));
        trainers.all(|seat| self.released.contains(seat))
    }

    fn resume_stopped(&mut self) {
        self.resume_at = None;
        for key in std::mem::take(&mut self.stopped) {
            self.processes.signal(&key, Signal::CONT);
        }
    }

    /// Bytes of the present round, by what the agents of the inference side say.
    fn bytes_received(&self) -> u64 {
        let view = self.view.borrow();
        let ranks = view.agents.values().flat_map(|agent| &agent.state.ranks);
        ranks
            .filter(|rank| rank.claim.as_ref().is_some_and(|claim| claim.side == "inference"))
            .map(|rank| rank.round_bytes)
            .sum()
    }

    /// As [`Self::until`], for what the verdict misses by itself where it does not happen.
    async fn until_or_late(
        &mut self,
        what: &'static str,
        limit: Duration,
        done: impl Fn(&Self) -> bool,
    ) -> Result<(), LocalError> {
        match self.until(what, limit, done).await {
            Err(LocalError::Late { .. }) => Ok(()),
            result => result,
        }
    }

    /// Handles what happens until `done`.
    async fn until(
        &mut self,
        what: &'static str,
        limit: Duration,
        done: impl Fn(&Self) -> bool,
    ) -> Result<(), LocalError> {
        let deadline = Instant::now() + limit;
        while !done(self) {
            tokio::select! {
                Some(happening) = self.happenings.recv() => self.happened(happening)?,
                Some(answer) = self.answers.recv() => self.answered(answer),
                Ok(()) = self.view.changed() => self.viewed()?,
                Some(()) = self.interrupts.recv() => return Err(LocalError::Interrupted),
                () = tokio::time::sleep_until(self.resume_at.unwrap_or(deadline)), if self.resume_at.is_some() => {
                    self.resume_stopped();
                }
                () = tokio::time::sleep_until(deadline) => {
                    return Err(LocalError::Late { what, seconds: limit.as_secs(), log: self.logs() });
                }
            }
            if self.republish && self.is_ready() {
                self.tell_trainers();
            }
        }
        Ok(())
    }

    fn happened(&mut self, happening: Happening) -> Result<(), LocalError> {
        match happening {
            Happening::Said { key, start, line } if self.processes.is_present(&key, start) => {
                self.said(key, &line)
            }
            Happening::Exited { key, start, status } if self.processes.is_present(&key, start) => {
                self.exited(&key, status)
            }
            Happening::Said { .. } | Happening::Exited { .. } => Ok(()),
        }
    }

    fn said(&mut self, key: Key, line: &str) -> Result<(), LocalError> {
        let told = serde_json::from_str(line);
        let told = told.map_err(|_| LocalError::Line {
            process: key.to_string(),
            line: line.chars().take(200).collect(),
        })?;
        match (told, key) {
            (Told::Registered {}, key) => {
                self.registered.insert(key);
            }
            (Told::Released { step }, Key::Trainer(seat)) if step == self.step => {
                self.released.insert(seat);
            }
            (Told::PublishRefused { step, code, message }, Key::Trainer(seat)) => {
                tracing::info!(step, %code, message, rank = %seat, "publish refused");
                if step == self.step {
                    self.released.insert(seat);
                }
            }
            (Told::State { state }, _) => match state {
                EngineState::Quiet => self.reach(Moment::Pause),
                EngineState::Applied => self.reach(Moment::Commit),
                EngineState::Serving => self.reach(Moment::Resume),
                EngineState::Cold | EngineState::Dirty => {}
            },
            (Told::Checked { run, step, checked, mismatched, pads, pads_not_zero }, Key::Engine(seat)) => {
                self.checks.checked((seat, run, step), checked, mismatched + pads_not_zero, pads);
            }
            (Told::Stepped {}, Key::Engine(seat)) => self.checks.stepped(seat),
            (Told::Ended { steps, torn_reads }, _) => self.checks.ended(steps, torn_reads),
            // Of an earlier step, or from a process that has no business to say it.
            (
                Told::Loaded { .. }
                | Told::Released { .. }
                | Told::PublishRefused { .. }
                | Told::Checked { .. }
                | Told::Stepped {},
                _,
            ) => {}
        }
        Ok(())
    }

    fn exited(&mut self, key: &Key, status: ExitStatus) -> Result<(), LocalError> {
        self.processes.forget(key);
        self.registered.remove(key);
        self.restarts += 1;
        // What ends by itself has a reason that it would have again; what a signal ended is restarted, as a
        // supervisor would.
        if status.signal().is_none() || self.restarts > limits::RESTARTS_MAX {
            let log = self.processes.tail(key);
            return Err(LocalError::Ended { process: key.to_string(), ending: ending(status), log });
        }
        tracing::info!(process = %key, ending = ending(status), "restarting");
        if let Key::Engine(seat) = key {
            self.checks.lost(seat);
        }
        if !matches!(key, Key::Trainer(_)) {
            return self.start(key);
        }
        // Ranks of a trainer live and die together.
        self.worlds += 1;
        let trainers: Vec<Key> =
            self.world.keys().into_iter().filter(|key| matches!(key, Key::Trainer(_))).collect();
        for key in &trainers {
            self.processes.signal(key, Signal::KILL);
            self.processes.forget(key);
            self.registered.remove(key);
        }
        trainers.iter().try_for_each(|key| self.start(key))?;
        // A trainer that starts again owns all its memory; what the step still needs is published again.
        self.released = trainers.iter().filter_map(Key::seat).cloned().collect();
        self.republish = self.answer.is_none();
        Ok(())
    }

    fn answered(&mut self, answer: Answer) {
        match answer {
            Answer::Asked { step } if step == self.step => self.asked += 1,
            Answer::Ended { step, report } if step == self.step => {
                self.checks.committed(&report);
                self.answer = Some(Ok(RoundLine::of(&report, self.world.replicas())));
            }
            Answer::Refused { step, code, message } if step == self.step => {
                tracing::warn!(step, %code, message, "no report");
                self.answer = Some(Err(code));
            }
            Answer::Asked { .. } | Answer::Ended { .. } | Answer::Refused { .. } => {}
        }
    }

    fn viewed(&mut self) -> Result<(), LocalError> {
        let bytes = self.bytes_received();
        if bytes > 0 && bytes != self.bytes_before && self.moment.is_some() {
            self.progress.show(bytes);
            self.reach(Moment::Transfer);
        }
        let view = self.view.borrow();
        for agent in view.agents.values() {
            let faults = agent.state.ranks.iter().filter_map(|rank| rank.fault.as_ref());
            if let Some(fault) = agent.refused.as_ref().into_iter().chain(faults).next() {
                let message = format!("{}: {}\nhint: {}", fault.code, fault.message, fault.hint);
                return Err(LocalError::Refused { who: format!("agent of pod {}", agent.pod_uid), message });
            }
        }
        Ok(())
    }

    /// The step has come to a moment, or past it; faults that wait for it strike.
    fn reach(&mut self, moment: Moment) {
        if self.moment >= Some(moment) || (self.moment.is_none() && moment != Moment::Publish) {
            return;
        }
        self.moment = Some(moment);
        self.progress.say(format!("step {}: {}", self.step, moment.name()));
        let due = |fault: &mut Fault| fault.step == self.step && fault.moment <= moment;
        let due: Vec<Fault> = self.faults.extract_if(.., due).collect();
        for fault in due {
            let Some(key) = fault.key(&self.world) else { continue };
            tracing::info!(process = %key, action = ?fault.action, moment = moment.name(), "fault");
            match fault.action {
                Action::Kill => self.processes.signal(&key, Signal::KILL),
                Action::Stop => {
                    self.processes.signal(&key, Signal::STOP);
                    self.stopped.push(key);
                    self.resume_at = Some(Instant::now() + limits::STOP_MAX);
                }
            }
        }
    }

    fn start(&mut self, key: &Key) -> Result<(), LocalError> {
        let command = self.launch.command(&self.world, key, &format!("local-{}", self.worlds));
        match key {
            Key::Agent(index) => {
                let token = self.tokens.issue(&self.world.agents[*index].pod_uid);
                let token = token.map_err(|_| random())?;
                // The agent reads its token to the end.
                self.processes.start(key.clone(), command, token.as_bytes(), false)
            }
            Key::Trainer(_) | Key::Engine(_) => self.processes.start(key.clone(), command, b"", true),
        }
    }

    /// Lets every process say its last, and ends it.
    async fn end(&mut self) -> Result<(), LocalError> {
        self.progress.say("ending");
        let ends = |key: &Key| !matches!(key, Key::Agent(_));
        for key in self.processes.keys().iter().filter(|key| ends(key)) {
            self.processes.end_input(key);
        }
        let deadline = Instant::now() + limits::END_LIMIT;
        let mut agents_told = false;
        while !self.processes.keys().is_empty() {
            if !agents_told && !self.processes.keys().iter().any(ends) {
                agents_told = true;
                self.processes.keys().iter().for_each(|key| self.processes.signal(key, Signal::TERM));
            }
            tokio::select! {
                Some(happening) = self.happenings.recv() => match happening {
                    Happening::Exited { key, start, .. } if self.processes.is_present(&key, start) => self.processes.forget(&key),
                    Happening::Exited { .. } => {}
                    said @ Happening::Said { .. } => self.happened(said)?,
                },
                Some(()) = self.interrupts.recv() => return Err(LocalError::Interrupted),
                // Agents have nothing left to say, and dropping the processes kills them; without the last word of an
                // engine nobody knows what it read.
                () = tokio::time::sleep_until(deadline), if agents_told => return Ok(()),
                () = tokio::time::sleep_until(deadline), if !agents_told => {
                    let (what, seconds) = ("the end of every trainer and engine", limits::END_LIMIT.as_secs());
                    return Err(LocalError::Late { what, seconds, log: self.logs() });
                }
            }
        }
        Ok(())
    }

    /// As the agents told it last.
    fn carriers(&self) -> Vec<Carrier> {
        let view = self.view.borrow();
        let told = view.agents.values().flat_map(|agent| &agent.state.carriers).cloned();
        let mut carriers: Vec<Carrier> = told
            .map(|v1::Carrier { pool, replica, transport, code, reason }| Carrier {
                pool,
                replica,
                transport,
                code,
                reason,
            })
            .collect();
        carriers.sort_by(|a, b| (&a.pool, &a.replica).cmp(&(&b.pool, &b.replica)));
        carriers
    }

    fn logs(&self) -> String {
        let log = |key: &Key| format!("--- {key}\n{}", self.processes.tail(key));
        self.world
            .keys()
            .iter()
            .filter(|key| matches!(key, Key::Agent(_)))
            .map(log)
            .collect::<Vec<_>>()
            .join("\n")
    }
}

fn random() -> LocalError {
    LocalError::System { action: "get random bytes", source: io::Error::other("the system gives none") }
}

fn instance() -> Result<Incarnation, LocalError> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|_| random())?;
    Ok(Incarnation(u128::from_be_bytes(bytes)))
}

/// Ctrl-C, a request to end, a closed terminal.
fn interrupts() -> Result<mpsc::Receiver<()>, LocalError> {
    let (sender, receiver) = mpsc::channel(1);
    for kind in [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()] {
        let listening =
            signal(kind).map_err(|source| LocalError::System { action: "listen for signals", source });
        let (mut listening, sender) = (listening?, sender.clone());
        tokio::spawn(async move {
            while listening.recv().await.is_some() {
                // One is enough: a second says nothing new.
                let _ = sender.try_send(());
            }
        });
    }
    Ok(receiver)
}
