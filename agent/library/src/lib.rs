//! `libweightrefit.so`: [`RankExecutor`] behind the C interface of `weightrefit.h`, which documents it.
//!
//! I1: no panic leaves a function: it becomes an error like any other.
//! I2: what a caller passes is copied before a function returns.

#![expect(unsafe_code, reason = "a C interface")]

use std::cell::RefCell;
use std::ffi::{CStr, CString, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::Duration;
use weightrefit_agent::transport::nccl::{ExecutorError, ExecutorSettings, RankExecutor};

/// `WEIGHTREFIT_INTERFACE`.
const INTERFACE: u32 = 1;

/// Where the caller says nothing: what agents take by default.
const WINDOW_BYTES: u64 = 2 << 30;

/// `weightrefit_settings`.
#[derive(Debug)]
#[repr(C)]
pub struct Settings {
    size: u64,
    socket: *const c_char,
    seat: *const c_char,
    cuda_library: *const c_char,
    nccl_library: *const c_char,
    window_bytes: u64,
    device: u32,
    patience_ms: u32,
}

const _: () = assert!(size_of::<Settings>() == 56);

/// `weightrefit_executor`.
#[derive(Debug)]
pub struct Executor(RankExecutor);

thread_local! {
    /// Code and text.
    static LAST: RefCell<(CString, CString)> = RefCell::default();
}

/// `WEIGHTREFIT_INTERFACE` of this library.
#[unsafe(no_mangle)]
pub extern "C" fn weightrefit_interface() -> u32 {
    INTERFACE
}

/// Version of this library.
#[unsafe(no_mangle)]
pub extern "C" fn weightrefit_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => panic!("a version has no 0"),
        };
    VERSION.as_ptr()
}

/// Starts an executor.
///
/// # Safety
/// As `weightrefit.h` says: settings of the size that they state, texts that end, and room for one pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn weightrefit_start(settings: *const Settings, out: *mut *mut Executor) -> u32 {
    told(|| {
        if settings.is_null() || out.is_null() {
            return Err(misuse("settings or the place for an executor are null"));
        }
        // SAFETY: not null, and the caller's promise.
        unsafe { out.write(std::ptr::null_mut()) };
        // SAFETY: as above; the size comes first in all settings that there will be.
        let size = unsafe { settings.cast::<u64>().read() };
        if size != size_of::<Settings>() as u64 {
            return Err(misuse("settings are of another size: another weightrefit.h"));
        }
        // SAFETY: of the size that they state.
        let settings = unsafe { &*settings };
        // SAFETY: texts that end, by the caller's promise.
        let executor = RankExecutor::start(unsafe { read(settings) }?)?;
        // SAFETY: not null, and the caller's promise.
        unsafe { out.write(Box::into_raw(Box::new(Executor(executor)))) };
        Ok(())
    })
}

/// Whether an executor works.
///
/// # Safety
/// An executor that was started and not stopped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn weightrefit_check(executor: *const Executor) -> u32 {
    told(|| {
        // SAFETY: null, or the caller's promise.
        let executor = unsafe { executor.as_ref() }.ok_or_else(|| misuse("there is no executor"))?;
        executor.0.error().map_or(Ok(()), Err)
    })
}

/// Stops an executor.
///
/// # Safety
/// Null, or an executor that was started and is used by nobody any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn weightrefit_stop(executor: *mut Executor) -> u32 {
    told(|| {
        if executor.is_null() {
            return Ok(());
        }
        // SAFETY: made by `weightrefit_start`, and given back once.
        let executor = unsafe { Box::from_raw(executor) };
        executor.0.stop()
    })
}

/// Code of the thread's last error.
#[unsafe(no_mangle)]
pub extern "C" fn weightrefit_error_code() -> *const c_char {
    LAST.with_borrow(|(code, _)| code.as_ptr())
}

/// Text of the thread's last error.
#[unsafe(no_mangle)]
pub extern "C" fn weightrefit_error_text() -> *const c_char {
    LAST.with_borrow(|(_, text)| text.as_ptr())
}

/// # Safety
/// Texts are null or end.
unsafe fn read(settings: &Settings) -> Result<ExecutorSettings, ExecutorError> {
    let Settings { size: _, socket, seat, cuda_library, nccl_library, window_bytes, device, patience_ms } =
        *settings;
    // SAFETY: the caller's promise.
    let path = |text| unsafe { path(text) };
    let seat = path(seat).and_then(|seat| seat.into_os_string().into_string().ok());
    Ok(ExecutorSettings {
        socket: path(socket).ok_or_else(|| misuse("the path of the agent's socket is missing"))?,
        seat: seat.ok_or_else(|| misuse("the seat of the rank is missing"))?,
        device,
        cuda: path(cuda_library),
        nccl: path(nccl_library),
        window_bytes: if window_bytes == 0 { WINDOW_BYTES } else { window_bytes },
        patience: Duration::from_millis(patience_ms.into()),
    })
}

/// # Safety
/// Null, or a text that ends.
unsafe fn path(text: *const c_char) -> Option<PathBuf> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    Some(PathBuf::from(OsStr::from_bytes(text.to_bytes())))
}

fn misuse(text: &str) -> ExecutorError {
    ExecutorError::misuse(text)
}

/// Calls, and keeps what went wrong for the thread that asks (I1).
fn told(call: impl FnOnce() -> Result<(), ExecutorError>) -> u32 {
    let broken = |_| Err(misuse("the library is broken: it panicked"));
    let result = catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(broken);
    let text = |text: &str| CString::new(text.replace('\0', " ")).unwrap_or_default();
    let last = match &result {
        Ok(()) => Default::default(),
        Err(error) => (text(error.code.name()), text(&error.text)),
    };
    LAST.set(last);
    u32::from(result.is_err())
}
