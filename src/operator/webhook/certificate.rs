//! The webhook's certificate.

use crate::identity::{Authority, IdentityError, Trust};
use crate::limits;
use crate::operator::telemetry::Certificates;
use rustls::crypto::ring::{default_provider, sign::any_ecdsa_type};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use std::sync::{Arc, PoisonError, RwLock};
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_rustls::TlsAcceptor;

/// The present certificate; new connections get a new one as soon as there is one.
#[derive(Debug)]
pub(super) struct Serving {
    hosts: Vec<String>,
    present: RwLock<Arc<CertifiedKey>>,
    /// Where its end is told.
    certificates: Certificates,
}

impl Serving {
    pub(super) fn new(
        authority: &Authority,
        hosts: Vec<String>,
        certificates: Certificates,
    ) -> Result<Self, IdentityError> {
        let first = issue(authority, &hosts)?;
        tell(&certificates, &first);
        Ok(Self { hosts, present: RwLock::new(first), certificates })
    }

    /// For connections of the API server. It shows no certificate: what it sends is no secret and changes nothing.
    pub(super) fn acceptor(self: &Arc<Self>) -> TlsAcceptor {
        let mut config = rustls::ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("the provider has TLS 1.3")
            .with_no_client_auth()
            .with_cert_resolver(Arc::clone(self) as Arc<dyn ResolvesServerCert>);
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Arc::new(config).into()
    }

    /// Replaces the certificate again and again, at a third of its life and when another authority signs.
    pub(super) async fn renew(&self, mut trust: watch::Receiver<Trust>) {
        loop {
            tokio::select! {
                () = sleep(limits::WEBHOOK_CERTIFICATE_LIFETIME / 3) => {}
                Ok(()) = trust.changed() => {}
            }
            let now = trust.borrow_and_update().clone();
            if let Err(error) = self.replace(now.signer()) {
                tracing::error!(%error, "cannot renew the webhook's certificate");
            }
        }
    }

    fn replace(&self, authority: &Authority) -> Result<(), IdentityError> {
        let next = issue(authority, &self.hosts)?;
        tell(&self.certificates, &next);
        *self.present.write().unwrap_or_else(PoisonError::into_inner) = next;
        Ok(())
    }
}

impl ResolvesServerCert for Serving {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.present.read().unwrap_or_else(PoisonError::into_inner)))
    }
}

fn tell(certificates: &Certificates, present: &CertifiedKey) {
    present.cert.first().into_iter().for_each(|leaf| certificates.holds("webhook", leaf));
}

fn issue(authority: &Authority, hosts: &[String]) -> Result<Arc<CertifiedKey>, IdentityError> {
    let identity = authority.serving(hosts, limits::WEBHOOK_CERTIFICATE_LIFETIME)?;
    let key = any_ecdsa_type(&identity.key).expect("the authority draws keys of a curve");
    Ok(Arc::new(CertifiedKey::new(identity.chain, key)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operator::telemetry::Metrics;
    use rustls::pki_types::{CertificateDer, ServerName};
    use rustls::{ClientConfig, RootCertStore};
    use tokio::net::{TcpListener, TcpStream};

    /// The certificate that a client gets that trusts the authority and dials `name`.
    async fn shown(
        serving: &Arc<Serving>,
        authority: &Authority,
        name: &str,
    ) -> Option<CertificateDer<'static>> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let acceptor = serving.acceptor();
        tokio::spawn(async move { acceptor.accept(listener.accept().await.unwrap().0).await });
        let mut roots = RootCertStore::empty();
        roots.add(authority.certificate().clone()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let stream = connector.connect(name, TcpStream::connect(address).await.unwrap()).await.ok()?;
        Some(stream.get_ref().1.peer_certificates()?.first()?.clone().into_owned())
    }

    #[tokio::test]
    async fn the_certificate_is_for_its_hosts_and_is_replaced_without_a_new_listener() {
        let authority = Authority::generate().unwrap();
        let hosts = vec!["weightrefit-operator.weightrefit-system.svc".to_owned(), "127.0.0.1".to_owned()];
        let serving =
            Arc::new(Serving::new(&authority, hosts.clone(), Metrics::new().unwrap().certificates).unwrap());
        let first = shown(&serving, &authority, &hosts[0]).await.expect("trusted");
        assert_eq!(shown(&serving, &authority, &hosts[1]).await.as_ref(), Some(&first));
        assert_eq!(shown(&serving, &authority, "elsewhere.svc").await, None);
        serving.replace(&authority).unwrap();
        let second = shown(&serving, &authority, &hosts[0]).await.expect("trusted");
        assert_ne!(first, second);
        let stranger = Authority::generate().unwrap();
        assert_eq!(shown(&serving, &stranger, &hosts[0]).await, None);
    }
}
