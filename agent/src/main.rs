//! Only parses and calls.

use clap::{CommandFactory, Parser};
use std::io::Write;
use std::process::ExitCode;
use weightrefit_agent::args::{AgentArgs, Cli, Role};
use weightrefit_agent::start::StartError;
use weightrefit_agent::{library, reference, start, supervisor};
use weightrefit_core::code::Code;

fn main() -> ExitCode {
    let Cli { agent, role } = Cli::parse();
    match (role, agent) {
        (Some(Role::Reference(role)), _) => reference::run(role),
        (Some(Role::CopyLibrary(args)), _) => match library::copy(&args) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => failed(error.code(), &error, error.hint()),
        },
        (None, Some(args)) => match run(args) {
            Ok(code) => code,
            Err(error) => failed(error.code(), &error, error.hint()),
        },
        (None, None) => {
            Cli::command().error(clap::error::ErrorKind::MissingRequiredArgument, "no flags given").exit()
        }
    }
}

fn run(args: AgentArgs) -> Result<ExitCode, StartError> {
    match args.supervise && args.worker_of.is_none() {
        true => supervisor::run(&args),
        false => start::run(args).map(|()| ExitCode::SUCCESS),
    }
}

fn failed(code: Code, error: &dyn std::error::Error, hint: &str) -> ExitCode {
    // Nothing is left to do where stderr is closed.
    let _ = writeln!(std::io::stderr(), "{code}: {error}\nhint: {hint}");
    ExitCode::from(1)
}
