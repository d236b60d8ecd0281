//! Verifiers that look at the key and at nothing else of a certificate.

use super::sha256;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature,
};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};
use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError, RwLock};
use weightrefit_core::id::Sha256;

/// Keys that may connect: those of the accepted membership. Empty before the first one.
#[derive(Debug, Clone, Default)]
pub struct Pins(Arc<RwLock<BTreeSet<Sha256>>>);

impl Pins {
    /// From now on these keys and no others.
    pub fn replace(&self, keys: BTreeSet<Sha256>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = keys;
    }

    /// Whether the key belongs to the accepted membership.
    #[must_use]
    pub fn contains(&self, key: Sha256) -> bool {
        self.0.read().unwrap_or_else(PoisonError::into_inner).contains(&key)
    }
}

/// Hash of the public key in a certificate.
pub fn key_of(certificate: &CertificateDer<'_>) -> Result<Sha256, Error> {
    Ok(sha256(&ParsedCertificate::try_from(certificate)?.subject_public_key_info()))
}

/// A server verifier for clients that must prove a key of [`Pins`].
#[derive(Debug)]
pub(super) struct PinnedClients {
    pins: Pins,
    algorithms: WebPkiSupportedAlgorithms,
}

impl PinnedClients {
    pub(super) fn new(pins: Pins, provider: &CryptoProvider) -> Self {
        Self { pins, algorithms: provider.signature_verification_algorithms }
    }
}

impl ClientCertVerifier for PinnedClients {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        match self.pins.contains(key_of(end_entity)?) {
            true => Ok(ClientCertVerified::assertion()),
            false => Err(CertificateError::ApplicationVerificationFailure.into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signed, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

/// A client verifier for the one server that holds this key.
#[derive(Debug)]
pub(super) struct PinnedServer {
    key: Sha256,
    algorithms: WebPkiSupportedAlgorithms,
}

impl PinnedServer {
    pub(super) fn new(key: Sha256, provider: &CryptoProvider) -> Self {
        Self { key, algorithms: provider.signature_verification_algorithms }
    }
}

impl ServerCertVerifier for PinnedServer {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match key_of(end_entity)? == self.key {
            true => Ok(ServerCertVerified::assertion()),
            false => Err(CertificateError::ApplicationVerificationFailure.into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signed, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Identity;
    use rustls::{ClientConnection, ServerConnection};
    use std::collections::BTreeSet;
    use std::sync::Arc;
    use weightrefit_core::id::Sha256;

    /// Runs a handshake between two agents in memory and says which side refused.
    fn handshake(client: &Identity, server: &Identity, expected: Sha256) -> Result<(), &'static str> {
        let client_config = client.client_config(expected).expect("client settings");
        let server_config = server.server_config().expect("server settings");
        let name = "peer.invalid".try_into().expect("a name");
        let mut a = ClientConnection::new(Arc::new(client_config), name).expect("client");
        let mut b = ServerConnection::new(Arc::new(server_config)).expect("server");
        for _ in 0..6 {
            let mut wire = Vec::new();
            a.write_tls(&mut wire).expect("memory");
            b.read_tls(&mut wire.as_slice()).expect("memory");
            b.process_new_packets().map_err(|_| "server")?;
            let mut wire = Vec::new();
            b.write_tls(&mut wire).expect("memory");
            a.read_tls(&mut wire.as_slice()).expect("memory");
            a.process_new_packets().map_err(|_| "client")?;
        }
        assert!(!a.is_handshaking() && !b.is_handshaking());
        Ok(())
    }

    #[test]
    fn only_pinned_keys_meet() {
        let (a, b, c) = (
            Identity::generate("a").expect("a"),
            Identity::generate("b").expect("b"),
            Identity::generate("c").expect("c"),
        );
        b.pins().replace(BTreeSet::from([a.key_hash()]));
        assert_eq!(handshake(&a, &b, b.key_hash()), Ok(()));
        assert_eq!(handshake(&c, &b, b.key_hash()), Err("server"), "c is no member");
        assert_eq!(handshake(&a, &b, c.key_hash()), Err("client"), "b is not c");
        b.pins().replace(BTreeSet::new());
        assert_eq!(handshake(&a, &b, b.key_hash()), Err("server"), "no membership, no peers");
    }

    #[test]
    fn a_certificate_without_its_key_opens_nothing() {
        let (a, b, thief) = (
            Identity::generate("a").expect("a"),
            Identity::generate("b").expect("b"),
            Identity::generate("t").expect("t"),
        );
        b.pins().replace(BTreeSet::from([a.key_hash()]));
        thief.adopt(a.certificate.now().cert.clone()).expect("a chain");
        assert_eq!(handshake(&thief, &b, b.key_hash()), Err("server"));
    }
}
