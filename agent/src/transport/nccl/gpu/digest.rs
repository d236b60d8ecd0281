//! Digests of what lies on a device, by a kernel: one launch for all that a rank holds.

use super::{FlowError, Gpu, Waiting};
use crate::cuda::{CudaError, DeviceMemory, DigestLaunch, PinnedMemory, Stream};
use crate::executor::{DigestProgram, Part, RankMemory};
use crate::limits::{DEVICE_DIGEST_MAX, DEVICE_DIGEST_ROWS};
use std::sync::Arc;
use std::time::Instant;
use weightrefit_core::digest::row_keys;
use weightrefit_core::id::ContentSum;
use weightrefit_core::round::message::ClassSums;

/// Bytes of a sum, and of the keys of a row.
const SUM_BYTES: usize = 16;

/// What digests need on the device, kept for the next one.
#[derive(Debug)]
pub(super) struct Digests {
    stream: Stream,
    /// Of the first rows.
    row_keys: DeviceMemory,
    table: Option<Table>,
}

/// A program on the device.
#[derive(Debug)]
struct Table {
    program: Arc<DigestProgram>,
    /// Where its memories began when it was made.
    bases: Vec<u64>,
    memory: DeviceMemory,
    entries: u32,
    units: u64,
    sums: DeviceMemory,
    host: PinnedMemory,
}

impl Gpu {
    /// Digests a rank's memory, all of it on this device; `None` when `stopped` said so meanwhile.
    ///
    /// # Errors
    /// Too little memory for the table, or what the device says.
    pub(crate) fn digest(
        &self,
        program: &Arc<DigestProgram>,
        memory: &RankMemory,
        stopped: &dyn Fn() -> bool,
    ) -> Result<Option<ClassSums>, FlowError> {
        let mut held = self.digests.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // Not `stopped`: what runs uses memory of the caller, and is over in a fraction of a second.
        let waiting =
            Waiting { stopped: &|| false, deadline: Instant::now() + DEVICE_DIGEST_MAX, healthy: &|| Ok(()) };
        let mut digests = match held.take() {
            Some(digests) => digests,
            None => self.digests(&waiting)?,
        };
        if stopped() {
            *held = Some(digests);
            return Ok(None);
        }
        let found = digests.run(self, program, memory, &waiting);
        match &found {
            Ok(_) => *held = Some(digests),
            // What it was given may be in use for as long as the device says nothing, so it is never given back.
            Err(_) => std::mem::forget((digests, memory.clone())),
        }
        Ok(Some(found?))
    }

    fn digests(&self, waiting: &Waiting<'_>) -> Result<Digests, FlowError> {
        let stream = Stream::new(&self.context)?;
        let keys: Vec<u8> = row_keys(DEVICE_DIGEST_ROWS).into_iter().flat_map(u32::to_le_bytes).collect();
        let row_keys = self.table(&keys, &stream, waiting)?;
        Ok(Digests { stream, row_keys, table: None })
    }
}

impl Digests {
    fn run(
        &mut self,
        gpu: &Gpu,
        program: &Arc<DigestProgram>,
        memory: &RankMemory,
        waiting: &Waiting<'_>,
    ) -> Result<ClassSums, FlowError> {
        let base = |part: &Part| match part {
            Part::Device(memory) => memory.address(0, memory.len()),
            Part::Host(mapping) => Err(CudaError::Range { offset: 0, bytes: mapping.len(), available: 0 }),
        };
        let bases: Vec<u64> = memory.parts().iter().map(base).collect::<Result<_, _>>()?;
        let same = |table: &Table| Arc::ptr_eq(&table.program, program) && table.bases == bases;
        let table = match self.table.take().filter(same) {
            Some(table) => self.table.insert(table),
            None => {
                let made = Table::new(gpu, program, bases, &self.stream, waiting)?;
                self.table.insert(made)
            }
        };
        let Table { entries, units, .. } = *table;
        let (stream, sums) = (&self.stream, &table.sums);
        stream.clear(sums)?;
        if units > 0 {
            let row_keys = &self.row_keys;
            let launch = DigestLaunch { table: &table.memory, entries, units, row_keys, sums };
            gpu.kernels.digest(stream, &launch)?;
        }
        stream.download(sums, 0, &mut table.host, sums.len())?;
        waiting.until("a digest", || Ok(stream.is_done()?))?;
        let (found, _) = table.host.bytes().as_chunks::<SUM_BYTES>();
        let sum = |bytes: &[u8; SUM_BYTES]| {
            let (lanes, _) = bytes.as_chunks::<4>();
            ContentSum::from_lanes(std::array::from_fn(|lane| u32::from_le_bytes(lanes[lane])))
        };
        Ok(program.class_sums(found.iter().map(sum)))
    }
}

impl Table {
    fn new(
        gpu: &Gpu,
        program: &Arc<DigestProgram>,
        bases: Vec<u64>,
        stream: &Stream,
        waiting: &Waiting<'_>,
    ) -> Result<Self, FlowError> {
        let table = program.table(|mapping| bases.get(mapping as usize).copied().unwrap_or(0));
        let bytes = table.sums as usize * SUM_BYTES;
        Ok(Self {
            program: Arc::clone(program),
            bases,
            memory: gpu.table(&table.bytes, stream, waiting)?,
            entries: table.entries,
            units: table.units,
            sums: gpu.reserve(bytes as u64)?,
            host: PinnedMemory::new(&gpu.context, bytes)?,
        })
    }
}
