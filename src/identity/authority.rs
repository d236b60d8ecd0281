//! Certificate authority: in memory as long as its coordinator lives, and as PEM where it must outlive it.

use base64::Engine;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PublicKeyData, SanType,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateSigningRequestDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};
use x509_parser::time::ASN1Time;

/// Name in the coordinator's own certificate; agents ask for it whatever address they dial.
pub const SERVER_NAME: &str = "coordinator.weightrefit.dev";

/// Scheme and authority of the URI that names a pod in its certificate.
const POD_URI: &str = "weightrefit://pod/";

/// How long an agent's certificate lasts. It is renewed at a third, so two renewals may fail.
pub(super) const LEAF_LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);

/// How long an authority lasts. One that is kept has a successor at two thirds; one in memory outlives its process.
const AUTHORITY_LIFETIME: Duration = Duration::from_secs(2 * 365 * 24 * 60 * 60);

/// Clocks of pods may be behind by this much.
pub(super) const CLOCK_SKEW: Duration = Duration::from_secs(5 * 60);

/// Longest pod UID: Kubernetes' are 36 characters, those of a local run name a side and an ordinal.
const POD_UID_BYTES_MAX: usize = 128;

/// Longest request: a key of a curve and a signature take some 200 bytes.
const REQUEST_BYTES_MAX: usize = 4096;

/// Why a certificate was not made or not accepted.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The signing request is malformed or its signature does not prove possession of its key.
    #[error("certificate request of {bytes} bytes is refused: {reason}")]
    Request {
        /// Length of the request.
        bytes: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// Not a pod UID that can stand in a URI.
    #[error("pod uid `{0}` is not 1 to {POD_UID_BYTES_MAX} letters, digits, `-`, `_` and `.`")]
    PodUid(String),
    /// The certificate names no pod.
    #[error("certificate names no pod")]
    NoPod,
    /// What was kept cannot be used any more.
    #[error("kept authority cannot be used: {0}")]
    Kept(String),
    /// Key generation or signing failed.
    #[error("cannot make a certificate: {0}")]
    Signing(#[from] rcgen::Error),
}

/// Signs agents' keys and the coordinator's own.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: CertificateDer<'static>,
    since: SystemTime,
    until: SystemTime,
}

/// Certificate and key of the coordinator.
pub struct ServerIdentity {
    /// Leaf first.
    pub chain: Vec<CertificateDer<'static>>,
    /// Its private key.
    pub key: PrivateKeyDer<'static>,
}

impl Authority {
    /// A new authority with a key of its own.
    pub fn generate() -> Result<Self, IdentityError> {
        let now = SystemTime::now();
        Self::made(now, now + AUTHORITY_LIFETIME)
    }

    fn made(since: SystemTime, until: SystemTime) -> Result<Self, IdentityError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = name("weightrefit");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        (params.not_before, params.not_after) = ((since - CLOCK_SKEW).into(), until.into());
        let key = KeyPair::generate()?;
        let certificate = params.self_signed(&key)?.der().clone();
        let (since, until) = validity(&certificate)?;
        Ok(Self { issuer: Issuer::new(params, key), certificate, since, until })
    }

    /// The authority that [`Self::certificate_pem`] and its key, as PEM, were written of.
    ///
    /// # Errors
    /// The texts are not a certificate of an authority and its key. One that has expired is none of these.
    pub fn from_pem(certificate: &str, key: &str) -> Result<Self, IdentityError> {
        // The parser's errors could hold pieces of the key.
        let key = KeyPair::from_pem(key).map_err(|_| kept("its key is not a private key in PEM"))?;
        let certificate = CertificateDer::from_pem_slice(certificate.as_bytes())
            .map_err(|_| kept("its certificate is not in PEM"))?;
        let (_, parsed) =
            X509Certificate::from_der(&certificate).map_err(|_| kept("its certificate is malformed"))?;
        if !parsed.is_ca() {
            return Err(kept("its certificate is not an authority's"));
        }
        if parsed.public_key().raw != key.subject_public_key_info() {
            return Err(kept("certificate and key do not belong together"));
        }
        let (since, until) = validity(&certificate)?;
        let issuer = Issuer::from_ca_cert_der(&certificate, key)?;
        Ok(Self { issuer, certificate, since, until })
    }

    /// When it was made. Its certificate is valid from a little earlier.
    pub(super) fn since(&self) -> SystemTime {
        self.since
    }

    /// When its certificate ends.
    pub(super) fn until(&self) -> SystemTime {
        self.until
    }

    /// The certificate that agents and the coordinator trust, DER.
    #[must_use]
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// The same as PEM, for the file that agents are given.
    #[must_use]
    pub fn certificate_pem(&self) -> String {
        let base64 = base64::prelude::BASE64_STANDARD.encode(&self.certificate);
        let lines = base64.as_bytes().chunks(64).map(String::from_utf8_lossy).collect::<Vec<_>>().join("\n");
        format!("-----BEGIN CERTIFICATE-----\n{lines}\n-----END CERTIFICATE-----\n")
    }

    /// The private key as PEM. For the place that keeps it, and for no log.
    #[must_use]
    pub(super) fn key_pem(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// A certificate for the coordinator, valid for [`SERVER_NAME`] as long as the authority is.
    pub fn server(&self) -> Result<ServerIdentity, IdentityError> {
        let lifetime = self.until.duration_since(SystemTime::now()).unwrap_or_default();
        self.serving(&[SERVER_NAME.to_owned()], lifetime)
    }

    /// A certificate for a server of this process that is dialled at these names and addresses.
    pub fn serving(&self, hosts: &[String], lifetime: Duration) -> Result<ServerIdentity, IdentityError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(hosts)?;
        params.distinguished_name = name(hosts.first().map_or("weightrefit", String::as_str));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        valid_for(&mut params, lifetime);
        let leaf = params.signed_by(&key, &self.issuer)?;
        let key = PrivatePkcs8KeyDer::from(key.serialize_der());
        Ok(ServerIdentity { chain: vec![leaf.der().clone(), self.certificate().clone()], key: key.into() })
    }

    /// Signs the key of a request for one pod, for 24 hours. The request's own signature must prove possession of
    /// its key; names and usages that it asks for are ignored. Leaf first.
    pub fn sign(&self, request: &[u8], pod_uid: &str) -> Result<Vec<CertificateDer<'static>>, IdentityError> {
        check_pod_uid(pod_uid)?;
        let refused = |reason: String| IdentityError::Request { bytes: request.len(), reason };
        if request.len() > REQUEST_BYTES_MAX {
            return Err(refused(format!("longer than the {REQUEST_BYTES_MAX} bytes allowed")));
        }
        let parsed = CertificateSigningRequestParams::from_der(&CertificateSigningRequestDer::from(request))
            .map_err(|error| refused(error.to_string()))?;
        let mut params = CertificateParams::default();
        params.distinguished_name = name(pod_uid);
        params.subject_alt_names = vec![SanType::URI(format!("{POD_URI}{pod_uid}").try_into()?)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        valid_for(&mut params, LEAF_LIFETIME);
        let leaf = params.signed_by(&parsed.public_key, &self.issuer)?;
        Ok(vec![leaf.der().clone(), self.certificate().clone()])
    }
}

/// The pod UID that a certificate names, which the caller has already checked against its authority.
pub fn pod_of_certificate(der: &[u8]) -> Result<String, IdentityError> {
    let (_, certificate) = X509Certificate::from_der(der).map_err(|_| IdentityError::NoPod)?;
    let names = certificate.subject_alternative_name().ok().flatten().ok_or(IdentityError::NoPod)?;
    let uid = match names.value.general_names.as_slice() {
        [GeneralName::URI(uri)] => uri.strip_prefix(POD_URI),
        _ => None,
    };
    let uid = uid.ok_or(IdentityError::NoPod)?;
    check_pod_uid(uid)?;
    Ok(uid.to_owned())
}

/// When the authority of this certificate was made, and when it ends.
fn validity(certificate: &[u8]) -> Result<(SystemTime, SystemTime), IdentityError> {
    let (_, parsed) =
        X509Certificate::from_der(certificate).map_err(|_| kept("its certificate is malformed"))?;
    let time = |time: ASN1Time| {
        let seconds = u64::try_from(time.timestamp()).map_err(|_| kept("its dates are before 1970"))?;
        Ok::<_, IdentityError>(UNIX_EPOCH + Duration::from_secs(seconds))
    };
    let validity = parsed.validity();
    Ok((time(validity.not_before)? + CLOCK_SKEW, time(validity.not_after)?))
}

fn kept(what: &str) -> IdentityError {
    IdentityError::Kept(what.to_owned())
}

fn check_pod_uid(uid: &str) -> Result<(), IdentityError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    if uid.is_empty() || uid.len() > POD_UID_BYTES_MAX || !uid.bytes().all(plain) {
        return Err(IdentityError::PodUid(uid.chars().take(POD_UID_BYTES_MAX).collect()));
    }
    Ok(())
}

fn name(common_name: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common_name);
    name
}

fn valid_for(params: &mut CertificateParams, lifetime: Duration) {
    let now = SystemTime::now();
    params.not_before = (now - CLOCK_SKEW).into();
    params.not_after = (now + lifetime).into();
}

/// An authority of these dates.
#[cfg(test)]
pub(super) fn made_at(since: SystemTime, until: SystemTime) -> Authority {
    Authority::made(since, until).unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(key: &KeyPair) -> Vec<u8> {
        CertificateParams::default().serialize_request(key).unwrap().der().to_vec()
    }

    #[test]
    fn a_signed_certificate_names_the_pod_of_the_token_and_carries_the_requested_key() {
        let authority = Authority::generate().unwrap();
        let key = KeyPair::generate().unwrap();
        let chain = authority.sign(&request(&key), "training-0").unwrap();
        assert_eq!(pod_of_certificate(&chain[0]).unwrap(), "training-0");
        let (_, leaf) = X509Certificate::from_der(&chain[0]).unwrap();
        assert_eq!(leaf.public_key().subject_public_key.data.as_ref(), key.public_key_raw());
        let (_, issuer) = X509Certificate::from_der(authority.certificate()).unwrap();
        leaf.verify_signature(Some(issuer.public_key())).unwrap();
        let lifetime = leaf.validity().not_after.timestamp() - leaf.validity().not_before.timestamp();
        assert_eq!(lifetime as u64, (LEAF_LIFETIME + CLOCK_SKEW).as_secs());
    }

    #[test]
    fn a_request_that_does_not_prove_possession_of_its_key_is_refused() {
        let authority = Authority::generate().unwrap();
        let mut der = request(&KeyPair::generate().unwrap());
        let last = der.len() - 1;
        der[last] ^= 1;
        assert!(matches!(authority.sign(&der, "training-0"), Err(IdentityError::Request { .. })));
        assert!(matches!(
            authority.sign(&[0; 5000], "training-0"),
            Err(IdentityError::Request { bytes: 5000, .. })
        ));
        assert!(matches!(authority.sign(b"", "training-0"), Err(IdentityError::Request { bytes: 0, .. })));
    }

    #[test]
    fn a_pod_uid_that_would_change_the_uri_is_refused() {
        let authority = Authority::generate().unwrap();
        let der = request(&KeyPair::generate().unwrap());
        for uid in ["", "a/b", "a b", "a?b", "å", &"x".repeat(129)] {
            assert!(matches!(authority.sign(&der, uid), Err(IdentityError::PodUid(_))), "{uid}");
        }
    }

    #[test]
    fn a_kept_authority_signs_what_the_old_certificate_proves() {
        let old = Authority::generate().unwrap();
        let new = Authority::from_pem(&old.certificate_pem(), &old.key_pem()).unwrap();
        assert_eq!(new.certificate(), old.certificate());
        let chain = new.sign(&request(&KeyPair::generate().unwrap()), "training-0").unwrap();
        let (_, leaf) = X509Certificate::from_der(&chain[0]).unwrap();
        let (_, issuer) = X509Certificate::from_der(old.certificate()).unwrap();
        leaf.verify_signature(Some(issuer.public_key())).unwrap();
        assert_eq!(leaf.issuer(), issuer.subject());
    }

    #[test]
    fn what_is_not_an_authority_and_its_key_is_not_taken() {
        let (one, other) = (Authority::generate().unwrap(), Authority::generate().unwrap());
        let key = KeyPair::generate().unwrap();
        let leaf = CertificateParams::default().self_signed(&key).unwrap().pem();
        for (certificate, key, want) in [
            ("", one.key_pem(), "not in PEM"),
            (one.certificate_pem().as_str(), String::new(), "not a private key"),
            (one.certificate_pem().as_str(), other.key_pem(), "do not belong together"),
            (leaf.as_str(), key.serialize_pem(), "not an authority's"),
        ] {
            let Err(error) = Authority::from_pem(certificate, &key) else { panic!("{want}: taken") };
            assert!(error.to_string().contains(want), "{error}");
        }
    }

    #[test]
    fn the_coordinators_own_certificate_names_no_pod() {
        let server = Authority::generate().unwrap().server().unwrap();
        assert!(matches!(pod_of_certificate(&server.chain[0]), Err(IdentityError::NoPod)));
        assert!(matches!(pod_of_certificate(b"garbage"), Err(IdentityError::NoPod)));
    }
}
