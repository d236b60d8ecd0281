//! An executor in a rank's own process, as its agent drives it over the agent socket.
//!
//! P1: what is asked is answered once: by the executor, or by its end.
//! P2: the executor's end is told only by the agent socket, whose stream ends after the process has or after this agent
//!     gave it up; memory that it may write is then used no more ([`crate::rounds`] makes staging anew).
//! P3: of a run that was stopped nothing is said before the executor has ended it.

use super::FlowError;
use super::communicator::Join;
use super::flow::{Direction, Job};
use super::lane::{Facts, LanePlan, Reason, id_of};
use super::symbols::UniqueId;
use super::worker::{Done, Ended, Stopped, Worker};
use crate::executor::{HostMemory, Program, ShadowError};
use crate::limits;
use crate::memory::{self, Mapping, MemoryError};
use crate::session::{ClientId, Outbox};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use weightrefit_core::code::Code;
use weightrefit_proto::socket::AgentFrame;
use weightrefit_proto::socket::executor::{Device, Order, Said, Table};

/// A stop is seen this soon.
const LOOK: Duration = Duration::from_millis(20);

/// An executor, by its connection.
#[derive(Debug)]
pub(super) struct Remote {
    pub(super) client: ClientId,
    device: Device,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// `None` once nothing more will come.
    outbox: Option<Outbox>,
    /// Why it can do nothing more, where it said so.
    wedged: Option<Reason>,
    lanes: BTreeMap<u64, Pending>,
    minting: BTreeMap<u64, Sender<Result<UniqueId, Reason>>>,
    /// The last number given: of requests, lanes, runs and sets.
    last: u64,
    /// What it has mapped, and the number of that set.
    memory: (u64, Vec<Weak<Mapping>>),
}

/// What a lane waits for.
#[derive(Default)]
struct Pending {
    /// The programs that the executor has, by peer.
    programs: BTreeMap<u32, Weak<Program>>,
    forming: Option<(u32, Done<()>)>,
    runs: BTreeMap<u64, Running>,
    ending: Vec<(u32, Ended)>,
    /// Nobody has it any more; it is forgotten once its runs are over.
    is_closed: bool,
}

struct Running {
    answer: Sender<Result<u64, FlowError>>,
    moved: Arc<AtomicU64>,
}

impl std::fmt::Debug for Pending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending").field("runs", &self.runs.len()).finish_non_exhaustive()
    }
}

impl State {
    fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Where it cannot be said, the executor's end follows, which answers all that waits (P1).
    fn order(&self, order: Order, fds: Vec<OwnedFd>) {
        let Some(outbox) = &self.outbox else { return };
        if outbox.send(AgentFrame::Order { order }, fds).is_err() {
            tracing::warn!("an executor does not read its orders");
            outbox.end();
        }
    }
}

impl Remote {
    pub(super) fn new(client: ClientId, device: Device, outbox: Outbox) -> Arc<Self> {
        let state = State {
            outbox: Some(outbox),
            wedged: None,
            lanes: BTreeMap::new(),
            minting: BTreeMap::new(),
            last: 0,
            memory: (0, Vec::new()),
        };
        Arc::new(Self { client, device, state: Mutex::new(state) })
    }

    /// What its rank brings to a lane.
    pub(super) fn facts(&self, plan: &LanePlan) -> Result<Facts, Reason> {
        match &self.lock().wedged {
            Some(reason) => Err(reason.clone()),
            None => {
                let Device { gpu, nccl, shares_gpu, window_bytes } = self.device.clone();
                Ok(Facts::new(nccl, gpu, shares_gpu, window_bytes, plan))
            }
        }
    }

    /// A new id; waits for it.
    pub(super) fn mint(&self) -> Result<UniqueId, Reason> {
        let (answer, wait) = channel();
        let mut state = self.lock();
        let request = state.number();
        state.minting.insert(request, answer);
        state.order(Order::Mint { request }, Vec::new());
        if state.outbox.is_none() {
            return Err(gone());
        }
        drop(state);
        wait.recv_timeout(limits::MINT_MAX).unwrap_or_else(|_| Err(gone()))
    }

    /// A lane of it.
    pub(super) fn lane(self: &Arc<Self>, name: String) -> Lane {
        let mut state = self.lock();
        let number = state.number();
        state.lanes.insert(number, Pending::default());
        drop(state);
        Lane { remote: Arc::clone(self), number, name, latest: AtomicU32::new(0), over: Arc::default() }
    }

    /// Takes what the executor says.
    pub(super) fn hear(&self, said: Said) {
        let mut state = self.lock();
        match said {
            Said::Minted { request, id } => {
                let minted = id_of(&id).ok_or_else(|| Reason::new(Code::Unsupported, "that is no id"));
                answer(state.minting.remove(&request), minted);
            }
            Said::NotMinted { request, code, message } => {
                answer(state.minting.remove(&request), Err(Reason::new(code, message)));
            }
            Said::Formed { lane, attempt } => state.formed(lane, attempt, Ok(())).call(state),
            Said::NotFormed { lane, attempt, code, message } => {
                let failed = Err(FlowError::Remote { code, detail: message });
                state.formed(lane, attempt, failed).call(state);
            }
            Said::Moved { lane, run, bytes } => {
                let running = state.lanes.get(&lane).and_then(|lane| lane.runs.get(&run));
                if let Some(running) = running {
                    running.count(bytes);
                }
            }
            Said::Ran { lane, run, bytes } => {
                let running = state.run_of(lane, run);
                if let Some(running) = &running {
                    running.count(bytes);
                }
                answer(running.map(|running| running.answer), Ok(bytes));
            }
            Said::NotRan { lane, run, code, message } => {
                let failed = Err(FlowError::Remote { code, detail: message });
                answer(state.run_of(lane, run).map(|running| running.answer), failed);
            }
            Said::Aborted { lane, attempt } => {
                let ending = state.lanes.get_mut(&lane).map(|lane| &mut lane.ending);
                let over = |(of, _): &mut (u32, Ended)| *of <= attempt;
                let ended: Vec<_> = ending.map(|all| all.extract_if(.., over).collect()).unwrap_or_default();
                drop(state);
                ended.into_iter().for_each(|(_, done)| done());
            }
            Said::Wedged { message } => {
                state.wedged = Some(Reason::new(Code::AgentWedged, message));
                // They will never be over. What kernels may still write is the executor's alone, and not used again.
                let lanes = state.lanes.values_mut();
                let ended: Vec<_> = lanes.flat_map(|lane| std::mem::take(&mut lane.ending)).collect();
                drop(state);
                ended.into_iter().for_each(|(_, done)| done());
            }
        }
    }

    /// Nothing more comes from it: all that waits is over.
    pub(super) fn end(&self) {
        let mut state = self.lock();
        state.outbox = None; // its socket closes
        state.minting.clear();
        let lanes = std::mem::take(&mut state.lanes);
        drop(state);
        for lane in lanes.into_values() {
            if let Some((_, done)) = lane.forming {
                done(Err(FlowError::Gone));
            }
            lane.runs.into_values().for_each(|running| answer(Some(running.answer), Err(FlowError::Gone)));
            lane.ending.into_iter().for_each(|(_, done)| done());
        }
    }

    /// It is silent where it must answer: its connection ends.
    fn give_up(&self) {
        if let Some(outbox) = &self.lock().outbox {
            tracing::error!(code = %Code::AgentWedged, gpu = self.device.gpu, "an executor does not answer");
            outbox.end();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn gone() -> Reason {
    Reason::new(Code::PeerLost, "the executor in the rank's process is gone")
}

/// Nobody waits any more where the run or request is over.
fn answer<T>(to: Option<Sender<T>>, with: T) {
    if let Some(to) = to {
        let _ = to.send(with);
    }
}

/// A callback that is called without the lock.
struct Formed(Option<(Done<()>, Result<(), FlowError>)>);

impl Formed {
    fn call(self, state: MutexGuard<'_, State>) {
        drop(state);
        if let Some((done, result)) = self.0 {
            done(result);
        }
    }
}

impl State {
    fn formed(&mut self, lane: u64, attempt: u32, result: Result<(), FlowError>) -> Formed {
        let forming = self.lanes.get_mut(&lane).map(|lane| &mut lane.forming);
        let forming = forming.and_then(|forming| forming.take_if(|(of, _)| *of == attempt));
        Formed(forming.map(|(_, done)| (done, result)))
    }

    fn run_of(&mut self, lane: u64, run: u64) -> Option<Running> {
        let pending = self.lanes.get_mut(&lane)?;
        let running = pending.runs.remove(&run);
        if pending.is_closed && pending.runs.is_empty() {
            self.lanes.remove(&lane);
        }
        running
    }

    /// Shows a rank's memory, where the executor has another; its number.
    fn show(&mut self, memory: &HostMemory) -> std::io::Result<u64> {
        let mappings = memory.mappings();
        let same = |(seen, mapping): (&Weak<Mapping>, &Arc<Mapping>)| seen.as_ptr() == Arc::as_ptr(mapping);
        if self.memory.1.len() == mappings.len() && self.memory.1.iter().zip(mappings).all(same) {
            return Ok(self.memory.0);
        }
        let set = self.number();
        for (page, mappings) in mappings.chunks(limits::FRAME_FDS_MAX).enumerate() {
            let first = u32::try_from(page * limits::FRAME_FDS_MAX).unwrap_or(u32::MAX);
            let bytes = mappings.iter().map(|mapping| mapping.len()).collect();
            let writable = mappings.iter().all(|mapping| mapping.is_writable());
            let fds = mappings.iter().map(|mapping| mapping.file().try_clone_to_owned());
            let fds = fds.collect::<std::io::Result<Vec<_>>>()?;
            self.order(Order::Memory { set, first, bytes, writable }, fds);
        }
        self.memory = (set, mappings.iter().map(Arc::downgrade).collect());
        Ok(set)
    }

    /// Passes the programs of a job that the executor does not have.
    fn pass(&mut self, number: u64, job: &Job) -> Result<(), MemoryError> {
        let Some(lane) = self.lanes.get_mut(&number) else { return Ok(()) };
        let (mut tables, mut all) = (Vec::new(), Vec::new());
        for pair in &job.pairs {
            let seen = lane.programs.get(&pair.peer).map(Weak::as_ptr);
            if seen != Some(Arc::as_ptr(&pair.program)) {
                let table = pair.program.pass();
                tables.push(Table { peer: pair.peer, bytes: table.len() as u64 });
                all.extend(table);
                lane.programs.insert(pair.peer, Arc::downgrade(&pair.program));
            }
        }
        if tables.is_empty() {
            return Ok(());
        }
        let (fd, mapping) = memory::create("tables", all.len() as u64)?;
        mapping.write(0, &all);
        self.order(Order::Tables { lane: number, tables }, vec![fd]);
        Ok(())
    }
}

impl Running {
    fn count(&self, bytes: u64) {
        self.moved.fetch_max(bytes, Ordering::Relaxed);
    }
}

/// A lane of an executor in the rank's process.
#[derive(Debug)]
pub(super) struct Lane {
    remote: Arc<Remote>,
    number: u64,
    name: String,
    /// The attempt that was joined last.
    latest: AtomicU32,
    over: Arc<Mutex<Over>>,
}

/// Attempts up to this one are over, and what another rank said of itself that ended the last.
#[derive(Debug, Default)]
struct Over {
    attempt: u32,
    reason: Option<Reason>,
}

impl Over {
    /// What ended an attempt that is over; `None` where it is not.
    fn why(&self, attempt: u32) -> Option<FlowError> {
        (self.attempt >= attempt).then(|| match &self.reason {
            Some(Reason { code, text }) if self.attempt == attempt => {
                FlowError::Ended { code: *code, detail: text.clone() }
            }
            _ => FlowError::Gone,
        })
    }
}

fn lock(over: &Mutex<Over>) -> MutexGuard<'_, Over> {
    over.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Worker for Lane {
    fn form(&self, attempt: u32, join: Join, chunk: u64, done: Done<()>) {
        self.latest.store(attempt, Ordering::Relaxed);
        let Join { id, rank, ranks, degree, ctas_max } = join;
        let order = Order::Form {
            lane: self.number,
            attempt,
            id: id.into(),
            rank,
            ranks,
            degree,
            ctas_max,
            chunk_bytes: chunk,
        };
        let mut state = self.remote.lock();
        let Some(lane) = state.lanes.get_mut(&self.number) else {
            drop(state);
            return done(Err(FlowError::Gone));
        };
        lane.forming = Some((attempt, done));
        state.order(order, Vec::new());
    }

    fn run(&self, attempt: u32, job: Job, stopped: Stopped, done: Done<u64>) {
        let (remote, number, over) = (Arc::clone(&self.remote), self.number, Arc::clone(&self.over));
        let run = Run { remote, number, attempt, over };
        let spawned = std::thread::Builder::new().name(self.name.clone());
        let shared = Arc::new(Mutex::new(Some(done)));
        let called = Arc::clone(&shared);
        let call = move |result| {
            if let Some(done) = called.lock().unwrap_or_else(PoisonError::into_inner).take() {
                done(result);
            }
        };
        let failed = call.clone();
        let spawned = spawned.spawn(move || {
            let result = run.wait(&job, &stopped);
            drop(job); // its memory is not used any more when its end is told
            call(result);
        });
        if let Err(error) = spawned {
            failed(Err(FlowError::Remote { code: Code::TransportUnavailable, detail: error.to_string() }));
        }
    }

    fn abort(&self, attempt: u32, reason: Option<Reason>, done: Ended) {
        let mut over = lock(&self.over);
        if attempt >= over.attempt {
            *over = Over { attempt, reason };
        }
        drop(over);
        let mut state = self.remote.lock();
        let Some(lane) = state.lanes.get_mut(&self.number) else {
            drop(state);
            return done();
        };
        lane.ending.push((attempt, done));
        state.order(Order::Abort { lane: self.number, attempt }, Vec::new());
    }

    fn abort_current(&self, done: Ended) {
        self.abort(self.latest.load(Ordering::Relaxed), None, done);
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let mut state = self.remote.lock();
        let Some(lane) = state.lanes.get_mut(&self.number) else { return };
        // Who waits for a lane that nobody has any more, waits for nothing, but its runs are told when they are over.
        let waiting = (lane.forming.take(), std::mem::take(&mut lane.ending));
        lane.is_closed = true;
        if lane.runs.is_empty() {
            state.lanes.remove(&self.number);
        }
        state.order(Order::Close { lane: self.number }, Vec::new());
        drop(state);
        drop(waiting);
    }
}

/// A run that is under way.
struct Run {
    remote: Arc<Remote>,
    number: u64,
    attempt: u32,
    over: Arc<Mutex<Over>>,
}

impl Run {
    fn wait(&self, job: &Job, stopped: &Stopped) -> Result<u64, FlowError> {
        let unable = |error: ShadowError| FlowError::Remote { code: error.code(), detail: error.to_string() };
        // What lies on a device of this agent goes by the host: its memory is not the executor's.
        let memory = match job.direction {
            Direction::Send(round) => job.memory.pull(round),
            Direction::Receive => job.memory.fill(),
        };
        let wait = self.begin(job, &memory.map_err(unable)?)?;
        let (mut is_stopped, mut silent) = (false, job.deadline + 2 * limits::ABORT_MAX);
        let result = loop {
            match wait.recv_timeout(LOOK) {
                Ok(result) => break result,
                Err(RecvTimeoutError::Disconnected) => break Err(FlowError::Gone),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if !is_stopped && stopped() {
                is_stopped = true;
                silent = Instant::now() + 2 * limits::ABORT_MAX;
                let order = Order::Abort { lane: self.number, attempt: self.attempt };
                self.remote.lock().order(order, Vec::new());
            }
            if Instant::now() >= silent {
                self.remote.give_up(); // its end answers
                silent += limits::ABORT_MAX;
            }
        };
        match result {
            Err(_) if is_stopped => Err(FlowError::Stopped),
            Err(FlowError::Remote { code: Code::AgentWedged, detail }) => {
                Err(FlowError::Remote { code: Code::AgentWedged, detail })
            }
            Err(error) => Err(lock(&self.over).why(self.attempt).unwrap_or(error)),
            Ok(bytes) if matches!(job.direction, Direction::Receive) => {
                job.memory.push().map_err(unable)?;
                Ok(bytes)
            }
            Ok(bytes) => Ok(bytes),
        }
    }

    fn begin(
        &self,
        job: &Job,
        memory: &HostMemory,
    ) -> Result<std::sync::mpsc::Receiver<Result<u64, FlowError>>, FlowError> {
        let unable = |detail: String| FlowError::Remote { code: Code::TransportUnavailable, detail };
        let mut state = self.remote.lock();
        let set = state.show(memory).map_err(|error| unable(error.to_string()))?;
        state.pass(self.number, job).map_err(|error| unable(error.to_string()))?;
        let run = state.number();
        let lane = state.lanes.get_mut(&self.number).ok_or(FlowError::Gone)?;
        let (answer, wait) = channel();
        lane.runs.insert(run, Running { answer, moved: Arc::clone(&job.moved) });
        let left = job.deadline.saturating_duration_since(Instant::now()).as_millis();
        let order = Order::Run {
            lane: self.number,
            attempt: self.attempt,
            run,
            send: match job.direction {
                Direction::Send(round) => Some(round),
                Direction::Receive => None,
            },
            set,
            peers: job.pairs.iter().map(|pair| pair.peer).collect(),
            timeout_ms: u64::try_from(left).unwrap_or(u64::MAX),
        };
        state.order(order, Vec::new());
        Ok(wait)
    }
}
