//! The private directory of a run, and the process that removes it when this one cannot (L1).

use super::run::LocalError;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

/// A socket's path is at most 107 bytes (unix(7)); its name here is a number and a word.
const PATH_BYTES_MAX: usize = 107 - "/4294967295.replica".len();

/// Sockets, logs and small files of one run, mode 0700.
pub(super) struct Directory {
    directory: Option<TempDir>,
    /// Waits for the end of its input, which only this process holds.
    cleanup: Child,
}

impl Directory {
    pub(super) fn new(agent: &Path) -> Result<Self, LocalError> {
        let parent = std::env::temp_dir();
        let failed = |source| LocalError::Directory { parent: parent.clone(), source };
        let mode = std::fs::Permissions::from_mode(0o700);
        let directory =
            tempfile::Builder::new().prefix("weightrefit-").permissions(mode).tempdir().map_err(failed)?;
        let bytes = directory.path().as_os_str().len();
        if bytes > PATH_BYTES_MAX {
            let problem = format!("its path of {bytes} bytes leaves no room for a socket's name");
            return Err(failed(io::Error::new(io::ErrorKind::InvalidFilename, problem)));
        }
        let cleanup = Command::new(agent)
            .arg("reference-cleanup")
            .arg(directory.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Neither Ctrl-C of the terminal nor a signal to this process's group may reach it.
            .process_group(0)
            .spawn()
            .map_err(|source| LocalError::Start { program: agent.to_owned(), source })?;
        Ok(Self { directory: Some(directory), cleanup })
    }

    pub(super) fn path(&self) -> &Path {
        self.directory.as_ref().map_or(Path::new(""), TempDir::path)
    }

    /// Writes a small file.
    pub(super) fn write(&self, name: &str, content: &[u8]) -> Result<std::path::PathBuf, LocalError> {
        let path = self.path().join(name);
        let written: io::Result<()> = std::fs::write(&path, content);
        written.map_err(|source| LocalError::System { action: "write to the private directory", source })?;
        Ok(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        drop(self.directory.take());
        drop(self.cleanup.stdin.take());
        // It ends at once: its input has ended and there is nothing left to remove.
        let _ = self.cleanup.wait();
    }
}
