//! One leader among the operator's replicas, by a `coordination.k8s.io` Lease as client-go's leader election uses it.
//!
//! Invariants:
//! - L1: another's lease is over only when it has not changed for its duration on our own clock: clocks of nodes
//!   need not agree.
//! - L2: who leads has written the lease within `renew_within`, which is shorter than the duration; else it says
//!   that it leads no more, whether or not the API server can be reached. Two never lead at once.
//! - L3: every write names the resourceVersion that was read: of two that try, one succeeds.

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use std::time::Duration;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

/// Name of the operator's Lease.
pub const LEASE: &str = "weightrefit-operator";

/// How long a lease lasts and how often it is written.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    /// Silence after which another may take it, in whole seconds.
    pub duration: Duration,
    /// Silence after which the leader itself gives up; shorter.
    pub renew_within: Duration,
    /// Between attempts, of the leader and of those who wait.
    pub retry: Duration,
}

impl Default for Terms {
    /// Those of client-go: a dead leader is followed within some 17 s, a write every 2 s.
    fn default() -> Self {
        Self {
            duration: Duration::from_secs(15),
            renew_within: Duration::from_secs(10),
            retry: Duration::from_secs(2),
        }
    }
}

/// The lease is ours, until [`Held::lost`].
#[derive(Debug)]
pub struct Held {
    lost: watch::Receiver<bool>,
    release: Option<oneshot::Sender<()>>,
    renewing: JoinHandle<()>,
}

/// A try failed; it is repeated.
#[derive(Debug, thiserror::Error)]
enum TryError {
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error("the API server did not answer in time")]
    Silent,
    #[error("somebody else wrote it at the same time")]
    Raced,
}

/// Waits until the lease of this name is ours. `identity` is different for each process, such as the pod's name and
/// a random part.
pub async fn acquire(client: Client, namespace: &str, name: &str, identity: &str, terms: Terms) -> Held {
    let mut candidate = Candidate {
        api: Api::namespaced(client, namespace),
        name: name.to_owned(),
        identity: identity.to_owned(),
        terms,
        seen: None,
    };
    loop {
        let started = Instant::now();
        match candidate.try_once().await {
            Ok(true) => return candidate.hold(started),
            Ok(false) | Err(TryError::Raced) => {}
            Err(error) => tracing::warn!(%error, lease = name, "cannot ask for the lease"),
        }
        sleep(terms.retry).await;
    }
}

impl Held {
    /// Returns when this process leads no more; it must end then, since another may lead.
    pub async fn lost(&mut self) {
        // The sender says so before it ends.
        let _ = self.lost.wait_for(|lost| *lost).await;
    }

    /// Whether this process leads now.
    #[must_use]
    pub fn leads(&self) -> bool {
        !*self.lost.borrow()
    }

    /// Gives the lease back, so that another need not wait for its end.
    pub async fn release(mut self) {
        if let Some(release) = self.release.take() {
            // It has ended where the lease was lost.
            let _ = release.send(());
        }
        let _ = (&mut self.renewing).await;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.renewing.abort();
    }
}

struct Candidate {
    api: Api<Lease>,
    name: String,
    identity: String,
    terms: Terms,
    /// Version of another's lease, and since when it is that one (L1).
    seen: Option<(String, Instant)>,
}

impl Candidate {
    fn hold(mut self, mut renewed: Instant) -> Held {
        let (publish, lost) = watch::channel(false);
        let (release, mut released) = oneshot::channel();
        tracing::info!(lease = self.name, identity = self.identity, "leading");
        let renewing = tokio::spawn(async move {
            loop {
                let ends = renewed + self.terms.renew_within;
                tokio::select! {
                    asked = &mut released => {
                        if asked.is_ok() {
                            self.release().await;
                        }
                        break;
                    }
                    () = sleep(self.terms.retry) => {}
                    () = tokio::time::sleep_until(ends) => {}
                }
                let started = Instant::now();
                if started >= ends {
                    tracing::error!(lease = self.name, "lease could not be renewed in time");
                    break;
                }
                match tokio::time::timeout_at(ends, self.try_once()).await {
                    Ok(Ok(true)) => renewed = started,
                    Ok(Ok(false)) => {
                        tracing::error!(lease = self.name, "lease was taken by another");
                        break;
                    }
                    Ok(Err(error)) => tracing::warn!(%error, lease = self.name, "cannot renew the lease"),
                    Err(_) => {}
                }
            }
            publish.send_replace(true);
        });
        Held { lost, release: Some(release), renewing }
    }

    /// Whether the lease is ours now; takes or renews it if it can be.
    async fn try_once(&mut self) -> Result<bool, TryError> {
        let Some(lease) = self.answer(self.api.get_opt(&self.name)).await? else {
            let lease = Lease { metadata: self.metadata(), spec: Some(self.spec(None)) };
            return self.write(self.api.create(&PostParams::default(), &lease)).await;
        };
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        if holder != self.identity && !holder.is_empty() && !self.is_over(&lease, &spec) {
            return Ok(false);
        }
        let next = Lease { metadata: lease.metadata, spec: Some(self.spec(Some(spec))) };
        self.write(self.api.replace(&self.name, &PostParams::default(), &next)).await // L3
    }

    /// Lets the next one have it at once.
    async fn release(&self) {
        let released = async {
            let Some(mut lease) = self.answer(self.api.get_opt(&self.name)).await? else { return Ok(false) };
            match &mut lease.spec {
                Some(spec) if spec.holder_identity.as_deref() == Some(&self.identity) => {
                    spec.holder_identity = None;
                }
                _ => return Ok(false),
            }
            self.write(self.api.replace(&self.name, &PostParams::default(), &lease)).await
        };
        let released: Result<bool, TryError> = released.await;
        if let Err(error) = released {
            tracing::warn!(%error, lease = self.name, "cannot release the lease; it ends by itself");
        }
    }

    /// L1.
    fn is_over(&mut self, lease: &Lease, spec: &LeaseSpec) -> bool {
        let version = lease.metadata.resource_version.clone().unwrap_or_default();
        let seconds = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let duration = seconds.map_or(self.terms.duration, Duration::from_secs);
        match &self.seen {
            Some((seen, since)) if *seen == version => since.elapsed() >= duration,
            _ => {
                self.seen = Some((version, Instant::now()));
                false
            }
        }
    }

    fn metadata(&self) -> ObjectMeta {
        ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() }
    }

    fn spec(&self, old: Option<LeaseSpec>) -> LeaseSpec {
        let now = Some(MicroTime(Timestamp::now()));
        let old = old.unwrap_or_default();
        let is_ours = old.holder_identity.as_deref() == Some(&self.identity);
        LeaseSpec {
            acquire_time: if is_ours { old.acquire_time } else { now.clone() },
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(self.terms.duration.as_secs()).ok(),
            lease_transitions: Some(old.lease_transitions.unwrap_or(-1).saturating_add(i32::from(!is_ours))),
            renew_time: now,
            ..LeaseSpec::default()
        }
    }

    /// A third of the time for all: one question that is never answered leaves time for a try that is.
    async fn answer<T>(&self, asked: impl Future<Output = Result<T, kube::Error>>) -> Result<T, TryError> {
        Ok(timeout(self.terms.renew_within / 3, asked).await.map_err(|_| TryError::Silent)??)
    }

    async fn write(&self, asked: impl Future<Output = Result<Lease, kube::Error>>) -> Result<bool, TryError> {
        match self.answer(asked).await {
            Ok(_) => Ok(true),
            Err(TryError::Api(kube::Error::Api(status)))
                if status.is_conflict() || status.is_already_exists() =>
            {
                Err(TryError::Raced)
            }
            Err(error) => Err(error),
        }
    }
}
