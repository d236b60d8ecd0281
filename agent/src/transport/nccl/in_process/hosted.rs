//! What an executor has, and how it does what its agent orders.

use super::super::FlowError;
use super::super::communicator::Join;
use super::super::flow::{Direction, Job, Pair};
use super::super::gpu::Gpu;
use super::super::lane::id_of;
use super::super::preflight::{self, Settings};
use super::super::symbols::Nccl;
use super::super::worker::{Thread, Worker};
use super::{ExecutorError, ExecutorSettings, Shared};
use crate::executor::{HostMemory, Passed, Placements, RankMemory};
use crate::identity::draw_incarnation;
use crate::limits;
use crate::memory::{Mapping, MemoryError};
use crate::session::blocking::{self, BlockingError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeMap;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use weightrefit_core::code::Code;
use weightrefit_core::id::Incarnation;
use weightrefit_proto::socket::executor::{Device, Order, Said, TABLES, Table};
use weightrefit_proto::socket::{AgentFrame, ClientFrame, PROTOCOL, Role};

/// To the agent, from any thread.
#[derive(Debug)]
struct Writer {
    stream: Arc<UnixStream>,
    sending: Mutex<()>,
}

impl Writer {
    /// Where the agent does not listen, the end of the stream follows.
    fn say(&self, said: Said) {
        let _sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        if blocking::send(&self.stream, &ClientFrame::Said { said }, &[]).is_err() {
            // One that is reset is shut already.
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }
}

/// What the process has, and what its agent wants of it.
pub(super) struct Hosted {
    settings: ExecutorSettings,
    shared: Arc<Shared>,
    instance: Incarnation,
    nccl: Nccl,
    gpu: Arc<Gpu>,
    /// The rank's memories or why they cannot be mapped, and the number of that set.
    memory: (u64, Result<Vec<Arc<Mapping>>, MemoryError>),
    lanes: BTreeMap<u64, HostedLane>,
}

struct HostedLane {
    worker: Thread,
    programs: BTreeMap<u32, Passed>,
    /// Runs under way, with their bytes so far and those that were told.
    runs: Arc<Mutex<BTreeMap<u64, Progress>>>,
}

struct Progress {
    moved: Arc<AtomicU64>,
    told: u64,
}

impl Hosted {
    pub(super) fn open(settings: &ExecutorSettings, shared: &Arc<Shared>) -> Result<Self, ExecutorError> {
        let fabric = Settings {
            cuda: settings.cuda.clone(),
            nccl: settings.nccl.clone(),
            window_bytes: settings.window_bytes,
            ..Settings::default()
        };
        let gpu = preflight::own_gpu(&fabric, settings.device as usize)?;
        let nccl = preflight::nccl(&fabric)?;
        let instance =
            draw_incarnation().map_err(|error| ExecutorError::new(Code::Unsupported, error.to_string()))?;
        Ok(Self {
            settings: settings.clone(),
            shared: Arc::clone(shared),
            instance,
            nccl,
            gpu,
            memory: (0, Ok(Vec::new())),
            lanes: BTreeMap::new(),
        })
    }

    /// One connection to its end; calls `taken` when the agent has taken this, for which there may be a limit.
    pub(super) fn converse(
        &mut self,
        taken: impl FnOnce(),
        until: Option<Instant>,
    ) -> Result<(), ExecutorError> {
        let absent = |error: std::io::Error| {
            let text = format!("no agent at {}: {error}", self.settings.socket.display());
            ExecutorError::new(Code::PeerLost, text)
        };
        let stream = Arc::new(UnixStream::connect(&self.settings.socket).map_err(absent)?);
        // What is not taken in this time never will be.
        stream.set_write_timeout(Some(limits::FRAME_WRITE_TIMEOUT)).map_err(absent)?;
        let writer = Arc::new(Writer { stream: Arc::clone(&stream), sending: Mutex::default() });
        {
            let mut state = self.shared.lock();
            if state.is_stopping {
                return Ok(());
            }
            state.stream = Some(Arc::clone(&stream));
        }
        let device = Device {
            gpu: self.gpu.context().device().uuid.clone(),
            nccl: self.nccl.version().0,
            shares_gpu: preflight::shares_gpu(),
            window_bytes: self.gpu.window_bytes(),
        };
        let role = Role::Executor { seat: self.settings.seat.clone(), tables: TABLES, device };
        let hello = ClientFrame::Hello { protocol: PROTOCOL, instance: self.instance, role };
        blocking::send(&stream, &hello, &[]).map_err(broke)?;
        let mut taken = Some(taken);
        if let Some(error) = self.shared.lock().error.clone() {
            writer.say(Said::Wedged { message: error.text });
        }
        loop {
            self.wait(&stream, &writer, until.filter(|_| taken.is_some()))?;
            let Some((frame, fds)) = blocking::receive(&stream).map_err(broke)? else {
                let gone = ExecutorError::new(Code::PeerLost, "the agent ended the connection");
                return if taken.is_none() { Ok(()) } else { Err(gone) };
            };
            match frame {
                AgentFrame::Welcome { .. } => {}
                AgentFrame::Registered {} => {
                    if let Some(taken) = taken.take() {
                        taken();
                    }
                }
                AgentFrame::Order { order } => self.obey(order, fds, &writer)?,
                AgentFrame::Error { code, message, hint, .. } => {
                    return Err(ExecutorError::new(code, format!("{message} ({hint})")));
                }
                _ => return Err(ExecutorError::new(Code::Unsupported, "the agent takes this for another")),
            }
        }
    }

    /// Waits for a frame, and tells of bytes meanwhile.
    fn wait(
        &self,
        stream: &UnixStream,
        writer: &Writer,
        until: Option<Instant>,
    ) -> Result<(), ExecutorError> {
        let interval = i64::from(limits::PROGRESS_INTERVAL.subsec_nanos());
        let interval = Timespec { tv_sec: 0, tv_nsec: interval };
        loop {
            if until.is_some_and(|until| Instant::now() >= until) {
                return Err(ExecutorError::new(Code::PeerLost, "the agent did not answer in time"));
            }
            let mut ready = [PollFd::new(stream, PollFlags::IN)];
            // Only this thread begins runs, so while there are none there is nothing to tell.
            let is_idle = self.lanes.values().all(|lane| lock(&lane.runs).is_empty());
            let pause = (!is_idle || until.is_some()).then_some(&interval);
            let polled = rustix::io::retry_on_intr(|| poll(&mut ready, pause));
            if polled.map_err(|error| broke(BlockingError::Io(error.into())))? > 0 {
                return Ok(());
            }
            for (number, lane) in &self.lanes {
                for (run, progress) in lock(&lane.runs).iter_mut() {
                    let bytes = progress.moved.load(Ordering::Relaxed);
                    if bytes != progress.told {
                        progress.told = bytes;
                        writer.say(Said::Moved { lane: *number, run: *run, bytes });
                    }
                }
            }
        }
    }

    fn obey(&mut self, order: Order, fds: Vec<OwnedFd>, writer: &Arc<Writer>) -> Result<(), ExecutorError> {
        let writer = Arc::clone(writer);
        match order {
            Order::Mint { request } => {
                writer.say(match self.nccl.unique_id() {
                    Ok(id) => Said::Minted { request, id: id.into() },
                    Err(error) => {
                        let message = error.to_string();
                        Said::NotMinted { request, code: Code::NcclError, message }
                    }
                });
            }
            Order::Memory { set, first, bytes, writable } => self.map(set, first, &bytes, writable, &fds)?,
            Order::Tables { lane, tables } => {
                let programs = read(&tables, &fds)?;
                self.lane(lane, &writer)?.programs.extend(programs);
            }
            Order::Form { lane, attempt, id, rank, ranks, degree, ctas_max, chunk_bytes } => {
                let failed = move |code, message| Said::NotFormed { lane, attempt, code, message };
                if let Some(error) = self.shared.lock().error.clone() {
                    writer.say(failed(error.code, error.text));
                    return Ok(());
                }
                let id = id_of(&id).ok_or_else(|| malformed("an id"))?;
                let join = Join { id, rank, ranks, degree, ctas_max };
                let said = Arc::clone(&writer);
                let done = Box::new(move |result: Result<(), FlowError>| match result {
                    Ok(()) => said.say(Said::Formed { lane, attempt }),
                    Err(error) => said.say(failed(error.code(), error.to_string())),
                });
                self.lane(lane, &writer)?.worker.form(attempt, join, chunk_bytes, done);
            }
            Order::Run { lane, attempt, run, send, set, peers, timeout_ms } => {
                let deadline = Instant::now() + Duration::from_millis(timeout_ms);
                let direction = send.map_or(Direction::Receive, Direction::Send);
                let moved = Arc::new(AtomicU64::new(0));
                let job = self.job(lane, set, &peers, direction, deadline, Arc::clone(&moved));
                let hosted = self.lane(lane, &writer)?;
                let runs = Arc::clone(&hosted.runs);
                lock(&runs).insert(run, Progress { moved, told: 0 });
                let done = Box::new(move |result: Result<u64, FlowError>| {
                    // First, so that no progress is told after the end.
                    lock(&runs).remove(&run);
                    writer.say(match result {
                        Ok(bytes) => Said::Ran { lane, run, bytes },
                        Err(error) => {
                            Said::NotRan { lane, run, code: error.code(), message: error.to_string() }
                        }
                    });
                });
                match job {
                    Ok(job) => hosted.worker.run(attempt, job, Box::new(|| false), done),
                    // Nothing of the attempt has begun, but its other ranks wait for this one.
                    Err(error) => {
                        hosted.worker.abort(attempt, None, Box::new(|| {}));
                        done(Err(FlowError::Remote { code: error.code, detail: error.text }));
                    }
                }
            }
            Order::Abort { lane, attempt } => {
                let done = Box::new(move || writer.say(Said::Aborted { lane, attempt }));
                match self.lanes.get(&lane) {
                    Some(hosted) => hosted.worker.abort(attempt, None, done),
                    None => done(),
                }
            }
            Order::Close { lane } => drop(self.lanes.remove(&lane)),
        }
        Ok(())
    }

    fn lane(&mut self, number: u64, writer: &Arc<Writer>) -> Result<&mut HostedLane, ExecutorError> {
        if !self.lanes.contains_key(&number) {
            let (shared, writer) = (Arc::clone(&self.shared), Arc::clone(writer));
            let on_wedge = Box::new(move || {
                let text = "a communicator could not be ended in time: its kernels may run for ever on the GPU of \
                            this process, which must end";
                shared.fail(ExecutorError::new(Code::AgentWedged, text));
                writer.say(Said::Wedged { message: text.to_owned() });
            });
            let name = format!("nccl-{number}");
            let worker = Thread::start(self.nccl.clone(), Arc::clone(&self.gpu), name, on_wedge)
                .map_err(|error| ExecutorError::new(Code::Unsupported, error.to_string()))?;
            let lane = HostedLane { worker, programs: BTreeMap::new(), runs: Arc::default() };
            self.lanes.insert(number, lane);
        }
        self.lanes.get_mut(&number).ok_or_else(|| malformed("a lane"))
    }

    fn map(
        &mut self,
        set: u64,
        first: u32,
        bytes: &[u64],
        writable: bool,
        fds: &[OwnedFd],
    ) -> Result<(), ExecutorError> {
        if set != self.memory.0 {
            self.memory = (set, Ok(Vec::new()));
        }
        // The run that needs what cannot be mapped says so.
        let Ok(mappings) = &mut self.memory.1 else { return Ok(()) };
        let fits = mappings.len() == first as usize
            && bytes.len() == fds.len()
            && mappings.len() + bytes.len() <= limits::REGISTRATION_MEMORIES_MAX;
        if !fits {
            return Err(malformed("memory"));
        }
        for (bytes, fd) in bytes.iter().zip(fds) {
            let name = format!("memory {}", mappings.len());
            let mapping = match writable {
                true => Mapping::adopt_for_writing(fd.as_fd(), &name, *bytes),
                false => Mapping::adopt(fd.as_fd(), &name, *bytes),
            };
            match mapping {
                Ok(mapping) => mappings.push(Arc::new(mapping)),
                Err(error) => {
                    self.memory.1 = Err(error);
                    break;
                }
            }
        }
        Ok(())
    }

    fn job(
        &self,
        lane: u64,
        set: u64,
        peers: &[u32],
        direction: Direction,
        deadline: Instant,
        moved: Arc<AtomicU64>,
    ) -> Result<Job, ExecutorError> {
        let unfit = || {
            let text = "the rank's memory is not that of the tables that were passed";
            ExecutorError::new(Code::Unsupported, text)
        };
        let of = Some(&self.memory).filter(|(of, _)| *of == set).ok_or_else(unfit)?;
        let mappings = of.1.clone().map_err(|error| ExecutorError::new(error.code(), error.to_string()))?;
        let memory = HostMemory::new(mappings, Arc::new(Placements::none())).map_err(|_| unfit())?;
        let programs = self.lanes.get(&lane).map(|lane| &lane.programs).ok_or_else(unfit)?;
        let pair = |peer: &u32| {
            let passed = programs.get(peer).filter(|passed| passed.fits(&memory))?;
            Some(Pair { peer: *peer, program: Arc::clone(passed.program()) })
        };
        let pairs = peers.iter().map(pair).collect::<Option<Vec<_>>>().ok_or_else(unfit)?;
        if matches!(direction, Direction::Receive) && memory.mappings().len() != 1 {
            return Err(unfit());
        }
        Ok(Job { direction, memory: RankMemory::from(memory), pairs, deadline, moved })
    }

    /// Ends all lanes, and lets go of the rank's memory (N2).
    pub(super) fn end_all(&mut self) {
        let ended: Vec<Receiver<()>> = self
            .lanes
            .values()
            .map(|lane| {
                let (done, wait) = channel();
                let done = move || {
                    // Nobody waits any more where that took too long.
                    let _ = done.send(());
                };
                lane.worker.abort_current(Box::new(done));
                wait
            })
            .collect();
        let until = Instant::now() + 3 * limits::ABORT_MAX;
        for wait in ended {
            // A wedged one drops what it would have called, and has told.
            let _ = wait.recv_timeout(until.saturating_duration_since(Instant::now()));
        }
        self.lanes.clear();
        if let Some(stream) = self.shared.lock().stream.take() {
            // One that its peer has reset is shut already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.memory = (0, Ok(Vec::new()));
        self.gpu.forget_shard();
    }
}

/// Reads passed programs: tables one after the other on one descriptor.
fn read(tables: &[Table], fds: &[OwnedFd]) -> Result<Vec<(u32, Passed)>, ExecutorError> {
    let [fd] = fds else { return Err(malformed("tables")) };
    let total = tables.iter().try_fold(0_u64, |all, table| all.checked_add(table.bytes));
    let total = total.ok_or_else(|| malformed("tables"))?;
    let mapping = Mapping::adopt(fd.as_fd(), "tables", total).map_err(|_| malformed("tables"))?;
    let mut at = 0;
    let mut out = Vec::with_capacity(tables.len());
    for table in tables {
        // No longer than the mapping, so it has room in memory.
        let mut bytes = vec![0; table.bytes as usize];
        mapping.read(at, &mut bytes);
        at += table.bytes;
        out.push((table.peer, Passed::read(&bytes).ok_or_else(|| malformed("a table"))?));
    }
    Ok(out)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn malformed(what: &str) -> ExecutorError {
    ExecutorError::new(Code::Unsupported, format!("the agent passed {what} that is none"))
}

fn broke(error: BlockingError) -> ExecutorError {
    let code = match error {
        BlockingError::Io(_) => Code::PeerLost,
        BlockingError::Frame(_) | BlockingError::Descriptors => Code::Unsupported,
    };
    ExecutorError::new(code, error.to_string())
}
