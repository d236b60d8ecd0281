//! The command line: one file per command. stdout is data, everything else goes to stderr.

mod abort;
mod cluster;
mod completion;
mod coordinate;
mod crd;
mod doctor;
mod explain;
mod failure;
mod history;
mod inject;
mod input;
mod json;
mod layout;
mod local;
mod plan;
mod printer;
mod status;
mod table;
mod tensors;
mod validate;
mod version;

pub use failure::{Exit, Failure};
pub use printer::Printer;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use std::process::ExitCode;

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  refused: reason and remedy are on stderr, nothing was touched
  2  wrong usage
  3  failed while running";

/// Moves exactly the missing weight bytes from RL trainers to inference engines
#[derive(Debug, Parser)]
#[command(name = "weightrefit", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Plan(plan::Plan),
    Layout(layout::Layout),
    Local(local::Local),
    Coordinate(coordinate::Coordinate),
    Validate(validate::Validate),
    Status(status::Status),
    History(history::History),
    Abort(abort::Abort),
    Inject(inject::Inject),
    Explain(explain::Explain),
    Doctor(doctor::Doctor),
    Crd(crd::Crd),
    Completion(completion::Completion),
    Version(version::Version),
}

/// How data on stdout is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum Output {
    /// For people
    #[default]
    Table,
    /// For programs; a stable interface
    Json,
}

/// Parses the arguments, runs the command, and says how it went.
#[must_use]
pub fn main() -> ExitCode {
    let printer = Printer::new();
    let parsed = command().try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
    let command = match parsed {
        Ok(Cli { command }) => command,
        Err(error) => return printer.usage(&error).into(),
    };
    match run(command, &printer) {
        Ok(()) => Exit::Done.into(),
        Err(failure) => printer.failure(&failure).into(),
    }
}

/// What a command has to say while it runs goes to stderr, `default` and graver unless `RUST_LOG` asks for more.
fn log(default: &str) {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env();
    let filter = filter.unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(default));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
}

/// The whole tree, each help text with the exit codes below it.
fn command() -> clap::Command {
    with_exit_codes(Cli::command()).after_help(EXIT_CODES)
}

fn with_exit_codes(command: clap::Command) -> clap::Command {
    let own = command.get_after_help().map(|own| format!("{own}\n\n")).unwrap_or_default();
    command.after_long_help(own + EXIT_CODES).mut_subcommands(with_exit_codes)
}

fn run(command: Command, printer: &Printer) -> Result<(), Failure> {
    match command {
        Command::Plan(command) => command.run(printer),
        Command::Layout(command) => command.run(printer),
        Command::Local(command) => command.run(printer),
        Command::Coordinate(command) => command.run(printer),
        Command::Validate(command) => command.run(printer),
        Command::Status(command) => command.run(printer),
        Command::History(command) => command.run(printer),
        Command::Abort(command) => command.run(printer),
        Command::Inject(command) => command.run(printer),
        Command::Explain(command) => command.run(printer),
        Command::Doctor(command) => command.run(printer),
        Command::Crd(command) => command.run(printer),
        Command::Completion(command) => command.run(printer),
        Command::Version(command) => command.run(printer),
    }
}
