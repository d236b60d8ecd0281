//! The CUDA driver, loaded when it is needed.
//!
//! C1: a library or symbol that is missing is an error value; nothing here panics, and nothing is linked.
//! C2: results of the driver are numbers: a newer driver may return one that this version does not know.
//! C3: a handle owns what it lives on (context, then driver, then library), so they are freed in the right order.
//! C4: memory that an asynchronous copy or kernel still uses must not be dropped: whoever enqueues waits, by a query
//!     with a deadline, and ends the process where it cannot ([`crate::transport::nccl`]).

#![expect(unsafe_code, reason = "calls a C library")]

mod context;
mod library;
mod memory;
mod module;
mod shared;
mod stream;
mod symbols;

pub use context::{Context, Device, Driver};
pub(crate) use library::symbols;
pub use library::{Library, LibraryError};
pub use memory::{DeviceMemory, PinnedMapping, PinnedMemory};
pub use module::{DigestLaunch, Kernels, Launch};
pub use shared::ImportError;
pub use stream::{Event, Stream};

use std::ffi::c_void;

/// An opaque handle of a C library.
pub(crate) type Handle = *mut c_void;

/// What the driver, or its absence, says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// No driver, or one without a function that is needed.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// A call failed.
    #[error("{call} failed with CUDA error {code} ({name})")]
    Call {
        /// Which.
        call: &'static str,
        /// Its result.
        code: u32,
        /// What the driver calls that.
        name: String,
    },
    /// Too little memory.
    #[error("no device memory for {bytes} bytes")]
    OutOfMemory {
        /// Asked for.
        bytes: u64,
    },
    /// A range outside its memory: a bug here, which must not reach the device.
    #[error("{bytes} bytes at {offset} of a memory of {available}")]
    Range {
        /// First byte.
        offset: u64,
        /// How many.
        bytes: u64,
        /// What there is.
        available: u64,
    },
}
