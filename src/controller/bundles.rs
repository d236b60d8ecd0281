//! The authorities' certificates in the namespaces of pods, which mount them.
//!
//! Invariants:
//! - U1: a namespace with a pod of a refit has the certificates of now, or counts as one that lacks them.
//! - U2: the authority's keeper hears that a successor is announced everywhere only while U1 counts none.

use super::ownership::Definition;
use super::pods::Pods;
use super::refits::Refits;
use crate::identity::{CA_BUNDLE, KeptError, Trust, publish_bundle};
use crate::limits;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use prometheus::IntGaugeVec;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch::{Receiver, Sender};
use tokio::time::{Instant, sleep};

/// Gives namespaces the authorities' certificates, and knows which have them.
pub struct Bundles {
    client: Client,
    definition: Arc<Definition>,
    /// What each namespace was given last, PEM, and when.
    given: Mutex<BTreeMap<String, (String, Instant)>>,
}

impl Bundles {
    /// No namespace has anything yet.
    #[must_use]
    pub fn new(client: Client, definition: Arc<Definition>) -> Self {
        Self { client, definition, given: Mutex::default() }
    }

    /// Gives the namespace these certificates, unless it was given them lately: namespaces and ConfigMaps can be deleted.
    ///
    /// # Errors
    /// The API server refuses. The namespace counts as one that has none then.
    pub async fn give(&self, namespace: &str, pem: &str) -> Result<(), KeptError> {
        let is_fresh = |at: &Instant| at.elapsed() < limits::CONSENT_LIFETIME;
        if self.given().get(namespace).is_some_and(|(given, at)| given == pem && is_fresh(at)) {
            return Ok(());
        }
        let published = publish_bundle(&self.client, namespace, pem.to_owned()).await;
        let bundle = published.inspect_err(|_| drop(self.given().remove(namespace)))?;
        self.given().insert(namespace.to_owned(), (pem.to_owned(), Instant::now()));
        if !self.definition.owns(&bundle) {
            let api = Api::<ConfigMap>::namespaced(self.client.clone(), namespace);
            // Pods mount it all the same; it is tried again with the next look.
            if let Err(error) = self.definition.adopt(&api, CA_BUNDLE).await {
                tracing::warn!(%error, namespace, "the authorities' certificates there have no owner");
            }
        }
        Ok(())
    }

    fn has(&self, namespace: &str, pem: &str) -> bool {
        self.given().get(namespace).is_some_and(|(given, _)| given == pem)
    }

    fn given(&self) -> MutexGuard<'_, BTreeMap<String, (String, Instant)>> {
        self.given.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Looks at all namespaces with a pod of a refit for as long as this process leads: `count` has how many of them have the
/// certificates of now and how many lack them, and `everywhere` those that all have, nothing where one lacks them (U2).
pub async fn oversee(
    bundles: Arc<Bundles>,
    pods: Arc<Pods>,
    refits: Refits,
    trust: Receiver<Trust>,
    count: IntGaugeVec,
    everywhere: Sender<String>,
) {
    pods.synced().await;
    if !refits.listed().await {
        return; // nobody watches them any more
    }
    loop {
        let is_refit = |refit: &str| refits.get(refit).is_some();
        let pem = trust.borrow().bundle_pem();
        let (current, lacking): (Vec<_>, Vec<_>) =
            pods.namespaces(is_refit).into_iter().partition(|namespace| bundles.has(namespace, &pem));
        for (state, namespaces) in [("current", &current), ("lacking", &lacking)] {
            let number = i64::try_from(namespaces.len()).unwrap_or(i64::MAX);
            count.with_label_values(&[state]).set(number);
        }
        if let Some(first) = lacking.first() {
            let others = lacking.len() - 1;
            tracing::debug!(namespace = first, others, "it lacks the authorities' certificates");
        }
        let all_have = if lacking.is_empty() { pem } else { String::new() };
        everywhere.send_if_modified(|had| std::mem::replace(had, all_have.clone()) != all_have);
        sleep(limits::BUNDLES_INTERVAL).await;
    }
}
