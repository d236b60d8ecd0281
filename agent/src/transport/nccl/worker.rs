//! Who owns a rank's communicator: a thread of this process, or one in the rank's own ([`super::remote`]).

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

pub(super) type Done<T> = Box<dyn FnOnce(Result<T, FlowError>) + Send>;
pub(super) type Stopped = Box<dyn Fn() -> bool + Send>;
/// Called once nothing of an attempt runs any more.
pub(super) type Ended = Box<dyn FnOnce() + Send>;

/// A rank's communicator. Dropping it ends what there is.
pub(super) trait Worker: std::fmt::Debug + Send + Sync {
    /// Joins an attempt.
    fn form(&self, attempt: u32, join: Join, chunk: u64, done: Done<()>);

    /// Moves the bytes of a round.
    fn run(&self, attempt: u32, job: Job, stopped: Stopped, done: Done<u64>);

    /// Ends an attempt, whatever it is doing, by what another rank said of itself where one did; later ones are not
    /// begun any more up to that one.
    fn abort(&self, attempt: u32, reason: Option<Reason>, done: Ended);

    /// Ends what there is, whatever its number.
    fn abort_current(&self, done: Ended);
}

enum Command {
    Form { attempt: u32, join: Join, chunk: u64, done: Done<()> },
    Run { attempt: u32, job: Job, stopped: Stopped, done: Done<u64> },
    Abort { done: Ended },
}

/// What to do where a communicator cannot be ended in time, and kernels may go on writing memory of others.
pub(super) type OnWedge = Box<dyn Fn() + Send>;

/// Nobody else than this thread is ever inside NCCL for its communicator.
pub(super) struct Thread {
    commands: Sender<Command>,
    /// Attempts up to this one are over, whatever the thread is doing.
    over: Arc<AtomicU32>,
    /// The attempt that was joined last.
    latest: AtomicU32,
    why: Why,
}

/// The attempt that ended last, and what another rank said of itself that ended it.
type Why = Arc<Mutex<Option<(u32, Reason)>>>;

impl std::fmt::Debug for Thread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Thread").field("over", &self.over).finish_non_exhaustive()
    }
}

impl Thread {
    pub(super) fn start(nccl: Nccl, gpu: Arc<Gpu>, name: String, on_wedge: OnWedge) -> std::io::Result<Self> {
        let (commands, inbox) = channel();
        let over = Arc::new(AtomicU32::new(0));
        let why = Why::default();
        let held = Held { nccl, gpu, over: Arc::clone(&over), why: Arc::clone(&why), lane: None, on_wedge };
        std::thread::Builder::new().name(name).spawn(move || held.serve(&inbox))?;
        Ok(Self { commands, over, latest: AtomicU32::new(0), why })
    }

    fn command(&self, command: Command) {
        // The thread ends after this sender only, unless it has broken: then nothing is answered, and the lane's
        // silence ends the attempt.
        let _ = self.commands.send(command);
    }
}

impl Worker for Thread {
    fn form(&self, attempt: u32, join: Join, chunk: u64, done: Done<()>) {
        self.latest.store(attempt, Ordering::Relaxed);
        self.command(Command::Form { attempt, join, chunk, done });
    }

    fn run(&self, attempt: u32, job: Job, stopped: Stopped, done: Done<u64>) {
        self.command(Command::Run { attempt, job, stopped, done });
    }

    fn abort(&self, attempt: u32, reason: Option<Reason>, done: Ended) {
        // First, since the thread asks for it as soon as the attempt is over.
        *self.why.lock().unwrap_or_else(PoisonError::into_inner) = reason.map(|reason| (attempt, reason));
        self.over.fetch_max(attempt, Ordering::Relaxed);
        self.command(Command::Abort { done });
    }

    fn abort_current(&self, done: Ended) {
        self.abort(self.latest.load(Ordering::Relaxed), None, done);
    }
}

impl Drop for Thread {
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
    on_wedge: OnWedge,
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
                    let formed = self.end().and_then(|()| self.form(attempt, &join, chunk));
                    done(formed);
                }
                Command::Run { attempt, job, stopped, done } => {
                    let result = self.run(attempt, &job, &stopped);
                    drop(job); // its memory is not used any more when its end is told
                    done(result);
                }
                Command::Abort { done } => {
                    // Who waits for a wedged one hears of it otherwise.
                    if self.end().is_ok() {
                        done();
                    }
                }
            }
        }
        // The last that it could tell is told.
        let _ = self.end();
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
            Err(error) => match joining.abort(limits::ABORT_MAX) {
                Ok(Aborted) => Err(error),
                Err(Wedged) => Err(self.wedged(None)),
            },
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
            self.end()?;
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
    fn end(&mut self) -> Result<(), FlowError> {
        let Some(Formed { communicator, kept, .. }) = self.lane.take() else { return Ok(()) };
        let half: Duration = limits::ABORT_MAX / 2;
        if let Err(Wedged) = communicator.revoke(half).abort(half) {
            return Err(self.wedged(kept));
        }
        let until = Instant::now() + limits::ABORT_MAX;
        while kept.as_ref().is_some_and(|kept| !kept.is_idle()) {
            if Instant::now() >= until {
                return Err(self.wedged(kept));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// L4: kernels may go on for ever, so that what they use is never freed.
    fn wedged(&self, kept: Option<Kept>) -> FlowError {
        std::mem::forget((kept, Arc::clone(&self.gpu)));
        (self.on_wedge)();
        FlowError::Wedged
    }
}

#[cfg(test)]
mod tests;
