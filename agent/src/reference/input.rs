//! Standard input of a reference process: commands of its launcher, and its end when the launcher is gone.

use super::ReferenceError;
use super::socket::Event;
use rustix::process::Signal;
use std::io::BufRead;
use std::sync::mpsc::Sender;

/// What happens with lines, and at the end.
pub(super) enum Commands {
    /// Lines are events; the end ends the process at once.
    To(Sender<Event>),
    /// There are no lines; the end runs this and ends the process.
    AtEnd(Box<dyn FnOnce() + Send>),
}

/// Starts to read. `launcher` is the process that must be the parent: a process that is stopped, and so cannot
/// see the end of its input, dies with it too.
pub(super) fn read_commands(commands: Commands, launcher: Option<u32>) -> Result<(), ReferenceError> {
    if let Some(launcher) = launcher {
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
            Commands::To(events) => {
                for line in lines {
                    let _ = events.send(Event::Command(line));
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

/// The step of a `publish STEP`.
pub(super) fn publish_step(line: &str) -> Result<i64, ReferenceError> {
    let step = line.strip_prefix("publish ").and_then(|step| step.parse().ok());
    step.ok_or_else(|| ReferenceError::Command(line.chars().take(80).collect()))
}
