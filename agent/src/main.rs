//! Only parses and calls.

use clap::Parser;
use weightrefit_agent::args::Cli;

fn main() {
    let _ = Cli::parse();
}
