//! What the operator tells of itself: `/metrics`, `/livez` and `/readyz` on one listener.

use crate::controller::figures::Figures;
use crate::coordinator::Refusals;
use crate::injection::InjectError;
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use prometheus::core::Collector;
use prometheus::{
    GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
};
use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;
use x509_parser::prelude::{FromDer, X509Certificate};

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
    /// Walks of the steps from a refit to its status.
    pub reconciles: IntCounterVec,
    /// What is known of each refit.
    pub figures: Figures,
    /// Pods that the webhook was asked about.
    pub webhook_requests: IntCounterVec,
    /// How long its answers took.
    pub webhook_seconds: Histogram,
    /// Connections to it that did not get to a question.
    pub webhook_handshakes_failed: IntCounter,
    /// When certificates end.
    pub certificates: Certificates,
    /// Namespaces with pods of refits, by whether they have the authorities' certificates.
    pub bundles: IntGaugeVec,
}

/// When the certificates that this process holds end, by whose they are.
#[derive(Debug, Clone)]
pub struct Certificates(IntGaugeVec);

impl Certificates {
    /// `whose` certificate is this one, DER, from now on.
    pub fn holds(&self, whose: &str, certificate: &[u8]) {
        // One that cannot be read could not have been made or taken either.
        if let Ok((_, certificate)) = X509Certificate::from_der(certificate) {
            self.0.with_label_values(&[whose]).set(certificate.validity().not_after.timestamp());
        }
    }
}

/// Seconds of an answer of the webhook: from a tenth of a millisecond to what an API server waits for at most.
const WEBHOOK_BUCKETS: &[f64] = &[0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.1, 1.0, 10.0];

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
            reconciles: IntCounterVec::new(
                opts("reconciles_total", "Looks at a refit, by what came of its status."),
                &["outcome"],
            )?,
            figures: Figures::default(),
            webhook_requests: IntCounterVec::new(
                opts("webhook_requests_total", "Questions about pods, by what became of the pod and why."),
                &["outcome", "reason"],
            )?,
            webhook_seconds: Histogram::with_opts(
                HistogramOpts::from(opts("webhook_seconds", "From a question about a pod to its answer."))
                    .buckets(WEBHOOK_BUCKETS.to_vec()),
            )?,
            webhook_handshakes_failed: IntCounter::with_opts(opts(
                "webhook_handshakes_failed_total",
                "Connections to the webhook that failed before any question.",
            ))?,
            certificates: Certificates(IntGaugeVec::new(
                opts("certificate_expiry_timestamp_seconds", "When a certificate ends, in Unix time."),
                &["certificate"],
            )?),
            bundles: IntGaugeVec::new(
                opts(
                    "bundles",
                    "Namespaces with pods of refits: with the authorities' certificates of now, without.",
                ),
                &["state"],
            )?,
        };
        // All fields by name, so that none is forgotten.
        let Self {
            registry,
            leader,
            build_info,
            refusals,
            api_requests,
            watch_failures,
            reconciles,
            figures,
            webhook_requests,
            webhook_seconds,
            webhook_handshakes_failed,
            certificates: Certificates(certificates),
            bundles,
        } = &metrics;
        let all: [Box<dyn Collector>; 12] = [
            Box::new(leader.clone()),
            Box::new(build_info.clone()),
            refusals.collector(),
            Box::new(api_requests.clone()),
            Box::new(watch_failures.clone()),
            Box::new(reconciles.clone()),
            figures.collector(),
            Box::new(webhook_requests.clone()),
            Box::new(webhook_seconds.clone()),
            Box::new(webhook_handshakes_failed.clone()),
            Box::new(certificates.clone()),
            Box::new(bundles.clone()),
        ];
        all.into_iter().try_for_each(|collector| registry.register(collector))?;
        // What counts failures is there, and 0, before anything fails.
        ["429", "500", "503", "failed", "timeout"]
            .iter()
            .for_each(|code| drop(api_requests.with_label_values(&[code])));
        ["configmaps", "pods", "secrets", "weightrefits"]
            .iter()
            .for_each(|resource| drop(watch_failures.with_label_values(&[resource])));
        ["current", "lacking"].iter().for_each(|state| drop(bundles.with_label_values(&[state])));
        ["deferred", "failed", "unchanged", "written"]
            .iter()
            .for_each(|outcome| drop(reconciles.with_label_values(&[outcome])));
        ["injected", "malformed", "untouched"]
            .iter()
            .for_each(|outcome| drop(webhook_requests.with_label_values(&[outcome, ""])));
        InjectError::REASONS
            .iter()
            .for_each(|reason| drop(webhook_requests.with_label_values(&["refused", reason])));
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
    use crate::identity::Authority;
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
        let metrics = Metrics::new().unwrap();
        metrics.certificates.holds("authority", Authority::generate().unwrap().certificate());
        let status = serde_json::from_str(include_str!("../../tests/resource/status.json")).unwrap();
        metrics.figures.tell(("rl", "tiny"), "uid", &status);
        let text = metrics.text().unwrap();
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
