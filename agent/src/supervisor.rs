//! `--supervise`: the agent as a worker process of this one, which starts it again in place. A container whose first
//! process is this one keeps its restart count: controllers that make whole groups of pods anew where one container
//! began again, as LeaderWorkerSet does, do not hear of an agent that did.
//!
//! Invariants:
//! - V1: at most one worker runs, and none without this process.
//! - V2: a worker that refused what it was given is not started again: only a person can change that.
//! - V3: a worker that fails at once again and again is started with growing pauses.
//! - V4: whatever is orphaned to this process is reaped.

use crate::args::AgentArgs;
use crate::limits::{WORKER_PAUSE_MAX, WORKER_PAUSE_MIN, WORKER_SETTLED};
use crate::start::{self, StartError, system};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, wait};
use std::process::{Child, Command, ExitCode};
use std::time::Duration;
use tokio::signal::unix::{Signal as Signals, SignalKind, signal};
use tokio::time::{Instant, sleep};

/// Exit codes of a worker that will not do what it was told: refused, and wrong usage.
const REFUSALS: [i32; 2] = [1, 2];

/// Runs workers until one has refused its settings, or until this process is told to stop.
///
/// # Errors
/// The system does not let it start a worker or hear of one.
pub fn run(args: &AgentArgs) -> Result<ExitCode, StartError> {
    if let Some(parent) = args.exit_with_parent {
        start::follow_parent(parent)?;
    }
    start::log(args.log_format);
    // All on this thread: workers end with the thread that started them.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(system("start the runtime"))?.block_on(supervise())
}

async fn supervise() -> Result<ExitCode, StartError> {
    let listen = |kind| signal(kind).map_err(system("listen for signals"));
    let mut children = listen(SignalKind::child())?;
    let mut stops =
        Stops { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? };
    let mut pause = Duration::ZERO;
    loop {
        let begun = Instant::now();
        let worker = start_worker()?;
        let pid = Pid::from_child(&worker);
        let mut is_stopping = false;
        let ending = loop {
            // Before waiting, as a signal may stand for several ends.
            if let Some(ending) = reaped(pid)? {
                break ending;
            }
            tokio::select! {
                _ = children.recv() => {}
                stop = stops.next() => {
                    is_stopping = true;
                    // It is reaped here alone, so its number is nobody else's yet.
                    let _ = kill_process(pid, stop);
                }
            }
        };
        let code = ending.exit_status();
        if is_stopping || code.is_some_and(|code| REFUSALS.contains(&code)) {
            return Ok(exit_code(ending));
        }
        pause = next_pause(pause, begun.elapsed());
        let (signal, pause_ms) = (ending.terminating_signal(), pause.as_millis() as u64);
        tracing::warn!(?code, ?signal, pause_ms, "agent ended; starting it again");
        tokio::select! {
            () = sleep(pause) => {}
            _ = stops.next() => return Ok(ExitCode::SUCCESS),
        }
    }
}

/// Requests to end.
struct Stops {
    terminate: Signals,
    interrupt: Signals,
}

impl Stops {
    async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.terminate.recv() => Signal::TERM,
            _ = self.interrupt.recv() => Signal::INT,
        }
    }
}

fn start_worker() -> Result<Child, StartError> {
    let failed = system("start the agent");
    let program = std::env::current_exe().map_err(&failed)?;
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).arg("--worker-of").arg(std::process::id().to_string());
    command.spawn().map_err(failed)
}

/// Takes note of all children that have ended; how the worker did, if it is one of them.
fn reaped(worker: Pid) -> Result<Option<WaitStatus>, StartError> {
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) if pid == worker => return Ok(Some(status)),
            Ok(Some(_)) | Err(Errno::INTR) => {}
            Ok(None) => return Ok(None),
            Err(error) => return Err(system("wait for the agent")(error.into())),
        }
    }
}

/// As a shell has it: 128 and the signal, where it was one.
fn exit_code(ending: WaitStatus) -> ExitCode {
    let code = ending.exit_status().or_else(|| Some(128 + ending.terminating_signal()?));
    ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX))
}

/// None after a worker that had settled, else longer than the one before.
fn next_pause(before: Duration, lived: Duration) -> Duration {
    match lived >= WORKER_SETTLED {
        true => Duration::ZERO,
        false => (before * 2).clamp(WORKER_PAUSE_MIN, WORKER_PAUSE_MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_while_workers_fail_at_once_and_end_when_one_has_settled() {
        let mut pauses = vec![next_pause(Duration::ZERO, Duration::ZERO)];
        while pauses.len() < 20 {
            pauses.push(next_pause(pauses[pauses.len() - 1], WORKER_SETTLED - Duration::from_millis(1)));
        }
        assert_eq!(pauses[0], WORKER_PAUSE_MIN);
        assert!(pauses.is_sorted() && pauses[1] > pauses[0], "{pauses:?}");
        assert_eq!(pauses[19], WORKER_PAUSE_MAX);
        assert_eq!(next_pause(WORKER_PAUSE_MAX, WORKER_SETTLED), Duration::ZERO);
    }
}
