//! Headers of safetensors files. Of weights nothing else is read by this package.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use weightrefit_core::model::{Header, LENGTH_BYTES, TableError, header_bytes, read_header};

/// A file that is no weights file.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// It cannot be opened or read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A directory, a pipe, a device: opening some of them would wait for ever.
    #[error("is no regular file")]
    NotRegular,
    /// Its header is truncated or lies.
    #[error(transparent)]
    Table(#[from] TableError),
}

/// Opens a regular file; says its bytes.
pub(crate) fn open(path: &Path) -> Result<(File, u64), HeaderError> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(HeaderError::NotRegular);
    }
    let file = File::open(path)?;
    let bytes = file.metadata()?.len();
    Ok((file, bytes))
}

/// Reads the header of the file `path`.
pub(crate) fn header(path: &Path) -> Result<Header, HeaderError> {
    let (mut file, bytes) = open(path)?;
    let mut start = Vec::new();
    (&mut file).take(LENGTH_BYTES).read_to_end(&mut start)?;
    let needed = header_bytes(&start, bytes)?;
    file.take(needed.saturating_sub(LENGTH_BYTES)).read_to_end(&mut start)?;
    Ok(read_header(&start, bytes)?)
}
