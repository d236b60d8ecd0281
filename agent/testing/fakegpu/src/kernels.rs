//! The kernels, by their CPU references: the code of the TCP path.

use crate::arena::shadow;
use weightrefit_agent::executor::{Cursor, ENTRY_BYTES, Program};
use weightrefit_core::dtype::Cast;

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
    let to = shadow(address, bytes.len() as u64)?;
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
