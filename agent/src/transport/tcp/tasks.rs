//! The running tasks of one job: stopping them, and knowing that they are over (B3).

use std::collections::BTreeMap;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Tasks of one job, with the sockets that a stop must shut.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    state: Mutex<State>,
    changed: Condvar,
    stopped: AtomicBool,
    /// Bytes moved so far.
    pub(super) bytes: Arc<AtomicU64>,
}

#[derive(Debug, Default)]
struct State {
    stopped: bool,
    running: usize,
    sockets: BTreeMap<u64, Arc<TcpStream>>,
    next: u64,
}

impl Tasks {
    /// A task begins; `None` when the job is stopped. The task is over when the guard is dropped.
    pub(super) fn enter(self: &Arc<Self>) -> Option<Task> {
        let mut state = self.lock();
        if state.stopped {
            return None;
        }
        state.running += 1;
        Some(Task(Arc::clone(self)))
    }

    /// From now on `stop` shuts this socket, until the guard is dropped; `None` when the job is stopped.
    pub(super) fn watch(self: &Arc<Self>, socket: &Arc<TcpStream>) -> Option<Watched> {
        let mut state = self.lock();
        if state.stopped {
            return None;
        }
        let id = state.next;
        state.next += 1;
        state.sockets.insert(id, Arc::clone(socket));
        Some(Watched(Arc::clone(self), id))
    }

    /// Asks all tasks to end and wakes those that wait for a socket or sleep.
    pub(super) fn stop(&self) {
        let mut state = self.lock();
        state.stopped = true;
        self.stopped.store(true, Ordering::Relaxed);
        for socket in state.sockets.values() {
            // A socket that its peer has reset is shut already.
            let _ = socket.shutdown(Shutdown::Both);
        }
        self.changed.notify_all();
    }

    /// Waits until no task runs and none can begin any more.
    pub(super) fn stop_and_join(&self) {
        self.stop();
        let mut state = self.lock();
        while state.running > 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Looked at once per chunk.
    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Waits for `time` or a stop.
    pub(super) fn sleep(&self, time: Duration) {
        let until = Instant::now() + time;
        let mut state = self.lock();
        while !state.stopped {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A running task.
#[derive(Debug)]
pub(super) struct Task(Arc<Tasks>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.lock().running -= 1;
        self.0.changed.notify_all();
    }
}

/// A socket that a stop shuts.
#[derive(Debug)]
pub(super) struct Watched(Arc<Tasks>, u64);

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.lock().sockets.remove(&self.1);
    }
}
