//! A rank's tensors on a GPU: what the reference clients compute and compare is on the host, and a twin of it on the
//! device is what agents see.

use super::{RankArgs, ReferenceError};
use crate::cuda::{Context, CudaError, DeviceMemory, Driver, PinnedMapping, Stream};
use crate::memory::Mapping;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

const LOOK: Duration = Duration::from_micros(100);

/// Memory of a device beside as much of the host's.
pub(super) struct Twin {
    // Dropped in this order.
    host: PinnedMapping,
    memory: DeviceMemory,
    stream: Stream,
}

/// The device that the rank keeps its tensors on; `None` is the host.
pub(super) fn context(args: &RankArgs) -> Result<Option<Context>, ReferenceError> {
    let Some(ordinal) = args.device else { return Ok(None) };
    let driver = Driver::open(args.cuda_library.as_deref())?;
    let devices = driver.devices()?;
    // Over and over, as agents do whose ranks share a GPU.
    let device = devices.get(ordinal % devices.len().max(1)).cloned();
    let device = device.ok_or_else(|| ReferenceError::Absent(format!("GPU {ordinal}")))?;
    Ok(Some(Context::new(&driver, device)?))
}

impl Twin {
    /// Takes device memory for what `host` holds.
    pub(super) fn take(context: &Context, host: &Arc<Mapping>) -> Result<Self, ReferenceError> {
        Self::of(context, host, DeviceMemory::shareable(context, host.len())?)
    }

    /// Memory of the agent, to be read.
    pub(super) fn import(
        context: &Context,
        host: &Arc<Mapping>,
        fd: &OwnedFd,
    ) -> Result<Self, ReferenceError> {
        Self::of(context, host, DeviceMemory::import(context, fd.as_fd(), "staging", host.len())?)
    }

    fn of(context: &Context, host: &Arc<Mapping>, memory: DeviceMemory) -> Result<Self, ReferenceError> {
        let host = PinnedMapping::new(context, Arc::clone(host))?;
        Ok(Self { host, memory, stream: Stream::new(context)? })
    }

    /// For the agent.
    pub(super) fn descriptor(&self) -> Result<OwnedFd, CudaError> {
        self.memory.export()
    }

    /// The host's content to the device, there when this returns.
    pub(super) fn upload(&self) -> Result<(), CudaError> {
        self.stream.upload_mapped(&self.host, &self.memory)?;
        self.wait()
    }

    /// The device's content to the host.
    pub(super) fn download(&self) -> Result<(), CudaError> {
        self.stream.download_mapped(&self.memory, &self.host)?;
        self.wait()
    }

    fn wait(&self) -> Result<(), CudaError> {
        while !self.stream.is_done()? {
            std::thread::sleep(LOOK);
        }
        Ok(())
    }
}
