//! The byte port: accepts, admits, sends.

use super::frame::{Purpose, StreamHeader, read_acknowledgement, write_answer};
use super::link::Link;
use super::offers::{Grant, Offers};
use super::receive::failure_of;
use super::{Peers, Security, SendEvent, SendJob, Senders, TransferError, flow};
use crate::executor::Cursor;
use crate::limits::{ADMISSION_TIMEOUT, HANDSHAKES_MAX, RESTING_LINKS_MAX, RETRY_WAIT_MAX, SEND_STREAMS_MAX};
use crate::transport::nccl::Hall;
use rustls::ServerConfig;
use std::collections::BTreeMap;
use std::io::{Error, ErrorKind, Result};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;
use weightrefit_core::code::Code;
use weightrefit_core::id::{MemberId, Sha256};
use weightrefit_core::round::message::RoundKey;

/// Listens for destinations; one per agent.
#[derive(Debug)]
pub struct ByteServer {
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    listener: TcpListener,
    tls: Option<Arc<ServerConfig>>,
    offers: Arc<Offers>,
    closed: AtomicBool,
    /// Connections not yet admitted, oldest first (B4).
    waiting: Mutex<Waiting>,
    /// Those between two streams (B6).
    resting: Mutex<Waiting>,
    sending: AtomicUsize,
    /// Where members of lanes meet; none before one is set.
    hall: OnceLock<Arc<Hall>>,
    refusals: Mutex<BTreeMap<Code, u64>>,
}

#[derive(Debug, Default)]
struct Waiting {
    sockets: BTreeMap<u64, Arc<TcpStream>>,
    next: u64,
}

impl Waiting {
    /// Remembers a connection, and returns its number; the oldest makes room, and is returned.
    fn add(&mut self, socket: &Arc<TcpStream>, most: usize) -> (u64, Option<Arc<TcpStream>>) {
        let oldest = if self.sockets.len() >= most { self.sockets.pop_first() } else { None };
        let id = self.next;
        self.next += 1;
        self.sockets.insert(id, Arc::clone(socket));
        (id, oldest.map(|(_, socket)| socket))
    }
}

impl ByteServer {
    /// Binds and starts to listen; nothing is offered yet.
    ///
    /// # Errors
    /// Where the address cannot be bound or TLS cannot be set up.
    pub fn bind(address: SocketAddr, security: &Security) -> Result<Self> {
        let tls = match security {
            Security::Plain => None,
            Security::Tls(identity) => Some(Arc::new(identity.server_config().map_err(Error::other)?)),
        };
        let shared = Arc::new(Shared {
            listener: TcpListener::bind(address)?,
            tls,
            offers: Arc::default(),
            closed: AtomicBool::new(false),
            waiting: Mutex::default(),
            resting: Mutex::default(),
            sending: AtomicUsize::new(0),
            hall: OnceLock::new(),
            refusals: Mutex::default(),
        });
        let accepting = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("bytes-accept".into());
        let accepting = thread.spawn(move || accepting.accept())?;
        Ok(Self { shared, accepting: Some(accepting) })
    }

    /// The bound address.
    ///
    /// # Errors
    /// Those of `getsockname`.
    pub fn local_addr(&self) -> Result<SocketAddr> {
        self.shared.listener.local_addr()
    }

    /// The accepted membership from now on. Streams of another are refused as `StaleEpoch`, all as
    /// `NotConfigured` while there is none; jobs that run are ended by their own `Senders`.
    pub fn configure(&self, peers: Option<Arc<Peers>>) {
        self.shared.offers.configure(peers);
    }

    /// Connections of lanes go there from now on.
    pub(crate) fn lead_lanes_to(&self, hall: Arc<Hall>) {
        // Set once, when the round driver is made.
        let _ = self.shared.hall.set(hall);
    }

    /// Offers what a rank may send. `report` is called from the job's threads and must not block.
    pub fn allow(&self, job: SendJob, report: impl Fn(SendEvent) + Send + Sync + 'static) -> Senders {
        self.shared.offers.add(job, Box::new(report))
    }

    /// Streams refused so far, by code.
    #[must_use]
    pub fn refusals(&self) -> BTreeMap<Code, u64> {
        lock(&self.shared.refusals).clone()
    }
}

impl Drop for ByteServer {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
        // On Linux this wakes `accept`.
        let _ = rustix::net::shutdown(self.shared.listener.as_fd(), rustix::net::Shutdown::Both);
        for held in [&self.shared.waiting, &self.shared.resting] {
            for socket in lock(held).sockets.values() {
                let _ = socket.shutdown(Shutdown::Both);
            }
        }
        if let Some(thread) = self.accepting.take() {
            // A panic of that thread was printed when it happened, and there is nothing else to do.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn accept(self: &Arc<Self>) {
        while !self.closed.load(Ordering::Acquire) {
            let Ok((socket, _)) = self.listener.accept() else {
                if !self.closed.load(Ordering::Acquire) {
                    // Out of descriptors or memory: others must end first.
                    std::thread::sleep(RETRY_WAIT_MAX);
                }
                continue;
            };
            let socket = Arc::new(socket);
            let id = self.wait(&socket);
            let shared = Arc::clone(self);
            let thread = std::thread::Builder::new().name("bytes-out".into());
            let spawned = thread.spawn(move || shared.serve(&socket, id));
            if spawned.is_err() {
                lock(&self.waiting).sockets.remove(&id);
            }
        }
    }

    /// Remembers a connection that is not admitted; the oldest makes room.
    fn wait(&self, socket: &Arc<TcpStream>) -> u64 {
        let (id, oldest) = lock(&self.waiting).add(socket, HANDSHAKES_MAX);
        if let Some(oldest) = oldest {
            let _ = oldest.shutdown(Shutdown::Both);
            self.count(Code::Busy);
        }
        id
    }

    fn serve(&self, socket: &Arc<TcpStream>, id: u64) {
        let mut asked = self.admit(socket);
        lock(&self.waiting).sockets.remove(&id);
        while let Some(Asked { mut link, key, header, admitted }) = asked.take() {
            match admitted {
                Admitted::Stream(grant) => {
                    if self.send(&mut link, &header, grant) {
                        asked = self.rest(link, key);
                    }
                }
                Admitted::Lane(hall) => {
                    if write_answer(&mut link, None).is_ok() {
                        hall.serve(link, &header);
                    }
                }
            }
        }
    }

    /// Sends what was granted; false where that went wrong.
    fn send(&self, link: &mut Link, header: &StreamHeader, grant: Grant) -> bool {
        let Grant { offer, destination, task } = grant;
        let sent = catch_unwind(AssertUnwindSafe(|| {
            let _watched = offer.tasks.watch(link.socket()).ok_or(TransferError::Cancelled)?;
            let program = &offer.job.destinations[destination].program;
            let failed = |error: Error| failure_of(header.destination, &error);
            write_answer(link, None).and_then(|()| link.unhurry()).map_err(failed)?;
            match header.purpose {
                Purpose::Flight { attempt } => {
                    offer.flight.arrive(&offer.job, &offer.tasks, destination, Some(attempt));
                    offer.flight.wait(&offer.tasks)?;
                }
                _ => {
                    offer.flight.arrive(&offer.job, &offer.tasks, destination, None);
                    let cursor = Cursor::stream(program, header.stream, header.streams);
                    let round = RoundKey { epoch: offer.job.peers.epoch, round: offer.job.round };
                    let memory = offer.job.memory.pull(round)?;
                    flow::send(link, cursor, &memory, &offer.tasks).map_err(failed)?;
                }
            }
            let theirs = read_acknowledgement(link).map_err(failed)?;
            counted(header.destination, header, theirs)
        }));
        self.sending.fetch_sub(1, Ordering::Relaxed);
        let sent = sent.unwrap_or(Err(TransferError::Broken));
        let went_well = sent.is_ok();
        // Reported while the task still counts: after `join` nothing is reported any more.
        offer.ended(destination, header.stream, sent);
        drop(task);
        went_well
    }

    /// Waits for the next stream of a connection whose last one went well (B6).
    fn rest(&self, mut link: Link, key: Option<Sha256>) -> Option<Asked> {
        let (id, oldest) = lock(&self.resting).add(link.socket(), RESTING_LINKS_MAX);
        if let Some(oldest) = oldest {
            let _ = oldest.shutdown(Shutdown::Both);
        }
        if self.closed.load(Ordering::Acquire) {
            return None;
        }
        let header = StreamHeader::read(&mut link);
        lock(&self.resting).sockets.remove(&id);
        // Its destination has no need of it any more, or has none for long: neither is a refusal.
        self.answer(link, key, header.ok()?)
    }

    /// Handshake, header and decision.
    fn admit(&self, socket: &Arc<TcpStream>) -> Option<Asked> {
        let deadline = Instant::now() + ADMISSION_TIMEOUT;
        let secured = match &self.tls {
            None => Link::plain(Arc::clone(socket), deadline).map(|link| (link, None)),
            Some(config) => {
                Link::accept_tls(Arc::clone(socket), config, deadline).map(|(link, key)| (link, Some(key)))
            }
        };
        let said = secured.and_then(|(mut link, key)| {
            let header = StreamHeader::read(&mut link)?;
            Ok((link, key, header))
        });
        let (link, key, header) = said.map_err(|error| self.count(refusal_of(&error))).ok()?;
        self.answer(link, key, header)
    }

    /// Decides; a refusal goes to the peer, where there is one to tell.
    fn answer(&self, mut link: Link, key: Option<Sha256>, header: StreamHeader) -> Option<Asked> {
        match self.decide(&header, key) {
            Ok(admitted) => Some(Asked { link, key, header, admitted }),
            Err(code) => {
                self.count(code);
                // A peer that does not wait for the answer is refused all the same.
                let _ = write_answer(&mut link, Some(code));
                link.part();
                None
            }
        }
    }

    fn decide(&self, header: &StreamHeader, key: Option<Sha256>) -> std::result::Result<Admitted, Code> {
        self.offers.identify(header, key)?;
        if matches!(header.purpose, Purpose::Lane | Purpose::Turn { .. }) {
            let hall = self.hall.get().ok_or(Code::NotConfigured)?;
            return hall.admit(header).map(|()| Admitted::Lane(Arc::clone(hall)));
        }
        let busy = self.sending.fetch_add(1, Ordering::Relaxed) >= SEND_STREAMS_MAX;
        let decided = if busy { Err(Code::Busy) } else { self.offers.admit(header) };
        decided.map(Admitted::Stream).inspect_err(|_| {
            self.sending.fetch_sub(1, Ordering::Relaxed);
        })
    }

    fn count(&self, code: Code) {
        *lock(&self.refusals).entry(code).or_default() += 1;
    }
}

/// A connection that is admitted.
struct Asked {
    link: Link,
    /// What the peer has proved; `None` without TLS.
    key: Option<Sha256>,
    header: StreamHeader,
    admitted: Admitted,
}

/// What an admitted connection is.
enum Admitted {
    Stream(Grant),
    /// Of a member of a lane; bounded by the lanes, each of which speaks to one connection a rank.
    Lane(Arc<Hall>),
}

/// B5.
fn counted(peer: MemberId, header: &StreamHeader, theirs: u64) -> std::result::Result<(), TransferError> {
    let ours = header.bytes;
    if theirs == ours {
        Ok(())
    } else {
        Err(TransferError::ByteCount { peer, stream: header.stream, theirs, ours })
    }
}

/// How a connection that never said what it wants is counted.
fn refusal_of(error: &Error) -> Code {
    match error.kind() {
        // Silence, a cut, or the room that it had to make.
        ErrorKind::TimedOut
        | ErrorKind::WouldBlock
        | ErrorKind::UnexpectedEof
        | ErrorKind::ConnectionReset => Code::PeerLost,
        _ => Code::Unauthenticated,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
