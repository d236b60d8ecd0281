//! The kernels, by their CPU references: the code of the TCP path.

use crate::arena::{shadow, shadow_to_write};
use std::sync::LazyLock;
use weightrefit_agent::executor::{Cursor, ENTRY_BYTES, Program, ROWS_ENTRY_BYTES, RowsEntry};
use weightrefit_core::digest::{ColumnKeys, RowDigest};
use weightrefit_core::dtype::{Cast, DType};

/// A function of the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    Gather,
    Scatter,
}

/// What the kernels take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arguments {
    pub(crate) table: u64,
    pub(crate) entries: u32,
    pub(crate) packed: u64,
    pub(crate) first: u64,
    pub(crate) bytes: u64,
}

/// What the kernel of digests takes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DigestArguments {
    pub(crate) table: u64,
    pub(crate) entries: u32,
    pub(crate) row_keys: u64,
    pub(crate) keyed_rows: u64,
    pub(crate) sums: u64,
}

/// Adds to the sums what the entries hold, by the code of the CPU.
pub(crate) fn digest(arguments: &DigestArguments) -> Result<(), u32> {
    let table = read(arguments.table, u64::from(arguments.entries) * ROWS_ENTRY_BYTES as u64)?;
    read(arguments.row_keys, arguments.keyed_rows * 16)?;
    static KEYS: LazyLock<ColumnKeys> = LazyLock::new(|| ColumnKeys::new(1 << 16));
    for entry in table.as_chunks::<ROWS_ENTRY_BYTES>().0 {
        let entry = RowsEntry::read(entry).ok_or(LAUNCH_FAILED)?;
        let dtype = DType::ALL.into_iter().find(|dtype| dtype.size() == u64::from(entry.element));
        let mut digest = RowDigest::new(&KEYS, dtype.ok_or(LAUNCH_FAILED)?);
        let size = entry.cast.sizes().map_or(u64::from(entry.element), |(from, _)| from);
        let mut failed = None;
        let (column, columns, stride) = entry.columns();
        entry.each_row(|row, first| {
            let raw = match stride == size {
                true => read(first, columns * size),
                false => (0..columns)
                    .map(|at| read(first + at * stride, size))
                    .collect::<Result<Vec<_>, _>>()
                    .map(|all| all.concat()),
            };
            match raw {
                Ok(raw) => {
                    let mut wire = vec![0; raw.len() / size as usize * entry.element as usize];
                    entry.cast.apply(&raw, &mut wire);
                    digest.row(row, column, &wire);
                }
                Err(error) => failed = Some(error),
            }
        });
        if let Some(error) = failed {
            return Err(error);
        }
        let at = arguments.sums + u64::from(entry.sum) * 16;
        let mut sum = read(at, 16)?;
        for (bytes, lane) in sum.as_chunks_mut::<4>().0.iter_mut().zip(digest.sum().lanes()) {
            *bytes = u32::from_le_bytes(*bytes).wrapping_add(lane).to_le_bytes();
        }
        write(at, &sum)?;
    }
    Ok(())
}

/// A range of device memory, copied.
pub(crate) fn read(address: u64, len: u64) -> Result<Vec<u8>, u32> {
    let from = shadow(address, len)?;
    let mut out = vec![0; len as usize];
    // SAFETY: `shadow` checked the range; the vector is as long.
    unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
    Ok(out)
}

/// Bytes to device memory.
pub(crate) fn write(address: u64, bytes: &[u8]) -> Result<(), u32> {
    let to = shadow_to_write(address, bytes.len() as u64)?;
    // SAFETY: `shadow` checked the range.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    Ok(())
}

/// `CUDA_ERROR_LAUNCH_FAILED`.
const LAUNCH_FAILED: u32 = 719;

impl Kernel {
    pub(crate) fn run(self, arguments: &Arguments) -> Result<(), u32> {
        let table = read(arguments.table, u64::from(arguments.entries) * ENTRY_BYTES as u64)?;
        let program = Program::of_table(&table).ok_or(LAUNCH_FAILED)?;
        let mut cursor = Cursor::range(&program, arguments.first, arguments.first + arguments.bytes);
        let mut at = arguments.packed;
        while let Some(span) = cursor.span(u64::MAX) {
            let wire = span.wire_bytes / span.count;
            for run in 0..span.count {
                let address = span.offset + run * span.stride;
                match (self, span.cast) {
                    (Self::Gather, cast) => {
                        let mut out = vec![0; wire as usize];
                        cast.apply(&read(address, span.run)?, &mut out);
                        write(at, &out)?;
                    }
                    (Self::Scatter, Cast::None) => write(address, &read(at, wire)?)?,
                    (Self::Scatter, _) => return Err(LAUNCH_FAILED),
                }
                at += wire;
            }
            cursor.pass(&span);
        }
        Ok(())
    }
}
