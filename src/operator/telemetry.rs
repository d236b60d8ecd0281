//! What the operator tells of itself: `/metrics`, `/livez` and `/readyz` on one listener.

use crate::coordinator::Refusals;
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use prometheus::core::Collector;
use prometheus::{Gauge, GaugeVec, IntCounterVec, IntGauge, Opts, Registry};
use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;

/// All metrics of the operator; `docs/metrics.md` lists the same and a test compares them.
#[derive(Debug, Clone)]
pub struct Metrics {
    registry: Registry,
    /// 1 while this process leads.
    pub leader: IntGauge,
    /// Constant 1, labelled with the version.
    pub build_info: GaugeVec,
    /// Agents and strangers refused.
    pub refusals: Refusals,
    /// Requests to the API server.
    pub api_requests: IntCounterVec,
    /// Watches that failed.
    pub watch_failures: IntCounterVec,
    /// When the certificate of the authority that signs ends, seconds since 1970.
    pub authority_expiry: Gauge,
    /// Walks of the steps from a refit to its status.
    pub reconciles: IntCounterVec,
}

impl Metrics {
    /// Registers everything.
    ///
    /// # Errors
    /// Two metrics of one name: a programmer's error that any start of the operator shows.
    pub fn new() -> Result<Self, prometheus::Error> {
        let opts = |name: &str, help: &str| Opts::new(format!("weightrefit_operator_{name}"), help);
        let metrics = Self {
            registry: Registry::new(),
            leader: IntGauge::with_opts(opts("leader", "1 while this process leads, else 0."))?,
            build_info: GaugeVec::new(opts("build_info", "Constant 1."), &["version"])?,
            api_requests: IntCounterVec::new(
                opts("api_requests_total", "Requests to the API server, by what came of them."),
                &["code"],
            )?,
            watch_failures: IntCounterVec::new(
                opts("watch_failures_total", "Watches that failed, or ended before their time."),
                &["resource"],
            )?,
            refusals: Refusals::default(),
            authority_expiry: Gauge::with_opts(opts(
                "authority_expiry_timestamp_seconds",
                "When the certificate of the authority that signs ends, seconds since 1970.",
            ))?,
            reconciles: IntCounterVec::new(
                opts("reconciles_total", "Looks at a refit, by what came of its status."),
                &["outcome"],
            )?,
        };
        // All fields by name, so that none is forgotten.
        let Self {
            registry,
            leader,
            build_info,
            refusals,
            authority_expiry,
            api_requests,
            watch_failures,
            reconciles,
        } = &metrics;
        let all: [Box<dyn Collector>; 7] = [
            Box::new(leader.clone()),
            Box::new(build_info.clone()),
            refusals.collector(),
            Box::new(authority_expiry.clone()),
            Box::new(api_requests.clone()),
            Box::new(watch_failures.clone()),
            Box::new(reconciles.clone()),
        ];
        all.into_iter().try_for_each(|collector| registry.register(collector))?;
        // What counts failures is there, and 0, before anything fails.
        ["429", "500", "503", "failed", "timeout"]
            .iter()
            .for_each(|code| drop(api_requests.with_label_values(&[code])));
        ["configmaps", "pods", "secrets", "weightrefits"]
            .iter()
            .for_each(|resource| drop(watch_failures.with_label_values(&[resource])));
        ["deferred", "failed", "unchanged", "written"]
            .iter()
            .for_each(|outcome| drop(reconciles.with_label_values(&[outcome])));
        metrics.build_info.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1.0);
        Ok(metrics)
    }

    /// The text that `/metrics` serves.
    ///
    /// # Errors
    /// Those of the encoder.
    pub fn text(&self) -> Result<String, prometheus::Error> {
        prometheus::TextEncoder::new().encode_to_string(&self.registry.gather())
    }
}

/// Whether agents may be sent here: any replica that can enrol is ready, whether or not it leads.
#[derive(Debug)]
pub struct Health(Mutex<Option<String>>);

impl Health {
    /// Not ready, for this reason.
    #[must_use]
    pub fn starting(why: &str) -> Self {
        Self(Mutex::new(Some(why.to_owned())))
    }

    /// Ready from now on, or not ready for a reason.
    pub fn set(&self, not_ready: Option<&str>) {
        *self.0.lock().expect("no holder of this lock panics") = not_ready.map(str::to_owned);
    }

    fn not_ready(&self) -> Option<String> {
        self.0.lock().expect("no holder of this lock panics").clone()
    }
}

/// Serves until dropped.
///
/// # Errors
/// Those of the listening socket.
pub async fn serve(listener: TcpListener, metrics: Metrics, health: Arc<Health>) -> std::io::Result<()> {
    let router = Router::new()
        .route("/metrics", get(text))
        // An operator whose runtime turns is alive; what it waits for is told by readyz.
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .with_state((metrics, health));
    axum::serve(listener, router).await
}

type Shared = State<(Metrics, Arc<Health>)>;

async fn text(State((metrics, _)): Shared) -> Result<String, StatusCode> {
    metrics.text().map_err(|error| {
        tracing::error!(%error, "metrics cannot be encoded");
        StatusCode::INTERNAL_SERVER_ERROR
    })
}

async fn ready(State((_, health)): Shared) -> (StatusCode, String) {
    match health.not_ready() {
        None => (StatusCode::OK, "ok\n".to_owned()),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, why + "\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    async fn get(address: std::net::SocketAddr, path: &str) -> (String, String) {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: operator\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().to_owned(), body.to_owned())
    }

    #[tokio::test]
    async fn probes_and_metrics_say_what_holds() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (metrics, health) =
            (Metrics::new().unwrap(), Arc::new(Health::starting("pods are being listed")));
        let server = tokio::spawn(serve(listener, metrics.clone(), Arc::clone(&health)));
        let pair = |status: &str, body: &str| (status.to_owned(), body.to_owned());
        assert_eq!(get(address, "/readyz").await, pair("503", "pods are being listed\n"));
        assert_eq!(get(address, "/livez").await, pair("200", "ok\n"));
        health.set(None);
        assert_eq!(get(address, "/readyz").await, pair("200", "ok\n"));
        metrics.leader.set(1);
        let (status, text) = get(address, "/metrics").await;
        assert!(status == "200" && text.contains("\nweightrefit_operator_leader 1\n"), "{text}");
        server.abort();
    }

    #[test]
    fn the_inventory_is_the_documented_one() {
        let text = Metrics::new().unwrap().text().unwrap();
        let helps = text.lines().filter_map(|line| line.strip_prefix("# HELP "));
        let mut have: Vec<_> = helps.filter_map(|line| line.split_once(' ')).collect();
        have.sort_unstable();
        let document = include_str!("../../docs/metrics.md");
        let rows = document.lines().filter(|line| line.starts_with("| `weightrefit_operator_"));
        let cells = |row: &'static str| row.trim_matches('|').split('|').map(str::trim).collect::<Vec<_>>();
        let rows: Vec<_> = rows.map(cells).collect();
        let want: Vec<_> = rows.iter().map(|row| (row[0].trim_matches('`'), row[3])).collect();
        assert_eq!(have, want, "docs/metrics.md lists other metrics than the operator has");
    }
}
