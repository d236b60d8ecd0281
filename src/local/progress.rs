//! A progress bar on stderr while bytes move; nothing where stderr is no terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;

/// Bytes of one round that have arrived.
pub(super) struct Progress(Option<ProgressBar>);

impl Progress {
    pub(super) fn new(minimum: u64) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self(None);
        }
        let bar = ProgressBar::with_draw_target(Some(minimum), ProgressDrawTarget::stderr());
        let style =
            "{msg:<22} {wide_bar} {decimal_bytes:>10} / {decimal_total_bytes} {decimal_bytes_per_sec:>12}";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        Self(Some(bar))
    }

    /// What is going on.
    pub(super) fn say(&self, message: impl Into<String>) {
        if let Some(bar) = &self.0 {
            bar.set_message(message.into());
            bar.tick();
        }
    }

    /// A round begins.
    pub(super) fn restart(&self, message: impl Into<String>) {
        if let Some(bar) = &self.0 {
            bar.reset();
        }
        self.say(message);
    }

    /// Bytes that have arrived.
    pub(super) fn show(&self, bytes: u64) {
        if let Some(bar) = &self.0 {
            bar.set_position(bytes);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
