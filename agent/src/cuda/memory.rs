//! Memory of a device, and memory of the host that it can reach.

use super::shared::Shared;
use super::symbols::OUT_OF_MEMORY;
use super::{Context, CudaError, ImportError, Stream};
use crate::memory::Mapping;
use std::ffi::c_void;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// Memory of a device. Its address means nothing to the host.
#[derive(Debug)]
pub struct DeviceMemory {
    context: Context,
    address: u64,
    len: u64,
    origin: Origin,
}

/// Whose it is.
#[derive(Debug)]
enum Origin {
    /// Ours.
    Taken,
    /// An allocation of its own, ours or another process's.
    Shared(Shared),
}

impl DeviceMemory {
    /// Takes `len` bytes; their contents are whatever was there.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] where the device lacks them.
    pub fn new(context: &Context, len: u64) -> Result<Self, CudaError> {
        let mut address = 0;
        let bytes = usize::try_from(len.max(1)).map_err(|_| CudaError::OutOfMemory { bytes: len })?;
        // SAFETY: writes one address; the context is current.
        let code = context.raw_call(|symbols| unsafe { (symbols.memory_alloc)(&raw mut address, bytes) });
        match code {
            OUT_OF_MEMORY => Err(CudaError::OutOfMemory { bytes: len }),
            code => {
                context.call("cuMemAlloc", |_| code)?;
                Ok(Self { context: context.clone(), address, len, origin: Origin::Taken })
            }
        }
    }

    /// Takes `len` bytes that [`Self::export`] can pass to another process; their contents are whatever was there.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] where the device lacks them.
    pub fn shareable(context: &Context, len: u64) -> Result<Self, CudaError> {
        let shared = Shared::take(context, len)?;
        Ok(Self { context: context.clone(), address: shared.address(), len, origin: Origin::Shared(shared) })
    }

    /// Another process's memory of at least `len` bytes on the context's device, to read (C5). `fd` is not needed
    /// afterwards.
    ///
    /// # Errors
    /// A descriptor of something else, of another device, or of less.
    pub fn import(context: &Context, fd: BorrowedFd<'_>, name: &str, len: u64) -> Result<Self, ImportError> {
        let shared = Shared::import(context, fd, name, len)?;
        Ok(Self { context: context.clone(), address: shared.address(), len, origin: Origin::Shared(shared) })
    }

    /// A descriptor for another process, which can read and write the memory by it.
    ///
    /// # Errors
    /// Memory that was not taken for it, or what the driver says.
    pub fn export(&self) -> Result<OwnedFd, CudaError> {
        match &self.origin {
            Origin::Shared(shared) => shared.export(),
            Origin::Taken => Err(CudaError::Range { offset: 0, bytes: self.len, available: 0 }),
        }
    }

    /// Of its device.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True where there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of `bytes` bytes from `offset` on.
    ///
    /// # Errors
    /// Where they lie outside.
    pub fn address(&self, offset: u64, bytes: u64) -> Result<u64, CudaError> {
        check(offset, bytes, self.len)?;
        Ok(self.address + offset)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let address = self.address;
        match self.origin {
            // SAFETY: allocated by `new` and freed once; C4.
            Origin::Taken => drop(self.context.raw_call(|symbols| unsafe { (symbols.memory_free)(address) })),
            // What it was made of does it.
            Origin::Shared(_) => {}
        }
    }
}

/// Memory of the host that does not move, so that the device can copy from and to it by itself.
#[derive(Debug)]
pub struct PinnedMemory {
    context: Context,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory that this value owns.
unsafe impl Send for PinnedMemory {}

impl PinnedMemory {
    /// Takes `len` bytes.
    pub fn new(context: &Context, len: usize) -> Result<Self, CudaError> {
        let mut base = std::ptr::null_mut();
        let bytes = len.max(1);
        // SAFETY: writes one pointer; the context is current.
        context.call("cuMemAllocHost", |symbols| unsafe { (symbols.host_alloc)(&raw mut base, bytes) })?;
        let base = NonNull::new(base.cast::<u8>()).ok_or(CudaError::OutOfMemory { bytes: len as u64 })?;
        // SAFETY: the allocation has `len` bytes; zeros make all of them initialised.
        unsafe { std::ptr::write_bytes(base.as_ptr(), 0, len) };
        Ok(Self { context: context.clone(), base, len })
    }

    /// The bytes. No copy that was enqueued may still write them (C4).
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `len` bytes, initialised, owned; writers are ruled out by the caller's wait and by `&mut` below.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }

    /// The bytes, to write. No copy that was enqueued may still use them (C4).
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let base = self.base.as_ptr().cast::<c_void>();
        // SAFETY: allocated by `new` and freed once; C4.
        self.context.raw_call(|symbols| unsafe { (symbols.host_free)(base) });
    }
}

/// A mapping of the host that the device can copy from and to by itself.
#[derive(Debug)]
pub struct PinnedMapping {
    context: Context,
    mapping: Arc<Mapping>,
}

impl PinnedMapping {
    /// Keeps all pages of `mapping` where they are.
    pub fn new(context: &Context, mapping: Arc<Mapping>) -> Result<Self, CudaError> {
        if !mapping.is_empty() {
            let (base, bytes) = (mapping.base(), mapping.len() as usize);
            // SAFETY: the whole of a mapping, which is unmapped after this value has let go of it.
            context.call("cuMemHostRegister", |symbols| unsafe {
                (symbols.host_register)(base.cast(), bytes, 0)
            })?;
        }
        Ok(Self { context: context.clone(), mapping })
    }
}

impl Drop for PinnedMapping {
    fn drop(&mut self) {
        if !self.mapping.is_empty() {
            let base = self.mapping.base().cast::<c_void>();
            // SAFETY: registered by `new` and given back once; C4.
            self.context.raw_call(|symbols| unsafe { (symbols.host_unregister)(base) });
        }
    }
}

impl Stream {
    /// Enqueues a copy of all of `from`, which is as long as `to`.
    ///
    /// # Errors
    /// Memories of two sizes, or what the driver says.
    pub fn download_mapped(&self, from: &DeviceMemory, to: &PinnedMapping) -> Result<(), CudaError> {
        let (address, host, bytes) = pair(from, to)?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both are as long as said and live until the stream has passed this (C4).
        self.context().call("cuMemcpyDtoHAsync", |symbols| unsafe {
            (symbols.download)(host, address, bytes, self.raw())
        })
    }

    /// Enqueues a copy of all of `from` to `to`, which is as long.
    ///
    /// # Errors
    /// Memories of two sizes, or what the driver says.
    pub fn upload_mapped(&self, from: &PinnedMapping, to: &DeviceMemory) -> Result<(), CudaError> {
        let (address, host, bytes) = pair(to, from)?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: as for `download_mapped`.
        self.context().call("cuMemcpyHtoDAsync", |symbols| unsafe {
            (symbols.upload)(address, host.cast_const(), bytes, self.raw())
        })
    }

    /// Enqueues a copy of the first `bytes` bytes of `from` to `to`.
    ///
    /// # Errors
    /// A range outside either memory, or what the driver says.
    pub fn upload(
        &self,
        from: &PinnedMemory,
        to: &DeviceMemory,
        offset: u64,
        bytes: u64,
    ) -> Result<(), CudaError> {
        check(0, bytes, from.len as u64)?;
        let (address, host) = (to.address(offset, bytes)?, from.base.as_ptr().cast_const().cast());
        // SAFETY: both ranges were checked and live until the stream has passed this (C4).
        self.context().call("cuMemcpyHtoDAsync", |symbols| unsafe {
            (symbols.upload)(address, host, bytes as usize, self.raw())
        })
    }

    /// Enqueues a copy of `bytes` bytes of `from`, from `offset` on, to the beginning of `to`.
    ///
    /// # Errors
    /// A range outside either memory, or what the driver says.
    pub fn download(
        &self,
        from: &DeviceMemory,
        offset: u64,
        to: &mut PinnedMemory,
        bytes: u64,
    ) -> Result<(), CudaError> {
        check(0, bytes, to.len as u64)?;
        let (address, host) = (from.address(offset, bytes)?, to.base.as_ptr().cast());
        // SAFETY: both ranges were checked and live until the stream has passed this (C4).
        self.context().call("cuMemcpyDtoHAsync", |symbols| unsafe {
            (symbols.download)(host, address, bytes as usize, self.raw())
        })
    }

    /// Enqueues zeros.
    pub fn clear(&self, memory: &DeviceMemory) -> Result<(), CudaError> {
        if memory.is_empty() {
            return Ok(());
        }
        // SAFETY: the whole memory, which lives until the stream has passed this (C4).
        self.context().call("cuMemsetD8Async", |symbols| unsafe {
            (symbols.set_bytes)(memory.address, 0, memory.len as usize, self.raw())
        })
    }
}

/// Where the two begin, and how long each is.
fn pair(device: &DeviceMemory, host: &PinnedMapping) -> Result<(u64, *mut c_void, usize), CudaError> {
    let bytes = host.mapping.len();
    if bytes != device.len {
        return Err(CudaError::Range { offset: 0, bytes, available: device.len });
    }
    Ok((device.address, host.mapping.base().cast(), bytes as usize))
}

fn check(offset: u64, bytes: u64, available: u64) -> Result<(), CudaError> {
    match offset.checked_add(bytes) {
        Some(end) if end <= available => Ok(()),
        _ => Err(CudaError::Range { offset, bytes, available }),
    }
}
