//! A trainer rank's registered memory, mapped read-only, and the programs that read it.

use crate::executor::{DigestProgram, ExecutorError, Place, Placements, Program, RankMemory};
use crate::memory::{Mapping, MemoryError};
use crate::planned::{Planned, Task};
use crate::session::{Registration, RegistrationError, compare};
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
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Executor(#[from] ExecutorError),
}

impl SourceError {
    pub(super) fn code(&self) -> Code {
        match self {
            Self::Registration(error) => error.code(),
            Self::NoPlace(_) | Self::Memory(_) | Self::Executor(_) => Code::RegistrationMismatch,
        }
    }
}

impl Source {
    /// Checks a registration against the rank's local tensors (sorted by name) and maps its memories. The
    /// descriptors are not needed afterwards.
    pub(super) fn adopt(registration: &Registration, locals: &[LocalTensor]) -> Result<Self, SourceError> {
        compare(&registration.tensors, locals)?;
        let mut mappings = Vec::with_capacity(registration.memories.len());
        for (index, (bytes, fd)) in registration.memories.iter().enumerate() {
            mappings.push(Arc::new(Mapping::adopt(fd.as_fd(), &format!("memory {index}"), *bytes)?));
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
        let memory = RankMemory::new(mappings, placements)?;
        Ok(Self { memory, programs: Mutex::default() })
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
