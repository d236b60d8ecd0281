//! Everything that an agent is made of, put together once.

use crate::args::{AgentArgs, LogFormat, Side};
use crate::coordinator::{self, Joiner, Line, Recordings};
use crate::identity::{EnrolError, Enrolment, Identity, IdentityError, Token, TrustBundle, draw_incarnation};
use crate::limits;
use crate::metrics::{Metrics, MetricsError, MetricsServer};
use crate::peers::{Links, Peers};
use crate::readiness::Health;
use crate::rounds::{Inbox, Parts, RoundDriver};
use crate::server::{PeerListener, ServeError};
use crate::session::{Listener, SocketError};
use crate::transport::tcp::{ByteServer, Security};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
use rustls::pki_types::ServerName;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tracing_subscriber::EnvFilter;
use weightrefit_core::code::Code;
use weightrefit_proto::v1;

/// The agent could not start, or had to stop.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An argument that only its use can judge.
    #[error("{flag} `{value}` {problem}")]
    Argument {
        /// The flag.
        flag: &'static str,
        /// What was given.
        value: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The system.
    #[error("cannot {action}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
    /// Key, certificate, TLS.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// Token, trust bundle, coordinator.
    #[error(transparent)]
    Enrol(#[from] EnrolError),
    /// Agent socket.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// `Round`.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// Metrics.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// Two metrics of one name.
    #[error("cannot register metrics: {0}")]
    Registry(#[from] prometheus::Error),
}

impl StartError {
    /// The stable code.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Self::Enrol(error) if error.is_final() => Code::Unauthenticated,
            Self::Socket(SocketError::Taken { .. }) => Code::DuplicateRank,
            _ => Code::Unsupported,
        }
    }

    /// What a person can do.
    #[must_use]
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Enrol(error) if error.is_final() => Code::Unauthenticated.remedy(),
            Self::Enrol(_) => "Check --token and --trust-bundle.",
            Self::Socket(SocketError::Open { .. }) => {
                "Give the socket a directory of its own with mode 0700."
            }
            Self::Socket(SocketError::Taken { .. }) => "Stop the other agent, or choose another --socket.",
            Self::Socket(SocketError::Io { .. }) => "Check --socket: its directory must be writable.",
            Self::Serve(_) => "Check --listen: it must be an address of this machine.",
            Self::Metrics(_) => "Check --metrics: address and port must be free.",
            Self::Argument { .. } | Self::System { .. } | Self::Identity(_) | Self::Registry(_) => {
                "`weightrefit-agent --help` explains the flags."
            }
        }
    }
}

/// Runs an agent until it is told to stop.
///
/// # Errors
/// Why it cannot start.
pub fn run(args: AgentArgs) -> Result<(), StartError> {
    if let Some(parent) = args.worker_of.or(args.exit_with_parent) {
        follow_parent(parent)?;
    }
    log(args.log_format);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(limits::CONTROL_THREADS)
        .thread_name("control")
        .enable_all()
        .build()
        .map_err(system("start the runtime"))?;
    let result = runtime.block_on(serve(args));
    // Blocking threads that a broken peer holds must not hold the process.
    runtime.shutdown_timeout(limits::SHUTDOWN_MAX);
    result
}

async fn serve(args: AgentArgs) -> Result<(), StartError> {
    // All fields by name, so that none is forgotten.
    let AgentArgs {
        coordinator,
        coordinator_name,
        trust_bundle,
        trust_bundle_fd,
        token,
        token_fd,
        refit,
        pod_uid,
        claims,
        side,
        socket,
        listen,
        metrics: metrics_address,
        log_format: _,
        exit_with_parent: _,
        supervise: _,
        worker_of: _,
        allow_time_slicing,
        gpus,
        gpu_window_mib,
        cuda_library,
        nccl_library,
    } = args;
    let fabric = crate::transport::nccl::Settings {
        cuda: cuda_library,
        nccl: nccl_library,
        gpus,
        allow_time_slicing,
        window_bytes: gpu_window_mib << 20,
    };
    let stop = stop_signal()?;
    let identity = Arc::new(Identity::generate(&pod_uid)?);
    let incarnation = draw_incarnation()?;
    let enrolment = Enrolment {
        name: coordinator_name_of(&coordinator, coordinator_name)?,
        coordinator,
        trust: trust_of(trust_bundle, trust_bundle_fd)?,
        token: token_of(token, token_fd)?,
        pod_uid,
    };
    let metrics = Metrics::new()?;
    let health = Arc::new(match side {
        Some(side) => Health::untold(side == Side::Inference),
        None => Health::new(&claims),
    });
    let agent_socket = Listener::bind(&socket)?;
    let peer_listener = PeerListener::bind(listen).await?;
    let security = Security::Tls(Arc::clone(&identity));
    let bytes =
        ByteServer::bind(SocketAddr::new(listen, 0), &security).map_err(system("listen for byte streams"))?;
    let byte_address = bytes.local_addr().map_err(system("listen for byte streams"))?;
    let round_address = peer_listener.address().to_string();
    if let Some(address) = metrics_address {
        let address = address.with(listen);
        let server = MetricsServer::bind(address).await?;
        tracing::info!(address = server.address().ok().map(|a| a.to_string()), "metrics served");
        tokio::spawn(server.serve(metrics.clone(), Arc::clone(&health), Arc::clone(&identity)));
    }

    let (client_events, clients) = mpsc::channel(limits::EVENTS_MAX);
    tokio::spawn(agent_socket.serve(incarnation, client_events));
    tracing::info!(%incarnation, key = %identity.key_hash(), socket = %socket.display(), round = %round_address, bytes = %byte_address, "agent started");
    // Clients are heard once there is a rank for them; until then their frames wait.
    let (enrolled, seats) = match side {
        None => (None, claims),
        Some(_) => {
            let mut stop = stop.clone();
            let asked = async {
                let mut enrolled = coordinator::enrol(&enrolment, &identity).await?;
                let seats = coordinator::told_seats(&enrolment, &identity, &refit, &mut enrolled).await;
                Ok::<_, EnrolError>((enrolled, seats))
            };
            let (enrolled, seats) = tokio::select! {
                told = asked => told?,
                // It has begun nothing that would have to end well.
                _ = stop.changed() => return Ok(()),
            };
            health.tell(&seats);
            (Some(enrolled), seats)
        }
    };
    let joiner = Joiner {
        refit,
        incarnation,
        seats: seats.clone(),
        is_told: side.is_some(),
        round_addresses: vec![round_address],
        byte_addresses: vec![byte_address.to_string()],
    };
    let (peer_events, peer_inbox) = mpsc::channel(limits::EVENTS_MAX);
    let links = Links::new(peer_events);
    let refused = metrics.clone();
    let (server_identity, server_links) = (Arc::clone(&identity), links.clone());
    let rounds = tokio::spawn(async move {
        let refuse = move || refused.refuse_peer(Code::Unauthenticated);
        peer_listener.serve(&server_identity, server_links, refuse).await
    });
    let (control_sender, control) = mpsc::channel(limits::EVENTS_MAX);
    let (upward, upward_inbox) = mpsc::channel(limits::EVENTS_MAX);
    let (state, state_inbox) = watch::channel(v1::State::default());
    let (recordings, recordings_inbox) = watch::channel(Recordings::new());
    let line = Line {
        control: control_sender,
        upward: upward_inbox,
        state: state_inbox,
        recordings: recordings_inbox,
    };
    let line_identity = Arc::clone(&identity);
    let connected = metrics.coordinator_connected.clone();
    let joined = tokio::spawn(async move {
        let enrolled = match enrolled {
            Some(enrolled) => enrolled,
            None => coordinator::enrol(&enrolment, &line_identity).await?,
        };
        coordinator::run(&enrolment, &line_identity, &joiner, line, enrolled, &connected).await
    });
    let peers = Peers::new(identity, links);
    let driver = RoundDriver::new(Parts {
        incarnation,
        seats,
        peers,
        bytes,
        security,
        fabric,
        metrics,
        health,
        upward,
        state,
        recordings,
    });
    let inbox = Inbox { control, clients, peers: peer_inbox, stop };
    tokio::select! {
        () = driver.run(inbox) => Ok(()),
        // It ends by itself only when the agent has nothing to do here.
        result = joined => result.map_err(|error| broken(&error))?.map_err(StartError::from),
        result = rounds => result.map_err(|error| broken(&error))?.map_err(StartError::from),
    }
}

fn broken(error: &tokio::task::JoinError) -> StartError {
    StartError::System { action: "go on after a panic", source: std::io::Error::other(error.to_string()) }
}

/// Set when SIGTERM or SIGINT came.
fn stop_signal() -> Result<watch::Receiver<bool>, StartError> {
    let failed = system("listen for signals");
    let mut terminate = signal(SignalKind::terminate()).map_err(&failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(&failed)?;
    let (sender, receiver) = watch::channel(false);
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        // Nobody listens any more when the agent has stopped already.
        let _ = sender.send(true);
        std::future::pending::<()>().await;
    });
    Ok(receiver)
}

fn coordinator_name_of(address: &str, name: Option<String>) -> Result<ServerName<'static>, StartError> {
    let argument =
        |flag, value: &str, problem| StartError::Argument { flag, value: value.to_owned(), problem };
    let Some((host, port)) = address.rsplit_once(':') else {
        return Err(argument("--coordinator", address, "has no port"));
    };
    if port.parse::<u16>().is_err() {
        return Err(argument("--coordinator", address, "has no usable port"));
    }
    let (flag, name) = match name {
        Some(name) => ("--coordinator-name", name),
        None => ("--coordinator", host.trim_matches(['[', ']']).to_owned()),
    };
    ServerName::try_from(name.clone()).map_err(|_| argument(flag, &name, "is no host name or address"))
}

fn trust_of(path: Option<PathBuf>, fd: Option<u32>) -> Result<TrustBundle, StartError> {
    match (path, fd) {
        (_, Some(fd)) => {
            let pem = inherited("trust bundle", fd, limits::TRUST_BUNDLE_BYTES_MAX)?;
            Ok(TrustBundle::Given(pem))
        }
        (Some(path), None) => Ok(TrustBundle::File(path)),
        (None, None) => Err(missing("--trust-bundle")),
    }
}

fn token_of(path: Option<PathBuf>, fd: Option<u32>) -> Result<Token, StartError> {
    match (path, fd) {
        (_, Some(fd)) => {
            let bytes = inherited("token", fd, limits::TOKEN_BYTES_MAX)?;
            let text = String::from_utf8(bytes).map_err(|_| StartError::Argument {
                flag: "--token-fd",
                value: fd.to_string(),
                problem: "does not hold text",
            })?;
            Ok(Token::Given(text.trim().to_owned()))
        }
        (Some(path), None) => Ok(Token::File(path)),
        (None, None) => Err(missing("--token")),
    }
}

/// Clap asks for one of the two flags; this is what it would say.
fn missing(flag: &'static str) -> StartError {
    StartError::Argument { flag, value: String::new(), problem: "or its -fd form is needed" }
}

/// Reads an inherited descriptor through /proc, which needs no unsafe conversion from a number.
fn inherited(what: &'static str, fd: u32, bytes_max: u64) -> Result<Vec<u8>, StartError> {
    let path = Path::new("/proc/self/fd").join(fd.to_string());
    Ok(crate::identity::read_bounded(what, &path, bytes_max)?)
}

/// Asks the kernel to end this process with its parent, and makes sure that it is not too late to ask.
pub(crate) fn follow_parent(parent: u32) -> Result<(), StartError> {
    let failed = system("follow the parent process");
    // Nothing else reaches a process that is stopped.
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| failed(error.into()))?;
    let expected = i32::try_from(parent).ok().and_then(Pid::from_raw);
    if expected.is_none() || getppid() != expected {
        return Err(StartError::Argument {
            flag: "--exit-with-parent",
            value: parent.to_string(),
            problem: "is not the parent of this process",
        });
    }
    Ok(())
}

pub(crate) fn system(action: &'static str) -> impl Fn(std::io::Error) -> StartError {
    move |source| StartError::System { action, source }
}

pub(crate) fn log(format: LogFormat) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => builder.with_ansi(false).init(),
        LogFormat::Json => builder.json().init(),
    }
}
