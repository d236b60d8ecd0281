//! What libnccl exports, as far as the agent asks for it.

use crate::communicator::{
    Communicator, IN_PROGRESS, INVALID_USAGE, Launch, Operation, REMOTE_ERROR, UNHANDLED_CUDA_ERROR,
};
use crate::driver::{current, uuid};
use crate::knobs::knobs;
use crate::queue::{QUEUES, sticky};
use crate::wire::{Meeting, mint};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const SUCCESS: u32 = 0;
const SYSTEM_ERROR: u32 = 2;
const INVALID_ARGUMENT: u32 = 4;
/// `ncclUint8`.
const BYTES: u32 = 1;

static COMMUNICATORS: Mutex<(usize, BTreeMap<usize, Arc<Communicator>>)> = Mutex::new((0, BTreeMap::new()));

fn table() -> MutexGuard<'static, (usize, BTreeMap<usize, Arc<Communicator>>)> {
    COMMUNICATORS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn find(communicator: *mut c_void) -> Option<Arc<Communicator>> {
    table().1.get(&(communicator as usize)).cloned()
}

#[derive(Default)]
struct Group {
    depth: u32,
    operations: Vec<(usize, usize, Operation)>,
    error: u32,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> u32 {
    // SAFETY: the caller's integer.
    unsafe { *version = knobs().nccl_version.cast_signed() };
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(code: u32) -> *const c_char {
    let text = match code {
        SUCCESS => c"no error",
        UNHANDLED_CUDA_ERROR => c"unhandled cuda error",
        SYSTEM_ERROR => c"unhandled system error",
        INVALID_ARGUMENT => c"invalid argument",
        INVALID_USAGE => c"invalid usage",
        REMOTE_ERROR => c"remote process exited or there was a network error",
        IN_PROGRESS => c"NCCL operation in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(_communicator: *mut c_void) -> *const c_char {
    c"".as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetUniqueId(id: *mut [u8; 128]) -> u32 {
    let Ok(meeting) = mint() else { return SYSTEM_ERROR };
    // SAFETY: the caller's 128 bytes.
    unsafe { *id = meeting.id() };
    SUCCESS
}

/// An id by value, as the C interface has it.
#[derive(Clone, Copy)]
#[repr(C)]
struct Id([u8; 128]);

/// Sizes of `ncclConfig_t`, by the first version of the header that has them.
const CONFIG_SIZES: &[(u32, usize)] = &[(22800, 80), (22900, 88), (23000, 96), (23200, 120)];
const UNSET: i32 = i32::MIN;

/// What NCCL looks at, plus: a caller that would block, or that names a header newer than its size, is refused.
fn config_is_right(config: *const u8) -> bool {
    // SAFETY: a config has at least size, magic and version, and `size` bytes of it are readable; the field of the
    // blocking mode lies behind them in every version.
    let (size, magic, version, blocking) = unsafe {
        let at = |offset: usize| std::ptr::read_unaligned(config.add(offset).cast::<u32>());
        (std::ptr::read_unaligned(config.cast::<usize>()), at(8), at(12), at(16).cast_signed())
    };
    let of_version = CONFIG_SIZES.iter().rev().find(|(since, _)| *since <= version);
    let newest = CONFIG_SIZES.iter().rev().find(|(since, _)| *since <= knobs().nccl_version);
    let known = of_version.is_some_and(|(_, bytes)| *bytes == size)
        && newest.is_some_and(|(_, bytes)| size <= *bytes);
    if !known || magic != 0xcafe_beef || blocking != 0 || blocking == UNSET {
        return false;
    }
    // Since 2.30.5 four bytes at 92 are a field: a header that says so must have set it.
    // SAFETY: `size` bytes are readable.
    let ordering = (size >= 96).then(|| unsafe { std::ptr::read_unaligned(config.add(92).cast::<i32>()) });
    ordering.is_none_or(|value| version < 23005 || [UNSET, 0, 1].contains(&value))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommInitRankConfig(
    communicator: *mut *mut c_void,
    ranks: c_int,
    id: Id,
    rank: c_int,
    config: *mut c_void,
) -> u32 {
    let (Some(device), Some(meeting)) = (current(), Meeting::of(&id.0)) else { return INVALID_ARGUMENT };
    if sticky() != 0 {
        return UNHANDLED_CUDA_ERROR;
    }
    if rank < 0 || rank >= ranks || !config_is_right(config.cast()) {
        return INVALID_ARGUMENT;
    }
    let started = Communicator::start(meeting, rank.unsigned_abs(), ranks.unsigned_abs(), uuid(device));
    let Ok(started) = started else { return SYSTEM_ERROR };
    let mut table = table();
    table.0 += 64;
    let key = table.0;
    table.1.insert(key, started);
    // SAFETY: the caller's handle.
    unsafe { *communicator = key as *mut c_void };
    IN_PROGRESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommGetAsyncError(communicator: *mut c_void, state: *mut u32) -> u32 {
    let Some(found) = find(communicator) else { return INVALID_ARGUMENT };
    let now = found.poll();
    if now == SUCCESS {
        found.enqueue_late();
    }
    // SAFETY: the caller's integer.
    unsafe { *state = now };
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommRevoke(communicator: *mut c_void, _flags: c_int) -> u32 {
    let Some(found) = find(communicator) else { return INVALID_ARGUMENT };
    if found.revoked.load(std::sync::atomic::Ordering::SeqCst) {
        return INVALID_ARGUMENT;
    }
    found.revoke();
    IN_PROGRESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommAbort(communicator: *mut c_void) -> u32 {
    let Some(found) = find(communicator) else { return INVALID_ARGUMENT };
    found.abort();
    table().1.remove(&(communicator as usize));
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupStart() -> u32 {
    GROUP.with_borrow_mut(|group| group.depth += 1);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupEnd() -> u32 {
    let (operations, error) = GROUP.with_borrow_mut(|group| {
        group.depth = group.depth.saturating_sub(1);
        match group.depth {
            0 => (std::mem::take(&mut group.operations), std::mem::take(&mut group.error)),
            _ => (Vec::new(), SUCCESS),
        }
    });
    if error != SUCCESS {
        return error; // the whole group is lost
    }
    let mut by_communicator: BTreeMap<usize, BTreeMap<usize, Vec<Operation>>> = BTreeMap::new();
    for (communicator, stream, operation) in operations {
        by_communicator.entry(communicator).or_default().entry(stream).or_default().push(operation);
    }
    let mut result = SUCCESS;
    for (communicator, streams) in by_communicator {
        let Some(found) = find(communicator as *mut c_void) else { return INVALID_ARGUMENT };
        let launch = |(stream, operations)| Some(Launch { queue: QUEUES.get(stream)?, operations });
        let Some(launches) = streams.into_iter().map(launch).collect() else { return INVALID_ARGUMENT };
        result = result.max(found.launch(launches));
    }
    result
}

fn add(communicator: *mut c_void, stream: *mut c_void, dtype: u32, operation: Operation) -> u32 {
    let usable = find(communicator).map(|found| {
        if found.is_busy() || found.revoked.load(std::sync::atomic::Ordering::SeqCst) {
            return INVALID_USAGE; // nothing may be asked before the last call is over
        }
        match found.failure() {
            SUCCESS if operation.peer >= found.ranks || dtype != BYTES => INVALID_ARGUMENT,
            failure => failure,
        }
    });
    let code = usable.unwrap_or(INVALID_ARGUMENT);
    GROUP.with_borrow_mut(|group| {
        if code != SUCCESS {
            group.error = code;
        }
        group.operations.push((communicator as usize, stream as usize, operation));
    });
    code
}

/// A call outside any group is a group of its own.
fn grouped(communicator: *mut c_void, stream: *mut c_void, dtype: u32, operation: Operation) -> u32 {
    ncclGroupStart();
    let code = add(communicator, stream, dtype, operation);
    let ended = ncclGroupEnd();
    if code == SUCCESS { ended } else { code }
}

#[unsafe(no_mangle)]
extern "C" fn ncclSend(
    from: *const c_void,
    bytes: usize,
    dtype: u32,
    peer: c_int,
    communicator: *mut c_void,
    stream: *mut c_void,
) -> u32 {
    let (peer, address) = (peer.unsigned_abs(), from as u64);
    grouped(communicator, stream, dtype, Operation { is_send: true, peer, address, bytes: bytes as u64 })
}

#[unsafe(no_mangle)]
extern "C" fn ncclRecv(
    to: *mut c_void,
    bytes: usize,
    dtype: u32,
    peer: c_int,
    communicator: *mut c_void,
    stream: *mut c_void,
) -> u32 {
    let (peer, address) = (peer.unsigned_abs(), to as u64);
    grouped(communicator, stream, dtype, Operation { is_send: false, peer, address, bytes: bytes as u64 })
}
