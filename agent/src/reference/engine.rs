//! The reference engine: one rank of one inference replica, with live tensors in its own memory and a forward loop
//! that reads all of them all the time. The rounds are [`EngineClient`]'s; this does what it says.

use super::device::{self, Twin};
use super::forward::{Counts, Forward, Gate};
use super::input::{self, Commands};
use super::live::{LiveTensor, Stamp};
use super::rule::Step;
use super::shard::{Comparison, Shard};
use super::socket::{Connection, Event};
use super::{RankArgs, ReferenceError, say, setup};
use crate::cuda::Context;
use crate::memory::{Mapping, create};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;
use weightrefit_core::id::{Incarnation, Rank};
use weightrefit_core::layout::recording::RecordedTensor;
use weightrefit_core::round::engine::{EngineAction, EngineAnswer, EngineClient, EngineInput};
use weightrefit_core::round::message::Version;
use weightrefit_proto::reference::Told;
use weightrefit_proto::socket::{AgentFrame, ClientFrame, PROTOCOL, Role, StagedTensor, Tensor};

/// Settings beside those that every rank has.
#[derive(Debug, Clone, clap::Args)]
pub struct EngineArgs {
    #[command(flatten)]
    rank: RankArgs,
    /// Pool of the refit.
    #[arg(long)]
    pool: String,
    /// Replica in the pool.
    #[arg(long)]
    replica: String,
    /// Rank in the replica.
    #[arg(long)]
    replica_rank: u32,
    /// Where the ranks of the replica meet to step together.
    #[arg(long)]
    replica_socket: PathBuf,
    /// Change one bit of a live tensor after each commit, as faulty memory would.
    #[arg(long)]
    corrupt_live: bool,
    /// Say that the forward loop has stopped, and do not stop it.
    #[arg(long)]
    ignore_pause: bool,
    /// Register what lies where, as an engine does that has recorded its own loader.
    #[arg(long)]
    record: bool,
}

/// Runs until its input ends.
pub(super) fn run(args: &EngineArgs) -> Result<(), ReferenceError> {
    let counts = Arc::new(Counts::default());
    let last = Arc::clone(&counts);
    let at_end = move || {
        let (steps, torn_reads) = (last.steps.load(Ordering::Relaxed), last.torn.load(Ordering::Relaxed));
        // A launcher that is gone reads nothing.
        let _ = say(&Told::Ended { steps, torn_reads });
    };
    input::read_commands(Commands::AtEnd(Box::new(at_end)), &args.rank)?;
    let refit = setup::Refit::read(&args.rank)?;
    let (shard, recorded, ranks) = refit.inference_shard(&args.pool, Rank(args.replica_rank))?;
    let live: Arc<Vec<_>> =
        Arc::new(shard.locals.iter().map(|local| LiveTensor::new(local.bytes())).collect());
    let gate = Arc::new(Gate::default());
    let forward = Forward {
        live: Arc::clone(&live),
        gate: Arc::clone(&gate),
        counts: Arc::clone(&counts),
        replica_socket: args.replica_socket.clone(),
        rank: args.replica_rank,
        ranks,
    };
    std::thread::spawn(move || forward.run());
    let (events, queue) = mpsc::channel();
    let instance = crate::identity::draw_incarnation()?;
    let context = device::context(&args.rank)?;
    let client = EngineClient::new(instance);
    let engine = Engine {
        args,
        shard,
        recorded,
        live,
        gate,
        counts,
        client,
        instance,
        staging: None,
        context,
        events,
        connections: 0,
    };
    engine.run(&queue)
}

struct Engine<'a> {
    args: &'a EngineArgs,
    shard: Shard,
    recorded: Vec<RecordedTensor>,
    live: Arc<Vec<LiveTensor>>,
    gate: Arc<Gate>,
    counts: Arc<Counts>,
    client: EngineClient,
    instance: Incarnation,
    staging: Option<Staging>,
    /// The device that staging is wanted on; `None` is the host.
    context: Option<Context>,
    events: Sender<Event>,
    connections: u64,
}

/// Staging memory of the agent, mapped read-only.
struct Staging {
    memory: Arc<Mapping>,
    /// Where it lies on a device, of which `memory` is a copy.
    twin: Option<Twin>,
    places: BTreeMap<String, StagedTensor>,
}

impl Engine<'_> {
    fn run(mut self, queue: &Receiver<Event>) -> Result<(), ReferenceError> {
        let bytes = self.shard.locals.iter().map(|local| local.bytes() as u64).sum();
        say(&Told::Loaded { bytes })?;
        let mut connection = self.connect()?;
        // The sender in `self` keeps the channel open; the process ends with its standard input.
        while let Ok(event) = queue.recv() {
            match event {
                Event::Frame(number, frame, fds) if number == connection.number => {
                    self.frame(&connection, frame, fds)?;
                }
                Event::Gone(number) if number == connection.number => {
                    self.handle(&connection, EngineInput::AgentGone)?;
                    self.staging = None;
                    connection = self.connect()?;
                }
                Event::Frame(..) | Event::Gone(_) | Event::Command(_) | Event::Due => {}
            }
        }
        Ok(())
    }

    fn connect(&mut self) -> Result<Connection, ReferenceError> {
        self.connections += 1;
        let connection = Connection::open(&self.args.rank.socket, self.connections, self.events.clone())?;
        let EngineArgs { pool, replica, replica_rank, .. } = self.args;
        let (pool, replica, rank) = (pool.clone(), replica.clone(), Rank(*replica_rank));
        let role = Role::Engine { pool, replica, rank, record: self.client.record() };
        connection.send(&ClientFrame::Hello { protocol: PROTOCOL, instance: self.instance, role }, &[])?;
        let tensor = |recorded: &RecordedTensor| {
            let RecordedTensor { name, dtype, shape, pieces } = recorded.clone();
            Tensor { name, dtype, shape, at: None, pieces: self.args.record.then_some(pieces) }
        };
        let tensors = self.recorded.iter().map(tensor).collect();
        let device = self.context.as_ref().map(|context| context.device().uuid.clone());
        setup::pages(tensors, Vec::new(), device).iter().try_for_each(|page| connection.send(page, &[]))?;
        Ok(connection)
    }

    fn frame(
        &mut self,
        connection: &Connection,
        frame: AgentFrame,
        fds: Vec<OwnedFd>,
    ) -> Result<(), ReferenceError> {
        match frame {
            AgentFrame::Registered {} => say(&Told::Registered {}),
            AgentFrame::Staging { bytes, tensors, device } => {
                let [descriptor] = fds.as_slice() else {
                    return Err(ReferenceError::Staging("no descriptor"));
                };
                let (memory, twin) = match (device, &self.context) {
                    (None, _) => (Arc::new(Mapping::adopt(descriptor.as_fd(), "staging", bytes)?), None),
                    (Some(uuid), Some(context)) if uuid == context.device().uuid => {
                        let memory = Arc::new(create("copy of staging", bytes)?.1);
                        let twin = Twin::import(context, &memory, descriptor)?;
                        (memory, Some(twin))
                    }
                    (Some(_), _) => return Err(ReferenceError::Staging("it is on another device")),
                };
                let places = tensors.into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
                self.staging = Some(Staging { memory, twin, places });
                Ok(())
            }
            AgentFrame::Pause { round, .. } => self.handle(connection, EngineInput::Pause { round }),
            AgentFrame::Commit { round, version, .. } => {
                self.handle(connection, EngineInput::Commit { round, version })
            }
            AgentFrame::Resume { round, version } => {
                let before = self.client.serves();
                self.handle(connection, EngineInput::Resume { round, version })?;
                if !before && self.client.serves() { self.check(version) } else { Ok(()) }
            }
            AgentFrame::Abort { round } => self.handle(connection, EngineInput::Abort { round }),
            AgentFrame::Error { code, message, .. } => {
                tracing::error!(%code, message, "refused by the agent");
                Ok(())
            }
            frame => {
                tracing::debug!(?frame, "frame");
                Ok(())
            }
        }
    }

    /// Feeds the machine and does what it says, until nothing is left to do.
    fn handle(&mut self, connection: &Connection, input: EngineInput) -> Result<(), ReferenceError> {
        let mut inputs = vec![input];
        while let Some(input) = inputs.pop() {
            let mut actions = Vec::new();
            let before = self.client.record().state;
            self.client.handle(input, &mut actions);
            let state = self.client.record().state;
            if state != before {
                say(&Told::State { state })?;
            }
            for action in actions {
                match action {
                    EngineAction::Stop => {
                        if !self.args.ignore_pause {
                            self.gate.stop();
                        }
                        inputs.push(EngineInput::Stopped);
                    }
                    EngineAction::Copy(version) => {
                        let copied = self.copy(version);
                        if let Err(error) = &copied {
                            tracing::error!(%error, "commit failed");
                        }
                        inputs.push(if copied.is_ok() {
                            EngineInput::Copied
                        } else {
                            EngineInput::CopyFailed
                        });
                    }
                    EngineAction::Serve => self.gate.start(),
                    // Where nobody listens any more, the next hello carries the record.
                    EngineAction::Answer(answer) => connection.send(&frame_of(answer), &[])?,
                }
            }
        }
        Ok(())
    }

    fn copy(&self, version: Version) -> Result<(), ReferenceError> {
        let staging = self.staging.as_ref().ok_or(ReferenceError::Staging("no memory"))?;
        let place = |local: &super::shard::LocalShard| {
            let place = staging
                .places
                .get(&local.tensor.name)
                .ok_or(ReferenceError::Staging("no place for a tensor"))?;
            let end = place.offset.checked_add(place.bytes);
            let fits =
                place.bytes == local.bytes() as u64 && end.is_some_and(|end| end <= staging.memory.len());
            if fits { Ok(place.offset) } else { Err(ReferenceError::Staging("a place of another size")) }
        };
        staging.twin.as_ref().map_or(Ok(()), Twin::download)?;
        // All places are known before the first live byte is written.
        let places = self.shard.locals.iter().map(place).collect::<Result<Vec<_>, _>>()?;
        let stamp = Stamp::of(version);
        for (number, (tensor, offset)) in self.live.iter().zip(places).enumerate() {
            tensor.write(&staging.memory, offset, stamp);
            if number == 0 && self.args.ignore_pause && self.gate.is_open() {
                self.wait_for_steps();
            }
        }
        if self.args.corrupt_live
            && let Some(tensor) = self.live.first()
        {
            tensor.corrupt();
        }
        Ok(())
    }

    /// Until the forward loop has read what is half written.
    fn wait_for_steps(&self) {
        let before = self.counts.own.load(Ordering::Relaxed);
        for _ in 0..5000 {
            if self.counts.own.load(Ordering::Relaxed) > before + 1 {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Compares every live element with the file. The next pause waits for it, like for a forward step.
    fn check(&self, version: Version) -> Result<(), ReferenceError> {
        let mut sum = Comparison::default();
        for (local, live) in self.shard.locals.iter().zip(self.live.iter()) {
            sum.add(local.compare(Step(version.step), &live.snapshot()));
        }
        let Comparison { checked, mismatched, pads, pads_not_zero } = sum;
        let Version { run, step, .. } = version;
        say(&Told::Checked { run, step, checked, mismatched, pads, pads_not_zero })
    }
}

fn frame_of(answer: EngineAnswer) -> ClientFrame {
    match answer {
        EngineAnswer::Paused { round, record } => ClientFrame::Paused { round, record },
        EngineAnswer::Committed { round, record } => {
            ClientFrame::Committed { round, record, caches_invalidated: Vec::new() }
        }
        EngineAnswer::Resumed { round, record } => ClientFrame::Resumed { round, record },
        EngineAnswer::Aborted { round, record } => ClientFrame::Aborted { round, record },
        EngineAnswer::Failed { round, record, code } => {
            ClientFrame::Failed { round, record, message: code.sentence().to_owned() }
        }
    }
}
