//! A WeightRefit as it stands in a file, before an API server has seen it: the envelope around the specification,
//! read as strictly as `kubectl apply` does with validation.

use crate::api::refit::{API_VERSION, KIND, WeightRefit, WeightRefitSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::BTreeMap;

/// What `kubectl apply` takes; a `status` is read and dropped, as the API server does.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Manifest {
    /// apiVersion: always [`crate::api::refit::API_VERSION`].
    pub api_version: String,
    /// kind: always [`crate::api::refit::KIND`].
    pub kind: String,
    /// metadata: name, namespace, annotations.
    pub metadata: Metadata,
    /// spec: what is wanted.
    pub spec: WeightRefitSpec,
    #[serde(default)]
    status: IgnoredAny,
}

/// The part of Kubernetes' ObjectMeta that is used; keys that only a server writes are read and dropped.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Metadata {
    /// name: of the object, unique in its namespace; a DNS subdomain.
    pub name: String,
    /// namespace: default `default`.
    #[serde(default = "default_namespace")]
    pub namespace: String,
    /// uid: written by the API server, absent offline.
    pub uid: Option<String>,
    /// annotations: free; `weightrefit.dev/local-weights` says where `weightrefit local` gets bytes.
    #[serde(default)]
    pub annotations: BTreeMap<String, String>,
    #[serde(default)]
    labels: IgnoredAny,
    #[serde(default)]
    creation_timestamp: IgnoredAny,
    #[serde(default)]
    deletion_timestamp: IgnoredAny,
    #[serde(default)]
    finalizers: IgnoredAny,
    #[serde(default)]
    generation: IgnoredAny,
    #[serde(default)]
    managed_fields: IgnoredAny,
    #[serde(default)]
    owner_references: IgnoredAny,
    #[serde(default)]
    resource_version: IgnoredAny,
}

impl From<&WeightRefit> for Manifest {
    fn from(refit: &WeightRefit) -> Self {
        Self {
            api_version: API_VERSION.into(),
            kind: KIND.into(),
            metadata: refit.metadata.clone().into(),
            spec: refit.spec.clone(),
            status: IgnoredAny,
        }
    }
}

impl From<ObjectMeta> for Metadata {
    fn from(meta: ObjectMeta) -> Self {
        Self {
            name: meta.name.unwrap_or_default(),
            namespace: meta.namespace.unwrap_or_else(default_namespace),
            uid: meta.uid,
            annotations: meta.annotations.unwrap_or_default(),
            labels: IgnoredAny,
            creation_timestamp: IgnoredAny,
            deletion_timestamp: IgnoredAny,
            finalizers: IgnoredAny,
            generation: IgnoredAny,
            managed_fields: IgnoredAny,
            owner_references: IgnoredAny,
            resource_version: IgnoredAny,
        }
    }
}

fn default_namespace() -> String {
    "default".into()
}
