//! The reference trainer: training ranks of one process. Each holds its shard of a weights file in a sealed memory, and
//! for each `publish STEP` on standard input, or every so many seconds, changes the shard in place, publishes, and waits
//! until the memory is its own again.

use super::device::{self, Twin};
use super::input::{self, Commands};
use super::rule::Step;
use super::shard::Shard;
use super::socket::{Connection, Event};
use super::{RankArgs, ReferenceError, say, setup};
use crate::cuda::Context;
use crate::memory::{self, Mapping};
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};
use weightrefit_core::code::Policy;
use weightrefit_core::id::{Incarnation, Rank};
use weightrefit_proto::reference::Told;
use weightrefit_proto::socket::{AgentFrame, ClientFrame, Memory, MemoryAt, PROTOCOL, Role, Tensor};

/// Before a publish that was refused for now is sent again.
const RETRY: Duration = Duration::from_millis(100);

/// Where tensors begin in the memory: a cache line.
const ALIGNMENT: u64 = 64;

/// Settings beside those that every rank has.
#[derive(Debug, Clone, clap::Args)]
pub struct TrainerArgs {
    #[command(flatten)]
    rank: RankArgs,
    /// Which training rank. Repeat for several.
    #[arg(long = "training-rank", required = true)]
    training_ranks: Vec<u32>,
    /// Token that all ranks of one start of the trainer share; drawn where this process has all of them.
    #[arg(long, required_unless_present = "unattended")]
    world: Option<String>,
    /// Publish a step so many seconds after the one before; by itself it publishes none.
    #[arg(long, value_name = "SECONDS", requires = "unattended")]
    every: Option<u64>,
    /// Publish weights of the next step under each step's number, as a trainer with a wrong rule would.
    #[arg(long)]
    wrong_rule: bool,
}

/// Runs until its input ends, or until a rank cannot go on.
pub(super) fn run(args: &TrainerArgs) -> Result<(), ReferenceError> {
    let channels: Vec<_> = args.training_ranks.iter().map(|rank| (Rank(*rank), mpsc::channel())).collect();
    let commanded = channels.iter().map(|(_, (events, _))| events.clone()).collect();
    input::read_commands(Commands::To(commanded), &args.rank)?;
    let refit = setup::Refit::read(&args.rank)?;
    let world = match &args.world {
        Some(world) => world.clone(),
        None => crate::identity::draw_incarnation()?.to_string(),
    };
    let (ended, first) = mpsc::channel();
    for (rank, (events, queue)) in channels {
        let shard = refit.training_shard(rank)?;
        let trainer = Trainer::new(args.clone(), (rank, world.clone()), shard, events)?;
        let ended = ended.clone();
        // Nobody listens any more where another rank has ended first.
        std::thread::spawn(move || drop(ended.send(trainer.run(&queue))));
    }
    // Ranks of a trainer live and die together.
    first.recv().unwrap_or(Ok(()))
}

struct Trainer {
    args: TrainerArgs,
    rank: Rank,
    world: String,
    shard: Shard,
    /// First byte of each local tensor in the memory.
    offsets: Vec<u64>,
    memory: Arc<Mapping>,
    /// On the device, where the rank keeps its tensors there, and the UUID of that.
    twin: Option<(Twin, String)>,
    descriptor: OwnedFd,
    bytes: u64,
    instance: Incarnation,
    events: Sender<Event>,
    connections: u64,
}

impl Trainer {
    fn new(
        args: TrainerArgs,
        (rank, world): (Rank, String),
        shard: Shard,
        events: Sender<Event>,
    ) -> Result<Self, ReferenceError> {
        let mut bytes = 0;
        let mut offsets = Vec::new();
        for local in &shard.locals {
            offsets.push(bytes);
            bytes += (local.bytes() as u64).next_multiple_of(ALIGNMENT);
        }
        let (descriptor, memory) = memory::create("weightrefit-trainer", bytes)?;
        let memory = Arc::new(memory);
        let context = device::context(&args.rank)?;
        let twin = |context: &Context| {
            Ok::<_, ReferenceError>((Twin::take(context, &memory)?, context.device().uuid.clone()))
        };
        let twin = context.as_ref().map(twin).transpose()?;
        let descriptor = match &twin {
            Some((twin, _)) => twin.descriptor()?,
            None => descriptor,
        };
        let instance = crate::identity::draw_incarnation()?;
        Ok(Self {
            args,
            rank,
            world,
            shard,
            offsets,
            memory,
            twin,
            descriptor,
            bytes,
            instance,
            events,
            connections: 0,
        })
    }

    fn run(mut self, queue: &Receiver<Event>) -> Result<(), ReferenceError> {
        say(&Told::Loaded { bytes: self.bytes })?;
        let mut connection = self.connect(None)?;
        let mut registered = false;
        let mut offered = None;
        let mut commands = VecDeque::new();
        let mut last = 0;
        let every = self.args.every.map(Duration::from_secs);
        let mut due = every.map(|every| Instant::now() + every);
        // The sender in `self` keeps the channel open; the process ends with its input.
        while let Some(event) = next_event(queue, due) {
            match event {
                Event::Due => {
                    due = None;
                    commands.push_back(last + 1);
                }
                Event::Command(line) => commands.push_back(input::publish_step(&line)?),
                Event::Frame(number, frame, _) if number == connection.number => match frame {
                    AgentFrame::Registered {} => {
                        registered = true;
                        say(&Told::Registered {})?;
                        if let Some(step) = offered {
                            self.publish(&connection, step)?;
                        }
                    }
                    AgentFrame::Released { step, .. } if offered == Some(step) => {
                        offered = None;
                        say(&Told::Released { step })?;
                    }
                    AgentFrame::PublishRefused { step, code, .. } if code.policy() == Policy::Retry => {
                        std::thread::sleep(RETRY);
                        self.publish(&connection, step)?;
                    }
                    AgentFrame::PublishRefused { step, code, message, .. } => {
                        offered = None;
                        say(&Told::PublishRefused { step, code, message })?;
                    }
                    AgentFrame::Error { code, message, .. } => {
                        tracing::error!(%code, message, "refused by the agent")
                    }
                    frame => tracing::debug!(?frame, "frame"),
                },
                Event::Gone(number) if number == connection.number => {
                    registered = false;
                    connection = self.connect(offered)?;
                }
                Event::Frame(..) | Event::Gone(_) => {}
            }
            // While a step is offered its memory is not the trainer's.
            if offered.is_none()
                && let Some(step) = commands.pop_front()
            {
                self.train(Step(step))?;
                last = step;
                offered = Some(step);
                if registered {
                    self.publish(&connection, step)?;
                }
            }
            if offered.is_none() && commands.is_empty() && due.is_none() {
                due = every.map(|every| Instant::now() + every);
            }
        }
        Ok(())
    }

    /// Changes every weight in place, as an optimizer would.
    fn train(&self, step: Step) -> Result<(), ReferenceError> {
        let step = if self.args.wrong_rule { Step(step.0 + 1) } else { step };
        for (local, offset) in self.shard.locals.iter().zip(&self.offsets) {
            self.memory.write(*offset, &local.at(step));
        }
        self.twin.as_ref().map_or(Ok(()), |(twin, _)| Ok(twin.upload()?))
    }

    /// Where nobody listens any more, the step is published again on the next connection.
    fn publish(&self, connection: &Connection, step: i64) -> Result<(), ReferenceError> {
        Ok(connection.send(&ClientFrame::Publish { step, world: self.world.clone(), extras: None }, &[])?)
    }

    /// Connects and registers; `outstanding` is the step that waits for its release.
    fn connect(&mut self, outstanding: Option<i64>) -> Result<Connection, ReferenceError> {
        self.connections += 1;
        let connection = Connection::open(&self.args.rank.socket, self.connections, self.events.clone())?;
        let (rank, world) = (self.rank, self.world.clone());
        let role = Role::Trainer { rank, world, outstanding };
        connection.send(&ClientFrame::Hello { protocol: PROTOCOL, instance: self.instance, role }, &[])?;
        let tensors: Vec<Tensor> = (self.shard.locals.iter().zip(&self.offsets))
            .map(|(local, offset)| Tensor {
                name: local.tensor.name.clone(),
                dtype: local.tensor.dtype,
                shape: local.tensor.shape.clone(),
                at: Some(MemoryAt { memory: 0, offset: *offset }),
                pieces: None,
            })
            .collect();
        let device = self.twin.as_ref().map(|(_, uuid)| uuid.clone());
        let memories = vec![Memory { bytes: self.bytes, device }];
        for (page, frame) in setup::pages(tensors, memories, None).iter().enumerate() {
            let fds = if page == 0 { vec![self.descriptor.as_fd()] } else { Vec::new() };
            connection.send(frame, &fds)?;
        }
        Ok(connection)
    }
}

/// The next event, or that it is time; nothing where no event can come any more.
fn next_event(queue: &Receiver<Event>, due: Option<Instant>) -> Option<Event> {
    let Some(due) = due else { return queue.recv().ok() };
    match queue.recv_timeout(due.saturating_duration_since(Instant::now())) {
        Ok(event) => Some(event),
        Err(RecvTimeoutError::Timeout) => Some(Event::Due),
        Err(RecvTimeoutError::Disconnected) => None,
    }
}
