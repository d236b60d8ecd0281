//! A rank's memory, on the host, on its device, or some of each.
//!
//! X4: whoever can read no device is given memory of the host: what lies on a device has a *shadow* there, copied whole
//!     and at most once a round in one direction. Nothing else ever copies a part that is on a device.

use super::placement::check;
use super::shadow::Shadow;
use super::{ExecutorError, HostMemory, Placements};
use crate::cuda::{CudaError, DeviceMemory};
use crate::memory::{Mapping, MemoryError};
use std::sync::Arc;
use weightrefit_core::code::Code;
use weightrefit_core::round::message::RoundKey;

/// One memory of a rank.
#[derive(Debug, Clone)]
pub enum Part {
    /// Mapped.
    Host(Arc<Mapping>),
    /// On the rank's device, whoever took it.
    Device(Arc<DeviceMemory>),
}

impl Part {
    /// Bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Host(mapping) => mapping.len(),
            Self::Device(memory) => memory.len(),
        }
    }
}

/// A rank's memory, checked to hold its placements. Clones are the same memory.
#[derive(Debug, Clone)]
pub struct RankMemory {
    parts: Vec<Part>,
    placements: Arc<Placements>,
    host: Host,
}

#[derive(Debug, Clone)]
enum Host {
    /// All of it.
    Own(HostMemory),
    /// For what is on a device.
    Shadow(Arc<Shadow>),
}

/// The host cannot be given what is on a device, or the other way round.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShadowError {
    /// No memory for it.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The device.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A bug: it was made with the sizes of what it shadows.
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    /// The copy is still on its way.
    #[error("a copy between device and host did not end in {seconds} s")]
    Late {
        /// How long it was waited for.
        seconds: u64,
    },
}

impl ShadowError {
    /// The stable code that a user sees.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::Memory(error) => error.code(),
            Self::Cuda(CudaError::OutOfMemory { .. }) => Code::StagingExhausted,
            Self::Cuda(_) => Code::GpuNotVisible,
            Self::Executor(_) => Code::Unsupported,
            Self::Late { .. } => Code::TransferTimeout,
        }
    }
}

impl RankMemory {
    /// Pairs memory and placements.
    ///
    /// # Errors
    /// Where a tensor does not lie inside its memory.
    pub fn new(parts: Vec<Part>, placements: Arc<Placements>) -> Result<Self, ExecutorError> {
        check(&placements, |memory| parts.get(memory as usize).map_or(0, Part::bytes))?;
        let mapping = |part: &Part| match part {
            Part::Host(mapping) => Some(Arc::clone(mapping)),
            Part::Device(_) => None,
        };
        let host = match parts.iter().map(mapping).collect::<Option<Vec<_>>>() {
            Some(mappings) => Host::Own(HostMemory::new(mappings, Arc::clone(&placements))?),
            None => Host::Shadow(Arc::new(Shadow::new(parts.clone(), Arc::clone(&placements)))),
        };
        Ok(Self { parts, placements, host })
    }

    /// The placements.
    #[must_use]
    pub fn placements(&self) -> &Arc<Placements> {
        &self.placements
    }

    /// All memories.
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// As memory of the host, where all of it is.
    #[must_use]
    pub fn on_host(&self) -> Option<&HostMemory> {
        match &self.host {
            Host::Own(memory) => Some(memory),
            Host::Shadow(_) => None,
        }
    }

    /// To read in a round: the host's content is the device's. Blocks for a copy where there is none of this round.
    ///
    /// # Errors
    /// No memory, or what the device says.
    pub fn pull(&self, round: RoundKey) -> Result<HostMemory, ShadowError> {
        match &self.host {
            Host::Own(memory) => Ok(memory.clone()),
            Host::Shadow(shadow) => shadow.pull(round),
        }
    }

    /// To be written whole: what the host holds before means nothing. [`Self::push`] ends it.
    ///
    /// # Errors
    /// No memory, or what the device says.
    pub fn fill(&self) -> Result<HostMemory, ShadowError> {
        match &self.host {
            Host::Own(memory) => Ok(memory.clone()),
            Host::Shadow(shadow) => shadow.fill(),
        }
    }

    /// What was written to [`Self::fill`] goes to the device. Blocks for the copy.
    ///
    /// # Errors
    /// What the device says.
    pub fn push(&self) -> Result<(), ShadowError> {
        match &self.host {
            Host::Own(_) => Ok(()),
            Host::Shadow(shadow) => shadow.push(),
        }
    }

    /// Bytes that were copied between device and host so far.
    #[must_use]
    pub fn shadowed_bytes(&self) -> u64 {
        match &self.host {
            Host::Own(_) => 0,
            Host::Shadow(shadow) => shadow.copied_bytes(),
        }
    }
}

impl From<HostMemory> for RankMemory {
    fn from(memory: HostMemory) -> Self {
        let parts = memory.mappings().iter().map(|mapping| Part::Host(Arc::clone(mapping))).collect();
        Self { parts, placements: Arc::clone(memory.placements()), host: Host::Own(memory) }
    }
}
