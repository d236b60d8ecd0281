//! The kernels of `agent/kernels`, compiled ahead: a binary per architecture, and PTX for those to come.

use super::{Context, CudaError, DeviceMemory, Handle, Stream};
use std::ffi::{CStr, c_void};

/// Binaries by compute capability. One serves its own minor version and higher ones of the same major.
const BINARIES: &[((u32, u32), &[u8])] = &[
    ((8, 0), include_bytes!("../../kernels/kernels.sm_80.cubin")),
    ((9, 0), include_bytes!("../../kernels/kernels.sm_90.cubin")),
    ((10, 0), include_bytes!("../../kernels/kernels.sm_100.cubin")),
    ((10, 3), include_bytes!("../../kernels/kernels.sm_103.cubin")),
    ((12, 0), include_bytes!("../../kernels/kernels.sm_120.cubin")),
];
/// For the driver to compile, with the 0 that ends it.
const PTX: &str = concat!(include_str!("../../kernels/kernels.ptx"), "\0");

/// Threads of a block, as the kernels are compiled for.
const BLOCK_THREADS: u32 = 256;
/// Bytes that a thread moves at once.
const SPAN_BYTES: u64 = 16;

/// The kernels, loaded for one context.
#[derive(Debug)]
pub struct Kernels {
    context: Context,
    module: Handle,
    gather: Handle,
    scatter: Handle,
    digest: Handle,
}

// SAFETY: functions of a module may be launched from any thread.
unsafe impl Send for Kernels {}
// SAFETY: as for `Send`; nothing here changes after loading.
unsafe impl Sync for Kernels {}

/// What one launch moves between memory and a packed window.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'m> {
    /// The table of a program, in device memory, and its entries.
    pub table: &'m DeviceMemory,
    /// Entries of it.
    pub entries: u32,
    /// Memory of the window.
    pub window: &'m DeviceMemory,
    /// First byte of the window.
    pub offset: u64,
    /// First wire byte.
    pub first: u64,
    /// Wire bytes.
    pub bytes: u64,
}

/// What one launch digests.
#[derive(Debug, Clone, Copy)]
pub struct DigestLaunch<'m> {
    /// A [`DigestTable`](crate::executor::DigestTable), in device memory, and its entries and units.
    pub table: &'m DeviceMemory,
    /// Entries of it.
    pub entries: u32,
    /// Units of it.
    pub units: u64,
    /// Keys of the first rows, 16 bytes each.
    pub row_keys: &'m DeviceMemory,
    /// Sums of 16 bytes, to which what is found is added.
    pub sums: &'m DeviceMemory,
}

impl Kernels {
    /// Loads the binary for the context's device.
    pub fn load(context: &Context) -> Result<Self, CudaError> {
        let image = image(context.device().capability);
        let mut module = std::ptr::null_mut();
        // SAFETY: an image that ends by its own header, or by a 0; writes one handle.
        context.call("cuModuleLoadData", |symbols| unsafe {
            (symbols.module_load)(&raw mut module, image.as_ptr().cast())
        })?;
        let mut kernels = Self {
            context: context.clone(),
            module,
            gather: std::ptr::null_mut(),
            scatter: std::ptr::null_mut(),
            digest: std::ptr::null_mut(),
        };
        kernels.gather = kernels.function(c"weightrefit_gather")?;
        kernels.scatter = kernels.function(c"weightrefit_scatter")?;
        kernels.digest = kernels.function(c"weightrefit_digest")?;
        Ok(kernels)
    }

    fn function(&self, name: &CStr) -> Result<Handle, CudaError> {
        let mut function = std::ptr::null_mut();
        // SAFETY: a loaded module and a name that ends; writes one handle.
        self.context.call("cuModuleGetFunction", |symbols| unsafe {
            (symbols.module_function)(&raw mut function, self.module, name.as_ptr())
        })?;
        Ok(function)
    }

    /// Enqueues: memory to window, cast on the way.
    pub fn gather(&self, stream: &Stream, launch: &Launch<'_>) -> Result<(), CudaError> {
        self.move_bytes(stream, self.gather, launch)
    }

    /// Enqueues: window to memory.
    pub fn scatter(&self, stream: &Stream, launch: &Launch<'_>) -> Result<(), CudaError> {
        self.move_bytes(stream, self.scatter, launch)
    }

    /// Enqueues: memory to sums. Which sums the entries name was checked when the table was made.
    pub fn digest(&self, stream: &Stream, launch: &DigestLaunch<'_>) -> Result<(), CudaError> {
        let DigestLaunch { table, mut entries, mut units, row_keys, sums } = *launch;
        let entry_bytes = u64::from(entries) * crate::executor::ROWS_ENTRY_BYTES as u64;
        let (mut table, mut keyed_rows) = (table.address(0, entry_bytes)?, row_keys.len() / 16);
        let (mut row_keys, mut sums) = (row_keys.address(0, 0)?, sums.address(0, sums.len())?);
        let arguments: [*mut c_void; 6] = [
            (&raw mut table).cast(),
            (&raw mut entries).cast(),
            (&raw mut units).cast(),
            (&raw mut row_keys).cast(),
            (&raw mut keyed_rows).cast(),
            (&raw mut sums).cast(),
        ];
        self.launch(stream, self.digest, self.blocks(units), arguments)
    }

    fn move_bytes(&self, stream: &Stream, function: Handle, launch: &Launch<'_>) -> Result<(), CudaError> {
        let Launch { table, mut entries, window, offset, mut first, mut bytes } = *launch;
        let entry_bytes = u64::from(entries) * crate::executor::ENTRY_BYTES as u64;
        let (mut table, mut window) = (table.address(0, entry_bytes)?, window.address(offset, bytes)?);
        let arguments: [*mut c_void; 5] = [
            (&raw mut table).cast(),
            (&raw mut entries).cast(),
            (&raw mut window).cast(),
            (&raw mut first).cast(),
            (&raw mut bytes).cast(),
        ];
        self.launch(stream, function, self.blocks(bytes.div_ceil(SPAN_BYTES)), arguments)
    }

    /// As many as have work for `threads` threads, and no more than the device runs at once.
    fn blocks(&self, threads: u64) -> u32 {
        let enough = u64::from(self.context.device().multiprocessors.max(1)) * 8;
        threads.div_ceil(BLOCK_THREADS.into()).clamp(1, enough) as u32
    }

    fn launch<const N: usize>(
        &self,
        stream: &Stream,
        function: Handle,
        blocks: u32,
        mut arguments: [*mut c_void; N],
    ) -> Result<(), CudaError> {
        // SAFETY: both callers pass as many arguments as their kernel declares, of its types, which are read before the
        // call returns. A table's entries lie inside the memory that it was made for, and that lives until the stream
        // has passed this (C4).
        self.context.call("cuLaunchKernel", |symbols| unsafe {
            let (arguments, none) = (arguments.as_mut_ptr(), std::ptr::null_mut());
            (symbols.launch)(function, blocks, 1, 1, BLOCK_THREADS, 1, 1, 0, stream.raw(), arguments, none)
        })
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // SAFETY: loaded once, unloaded once.
        self.context.raw_call(|symbols| unsafe { (symbols.module_unload)(self.module) });
    }
}

fn image(capability: (u32, u32)) -> &'static [u8] {
    let fits =
        |((major, minor), _): &&((u32, u32), &'static [u8])| *major == capability.0 && *minor <= capability.1;
    BINARIES.iter().rev().find(fits).map_or(PTX.as_bytes(), |(_, binary)| binary)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_binaries_are_of_the_sources_that_are_here() {
        use sha2::{Digest, Sha256};
        let sources: [(&str, &[u8]); 4] = [
            ("digest.cuh", include_bytes!("../../kernels/digest.cuh")),
            ("kernels.cu", include_bytes!("../../kernels/kernels.cu")),
            ("moves.cuh", include_bytes!("../../kernels/moves.cuh")),
            ("requirements.txt", include_bytes!("../../kernels/requirements.txt")),
        ];
        let hex =
            |bytes: &[u8]| Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let found: String = sources.iter().map(|(name, bytes)| format!("{}  {name}\n", hex(bytes))).collect();
        assert_eq!(found, include_str!("../../kernels/sources.sha256"), "run `make kernels`");
    }

    #[test]
    fn each_architecture_gets_its_binary_and_an_unknown_one_the_text() {
        let of = |capability| BINARIES.iter().position(|(_, binary)| *binary == image(capability));
        let rows = [
            ((8, 0), Some(0)),
            ((8, 9), Some(0)),
            ((9, 0), Some(1)),
            ((10, 0), Some(2)),
            ((10, 3), Some(3)),
            ((12, 1), Some(4)),
            ((7, 5), None),
            ((13, 0), None),
        ];
        for (capability, want) in rows {
            assert_eq!(of(capability), want, "{capability:?}");
        }
        assert!(BINARIES.iter().all(|(_, binary)| binary.starts_with(b"\x7fELF")));
    }
}
