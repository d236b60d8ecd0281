//! The forward loop of one engine replica: rank 0 is the scheduler, the others take part in its steps. A step
//! reads every live tensor of every rank and compares all version stamps.
//!
//! Invariants:
//! - F1: after [`Gate::stop`] returns, this rank reads nothing until [`Gate::start`].
//! - F2: a step that some rank did not take part in to its end is no step, whatever the others read.

use super::live::{LiveTensor, Read, Stamp};
use super::say;
use std::io::{self, Read as _, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use weightrefit_proto::reference::Told;

/// Between two attempts to reach the other ranks.
const RETRY: Duration = Duration::from_millis(20);

/// Between two steps, in durations of a step: the agents of a small machine need its processors too.
const REST: u32 = 2;

/// What the loop has seen.
#[derive(Debug, Default)]
pub(super) struct Counts {
    /// Steps that all ranks took part in.
    pub(super) steps: AtomicU64,
    /// Of those, steps that read two versions or a tensor that was being written.
    pub(super) torn: AtomicU64,
    /// Steps of this rank, whatever the others did.
    pub(super) own: AtomicU64,
}

/// Opens and closes the forward loop of this rank.
#[derive(Default)]
pub(super) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
    /// Gives up the step in progress.
    closing: AtomicBool,
    /// Nothing was read by all ranks since the last [`Gate::start`].
    unread: AtomicBool,
}

#[derive(Default)]
struct State {
    open: bool,
    in_step: bool,
}

const NO_PANIC: &str = "no holder of this lock panics";

impl Gate {
    /// Steps may begin.
    pub(super) fn start(&self) {
        self.state.lock().expect(NO_PANIC).open = true;
        self.closing.store(false, Ordering::Relaxed);
        self.unread.store(true, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// Whether steps may begin.
    pub(super) fn is_open(&self) -> bool {
        self.state.lock().expect(NO_PANIC).open
    }

    /// Returns when no step is in progress; none begins after it. A step in progress is given up: it would give no
    /// answer to anybody, and a pause should not wait for it.
    pub(super) fn stop(&self) {
        self.closing.store(true, Ordering::Relaxed);
        let mut state = self.state.lock().expect(NO_PANIC);
        state.open = false;
        drop(self.changed.wait_while(state, |state| state.in_step).expect(NO_PANIC));
    }

    fn wait_open(&self) {
        let state = self.state.lock().expect(NO_PANIC);
        drop(self.changed.wait_while(state, |state| !state.open).expect(NO_PANIC));
    }

    /// Runs a step, unless the gate is closed.
    fn step<T>(&self, run: impl FnOnce() -> T) -> Option<T> {
        let mut state = self.state.lock().expect(NO_PANIC);
        if !state.open {
            return None;
        }
        state.in_step = true;
        drop(state);
        let result = run();
        self.state.lock().expect(NO_PANIC).in_step = false;
        self.changed.notify_all();
        Some(result)
    }
}

/// One rank's part of the loop.
pub(super) struct Forward {
    pub(super) live: Arc<Vec<LiveTensor>>,
    pub(super) gate: Arc<Gate>,
    pub(super) counts: Arc<Counts>,
    /// Where the scheduler of the replica listens.
    pub(super) replica_socket: PathBuf,
    pub(super) rank: u32,
    pub(super) ranks: u32,
}

impl Forward {
    /// Never returns; ends with the process. Yields a little to everybody else, since a real engine uses another
    /// device; not more, because a pause waits for the step in progress.
    pub(super) fn run(self) {
        // Scheduling only: without the right to be nice the loop runs all the same.
        let _ = rustix::process::nice(5);
        if self.rank == 0 { self.schedule() } else { self.follow() }
    }

    /// What this rank reads in one step: one version in all tensors, or not.
    fn read(&self) -> Read {
        let mut all = None;
        for tensor in self.live.iter() {
            let read = tensor.read(&self.gate.closing);
            if read == Read::Cut {
                return Read::Cut;
            }
            // All tensors are read in any case.
            all = Some(if all.is_none_or(|all| all == read) { read } else { Read::Torn });
        }
        self.counts.own.fetch_add(1, Ordering::Relaxed);
        all.unwrap_or(Read::Whole(Stamp::NONE))
    }

    fn schedule(&self) {
        let followers: Arc<Mutex<Vec<Option<UnixStream>>>> = Arc::default();
        followers.lock().expect(NO_PANIC).resize_with(self.ranks as usize, || None);
        if self.ranks > 1 {
            let (path, slots) = (self.replica_socket.clone(), Arc::clone(&followers));
            std::thread::spawn(move || accept(&path, &slots));
        }
        loop {
            self.gate.wait_open();
            let start = Instant::now();
            let complete = self.gate.step(|| self.scheduled_step(&mut followers.lock().expect(NO_PANIC)));
            if complete == Some(true) && self.gate.unread.swap(false, Ordering::Relaxed) {
                // A launcher that is gone reads nothing.
                let _ = say(&Told::Stepped {});
            }
            let rest = if complete == Some(false) { RETRY } else { start.elapsed() * REST };
            std::thread::sleep(rest.min(RETRY));
        }
    }

    /// One step of all ranks; false where one did not take part.
    fn scheduled_step(&self, followers: &mut [Option<UnixStream>]) -> bool {
        let mut asked = true;
        for slot in &mut followers[1..] {
            let sent = slot.as_mut().is_some_and(|stream| stream.write_all(&[1]).is_ok());
            if !sent {
                *slot = None;
            }
            asked &= sent;
        }
        let own = self.read();
        let mut reads = vec![own];
        for slot in &mut followers[1..] {
            let Some(stream) = slot else { continue };
            match receive_read(stream) {
                Ok(read) => reads.push(read),
                Err(_) => *slot = None,
            }
        }
        if !asked || reads.len() != followers.len() || reads.contains(&Read::Cut) {
            return false; // F2
        }
        self.counts.steps.fetch_add(1, Ordering::Relaxed);
        if own == Read::Torn || reads.iter().any(|read| *read != own) {
            self.counts.torn.fetch_add(1, Ordering::Relaxed);
        }
        true
    }

    fn follow(&self) {
        loop {
            let ended = UnixStream::connect(&self.replica_socket).and_then(|stream| self.follow_on(stream));
            tracing::debug!(?ended, "no scheduler");
            std::thread::sleep(RETRY);
        }
    }

    fn follow_on(&self, mut stream: UnixStream) -> io::Result<()> {
        stream.write_all(&self.rank.to_le_bytes())?;
        loop {
            stream.read_exact(&mut [0])?;
            let read = self.gate.step(|| self.read()).unwrap_or(Read::Cut);
            send_read(&mut stream, read)?;
        }
    }
}

fn accept(path: &Path, slots: &Mutex<Vec<Option<UnixStream>>>) {
    // A predecessor of this process may have left its socket.
    let _ = std::fs::remove_file(path);
    let listener = match UnixListener::bind(path) {
        Ok(listener) => listener,
        Err(error) => {
            return tracing::error!(%error, path = %path.display(), "cannot listen for the other ranks");
        }
    };
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else { continue };
        let mut rank = [0; 4];
        if stream.read_exact(&mut rank).is_err() {
            continue;
        }
        let rank = u32::from_le_bytes(rank) as usize;
        if rank > 0
            && let Some(slot) = slots.lock().expect(NO_PANIC).get_mut(rank)
        {
            *slot = Some(stream);
        }
    }
}

fn send_read(stream: &mut UnixStream, read: Read) -> io::Result<()> {
    let (kind, stamp) = match read {
        Read::Cut => (0, 0),
        Read::Whole(stamp) => (1, stamp.0),
        Read::Torn => (2, 0),
    };
    let mut bytes = [kind; 9];
    bytes[1..].copy_from_slice(&u64::to_le_bytes(stamp));
    stream.write_all(&bytes)
}

fn receive_read(stream: &mut UnixStream) -> io::Result<Read> {
    let mut bytes = [0; 9];
    stream.read_exact(&mut bytes)?;
    let [kind, stamp @ ..] = bytes;
    Ok(match kind {
        0 => Read::Cut,
        1 => Read::Whole(Stamp(u64::from_le_bytes(stamp))),
        _ => Read::Torn,
    })
}
