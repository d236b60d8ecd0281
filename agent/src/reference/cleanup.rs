//! Removes a run's directory when its launcher is gone, however it went.

use super::ReferenceError;
use std::io::Read;
use std::path::PathBuf;
use std::time::Duration;

/// Attempts to remove the directory: processes that the kernel is ending may still write into it.
const ATTEMPTS: u32 = 100;

/// Between two attempts.
const RETRY: Duration = Duration::from_millis(50);

/// Settings.
#[derive(Debug, Clone, clap::Args)]
pub struct CleanupArgs {
    /// The directory.
    directory: PathBuf,
}

/// Waits for the end of standard input, which only the launcher holds open.
pub(super) fn run(args: &CleanupArgs) -> Result<(), ReferenceError> {
    let failed = |action| move |source| ReferenceError::System { action, source };
    std::io::stdin().lock().read_to_end(&mut Vec::new()).map_err(failed("read standard input"))?;
    let mut attempt = 0;
    loop {
        attempt += 1;
        match std::fs::remove_dir_all(&args.directory) {
            _ if !args.directory.exists() => return Ok(()),
            Err(error) if attempt == ATTEMPTS => {
                return Err(failed("remove the directory of the run")(error));
            }
            _ => std::thread::sleep(RETRY),
        }
    }
}
