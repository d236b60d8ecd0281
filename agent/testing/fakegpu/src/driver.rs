//! What libcuda exports, as far as the agent asks for it.

use crate::arena;
use crate::kernels::{Arguments, DigestArguments, Kernel, digest};
use crate::knobs::knobs;
use crate::queue::{MARKS, Mark, QUEUES, new_queue, sticky};
use crate::wire::tally;
use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

pub(crate) const SUCCESS: u32 = 0;
pub(crate) const INVALID_VALUE: u32 = 1;
pub(crate) const OUT_OF_MEMORY: u32 = 2;
const NO_DEVICE: u32 = 100;
pub(crate) const INVALID_DEVICE: u32 = 101;
const INVALID_IMAGE: u32 = 200;
const INVALID_CONTEXT: u32 = 201;
const INVALID_HANDLE: u32 = 400;
const NOT_FOUND: u32 = 500;
const NOT_READY: u32 = 600;

/// The only module.
const MODULE: usize = 48;

thread_local! {
    /// Device whose context is current on this thread, and 1 more, so that 0 is none.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
    /// Those that it took the place of.
    static BEFORE: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The device of the current context.
pub(crate) fn current() -> Option<i32> {
    let current = CURRENT.get();
    (current > 0).then(|| current as i32 - 1)
}

pub(crate) fn ready() -> u32 {
    if current().is_none() { INVALID_CONTEXT } else { sticky() }
}

/// A result: `$body` where a context is current and nothing has failed.
macro_rules! in_context {
    ($body:block) => {
        match ready() {
            SUCCESS => $body,
            failed => failed,
        }
    };
}

pub(crate) fn is_device(device: c_int) -> bool {
    (0..knobs().devices).contains(&device)
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(_flags: c_uint) -> u32 {
    if knobs().devices == 0 { NO_DEVICE } else { SUCCESS }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> u32 {
    // SAFETY: the caller's integer.
    unsafe { *version = knobs().driver_version };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(code: u32, name: *mut *const c_char) -> u32 {
    let text: &CStr = match code {
        INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
        OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
        NO_DEVICE => c"CUDA_ERROR_NO_DEVICE",
        INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
        arena::ILLEGAL_ADDRESS => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        _ => c"CUDA_ERROR_UNKNOWN",
    };
    // SAFETY: the caller's pointer; the text is static.
    unsafe { *name = text.as_ptr() };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> u32 {
    // SAFETY: the caller's integer.
    unsafe { *count = knobs().devices };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> u32 {
    if !is_device(ordinal) {
        return INVALID_DEVICE;
    }
    // SAFETY: the caller's integer.
    unsafe { *device = ordinal };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int) -> u32 {
    let text = knobs().name.as_bytes();
    if !is_device(device) || text.len() >= length as usize {
        return INVALID_VALUE;
    }
    // SAFETY: the caller's buffer has room for the text and its end.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), name, text.len());
        *name.add(text.len()) = 0;
    }
    SUCCESS
}

/// The UUID of a device of this process.
pub(crate) fn uuid(device: c_int) -> [u8; 16] {
    let mut uuid = *b"DOUBLE0000000000";
    uuid[6..10].copy_from_slice(&knobs().seed.to_be_bytes());
    uuid[12..].copy_from_slice(&device.to_be_bytes());
    uuid
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid_v2(out: *mut [u8; 16], device: c_int) -> u32 {
    if !is_device(device) {
        return INVALID_DEVICE;
    }
    // SAFETY: the caller's 16 bytes.
    unsafe { *out = uuid(device) };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> u32 {
    let found = match attribute {
        75 => 9,
        76 => 0,
        16 => 132,
        _ => return INVALID_VALUE,
    };
    if !is_device(device) {
        return INVALID_DEVICE;
    }
    // SAFETY: the caller's integer.
    unsafe { *value = found };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) -> u32 {
    if !is_device(device) {
        return INVALID_DEVICE;
    }
    // SAFETY: the caller's handle; the number stands for the device.
    unsafe { *context = (device as usize + 1) as *mut c_void };
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> u32 {
    if is_device(device) { SUCCESS } else { INVALID_DEVICE }
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> u32 {
    CURRENT.set(context as usize);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPushCurrent_v2(context: *mut c_void) -> u32 {
    BEFORE.with_borrow_mut(|before| before.push(CURRENT.replace(context as usize)));
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut *mut c_void) -> u32 {
    let Some(before) = BEFORE.with_borrow_mut(Vec::pop) else { return INVALID_CONTEXT };
    // SAFETY: the caller's handle.
    unsafe { *context = CURRENT.replace(before) as *mut c_void };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> u32 {
    // SAFETY: the caller's integers.
    unsafe { (*least, *greatest) = (0, -5) };
    ready()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> u32 {
    let Some(device) = current() else { return INVALID_CONTEXT };
    // SAFETY: the caller's integers.
    unsafe { (*free, *total) = (arena::free_bytes(device) as usize, knobs().device_bytes as usize) };
    sticky()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> u32 {
    in_context!({
        match current().and_then(|device| arena::alloc(device, bytes as u64)) {
            Some(found) => {
                // SAFETY: the caller's address.
                unsafe { *address = found };
                SUCCESS
            }
            None => OUT_OF_MEMORY,
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> u32 {
    if arena::free(address) { ready() } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocHost_v2(base: *mut *mut c_void, bytes: usize) -> u32 {
    in_context!({
        match arena::alloc_host(bytes) {
            Some(found) => {
                // SAFETY: the caller's pointer.
                unsafe { *base = found as *mut c_void };
                SUCCESS
            }
            None => OUT_OF_MEMORY,
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(base: *mut c_void) -> u32 {
    if arena::free_host(base as u64) { ready() } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(base: *mut c_void, bytes: usize, _flags: c_uint) -> u32 {
    in_context!({ if arena::register_host(base as u64, bytes as u64) { SUCCESS } else { INVALID_VALUE } })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(base: *mut c_void) -> u32 {
    if arena::unregister_host(base as u64) { ready() } else { INVALID_VALUE }
}

fn enqueue(stream: *mut c_void, work: impl FnOnce() -> Result<(), u32> + Send + 'static) -> u32 {
    in_context!({
        match QUEUES.get(stream as usize) {
            Some(queue) => {
                queue.add(work);
                SUCCESS
            }
            None => INVALID_HANDLE,
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(address: u64, value: u8, bytes: usize, stream: *mut c_void) -> u32 {
    enqueue(stream, move || {
        let to = arena::shadow_to_write(address, bytes as u64)?;
        // SAFETY: `shadow` checked the range.
        unsafe { std::ptr::write_bytes(to, value, bytes) };
        Ok(())
    })
}

/// Says how much goes between host and device, and in what process: its first argument tells an agent from a client.
fn tally_copy(direction: &str, bytes: usize) {
    if knobs().tally.is_some() {
        let process = std::env::args().nth(1).unwrap_or_default();
        tally(&format!(r#"{{"copied":"{direction}","bytes":{bytes},"process":"{process}"}}"#));
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: *mut c_void) -> u32 {
    let from = from as u64;
    tally_copy("up", bytes);
    enqueue(stream, move || {
        arena::is_pinned(from, bytes as u64)?;
        let to = arena::shadow_to_write(to, bytes as u64)?;
        // SAFETY: both ranges were checked.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to, bytes) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: *mut c_void) -> u32 {
    let to = to as u64;
    tally_copy("down", bytes);
    if arena::is_pinned(to, bytes as u64).is_err() {
        return INVALID_VALUE;
    }
    // Whoever looks before the copy is done sees this.
    // SAFETY: the range was checked, and the caller has given it to the copy.
    unsafe { std::ptr::write_bytes(to as *mut u8, 0xa5, bytes) };
    enqueue(stream, move || {
        arena::is_pinned(to, bytes as u64)?;
        let from = arena::shadow(from, bytes as u64)?;
        // SAFETY: both ranges were checked.
        unsafe { std::ptr::copy_nonoverlapping(from.cast_const(), to as *mut u8, bytes) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreateWithPriority(
    stream: *mut *mut c_void,
    _flags: c_uint,
    _priority: c_int,
) -> u32 {
    in_context!({
        // SAFETY: the caller's handle.
        unsafe { *stream = new_queue() as *mut c_void };
        SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: *mut c_void) -> u32 {
    if QUEUES.remove(stream as usize).is_some() { ready() } else { INVALID_HANDLE }
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamQuery(stream: *mut c_void) -> u32 {
    in_context!({
        match QUEUES.get(stream as usize) {
            Some(queue) if queue.is_done() => sticky(),
            Some(_) => NOT_READY,
            None => INVALID_HANDLE,
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: *mut c_void, event: *mut c_void, _flags: c_uint) -> u32 {
    in_context!({
        match (QUEUES.get(stream as usize), MARKS.get(event as usize)) {
            (Some(queue), Some(mark)) => {
                mark.make_wait(&queue);
                SUCCESS
            }
            _ => INVALID_HANDLE,
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(event: *mut *mut c_void, _flags: c_uint) -> u32 {
    in_context!({
        // SAFETY: the caller's handle.
        unsafe { *event = MARKS.add(Mark::default()) as *mut c_void };
        SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: *mut c_void, stream: *mut c_void) -> u32 {
    in_context!({
        match (MARKS.get(event as usize), QUEUES.get(stream as usize)) {
            (Some(mark), Some(queue)) => {
                mark.record(&queue);
                SUCCESS
            }
            _ => INVALID_HANDLE,
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: *mut c_void) -> u32 {
    in_context!({
        match MARKS.get(event as usize) {
            Some(mark) if mark.is_done() => sticky(),
            Some(_) => NOT_READY,
            None => INVALID_HANDLE,
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: *mut c_void) -> u32 {
    if MARKS.remove(event as usize).is_some() { ready() } else { INVALID_HANDLE }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(module: *mut *mut c_void, image: *const c_void) -> u32 {
    in_context!({
        // SAFETY: an image has at least the four bytes of its kind.
        let magic = unsafe { std::ptr::read_unaligned(image.cast::<[u8; 4]>()) };
        if magic != *b"\x7fELF" && magic[..2] != *b"//" {
            return INVALID_IMAGE;
        }
        // SAFETY: the caller's handle.
        unsafe { *module = MODULE as *mut c_void };
        SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleUnload(module: *mut c_void) -> u32 {
    if module as usize == MODULE { SUCCESS } else { INVALID_HANDLE }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(
    function: *mut *mut c_void,
    module: *mut c_void,
    name: *const c_char,
) -> u32 {
    // SAFETY: the caller's text.
    let number = match unsafe { CStr::from_ptr(name) }.to_bytes() {
        b"weightrefit_gather" => 1,
        b"weightrefit_scatter" => 2,
        b"weightrefit_digest" => 3,
        _ => return NOT_FOUND,
    };
    if module as usize != MODULE {
        return INVALID_HANDLE;
    }
    // SAFETY: the caller's handle.
    unsafe { *function = number as *mut c_void };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernel(
    function: *mut c_void,
    blocks: c_uint,
    _blocks_y: c_uint,
    _blocks_z: c_uint,
    threads: c_uint,
    _threads_y: c_uint,
    _threads_z: c_uint,
    _shared: c_uint,
    stream: *mut c_void,
    arguments: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> u32 {
    if blocks == 0 || threads == 0 || threads > 1024 {
        return INVALID_VALUE;
    }
    let kernel = match function as usize {
        1 => Kernel::Gather,
        2 => Kernel::Scatter,
        3 => {
            // SAFETY: the caller's six pointers to arguments of the kernel's types; the third says how the work is cut.
            let arguments = unsafe {
                DigestArguments {
                    table: *(*arguments).cast(),
                    entries: *(*arguments.add(1)).cast(),
                    row_keys: *(*arguments.add(3)).cast(),
                    keyed_rows: *(*arguments.add(4)).cast(),
                    sums: *(*arguments.add(5)).cast(),
                }
            };
            return enqueue(stream, move || digest(&arguments));
        }
        _ => return INVALID_HANDLE,
    };
    // SAFETY: the caller's five pointers to arguments of the kernels' types.
    let arguments = unsafe {
        Arguments {
            table: *(*arguments).cast(),
            entries: *(*arguments.add(1)).cast(),
            packed: *(*arguments.add(2)).cast(),
            first: *(*arguments.add(3)).cast(),
            bytes: *(*arguments.add(4)).cast(),
        }
    };
    enqueue(stream, move || kernel.run(&arguments))
}
