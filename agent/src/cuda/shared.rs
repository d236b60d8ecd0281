//! Device memory that crosses processes: an allocation of its own, passed as a descriptor.
//!
//! C5: a descriptor and each import keep an allocation alive by themselves: who made it may free it, or end, and
//!     whoever has imported it goes on reading what was there. Nothing else crosses namespaces of processes.

use super::symbols::{INVALID_VALUE, OUT_OF_MEMORY, SUCCESS};
use super::{Context, CudaError};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// `CU_MEM_ALLOCATION_TYPE_PINNED`, `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`, `CU_MEM_LOCATION_TYPE_DEVICE`.
const PINNED: u32 = 1;
const DESCRIPTOR: u32 = 1;
const ON_DEVICE: u32 = 1;

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Properties {
    kind: u32,
    handle_types: u32,
    location: Location,
    metadata: *const c_void,
    flags: [u8; 8],
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Location {
    kind: u32,
    id: c_int,
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Access {
    location: Location,
    flags: u32,
}

/// What a mapping may be used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    /// Another's memory: `CU_MEM_ACCESS_FLAGS_PROT_READ`.
    Read = 1,
    /// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
    ReadWrite = 3,
}

/// A descriptor that cannot be used as device memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImportError {
    /// A file, a socket, memory of the host, or device memory that was not made to be passed.
    #[error("memory `{name}` is no device memory that can be passed between processes: {source}")]
    NotShared {
        /// What it was passed as.
        name: String,
        /// What the driver says.
        source: CudaError,
    },
    /// It is somewhere else.
    #[error("memory `{name}` lies on device {actual} of this process, {uuid} is device {expected}")]
    OtherDevice {
        /// What it was passed as.
        name: String,
        /// Where it is, by number in this process.
        actual: i32,
        /// The device that its owner claims.
        uuid: String,
        /// Its number in this process.
        expected: i32,
    },
    /// Shorter than its owner says.
    #[error("memory `{name}` has fewer than the {claimed} bytes that its owner claims")]
    TooShort {
        /// What it was passed as.
        name: String,
        /// What the owner says.
        claimed: u64,
    },
    /// The driver refused for another reason.
    #[error("memory `{name}` cannot be imported: {source}")]
    System {
        /// What it was passed as.
        name: String,
        /// What the driver says.
        source: CudaError,
    },
}

/// An allocation, mapped; undone as far as it came, in the opposite order.
#[derive(Debug)]
pub(super) struct Shared {
    context: Context,
    handle: Option<u64>,
    /// Addresses, reserved.
    range: Option<(u64, usize)>,
    is_mapped: bool,
}

impl Shared {
    /// Takes at least `len` bytes of the context's device, for a descriptor. Their contents are whatever was there.
    pub(super) fn take(context: &Context, len: u64) -> Result<Self, CudaError> {
        let (properties, bytes) = (properties(context), whole(context, len)?);
        let mut shared = Self { context: context.clone(), handle: None, range: None, is_mapped: false };
        let mut handle = 0;
        // SAFETY: writes one handle; the properties are read before the call returns.
        let code = context.raw_call(|symbols| unsafe {
            (symbols.shared_create)(&raw mut handle, bytes, &raw const properties, 0)
        });
        if code == OUT_OF_MEMORY {
            return Err(CudaError::OutOfMemory { bytes: len });
        }
        context.call("cuMemCreate", |_| code)?;
        shared.handle = Some(handle);
        shared.map(bytes, Use::ReadWrite)?;
        Ok(shared)
    }

    /// Another process's memory on the context's device, which has at least `len` bytes.
    pub(super) fn import(
        context: &Context,
        fd: BorrowedFd<'_>,
        name: &str,
        len: u64,
    ) -> Result<Self, ImportError> {
        let system = |source| ImportError::System { name: name.into(), source };
        let mut shared = Self { context: context.clone(), handle: None, range: None, is_mapped: false };
        let (mut handle, raw) = (0, fd.as_raw_fd() as usize as *mut c_void);
        // SAFETY: writes one handle. The driver asks its own kernel module about the descriptor, whatever it is.
        let imported = context.call("cuMemImportFromShareableHandle", |symbols| unsafe {
            (symbols.shared_import)(&raw mut handle, raw, DESCRIPTOR)
        });
        imported.map_err(|source| ImportError::NotShared { name: name.into(), source })?;
        shared.handle = Some(handle);
        let mut found = properties(context);
        let told = context.call("cuMemGetAllocationPropertiesFromHandle", |symbols| unsafe {
            // SAFETY: a live handle; writes one struct.
            (symbols.shared_properties)(&raw mut found, handle)
        });
        told.map_err(system)?;
        let device = context.device();
        if found.location.id != device.ordinal {
            let (name, actual, uuid) = (name.into(), found.location.id, device.uuid.clone());
            return Err(ImportError::OtherDevice { name, actual, uuid, expected: device.ordinal });
        }
        let short = || ImportError::TooShort { name: name.into(), claimed: len };
        let bytes = whole(context, len).map_err(|_| short())?;
        shared.map(bytes, Use::Read).map_err(|source| match source {
            CudaError::Call { call: "cuMemMap", code: INVALID_VALUE, .. } | CudaError::OutOfMemory { .. } => {
                short()
            }
            source => system(source),
        })?;
        Ok(shared)
    }

    fn map(&mut self, bytes: usize, access: Use) -> Result<(), CudaError> {
        let (context, mut address) = (self.context.clone(), 0);
        // SAFETY: writes one address.
        let code =
            context.raw_call(|symbols| unsafe { (symbols.range_reserve)(&raw mut address, bytes, 0, 0, 0) });
        if code == OUT_OF_MEMORY {
            return Err(CudaError::OutOfMemory { bytes: bytes as u64 });
        }
        context.call("cuMemAddressReserve", |_| code)?;
        self.range = Some((address, bytes));
        let handle = self.handle.unwrap_or(0);
        context.call("cuMemMap", |symbols| unsafe {
            // SAFETY: a range that was just reserved, nothing in it, and a live handle.
            (symbols.range_map)(address, bytes, 0, handle, 0)
        })?;
        self.is_mapped = true;
        let location = Location { kind: ON_DEVICE, id: context.device().ordinal };
        let access = Access { location, flags: access as u32 };
        context.call("cuMemSetAccess", |symbols| unsafe {
            // SAFETY: a range that is mapped; one description, read before the call returns.
            (symbols.range_access)(address, bytes, &raw const access, 1)
        })
    }

    /// Where it begins.
    pub(super) fn address(&self) -> u64 {
        self.range.map_or(0, |(address, _)| address)
    }

    /// A descriptor of it, for another process.
    pub(super) fn export(&self) -> Result<OwnedFd, CudaError> {
        let (mut fd, handle): (c_int, _) = (-1, self.handle.unwrap_or(0));
        self.context.call("cuMemExportToShareableHandle", |symbols| unsafe {
            // SAFETY: a live handle that was made for a descriptor; writes one integer.
            (symbols.shared_export)((&raw mut fd).cast(), handle, DESCRIPTOR, 0)
        })?;
        // SAFETY: the driver has opened it for the caller, to close.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let Self { context, handle, range, is_mapped } = self;
        if let Some((address, bytes)) = range.take() {
            let mut code = SUCCESS;
            if *is_mapped {
                // SAFETY: mapped once, as a whole, and unmapped once; C4.
                code = context.raw_call(|symbols| unsafe { (symbols.range_unmap)(address, bytes) });
            }
            if code == SUCCESS {
                // SAFETY: reserved once, and nothing is mapped in it any more.
                context.raw_call(|symbols| unsafe { (symbols.range_free)(address, bytes) });
            }
        }
        if let Some(handle) = handle.take() {
            // SAFETY: taken or imported once, and released once.
            context.raw_call(|symbols| unsafe { (symbols.shared_release)(handle) });
        }
    }
}

fn properties(context: &Context) -> Properties {
    Properties {
        kind: PINNED,
        handle_types: DESCRIPTOR,
        location: Location { kind: ON_DEVICE, id: context.device().ordinal },
        metadata: std::ptr::null(),
        flags: [0; 8],
    }
}

/// `len` in whole pages of the device.
fn whole(context: &Context, len: u64) -> Result<usize, CudaError> {
    let (properties, mut page) = (properties(context), 0);
    context.call("cuMemGetAllocationGranularity", |symbols| unsafe {
        // SAFETY: writes one integer; 0 asks for the smallest page.
        (symbols.shared_granularity)(&raw mut page, &raw const properties, 0)
    })?;
    let bytes = len.max(1).checked_next_multiple_of(page.max(1) as u64);
    bytes.and_then(|bytes| usize::try_from(bytes).ok()).ok_or(CudaError::OutOfMemory { bytes: len })
}
