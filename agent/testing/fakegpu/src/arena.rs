//! Memory. A device address is a reservation without access; what it stands for lies elsewhere, where only this
//! library looks.

use crate::knobs::knobs;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One allocation.
struct Block {
    device: i32,
    len: u64,
    mapped: usize,
    shadow: usize,
}

#[derive(Default)]
struct Arena {
    device: BTreeMap<u64, Block>,
    /// Pinned memory: address and length.
    host: BTreeMap<u64, u64>,
}

static ARENA: Mutex<Arena> = Mutex::new(Arena { device: BTreeMap::new(), host: BTreeMap::new() });

/// What a wrong access does to its context: `CUDA_ERROR_ILLEGAL_ADDRESS`.
pub(crate) const ILLEGAL_ADDRESS: u32 = 700;
const PAGE: u64 = 4096;

fn lock() -> MutexGuard<'static, Arena> {
    ARENA.lock().unwrap_or_else(PoisonError::into_inner)
}

fn map(len: usize, access: ProtFlags) -> Option<usize> {
    // SAFETY: new memory at an address that the kernel chooses.
    let base = unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE) };
    base.ok().map(|base| base as usize)
}

fn unmap(base: usize, len: usize) {
    // SAFETY: mapped by `map`, and taken out of the table before.
    let done = unsafe { munmap(base as *mut c_void, len) };
    assert!(done.is_ok(), "memory of the double");
}

/// Takes device memory; `None` where the device has too little.
pub(crate) fn alloc(device: i32, len: u64) -> Option<u64> {
    if len > free_bytes(device) {
        return None;
    }
    let mapped = usize::try_from(len.next_multiple_of(PAGE)).ok()?;
    let address = map(mapped, ProtFlags::empty())?;
    let shadow = map(mapped, ProtFlags::READ | ProtFlags::WRITE)?;
    // What was there before means nothing.
    // SAFETY: `mapped` bytes that were just mapped for writing.
    unsafe { std::ptr::write_bytes(shadow as *mut u8, 0xcd, mapped) };
    lock().device.insert(address as u64, Block { device, len, mapped, shadow });
    Some(address as u64)
}

/// False where there is no such memory.
pub(crate) fn free(address: u64) -> bool {
    let Some(block) = lock().device.remove(&address) else { return false };
    unmap(address as usize, block.mapped);
    unmap(block.shadow, block.mapped);
    true
}

pub(crate) fn free_bytes(device: i32) -> u64 {
    let taken: u64 =
        lock().device.values().filter(|block| block.device == device).map(|block| block.len).sum();
    knobs().device_bytes.saturating_sub(taken)
}

/// Where the bytes of a device range really lie.
pub(crate) fn shadow(address: u64, len: u64) -> Result<*mut u8, u32> {
    let arena = lock();
    let (base, block) = arena.device.range(..=address).next_back().ok_or(ILLEGAL_ADDRESS)?;
    let offset = address - base;
    match offset.checked_add(len) {
        Some(end) if end <= block.len => Ok((block.shadow + offset as usize) as *mut u8),
        _ => Err(ILLEGAL_ADDRESS),
    }
}

/// Takes pinned memory.
pub(crate) fn alloc_host(len: usize) -> Option<u64> {
    let len = len.next_multiple_of(PAGE as usize);
    let base = map(len, ProtFlags::READ | ProtFlags::WRITE)? as u64;
    lock().host.insert(base, len as u64);
    Some(base)
}

/// False where there is no such memory.
pub(crate) fn free_host(base: u64) -> bool {
    let Some(len) = lock().host.remove(&base) else { return false };
    unmap(base as usize, len as usize);
    true
}

/// Whether a host range is pinned.
pub(crate) fn is_pinned(address: u64, len: u64) -> Result<(), u32> {
    let arena = lock();
    let (base, have) = arena.host.range(..=address).next_back().ok_or(ILLEGAL_ADDRESS)?;
    let end = (address - base).checked_add(len).ok_or(ILLEGAL_ADDRESS)?;
    if end <= *have { Ok(()) } else { Err(ILLEGAL_ADDRESS) }
}
