//! The driver's functions.

use super::Handle;
use super::library::symbols;
use super::shared::{Access, Properties};
use std::ffi::{c_char, c_int, c_uint, c_void};

symbols! {
    /// Functions of libcuda.
    Symbols;
    required {
        init = "cuInit"(c_uint) -> u32;
        driver_version = "cuDriverGetVersion"(*mut c_int) -> u32;
        error_name = "cuGetErrorName"(u32, *mut *const c_char) -> u32;
        device_count = "cuDeviceGetCount"(*mut c_int) -> u32;
        device = "cuDeviceGet"(*mut c_int, c_int) -> u32;
        device_name = "cuDeviceGetName"(*mut c_char, c_int, c_int) -> u32;
        device_uuid = "cuDeviceGetUuid_v2"(*mut [u8; 16], c_int) -> u32;
        device_attribute = "cuDeviceGetAttribute"(*mut c_int, c_int, c_int) -> u32;
        context_retain = "cuDevicePrimaryCtxRetain"(*mut Handle, c_int) -> u32;
        context_release = "cuDevicePrimaryCtxRelease_v2"(c_int) -> u32;
        context_set = "cuCtxSetCurrent"(Handle) -> u32;
        memory_info = "cuMemGetInfo_v2"(*mut usize, *mut usize) -> u32;
        memory_alloc = "cuMemAlloc_v2"(*mut u64, usize) -> u32;
        memory_free = "cuMemFree_v2"(u64) -> u32;
        shared_granularity = "cuMemGetAllocationGranularity"(*mut usize, *const Properties, c_uint) -> u32;
        shared_create = "cuMemCreate"(*mut u64, usize, *const Properties, u64) -> u32;
        shared_export = "cuMemExportToShareableHandle"(*mut c_void, u64, c_uint, u64) -> u32;
        shared_import = "cuMemImportFromShareableHandle"(*mut u64, *mut c_void, c_uint) -> u32;
        shared_properties = "cuMemGetAllocationPropertiesFromHandle"(*mut Properties, u64) -> u32;
        shared_release = "cuMemRelease"(u64) -> u32;
        range_reserve = "cuMemAddressReserve"(*mut u64, usize, usize, u64, u64) -> u32;
        range_free = "cuMemAddressFree"(u64, usize) -> u32;
        range_map = "cuMemMap"(u64, usize, usize, u64, u64) -> u32;
        range_access = "cuMemSetAccess"(u64, usize, *const Access, usize) -> u32;
        range_unmap = "cuMemUnmap"(u64, usize) -> u32;
        host_alloc = "cuMemAllocHost_v2"(*mut *mut c_void, usize) -> u32;
        host_free = "cuMemFreeHost"(*mut c_void) -> u32;
        host_register = "cuMemHostRegister_v2"(*mut c_void, usize, c_uint) -> u32;
        host_unregister = "cuMemHostUnregister"(*mut c_void) -> u32;
        set_bytes = "cuMemsetD8Async"(u64, u8, usize, Handle) -> u32;
        upload = "cuMemcpyHtoDAsync_v2"(u64, *const c_void, usize, Handle) -> u32;
        download = "cuMemcpyDtoHAsync_v2"(*mut c_void, u64, usize, Handle) -> u32;
        stream_create = "cuStreamCreateWithPriority"(*mut Handle, c_uint, c_int) -> u32;
        stream_destroy = "cuStreamDestroy_v2"(Handle) -> u32;
        stream_query = "cuStreamQuery"(Handle) -> u32;
        stream_wait = "cuStreamWaitEvent"(Handle, Handle, c_uint) -> u32;
        event_create = "cuEventCreate"(*mut Handle, c_uint) -> u32;
        event_record = "cuEventRecord"(Handle, Handle) -> u32;
        event_query = "cuEventQuery"(Handle) -> u32;
        event_destroy = "cuEventDestroy_v2"(Handle) -> u32;
        module_load = "cuModuleLoadData"(*mut Handle, *const c_void) -> u32;
        module_unload = "cuModuleUnload"(Handle) -> u32;
        module_function = "cuModuleGetFunction"(*mut Handle, Handle, *const c_char) -> u32;
        launch = "cuLaunchKernel"(Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void) -> u32;
    }
    optional {
        priority_range = "cuCtxGetStreamPriorityRange"(*mut c_int, *mut c_int) -> u32;
    }
}

/// `CUDA_SUCCESS`.
pub(super) const SUCCESS: u32 = 0;
/// `CUDA_ERROR_INVALID_VALUE`.
pub(super) const INVALID_VALUE: u32 = 1;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub(super) const OUT_OF_MEMORY: u32 = 2;
/// `CUDA_ERROR_NOT_READY`: a query of work that still runs.
pub(super) const NOT_READY: u32 = 600;
