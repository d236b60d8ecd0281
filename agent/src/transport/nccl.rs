//! Bytes by NCCL: a communicator for each replica, its *lane*, of the training ranks that send to it and its own
//! ranks, so that what goes wrong with one replica disturbs no other.
//!
//! Control is the TCP transport's: a destination dials its sources over mutual TLS, says round and pair, and
//! acknowledges at the end ([`super::tcp`], B1 to B5); only the bytes between go another way. Beside that, every
//! member of a lane holds a connection to the lane's first rank, over which the lane is formed, watched and torn down.
//!
//! L1: an id is minted by the lane's first rank for one attempt, and travels over mutual TLS only.
//! L2: lanes are formed one at a time in the order of replicas: whoever forms one holds a turn at the leader.
//! L3: who fails, stops or falls silent ends the lane's attempt at all of its members, each within its deadline;
//!     lanes of others never notice. The next attempt has a new id.
//! L4: where an abort overruns its deadline, the process that holds the communicator says so, and never frees or uses
//!     again what kernels may still write. An agent then ends; a rank's process forms no lane any more, and its owner
//!     ends it.
//! L5: with `encryption: Required` there are no lanes at all.
//! L6: a rank whose process has an executor uses it (module `in_process`), and no device of its agent.

#![expect(unsafe_code, reason = "calls a C library")]

mod communicator;
mod connection;
mod fabric;
mod flow;
mod gpu;
mod hall;
mod in_process;
mod lane;
mod member;
mod preflight;
mod remote;
mod symbols;
mod turnstile;
mod worker;

pub(crate) use flow::{Direction, Job, Pair};
pub use gpu::Gpu;
pub(crate) use hall::Hall;
pub use in_process::{ExecutorError, ExecutorSettings, RankExecutor};
pub(crate) use lane::{LanePlan, Reason};
pub(crate) use member::{Carried, Choice};
pub use member::{LaneMember, Lanes};
pub use preflight::Settings;
pub use symbols::{Nccl, NcclError, NcclVersion, OLDEST, TOO_NEW, UniqueId};

use crate::cuda::CudaError;
use weightrefit_core::code::Code;

/// What ends a rank's part in an attempt of a lane.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FlowError {
    /// The device.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// NCCL.
    #[error(transparent)]
    Nccl(#[from] NcclError),
    /// The device lacks memory, as was found before any was taken.
    #[error("{bytes} bytes are needed on the device, {free} are free")]
    Exhausted {
        /// Needed.
        bytes: u64,
        /// Free.
        free: u64,
    },
    /// Asked to stop.
    #[error("the transfer was stopped")]
    Stopped,
    /// Past its deadline.
    #[error("{what} did not come in time")]
    Late {
        /// What was waited for.
        what: &'static str,
    },
    /// The lane's attempt is over, since a rank is gone.
    #[error("the lane was torn down")]
    Gone,
    /// The lane's attempt is over by what another rank said of itself: whoever is heard first tells the cause.
    #[error("the lane was torn down: {detail}")]
    Ended {
        /// That rank's code.
        code: Code,
        /// What it said.
        detail: String,
    },
    /// The executor in the rank's process failed.
    #[error("{detail}")]
    Remote {
        /// Its code.
        code: Code,
        /// What it said.
        detail: String,
    },
    /// A communicator could not be ended in time.
    #[error("a communicator could not be aborted in time, and its kernels may still run")]
    Wedged,
}

impl FlowError {
    /// The stable code that a user sees.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::Cuda(CudaError::OutOfMemory { .. }) | Self::Exhausted { .. } => Code::StagingExhausted,
            Self::Cuda(_) => Code::GpuNotVisible,
            Self::Nccl(_) => Code::NcclError,
            Self::Stopped => Code::Cancelled,
            Self::Late { .. } => Code::TransferTimeout,
            Self::Gone => Code::PeerLost,
            Self::Ended { code, .. } | Self::Remote { code, .. } => *code,
            Self::Wedged => Code::AgentWedged,
        }
    }
}
