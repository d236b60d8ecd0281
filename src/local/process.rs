//! Processes of a run: started on the run's own thread, heard through one channel, ended for certain (L1).

use super::run::LocalError;
use super::world::Key;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use tokio::sync::mpsc::UnboundedSender;

/// Bytes at the end of a log that are shown.
const TAIL_BYTES: u64 = 2048;

/// Lines of them.
const TAIL_LINES: usize = 8;

/// What processes do.
#[derive(Debug)]
pub(super) enum Happening {
    /// One line of standard output.
    Said { key: Key, start: u64, line: String },
    /// The process is over and reaped, and all that it said was told before.
    Exited { key: Key, start: u64, status: ExitStatus },
}

/// Starts, signals and ends the processes of a run. Dropping it kills them all.
pub(super) struct Processes {
    directory: PathBuf,
    running: BTreeMap<Key, Process>,
    starts: u64,
    happenings: UnboundedSender<Happening>,
}

struct Process {
    /// Counts starts of this run; an older process of the same key has another number.
    start: u64,
    descriptor: OwnedFd,
    stdin: Option<ChildStdin>,
    /// Hears and reaps the process.
    waiter: JoinHandle<()>,
}

impl Processes {
    /// Logs go to `directory`. Lines are bounded in number by what the reference processes do in a round, so the
    /// channel needs no bound of its own.
    pub(super) fn new(directory: &Path, happenings: UnboundedSender<Happening>) -> Self {
        Self { directory: directory.to_owned(), running: BTreeMap::new(), starts: 0, happenings }
    }

    /// Starts a process; `input` is written to its standard input, which stays open if `keep_open`.
    ///
    /// Must be called on the thread that lives as long as the run: children ask the kernel to be told when the
    /// thread that started them ends.
    pub(super) fn start(
        &mut self,
        key: Key,
        mut command: Command,
        input: &[u8],
        keep_open: bool,
    ) -> Result<(), LocalError> {
        let program = PathBuf::from(command.get_program());
        let log = self.log(&key);
        let file = File::options().create(true).append(true).open(&log);
        let file = file.map_err(|source| LocalError::System { action: "open a log", source })?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(file);
        // Ctrl-C in the terminal is for the run, which then ends its processes in order.
        command.process_group(0);
        let failed = |source| LocalError::Start { program: program.clone(), source };
        let mut child = command.spawn().map_err(failed)?;
        self.starts += 1;
        let start = self.starts;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| failed(std::io::Error::other("no process id")))?;
        // Not reaped yet, so the id still names this child.
        let descriptor = pidfd_open(pid, PidfdFlags::empty()).map_err(|error| failed(error.into()))?;
        let mut stdin = child.stdin.take();
        if let Some(stdin) = &mut stdin {
            stdin.write_all(input).map_err(failed)?;
        }
        let stdin = if keep_open { stdin } else { None };
        let (owner, happenings) = (key.clone(), self.happenings.clone());
        let stdout = child.stdout.take();
        // One after the other, so that a process is over only when its last word has been heard.
        let waiter = std::thread::spawn(move || {
            for line in
                stdout.into_iter().flat_map(|stdout| BufReader::new(stdout).lines().map_while(Result::ok))
            {
                // The run is over when nobody listens.
                let _ = happenings.send(Happening::Said { key: owner.clone(), start, line });
            }
            if let Ok(status) = child.wait() {
                let _ = happenings.send(Happening::Exited { key: owner, start, status });
            }
        });
        self.running.insert(key, Process { start, descriptor, stdin, waiter });
        Ok(())
    }

    /// Whether this start of the process is the present one.
    pub(super) fn is_present(&self, key: &Key, start: u64) -> bool {
        self.running.get(key).is_some_and(|process| process.start == start)
    }

    /// Writes a line to the standard input of a process.
    pub(super) fn tell(&mut self, key: &Key, line: &str) {
        if let Some(stdin) = self.running.get_mut(key).and_then(|process| process.stdin.as_mut()) {
            // A process that is gone is heard of by its exit.
            let _ = stdin.write_all(line.as_bytes()).and_then(|()| stdin.write_all(b"\n"));
        }
    }

    /// Ends the standard input of a process: it says its last and ends.
    pub(super) fn end_input(&mut self, key: &Key) {
        if let Some(process) = self.running.get_mut(key) {
            process.stdin = None;
        }
    }

    /// Sends a signal.
    pub(super) fn signal(&self, key: &Key, signal: Signal) {
        if let Some(process) = self.running.get(key) {
            // It may have ended by itself.
            let _ = pidfd_send_signal(&process.descriptor, signal);
        }
    }

    /// The process has ended and been reaped.
    pub(super) fn forget(&mut self, key: &Key) {
        self.running.remove(key);
    }

    /// Keys of the processes that have not ended.
    pub(super) fn keys(&self) -> Vec<Key> {
        self.running.keys().cloned().collect()
    }

    /// The last lines that a process wrote to its log.
    pub(super) fn tail(&self, key: &Key) -> String {
        let read = || {
            let mut file = File::open(self.log(key))?;
            let length = file.metadata()?.len();
            file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            Ok::<_, std::io::Error>(String::from_utf8_lossy(&bytes).into_owned())
        };
        let text = read().unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
    }

    fn log(&self, key: &Key) -> PathBuf {
        let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
        self.directory.join(format!("{}.log", key.to_string().chars().map(plain).collect::<String>()))
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        let running = std::mem::take(&mut self.running);
        for process in running.values() {
            // Also ends a process that is stopped.
            let _ = pidfd_send_signal(&process.descriptor, Signal::KILL);
        }
        for process in running.into_values() {
            // Only a panic of the waiter is an error, and it does nothing that panics.
            let _ = process.waiter.join();
        }
    }
}

/// How a process ended, in words.
pub(super) fn ending(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with code {code}"),
        (None, Some(signal)) => format!("was ended by signal {signal}"),
        (None, None) => "ended".to_owned(),
    }
}
