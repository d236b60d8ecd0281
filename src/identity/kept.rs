//! The authorities of a cluster: their certificates and keys in a Secret beside the operator, and their certificates in
//! a ConfigMap of each namespace that has members.
//!
//! Invariants:
//! - A1: all replicas of an operator use the same authorities: who loses the race to write them takes the winner's.
//! - A2: keys are in the Secret and in memory, never in a message.

use super::{Authority, IdentityError, Succession};
use crate::limits;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

/// Name of the Secret in the operator's namespace.
pub const CA_SECRET: &str = "weightrefit-ca";
/// Name of the ConfigMap that pods mount.
pub const CA_BUNDLE: &str = "weightrefit-ca-bundle";
/// Key of the certificates in it, PEM.
pub const CA_BUNDLE_KEY: &str = "ca.crt";

/// Keys of a Secret of type `kubernetes.io/tls`, of the present authority.
const PRESENT: [&str; 2] = ["tls.crt", "tls.key"];
/// Those of its successor, where there is one.
const NEXT: [&str; 2] = ["next.crt", "next.key"];
/// Since when every namespace with pods of refits has the successor's certificate, as RFC 3339 has it.
const ANNOUNCED: &str = "next.announced";

/// The authority can neither be read nor made, or its certificate not published.
#[derive(Debug, thiserror::Error)]
pub enum KeptError {
    /// The API server's answer.
    #[error("cannot {what}: {source}")]
    Api {
        /// What was tried, with the object.
        what: String,
        /// Why it failed.
        source: Box<kube::Error>,
    },
    /// The Secret is there, and is not ours.
    #[error("secret {CA_SECRET} has no text under {key}; delete it to have a new authority made")]
    Missing {
        /// The key.
        key: &'static str,
    },
    /// What the Secret keeps cannot be used.
    #[error("secret {CA_SECRET} keeps no authority under {key}: {source}; delete it to have a new one made")]
    Unusable {
        /// The key.
        key: &'static str,
        /// Why.
        source: IdentityError,
    },
    /// No new one can be made.
    #[error(transparent)]
    Generate(#[from] IdentityError),
}

impl KeptError {
    fn api(what: String) -> impl FnOnce(kube::Error) -> Self {
        |source| Self::Api { what, source: Box::new(source) }
    }

    fn is_already_there(&self) -> bool {
        let Self::Api { source, .. } = self else { return false };
        matches!(source.as_ref(), kube::Error::Api(status) if status.is_already_exists())
    }

    /// Whether somebody else has written the Secret, or deleted it.
    #[must_use]
    pub fn is_overtaken(&self) -> bool {
        let Self::Api { source, .. } = self else { return false };
        matches!(source.as_ref(), kube::Error::Api(status) if status.is_conflict() || status.is_not_found())
    }
}

/// What the Secret of one version keeps.
#[derive(Clone)]
pub struct Kept {
    /// The authorities.
    pub succession: Succession,
    version: Option<String>,
}

/// The Secrets of an operator's namespace.
#[must_use]
pub fn secrets(client: &Client, namespace: &str) -> Api<Secret> {
    Api::namespaced(client.clone(), namespace)
}

/// What the Secret `weightrefit-ca` keeps; makes it where there is none.
///
/// # Errors
/// The API server refuses, or the Secret holds something else.
pub async fn load_or_create(api: &Api<Secret>) -> Result<Kept, KeptError> {
    let read = || KeptError::api(format!("read secret {CA_SECRET}"));
    if let Some(secret) = api.get_opt(CA_SECRET).await.map_err(read())? {
        return Kept::read(&secret);
    }
    let created = api.create(&PostParams::default(), &secret_of(&Succession::begin()?)).await;
    match created.map_err(KeptError::api(format!("create secret {CA_SECRET}"))) {
        Ok(secret) => {
            tracing::info!("made a certificate authority");
            Kept::read(&secret)
        }
        // A1
        Err(error) if error.is_already_there() => Kept::read(&api.get(CA_SECRET).await.map_err(read())?),
        Err(error) => Err(error),
    }
}

impl Kept {
    /// What the Secret keeps.
    ///
    /// # Errors
    /// It holds something else.
    pub fn read(secret: &Secret) -> Result<Self, KeptError> {
        let present = authority_of(secret, PRESENT)?.ok_or(KeptError::Missing { key: PRESENT[0] })?;
        let next = authority_of(secret, NEXT)?;
        let announced = secret.data.as_ref().and_then(|data| data.get(ANNOUNCED)).and_then(time);
        let succession = Succession { present: Arc::new(present), next: next.map(Arc::new), announced };
        Ok(Self { succession, version: secret.metadata.resource_version.clone() })
    }

    /// Writes other authorities in place of these, unless somebody else has written meanwhile (A1).
    ///
    /// # Errors
    /// The API server refuses, or was faster: then the Secret has what must be used.
    pub async fn replace(&self, api: &Api<Secret>, succession: &Succession) -> Result<Self, KeptError> {
        let patch = json!({"metadata": {"resourceVersion": self.version}, "data": data_of(succession)});
        let replaced = api.patch(CA_SECRET, &PatchParams::default(), &Patch::Merge(patch)).await;
        Self::read(&replaced.map_err(KeptError::api(format!("write secret {CA_SECRET}")))?)
    }
}

/// Writes the authorities' certificates to the ConfigMap `weightrefit-ca-bundle` of this namespace, for its pods to
/// mount. Changes nothing where they are there already. Returns it as the API server then has it.
///
/// # Errors
/// The API server refuses.
pub async fn publish_bundle(client: &Client, namespace: &str, pem: String) -> Result<ConfigMap, KeptError> {
    let api = Api::<ConfigMap>::namespaced(client.clone(), namespace);
    let bundle = ConfigMap {
        metadata: ObjectMeta { name: Some(CA_BUNDLE.to_owned()), ..ObjectMeta::default() },
        data: Some(BTreeMap::from([(CA_BUNDLE_KEY.to_owned(), pem)])),
        ..ConfigMap::default()
    };
    let (parameters, patch) = (PatchParams::apply(limits::FIELD_MANAGER).force(), Patch::Apply(&bundle));
    let what = format!("apply configmap {namespace}/{CA_BUNDLE}");
    api.patch(CA_BUNDLE, &parameters, &patch).await.map_err(KeptError::api(what))
}

fn secret_of(succession: &Succession) -> Secret {
    let data = data_of(succession).into_iter().filter_map(|(key, bytes)| Some((key.to_owned(), bytes?)));
    Secret {
        metadata: ObjectMeta { name: Some(CA_SECRET.to_owned()), ..ObjectMeta::default() },
        type_: Some("kubernetes.io/tls".to_owned()),
        data: Some(data.collect()),
        ..Secret::default()
    }
}

/// What each key holds; `None` where it must hold nothing.
fn data_of(
    Succession { present, next, announced }: &Succession,
) -> BTreeMap<&'static str, Option<ByteString>> {
    let pair = |[certificate, key]: [&'static str; 2], authority: Option<&Authority>| {
        let bytes = |text: String| ByteString(text.into_bytes());
        let (pem, key_pem) = (authority.map(Authority::certificate_pem), authority.map(Authority::key_pem));
        [(certificate, pem.map(bytes)), (key, key_pem.map(bytes))]
    };
    let announced = announced.and_then(|time| Timestamp::try_from(time).ok());
    let second = announced.and_then(|time| Timestamp::from_second(time.as_second()).ok());
    let announced = (ANNOUNCED, second.map(|time| ByteString(time.to_string().into_bytes())));
    pair(PRESENT, Some(present)).into_iter().chain(pair(NEXT, next.as_deref())).chain([announced]).collect()
}

/// `None` where it is no time: then it is announced again.
fn time(ByteString(bytes): &ByteString) -> Option<SystemTime> {
    let time: Timestamp = std::str::from_utf8(bytes).ok()?.trim().parse().ok()?;
    Some(time.into())
}

/// The authority under these keys; `None` where neither is there.
fn authority_of(secret: &Secret, keys: [&'static str; 2]) -> Result<Option<Authority>, KeptError> {
    let data = keys.map(|key| secret.data.as_ref().and_then(|data| data.get(key)));
    if data == [None, None] {
        return Ok(None);
    }
    let text = |index: usize| {
        let text = data[index].and_then(|ByteString(bytes)| std::str::from_utf8(bytes).ok());
        text.ok_or(KeptError::Missing { key: keys[index] })
    };
    let authority = Authority::from_pem(text(0)?, text(1)?);
    authority.map(Some).map_err(|source| KeptError::Unusable { key: keys[0], source })
}
