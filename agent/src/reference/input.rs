//! What commands a reference process and ends it: standard input of its launcher, or nobody and a signal.

use super::socket::Event;
use super::{RankArgs, ReferenceError};
use rustix::process::Signal;
use std::io::BufRead;
use std::sync::mpsc::Sender;
use tokio::signal::unix::{SignalKind, signal};

/// What happens with lines, and at the end.
pub(super) enum Commands {
    /// Lines are events of each of these ranks; the end ends the process at once.
    To(Vec<Sender<Event>>),
    /// There are no lines; the end runs this and ends the process.
    AtEnd(Box<dyn FnOnce() + Send>),
}

/// Starts to read. `--launcher` is the process that must be the parent: a process that is stopped, and so cannot
/// see the end of its input, dies with it too.
pub(super) fn read_commands(commands: Commands, args: &RankArgs) -> Result<(), ReferenceError> {
    if args.unattended {
        return end_when_told(commands);
    }
    if let Some(launcher) = args.launcher {
        let failed = |source: rustix::io::Errno| ReferenceError::System {
            action: "follow the launcher",
            source: source.into(),
        };
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).map_err(failed)?;
        let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
        if parent.and_then(|pid| u32::try_from(pid).ok()) != Some(launcher) {
            return Err(ReferenceError::Orphan);
        }
    }
    std::thread::spawn(move || {
        let lines = std::io::stdin().lock().lines().map_while(Result::ok);
        match commands {
            Commands::To(ranks) => {
                for line in lines {
                    for events in &ranks {
                        let _ = events.send(Event::Command(line.clone()));
                    }
                }
            }
            Commands::AtEnd(act) => {
                lines.for_each(drop);
                act();
            }
        }
        std::process::exit(0);
    });
    Ok(())
}

/// Ends the process at SIGTERM or SIGINT, which the first process of a container has no other use for.
fn end_when_told(commands: Commands) -> Result<(), ReferenceError> {
    let failed = |source| ReferenceError::System { action: "listen for signals", source };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let signals = {
        let _entered = runtime.enter();
        (signal(SignalKind::terminate()).map_err(failed)?, signal(SignalKind::interrupt()).map_err(failed)?)
    };
    std::thread::spawn(move || {
        let (mut terminate, mut interrupt) = signals;
        runtime.block_on(async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        });
        if let Commands::AtEnd(act) = commands {
            act();
        }
        std::process::exit(0);
    });
    Ok(())
}

/// The step of a `publish STEP`.
pub(super) fn publish_step(line: &str) -> Result<i64, ReferenceError> {
    let step = line.strip_prefix("publish ").and_then(|step| step.parse().ok());
    step.ok_or_else(|| ReferenceError::Command(line.chars().take(80).collect()))
}
