//! Staging of one destination rank: made by the agent, readable by the engine.

use crate::executor::{ExecutorError, Part, Placements, RankMemory};
use crate::memory::{self, MemoryError};
use crate::session::ClientId;
use crate::transport::nccl::{FlowError, Gpu};
use rustix::fs::{Mode, OFlags};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use weightrefit_core::code::Code;
use weightrefit_core::dtype::DType;
use weightrefit_core::id::Sha256;
use weightrefit_proto::socket::{AgentFrame, StagedTensor};

/// Memory that new weights land in.
#[derive(Debug)]
pub(super) struct Staging {
    layout: Sha256,
    memory: RankMemory,
    /// Where it lies; `None` is on the host.
    gpu: Option<Arc<Gpu>>,
    /// For the engine: of the host's memory to read only, of a device's to read by agreement.
    readable: OwnedFd,
    bytes: u64,
    /// The executor in the engine's process that may write it too; `None` keeps everybody but this agent from it.
    executor: Option<ClientId>,
    /// The engine's present connection has the descriptor.
    pub(super) told: bool,
}

/// Staging cannot be made.
#[derive(Debug, thiserror::Error)]
pub(super) enum StagingError {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    #[error(transparent)]
    Gpu(#[from] FlowError),
    #[error("cannot open staging for reading: {0}")]
    Reopen(rustix::io::Errno),
}

impl StagingError {
    pub(super) fn code(&self) -> Code {
        match self {
            Self::Memory(_) | Self::Reopen(_) => Code::StagingExhausted,
            Self::Gpu(error) => error.code(),
            Self::Executor(_) => Code::Unsupported,
        }
    }
}

impl Staging {
    /// Takes `bytes` of the GPU, or else of real pages; blocks until they are there.
    pub(super) fn open(
        name: &str,
        layout: Sha256,
        placements: Arc<Placements>,
        bytes: u64,
        gpu: Option<Arc<Gpu>>,
        executor: Option<ClientId>,
    ) -> Result<Self, StagingError> {
        if let Some(gpu) = gpu {
            let (memory, readable) = gpu.staging(bytes)?;
            let memory = RankMemory::new(vec![Part::Device(Arc::new(memory))], placements)?;
            return Ok(Self { layout, memory, gpu: Some(gpu), readable, bytes, executor, told: false });
        }
        let (writable, mapping) = memory::create(name, bytes)?;
        if executor.is_none() {
            memory::refuse_new_writers(std::os::fd::AsFd::as_fd(&writable), name)?;
        }
        // A descriptor opened anew for reading, so that the engine cannot write through it; the seal keeps it
        // from opening another one.
        let path = format!("/proc/self/fd/{}", writable.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let readable = rustix::fs::open(path, flags, Mode::empty()).map_err(StagingError::Reopen)?;
        let memory = RankMemory::new(vec![Part::Host(Arc::new(mapping))], placements)?;
        Ok(Self { layout, memory, gpu: None, readable, bytes, executor, told: false })
    }

    /// Digest of the layout that it was made for.
    pub(super) fn layout(&self) -> Sha256 {
        self.layout
    }

    /// Who else may write it.
    pub(super) fn executor(&self) -> Option<ClientId> {
        self.executor
    }

    /// For receivers and digests.
    pub(super) fn memory(&self) -> &RankMemory {
        &self.memory
    }

    /// Where it lies; `None` is on the host.
    pub(super) fn gpu(&self) -> Option<&Arc<Gpu>> {
        self.gpu.as_ref()
    }

    /// Its size.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The frame for the engine, with its descriptor.
    pub(super) fn frame(&self) -> std::io::Result<(AgentFrame, Vec<OwnedFd>)> {
        let placements = self.memory.placements();
        let tensor = |(local, place): (&weightrefit_core::region::LocalTensor, &crate::executor::Place)| {
            let bytes = local.shape.iter().product::<u64>() * DType::size(local.dtype);
            StagedTensor { name: local.name.clone(), offset: place.offset, bytes }
        };
        let tensors = placements.locals().iter().zip(placements.places()).map(tensor).collect();
        let device = self.gpu.as_ref().map(|gpu| gpu.context().device().uuid.clone());
        Ok((AgentFrame::Staging { bytes: self.bytes, tensors, device }, vec![self.readable.try_clone()?]))
    }
}
