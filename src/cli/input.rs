//! Files that commands read.

use crate::api::documents::{Document, Documents, SourceText};
use crate::api::manifest::Manifest;
use crate::api::problem::nearest;
use crate::cli::{Failure, Printer};
use crate::limits;
use std::fs::{self, File, FileType};
use std::io::{self, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// `-f`.
#[derive(Debug, clap::Args)]
pub(crate) struct Files {
    /// YAML that `kubectl apply` takes: the WeightRefit and the ConfigMaps it names; repeatable. `-` is stdin, and
    /// `<(command)` works; a named pipe is refused, as opening one waits for whoever writes to it
    #[arg(short, long = "filename", value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
}

impl Files {
    pub(crate) fn documents(&self, printer: &Printer) -> Result<Documents, Failure> {
        documents(&self.files, printer)
    }
}

/// The documents of `files`, at least one WeightRefit among them.
pub(crate) fn documents(files: &[PathBuf], printer: &Printer) -> Result<Documents, Failure> {
    let mut sources = Vec::new();
    for path in files {
        sources.push(SourceText { file: path.display().to_string(), text: text(path)? });
    }
    let documents = Documents::parse(&sources)?;
    for ignored in &documents.ignored {
        printer.note(&format!("{}: {} `{}` is not used here", ignored.file, ignored.kind, ignored.name));
    }
    if documents.refits.is_empty() {
        return Err(Failure::refused(
            "no WeightRefit in the given files",
            "Add the file that holds it with `-f`.",
        ));
    }
    Ok(documents)
}

/// Which refit a command is about.
#[derive(Debug, clap::Args)]
pub(crate) struct Which {
    /// Name of the WeightRefit, where the files hold several
    #[arg(value_name = "REFIT")]
    refit: Option<String>,
}

impl Which {
    pub(crate) fn of<'d>(&self, documents: &'d Documents) -> Result<&'d Document<Manifest>, Failure> {
        let names: Vec<String> =
            documents.refits.iter().map(|refit| refit.value.metadata.name.clone()).collect();
        let all = || names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        match (&self.refit, documents.refits.as_slice()) {
            (None, [one]) => Ok(one),
            (None, _) => Err(Failure::usage(
                format!("the files hold {} WeightRefits", names.len()),
                format!("Name one of them: {}.", all()),
            )),
            (Some(name), refits) => {
                let found = refits.iter().find(|refit| refit.value.metadata.name == *name);
                found.ok_or_else(|| {
                    let hint = nearest(name, &names).map(|near| format!("Did you mean `{near}`?"));
                    let hint = hint.unwrap_or_else(|| format!("The files hold: {}.", all()));
                    Failure::refused(format!("WeightRefit `{name}` is not in the given files"), hint)
                })
            }
        }
    }
}

/// The text of the file `path`, `-` being stdin.
pub(crate) fn text(path: &Path) -> Result<String, Failure> {
    let name = path.display();
    let mut bytes = Vec::new();
    let limit = limits::INPUT_FILE_BYTES_MAX;
    let unreadable = |error: io::Error| {
        Failure::refused(format!("{name}: {error}"), "Correct the path, or the file's mode.")
    };
    let read = if path.as_os_str() == "-" {
        io::stdin().lock().take(limit + 1).read_to_end(&mut bytes)
    } else {
        let kind = fs::metadata(path).map_err(unreadable)?.file_type();
        if !kind.is_file() && !is_open_already(path) {
            return Err(no_file(path, kind));
        }
        File::open(path).and_then(|file| file.take(limit + 1).read_to_end(&mut bytes))
    };
    read.map_err(unreadable)?;
    if bytes.len() as u64 > limit {
        let hint = "Give the YAML or JSON document, not a weights file.";
        return Err(Failure::refused(format!("{name} has more than {limit} bytes"), hint));
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Failure::refused(
            format!("{name}: byte {at} is not UTF-8 text"),
            "Give the YAML or JSON document in UTF-8; a weights file is given with `--tensors`.",
        )
    })
}

/// Whether the path names a descriptor of this process, as a shell's `<(command)` does. Its other end is there
/// already, and reading ends when that closes.
fn is_open_already(path: &Path) -> bool {
    path == Path::new("/dev/stdin")
        || ["/dev/fd", "/proc/self/fd"].iter().any(|folder| path.parent() == Some(Path::new(folder)))
}

/// Opening what is no regular file may wait for ever, or never end.
fn no_file(path: &Path, kind: FileType) -> Failure {
    let (what, hint) = if kind.is_dir() {
        ("a directory", "Name its files one by one.")
    } else if kind.is_fifo() {
        ("a named pipe", "Give a command's output as `<(command)`, or through a pipe to `-`.")
    } else if kind.is_socket() {
        ("a socket", "Name the YAML or JSON document.")
    } else {
        ("a device", "Name the YAML or JSON document.")
    };
    Failure::refused(format!("{} is {what}, not a file", path.display()), hint)
}
