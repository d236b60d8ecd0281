//! Tells the API server whom to trust: `caBundle` of the MutatingWebhookConfiguration.

use crate::limits;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use kube::api::{Patch, PatchParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Client};
use serde_json::{Value, json};
use std::pin::pin;
use tokio::time::{sleep, timeout};
use tokio_stream::StreamExt;

/// Writes `pem` into each webhook of the configuration whenever it has something else there: at the start, and after
/// somebody has applied it anew. All replicas write the same.
pub(super) async fn keep(client: Client, configuration: String, pem: String) {
    let api = Api::<MutatingWebhookConfiguration>::all(client);
    let only = watcher::Config::default().fields(&format!("metadata.name={configuration}"));
    let mut events = pin!(watcher(api.clone(), only).default_backoff().applied_objects());
    while let Some(event) = events.next().await {
        match event {
            Ok(found) => write(&api, &configuration, found, &pem).await,
            Err(error) => tracing::warn!(%error, configuration, "watch of the webhook configuration failed"),
        }
    }
}

async fn write(
    api: &Api<MutatingWebhookConfiguration>,
    name: &str,
    found: MutatingWebhookConfiguration,
    pem: &str,
) {
    let Some(patch) = correction(&found, pem) else { return };
    loop {
        let (parameters, patch) = (PatchParams::default(), Patch::Strategic(&patch));
        match timeout(limits::API_ANSWER_MAX, api.patch(name, &parameters, &patch)).await {
            Ok(Ok(_)) => return tracing::info!(configuration = name, "told the API server whom to trust"),
            // Deleted meanwhile: the watch tells of the next one.
            Ok(Err(kube::Error::Api(status))) if status.is_not_found() => return,
            Ok(Err(error)) => tracing::warn!(%error, configuration = name, "cannot write caBundle"),
            Err(_) => tracing::warn!(configuration = name, "cannot write caBundle: no answer in time"),
        }
        sleep(limits::RECONCILE_RETRY).await;
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
