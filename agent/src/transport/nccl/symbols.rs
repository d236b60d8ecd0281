//! NCCL's functions, and its gate of versions.

use crate::cuda::Library;
use crate::cuda::{CudaError, LibraryError};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::sync::Arc;

crate::cuda::symbols! {
    /// Functions of libnccl.
    Symbols;
    required {
        version = "ncclGetVersion"(*mut c_int) -> u32;
        error_text = "ncclGetErrorString"(u32) -> *const c_char;
        unique_id = "ncclGetUniqueId"(*mut UniqueId) -> u32;
        init = "ncclCommInitRankConfig"(*mut *mut c_void, c_int, UniqueId, c_int, *mut Config) -> u32;
        abort = "ncclCommAbort"(*mut c_void) -> u32;
        async_error = "ncclCommGetAsyncError"(*mut c_void, *mut u32) -> u32;
        group_start = "ncclGroupStart"() -> u32;
        group_end = "ncclGroupEnd"() -> u32;
        send = "ncclSend"(*const c_void, usize, u32, c_int, *mut c_void, *mut c_void) -> u32;
        receive = "ncclRecv"(*mut c_void, usize, u32, c_int, *mut c_void, *mut c_void) -> u32;
    }
    optional {
        last_error = "ncclGetLastError"(*mut c_void) -> *const c_char;
        revoke = "ncclCommRevoke"(*mut c_void, c_int) -> u32;
    }
}

/// `ncclSuccess`.
pub(super) const SUCCESS: u32 = 0;
/// `ncclInProgress`: ask again.
pub(super) const IN_PROGRESS: u32 = 7;
/// `ncclUint8`: bytes, whatever they are.
pub(super) const BYTES: u32 = 1;

/// The names: the first is what NCCL installs, the second what its development files do.
const NAMES: &[&str] = &["libnccl.so.2", "libnccl.so"];

/// The oldest NCCL that has been read for this: communicators that are revoked, and the settings of `Config`.
pub const OLDEST: NcclVersion = NcclVersion(22800);
/// The first that may be anything.
pub const TOO_NEW: NcclVersion = NcclVersion(30000);

/// `10000 * major + 100 * minor + patch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct NcclVersion(pub u32);

impl std::fmt::Display for NcclVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.0 / 10000, self.0 / 100 % 100, self.0 % 100)
    }
}

/// What a communicator's ranks must know to find each other: whoever has it can join, so it goes over mutual TLS
/// only, and lives for one attempt.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct UniqueId(pub [u8; 128]);

impl std::fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("UniqueId(secret)")
    }
}

/// `ncclConfig_t` of 2.30.7. A library takes as many bytes as `size` says; an older one is told its own.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
    comm_name: *const c_char,
    collnet: c_int,
    cta_policy: c_int,
    shrink_share: c_int,
    nvls_ctas: c_int,
    channels_per_net_peer: c_int,
    nvlink_centric: c_int,
    graph_usage: c_int,
    rma_contexts: c_int,
    max_p2p_peers: c_int,
    graph_ordering: c_int,
}

const _: () = assert!(size_of::<Config>() == 96 && std::mem::offset_of!(Config, max_p2p_peers) == 88);
const _: () = assert!(std::mem::offset_of!(Config, channels_per_net_peer) == 72);

/// `NCCL_CONFIG_UNDEF_INT`.
const UNSET: c_int = c_int::MIN;
/// The size, and the version of the header that it is of: 2.28 and 2.30.7.
const CONFIG_OF_2_28: (usize, u32) = (80, 22800);
const CONFIG_OF_2_30: (usize, u32) = (96, 23007);

impl Config {
    /// Non-blocking, with few thread blocks, for a rank of at most `degree` peers.
    pub(super) fn new(library: NcclVersion, degree: u32, ctas_max: u32) -> Self {
        let (size, version) = if library.0 >= CONFIG_OF_2_30.1 { CONFIG_OF_2_30 } else { CONFIG_OF_2_28 };
        let small = |value: u32| c_int::try_from(value).unwrap_or(c_int::MAX);
        Self {
            size,
            magic: 0xcafe_beef,
            version,
            blocking: 0,
            cga_cluster_size: UNSET,
            min_ctas: UNSET,
            max_ctas: small(ctas_max),
            net_name: std::ptr::null(),
            split_share: UNSET,
            traffic_class: UNSET,
            comm_name: std::ptr::null(),
            collnet: UNSET,
            cta_policy: UNSET,
            shrink_share: UNSET,
            nvls_ctas: UNSET,
            channels_per_net_peer: UNSET,
            nvlink_centric: UNSET,
            graph_usage: UNSET,
            rma_contexts: UNSET,
            max_p2p_peers: small(degree.max(1)),
            graph_ordering: UNSET,
        }
    }
}

/// NCCL, loaded.
#[derive(Debug, Clone)]
pub struct Nccl {
    pub(super) symbols: Arc<Symbols>,
    version: NcclVersion,
}

/// NCCL cannot be used, or says no.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NcclError {
    /// No library, or one without a function that is needed.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// A version that nobody has read the rules of.
    #[error("NCCL {found} is not from {OLDEST} to before {TOO_NEW}")]
    Version {
        /// Of the library.
        found: NcclVersion,
    },
    /// A call failed, or the communicator did.
    #[error("{call} failed with NCCL result {code} ({text}){last}")]
    Call {
        /// Which.
        call: &'static str,
        /// Its result.
        code: u32,
        /// What NCCL calls that.
        text: String,
        /// NCCL's last message, with what separates it.
        last: String,
    },
    /// The device.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

impl Nccl {
    /// Opens the library at `path`, or the loader's.
    ///
    /// # Errors
    /// No library, or a version outside the gate.
    pub fn open(path: Option<&Path>) -> Result<Self, NcclError> {
        let symbols = Arc::new(Symbols::load(Library::open(path, NAMES)?)?);
        let mut found = 0;
        // SAFETY: writes one integer.
        let code = unsafe { (symbols.version)(&raw mut found) };
        let nccl = Self { symbols, version: NcclVersion(found.unsigned_abs()) };
        nccl.check("ncclGetVersion", code, std::ptr::null_mut())?;
        match nccl.version {
            version if version < OLDEST || version >= TOO_NEW => Err(NcclError::Version { found: version }),
            _ => Ok(nccl),
        }
    }

    /// Its version.
    #[must_use]
    pub fn version(&self) -> NcclVersion {
        self.version
    }

    /// A new id; the process that asks must live until all ranks have joined, since they meet at it.
    pub fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: writes 128 bytes.
        let code = unsafe { (self.symbols.unique_id)(&raw mut id) };
        self.check("ncclGetUniqueId", code, std::ptr::null_mut())?;
        Ok(id)
    }

    pub(super) fn check(
        &self,
        call: &'static str,
        code: u32,
        communicator: *mut c_void,
    ) -> Result<(), NcclError> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: a static text for every number; it may be asked for at any time.
        let text = unsafe { shown((self.symbols.error_text)(code)) };
        let last = match self.symbols.last_error {
            // SAFETY: the communicator is live or null, which stands for all.
            Some(last) => unsafe { shown(last(communicator)) },
            None => String::new(),
        };
        let last = if last.is_empty() { last } else { format!(": {last}") };
        Err(NcclError::Call { call, code, text, last })
    }
}

/// # Safety
/// `text` is null or ends with a 0 and is not changed meanwhile.
unsafe fn shown(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_library_is_told_a_config_of_its_own_header() {
        let rows = [
            (22800, 80, 22800),
            (22909, 80, 22800),
            (23004, 80, 22800),
            (23007, 96, 23007),
            (23203, 96, 23007),
        ];
        for (library, size, version) in rows {
            let config = Config::new(NcclVersion(library), 3, 8);
            assert_eq!((config.size, config.version, config.blocking), (size, version, 0), "{library}");
        }
        assert_eq!(NcclVersion(23203).to_string(), "2.32.3");
    }

    #[test]
    fn an_id_is_not_shown() {
        assert_eq!(format!("{:?}", UniqueId([7; 128])), "UniqueId(secret)");
    }

    #[test]
    fn a_library_that_is_missing_or_is_another_is_an_error() {
        let missing = Nccl::open(Some(Path::new("/nowhere/libnccl.so.2"))).expect_err("no such file");
        assert!(missing.to_string().starts_with("cannot open /nowhere/libnccl.so.2: "), "{missing}");
        // A library that every Linux has, and that is no NCCL.
        let other = Nccl::open(Some(Path::new("libc.so.6"))).expect_err("another library");
        assert_eq!(other.to_string(), "libc.so.6 has no function ncclGetVersion");
        let other = crate::cuda::Driver::open(Some(Path::new("libc.so.6"))).expect_err("another library");
        assert_eq!(other.to_string(), "libc.so.6 has no function cuInit");
    }
}
