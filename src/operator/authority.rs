//! The cluster's authorities as this process knows them: read from their Secret, watched, and followed by the next in
//! time. All replicas do the same.

use super::telemetry::{Health, Metrics};
use crate::controller::watch::watch;
use crate::identity::{CA_SECRET, Kept, KeptError, Trust, load_or_create};
use crate::limits;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::runtime::watcher::{Config, Event};
use std::pin::pin;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::watch::{Receiver, Sender, channel};
use tokio::time::sleep;
use tokio_stream::StreamExt;

/// The Secret's authorities, however long the API server takes to answer: `/readyz` says what is waited for. They are
/// kept up to date from then on.
///
/// # Errors
/// The Secret holds something else.
pub(super) async fn start(
    api: Api<Secret>,
    health: &Health,
    metrics: &Metrics,
) -> Result<Receiver<Trust>, KeptError> {
    let kept = loop {
        match load_or_create(&api).await {
            Err(error @ KeptError::Api { .. }) => {
                tracing::warn!(%error, "asked again");
                health.set(Some(&error.to_string()));
                sleep(limits::RECONCILE_RETRY).await;
            }
            ended => break ended?,
        }
    };
    let (trust, receiver) = channel(kept.succession.at(SystemTime::now()));
    let keeper = Keeper { api, kept, is_gone: false, trust, metrics: metrics.clone() };
    tokio::spawn(keeper.keep());
    Ok(receiver)
}

struct Keeper {
    api: Api<Secret>,
    kept: Kept,
    /// Whether somebody has deleted the Secret.
    is_gone: bool,
    trust: Sender<Trust>,
    metrics: Metrics,
}

impl Keeper {
    /// Never ends: what is kept here outlives a Secret that is broken or cannot be reached.
    async fn keep(mut self) {
        let only = Config::default().fields(&format!("metadata.name={CA_SECRET}"));
        let mut events = pin!(watch(self.api.clone(), only, &self.metrics.watch_failures));
        loop {
            let again = match self.advance().await {
                Ok(()) => limits::AUTHORITY_INTERVAL,
                Err(error) if error.is_overtaken() => limits::AUTHORITY_INTERVAL, // the watch tells
                Err(error) => {
                    tracing::warn!(%error, "the authority's Secret is not as it must be; tried again");
                    limits::RECONCILE_RETRY
                }
            };
            tokio::select! {
                event = events.next() => match event {
                    Some(Event::InitApply(secret) | Event::Apply(secret)) => self.adopt(&secret),
                    Some(Event::Init | Event::Delete(_)) => self.is_gone = true,
                    Some(Event::InitDone) => {}
                    None => return,
                },
                () = sleep(again) => {}
            }
        }
    }

    /// Takes over what the Secret has now.
    fn adopt(&mut self, secret: &Secret) {
        self.is_gone = false;
        match Kept::read(secret) {
            Ok(kept) => self.kept = kept,
            Err(error) => tracing::error!(%error, "the authority known so far is used on"),
        }
    }

    /// Says what holds now, and writes down what must follow.
    async fn advance(&mut self) -> Result<(), KeptError> {
        if self.is_gone {
            self.kept = load_or_create(&self.api).await?;
            self.is_gone = false;
        }
        let now = SystemTime::now();
        let due = self.kept.succession.due(now)?;
        let written = match due {
            Some(due) => match self.kept.replace(&self.api, &due).await {
                Ok(kept) => {
                    tracing::info!("the certificate authority's succession went on");
                    self.kept = kept;
                    Ok(())
                }
                Err(error) => Err(error),
            },
            None => Ok(()),
        };
        let next = self.kept.succession.at(now);
        let ends = next.signer_ends().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.metrics.authority_expiry.set(ends.as_secs_f64());
        self.trust.send_if_modified(|present| {
            let is_other = *present != next;
            *present = next;
            is_other
        });
        written
    }
}
