//! The destination: dials its sources and receives.

use super::dial::Dialer;
use super::frame::{Purpose, StreamHeader, read_answer, write_acknowledgement};
use super::link::Link;
use super::tasks::{Tasks, Watched};
use super::{Peers, Resting, Security, TransferError, flight, flow};
use crate::executor::{Cursor, Program, RankMemory};
use crate::limits::{RECEIVE_THREADS_MAX, RETRY_WAIT_MAX, RETRY_WAIT_MIN, STREAM_BYTES_MIN, STREAMS_MAX};
use crate::transport::nccl::{Choice, Direction, Job, LaneMember, Pair};
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use weightrefit_core::code::{Code, Policy};
use weightrefit_core::id::{MemberId, RoundId, Sha256};

/// All that one rank receives in a round.
#[derive(Debug)]
pub struct ReceiveJob {
    /// The accepted membership.
    pub peers: Arc<Peers>,
    /// Round of its epoch.
    pub round: RoundId,
    /// The rank that receives.
    pub member: MemberId,
    /// Its staging.
    pub memory: RankMemory,
    /// In the order in which to begin (peers rotated, so that no source is flooded).
    pub sources: Vec<ReceiveFrom>,
    /// Streams of one pair at most.
    pub streams: u32,
    /// Until when a source that is not ready, or does not listen, is asked again.
    pub deadline: Instant,
    /// This rank's place in the lane of its replica, where it has one.
    pub lane: Option<Arc<LaneMember>>,
    /// Connections of rounds before, of the same membership.
    pub resting: Arc<Resting>,
}

/// What one source sends.
#[derive(Debug, Clone)]
pub struct ReceiveFrom {
    /// The source.
    pub member: MemberId,
    /// Where its agent's byte port may be, best first.
    pub addresses: Vec<SocketAddr>,
    /// Digest of the pair's boxes.
    pub pair: Sha256,
    /// The pair's moves, compiled for this end.
    pub program: Arc<Program>,
}

/// The running receivers of a job. Dropping it stops them without waiting.
#[derive(Debug)]
pub struct Receivers {
    tasks: Arc<Tasks>,
}

impl Receivers {
    /// Bytes received so far.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.tasks.bytes.load(Ordering::Relaxed)
    }

    /// Asks all to end; does not wait.
    pub fn stop(&self) {
        self.tasks.stop();
    }

    /// Stops and waits until all are over: no byte is written afterwards (B3). Blocks for as long as one
    /// connection attempt at most.
    pub fn join(&self) {
        self.tasks.stop_and_join();
    }
}

impl Drop for Receivers {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}

/// Starts receiving. `done` is called once, by the last task or at the first failure: with the bytes received, or
/// the reason (`Cancelled` after a stop); it must not block.
pub fn receive(
    job: ReceiveJob,
    security: &Security,
    done: impl FnOnce(Result<u64, TransferError>) + Send + 'static,
) -> Receivers {
    let tasks = Arc::new(Tasks::default());
    let parts: Vec<(usize, u32, u32)> = job
        .sources
        .iter()
        .enumerate()
        .flat_map(|(at, source)| {
            let streams = streams_of(source.program.bytes(), job.streams);
            (0..streams).map(move |stream| (at, stream, streams))
        })
        .collect();
    let dialer = Dialer { security: security.clone(), peers: Arc::clone(&job.peers) };
    let work = Arc::new(Work {
        job,
        dialer,
        tasks: Arc::clone(&tasks),
        next: AtomicUsize::new(0),
        left: AtomicUsize::new(parts.len()),
        parts,
        done: Mutex::new(Some(Box::new(done))),
    });
    match &work.job.lane {
        _ if work.parts.is_empty() => work.finish(Ok(0)),
        None => Work::receive_streams(&work),
        Some(lane) => {
            let lane = Arc::clone(lane);
            work.spawn("bytes-in-lane", move |work| work.receive_by(&lane));
        }
    }
    Receivers { tasks }
}

/// Streams for a pair of this many bytes; both ends take the destination's number.
fn streams_of(bytes: u64, streams_max: u32) -> u32 {
    let worth = u32::try_from(bytes.div_ceil(STREAM_BYTES_MIN)).unwrap_or(u32::MAX);
    if bytes == 0 { 0 } else { worth.clamp(1, streams_max.clamp(1, STREAMS_MAX)) }
}

type Done = Box<dyn FnOnce(Result<u64, TransferError>) + Send>;

struct Work {
    job: ReceiveJob,
    dialer: Dialer,
    tasks: Arc<Tasks>,
    /// (source, stream, streams), the index of the next one to take, and how many are not done.
    parts: Vec<(usize, u32, u32)>,
    next: AtomicUsize,
    left: AtomicUsize,
    done: Mutex<Option<Done>>,
}

impl Work {
    fn spawn(self: &Arc<Self>, name: &str, run: impl FnOnce(&Arc<Self>) + Send + 'static) {
        let Some(task) = self.tasks.enter() else { return };
        let shared = Arc::clone(self);
        let name = format!("{name}-{}", self.job.member);
        let spawned = std::thread::Builder::new().name(name).spawn(move || {
            let _task = task;
            run(&shared);
        });
        if let Err(error) = spawned {
            self.finish(Err(TransferError::NoThread { detail: error.to_string() }));
        }
    }

    /// By TCP.
    fn receive_streams(self: &Arc<Self>) {
        for thread in 0..self.parts.len().min(RECEIVE_THREADS_MAX) {
            self.spawn(&format!("bytes-in-{thread}"), |work| work.run());
        }
    }

    /// As the lane says, once it knows.
    fn receive_by(self: &Arc<Self>, lane: &LaneMember) {
        match lane.choose(|| self.tasks.is_stopped(), self.job.deadline) {
            Choice::Nccl(attempt) => {
                let flown = catch_unwind(AssertUnwindSafe(|| self.fly(lane, attempt)));
                self.finish(self.unless_stopped(flown.unwrap_or(Err(TransferError::Broken))));
            }
            Choice::Tcp(_) if self.tasks.is_stopped() => self.finish(Err(TransferError::Cancelled)),
            Choice::Tcp(reason) if lane.is_required() => {
                self.finish(Err(TransferError::Lane { code: reason.code, detail: reason.text }));
            }
            Choice::Tcp(_) => self.receive_streams(),
        }
    }

    /// All sources are asked as for a stream; the bytes come by the lane.
    fn fly(&self, lane: &LaneMember, attempt: u32) -> Result<u64, TransferError> {
        let sources: Vec<&ReceiveFrom> =
            self.job.sources.iter().filter(|source| source.program.bytes() > 0).collect();
        let pair = |source: &&ReceiveFrom| {
            Some(Pair { peer: lane.rank_of(source.member)?, program: Arc::clone(&source.program) })
        };
        let pairs = sources.iter().map(pair).collect::<Option<Vec<_>>>();
        let pairs = pairs.ok_or(crate::transport::nccl::FlowError::Gone)?;
        let purpose = Purpose::Flight { attempt };
        // Connections of the round before are asked all at once, which needs no thread for each.
        let hail = |source| Ok((source, self.hail(source, purpose, (0, 1))?));
        let hailed = sources.iter().copied().map(hail).collect::<Result<Vec<_>, TransferError>>()?;
        let (mut open, mut unopened) = (Vec::with_capacity(sources.len()), Vec::new());
        for (source, hailed) in hailed {
            match hailed.and_then(|(link, watched)| self.heard(link, watched)) {
                Some((link, watched)) => open.push((source, link, watched)),
                None => unopened.push(source),
            }
        }
        let next = AtomicUsize::new(0);
        let links = Mutex::new(open);
        let failure = Mutex::new(None);
        let dial = || {
            while let Some(source) = unopened.get(next.fetch_add(1, Ordering::Relaxed)) {
                match self.open(source, purpose, (0, 1)) {
                    Ok((link, watched)) => lock(&links).push((*source, link, watched)),
                    Err(error) => {
                        lock(&failure).get_or_insert(error);
                        return;
                    }
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..unopened.len().min(RECEIVE_THREADS_MAX) {
                scope.spawn(dial);
            }
            dial();
        });
        if let Some(error) = lock(&failure).take() {
            return Err(error);
        }
        let job = Job {
            direction: Direction::Receive,
            memory: self.job.memory.clone(),
            pairs,
            deadline: self.job.deadline,
            moved: Arc::clone(&self.tasks.bytes),
        };
        let bytes = flight::receive(lane, attempt, job, &self.tasks)?;
        for (source, mut link, watched) in links.into_inner().unwrap_or_else(PoisonError::into_inner) {
            let lost = |error: std::io::Error| failure_of(source.member, &error);
            write_acknowledgement(&mut link, source.program.bytes()).map_err(lost)?;
            self.keep(source, link, watched);
        }
        Ok(bytes)
    }

    fn unless_stopped<T>(&self, result: Result<T, TransferError>) -> Result<T, TransferError> {
        result.map_err(|error| if self.tasks.is_stopped() { TransferError::Cancelled } else { error })
    }

    /// Takes streams until there are none, or one fails.
    fn run(&self) {
        while let Some((source, stream, streams)) = self.parts.get(self.next.fetch_add(1, Ordering::Relaxed))
        {
            let source = &self.job.sources[*source];
            let result = catch_unwind(AssertUnwindSafe(|| self.receive_stream(source, *stream, *streams)));
            if let Err(error) = self.unless_stopped(result.unwrap_or(Err(TransferError::Broken))) {
                return self.finish(Err(error));
            }
            if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                let pushed = self.job.memory.push().map_err(TransferError::from);
                self.finish(pushed.map(|()| self.tasks.bytes.load(Ordering::Relaxed)));
            }
        }
    }

    /// Says how the job ended, if nobody has.
    fn finish(&self, result: Result<u64, TransferError>) {
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner).take();
        if result.is_err() {
            self.tasks.stop();
        }
        if let Some(done) = done {
            done(result);
        }
    }

    fn receive_stream(&self, source: &ReceiveFrom, stream: u32, streams: u32) -> Result<(), TransferError> {
        let lost = |error: std::io::Error| failure_of(source.member, &error);
        let cursor = Cursor::stream(&source.program, stream, streams);
        let (bytes, memory) = (cursor.left(), self.job.memory.fill()?);
        let (mut link, watched) = self.open(source, Purpose::Bytes, (stream, streams))?;
        flow::receive(&mut link, cursor, &memory, &self.tasks).map_err(lost)?;
        write_acknowledgement(&mut link, bytes).map_err(lost)?;
        self.keep(source, link, watched);
        Ok(())
    }

    /// A new connection to a source, and what it says to the header.
    fn dial(
        &self,
        source: &ReceiveFrom,
        header: &StreamHeader,
    ) -> Result<(Link, Watched, Option<Code>), TransferError> {
        let lost = |error: std::io::Error| failure_of(source.member, &error);
        let socket = Arc::new(Dialer::connect(&source.addresses).map_err(lost)?);
        let watched = self.tasks.watch(&socket).ok_or(TransferError::Cancelled)?;
        let mut link = self.dialer.secure(source.member, socket).map_err(lost)?;
        let refused = ask(&mut link, header).map_err(lost)?;
        Ok((link, watched, refused))
    }

    /// Keeps a connection whose stream went well. First it is no part of the job any more, so that no stop shuts it.
    fn keep(&self, source: &ReceiveFrom, link: Link, watched: Watched) {
        drop(watched);
        self.job.resting.keep(source.member, link);
    }

    fn header(
        &self,
        source: &ReceiveFrom,
        purpose: Purpose,
        (stream, streams): (u32, u32),
    ) -> Result<StreamHeader, TransferError> {
        let mut header = self.dialer.header(source.member, self.job.member, source.pair, purpose)?;
        (header.round, header.stream, header.streams) = (self.job.round, stream, streams);
        header.bytes = source.program.split(stream + 1, streams) - source.program.split(stream, streams);
        Ok(header)
    }

    /// Asks a source for a stream by a connection of the round before, where there is one; [`Self::heard`] hears what it
    /// says.
    fn hail(
        &self,
        source: &ReceiveFrom,
        purpose: Purpose,
        stream: (u32, u32),
    ) -> Result<Option<(Link, Watched)>, TransferError> {
        let Some(mut link) = self.job.resting.take(source.member) else { return Ok(None) };
        let header = self.header(source, purpose, stream)?;
        let watched = self.tasks.watch(link.socket()).ok_or(TransferError::Cancelled)?;
        link.hurry();
        Ok(header.write(&mut link).ok().map(|()| (link, watched)))
    }

    /// The connection, where the source has admitted the stream. One that is closed meanwhile, or refused, is dialled
    /// anew.
    fn heard(&self, mut link: Link, watched: Watched) -> Option<(Link, Watched)> {
        let is_admitted = matches!(read_answer(&mut link), Ok(None)) && link.unhurry().is_ok();
        is_admitted.then_some((link, watched))
    }

    /// Asks a source for a stream until it is admitted, refused for good, or too late.
    fn open(
        &self,
        source: &ReceiveFrom,
        purpose: Purpose,
        stream: (u32, u32),
    ) -> Result<(Link, Watched), TransferError> {
        let lost = |error: std::io::Error| failure_of(source.member, &error);
        let hailed = self.hail(source, purpose, stream)?;
        if let Some(open) = hailed.and_then(|(link, watched)| self.heard(link, watched)) {
            return Ok(open);
        }
        let header = self.header(source, purpose, stream)?;
        let mut wait = RETRY_WAIT_MIN;
        loop {
            if self.tasks.is_stopped() {
                return Err(TransferError::Cancelled);
            }
            let late = Instant::now() >= self.job.deadline;
            let refusal = match self.dial(source, &header) {
                Ok((mut link, watched, None)) => {
                    link.unhurry().map_err(lost)?;
                    return Ok((link, watched));
                }
                Ok((_, _, refused)) => refused,
                // A source that nobody listens for, or whose handshakes are crowded out, may be met a little later.
                Err(error @ TransferError::Lost { .. }) if late => return Err(error),
                Err(TransferError::Lost { .. }) => None,
                Err(error) => return Err(error),
            };
            if let Some(code) = refusal
                && (late || code.policy() != Policy::Retry || code == Code::StaleEpoch)
            {
                return Err(TransferError::Refused { peer: source.member, code });
            }
            self.tasks.sleep(wait);
            wait = (wait * 2).min(RETRY_WAIT_MAX);
        }
    }
}

fn ask(link: &mut Link, header: &StreamHeader) -> std::io::Result<Option<Code>> {
    header.write(link)?;
    read_answer(link)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What an error of the socket or of TLS means.
pub(super) fn failure_of(peer: MemberId, error: &std::io::Error) -> TransferError {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match tls {
        Some(tls) => TransferError::Key { peer, detail: tls.to_string() },
        None => TransferError::Lost { peer, detail: error.to_string() },
    }
}
