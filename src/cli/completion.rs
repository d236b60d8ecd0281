//! `weightrefit completion`.

use crate::cli::{self, Failure, Printer};

/// Print the completion script of a shell
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example: weightrefit completion bash > ~/.local/share/bash-completion/completions/weightrefit"
)]
pub(crate) struct Completion {
    /// The shell
    shell: clap_complete::Shell,
}

impl Completion {
    pub(crate) fn run(self, printer: &Printer) -> Result<(), Failure> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut cli::command(), "weightrefit", &mut script);
        printer.data(String::from_utf8(script).map_err(Failure::failed)?.trim_end())
    }
}
