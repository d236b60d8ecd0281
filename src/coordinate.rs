//! A coordinator without Kubernetes: which pods there are and which ranks they hold follows from the resource, and
//! who can read a pod's token is that pod.
//!
//! Invariants:
//! - F1: a token lies in a file of mode 0600 in a directory of mode 0700 and is taken once. The next one is there
//!   before the answer goes out, so an agent that restarts, or renews its certificate, finds one.
//! - F2: a pod takes part in this refit only, as ranks that the resource gives it.
//! - F3: nothing is kept: agents bring epochs and versions along when they dial again.

use crate::api::resolve::ResolvedRefit;
use crate::coordinator::{Admitted, Coordinator, Gate, InMemory, Refusals, Server, TlsError, fault};
use crate::identity::{Authority, IdentityError, SERVER_NAME, Tokens, Trust};
use crate::local::{World, settings};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::TcpListener;
use weightrefit_core::code::Code;
use weightrefit_core::membership::Seat;
use weightrefit_proto::v1;

/// Version of [`Started`].
pub const SCHEMA: &str = "weightrefit.coordinate/v1";

/// File of the authority in the directory.
const AUTHORITY: &str = "authority.pem";

/// Why there is no coordinator.
#[derive(Debug, thiserror::Error)]
pub enum CoordinateError {
    /// The directory cannot be used.
    #[error("cannot write to directory {}: {source}", .directory.display())]
    Directory {
        /// Which.
        directory: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Others could read the tokens.
    #[error("directory {} has mode {mode:o}, which lets others read tokens", .directory.display())]
    Open {
        /// Which.
        directory: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// A port that is taken, most often.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// No random numbers.
    #[error("the system gives no randomness")]
    Random,
    /// No identity.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// No TLS.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// What somebody who starts the agents must know.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Started {
    schema: &'static str,
    refit: String,
    /// Every pod's agent.
    pub agents: Vec<Agent>,
}

/// One agent.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Agent {
    /// Unique in the refit.
    pub pod_uid: String,
    /// All but `--socket` and `--listen`, which depend on the machine that it runs on.
    pub arguments: Vec<String>,
}

/// A coordinator at work; it ends when this is dropped, and agents go on without it.
#[derive(Debug)]
pub struct Running {
    _coordinator: Coordinator,
    _server: Server,
}

/// Starts to coordinate `refit` at `address`, with authority and tokens in `directory`.
///
/// # Errors
/// Why there is no coordinator.
pub async fn start(
    refit: &ResolvedRefit,
    address: SocketAddr,
    directory: &Path,
) -> Result<(Running, Started), CoordinateError> {
    let directory = private(directory)?;
    let world = World::new(refit);
    let settings = settings(refit, &world);
    let trust = Trust::alone(Authority::generate()?);
    write(&directory, AUTHORITY, trust.borrow().bundle_pem().as_bytes())?;
    let seats = world.agents.into_iter().map(|agent| (agent.pod_uid, agent.seats)).collect();
    let files = Files { directory, tokens: Arc::default(), refit: settings.refit.clone(), seats };
    files.seats.keys().try_for_each(|pod_uid| files.issue(pod_uid))?;
    let failed = |source| CoordinateError::Listen { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let started = Started {
        schema: SCHEMA,
        refit: settings.refit.clone(),
        agents: files.seats.keys().map(|pod_uid| files.agent(pod_uid, address)).collect(),
    };
    let server = Server::start(listener, trust, Arc::new(files), Refusals::default())?;
    let coordinator = server.coordinate(settings, InMemory::default());
    Ok((Running { _coordinator: coordinator, _server: server }, started))
}

/// The directory, made where it is missing, as an absolute path.
fn private(directory: &Path) -> Result<PathBuf, CoordinateError> {
    let failed = |source| CoordinateError::Directory { directory: directory.to_owned(), source };
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(failed)?;
    let mode = std::fs::metadata(directory).map_err(failed)?.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(CoordinateError::Open { directory: directory.to_owned(), mode });
    }
    std::fs::canonicalize(directory).map_err(failed)
}

/// Whoever reads the name sees the old content or the new one whole.
fn write(directory: &Path, name: &str, content: &[u8]) -> Result<(), CoordinateError> {
    let failed = |source| CoordinateError::Directory { directory: directory.to_owned(), source };
    let mut file = tempfile::NamedTempFile::new_in(directory).map_err(failed)?; // mode 0600
    file.write_all(content).map_err(failed)?;
    file.persist(directory.join(name)).map_err(|error| failed(error.error))?;
    Ok(())
}

/// The gate: tokens in files.
struct Files {
    directory: PathBuf,
    tokens: Arc<Tokens>,
    /// namespace/name.
    refit: String,
    /// By pod UID.
    seats: BTreeMap<String, Vec<Seat>>,
}

impl Files {
    fn issue(&self, pod_uid: &str) -> Result<(), CoordinateError> {
        let token = self.tokens.issue(pod_uid).map_err(|_| CoordinateError::Random)?;
        write(&self.directory, &format!("{pod_uid}.token"), token.as_bytes())
    }

    fn agent(&self, pod_uid: &str, coordinator: SocketAddr) -> Agent {
        let path = |name: &str| self.directory.join(name).display().to_string();
        let mut arguments = Vec::new();
        let mut flag = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
        flag("--coordinator", coordinator.to_string());
        flag("--coordinator-name", SERVER_NAME.to_owned());
        flag("--trust-bundle", path(AUTHORITY));
        flag("--token", path(&format!("{pod_uid}.token")));
        flag("--refit", self.refit.clone());
        flag("--pod-uid", pod_uid.to_owned());
        self.seats[pod_uid].iter().for_each(|seat| flag("--claim", seat.to_string()));
        Agent { pod_uid: pod_uid.to_owned(), arguments }
    }
}

impl Gate for Arc<Files> {
    async fn enrol(&self, pod_uid: &str, token: &str) -> Result<(), v1::Fault> {
        self.tokens.enrol(pod_uid, token).await?;
        if let Err(error) = self.issue(pod_uid) {
            // This agent is who it says; a later start of it will be refused until the directory can be written.
            tracing::error!(pod = pod_uid, %error, "no new token");
        }
        Ok(())
    }

    async fn seats(&self, _: &str, pod_uid: &str) -> Result<Vec<Seat>, v1::Fault> {
        Ok(self.seats.get(pod_uid).cloned().unwrap_or_default())
    }

    async fn admit(&self, refit: &str, pod_uid: &str, seats: &[Seat]) -> Result<Admitted, v1::Fault> {
        let own = self.seats.get(pod_uid).map(Vec::as_slice).unwrap_or_default();
        if refit == self.refit && seats.iter().all(|seat| own.contains(seat)) {
            return Ok(Admitted { pod: pod_uid.to_owned(), created_s: 0 });
        }
        let own = own.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        Err(fault(
            Code::Unauthorized,
            format!("pod {pod_uid} may hold {own} of {} and nothing else", self.refit),
        ))
    }

    fn refit_of(&self, _: &str) -> Option<String> {
        Some(self.refit.clone())
    }

    /// The refit is a file that was read once.
    async fn is_gone(&self, _: &str) -> bool {
        false
    }
}
