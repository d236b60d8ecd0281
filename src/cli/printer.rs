//! The one owner of stdout and stderr: data to the first, everything else to the second, no meaning in colour.

use crate::cli::failure::{Exit, Failure};
use crate::cli::json;
use std::io::{self, BufWriter, ErrorKind, Write};

/// Writes what commands have to say.
#[derive(Debug)]
pub struct Printer(());

impl Printer {
    pub(crate) const fn new() -> Self {
        Self(())
    }

    /// Data: `text` and a line end, to stdout.
    ///
    /// # Errors
    /// When stdout cannot be written. A reader that went away (`| head`) is no error: it has what it wanted.
    pub fn data(&self, text: &str) -> Result<(), Failure> {
        let mut out = io::stdout().lock();
        finish(out.write_all(text.as_bytes()).and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush()))
    }

    /// Data as JSON to stdout, in lines down to `depth`; piece by piece, because a plan is too large to be held
    /// once more as text.
    ///
    /// # Errors
    /// As [`Printer::data`].
    pub fn json(&self, value: &impl serde::Serialize, depth: usize) -> Result<(), Failure> {
        let mut out = BufWriter::new(io::stdout().lock());
        match json::write(&mut out, value, depth) {
            Ok(()) => finish(out.write_all(b"\n").and_then(|()| out.flush())),
            Err(error) if error.is_io() => finish(Err(error.into())),
            Err(error) => Err(Failure::failed(error)),
        }
    }

    /// Something worth knowing, to stderr.
    pub fn note(&self, text: &str) {
        self.say(&format!("note: {text}\n"));
    }

    /// The error, its causes and the remedy, to stderr; returns the exit code.
    pub(crate) fn failure(&self, failure: &Failure) -> Exit {
        let code = failure.code.map(|code| format!("{code}: ")).unwrap_or_default();
        let mut said = failure.error.to_string();
        let mut text = format!("error: {code}{said}\n");
        let mut cause = failure.error.source();
        while let Some(error) = cause {
            let words = error.to_string();
            // Some errors end with the words of their cause.
            if !said.ends_with(&words) {
                text.push_str(&format!("  caused by: {words}\n"));
            }
            (said, cause) = (words, error.source());
        }
        if let Some(hint) = &failure.hint {
            text.push_str(&format!("\nhint: {hint}\n"));
        }
        self.say(&text);
        failure.exit
    }

    /// What the argument parser has to say: help and version are data, the rest is wrong usage.
    pub(crate) fn usage(&self, error: &clap::Error) -> Exit {
        // clap picks the stream itself: stdout for help and version.
        let printed = error.print().and_then(|()| io::stdout().flush());
        if error.use_stderr() {
            return Exit::Usage;
        }
        finish(printed).map_or_else(|failure| self.failure(&failure), |()| Exit::Done)
    }

    /// Nothing can be done when stderr cannot be written: the exit code still tells.
    fn say(&self, text: &str) {
        let _ = io::stderr().lock().write_all(text.as_bytes());
    }
}

fn finish(written: io::Result<()>) -> Result<(), Failure> {
    match written {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Failure::failed(error)),
        _ => Ok(()),
    }
}
