//! A plain list of tensors as JSON: `{"tensors": [{"name": …, "shape": […], "dtype": …}]}`.

use super::error::TableError;
use super::table::{TensorMeta, TensorTable};
use crate::dtype::DType;
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    tensors: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    shape: Vec<u64>,
    dtype: DType,
}

/// Reads the list in its order.
///
/// # Errors
/// Text that is no such JSON, and what [`TensorTable::new`] refuses.
pub fn read_list(json: &str) -> Result<TensorTable, TableError> {
    let list: List = serde_json::from_str(json).map_err(|error| TableError::json("tensor list", &error))?;
    let meta = |entry: Entry| TensorMeta { name: entry.name, shape: entry.shape, dtype: entry.dtype };
    TensorTable::new(list.tensors.into_iter().map(meta).collect())
}
