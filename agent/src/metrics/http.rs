//! `/metrics`, `/livez` and `/readyz`.

use super::Metrics;
use crate::identity::Identity;
use crate::readiness::Health;
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpListener;

/// The listening socket of the metrics server.
#[derive(Debug)]
pub struct MetricsServer {
    socket: TcpListener,
}

/// Metrics cannot be served.
#[derive(Debug, thiserror::Error)]
#[error("cannot serve metrics on {address}: {source}")]
pub struct MetricsError {
    address: SocketAddr,
    source: std::io::Error,
}

impl MetricsServer {
    /// Binds.
    pub async fn bind(address: SocketAddr) -> Result<Self, MetricsError> {
        let socket = TcpListener::bind(address).await.map_err(|source| MetricsError { address, source })?;
        Ok(Self { socket })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// The system does not know.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Serves until dropped. When the certificate of `identity` ends is read at each scrape.
    ///
    /// # Errors
    /// Those of the listening socket.
    pub async fn serve(
        self,
        metrics: Metrics,
        health: Arc<Health>,
        identity: Arc<Identity>,
    ) -> std::io::Result<()> {
        let router = Router::new()
            .route("/metrics", get(text))
            .route("/livez", get(live))
            .route("/readyz", get(ready))
            .with_state((metrics, health, identity));
        axum::serve(self.socket, router).await
    }
}

type Shared = State<(Metrics, Arc<Health>, Arc<Identity>)>;

async fn text(State((metrics, _, identity)): Shared) -> Result<String, StatusCode> {
    metrics.certificate_expiry.set(identity.certificate_end().unwrap_or(-1));
    metrics.text().map_err(|error| {
        tracing::error!(error = %error, "metrics cannot be encoded");
        StatusCode::INTERNAL_SERVER_ERROR
    })
}

async fn live(State((_, health, _)): Shared) -> (StatusCode, &'static str) {
    match health.is_live() {
        true => (StatusCode::OK, "ok\n"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "round driver does not turn\n"),
    }
}

async fn ready(State((_, health, _)): Shared) -> (StatusCode, String) {
    match health.not_ready() {
        None => (StatusCode::OK, "ok\n".to_owned()),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, why + "\n"),
    }
}
