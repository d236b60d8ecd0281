//! Enrolment: a token buys a certificate for our key; renewal at a third of its life.

use super::{Identity, IdentityError};
use crate::{dial, limits};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tonic::transport::Channel;
use weightrefit_proto::v1;
use weightrefit_proto::v1::coordinator_client::CoordinatorClient;
use x509_parser::prelude::{FromDer, X509Certificate};

/// Where the enrolment token comes from.
pub enum Token {
    /// A projected volume; reread each time, since the kubelet rotates it.
    File(PathBuf),
    /// Read once, from an inherited descriptor.
    Given(String),
}

/// Where the authorities for the coordinator's certificate come from.
pub enum TrustBundle {
    /// A projected volume; reread each time, since authorities rotate.
    File(PathBuf),
    /// PEM, read once from an inherited descriptor.
    Given(Vec<u8>),
}

/// What the agent needs to enrol, and to dial the coordinator afterwards.
pub struct Enrolment {
    /// `host:port` of the coordinator.
    pub coordinator: String,
    /// Name that its certificate must carry.
    pub name: ServerName<'static>,
    /// Authorities.
    pub trust: TrustBundle,
    /// Token.
    pub token: Token,
    /// UID of this pod.
    pub pod_uid: String,
}

/// Enrolment did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum EnrolError {
    /// A file named by a flag.
    #[error("cannot read the {what} at {path}: {source}")]
    Read {
        /// Token or trust bundle.
        what: &'static str,
        /// Where.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// The trust bundle.
    #[error("trust bundle holds no usable certificate: {0}")]
    TrustBundle(String),
    /// Our side of TLS.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// No connection.
    #[error("cannot connect to the coordinator at {address}: {source}")]
    Connect {
        /// Where.
        address: String,
        /// Why.
        source: tonic::transport::Error,
    },
    /// The coordinator's answer.
    #[error("coordinator refused the enrolment: {}", .0.message())]
    Refused(#[from] Box<tonic::Status>),
    /// The certificate is not for us.
    #[error("coordinator returned a certificate that {0}")]
    Certificate(&'static str),
}

impl Enrolment {
    /// A channel to the coordinator that shows our present certificate.
    pub async fn dial(&self, identity: &Identity) -> Result<Channel, EnrolError> {
        let config = Arc::new(identity.coordinator_config(self.roots()?)?);
        dial::connect(&self.coordinator, self.name.clone(), config)
            .await
            .map_err(|source| EnrolError::Connect { address: self.coordinator.clone(), source })
    }

    /// Enrols and adopts the certificate. Returns how long to wait before renewal.
    pub async fn enrol(&self, identity: &Identity) -> Result<Duration, EnrolError> {
        let channel = self.dial(identity).await?;
        let request = v1::EnrolRequest {
            token: self.token()?,
            csr_der: identity.request_der()?,
            pod_uid: self.pod_uid.clone(),
        };
        let mut client =
            CoordinatorClient::new(channel).max_decoding_message_size(limits::ENROL_RESPONSE_BYTES_MAX);
        let response = client.enrol(request).await.map_err(Box::new)?.into_inner();
        let chain: Vec<_> = response.certificate_chain_der.into_iter().map(CertificateDer::from).collect();
        let renew_after = check(identity, chain.first())?;
        identity.adopt(chain)?;
        Ok(renew_after)
    }

    fn roots(&self) -> Result<RootCertStore, EnrolError> {
        let pem = match &self.trust {
            TrustBundle::Given(pem) => pem.clone(),
            TrustBundle::File(path) => read_bounded("trust bundle", path, limits::TRUST_BUNDLE_BYTES_MAX)?,
        };
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&pem) {
            let certificate = certificate.map_err(|error| EnrolError::TrustBundle(error.to_string()))?;
            roots.add(certificate).map_err(|error| EnrolError::TrustBundle(error.to_string()))?;
        }
        match roots.is_empty() {
            true => Err(EnrolError::TrustBundle("no PEM certificate in it".to_owned())),
            false => Ok(roots),
        }
    }

    fn token(&self) -> Result<String, EnrolError> {
        let path = match &self.token {
            Token::Given(token) => return Ok(token.clone()),
            Token::File(path) => path,
        };
        let bytes = read_bounded("token", path, limits::TOKEN_BYTES_MAX)?;
        let text = String::from_utf8(bytes).map_err(|_| EnrolError::Read {
            what: "token",
            path: path.display().to_string(),
            source: std::io::Error::other("not UTF-8"),
        })?;
        Ok(text.trim().to_owned())
    }
}

/// Reads a small file whole.
pub(crate) fn read_bounded(
    what: &'static str,
    path: &PathBuf,
    bytes_max: u64,
) -> Result<Vec<u8>, EnrolError> {
    let failed = |source| EnrolError::Read { what, path: path.display().to_string(), source };
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    file.take(bytes_max + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > bytes_max {
        return Err(failed(std::io::Error::other(format!("longer than {bytes_max} bytes"))));
    }
    Ok(bytes)
}

/// The leaf must carry our key; renewal is due after a third of what is left of its life.
fn check(identity: &Identity, leaf: Option<&CertificateDer<'_>>) -> Result<Duration, EnrolError> {
    let leaf = leaf.ok_or(EnrolError::Certificate("is missing"))?;
    let key = super::key_of(leaf).map_err(|_| EnrolError::Certificate("is malformed"))?;
    if key != identity.key_hash() {
        return Err(EnrolError::Certificate("carries another key than the one requested"));
    }
    let (_, parsed) = X509Certificate::from_der(leaf).map_err(|_| EnrolError::Certificate("is malformed"))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let end = u64::try_from(parsed.validity().not_after.timestamp()).unwrap_or(0);
    let left = end.checked_sub(now).ok_or(EnrolError::Certificate("has expired already"))?;
    Ok(Duration::from_secs(left / 3).max(limits::RENEWAL_INTERVAL_MIN))
}

impl EnrolError {
    /// Whether trying again cannot help: the coordinator has looked at the token and said no, or what was given
    /// to this process once is no good.
    #[must_use]
    pub fn is_final(&self) -> bool {
        match self {
            Self::Refused(status) => {
                matches!(status.code(), tonic::Code::Unauthenticated | tonic::Code::PermissionDenied)
            }
            Self::TrustBundle(_) | Self::Read { .. } | Self::Connect { .. } => false,
            Self::Identity(_) | Self::Certificate(_) => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, date_time_ymd};

    #[test]
    fn only_a_certificate_that_lasts_and_carries_our_key_is_taken() {
        let identity = Identity::generate("pod").expect("a key");
        let other = Identity::generate("pod").expect("a key");
        let until = |identity: &Identity, year| {
            let mut params = CertificateParams::default();
            params.not_before = date_time_ymd(2020, 1, 1);
            params.not_after = date_time_ymd(year, 1, 1);
            params.self_signed(&identity.key).expect("a certificate").der().clone()
        };
        let rows = [
            (Some(until(&other, 4000)), "carries another key than the one requested"),
            (Some(until(&identity, 2021)), "has expired already"),
            (Some(CertificateDer::from(vec![0x30, 0])), "is malformed"),
            (None, "is missing"),
        ];
        for (leaf, want) in rows {
            let error = check(&identity, leaf.as_ref()).expect_err(want);
            assert!(error.is_final() && error.to_string().ends_with(want), "{error}");
        }
        let third = check(&identity, Some(&until(&identity, 4000))).expect("is good");
        let century = Duration::from_secs(100 * 365 * 24 * 3600);
        assert!(third > 6 * century && third < 7 * century, "{third:?}");
    }

    #[test]
    fn files_are_read_up_to_their_bound() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("token");
        std::fs::write(&path, [b'x'; 17]).expect("a file");
        assert_eq!(read_bounded("token", &path, 17).expect("fits").len(), 17);
        let error = read_bounded("token", &path, 16).expect_err("is refused");
        assert!(error.to_string().ends_with("longer than 16 bytes"), "{error}");
        assert!(!error.is_final(), "the file may be mended");
        assert!(read_bounded("token", &directory.path().join("none"), 16).is_err());
    }
}
