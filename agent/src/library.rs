//! Brings `libweightrefit.so` of this image to where the containers of a pod see it: the image needs no shell for that.

use clap::Args;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use weightrefit_core::code::Code;

/// Where the image has the library.
const LIBRARY: &str = "/usr/lib/weightrefit/libweightrefit.so";

/// Settings of the copy.
#[derive(Debug, Clone, Args)]
pub struct LibraryArgs {
    /// Folder to copy the library to.
    #[arg(long, value_name = "FOLDER")]
    pub to: PathBuf,
    /// The library.
    #[arg(long, value_name = "PATH", default_value = LIBRARY)]
    pub from: PathBuf,
}

/// The library is not there now.
#[derive(Debug, thiserror::Error)]
#[error("cannot copy {} to {}: {source}", .from.display(), .to.display())]
pub struct CopyError {
    from: PathBuf,
    to: PathBuf,
    source: io::Error,
}

impl CopyError {
    /// The stable code.
    #[must_use]
    pub const fn code(&self) -> Code {
        Code::Unsupported
    }

    /// What a person can do.
    #[must_use]
    pub fn hint(&self) -> &'static str {
        match self.source.kind() {
            io::ErrorKind::NotFound => "Take an agent image that has the library, and a folder that exists.",
            _ => {
                "Check that this user may write into the folder, and that it has room for the library twice."
            }
        }
    }
}

/// Copies it, whole or not at all: a container that starts again replaces what processes of the pod have opened.
///
/// # Errors
/// There is no library, or no room for it.
pub fn copy(args: &LibraryArgs) -> Result<(), CopyError> {
    let LibraryArgs { to, from } = args;
    copy_whole(from, to).map_err(|source| CopyError { from: from.clone(), to: to.clone(), source })
}

fn copy_whole(from: &Path, to: &Path) -> io::Result<()> {
    let name = from.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let unfinished = to.join(".unfinished");
    let mut source = File::open(from)?;
    io::copy(&mut source, &mut File::create(&unfinished)?)?;
    fs::rename(&unfinished, to.join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_replaced_whole_or_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let image = folder.path().join("libweightrefit.so");
        let args = LibraryArgs { to: folder.path().join("pod"), from: image.clone() };
        let delivered = args.to.join("libweightrefit.so");
        let error = copy(&args).expect_err("there is neither");
        assert!(error.hint().contains("agent image"), "{error}");
        fs::create_dir(&args.to).expect("a folder");
        for content in ["first", "second"] {
            let open = File::open(&delivered).ok();
            fs::write(&image, content).expect("a file");
            copy(&args).expect("copied");
            assert_eq!(fs::read_to_string(&delivered).expect("a file"), content);
            // Who has opened the former goes on with it.
            let first = open.map(|file| io::read_to_string(file).expect("a file"));
            assert_eq!(first, (content == "second").then(|| "first".to_owned()));
        }
        fs::remove_file(&image).expect("a file");
        copy(&args).expect_err("it is gone");
        assert_eq!(fs::read_to_string(&delivered).expect("a file"), "second");
        assert_eq!(fs::read_dir(&args.to).expect("a folder").count(), 1, "nothing else is left");
    }
}
