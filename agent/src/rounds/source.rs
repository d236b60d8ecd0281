//! A trainer rank's registered memory, mapped read-only, and the programs that read it.

use crate::cuda::{DeviceMemory, ImportError};
use crate::executor::{DigestProgram, ExecutorError, Part, Place, Placements, Program, RankMemory};
use crate::memory::{Mapping, MemoryError};
use crate::planned::{Planned, Task};
use crate::session::{Registration, RegistrationError, compare};
use crate::transport::nccl::{Gpu, Reason};
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use weightrefit_core::code::Code;
use weightrefit_core::id::{MemberId, Sha256};
use weightrefit_core::region::LocalTensor;
use weightrefit_core::round::io::Slot;

/// Memory of one trainer rank.
#[derive(Debug)]
pub(super) struct Source {
    memory: RankMemory,
    /// Where the memory lies; `None` is on the host.
    gpu: Option<Arc<Gpu>>,
    /// Of the plan that was asked for last, by its digest.
    programs: Mutex<Option<(Sha256, Arc<Programs>)>>,
}

/// What a plan does with the memory.
#[derive(Debug, Default)]
pub(super) struct Programs {
    /// By destination.
    pub(super) sends: BTreeMap<MemberId, Arc<Program>>,
    /// `None` with verification disabled.
    pub(super) digest: Option<Arc<DigestProgram>>,
}

/// A trainer's registration cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum SourceError {
    #[error(transparent)]
    Registration(#[from] RegistrationError),
    #[error("tensor `{0}` has no place in memory")]
    NoPlace(String),
    #[error(
        "memory {index} lies elsewhere than those before it: a rank's lie all on the host, or all on its GPU"
    )]
    Mixed { index: usize },
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Gpu(#[from] Reason),
    #[error(transparent)]
    Import(#[from] ImportError),
    #[error(transparent)]
    Executor(#[from] ExecutorError),
}

impl SourceError {
    pub(super) fn code(&self) -> Code {
        match self {
            Self::Registration(error) => error.code(),
            Self::Gpu(reason) => reason.code,
            Self::Import(ImportError::OtherDevice { .. } | ImportError::System { .. }) => Code::GpuNotVisible,
            Self::NoPlace(_) | Self::Mixed { .. } | Self::Memory(_) | Self::Import(_) | Self::Executor(_) => {
                Code::RegistrationMismatch
            }
        }
    }
}

impl Source {
    /// Checks a registration against the rank's local tensors (sorted by name) and maps its memories, those on a device
    /// by the GPU that `gpu_called` finds by its UUID. The descriptors are not needed afterwards.
    pub(super) fn adopt(
        registration: &Registration,
        locals: &[LocalTensor],
        gpu_called: impl Fn(&str) -> Result<Arc<Gpu>, Reason>,
    ) -> Result<Self, SourceError> {
        compare(&registration.tensors, locals)?;
        let mut parts = Vec::with_capacity(registration.memories.len());
        let mut gpu = None;
        for (index, (memory, fd)) in registration.memories.iter().enumerate() {
            let (name, bytes) = (format!("memory {index}"), memory.bytes);
            let is_on_device = memory.device.is_some();
            if index > 0 && is_on_device != gpu.is_some() {
                return Err(SourceError::Mixed { index });
            }
            parts.push(match &memory.device {
                None => Part::Host(Arc::new(Mapping::adopt(fd.as_fd(), &name, bytes)?)),
                Some(uuid) => {
                    let found = gpu.insert(gpu_called(uuid)?);
                    Part::Device(Arc::new(DeviceMemory::import(found.context(), fd.as_fd(), &name, bytes)?))
                }
            });
        }
        let by_name: BTreeMap<_, _> =
            registration.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        let mut places = Vec::with_capacity(locals.len());
        for local in locals {
            let at = by_name.get(local.name.as_str()).and_then(|tensor| tensor.at);
            let at = at.ok_or_else(|| SourceError::NoPlace(local.name.clone()))?;
            places.push(Place { mapping: at.memory, offset: at.offset });
        }
        let placements = Arc::new(Placements::new(locals.to_vec(), places)?);
        let memory = RankMemory::new(parts, placements)?;
        Ok(Self { memory, gpu, programs: Mutex::default() })
    }

    /// The GPU on which the memory lies; `None` where it is on the host.
    pub(super) fn gpu(&self) -> Option<&Arc<Gpu>> {
        self.gpu.as_ref()
    }

    /// The registered memory.
    pub(super) fn memory(&self) -> &RankMemory {
        &self.memory
    }

    /// The rank's moves under a plan, compiled once; blocks while somebody compiles them.
    pub(super) fn programs(&self, planned: &Planned, slot: Slot) -> Result<Arc<Programs>, ExecutorError> {
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((plan, programs)) = &*programs
            && *plan == planned.topology.plan
        {
            return Ok(Arc::clone(programs));
        }
        let mut compiled = Programs::default();
        if let Some(slot) = planned.slots.get(slot.0 as usize)
            && let Task::Send(sends) = &slot.task
        {
            for send in sends {
                let program = Program::for_source(&send.moves, self.memory.placements(), &send.locals)?;
                compiled.sends.insert(send.destination, Arc::new(program));
            }
            compiled.digest = planned.digest_program(slot, self.memory.placements())?;
        }
        let compiled = Arc::new(compiled);
        *programs = Some((planned.topology.plan, Arc::clone(&compiled)));
        Ok(compiled)
    }
}
