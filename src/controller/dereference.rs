//! First step: what the resource names, fetched. Only ConfigMaps of its own namespace, by name.

use super::reason::AcceptedReason;
use super::validate::Rejection;
use crate::api::documents::Documents;
use crate::api::refit::{WeightRefit, WeightRefitSpec};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client, ResourceExt};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The resource and what it names: proof for [`super::validate::validate`] that nothing else must be read.
#[derive(Debug)]
pub struct Dereferenced {
    pub(super) refit: Arc<WeightRefit>,
    pub(super) documents: Documents,
}

/// Why a resource's names lead nowhere.
#[derive(Debug)]
pub enum DereferenceError {
    /// A person must act.
    Rejected(Rejection),
    /// The API server did not answer; it is asked again.
    Unreadable {
        /// The ConfigMap.
        name: String,
        /// Why.
        source: Box<kube::Error>,
    },
}

/// Fetches what `refit` names.
///
/// # Errors
/// A ConfigMap is not there, or cannot be read.
pub async fn dereference(client: &Client, refit: Arc<WeightRefit>) -> Result<Dereferenced, DereferenceError> {
    let namespace = refit.namespace().unwrap_or_default();
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), &namespace);
    let mut maps = Vec::new();
    for name in named(&refit.spec) {
        let unreadable =
            |source| DereferenceError::Unreadable { name: name.to_owned(), source: Box::new(source) };
        match api.get_opt(name).await.map_err(unreadable)? {
            Some(map) => maps.push(map),
            None => {
                let message = format!(
                    "ConfigMap {namespace}/{name} does not exist; no round begins before it does. \
                     Next: kubectl create configmap -n {namespace} {name} --from-file=KEY=FILE"
                );
                return Err(DereferenceError::Rejected(Rejection::new(AcceptedReason::NoConfigMap, message)));
            }
        }
    }
    Ok(Dereferenced { refit, documents: Documents::fetched(maps) })
}

/// Names of the ConfigMaps that a resource names, each once.
pub fn named(spec: &WeightRefitSpec) -> BTreeSet<&str> {
    let model = &spec.model;
    let model = [&model.hugging_face_config, &model.tensor_table].into_iter().flatten();
    let layouts =
        std::iter::once(&spec.training.layout).chain(spec.inference.pools.iter().map(|pool| &pool.layout));
    let layouts = layouts.filter_map(|layout| layout.config_map.as_ref()).map(|key| key.name.as_str());
    model.map(|source| source.config_map_key_ref.name.as_str()).chain(layouts).collect()
}
