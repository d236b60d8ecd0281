//! One mapped memfd: creation, adoption of another process's, and copies in and out.

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use weightrefit_core::code::Code;
use weightrefit_core::dtype::Cast;
use weightrefit_core::dtype::cast::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

/// File system of ordinary memfds (`TMPFS_MAGIC` of statfs(2)); huge-page ones report another.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Memory that cannot be used. The agent refuses the client that passed it and touches nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// A pipe, a socket, a file on disk: its pages can go away.
    #[error("memory `{name}` is not a memfd with ordinary pages")]
    NotMemfd {
        /// What it was passed as.
        name: String,
    },
    /// Its owner could cut it while it is read.
    #[error("memory `{name}` lacks the seals SHRINK and GROW (it has {seals:#x})")]
    Unsealed {
        /// What it was passed as.
        name: String,
        /// The seals that it has.
        seals: u32,
    },
    /// Shorter than its owner says.
    #[error("memory `{name}` has {actual} bytes, its owner claims {claimed}")]
    TooShort {
        /// What it was passed as.
        name: String,
        /// What the owner says.
        claimed: u64,
        /// What the kernel says.
        actual: u64,
    },
    /// The system has no more.
    #[error("no memory for {len} bytes of `{name}`: {source}")]
    Exhausted {
        /// What it is for.
        name: String,
        /// Bytes asked for.
        len: u64,
        /// What the kernel says.
        source: Errno,
    },
    /// The kernel refused for another reason.
    #[error("{action} of memory `{name}` failed: {source}")]
    System {
        /// What it is for.
        name: String,
        /// The call.
        action: &'static str,
        /// What the kernel says.
        source: Errno,
    },
}

impl MemoryError {
    /// The stable code that a user sees.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::NotMemfd { .. } | Self::Unsealed { .. } | Self::TooShort { .. } => {
                Code::RegistrationMismatch
            }
            Self::Exhausted { .. } | Self::System { .. } => Code::StagingExhausted,
        }
    }
}

/// A mapped memfd of fixed size; unmapped on drop.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
    writable: bool,
    /// For the rank's own process, which maps it too.
    file: OwnedFd,
}

// SAFETY: a `Mapping` owns its address range until drop; all access is by raw copies that are valid from any
// thread (M1, M2), and threads that write the same bytes at once only mix them.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapping {}

/// Creates a sealed memfd of `len` bytes, zeroed and backed by real pages, and maps it for writing.
///
/// # Errors
/// [`MemoryError::Exhausted`] where the system lacks the pages.
pub fn create(name: &str, len: u64) -> Result<(OwnedFd, Mapping), MemoryError> {
    let system = |action| move |source| MemoryError::System { name: name.into(), action, source };
    let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
    // memfd names are at most 249 bytes and only for people who read /proc.
    let shown: String = name.chars().filter(|c| *c != '\0').take(60).collect();
    let fd = rustix::fs::memfd_create(shown, flags).map_err(system("creation"))?;
    let exhausted = |source| MemoryError::Exhausted { name: name.into(), len, source };
    rustix::fs::ftruncate(&fd, len).map_err(exhausted)?;
    if len > 0 {
        // Pages now, so that a lack of them is an error here and not a fault at the first write.
        let mode = rustix::fs::FallocateFlags::empty();
        rustix::io::retry_on_intr(|| rustix::fs::fallocate(&fd, mode, 0, len)).map_err(exhausted)?;
    }
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).map_err(system("sealing"))?;
    let mapping = Mapping::map(fd.as_fd(), name, len, true)?;
    Ok((fd, mapping))
}

/// From now on nobody can map the memfd for writing or write to it through an fd; mappings that exist stay.
/// For staging: the engine reads exactly what was digested.
///
/// # Errors
/// Where the kernel refuses the seal.
pub fn refuse_new_writers(fd: BorrowedFd<'_>, name: &str) -> Result<(), MemoryError> {
    rustix::fs::fcntl_add_seals(fd, SealFlags::FUTURE_WRITE).map_err(|source| MemoryError::System {
        name: name.into(),
        action: "sealing",
        source,
    })
}

impl Mapping {
    /// Maps another process's memfd read-only, after checking that its size cannot shrink and is `len` or more.
    ///
    /// # Errors
    /// Memory of another kind, unsealed, or shorter than `len`.
    pub fn adopt(fd: BorrowedFd<'_>, name: &str, len: u64) -> Result<Self, MemoryError> {
        Self::adopt_for(fd, name, len, false)
    }

    /// As [`Self::adopt`], for writing: staging, in the process of its engine.
    ///
    /// # Errors
    /// Those of [`Self::adopt`], and memory that has no new writers ([`refuse_new_writers`]).
    pub fn adopt_for_writing(fd: BorrowedFd<'_>, name: &str, len: u64) -> Result<Self, MemoryError> {
        Self::adopt_for(fd, name, len, true)
    }

    fn adopt_for(fd: BorrowedFd<'_>, name: &str, len: u64, writable: bool) -> Result<Self, MemoryError> {
        let not_memfd = || MemoryError::NotMemfd { name: name.into() };
        let seals = rustix::fs::fcntl_get_seals(fd).map_err(|_| not_memfd())?;
        let system = rustix::fs::fstatfs(fd).map_err(|_| not_memfd())?;
        if system.f_type != TMPFS_MAGIC {
            return Err(not_memfd());
        }
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(MemoryError::Unsealed { name: name.into(), seals: seals.bits() });
        }
        // Only after the seals were seen does the size stay what it is.
        let stat = rustix::fs::fstat(fd).map_err(|_| not_memfd())?;
        let actual = u64::try_from(stat.st_size).unwrap_or(0);
        if actual < len {
            return Err(MemoryError::TooShort { name: name.into(), claimed: len, actual });
        }
        Self::map(fd, name, len, writable)
    }

    /// `fd` is a sealed memfd of at least `len` bytes.
    fn map(fd: BorrowedFd<'_>, name: &str, len: u64, writable: bool) -> Result<Self, MemoryError> {
        let exhausted = |source| MemoryError::Exhausted { name: name.into(), len, source };
        let bytes = usize::try_from(len).map_err(|_| exhausted(Errno::NOMEM))?;
        let cloned = fd.try_clone_to_owned();
        let file = cloned.map_err(|error| exhausted(Errno::from_io_error(&error).unwrap_or(Errno::MFILE)))?;
        if bytes == 0 {
            return Ok(Self { base: NonNull::dangling(), len: 0, writable, file });
        }
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // Own memory has its pages: mapping them now keeps page faults out of transfers. Another's may be sparse,
        // and then reading it all would fill memory for nothing.
        let flags = if writable { MapFlags::SHARED | MapFlags::POPULATE } else { MapFlags::SHARED };
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory that exists.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, flags, fd, 0) }
            .map_err(exhausted)?;
        let base = NonNull::new(base.cast()).ok_or_else(|| exhausted(Errno::NOMEM))?;
        Ok(Self { base, len: bytes, writable, file })
    }

    /// Its descriptor.
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Bytes mapped.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Where it begins, for a device that copies from or to it (M1: no reference is made of it).
    pub(crate) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// True where nothing is mapped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// True where this process may write.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Copies the bytes from `offset` on to `out`.
    ///
    /// # Panics
    /// Outside the mapping (M5).
    #[inline(never)]
    pub fn read(&self, offset: u64, out: &mut [u8]) {
        let from = self.address(offset, out.len());
        // SAFETY: `address` checked that the range is mapped; `out` is private and cannot overlap it.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) }
    }

    /// Casts the elements from `offset` on to `out`, which holds whole elements.
    ///
    /// # Panics
    /// Outside the mapping, or where `out` is not a whole number of elements (M5).
    #[inline(never)]
    pub fn read_cast(&self, offset: u64, cast: Cast, out: &mut [u8]) {
        match cast {
            Cast::None => self.read(offset, out),
            Cast::F32ToBf16 => {
                self.cast_elements(offset, out, f32_to_bf16, u32::from_le_bytes, u16::to_le_bytes)
            }
            Cast::F32ToF16 => {
                self.cast_elements(offset, out, f32_to_f16, u32::from_le_bytes, u16::to_le_bytes)
            }
            Cast::F16ToF32 => {
                self.cast_elements(offset, out, f16_to_f32, u16::from_le_bytes, u32::to_le_bytes)
            }
            Cast::Bf16ToF32 => {
                self.cast_elements(offset, out, bf16_to_f32, u16::from_le_bytes, u32::to_le_bytes)
            }
        }
    }

    #[inline]
    fn cast_elements<A, B, const FROM: usize, const TO: usize>(
        &self,
        offset: u64,
        out: &mut [u8],
        cast: impl Fn(A) -> B,
        decode: impl Fn([u8; FROM]) -> A,
        encode: impl Fn(B) -> [u8; TO],
    ) {
        let (elements, rest) = out.as_chunks_mut::<TO>();
        assert!(rest.is_empty(), "a cast to a part of an element");
        let from = self.address(offset, elements.len() * FROM).cast::<[u8; FROM]>();
        for (at, element) in elements.iter_mut().enumerate() {
            // SAFETY: `address` checked that all elements are mapped. Each is copied before it is cast; whatever
            // the copy sees is a number, and only the result leaves (M2, M3).
            *element = encode(cast(decode(unsafe { from.add(at).read_unaligned() })));
        }
    }

    /// Copies `data` to the bytes from `offset` on.
    ///
    /// # Panics
    /// Outside the mapping, or where it is read-only (M5).
    #[inline(never)]
    pub fn write(&self, offset: u64, data: &[u8]) {
        let to = self.address_to_write(offset, data.len());
        // SAFETY: `address_to_write` checked that the range is mapped and writable; `data` is private.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) }
    }

    /// Copies runs of `run` bytes that start `stride` bytes apart, the first at `offset`, until `out` is full.
    ///
    /// # Panics
    /// Outside the mapping, or where `out` is not a whole number of runs (M5).
    #[inline(never)]
    pub fn read_rows(&self, offset: u64, stride: u64, run: usize, out: &mut [u8]) {
        let from = self.address_of_rows(offset, stride, run, out.len());
        match run {
            2 => copy_rows::<2>(
                Rows { from, step: stride as usize, to: out.as_mut_ptr(), to_step: 2 },
                out.len(),
            ),
            4 => copy_rows::<4>(
                Rows { from, step: stride as usize, to: out.as_mut_ptr(), to_step: 4 },
                out.len(),
            ),
            _ => {
                for (row, out) in out.chunks_exact_mut(run).enumerate() {
                    // SAFETY: `address_of_rows` checked that the last row, hence each, is mapped.
                    unsafe {
                        let from = from.add(row * stride as usize);
                        std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), run);
                    }
                }
            }
        }
    }

    /// The inverse of [`Self::read_rows`].
    ///
    /// # Panics
    /// Outside the mapping, where it is read-only, or where `data` is not a whole number of runs (M5).
    #[inline(never)]
    pub fn write_rows(&self, offset: u64, stride: u64, run: usize, data: &[u8]) {
        assert!(self.writable, "write to a read-only mapping");
        let to = self.address_of_rows(offset, stride, run, data.len());
        match run {
            2 => copy_rows::<2>(
                Rows { from: data.as_ptr(), step: 2, to, to_step: stride as usize },
                data.len(),
            ),
            4 => copy_rows::<4>(
                Rows { from: data.as_ptr(), step: 4, to, to_step: stride as usize },
                data.len(),
            ),
            _ => {
                for (row, data) in data.chunks_exact(run).enumerate() {
                    // SAFETY: `address_of_rows` checked that the last row, hence each, is mapped.
                    unsafe {
                        std::ptr::copy_nonoverlapping(data.as_ptr(), to.add(row * stride as usize), run);
                    }
                }
            }
        }
    }

    /// Address of `len` mapped bytes from `offset` on.
    pub(super) fn address(&self, offset: u64, len: usize) -> *mut u8 {
        let end = usize::try_from(offset).ok().and_then(|offset| offset.checked_add(len));
        assert!(
            end.is_some_and(|end| end <= self.len),
            "{len} bytes at {offset} of a mapping of {}",
            self.len
        );
        // SAFETY: offset ≤ end ≤ len, so the result lies in the mapping or one past its end.
        unsafe { self.base.as_ptr().add(offset as usize) }
    }

    /// As [`Self::address`], where this process may write.
    pub(super) fn address_to_write(&self, offset: u64, len: usize) -> *mut u8 {
        assert!(self.writable, "write to a read-only mapping");
        self.address(offset, len)
    }

    /// Address of the first of the rows that `bytes` private bytes are.
    fn address_of_rows(&self, offset: u64, stride: u64, run: usize, bytes: usize) -> *mut u8 {
        assert!(run > 0 && bytes.is_multiple_of(run), "{bytes} bytes are no whole number of runs of {run}");
        let last = (bytes / run).saturating_sub(1) as u64;
        let span = last.checked_mul(stride).and_then(|span| span.checked_add(run as u64));
        let span = span.and_then(|span| usize::try_from(span).ok()).unwrap_or(usize::MAX);
        self.address(offset, if bytes == 0 { 0 } else { span })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the range was mapped by `map`, and whoever holds an address in it borrows `self`.
            let result = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
            debug_assert!(result.is_ok());
        }
    }
}

/// Addresses and steps of rows to copy.
struct Rows {
    from: *const u8,
    step: usize,
    to: *mut u8,
    to_step: usize,
}

/// Copies `bytes / RUN` rows of a size known to the compiler: one load and one store each.
#[inline]
fn copy_rows<const RUN: usize>(rows: Rows, bytes: usize) {
    for row in 0..bytes / RUN {
        // SAFETY: both callers checked that the last row, hence each, is mapped; the other side is their slice.
        unsafe {
            let from = rows.from.add(row * rows.step).cast::<[u8; RUN]>();
            rows.to.add(row * rows.to_step).cast::<[u8; RUN]>().write_unaligned(from.read_unaligned());
        }
    }
}
