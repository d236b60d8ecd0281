//! Who this agent is: one key for its whole life, the certificates made for it, and the TLS settings that
//! prove the key to others and theirs to us.
//!
//! Invariants:
//! - K1: the key never leaves the process and never changes; renewal replaces the certificate only.
//! - K2: between agents the key decides, pinned by the membership; issuer and expiry are not looked at, so
//!   rounds outlive the coordinator.
//! - K3: no session is ever resumed: each connection proves possession anew.

mod enrol;
mod pin;

pub(crate) use enrol::read_bounded;
pub use enrol::{EnrolError, Enrolment, Token, TrustBundle};
pub use pin::{Pins, key_of};

use crate::dial;
use pin::{PinnedClients, PinnedServer};
use rcgen::{CertificateParams, DnType, KeyPair, PKCS_ECDSA_P256_SHA256, SanType};
use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use sha2::{Digest, Sha256 as Hasher};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, PoisonError, RwLock};
use weightrefit_core::id::{Incarnation, Sha256};
use x509_parser::prelude::{FromDer, X509Certificate};

/// The key of an agent and its present certificate.
pub struct Identity {
    request: CertificateParams,
    key: KeyPair,
    key_hash: Sha256,
    provider: Arc<CryptoProvider>,
    certificate: Arc<Certificate>,
    pins: Pins,
}

/// A key, certificate or TLS setting could not be made.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// Key or certificate request.
    #[error("cannot make a key and certificate request: {0}")]
    Generate(#[from] rcgen::Error),
    /// TLS library.
    #[error("cannot set up TLS: {0}")]
    Tls(#[from] rustls::Error),
    /// The pod UID cannot stand in a certificate.
    #[error("pod uid `{0}` is not made of letters, digits, `-`, `_` and `.`")]
    PodUid(String),
}

/// An agent cannot be reached.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// Our side of TLS.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The connection, or a key that is not the one of the membership.
    #[error(transparent)]
    Connect(#[from] tonic::transport::Error),
}

impl Identity {
    /// Draws a key (ECDSA P-256) and certifies it by itself; [`Enrolment::enrol`] replaces that certificate.
    pub fn generate(pod_uid: &str) -> Result<Self, IdentityError> {
        let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
        if pod_uid.is_empty() || !pod_uid.bytes().all(plain) {
            return Err(IdentityError::PodUid(pod_uid.chars().take(80).collect()));
        }
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let mut request = CertificateParams::default();
        request.distinguished_name.push(DnType::CommonName, "weightrefit-agent");
        request.subject_alt_names = vec![SanType::URI(format!("weightrefit://pod/{pod_uid}").try_into()?)];
        let own = request.self_signed(&key)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let first = certified(&key, vec![own.der().clone()])?;
        let key_hash = key_of(own.der())?;
        let certificate = Arc::new(Certificate(RwLock::new(first)));
        Ok(Self { request, key, key_hash, provider, certificate, pins: Pins::default() })
    }

    /// SHA-256 of the public key (SubjectPublicKeyInfo, DER): how memberships name this agent.
    #[must_use]
    pub fn key_hash(&self) -> Sha256 {
        self.key_hash
    }

    /// When the certificate that the coordinator gave ends, in Unix time; `None` before the first.
    #[must_use]
    pub fn certificate_end(&self) -> Option<i64> {
        let present = self.certificate.0.read().unwrap_or_else(PoisonError::into_inner);
        // The one that the agent made itself stands alone, without an authority.
        let [leaf, _, ..] = present.cert.as_slice() else { return None };
        let (_, leaf) = X509Certificate::from_der(leaf).ok()?;
        Some(leaf.validity().not_after.timestamp())
    }

    /// Keys of the accepted membership; what [`Identity::server_config`] lets in.
    #[must_use]
    pub fn pins(&self) -> &Pins {
        &self.pins
    }

    /// For the `Round` and byte servers: TLS 1.3, clients must prove a pinned key.
    pub fn server_config(&self) -> Result<ServerConfig, IdentityError> {
        let clients = PinnedClients::new(self.pins.clone(), &self.provider);
        let mut config = ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_client_cert_verifier(Arc::new(clients))
            .with_cert_resolver(Arc::clone(&self.certificate) as Arc<_>);
        config.send_tls13_tickets = 0; // K3
        Ok(config)
    }

    /// To dial the agent that holds the key `peer`, whatever its address, issuer and dates.
    pub fn client_config(&self, peer: Sha256) -> Result<ClientConfig, IdentityError> {
        let mut config = ClientConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(PinnedServer::new(peer, &self.provider)))
            .with_client_cert_resolver(Arc::clone(&self.certificate) as Arc<_>);
        config.resumption = Resumption::disabled(); // K3
        config.enable_sni = false;
        Ok(config)
    }

    /// A gRPC channel to the agent at `address` (`host:port`) that holds the key `peer`.
    ///
    /// # Errors
    /// No connection, or another key.
    pub async fn dial_agent(
        &self,
        address: &str,
        peer: Sha256,
    ) -> Result<tonic::transport::Channel, DialError> {
        let mut config = self.client_config(peer)?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        // The key is what is verified; the name only fills a field.
        let name = ServerName::IpAddress(IpAddr::V4(Ipv4Addr::UNSPECIFIED).into());
        Ok(dial::connect(address, name, Arc::new(config)).await?)
    }

    /// To dial the coordinator: its certificate must chain to `roots` and carry the name dialled.
    pub fn coordinator_config(&self, roots: RootCertStore) -> Result<ClientConfig, IdentityError> {
        let mut config = ClientConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_root_certificates(roots)
            .with_client_cert_resolver(Arc::clone(&self.certificate) as Arc<_>);
        config.resumption = Resumption::disabled();
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(config)
    }

    /// PKCS#10 request for this key, DER.
    fn request_der(&self) -> Result<Vec<u8>, IdentityError> {
        Ok(self.request.serialize_request(&self.key)?.der().to_vec())
    }

    fn adopt(&self, chain: Vec<CertificateDer<'static>>) -> Result<(), IdentityError> {
        let next = certified(&self.key, chain)?;
        *self.certificate.0.write().unwrap_or_else(PoisonError::into_inner) = next;
        Ok(())
    }
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity").field("key_hash", &self.key_hash).finish_non_exhaustive()
    }
}

fn certified(key: &KeyPair, chain: Vec<CertificateDer<'static>>) -> Result<Arc<CertifiedKey>, IdentityError> {
    let der = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let signer = rustls::crypto::ring::sign::any_ecdsa_type(&der)?;
    Ok(Arc::new(CertifiedKey::new(chain, signer)))
}

/// The certificate shown at each handshake; renewal swaps it.
#[derive(Debug)]
struct Certificate(RwLock<Arc<CertifiedKey>>);

impl Certificate {
    fn now(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl rustls::server::ResolvesServerCert for Certificate {
    fn resolve(&self, _: rustls::server::ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.now())
    }
}

impl rustls::client::ResolvesClientCert for Certificate {
    fn resolve(&self, _: &[&[u8]], _: &[rustls::SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.now())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// Draws an incarnation (or instance) from the system's randomness.
pub fn draw_incarnation() -> Result<Incarnation, IdentityError> {
    let mut bytes = [0; 16];
    let random = rustls::crypto::ring::default_provider().secure_random;
    random.fill(&mut bytes).map_err(|_| rustls::Error::FailedToGetRandomBytes)?;
    Ok(Incarnation(u128::from_be_bytes(bytes)))
}

fn sha256(bytes: &[u8]) -> Sha256 {
    Sha256(Hasher::digest(bytes).into())
}
