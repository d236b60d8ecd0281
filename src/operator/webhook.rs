//! The admission webhook: gives pods that name a refit their agent, when they are created. Served by every replica of the
//! operator; what it does to a pod is `injection`'s.
//!
//! Invariants:
//! - H1: a pod that names no refit is let in as it is.
//! - H2: a pod that names one is let in with its agent or refused with the reason and the remedy, never without both.
//! - H3: its certificate is the cluster authority's, made anew long before either ends, and the API server is told whom
//!   to trust whenever it knows another or none.

mod bundle;
mod certificate;
mod review;

use crate::api::documents::SourceText;
use crate::api::problem::Refusal;
use crate::coordinator::accept;
use crate::identity::{IdentityError, Trust};
use crate::injection::Settings;
use crate::limits;
use crate::operator::telemetry::Metrics;
use certificate::Serving;
use kube::Client;
use prometheus::IntCounter;
use review::router;
use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio_rustls::server::TlsStream;

/// Flags of the webhook.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Where the API server asks for pods to be injected; no webhook without it.
    #[arg(long, value_name = "IP:PORT", requires_all = ["injection", "webhook_hosts"])]
    pub webhook_listen: Option<SocketAddr>,
    /// Injection settings: image, coordinator and profiles, as YAML.
    #[arg(long, value_name = "FILE", requires = "webhook_listen")]
    pub injection: Option<PathBuf>,
    /// Name or address at which the API server reaches the webhook, such as its Service's. Repeat for several.
    #[arg(long = "webhook-host", value_name = "HOST", requires = "webhook_listen")]
    pub webhook_hosts: Vec<String>,
    /// Name of the MutatingWebhookConfiguration, whose `caBundle` is kept right.
    #[arg(long, value_name = "NAME", default_value = "weightrefit")]
    pub webhook_configuration: String,
}

/// The webhook cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum WebhookError {
    /// The settings cannot be read.
    #[error("cannot read injection settings {path}: {source}")]
    Read {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The settings are not right.
    #[error("{}. {}", .0, .0.problem.hint(&.0.path))]
    Settings(#[from] Refusal),
    /// Agents would be given tokens that their coordinator refuses.
    #[error("injection settings have audience `{settings}`, and --audience is `{operator}`")]
    Audience {
        /// That of the settings.
        settings: String,
        /// That of the flag.
        operator: String,
    },
    /// No certificate.
    #[error("cannot make the webhook's certificate: {0}")]
    Certificate(#[from] IdentityError),
    /// The port.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
}

/// Serves for as long as the process lives, where the flags say so; returns the address. `metrics` count what becomes of
/// it.
///
/// # Errors
/// Settings, certificate or port are no good.
pub async fn start(
    args: Args,
    audience: &str,
    client: &Client,
    trust: watch::Receiver<Trust>,
    metrics: &Metrics,
) -> Result<Option<SocketAddr>, WebhookError> {
    let Args { webhook_listen, injection, webhook_hosts, webhook_configuration } = args;
    let (Some(address), Some(path)) = (webhook_listen, injection) else { return Ok(None) };
    let text = tokio::fs::read_to_string(&path).await;
    let text = text.map_err(|source| WebhookError::Read { path: path.clone(), source })?;
    let settings = Settings::parse(&SourceText { file: path.display().to_string(), text })?;
    if settings.audience != audience {
        let (settings, operator) = (settings.audience, audience.to_owned());
        return Err(WebhookError::Audience { settings, operator });
    }
    let certificates = metrics.certificates.clone();
    let serving = Arc::new(Serving::new(trust.borrow().signer(), webhook_hosts, certificates)?);
    let failed = |source| WebhookError::Listen { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let acceptor = serving.acceptor();
    let shake = move |stream: TcpStream| {
        let acceptor = acceptor.clone();
        async move { acceptor.accept(stream).await }
    };
    let (accepted, connections) = mpsc::channel(limits::HANDSHAKES_MAX);
    tokio::spawn(accept(listener, shake, accepted));
    let failed = metrics.webhook_handshakes_failed.clone();
    let server = axum::serve(Connections { address, connections, failed }, router(settings, metrics));
    tokio::spawn(async move { server.await });
    let failures = metrics.watch_failures.clone();
    tokio::spawn(bundle::keep(client.clone(), webhook_configuration, trust.clone(), failures));
    tokio::spawn(async move { serving.renew(trust).await });
    Ok(Some(address))
}

/// Connections whose handshake is done.
struct Connections {
    address: SocketAddr,
    connections: mpsc::Receiver<io::Result<TlsStream<TcpStream>>>,
    failed: IntCounter,
}

impl axum::serve::Listener for Connections {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            match self.connections.recv().await {
                Some(Ok(stream)) => {
                    // It went away meanwhile, and says so when it is read.
                    let peer = stream.get_ref().0.peer_addr().unwrap_or_else(|_| ([0, 0, 0, 0], 0).into());
                    return (stream, peer);
                }
                Some(Err(error)) => {
                    self.failed.inc();
                    tracing::debug!(%error, "handshake failed");
                }
                // The accepting task ends with the process only.
                None => pending().await,
            }
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        Ok(self.address)
    }
}
