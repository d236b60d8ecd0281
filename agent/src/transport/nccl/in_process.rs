//! The executor in a rank's own process: obeys its agent over the agent socket. NCCL's kernels then run in the process
//! that the rank's own run in, on its context, so that nobody takes turns with anybody.
//!
//! N1: no thread of the caller is ever inside CUDA or NCCL for this: the context that is current on it stays.
//! N2: the end of a connection ends all lanes; only after that is the agent greeted anew.
//! N3: once a communicator is wedged (L4) no lane is formed any more, and what its kernels may use is never freed; the
//!     owner of the process is told, and decides when it ends.

mod hosted;

use super::lane::Reason;
use crate::limits;
use hosted::Hosted;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use weightrefit_core::code::Code;

/// What an executor is started with.
#[derive(Debug, Clone)]
pub struct ExecutorSettings {
    /// Of the agent.
    pub socket: PathBuf,
    /// `training/RANK` or `inference/POOL/REPLICA/RANK`.
    pub seat: String,
    /// Number of the rank's GPU among those that this process sees.
    pub device: u32,
    /// Driver, in place of the system's.
    pub cuda: Option<PathBuf>,
    /// NCCL, in place of the loader's.
    pub nccl: Option<PathBuf>,
    /// Device memory for packed windows of one lane.
    pub window_bytes: u64,
    /// How long the agent may be away, or refuse for the moment, while this starts.
    pub patience: Duration,
}

/// An executor cannot start, or work on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct ExecutorError {
    /// The stable code that a user sees.
    pub code: Code,
    /// What happened.
    pub text: String,
}

impl ExecutorError {
    /// The caller has to be corrected.
    #[must_use]
    pub fn misuse(text: &str) -> Self {
        Self::new(Code::Unsupported, text)
    }

    fn new(code: Code, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }
}

impl From<Reason> for ExecutorError {
    fn from(Reason { code, text }: Reason) -> Self {
        Self { code, text }
    }
}

/// An executor that runs. Dropping it stops it.
#[derive(Debug)]
pub struct RankExecutor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Of the present connection, to shut it.
    stream: Option<Arc<UnixStream>>,
    is_stopping: bool,
    /// Why it works no more.
    error: Option<ExecutorError>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first error is the one that is told.
    fn fail(&self, error: ExecutorError) {
        self.lock().error.get_or_insert(error);
    }

    /// False once it is stopping.
    fn sleep(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut state = self.lock();
        while !state.is_stopping {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        false
    }
}

impl RankExecutor {
    /// Starts it: returns once the agent has taken it.
    ///
    /// # Errors
    /// No driver, no NCCL or no such device; an agent that stays away, or refuses.
    pub fn start(settings: ExecutorSettings) -> Result<Self, ExecutorError> {
        let no_thread = |error: std::io::Error| ExecutorError::new(Code::Unsupported, error.to_string());
        let shared = Arc::new(Shared::default());
        let (started, wait) = channel();
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("weightrefit".into())
            .spawn(move || run(&settings, of_thread, &started))
            .map_err(no_thread)?;
        let executor = Self { shared, thread: Some(thread) };
        let broken = || ExecutorError::new(Code::Unsupported, "the executor's thread broke");
        wait.recv().unwrap_or_else(|_| Err(broken())).map(|()| executor)
    }

    /// Why it works no more, if so.
    #[must_use]
    pub fn error(&self) -> Option<ExecutorError> {
        self.shared.lock().error.clone()
    }

    /// Ends all lanes and the connection; waits for it.
    ///
    /// # Errors
    /// Why it worked no more before.
    pub fn stop(mut self) -> Result<(), ExecutorError> {
        self.end();
        self.error().map_or(Ok(()), Err)
    }

    fn end(&mut self) {
        let mut state = self.shared.lock();
        state.is_stopping = true;
        if let Some(stream) = &state.stream {
            // One that its peer has reset is shut already. What is sent can still go.
            let _ = stream.shutdown(Shutdown::Read);
        }
        drop(state);
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // It broke: there is nothing left to end.
            let _ = thread.join();
        }
    }
}

impl Drop for RankExecutor {
    fn drop(&mut self) {
        self.end();
    }
}

/// The executor's thread.
fn run(settings: &ExecutorSettings, shared: Arc<Shared>, started: &Sender<Result<(), ExecutorError>>) {
    let mut hosted = match Hosted::open(settings, &shared) {
        Ok(hosted) => hosted,
        Err(error) => {
            // The other end waits for this.
            let _ = started.send(Err(error));
            return;
        }
    };
    let mut patience = Some(Instant::now() + settings.patience);
    let mut pause = limits::RETRY_WAIT_MIN;
    loop {
        let until = patience;
        let taken = || {
            if patience.take().is_some() {
                let _ = started.send(Ok(()));
            }
        };
        let ended = hosted.converse(taken, until);
        hosted.end_all();
        if shared.lock().is_stopping {
            return;
        }
        match (ended, patience) {
            (Ok(()), _) => pause = limits::RETRY_WAIT_MIN,
            // An agent that restarts, or has not seen the end of a process before this one.
            (Err(error), None) if is_passing(&error) => {}
            (Err(error), Some(until)) if is_passing(&error) && Instant::now() < until => {}
            (Err(error), Some(_)) => {
                let _ = started.send(Err(error));
                return;
            }
            (Err(error), None) => {
                shared.fail(error);
                return;
            }
        }
        if !shared.sleep(pause) {
            return;
        }
        pause = (pause * 2).min(limits::RETRY_WAIT_MAX);
    }
}

/// Whether the agent may say otherwise a little later.
fn is_passing(error: &ExecutorError) -> bool {
    matches!(error.code, Code::PeerLost | Code::DuplicateRank)
}
