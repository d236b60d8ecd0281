//! The destination: dials its sources and receives.

use super::frame::{StreamHeader, read_answer, write_acknowledgement};
use super::link::Link;
use super::tasks::Tasks;
use super::{Peers, Security, TransferError, flow};
use crate::executor::{Cursor, Program, RankMemory};
use crate::limits::{
    ADMISSION_TIMEOUT, CONNECT_TIMEOUT, RECEIVE_THREADS_MAX, RETRY_WAIT_MAX, RETRY_WAIT_MIN,
    STREAM_BYTES_MIN, STREAMS_MAX,
};
use std::net::{SocketAddr, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use weightrefit_core::code::Policy;
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
    let threads = parts.len().min(RECEIVE_THREADS_MAX);
    let work = Arc::new(Work {
        job,
        security: security.clone(),
        tasks: Arc::clone(&tasks),
        next: AtomicUsize::new(0),
        left: AtomicUsize::new(parts.len()),
        parts,
        done: Mutex::new(Some(Box::new(done))),
    });
    if work.parts.is_empty() {
        work.finish(Ok(0));
    }
    for thread in 0..threads {
        let Some(task) = tasks.enter() else { break };
        let shared = Arc::clone(&work);
        let name = format!("bytes-in-{}-{thread}", work.job.member);
        let spawned = std::thread::Builder::new().name(name).spawn(move || {
            let _task = task;
            shared.run();
        });
        if let Err(error) = spawned {
            work.finish(Err(TransferError::NoThread { detail: error.to_string() }));
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
    security: Security,
    tasks: Arc<Tasks>,
    /// (source, stream, streams), the index of the next one to take, and how many are not done.
    parts: Vec<(usize, u32, u32)>,
    next: AtomicUsize,
    left: AtomicUsize,
    done: Mutex<Option<Done>>,
}

impl Work {
    /// Takes streams until there are none, or one fails.
    fn run(&self) {
        while let Some((source, stream, streams)) = self.parts.get(self.next.fetch_add(1, Ordering::Relaxed))
        {
            let source = &self.job.sources[*source];
            let result = catch_unwind(AssertUnwindSafe(|| self.receive_stream(source, *stream, *streams)));
            if let Err(error) = result.unwrap_or(Err(TransferError::Broken)) {
                let stopped = self.tasks.is_stopped();
                return self.finish(Err(if stopped { TransferError::Cancelled } else { error }));
            }
            if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                self.finish(Ok(self.tasks.bytes.load(Ordering::Relaxed)));
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
        let lost = |error: std::io::Error| failure(source.member, &error);
        let cursor = Cursor::stream(&source.program, stream, streams);
        let bytes = cursor.left();
        let header = self.header(source, stream, streams, bytes)?;
        let mut wait = RETRY_WAIT_MIN;
        loop {
            if self.tasks.is_stopped() {
                return Err(TransferError::Cancelled);
            }
            let late = Instant::now() >= self.job.deadline;
            let (refusal, reason) = match self.connect(source) {
                Err(error) if late => return Err(lost(error)),
                Err(error) => (None, Some(error)),
                Ok(socket) => {
                    let socket = Arc::new(socket);
                    let watched = self.tasks.watch(&socket).ok_or(TransferError::Cancelled)?;
                    let mut link = self.secure(source, socket).map_err(lost)?;
                    header.write(&mut link).map_err(lost)?;
                    match read_answer(&mut link).map_err(lost)? {
                        None => {
                            link.unhurry().map_err(lost)?;
                            flow::receive(&mut link, cursor, &self.job.memory, &self.tasks).map_err(lost)?;
                            write_acknowledgement(&mut link, bytes).map_err(lost)?;
                            drop(watched);
                            return Ok(());
                        }
                        Some(code) => (Some(code), None),
                    }
                }
            };
            if let Some(code) = refusal
                && (late
                    || code.policy() != Policy::Retry
                    || code == weightrefit_core::code::Code::StaleEpoch)
            {
                return Err(TransferError::Refused { peer: source.member, code });
            }
            drop(reason);
            self.tasks.sleep(wait);
            wait = (wait * 2).min(RETRY_WAIT_MAX);
        }
    }

    fn header(
        &self,
        source: &ReceiveFrom,
        stream: u32,
        streams: u32,
        bytes: u64,
    ) -> Result<StreamHeader, TransferError> {
        let peers = &self.job.peers;
        let agent = |member: MemberId| peers.agent(member);
        Ok(StreamHeader {
            refit_uid: Arc::clone(&peers.refit_uid),
            epoch: peers.epoch,
            membership: peers.membership,
            round: self.job.round,
            source: source.member,
            destination: self.job.member,
            source_incarnation: agent(source.member)?.0,
            destination_incarnation: agent(self.job.member)?.0,
            pair: source.pair,
            stream,
            streams,
            bytes,
        })
    }

    fn connect(&self, source: &ReceiveFrom) -> std::io::Result<TcpStream> {
        let mut last = std::io::Error::new(std::io::ErrorKind::AddrNotAvailable, "the member has no address");
        for address in &source.addresses {
            match TcpStream::connect_timeout(address, CONNECT_TIMEOUT) {
                Ok(socket) => return Ok(socket),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn secure(&self, source: &ReceiveFrom, socket: Arc<TcpStream>) -> std::io::Result<Link> {
        let deadline = Instant::now() + ADMISSION_TIMEOUT;
        match &self.security {
            Security::Plain => Link::plain(socket, deadline),
            Security::Tls(identity) => {
                let key = self.job.peers.agent(source.member).map_err(std::io::Error::other)?.1;
                let config = identity.client_config(key).map_err(std::io::Error::other)?;
                Link::start_tls(socket, Arc::new(config), deadline)
            }
        }
    }
}

/// What an error of the socket or of TLS means.
pub(super) fn failure(peer: MemberId, error: &std::io::Error) -> TransferError {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match tls {
        Some(tls) => TransferError::Key { peer, detail: tls.to_string() },
        None => TransferError::Lost { peer, detail: error.to_string() },
    }
}
