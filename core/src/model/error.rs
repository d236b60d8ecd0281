//! Why a tensor table cannot be read.

use crate::code::Code;
use crate::limits::{HF_DIMS_MAX, TENSOR_NAME_BYTES_MAX, TENSORS_MAX};

/// Why a tensor table cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// Not the JSON that was expected.
    #[error("the {what} cannot be read: {reason}")]
    Json {
        /// Which text.
        what: &'static str,
        /// The parser's words, with line and column.
        reason: String,
    },
    /// More than `TENSORS_MAX` tensors.
    #[error("the table has {found} tensors, at most {TENSORS_MAX} are read")]
    TooMany {
        /// Their number.
        found: usize,
    },
    /// An empty or endless name.
    #[error("the tensor name `{start}` has {found} bytes, 1 to {TENSOR_NAME_BYTES_MAX} are allowed")]
    Name {
        /// Its first characters.
        start: String,
        /// Its length.
        found: usize,
    },
    /// Two tensors of one name.
    #[error("tensor `{name}` is in the table twice")]
    Duplicate {
        /// The name.
        name: String,
    },
    /// More than `HF_DIMS_MAX` dims.
    #[error("tensor `{name}` has {found} dims, at most {HF_DIMS_MAX} are supported")]
    Dims {
        /// The tensor.
        name: String,
        /// Its number of dims.
        found: usize,
    },
    /// More bytes than `i64` counts.
    #[error("tensor `{name}` of shape {shape:?} has more bytes than 63 bits count")]
    Size {
        /// The tensor.
        name: String,
        /// Its extents.
        shape: Vec<u64>,
    },
}

impl TableError {
    pub(super) fn json(what: &'static str, error: &serde_json::Error) -> Self {
        Self::Json { what, reason: error.to_string() }
    }

    /// The stable code.
    #[must_use]
    pub const fn code(&self) -> Code {
        Code::LayoutRejected
    }
}
