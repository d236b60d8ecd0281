//! The thread that owns a rank's communicator: nobody else is ever inside NCCL for it.

use super::FlowError;
use super::communicator::{Aborted, Initialising, Join, Ready, Wedged};
use super::flow::{self, Job, Kept};
use super::gpu::{Gpu, Waiting};
use super::lane::Reason;
use super::symbols::Nccl;
use crate::limits;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use weightrefit_core::code::Code;

type Done<T> = Box<dyn FnOnce(Result<T, FlowError>) + Send>;
type Stopped = Box<dyn Fn() -> bool + Send>;

enum Command {
    Form { attempt: u32, join: Join, chunk: u64, done: Done<()> },
    Run { attempt: u32, job: Job, stopped: Stopped, done: Done<u64> },
    Abort { done: Box<dyn FnOnce() + Send> },
}

/// To the thread. Dropping it ends the thread, and the communicator before.
pub(super) struct Worker {
    commands: Sender<Command>,
    /// Attempts up to this one are over, whatever the thread is doing.
    over: Arc<AtomicU32>,
    /// The attempt that was joined last.
    latest: AtomicU32,
    why: Why,
}

/// The attempt that ended last, and what another rank said of itself that ended it.
type Why = Arc<Mutex<Option<(u32, Reason)>>>;

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").field("over", &self.over).finish_non_exhaustive()
    }
}

impl Worker {
    pub(super) fn start(nccl: Nccl, gpu: Arc<Gpu>, name: String) -> std::io::Result<Self> {
        let (commands, inbox) = channel();
        let over = Arc::new(AtomicU32::new(0));
        let why = Why::default();
        let held = Held { nccl, gpu, over: Arc::clone(&over), why: Arc::clone(&why), lane: None };
        std::thread::Builder::new().name(name).spawn(move || held.serve(&inbox))?;
        Ok(Self { commands, over, latest: AtomicU32::new(0), why })
    }

    /// Joins an attempt.
    pub(super) fn form(&self, attempt: u32, join: Join, chunk: u64, done: Done<()>) {
        self.latest.store(attempt, Ordering::Relaxed);
        self.command(Command::Form { attempt, join, chunk, done });
    }

    /// Moves the bytes of a round.
    pub(super) fn run(&self, attempt: u32, job: Job, stopped: Stopped, done: Done<u64>) {
        self.command(Command::Run { attempt, job, stopped, done });
    }

    /// Ends what there is, whatever its number.
    pub(super) fn abort_current(&self, done: Box<dyn FnOnce() + Send>) {
        self.abort(self.latest.load(Ordering::Relaxed), None, done);
    }

    /// Ends an attempt, whatever it is doing; `done` is called once nothing of it runs.
    pub(super) fn abort(&self, attempt: u32, reason: Option<Reason>, done: Box<dyn FnOnce() + Send>) {
        // First, since the thread asks for it as soon as the attempt is over.
        *self.why.lock().unwrap_or_else(PoisonError::into_inner) = reason.map(|reason| (attempt, reason));
        self.over.fetch_max(attempt, Ordering::Relaxed);
        self.command(Command::Abort { done });
    }

    fn command(&self, command: Command) {
        // The thread ends after this sender only, unless it has broken: then nothing is answered, and the lane's
        // silence ends the attempt.
        let _ = self.commands.send(command);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.over.store(u32::MAX, Ordering::Relaxed);
    }
}

/// What the thread has.
struct Held {
    nccl: Nccl,
    gpu: Arc<Gpu>,
    over: Arc<AtomicU32>,
    why: Why,
    lane: Option<Formed>,
}

struct Formed {
    attempt: u32,
    communicator: Ready,
    chunk: u64,
    /// None before the first round.
    kept: Option<Kept>,
}

impl Held {
    fn serve(mut self, inbox: &Receiver<Command>) {
        while let Ok(command) = inbox.recv() {
            match command {
                Command::Form { attempt, join, chunk, done } => {
                    self.end();
                    done(self.form(attempt, &join, chunk));
                }
                Command::Run { attempt, job, stopped, done } => {
                    let result = self.run(attempt, &job, &stopped);
                    drop(job); // its memory is not used any more when its end is told
                    done(result);
                }
                Command::Abort { done } => {
                    self.end();
                    done();
                }
            }
        }
        self.end();
    }

    fn form(&mut self, attempt: u32, join: &Join, chunk: u64) -> Result<(), FlowError> {
        let joining = Initialising::start(&self.nccl, self.gpu.context(), join)?;
        let stopped = || self.over.load(Ordering::Relaxed) >= attempt;
        let waiting = Waiting {
            stopped: &stopped,
            deadline: Instant::now() + limits::LANE_FORMING_MAX,
            healthy: &|| Ok(()),
        };
        match waiting.until("all ranks of the lane", || Ok(joining.is_ready()?)) {
            Ok(()) => {
                self.lane = Some(Formed { attempt, communicator: joining.ready(), chunk, kept: None });
                Ok(())
            }
            Err(error) => {
                or_exit(joining.abort(limits::ABORT_MAX));
                Err(error)
            }
        }
    }

    fn run(&mut self, attempt: u32, job: &Job, stopped: &Stopped) -> Result<u64, FlowError> {
        let Some(formed) = self.lane.as_mut().filter(|formed| formed.attempt == attempt) else {
            return Err(self.ended(attempt));
        };
        let over = || self.over.load(Ordering::Relaxed) >= attempt;
        let stop = || stopped() || over();
        let Formed { communicator, chunk, kept, .. } = formed;
        let result = flow::run(job, &self.gpu, communicator, *chunk, &stop, kept);
        let gone = result.is_err() && over();
        if result.is_err() {
            self.end();
        }
        if gone { Err(self.ended(attempt)) } else { result }
    }

    /// What ended an attempt that is over.
    fn ended(&self, attempt: u32) -> FlowError {
        match &*self.why.lock().unwrap_or_else(PoisonError::into_inner) {
            Some((of, Reason { code, text })) if *of == attempt => {
                FlowError::Ended { code: *code, detail: text.clone() }
            }
            _ => FlowError::Gone,
        }
    }

    /// Ends the communicator, if there is one; afterwards nothing of it runs, and nothing of it is on the device.
    fn end(&mut self) {
        let Some(Formed { communicator, kept, .. }) = self.lane.take() else { return };
        let half: Duration = limits::ABORT_MAX / 2;
        or_exit(communicator.revoke(half).abort(half));
        let until = Instant::now() + limits::ABORT_MAX;
        while kept.as_ref().is_some_and(|kept| !kept.is_idle()) {
            if Instant::now() >= until {
                or_exit(Err(Wedged));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// L4: kernels may go on writing memory that belongs to others, so only the end of the process makes it safe.
fn or_exit(aborted: Result<Aborted, Wedged>) {
    if let Err(Wedged) = aborted {
        tracing::error!(code = %Code::AgentWedged, "a communicator could not be aborted in time: this process ends");
        std::process::exit(3);
    }
}

#[cfg(test)]
mod tests;
