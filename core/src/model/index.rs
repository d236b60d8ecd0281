//! Checkpoints of several safetensors files, and the index that says which file holds which tensor.

use super::error::TableError;
use super::safetensors::Header;
use super::table::{TensorMeta, TensorTable};
use crate::limits::TENSORS_MAX;
use serde::Deserialize;
use std::collections::BTreeSet;

/// A `model.safetensors.index.json`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Index {
    /// File names, sorted.
    shards: Vec<String>,
    /// Tensor names and indices into `shards`, in the order of the text.
    tensors: Vec<(String, usize)>,
}

/// All tensors of a checkpoint and where they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// The tensors.
    pub table: TensorTable,
    /// Names of the files.
    pub shards: Vec<String>,
    /// Per tensor of the table its place.
    pub places: Vec<ShardOffset>,
}

/// Where a tensor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardOffset {
    /// Index in [`Checkpoint::shards`].
    pub shard: usize,
    /// Position of its first byte in that file.
    pub offset: u64,
}

#[derive(Deserialize)]
struct Raw {
    /// The order of the text is kept (`preserve_order`).
    weight_map: serde_json::Map<String, serde_json::Value>,
}

impl Index {
    /// Reads the index.
    ///
    /// # Errors
    /// Text that is no such index, or a file name that leads elsewhere than beside the index.
    pub fn read(json: &str) -> Result<Self, TableError> {
        let raw: Raw =
            serde_json::from_str(json).map_err(|error| TableError::json("safetensors index", &error))?;
        if raw.weight_map.len() > TENSORS_MAX {
            return Err(TableError::TooMany { found: raw.weight_map.len() });
        }
        let mut tensors = Vec::with_capacity(raw.weight_map.len());
        for (name, file) in raw.weight_map {
            // A name with a path could make the reader open any file of the machine.
            let plain = |file: &&str| {
                !file.is_empty() && !file.contains(['/', '\\', '\0']) && *file != "." && *file != ".."
            };
            let Some(file) = file.as_str().filter(plain) else {
                return Err(TableError::ShardName {
                    tensor: name,
                    file: file.to_string().chars().take(80).collect(),
                });
            };
            tensors.push((name, file.to_owned()));
        }
        let shards: BTreeSet<_> = tensors.iter().map(|(_, file)| file.clone()).collect();
        let shards: Vec<_> = shards.into_iter().collect();
        // Every file was just put in.
        let index = |file: &String| shards.binary_search(file).unwrap_or_default();
        let tensors = tensors.into_iter().map(|(name, file)| (name, index(&file))).collect();
        Ok(Self { shards, tensors })
    }

    /// Names of the files to read, sorted.
    #[must_use]
    pub fn shards(&self) -> &[String] {
        &self.shards
    }

    /// The checkpoint that the index and the headers of [`Self::shards`], in that order, make together.
    ///
    /// # Errors
    /// A tensor that the index and the headers do not place in the same file, or a number of headers other than
    /// that of the files.
    pub fn join(self, headers: &[Header]) -> Result<Checkpoint, TableError> {
        if headers.len() != self.shards.len() {
            return Err(TableError::ShardCount { found: headers.len(), expected: self.shards.len() });
        }
        let mut metas: Vec<TensorMeta> = Vec::with_capacity(self.tensors.len());
        let mut places = Vec::with_capacity(self.tensors.len());
        let mut listed = vec![0; headers.len()];
        for (name, shard) in self.tensors {
            let header = &headers[shard];
            let absent = || TableError::NotInShard { name: name.clone(), file: self.shards[shard].clone() };
            let id = header.table.find(&name).ok_or_else(absent)?;
            metas.push(header.table[id].clone());
            places.push(ShardOffset { shard, offset: header.offsets[id.0 as usize] });
            listed[shard] += 1;
        }
        let table = TensorTable::new(metas)?;
        for (shard, header) in headers.iter().enumerate() {
            if listed[shard] == header.table.len() {
                continue;
            }
            let place = |name: &str| table.find(name).map(|id| places[id.0 as usize].shard);
            if let Some((_, extra)) =
                header.table.iter().find(|(_, tensor)| place(&tensor.name) != Some(shard))
            {
                let (name, file) = (extra.name.clone(), self.shards[shard].clone());
                return Err(TableError::NotInIndex { name, file });
            }
        }
        Ok(Checkpoint { table, shards: self.shards, places })
    }
}
