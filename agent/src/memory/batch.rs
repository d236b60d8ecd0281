//! Vectored socket IO straight from and to mapped memory.

use super::mapping::Mapping;
use std::io::{IoSlice, IoSliceMut};
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;

/// Slices of one call: enough that a call moves a whole chunk of medium runs, few enough for the stack.
const SLICES_MAX: usize = 64;

/// `struct iovec`, with which std promises that `IoSlice` and `IoSliceMut` are ABI compatible.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct RawSlice {
    base: *mut u8,
    len: usize,
}

#[derive(Debug)]
struct Slices {
    slices: [RawSlice; SLICES_MAX],
    first: usize,
    end: usize,
    bytes: usize,
}

impl Slices {
    fn new() -> Self {
        let empty = RawSlice { base: std::ptr::null_mut(), len: 0 };
        Self { slices: [empty; SLICES_MAX], first: 0, end: 0, bytes: 0 }
    }

    fn push(&mut self, base: *mut u8, len: usize) {
        self.slices[self.end] = RawSlice { base, len };
        self.end += 1;
        self.bytes += len;
    }

    /// Leaves out the first `n` bytes, which were moved.
    fn advance(&mut self, mut n: usize) {
        assert!(n <= self.bytes, "{n} bytes moved of {}", self.bytes);
        self.bytes -= n;
        while self.first < self.end {
            let slice = &mut self.slices[self.first];
            if n < slice.len {
                // SAFETY: n is less than the length of the slice, so the result lies inside it.
                slice.base = unsafe { slice.base.add(n) };
                slice.len -= n;
                return;
            }
            n -= slice.len;
            self.first += 1;
        }
    }

    fn is_full(&self) -> bool {
        self.end == SLICES_MAX
    }
}

/// Bytes to write to a socket, from mapped and private memory, in order.
#[derive(Debug)]
pub struct SendBatch<'m> {
    slices: Slices,
    memory: PhantomData<&'m [u8]>,
}

impl<'m> SendBatch<'m> {
    /// Nothing to send.
    #[must_use]
    pub fn new() -> Self {
        Self { slices: Slices::new(), memory: PhantomData }
    }

    /// Appends mapped bytes.
    ///
    /// # Panics
    /// Outside the mapping, or where the batch is full.
    pub fn push_mapped(&mut self, mapping: &'m Mapping, offset: u64, len: usize) {
        self.slices.push(mapping.address(offset, len), len);
    }

    /// Appends private bytes.
    ///
    /// # Panics
    /// Where the batch is full.
    pub fn push_private(&mut self, bytes: &'m [u8]) {
        self.slices.push(bytes.as_ptr().cast_mut(), bytes.len());
    }

    /// True where nothing more can be appended.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.slices.is_full()
    }

    /// Bytes not yet sent.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.slices.bytes
    }

    /// Writes once; what was written leaves the batch. Returns its bytes.
    ///
    /// # Errors
    /// Those of `writev`.
    pub fn send(&mut self, socket: BorrowedFd<'_>) -> std::io::Result<usize> {
        let slices = &self.slices.slices[self.slices.first..self.slices.end];
        // SAFETY: `RawSlice` has the layout of iovec and so of `IoSlice`. No `IoSlice` is looked into: the slice
        // goes to the system call as it is, and 'm keeps all its memory mapped or allocated.
        let slices =
            unsafe { std::slice::from_raw_parts(slices.as_ptr().cast::<IoSlice<'_>>(), slices.len()) };
        let n = rustix::io::retry_on_intr(|| rustix::io::writev(socket, slices))?;
        self.slices.advance(n);
        Ok(n)
    }
}

impl Default for SendBatch<'_> {
    fn default() -> Self {
        Self::new()
    }
}

/// Mapped memory to fill from a socket, in order.
#[derive(Debug)]
pub struct ReceiveBatch<'m> {
    slices: Slices,
    memory: PhantomData<&'m Mapping>,
}

impl<'m> ReceiveBatch<'m> {
    /// Nothing to fill.
    #[must_use]
    pub fn new() -> Self {
        Self { slices: Slices::new(), memory: PhantomData }
    }

    /// Appends mapped bytes.
    ///
    /// # Panics
    /// Outside the mapping, where it is read-only, or where the batch is full.
    pub fn push_mapped(&mut self, mapping: &'m Mapping, offset: u64, len: usize) {
        self.slices.push(mapping.address_to_write(offset, len), len);
    }

    /// True where nothing more can be appended.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.slices.is_full()
    }

    /// Bytes not yet filled.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.slices.bytes
    }

    /// Reads once; what was filled leaves the batch. Returns its bytes, 0 at the end of the stream.
    ///
    /// # Errors
    /// Those of `readv`.
    pub fn receive(&mut self, socket: BorrowedFd<'_>) -> std::io::Result<usize> {
        let slices = &mut self.slices.slices[self.slices.first..self.slices.end];
        // SAFETY: as in `SendBatch::send`; the memory is writable by `address_to_write`, and only the kernel
        // writes through these slices.
        let slices = unsafe {
            std::slice::from_raw_parts_mut(slices.as_mut_ptr().cast::<IoSliceMut<'_>>(), slices.len())
        };
        let n = rustix::io::retry_on_intr(|| rustix::io::readv(socket, slices))?;
        self.slices.advance(n);
        Ok(n)
    }
}

impl Default for ReceiveBatch<'_> {
    fn default() -> Self {
        Self::new()
    }
}
