//! Allocations that are mapped by hand and pass between processes: a memfd, with what the driver knows of it behind
//! its bytes. As strict as the real ones: whole pages, exact ranges, one access for each mapping, and a descriptor only
//! of what was made for one.

use crate::arena;
use crate::driver::{INVALID_DEVICE, INVALID_VALUE, OUT_OF_MEMORY, SUCCESS, is_device, ready, uuid};
use crate::knobs::knobs;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Pages of a device.
const PAGE: u64 = 2 << 20;
/// Behind the bytes of an allocation.
const TRAILER_BYTES: u64 = 4096;
const MAGIC: [u8; 16] = *b"FAKEGPU SHARED 1";

const DESCRIPTOR: u32 = 1;
/// `CUDA_ERROR_INVALID_HANDLE` and `CUDA_ERROR_NOT_PERMITTED`.
const INVALID_HANDLE: u32 = 400;
const NOT_PERMITTED: u32 = 800;

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Properties {
    kind: u32,
    handle_types: u32,
    location: Location,
    metadata: *const c_void,
    flags: [u8; 8],
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Location {
    kind: u32,
    id: c_int,
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Access {
    location: Location,
    flags: u32,
}

/// One allocation, while a handle, a mapping or a descriptor of this process has it.
#[derive(Debug)]
pub(crate) struct Allocation {
    file: OwnedFd,
    bytes: u64,
    device: i32,
    is_exportable: bool,
    is_own: bool,
}

/// Bytes of this process's own allocations, by device.
static TAKEN: Mutex<BTreeMap<i32, u64>> = Mutex::new(BTreeMap::new());
static HANDLES: Mutex<(u64, BTreeMap<u64, Arc<Allocation>>)> = Mutex::new((0, BTreeMap::new()));

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.is_own
            && let Some(taken) = lock(&TAKEN).get_mut(&self.device)
        {
            *taken -= self.bytes;
        }
    }
}

/// Bytes of a device that are taken.
pub(crate) fn taken_bytes(device: i32) -> u64 {
    lock(&TAKEN).get(&device).copied().unwrap_or(0)
}

fn add(allocation: Arc<Allocation>) -> u64 {
    let mut handles = lock(&HANDLES);
    handles.0 += 32;
    let handle = handles.0;
    handles.1.insert(handle, allocation);
    handle
}

fn find(handle: u64) -> Option<Arc<Allocation>> {
    lock(&HANDLES).1.get(&handle).cloned()
}

fn take(device: i32, bytes: u64, is_exportable: bool) -> rustix::io::Result<Allocation> {
    let file = memfd_create("fakegpu", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, bytes + TRAILER_BYTES)?;
    let base = map_file(&file, bytes)?;
    // What was there before means nothing.
    // SAFETY: `bytes` bytes that were just mapped for writing.
    unsafe { std::ptr::write_bytes(base as *mut u8, 0xcd, bytes as usize) };
    arena::unmap(base, bytes as usize);
    let mut trailer = MAGIC.to_vec();
    trailer.extend(uuid(device));
    trailer.extend(bytes.to_le_bytes());
    rustix::io::pwrite(&file, &trailer, bytes)?;
    *lock(&TAKEN).entry(device).or_default() += bytes;
    Ok(Allocation { file, bytes, device, is_exportable, is_own: true })
}

fn map_file(file: &OwnedFd, bytes: u64) -> rustix::io::Result<usize> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: new memory at an address that the kernel chooses.
    let base = unsafe { mmap(std::ptr::null_mut(), bytes as usize, access, MapFlags::SHARED, file, 0) };
    base.map(|base| base as usize)
}

/// What another process has made, from its descriptor.
fn import(fd: BorrowedFd<'_>) -> Result<Allocation, u32> {
    let bytes = rustix::fs::fstat(fd).map_err(|_| INVALID_VALUE)?.st_size.cast_unsigned();
    let bytes = bytes.checked_sub(TRAILER_BYTES).ok_or(INVALID_VALUE)?;
    let mut trailer = [0; 40];
    let read = rustix::io::pread(fd, &mut trailer, bytes).map_err(|_| INVALID_VALUE)?;
    if read < trailer.len() || trailer[..16] != MAGIC || trailer[32..] != bytes.to_le_bytes() {
        return Err(INVALID_VALUE);
    }
    let device = (0..knobs().devices).find(|device| uuid(*device) == trailer[16..32]);
    let device = device.ok_or(INVALID_DEVICE)?;
    let file = fd.try_clone_to_owned().map_err(|_| OUT_OF_MEMORY)?;
    Ok(Allocation { file, bytes, device, is_exportable: true, is_own: false })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetAllocationGranularity(
    bytes: *mut usize,
    properties: *const Properties,
    _option: c_uint,
) -> u32 {
    // SAFETY: the caller's struct and integer.
    let found = unsafe {
        *bytes = PAGE as usize;
        &*properties
    };
    if is_usable(found) { SUCCESS } else { INVALID_VALUE }
}

fn is_usable(found: &Properties) -> bool {
    (found.kind, found.location.kind) == (1, 1)
        && is_device(found.location.id)
        && found.handle_types & !DESCRIPTOR == 0
        && found.flags[4..] == [0; 4]
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemCreate(
    handle: *mut u64,
    bytes: usize,
    properties: *const Properties,
    flags: u64,
) -> u32 {
    // SAFETY: the caller's struct.
    let found = unsafe { *properties };
    let bytes = bytes as u64;
    if !is_usable(&found) || flags != 0 || bytes == 0 || !bytes.is_multiple_of(PAGE) {
        return INVALID_VALUE;
    }
    let device = found.location.id;
    if bytes > arena::free_bytes(device) {
        return OUT_OF_MEMORY;
    }
    match take(device, bytes, found.handle_types == DESCRIPTOR) {
        Ok(allocation) => {
            // SAFETY: the caller's handle.
            unsafe { *handle = add(Arc::new(allocation)) };
            ready()
        }
        Err(_) => OUT_OF_MEMORY,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemExportToShareableHandle(
    out: *mut c_void,
    handle: u64,
    kind: c_uint,
    flags: u64,
) -> u32 {
    let Some(found) = find(handle) else { return INVALID_HANDLE };
    if !found.is_exportable || kind != DESCRIPTOR || flags != 0 {
        return INVALID_VALUE;
    }
    let Ok(fd) = found.file.try_clone() else { return OUT_OF_MEMORY };
    // SAFETY: the caller's integer; the descriptor is the caller's.
    unsafe { *out.cast::<c_int>() = fd.into_raw_fd() };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemImportFromShareableHandle(handle: *mut u64, fd: *mut c_void, kind: c_uint) -> u32 {
    let Ok(fd) = c_int::try_from(fd as usize) else { return INVALID_VALUE };
    if fd < 0 || kind != DESCRIPTOR {
        return INVALID_VALUE;
    }
    // SAFETY: the caller keeps it open during the call.
    match import(unsafe { BorrowedFd::borrow_raw(fd) }) {
        Ok(allocation) => {
            // SAFETY: the caller's handle.
            unsafe { *handle = add(Arc::new(allocation)) };
            ready()
        }
        Err(code) => code,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetAllocationPropertiesFromHandle(out: *mut Properties, handle: u64) -> u32 {
    let Some(found) = find(handle) else { return INVALID_HANDLE };
    let handle_types = u32::from(found.is_exportable) * DESCRIPTOR;
    let location = Location { kind: 1, id: found.device };
    // SAFETY: the caller's struct.
    unsafe {
        *out = Properties { kind: 1, handle_types, location, metadata: std::ptr::null(), flags: [0; 8] }
    };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemRetainAllocationHandle(handle: *mut u64, address: *mut c_void) -> u32 {
    match arena::allocation_at(address as u64) {
        Some(allocation) => {
            // SAFETY: the caller's handle.
            unsafe { *handle = add(allocation) };
            SUCCESS
        }
        None => INVALID_VALUE,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemRelease(handle: u64) -> u32 {
    if lock(&HANDLES).1.remove(&handle).is_some() { SUCCESS } else { INVALID_HANDLE }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAddressReserve(
    address: *mut u64,
    bytes: usize,
    _alignment: usize,
    _wish: u64,
    flags: u64,
) -> u32 {
    if bytes == 0 || !(bytes as u64).is_multiple_of(PAGE) || flags != 0 {
        return INVALID_VALUE;
    }
    match arena::reserve(bytes) {
        Some(found) => {
            // SAFETY: the caller's address.
            unsafe { *address = found };
            ready()
        }
        None => OUT_OF_MEMORY,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressFree(address: u64, bytes: usize) -> u32 {
    if arena::unreserve(address, bytes as u64) { SUCCESS } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64) -> u32 {
    let Some(found) = find(handle) else { return INVALID_HANDLE };
    let whole = bytes > 0 && (bytes as u64).is_multiple_of(PAGE) && address.is_multiple_of(4096);
    if !whole || offset != 0 || flags != 0 || bytes as u64 > found.bytes {
        return INVALID_VALUE;
    }
    let Ok(shadow) = map_file(&found.file, bytes as u64) else { return OUT_OF_MEMORY };
    if arena::map_shared(address, bytes as u64, shadow, found.device, found) {
        return SUCCESS;
    }
    arena::unmap(shadow, bytes);
    INVALID_VALUE
}

#[unsafe(no_mangle)]
extern "C" fn cuMemUnmap(address: u64, bytes: usize) -> u32 {
    if arena::unmap_shared(address, bytes as u64) { SUCCESS } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemSetAccess(address: u64, bytes: usize, access: *const Access, count: usize) -> u32 {
    if count != 1 {
        return INVALID_VALUE;
    }
    // SAFETY: the caller's struct.
    let found = unsafe { *access };
    if found.location.kind != 1 || ![0, 1, 3].contains(&found.flags) {
        return INVALID_VALUE;
    }
    if !is_device(found.location.id) {
        return INVALID_DEVICE;
    }
    match arena::set_access(address, bytes as u64, found.location.id, found.flags) {
        Some(true) => SUCCESS,
        // Another device reaches it only where there is a link, which there is none of here.
        Some(false) => NOT_PERMITTED,
        None => INVALID_VALUE,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, address: u64) -> u32 {
    match arena::range_of(address) {
        Some((begin, len)) => {
            // SAFETY: the caller's integers.
            unsafe { (*base, *bytes) = (begin, len as usize) };
            SUCCESS
        }
        None => INVALID_VALUE,
    }
}
