//! Tells the API server whom to trust: `caBundle` of the MutatingWebhookConfiguration.

use crate::controller::watch::watch;
use crate::identity::Trust;
use crate::limits;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use kube::api::{Patch, PatchParams};
use kube::runtime::watcher::{Config, Event};
use kube::{Api, Client};
use prometheus::IntCounterVec;
use serde_json::{Value, json};
use std::pin::pin;
use tokio::sync::watch::Receiver;
use tokio::time::{Instant, sleep_until};
use tokio_stream::StreamExt;

/// Writes who is trusted into each webhook of the configuration whenever it has something else there: at the start,
/// after somebody has applied it anew, and when others are trusted. All replicas write the same. `failures` counts
/// those of the watch.
pub(super) async fn keep(
    client: Client,
    configuration: String,
    mut trust: Receiver<Trust>,
    failures: IntCounterVec,
) {
    let api = Api::<MutatingWebhookConfiguration>::all(client);
    let only = Config::default().fields(&format!("metadata.name={configuration}"));
    let mut events = pin!(watch(api.clone(), only, &failures));
    let mut present = None;
    let mut due: Option<Instant> = None;
    loop {
        tokio::select! {
            event = events.next() => match event {
                Some(Event::InitApply(found) | Event::Apply(found)) => present = Some(found),
                Some(Event::Delete(_)) => present = None,
                Some(Event::Init | Event::InitDone) => continue,
                None => return,
            },
            Ok(()) = trust.changed() => {}
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => due = None,
        }
        // Whoever writes something else at once is not answered at once.
        if due.is_some() {
            continue;
        }
        let pem = trust.borrow_and_update().bundle_pem();
        if let Some(patch) = present.as_ref().and_then(|found| correction(found, &pem)) {
            write(&api, &configuration, &patch).await;
            due = Some(Instant::now() + limits::RECONCILE_RETRY);
        }
    }
}

async fn write(api: &Api<MutatingWebhookConfiguration>, name: &str, patch: &Value) {
    match api.patch(name, &PatchParams::default(), &Patch::Strategic(patch)).await {
        Ok(_) => tracing::info!(configuration = name, "told the API server whom to trust"),
        // Deleted meanwhile: the watch tells of the next one.
        Err(kube::Error::Api(status)) if status.is_not_found() => {}
        Err(error) => tracing::warn!(%error, configuration = name, "cannot write caBundle; tried again"),
    }
}

/// What must be merged into the configuration; `None` where nothing must.
fn correction(found: &MutatingWebhookConfiguration, pem: &str) -> Option<Value> {
    let is_wrong = |bundle: Option<&ByteString>| bundle.is_none_or(|bundle| bundle.0 != pem.as_bytes());
    let bundle = BASE64_STANDARD.encode(pem);
    let wrong: Vec<Value> = found
        .webhooks
        .iter()
        .flatten()
        .filter(|webhook| is_wrong(webhook.client_config.ca_bundle.as_ref()))
        .map(|webhook| json!({"name": webhook.name, "clientConfig": {"caBundle": bundle}}))
        .collect();
    (!wrong.is_empty()).then(|| json!({"webhooks": wrong}))
}
