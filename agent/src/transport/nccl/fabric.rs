//! What this process has of NCCL and devices, and which ranks bring their own.

use super::gpu::Gpu;
use super::lane::{Facts, LanePlan, Reason};
use super::preflight::{self, Settings};
use super::remote::Remote;
use super::symbols::{Nccl, UniqueId};
use super::worker::{Thread, Worker};
use crate::session::ClientId;
use crate::transport::tcp::{Dialer, Peers, Security};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use weightrefit_core::code::Code;
use weightrefit_proto::socket::executor::Said;

/// What this process has of NCCL and devices, looked for when a refit first wants them.
pub(super) struct Fabric {
    settings: Settings,
    security: Security,
    /// A GPU for each rank of the agent.
    gpus: OnceLock<Result<Vec<Arc<Gpu>>, Reason>>,
    nccl: OnceLock<Result<Nccl, Reason>>,
    /// By slot.
    executors: Vec<Mutex<Present>>,
}

/// The executor in the process of a rank, if there is one, and how many changes there were.
#[derive(Default)]
struct Present {
    executor: Option<Arc<Remote>>,
    changes: u64,
}

impl Present {
    fn turn_to(&mut self, executor: Option<Arc<Remote>>) {
        self.executor = executor;
        self.changes += 1;
    }
}

impl Fabric {
    pub(super) fn new(settings: Settings, security: Security, slots: usize) -> Self {
        let executors = (0..slots).map(|_| Mutex::default()).collect();
        Self { settings, security, gpus: OnceLock::new(), nccl: OnceLock::new(), executors }
    }

    /// A new id of the slot's lane; waits for it.
    pub(super) fn mint(&self, slot: usize) -> Result<UniqueId, Reason> {
        if let Some(executor) = self.executor(slot) {
            return executor.mint();
        }
        self.nccl()?.unique_id().map_err(|error| Reason::new(Code::NcclError, error.to_string()))
    }

    fn present(&self, slot: usize) -> Option<MutexGuard<'_, Present>> {
        Some(self.executors.get(slot)?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The executor in the process of the slot's rank, if there is one.
    pub(super) fn executor(&self, slot: usize) -> Option<Arc<Remote>> {
        self.present(slot)?.executor.clone()
    }

    /// How often the slot's executor came, went or became of no use.
    pub(super) fn changes(&self, slot: usize) -> u64 {
        self.present(slot).map_or(0, |present| present.changes)
    }

    fn nccl(&self) -> Result<Nccl, Reason> {
        self.nccl.get_or_init(|| preflight::nccl(&self.settings)).clone()
    }

    /// The GPU of a slot's rank, in this process.
    pub(super) fn gpu(&self, slot: usize) -> Result<Arc<Gpu>, Reason> {
        let gpus = self.gpus.get_or_init(|| preflight::gpus(&self.settings, self.executors.len()));
        let none = || Reason::new(Code::GpuNotVisible, format!("no GPU for rank {slot} of this agent"));
        gpus.as_ref().map_err(Clone::clone)?.get(slot).cloned().ok_or_else(none)
    }

    pub(super) fn dialer(&self, peers: &Arc<Peers>) -> Dialer {
        Dialer { security: self.security.clone(), peers: Arc::clone(peers) }
    }

    /// Who is to hold the rank's communicator, and what it brings (L6).
    pub(super) fn rank(
        &self,
        slot: usize,
        plan: &LanePlan,
        name: String,
    ) -> Result<(Box<dyn Worker>, Facts), Reason> {
        if let Some(executor) = self.executor(slot) {
            let facts = executor.facts(plan)?;
            return Ok((Box::new(executor.lane(name)), facts));
        }
        let (gpu, nccl) = (self.gpu(slot)?, self.nccl()?);
        let uuid = gpu.context().device().uuid.clone();
        let facts = Facts::new(nccl.version().0, uuid, preflight::shares_gpu(), gpu.window_bytes(), plan);
        let worker = Thread::start(nccl, gpu, name, Box::new(end_process))
            .map_err(|error| Reason::new(Code::TransportUnavailable, error.to_string()))?;
        Ok((Box::new(worker), facts))
    }

    /// It takes the place of the one before, which is over.
    pub(super) fn executor_found(&self, slot: usize, executor: Arc<Remote>) {
        tracing::info!(slot, client = executor.client.0, "executor in the rank's process");
        let Some(mut present) = self.present(slot) else { return };
        let before = present.executor.take();
        present.turn_to(Some(executor));
        drop(present);
        if let Some(before) = before {
            before.end();
        }
    }

    /// Takes what it says. True where it can do nothing more.
    pub(super) fn executor_said(&self, slot: usize, client: ClientId, said: Said) -> bool {
        let Some(executor) = self.executor(slot).filter(|executor| executor.client == client) else {
            return false;
        };
        let is_wedged = matches!(said, Said::Wedged { .. });
        if let Said::Wedged { message } = &said {
            tracing::error!(slot, code = %Code::AgentWedged, message, "the rank's process must end");
        }
        executor.hear(said);
        if is_wedged && let Some(mut present) = self.present(slot) {
            present.changes += 1;
        }
        is_wedged
    }

    /// All that waits for it is over.
    pub(super) fn executor_gone(&self, slot: usize, client: ClientId) {
        let Some(mut present) = self.present(slot) else { return };
        let Some(before) = present.executor.take_if(|executor| executor.client == client) else { return };
        tracing::info!(slot, client = client.0, "the executor in the rank's process is gone");
        present.turn_to(None);
        drop(present);
        before.end();
    }

    /// As if all were gone.
    pub(super) fn end_executors(&self) {
        for slot in 0..self.executors.len() {
            if let Some(executor) = self.executor(slot) {
                self.executor_gone(slot, executor.client);
            }
        }
    }
}

/// L4, for an agent: only the end of the process makes memory of others safe.
fn end_process() {
    tracing::error!(code = %Code::AgentWedged, "a communicator could not be aborted in time: this process ends");
    std::process::exit(3);
}
