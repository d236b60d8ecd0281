//! Only parses and calls.

use clap::{CommandFactory, Parser};
use std::io::Write;
use std::process::ExitCode;
use weightrefit_agent::args::{AgentArgs, Cli};
use weightrefit_agent::start::StartError;
use weightrefit_agent::{reference, start, supervisor};

fn main() -> ExitCode {
    let Cli { agent, role } = Cli::parse();
    match (role, agent) {
        (Some(role), _) => reference::run(role),
        (None, Some(args)) => match run(args) {
            Ok(code) => code,
            Err(error) => {
                // Nothing is left to do where stderr is closed.
                let _ = writeln!(std::io::stderr(), "{}: {error}\nhint: {}", error.code(), error.hint());
                ExitCode::from(1)
            }
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
