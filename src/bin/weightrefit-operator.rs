//! The operator of weightrefit.

use std::process::ExitCode;

fn main() -> ExitCode {
    weightrefit::operator::main()
}
