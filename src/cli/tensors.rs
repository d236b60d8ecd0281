//! The tensors that `--tensors` gives: a safetensors file, an index beside its shards, or a plain list. Of
//! weights only the headers are read.

use crate::api::mistaken::Sort;
use crate::api::problem::FieldPath;
use crate::cli::{Failure, input};
use crate::safetensors::{self, HeaderError};
use std::io::Read;
use std::path::{Path, PathBuf};
use weightrefit_core::model::{self, Header, Index, LENGTH_BYTES, TableError, TensorTable};

/// `--tensors`.
#[derive(Debug, clap::Args)]
pub(crate) struct TensorsFile {
    /// Take the tensors from this file, whatever `spec.model` says: a safetensors file, a
    /// `model.safetensors.index.json` beside its shards, or `{"tensors": [{"name", "shape", "dtype"}]}`. `spec.model`
    /// stays required (`{type: Registered}` will do), and presets go on reading its config.json
    #[arg(long, value_name = "FILE")]
    tensors: Option<PathBuf>,
}

impl TensorsFile {
    /// The tensor table, where the file is given.
    pub(crate) fn read(&self) -> Result<Option<TensorTable>, Failure> {
        self.tensors.as_deref().map(read).transpose()
    }
}

/// The tensor table of the file `path`.
fn read(path: &Path) -> Result<TensorTable, Failure> {
    if !is_json(path)? {
        return Ok(header(path)?.table);
    }
    let text = input::text(path)?;
    let refuse = |error| refused(path, error);
    if !is_index(&text) {
        return model::read_list(&text).map_err(|error| match Sort::TensorList.mistaken(&text) {
            Some(problem) => {
                let hint = problem.hint(&FieldPath::default());
                Failure::refused(format!("{}: {problem}", path.display()), hint)
            }
            None => refuse(error),
        });
    }
    let index = Index::read(&text).map_err(refuse)?;
    let shards: Vec<_> = index.shards().iter().map(|shard| path.with_file_name(shard)).collect();
    let headers = shards.iter().map(|shard| header(shard)).collect::<Result<Vec<_>, _>>()?;
    Ok(index.join(&headers).map_err(refuse)?.table)
}

/// A safetensors file starts with the length of its header in eight bytes, and no length that a header may have
/// is made of printable ones only.
fn is_json(path: &Path) -> Result<bool, Failure> {
    let (file, _) = safetensors::open(path).map_err(|error| unreadable(path, error))?;
    let mut start = Vec::new();
    let read = file.take(LENGTH_BYTES).read_to_end(&mut start);
    read.map_err(|error| unreadable(path, error.into()))?;
    Ok(start.iter().all(|byte| byte.is_ascii_graphic() || byte.is_ascii_whitespace()))
}

/// An index has the key `weight_map`; what is wrong with either kind is then said by its own reader.
fn is_index(text: &str) -> bool {
    #[derive(serde::Deserialize)]
    struct Probe {
        #[expect(dead_code, reason = "only its presence counts")]
        weight_map: serde::de::IgnoredAny,
    }
    serde_json::from_str::<Probe>(text).is_ok()
}

fn header(path: &Path) -> Result<Header, Failure> {
    safetensors::header(path).map_err(|error| unreadable(path, error))
}

fn unreadable(path: &Path, error: HeaderError) -> Failure {
    match error {
        HeaderError::Table(error) => refused(path, error),
        HeaderError::NotRegular => {
            let hint = "Name a safetensors file, an index beside its shards, or a JSON list of tensors.";
            Failure::refused(format!("{} is no regular file", path.display()), hint)
        }
        HeaderError::Io(error) => {
            Failure::refused(format!("{}: {error}", path.display()), "Correct the path, or fetch the file.")
        }
    }
}

fn refused(path: &Path, error: TableError) -> Failure {
    let (hint, code) = (error.hint(), error.code());
    Failure::refused(format!("{}: {error}", path.display()), hint).coded(code)
}
