//! The safetensors file that trainer and check start from.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use weightrefit_core::dtype::DType;
use weightrefit_core::model::{Header, LENGTH_BYTES, TableError, TensorMeta, header_bytes, read_header};

/// An open weights file.
pub(super) struct Weights {
    path: PathBuf,
    file: File,
    header: Header,
}

/// One tensor of the file, read whole.
pub(super) struct Tensor {
    pub(super) dtype: DType,
    pub(super) shape: Vec<u64>,
    /// Row-major, little-endian.
    pub(super) bytes: Vec<u8>,
}

/// A file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum WeightsError {
    #[error("cannot read weights file {}: {source}", .path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("weights file {}: {source}", .path.display())]
    Header { path: PathBuf, source: TableError },
    #[error("weights file {} has no tensor `{name}`", .path.display())]
    Missing { path: PathBuf, name: String },
    #[error("weights file {} has tensor `{name}` as {found}, the refit as {wanted}", .path.display())]
    Differs { path: PathBuf, name: String, found: String, wanted: String },
}

impl Weights {
    /// Reads the header.
    pub(super) fn open(path: &Path) -> Result<Self, WeightsError> {
        let failed = |source| WeightsError::Io { path: path.to_owned(), source };
        let refused = |source| WeightsError::Header { path: path.to_owned(), source };
        let file = File::open(path).map_err(failed)?;
        let bytes = file.metadata().map_err(failed)?.len();
        let mut start = vec![0; LENGTH_BYTES.min(bytes) as usize];
        file.read_exact_at(&mut start, 0).map_err(failed)?;
        start.resize(header_bytes(&start, bytes).map_err(refused)? as usize, 0);
        file.read_exact_at(&mut start, 0).map_err(failed)?;
        let header = read_header(&start, bytes).map_err(refused)?;
        Ok(Self { path: path.to_owned(), file, header })
    }

    /// Reads one tensor, which must be as the refit says.
    pub(super) fn tensor(&self, wanted: &TensorMeta) -> Result<Tensor, WeightsError> {
        let (path, name) = (self.path.clone(), wanted.name.clone());
        let Some(id) = self.header.table.find(&wanted.name) else {
            return Err(WeightsError::Missing { path, name });
        };
        let found = &self.header.table[id];
        if found != wanted {
            let shown = |meta: &TensorMeta| format!("{} {:?}", meta.dtype, meta.shape);
            return Err(WeightsError::Differs { path, name, found: shown(found), wanted: shown(wanted) });
        }
        let mut bytes = vec![0; found.bytes() as usize];
        let read = self.file.read_exact_at(&mut bytes, self.header.offsets[id.0 as usize]);
        read.map_err(|source| WeightsError::Io { path, source })?;
        Ok(Tensor { dtype: found.dtype, shape: found.shape.clone(), bytes })
    }
}
