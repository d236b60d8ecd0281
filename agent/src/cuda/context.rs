//! Driver, devices, and the primary context of one of them.

use super::symbols::{SUCCESS, Symbols};
use super::{CudaError, Handle, Library};
use std::ffi::{CStr, c_int};
use std::path::Path;
use std::sync::Arc;

/// The driver's names on Linux: the first is what a driver installs, the second what its development files do.
const NAMES: &[&str] = &["libcuda.so.1", "libcuda.so"];

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR` and `_MINOR`.
const CAPABILITY: (c_int, c_int) = (75, 76);
/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`.
const MULTIPROCESSORS: c_int = 16;

/// An initialised driver.
#[derive(Debug, Clone)]
pub struct Driver(pub(super) Arc<Symbols>);

/// What is known of a device before it is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Number in this process.
    pub ordinal: i32,
    /// As the driver calls it.
    pub name: String,
    /// `GPU-` and the UUID.
    pub uuid: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub multiprocessors: u32,
}

impl Driver {
    /// Opens and initialises the driver at `path`, or the system's.
    ///
    /// # Errors
    /// No driver, or one that finds no device.
    pub fn open(path: Option<&Path>) -> Result<Self, CudaError> {
        let driver = Self(Arc::new(Symbols::load(Library::open(path, NAMES)?)?));
        // SAFETY: any thread may initialise the driver, any number of times.
        driver.check("cuInit", unsafe { (driver.0.init)(0) })?;
        Ok(driver)
    }

    /// `1000 * major + 10 * minor` of the newest CUDA that the driver serves.
    pub fn version(&self) -> Result<i32, CudaError> {
        let mut version = 0;
        // SAFETY: writes one integer.
        self.check("cuDriverGetVersion", unsafe { (self.0.driver_version)(&raw mut version) })?;
        Ok(version)
    }

    /// Devices visible to this process.
    pub fn devices(&self) -> Result<Vec<Device>, CudaError> {
        let mut count = 0;
        // SAFETY: writes one integer.
        self.check("cuDeviceGetCount", unsafe { (self.0.device_count)(&raw mut count) })?;
        (0..count).map(|ordinal| self.device(ordinal)).collect()
    }

    fn device(&self, ordinal: c_int) -> Result<Device, CudaError> {
        let mut device = 0;
        // SAFETY: writes one integer.
        self.check("cuDeviceGet", unsafe { (self.0.device)(&raw mut device, ordinal) })?;
        let mut name = [0; 256];
        let length = name.len() as c_int;
        // SAFETY: writes at most `length` bytes, the last one 0.
        self.check("cuDeviceGetName", unsafe { (self.0.device_name)(name.as_mut_ptr(), length, device) })?;
        // A character is signed on one architecture and not on the other.
        let name = name.map(|byte| byte.to_ne_bytes()[0]);
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned();
        let mut uuid = [0; 16];
        // SAFETY: writes 16 bytes.
        self.check("cuDeviceGetUuid", unsafe { (self.0.device_uuid)(&raw mut uuid, device) })?;
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: writes one integer.
            let result = unsafe { (self.0.device_attribute)(&raw mut value, which, device) };
            self.check("cuDeviceGetAttribute", result).map(|()| value.unsigned_abs())
        };
        let capability = (attribute(CAPABILITY.0)?, attribute(CAPABILITY.1)?);
        let multiprocessors = attribute(MULTIPROCESSORS)?;
        Ok(Device { ordinal, name, uuid: shown(uuid), capability, multiprocessors })
    }

    pub(super) fn check(&self, call: &'static str, code: u32) -> Result<(), CudaError> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut name = std::ptr::null();
        // SAFETY: writes one pointer, to a text that is never freed, or leaves it null.
        unsafe { (self.0.error_name)(code, &raw mut name) };
        let name = match name.is_null() {
            true => "unknown".to_owned(),
            // SAFETY: the driver's own text.
            false => unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(),
        };
        Err(CudaError::Call { call, code, name })
    }
}

/// A UUID as NVIDIA's tools print it.
fn shown(uuid: [u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// The primary context of a device, shared with whatever else uses the device in this process.
#[derive(Debug, Clone)]
pub struct Context(Arc<Retained>);

#[derive(Debug)]
struct Retained {
    driver: Driver,
    device: Device,
    raw: Handle,
}

// SAFETY: contexts may be used from any thread that has made them current, which every use does.
unsafe impl Send for Retained {}
// SAFETY: as for `Send`; the driver locks what it must.
unsafe impl Sync for Retained {}

impl Context {
    /// Takes the device into use.
    pub fn new(driver: &Driver, device: Device) -> Result<Self, CudaError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        let result = unsafe { (driver.0.context_retain)(&raw mut raw, device.ordinal) };
        driver.check("cuDevicePrimaryCtxRetain", result)?;
        Ok(Self(Arc::new(Retained { driver: driver.clone(), device, raw })))
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Bytes of device memory that are free.
    pub fn free_bytes(&self) -> Result<u64, CudaError> {
        let (mut free, mut total) = (0, 0);
        self.call("cuMemGetInfo", |symbols| {
            // SAFETY: writes two integers; the context is current.
            unsafe { (symbols.memory_info)(&raw mut free, &raw mut total) }
        })?;
        Ok(free as u64)
    }

    /// Makes the context current on this thread, and calls.
    pub(super) fn call(
        &self,
        name: &'static str,
        call: impl FnOnce(&Symbols) -> u32,
    ) -> Result<(), CudaError> {
        let code = self.raw_call(call);
        self.0.driver.check(name, code)
    }

    /// The same, with the result as it is.
    pub(super) fn raw_call(&self, call: impl FnOnce(&Symbols) -> u32) -> u32 {
        let symbols = &self.0.driver.0;
        // SAFETY: the context is retained.
        match unsafe { (symbols.context_set)(self.0.raw) } {
            SUCCESS => call(symbols),
            failed => failed,
        }
    }

    /// Makes the context current on this thread, for another library that works on it.
    pub(crate) fn bind(&self) -> Result<(), CudaError> {
        self.call("cuCtxSetCurrent", |_| SUCCESS)
    }
}

impl Drop for Retained {
    fn drop(&mut self) {
        // SAFETY: retained once, released once, after everything that holds this.
        unsafe { (self.driver.0.context_release)(self.device.ordinal) };
    }
}
