//! The command line of weightrefit, also installed as `kubectl-weightrefit`.

use std::process::ExitCode;

fn main() -> ExitCode {
    weightrefit::cli::main()
}
