//! Reference clients of the agent socket: a trainer and an engine over host memory, as processes of their own.
//! `weightrefit local` starts them, and so do the pods of `examples/cluster-demo`; they share no code with planner and
//! digest, so that their verdict is worth something.

mod cleanup;
mod device;
mod engine;
mod forward;
mod input;
mod live;
mod rule;
mod setup;
mod shard;
mod socket;
mod trainer;
mod weights;

use crate::memory::MemoryError;
use clap::Subcommand;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use weightrefit_proto::reference::Told;
use weightrefit_proto::socket::FrameError;

pub use cleanup::CleanupArgs;
pub use engine::EngineArgs;
pub use trainer::TrainerArgs;

/// What else this binary can be, where no real trainer and engine are.
#[derive(Debug, Clone, Subcommand)]
pub enum ReferenceRole {
    /// One training rank.
    #[command(hide = true)]
    ReferenceTrainer(TrainerArgs),
    /// One rank of an inference replica.
    #[command(hide = true)]
    ReferenceEngine(EngineArgs),
    /// Removes the directory of a run whose launcher has ended.
    #[command(hide = true)]
    ReferenceCleanup(CleanupArgs),
}

/// Settings that every rank has.
#[derive(Debug, Clone, clap::Args)]
pub struct RankArgs {
    /// Agent socket.
    #[arg(long)]
    socket: PathBuf,
    /// JSON of the resolved refit.
    #[arg(long)]
    refit: PathBuf,
    /// Safetensors file.
    #[arg(long)]
    weights: PathBuf,
    /// Process whose death ends this one; it must be the parent.
    #[arg(long)]
    launcher: Option<u32>,
    /// Nobody is there to command it, as in a container: it goes on until SIGTERM.
    #[arg(long, conflicts_with = "launcher")]
    unattended: bool,
    /// Keep the tensors on the GPU of this number, in place of memory of the host.
    #[arg(long, value_name = "ORDINAL")]
    device: Option<usize>,
    /// Its driver, in place of the system's.
    #[arg(long, value_name = "FILE", requires = "device")]
    cuda_library: Option<PathBuf>,
}

/// Why a reference process ends.
#[derive(Debug, thiserror::Error)]
enum ReferenceError {
    #[error("cannot read {path}: {reason}")]
    Refit { path: PathBuf, reason: String },
    #[error("the refit has no {0}")]
    Absent(String),
    #[error(transparent)]
    Layout(#[from] weightrefit_core::layout::LayoutError),
    #[error(transparent)]
    Table(#[from] weightrefit_core::model::TableError),
    #[error(transparent)]
    Shard(#[from] shard::ShardError),
    #[error(transparent)]
    Weights(#[from] weights::WeightsError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Cuda(#[from] crate::cuda::CudaError),
    #[error(transparent)]
    Import(#[from] crate::cuda::ImportError),
    #[error(transparent)]
    Identity(#[from] crate::identity::IdentityError),
    #[error(transparent)]
    Socket(#[from] crate::session::blocking::BlockingError),
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("staging cannot be used: {0}")]
    Staging(&'static str),
    #[error("`{0}` is no command")]
    Command(String),
    #[error("cannot {action}: {source}")]
    System { action: &'static str, source: std::io::Error },
    #[error("the launcher is not the parent of this process")]
    Orphan,
}

/// Runs a reference process to its end.
#[must_use]
pub fn run(role: ReferenceRole) -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env();
    let filter = filter.unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    let result = match role {
        ReferenceRole::ReferenceTrainer(args) => trainer::run(&args),
        ReferenceRole::ReferenceEngine(args) => engine::run(&args),
        ReferenceRole::ReferenceCleanup(args) => cleanup::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, "ended");
            ExitCode::from(1)
        }
    }
}

/// Writes one line for the launcher.
fn say(told: &Told) -> Result<(), ReferenceError> {
    let failed = |source| ReferenceError::System { action: "write to standard output", source };
    let line = serde_json::to_string(told).map_err(|error| failed(error.into()))?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(failed)
}
