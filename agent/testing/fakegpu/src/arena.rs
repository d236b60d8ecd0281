//! Memory. A device address is a reservation without access; what it stands for lies elsewhere, where only this
//! library looks.

use crate::knobs::knobs;
use crate::shared::{Allocation, taken_bytes};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One allocation.
struct Block {
    device: i32,
    len: u64,
    mapped: usize,
    shadow: usize,
    /// Mapped by hand.
    shared: Option<Shared>,
}

struct Shared {
    allocation: Arc<Allocation>,
    /// `CUmemAccess_flags`.
    access: u32,
}

#[derive(Default)]
struct Arena {
    device: BTreeMap<u64, Block>,
    /// Pinned memory: address and length, and whether it is ours.
    host: BTreeMap<u64, (u64, bool)>,
    /// Addresses for memory that is mapped by hand: first and length.
    ranges: BTreeMap<u64, u64>,
}

static ARENA: Mutex<Arena> =
    Mutex::new(Arena { device: BTreeMap::new(), host: BTreeMap::new(), ranges: BTreeMap::new() });

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

pub(crate) fn unmap(base: usize, len: usize) {
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
    lock().device.insert(address as u64, Block { device, len, mapped, shadow, shared: None });
    Some(address as u64)
}

/// False where there is no such memory.
pub(crate) fn free(address: u64) -> bool {
    let mut arena = lock();
    if arena.device.get(&address).is_none_or(|block| block.shared.is_some()) {
        return false;
    }
    let Some(block) = arena.device.remove(&address) else { return false };
    drop(arena);
    unmap(address as usize, block.mapped);
    unmap(block.shadow, block.mapped);
    true
}

pub(crate) fn free_bytes(device: i32) -> u64 {
    let arena = lock();
    let own = arena.device.values().filter(|block| block.device == device && block.shared.is_none());
    let taken: u64 = own.map(|block| block.len).sum();
    drop(arena);
    knobs().device_bytes.saturating_sub(taken).saturating_sub(taken_bytes(device))
}

/// Addresses for memory that is mapped by hand.
pub(crate) fn reserve(bytes: usize) -> Option<u64> {
    let address = map(bytes, ProtFlags::empty())? as u64;
    lock().ranges.insert(address, bytes as u64);
    Some(address)
}

/// False where no such range was reserved, or something is mapped in it.
pub(crate) fn unreserve(address: u64, bytes: u64) -> bool {
    let mut arena = lock();
    let is_free = arena.device.range(address..address.saturating_add(bytes)).next().is_none();
    if !is_free || arena.ranges.get(&address) != Some(&bytes) {
        return false;
    }
    arena.ranges.remove(&address);
    drop(arena);
    unmap(address as usize, bytes as usize);
    true
}

/// False where the range is not reserved, or something is mapped in it.
pub(crate) fn map_shared(address: u64, len: u64, shadow: usize, device: i32, of: Arc<Allocation>) -> bool {
    let mut arena = lock();
    let Some(end) = address.checked_add(len) else { return false };
    let inside = arena.ranges.range(..=address).next_back().is_some_and(|(base, bytes)| end <= base + bytes);
    let before = arena.device.range(..end).next_back();
    if !inside || before.is_some_and(|(base, block)| base + block.len > address) {
        return false;
    }
    let shared = Some(Shared { allocation: of, access: 0 });
    arena.device.insert(address, Block { device, len, mapped: len as usize, shadow, shared });
    true
}

/// False where nothing was mapped as this range.
pub(crate) fn unmap_shared(address: u64, len: u64) -> bool {
    let mut arena = lock();
    if arena.device.get(&address).is_none_or(|block| block.shared.is_none() || block.len != len) {
        return false;
    }
    let block = arena.device.remove(&address);
    drop(arena);
    if let Some(block) = block {
        unmap(block.shadow, block.mapped);
    }
    true
}

/// Whether the device may reach the memory, which then has this access; `None` where nothing is mapped as this range.
pub(crate) fn set_access(address: u64, len: u64, device: i32, access: u32) -> Option<bool> {
    let mut arena = lock();
    let block = arena.device.get_mut(&address).filter(|block| block.len == len)?;
    let shared = block.shared.as_mut()?;
    if block.device == device {
        shared.access = access;
    }
    Some(block.device == device)
}

/// The allocation that is mapped by hand at an address.
pub(crate) fn allocation_at(address: u64) -> Option<Arc<Allocation>> {
    let arena = lock();
    let (base, block) = arena.device.range(..=address).next_back()?;
    let shared = block.shared.as_ref().filter(|_| address < base + block.len)?;
    Some(Arc::clone(&shared.allocation))
}

/// First address and bytes of the memory that an address is in.
pub(crate) fn range_of(address: u64) -> Option<(u64, u64)> {
    let arena = lock();
    let (base, block) = arena.device.range(..=address).next_back()?;
    (address < base + block.len).then_some((*base, block.len))
}

/// Where the bytes of a device range really lie, to read.
pub(crate) fn shadow(address: u64, len: u64) -> Result<*mut u8, u32> {
    find(address, len, 1)
}

/// The same, to write.
pub(crate) fn shadow_to_write(address: u64, len: u64) -> Result<*mut u8, u32> {
    find(address, len, 3)
}

fn find(address: u64, len: u64, access: u32) -> Result<*mut u8, u32> {
    let arena = lock();
    let (base, block) = arena.device.range(..=address).next_back().ok_or(ILLEGAL_ADDRESS)?;
    let offset = address - base;
    let may = block.shared.as_ref().is_none_or(|shared| shared.access & access == access);
    match offset.checked_add(len) {
        Some(end) if end <= block.len && may => Ok((block.shadow + offset as usize) as *mut u8),
        _ => Err(ILLEGAL_ADDRESS),
    }
}

/// Takes pinned memory.
pub(crate) fn alloc_host(len: usize) -> Option<u64> {
    let len = len.next_multiple_of(PAGE as usize);
    let base = map(len, ProtFlags::READ | ProtFlags::WRITE)? as u64;
    lock().host.insert(base, (len as u64, true));
    Some(base)
}

/// False where there is no such memory, or it is another's.
pub(crate) fn free_host(base: u64) -> bool {
    let mut arena = lock();
    let Some((len, _)) = arena.host.get(&base).copied().filter(|(_, own)| *own) else { return false };
    arena.host.remove(&base);
    drop(arena);
    unmap(base as usize, len as usize);
    true
}

/// Pins memory of the caller; false where some of it is pinned.
pub(crate) fn register_host(base: u64, len: u64) -> bool {
    let mut arena = lock();
    let before = arena.host.range(..base.saturating_add(len)).next_back();
    let is_new = before.is_none_or(|(other, (bytes, _))| other + bytes <= base);
    if is_new && len > 0 {
        arena.host.insert(base, (len, false));
    }
    is_new && len > 0
}

/// False where the caller has pinned no such memory.
pub(crate) fn unregister_host(base: u64) -> bool {
    let mut arena = lock();
    let known = arena.host.get(&base).is_some_and(|(_, own)| !own);
    if known {
        arena.host.remove(&base);
    }
    known
}

/// Whether a host range is pinned.
pub(crate) fn is_pinned(address: u64, len: u64) -> Result<(), u32> {
    let arena = lock();
    let (base, (have, _)) = arena.host.range(..=address).next_back().ok_or(ILLEGAL_ADDRESS)?;
    let end = (address - base).checked_add(len).ok_or(ILLEGAL_ADDRESS)?;
    if end <= *have { Ok(()) } else { Err(ILLEGAL_ADDRESS) }
}
