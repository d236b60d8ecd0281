//! The authority of a cluster: its certificate and key in a Secret beside the operator, and its certificate in a
//! ConfigMap of each namespace that has members.
//!
//! Invariants:
//! - A1: all replicas of an operator use one authority: who loses the race to create it takes the winner's.
//! - A2: the key is in the Secret and in memory, never in a message.

use super::{Authority, IdentityError};
use crate::limits;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use std::collections::BTreeMap;

/// Name of the Secret in the operator's namespace.
pub const CA_SECRET: &str = "weightrefit-ca";
/// Name of the ConfigMap that pods mount.
pub const CA_BUNDLE: &str = "weightrefit-ca-bundle";
/// Key of the certificates in it, PEM.
pub const CA_BUNDLE_KEY: &str = "ca.crt";

/// Keys of a Secret of type `kubernetes.io/tls`.
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";

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
    #[error("secret {secret} has no text under {key}; delete it to have a new authority made")]
    Missing {
        /// namespace/name.
        secret: String,
        /// The key.
        key: &'static str,
    },
    /// What the Secret keeps cannot be used.
    #[error("secret {secret} keeps no authority: {source}; delete it to have a new one made")]
    Unusable {
        /// namespace/name.
        secret: String,
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
}

/// The authority that the Secret `weightrefit-ca` of this namespace keeps; makes it where there is none.
///
/// # Errors
/// The API server refuses, or the Secret holds something else.
pub async fn load_or_create(client: &Client, namespace: &str) -> Result<Authority, KeptError> {
    let api = Api::<Secret>::namespaced(client.clone(), namespace);
    let name = format!("{namespace}/{CA_SECRET}");
    let read = || KeptError::api(format!("read secret {name}"));
    if let Some(secret) = api.get_opt(CA_SECRET).await.map_err(read())? {
        return of_secret(&secret, &name);
    }
    let authority = Authority::generate()?;
    let (parameters, secret) = (PostParams::default(), secret_of(&authority));
    let created = api.create(&parameters, &secret).await;
    match created.map_err(KeptError::api(format!("create secret {name}"))) {
        Ok(_) => {
            tracing::info!(secret = name, "made a certificate authority");
            Ok(authority)
        }
        // A1
        Err(error) if error.is_already_there() => {
            let secret = api.get(CA_SECRET).await.map_err(read())?;
            of_secret(&secret, &name)
        }
        Err(error) => Err(error),
    }
}

/// Writes the authority's certificate to the ConfigMap `weightrefit-ca-bundle` of this namespace, for its pods to
/// mount. Changes nothing where it is there already.
///
/// # Errors
/// The API server refuses.
pub async fn publish_bundle(
    client: &Client,
    namespace: &str,
    authority: &Authority,
) -> Result<(), KeptError> {
    let api = Api::<ConfigMap>::namespaced(client.clone(), namespace);
    let bundle = ConfigMap {
        metadata: ObjectMeta { name: Some(CA_BUNDLE.to_owned()), ..ObjectMeta::default() },
        data: Some(BTreeMap::from([(CA_BUNDLE_KEY.to_owned(), authority.certificate_pem())])),
        ..ConfigMap::default()
    };
    let (parameters, patch) = (PatchParams::apply(limits::FIELD_MANAGER).force(), Patch::Apply(&bundle));
    let what = format!("apply configmap {namespace}/{CA_BUNDLE}");
    api.patch(CA_BUNDLE, &parameters, &patch).await.map(drop).map_err(KeptError::api(what))
}

fn secret_of(authority: &Authority) -> Secret {
    let data = [(CERTIFICATE, authority.certificate_pem()), (KEY, authority.key_pem())];
    let data = data.map(|(key, text)| (key.to_owned(), ByteString(text.into_bytes())));
    Secret {
        metadata: ObjectMeta { name: Some(CA_SECRET.to_owned()), ..ObjectMeta::default() },
        type_: Some("kubernetes.io/tls".to_owned()),
        data: Some(BTreeMap::from(data)),
        ..Secret::default()
    }
}

fn of_secret(secret: &Secret, name: &str) -> Result<Authority, KeptError> {
    let text = |key: &'static str| {
        let bytes = secret.data.as_ref().and_then(|data| data.get(key));
        let text = bytes.and_then(|ByteString(bytes)| std::str::from_utf8(bytes).ok());
        text.ok_or_else(|| KeptError::Missing { secret: name.to_owned(), key })
    };
    Authority::from_pem(text(CERTIFICATE)?, text(KEY)?)
        .map_err(|source| KeptError::Unusable { secret: name.to_owned(), source })
}
