//! The operator's process: what is watched, served and written, wired together once.
//!
//! Agents are served by every replica; only the one that holds the lease coordinates.

mod authority;
pub mod client;
pub mod lease;
pub mod telemetry;
pub mod webhook;

use crate::controller::bundles::{Bundles, oversee};
use crate::controller::dispatch::dispatch;
use crate::controller::gate::{ClusterGate, DEFAULT_AUDIENCE};
use crate::controller::ownership::Definition;
use crate::controller::pods::Pods;
use crate::controller::refits::Refits;
use crate::controller::relation::Shared;
use crate::controller::scope::Scope;
use crate::coordinator::{Server, TlsError};
use crate::identity::{CA_SECRET, KeptError, secrets};
use crate::limits;
use crate::stop::stop_signal;
use clap::Parser;
use k8s_openapi::api::coordination::v1::Lease;
use kube::config::InferConfigError;
use kube::runtime::events::{Recorder, Reporter};
use kube::{Api, Client, Config};
use lease::{LEASE, Terms};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use telemetry::{Health, Metrics};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::sync::watch::channel;
use tracing_subscriber::EnvFilter;
use webhook::WebhookError;

/// Keeps the weights of inference replicas equal to the trainer's newest published version.
#[derive(Debug, Clone, Parser)]
#[command(name = "weightrefit-operator", version)]
pub struct Args {
    /// Namespace of this operator: its authority's Secret and its lease are there.
    #[arg(long, value_name = "NAMESPACE", default_value = "weightrefit-system")]
    pub namespace: String,
    /// Look at refits and pods of this namespace only; all namespaces by default. Repeat for several: a refit and its pods may
    /// be of different ones.
    #[arg(long = "watch-namespace", value_name = "NAMESPACE")]
    pub watch_namespaces: Vec<String>,
    /// Where agents dial.
    #[arg(long, value_name = "IP:PORT", default_value = "[::]:7443")]
    pub agent_listen: SocketAddr,
    /// Where `/metrics`, `/livez` and `/readyz` are served.
    #[arg(long, value_name = "IP:PORT", default_value = "[::]:8080")]
    pub http_listen: SocketAddr,
    /// Name of this process among the operator's replicas, such as its pod's; random by default.
    #[arg(long, value_name = "NAME")]
    pub identity: Option<String>,
    /// Audience that agents' tokens must have; one of its own for each cluster is safer.
    #[arg(long, value_name = "NAME", default_value = DEFAULT_AUDIENCE)]
    pub audience: String,
    /// The admission webhook.
    #[command(flatten)]
    pub webhook: webhook::Args,
}

/// The operator cannot start, or had to stop.
#[derive(Debug, thiserror::Error)]
pub enum OperatorError {
    /// No API server.
    #[error("cannot find the API server: {0}")]
    Config(#[from] InferConfigError),
    /// Its credentials cannot be used.
    #[error("cannot talk to the API server: {0}")]
    Client(#[from] kube::Error),
    /// No authority.
    #[error(transparent)]
    Authority(#[from] KeptError),
    /// A port that is taken, most often.
    #[error("cannot {action}: {source}")]
    System {
        /// What was tried.
        action: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// No TLS.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The webhook cannot be served.
    #[error(transparent)]
    Webhook(#[from] WebhookError),
    /// Two metrics of one name.
    #[error("cannot register metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// Another process may lead from now on.
    #[error("the lease is lost; another process leads")]
    LeaseLost,
}

/// Runs the operator until it is told to stop; the exit code says whether it was.
#[must_use]
pub fn main() -> ExitCode {
    let args = Args::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().json().with_env_filter(filter).with_writer(std::io::stderr).init();
    exit_on_panic();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, "cannot start the runtime");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(run(args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, "stopped");
            ExitCode::FAILURE
        }
    }
}

/// A task that panicked would leave half an operator behind.
fn exit_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::exit(101);
    }));
}

async fn run(args: Args) -> Result<(), OperatorError> {
    // All fields by name, so that none is forgotten.
    let Args { namespace, watch_namespaces, agent_listen, http_listen, identity, audience, webhook } = args;
    let signals = |source| OperatorError::System { action: "listen for signals".into(), source };
    let stop = stop_signal().map_err(signals)?;
    let (metrics, health) = (Metrics::new()?, Arc::new(Health::starting("the authority is being read")));
    let http = listen(http_listen).await?;
    let http_address = http.local_addr().ok();
    tokio::spawn(telemetry::serve(http, metrics.clone(), Arc::clone(&health)));
    let client = client::client(Config::infer().await?, &metrics)?;
    let mut stop = std::pin::pin!(stop);
    let (everywhere, published) = channel(String::new());
    let trust = tokio::select! {
        trust = authority::start(secrets(&client, &namespace), &health, &metrics, published) => trust?,
        () = &mut stop => return Ok(()),
    };
    health.set(Some("pods are being listed"));
    let webhook = webhook::start(webhook, &audience, &client, trust.clone(), &metrics).await?;
    let scope = Scope::of(watch_namespaces);
    let (refits, parts) = Refits::new(&scope);
    let pods = Arc::new(Pods::new(&client, scope, &metrics.watch_failures));
    let gate = Arc::new(ClusterGate::new(client.clone(), Arc::clone(&pods), refits.clone(), audience));
    let server = Server::start(
        listen(agent_listen).await?,
        trust.clone(),
        Arc::clone(&gate),
        metrics.refusals.clone(),
    )?;
    let (agents, http) = (server.address().to_string(), http_address.map(|address| address.to_string()));
    let webhook = webhook.map(|address| address.to_string());
    tracing::info!(agents, http, webhook, version = env!("CARGO_PKG_VERSION"), "serving");
    let identity = match identity {
        Some(identity) => identity,
        None => random_identity()?,
    };
    let leading = async {
        pods.synced().await;
        health.set(None);
        lease::acquire(client.clone(), &namespace, LEASE, &identity, Terms::default()).await
    };
    let mut held = tokio::select! {
        held = leading => held,
        () = &mut stop => return Ok(()),
    };
    metrics.leader.set(1);
    let definition = Arc::new(Definition::new(client.clone()));
    tokio::spawn(keep_own(client.clone(), Arc::clone(&definition), namespace));
    let bundles = Arc::new(Bundles::new(client.clone(), definition));
    tokio::spawn(oversee(
        Arc::clone(&bundles),
        Arc::clone(&pods),
        refits,
        trust.clone(),
        metrics.bundles.clone(),
        everywhere,
    ));
    let reporter = Reporter { controller: limits::FIELD_MANAGER.into(), instance: Some(identity) };
    let shared = Arc::new(Shared {
        recorder: Recorder::new(client.clone(), reporter),
        client,
        server,
        pods,
        gate,
        trust,
        validations: Semaphore::new(limits::VALIDATIONS_MAX),
        bundles,
        reconciles: metrics.reconciles.clone(),
        watch_failures: metrics.watch_failures.clone(),
        figures: metrics.figures.clone(),
    });
    let refits = dispatch(shared, parts, stop);
    tokio::select! {
        () = refits => {}
        // Nothing more may be written, not even to say goodbye.
        () = held.lost() => return Err(OperatorError::LeaseLost),
    }
    held.release().await;
    tracing::info!("stopped; agents go on");
    Ok(())
}

/// Makes what every operator of this namespace uses the definition's, which may come later than the operator, and keeps it
/// so: what somebody deletes is made anew, by whichever process notices, without an owner.
async fn keep_own(client: Client, definition: Arc<Definition>, namespace: String) {
    let secrets = secrets(&client, &namespace);
    let leases = Api::<Lease>::namespaced(client, &namespace);
    let keep = async || {
        definition.keep(&secrets, CA_SECRET).await?;
        definition.keep(&leases, LEASE).await
    };
    loop {
        let again = match keep().await {
            Ok(()) => limits::OWNERSHIP_INTERVAL,
            Err(error) => {
                tracing::debug!(%error, "the authority's secret and the lease have no owner yet");
                limits::RECONCILE_RETRY
            }
        };
        tokio::time::sleep(again).await;
    }
}

/// Two processes of one name would both take the lease for theirs.
fn random_identity() -> Result<String, OperatorError> {
    let mut bytes = [0; 16];
    let failed = |_| OperatorError::System {
        action: "draw a name for this process".into(),
        source: std::io::Error::other("the system gives no randomness"),
    };
    getrandom::fill(&mut bytes).map_err(failed)?;
    Ok(format!("{:032x}", u128::from_be_bytes(bytes)))
}

async fn listen(address: SocketAddr) -> Result<TcpListener, OperatorError> {
    let failed = |source| OperatorError::System { action: format!("listen on {address}"), source };
    TcpListener::bind(address).await.map_err(failed)
}
