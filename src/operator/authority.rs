//! The cluster's authorities as this process knows them: read from their Secret, watched, and followed by the next in
//! time. All replicas do the same.
//!
//! Invariants:
//! - K1: who is trusted follows from the dates, whether or not the Secret can be reached or read.
//! - K2: somebody who keeps undoing what is written here meets the same successor again, and not often.

use super::telemetry::{Health, Metrics};
use crate::controller::watch::watch;
use crate::identity::{CA_SECRET, Kept, KeptError, Succession, Trust, load_or_create};
use crate::limits;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::runtime::watcher::{Config, Event};
use std::pin::pin;
use std::time::SystemTime;
use tokio::sync::watch::{Receiver, Sender, channel};
use tokio::time::{Instant, sleep};
use tokio_stream::StreamExt;

/// The Secret's authorities, however long the API server takes to answer: `/readyz` says what is waited for. They are
/// kept up to date from then on. `everywhere` has the certificates that every namespace with pods of refits has, PEM; the
/// process that leads knows.
///
/// # Errors
/// The Secret holds something else.
pub(super) async fn start(
    api: Api<Secret>,
    health: &Health,
    metrics: &Metrics,
    everywhere: Receiver<String>,
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
    let keeper = Keeper {
        api,
        kept,
        secret: Present::Read,
        made: None,
        written: None,
        everywhere,
        trust,
        metrics: metrics.clone(),
    };
    tokio::spawn(keeper.keep());
    Ok(receiver)
}

struct Keeper {
    api: Api<Secret>,
    kept: Kept,
    secret: Present,
    /// The successor that was made last, with its predecessor (K2).
    made: Option<Succession>,
    /// What was written last, and when (K2).
    written: Option<(Succession, Instant)>,
    /// What every namespace has, PEM.
    everywhere: Receiver<String>,
    trust: Sender<Trust>,
    metrics: Metrics,
}

/// How the Secret is now.
enum Present {
    Read,
    Gone,
    Broken(KeptError),
}

impl Keeper {
    /// Never ends: what is kept here outlives a Secret that is broken or cannot be reached.
    async fn keep(mut self) {
        let only = Config::default().fields(&format!("metadata.name={CA_SECRET}"));
        let mut events = pin!(watch(self.api.clone(), only, &self.metrics.watch_failures));
        loop {
            self.tell();
            let again = match self.advance().await {
                Ok(()) => limits::AUTHORITY_INTERVAL,
                Err(error) if error.is_overtaken() => limits::AUTHORITY_INTERVAL, // the watch tells
                Err(error) => {
                    tracing::warn!(%error, "the authority's Secret is not as it must be; tried again");
                    limits::RECONCILE_RETRY
                }
            };
            self.tell();
            tokio::select! {
                event = events.next() => match event {
                    Some(Event::InitApply(secret) | Event::Apply(secret)) => self.adopt(&secret),
                    // Of a list, the Secret is told next where it is there.
                    Some(Event::Init | Event::Delete(_)) => self.secret = Present::Gone,
                    Some(Event::InitDone) => {}
                    None => return,
                },
                Ok(()) = self.everywhere.changed() => {}
                () = sleep(again) => {}
            }
        }
    }

    /// Takes over what the Secret has now.
    fn adopt(&mut self, secret: &Secret) {
        self.secret = match Kept::read(secret) {
            Ok(kept) => {
                self.kept = kept;
                Present::Read
            }
            Err(error) => Present::Broken(error),
        };
    }

    /// What the Secret keeps, or what it kept until somebody took the successor out (K2).
    fn effective(&self) -> &Succession {
        let kept = &self.kept.succession;
        self.made.as_ref().filter(|made| made.continues(kept)).unwrap_or(kept)
    }

    /// Says what holds now (K1).
    fn tell(&self) {
        let (succession, now) = (self.effective(), SystemTime::now());
        let next = succession.at(now);
        self.metrics.certificates.holds("authority", next.signer().certificate());
        let is_other = self.trust.send_if_modified(|present| {
            let is_other = *present != next;
            *present = next;
            is_other
        });
        if is_other && succession.is_forced(now) {
            tracing::error!(
                "the authority has ended, so its successor signs, though namespaces lack its certificate: \
                 their pods cannot enrol before they have it"
            );
        }
    }

    /// Writes down what must follow.
    async fn advance(&mut self) -> Result<(), KeptError> {
        match &self.secret {
            Present::Read => {}
            Present::Gone => {
                self.kept = load_or_create(&self.api).await?;
                self.secret = Present::Read;
            }
            Present::Broken(error) => {
                tracing::error!(%error, "the authority known so far is used on");
                return Ok(());
            }
        }
        let (kept, now) = (&self.kept.succession, SystemTime::now());
        let is_everywhere = *self.everywhere.borrow_and_update() == kept.at(now).bundle_pem();
        let due = match kept.due(now, self.made.as_ref())? {
            None if is_everywhere => kept.announced(now),
            due => due,
        };
        let Some(due) = due else { return Ok(()) };
        if let Some((_, at)) = self.written.as_ref().filter(|(written, _)| *written == due) {
            if at.elapsed() < limits::AUTHORITY_INTERVAL {
                return Ok(());
            }
            tracing::warn!("somebody undoes what is written to secret {CA_SECRET}; it is written again");
        }
        self.kept = self.kept.replace(&self.api, &due).await?;
        self.written = Some((due.clone(), Instant::now()));
        if due.has_successor() {
            self.made = Some(due);
        }
        tracing::info!("the certificate authority's succession went on");
        Ok(())
    }
}
