//! The tensor table: what the trained model consists of.
//!
//! Invariants:
//! - T1: names are unique, not empty and bounded; a table has at most `TENSORS_MAX` tensors.
//! - T2: elements and bytes of every tensor fit `i64`; it has at most `HF_DIMS_MAX` dims.

use super::error::TableError;
use crate::dtype::DType;
use crate::id::TensorId;
use crate::limits::{HF_DIMS_MAX, TENSOR_BYTES_MAX, TENSOR_NAME_BYTES_MAX, TENSORS_MAX};
use std::sync::Arc;

/// One tensor of the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorMeta {
    /// HF name.
    pub name: String,
    /// Extents in elements; a scalar has none.
    pub shape: Vec<u64>,
    /// Dtype in the checkpoint.
    pub dtype: DType,
}

/// All tensors of the model, in the order of their source. Clones share the data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorTable {
    tensors: Arc<[TensorMeta]>,
    /// Indices in order of names, bytewise.
    by_name: Arc<[u32]>,
}

impl TensorMeta {
    /// Number of elements; fits (T2) for a tensor of a table.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Bytes of all elements; fits (T2) for a tensor of a table.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.elements() * self.dtype.size()
    }

    /// T2, with the bytes as result.
    pub(super) fn checked_bytes(&self) -> Result<u64, TableError> {
        let name = || self.name.clone();
        if self.shape.len() > HF_DIMS_MAX {
            return Err(TableError::Dims { name: name(), found: self.shape.len() });
        }
        // A zero extent must not hide others whose product would overflow.
        let step = |product: u64, extent: &u64| product.checked_mul((*extent).max(1));
        let product = self.shape.iter().try_fold(self.dtype.size(), step);
        let fits = product.filter(|bytes| *bytes <= TENSOR_BYTES_MAX);
        fits.ok_or_else(|| TableError::Size { name: name(), shape: self.shape.clone() })?;
        Ok(self.bytes())
    }
}

impl TensorTable {
    /// A table in the order given.
    ///
    /// # Errors
    /// A duplicate or unusable name, a tensor of more than `i64::MAX` bytes, or too many dims or tensors.
    pub fn new(tensors: Vec<TensorMeta>) -> Result<Self, TableError> {
        if tensors.len() > TENSORS_MAX {
            return Err(TableError::TooMany { found: tensors.len() });
        }
        for tensor in &tensors {
            if tensor.name.is_empty() || tensor.name.len() > TENSOR_NAME_BYTES_MAX {
                let start = tensor.name.chars().take(80).collect();
                return Err(TableError::Name { start, found: tensor.name.len() });
            }
            tensor.checked_bytes()?;
        }
        // TENSORS_MAX fits `u32`.
        let mut by_name: Vec<u32> = (0..tensors.len() as u32).collect();
        let name = |index: &u32| tensors[*index as usize].name.as_str();
        by_name.sort_by_key(name);
        if let Some([a, _]) = by_name.array_windows().find(|[a, b]| name(a) == name(b)) {
            return Err(TableError::Duplicate { name: name(a).to_owned() });
        }
        Ok(Self { by_name: by_name.into(), tensors: tensors.into() })
    }

    /// Number of tensors.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// The tensor; `None` for an id of another table.
    #[must_use]
    pub fn get(&self, id: TensorId) -> Option<&TensorMeta> {
        self.tensors.get(id.0 as usize)
    }

    /// The id of a name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<TensorId> {
        let key = |index: &u32| self.tensors[*index as usize].name.as_str();
        self.by_name.binary_search_by_key(&name, key).ok().map(|at| TensorId(self.by_name[at]))
    }

    /// In table order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (TensorId, &TensorMeta)> {
        self.tensors.iter().enumerate().map(|(index, tensor)| (TensorId(index as u32), tensor))
    }

    /// Bytes of all tensors. 2^20 tensors of at most 2^63 bytes each fit.
    #[must_use]
    pub fn bytes(&self) -> u128 {
        self.tensors.iter().map(|tensor| u128::from(tensor.bytes())).sum()
    }
}

impl std::ops::Index<TensorId> for TensorTable {
    type Output = TensorMeta;
    /// For ids of this table; panics on others.
    fn index(&self, id: TensorId) -> &TensorMeta {
        &self.tensors[id.0 as usize]
    }
}
