//! Headers of safetensors files: which tensors a file holds, and where.
//!
//! Invariants:
//! - H1: nothing of a header is believed that the file's length contradicts.
//! - H2: tensors fill the data without hole or overlap, and each has exactly the bytes of its shape and dtype.

use super::error::TableError;
use super::table::{TensorMeta, TensorTable};
use crate::dtype::DType;
use crate::limits::{HEADER_BYTES_MAX, TENSORS_MAX};
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;

/// Bytes of the number before the header: its length, little-endian.
pub const LENGTH_BYTES: u64 = 8;

/// What a header says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The tensors, in the header's order.
    pub table: TensorTable,
    /// Per tensor of the table the position of its first byte in the file.
    pub offsets: Vec<u64>,
}

/// How many bytes from the start of the file [`read_header`] needs. `start` are the first 8 bytes or more.
///
/// # Errors
/// A file too short for what it claims, or a header beyond the format's limit.
pub fn header_bytes(start: &[u8], file_bytes: u64) -> Result<u64, TableError> {
    let length = start.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
    let length = length.ok_or(TableError::FileTooShort { file_bytes, needed: LENGTH_BYTES })?;
    if length > HEADER_BYTES_MAX {
        return Err(TableError::HeaderTooLong { found: length });
    }
    let needed = LENGTH_BYTES + length;
    if needed > file_bytes {
        return Err(TableError::FileTooShort { file_bytes, needed });
    }
    Ok(needed)
}

/// Reads the header of a file of `file_bytes` bytes; `start` are its first [`header_bytes`] bytes or more.
///
/// # Errors
/// Whatever contradicts H1 or H2, by the name of the tensor.
pub fn read_header(start: &[u8], file_bytes: u64) -> Result<Header, TableError> {
    let data = header_bytes(start, file_bytes)?;
    // At most HEADER_BYTES_MAX, so it fits.
    let json = start.get(LENGTH_BYTES as usize..data as usize);
    let json = json.ok_or(TableError::StartTooShort { found: start.len(), needed: data })?;
    let entries: Entries =
        serde_json::from_slice(json).map_err(|error| TableError::json("safetensors header", &error))?;
    let mut tensors = Vec::with_capacity(entries.0.len());
    let mut places = Vec::with_capacity(entries.0.len());
    for (name, entry) in entries.0 {
        let [begin, end] = entry.data_offsets;
        let unknown =
            |_| TableError::Dtype { name: name.clone(), found: entry.dtype.chars().take(80).collect() };
        let dtype: DType = entry.dtype.parse().map_err(unknown)?;
        let tensor = TensorMeta { name, shape: entry.shape, dtype };
        let bytes = tensor.checked_bytes()?;
        if end.checked_sub(begin) != Some(bytes) {
            return Err(TableError::Offsets { name: tensor.name, begin, end, bytes });
        }
        if end > file_bytes - data {
            return Err(TableError::Outside { name: tensor.name, end, data_bytes: file_bytes - data });
        }
        places.push((begin, end, tensors.len()));
        tensors.push(tensor);
    }
    let table = TensorTable::new(tensors)?;
    let offsets = places.iter().map(|(begin, ..)| data + begin).collect();
    filled(&table, places, file_bytes - data)?;
    Ok(Header { table, offsets })
}

/// H2: sorted by position, every tensor begins where the one before ends, and the last one ends the file.
fn filled(
    table: &TensorTable,
    mut places: Vec<(u64, u64, usize)>,
    data_bytes: u64,
) -> Result<(), TableError> {
    places.sort_unstable();
    let names: Vec<_> = table.iter().map(|(_, tensor)| tensor.name.as_str()).collect();
    let mut filled = 0;
    let mut before = "";
    for (begin, end, index) in places {
        if begin < filled {
            let (first, second) = (before.to_owned(), names[index].to_owned());
            return Err(TableError::Overlap { first, second });
        }
        if begin > filled {
            return Err(TableError::Hole { begin: filled, end: begin });
        }
        (filled, before) = (end, names[index]);
    }
    if filled < data_bytes {
        return Err(TableError::Hole { begin: filled, end: data_bytes });
    }
    Ok(())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The tensors in order of the text, duplicates included: a map would hide them.
struct Entries(Vec<(String, Entry)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(EntriesVisitor)
    }
}

struct EntriesVisitor;

impl<'de> Visitor<'de> for EntriesVisitor {
    type Value = Entries;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
        let mut out = Vec::new();
        while let Some(key) = map.next_key::<String>()? {
            if key == "__metadata__" {
                map.next_value::<BTreeMap<String, String>>()?;
                continue;
            }
            if out.len() == TENSORS_MAX {
                return Err(serde::de::Error::custom(format_args!("more than {TENSORS_MAX} tensors")));
            }
            out.push((key, map.next_value()?));
        }
        Ok(Entries(out))
    }
}
