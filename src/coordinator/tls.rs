//! The coordinator's listener. Any client may connect and enrol; who shows a certificate of our authority is the
//! pod that it names. Before it has enrolled an agent shows one that it made itself, which names nobody.

use super::refusals::{At, Refusals};
use super::wire::fault;
use crate::identity::{IdentityError, Trust, pod_of_certificate};
use crate::limits;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, RootCertStore, ServerConfig, SignatureScheme};
use sha2::Digest;
use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::Sleep;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;
use weightrefit_core::code::Code;
use weightrefit_core::id::Sha256;
use x509_parser::prelude::{FromDer, X509Certificate};

/// What a client of HTTP/2 sends first (RFC 9113, 3.4).
const GREETING: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The listener cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// No certificate of our own.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The TLS library refuses the settings.
    #[error("cannot set up TLS: {0}")]
    Rustls(#[from] rustls::Error),
    /// The TLS library refuses the authority.
    #[error("cannot trust the own authority: {0}")]
    Verifier(#[from] rustls::server::VerifierBuilderError),
}

/// Who is at the other end of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Peer {
    /// UID of the pod, where its certificate is ours.
    pub(super) pod: Option<String>,
    /// Hash of the public key that the connection proved.
    pub(super) key: Option<Sha256>,
}

/// One accepted connection.
pub(super) struct Connection {
    stream: TlsStream<TcpStream>,
    peer: Peer,
    /// What the peer showed, and whoever is trusted now: a pod is proven no longer than its authority is trusted.
    chain: Vec<CertificateDer<'static>>,
    ends: watch::Receiver<Ends>,
    /// When it ends at the latest: whoever shows no certificate of ours is here to enrol.
    until: Option<Pin<Box<Sleep>>>,
    /// How much of what a client of HTTP/2 sends first has come.
    greeted: usize,
    refusals: Refusals,
    _place: Place,
}

/// How many connections each pod has, and those together that show no certificate of ours.
#[derive(Debug, Clone, Default)]
struct Places(Arc<Mutex<BTreeMap<Option<String>, usize>>>);

/// One of them, until dropped.
struct Place {
    places: Places,
    of: Option<String>,
}

impl Places {
    fn take(&self, of: Option<String>) -> Option<Place> {
        let most = match of {
            Some(_) => limits::CONNECTIONS_PER_POD_MAX,
            None => limits::STRANGERS_MAX,
        };
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = taken.entry(of.clone()).or_default();
        if *now >= most {
            return None;
        }
        *now += 1;
        Some(Place { places: self.clone(), of })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(now) = taken.get_mut(&self.of) {
            *now -= 1;
            if *now == 0 {
                taken.remove(&self.of);
            }
        }
    }
}

/// Accepts and shakes hands, each connection by itself, so that a slow one delays nobody.
pub(crate) async fn accept<C: Send + 'static, F>(
    listener: TcpListener,
    shake: impl Fn(TcpStream) -> F,
    accepted: mpsc::Sender<io::Result<C>>,
) where
    F: Future<Output = io::Result<C>> + Send + 'static,
{
    let connections = Arc::new(Semaphore::new(limits::HANDSHAKES_MAX));
    loop {
        let permit = Arc::clone(&connections).acquire_owned().await.expect("the semaphore is never closed");
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, most likely; others end before it gets better.
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(limits::ACCEPT_RETRY).await;
                continue;
            }
        };
        let (shaking, accepted) = (shake(stream), accepted.clone());
        tokio::spawn(async move {
            let shaken = tokio::time::timeout(limits::HANDSHAKE_TIMEOUT, shaking).await;
            drop(permit);
            match shaken {
                Ok(Ok(connection)) => drop(accepted.send(Ok(connection)).await),
                Ok(Err(error)) => tracing::debug!(%error, "handshake failed"),
                Err(_) => tracing::debug!("handshake took too long"),
            }
        });
    }
}

/// TLS settings of the coordinator.
#[derive(Clone)]
pub(super) struct Tls {
    ends: watch::Receiver<Ends>,
    places: Places,
    refusals: Refusals,
}

/// What follows from who is trusted.
#[derive(Clone)]
struct Ends {
    acceptor: TlsAcceptor,
    authorities: Arc<dyn ClientCertVerifier>,
}

impl Ends {
    fn new(trust: &Trust) -> Result<Self, TlsError> {
        let provider = Arc::new(default_provider());
        let mut roots = RootCertStore::empty();
        trust.certificates().try_for_each(|certificate| roots.add(certificate.clone()))?;
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider)).build()?;
        let server = trust.signer().server()?;
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_client_cert_verifier(Arc::new(AnyClient(Arc::clone(&verifier))))
            .with_single_cert(server.chain, server.key)?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        config.send_tls13_tickets = 0;
        Ok(Self { acceptor: Arc::new(config).into(), authorities: verifier })
    }
}

impl Tls {
    /// The settings, and what makes new connections follow whoever is trusted then.
    pub(super) fn new(
        mut trust: watch::Receiver<Trust>,
        refusals: Refusals,
    ) -> Result<(Self, impl Future<Output = ()> + Send + use<>), TlsError> {
        let (present, ends) = watch::channel(Ends::new(&trust.borrow_and_update())?);
        let follow = async move {
            while trust.changed().await.is_ok() {
                let next = Ends::new(&trust.borrow_and_update());
                match next {
                    Ok(next) => drop(present.send_replace(next)),
                    Err(error) => tracing::error!(%error, "connections go on as before"),
                }
            }
        };
        Ok((Self { ends, places: Places::default(), refusals }, follow))
    }

    pub(super) async fn shake(self, stream: TcpStream) -> io::Result<Connection> {
        stream.set_nodelay(true)?;
        let refuse = |code, error: io::Error| {
            self.refusals.count(At::Connect, &fault(code, error.to_string()));
            error
        };
        let mut ends = self.ends.clone();
        let Ends { acceptor, authorities } = ends.borrow_and_update().clone();
        let shaken = acceptor.accept(stream).await;
        let stream = shaken.map_err(|error| refuse(Code::Unauthenticated, error))?;
        let chain: Vec<_> = stream
            .get_ref()
            .1
            .peer_certificates()
            .unwrap_or_default()
            .iter()
            .map(|of| of.clone().into_owned())
            .collect();
        let peer = peer_of(&*authorities, &chain);
        let place = self.places.take(peer.pod.clone()).ok_or_else(|| {
            let text = format!("no more connections for pod {}", peer.pod.as_deref().unwrap_or("of no name"));
            refuse(Code::Busy, io::Error::other(text))
        })?;
        let until = peer.pod.is_none().then(|| Box::pin(tokio::time::sleep(limits::ENROL_TIMEOUT)));
        let refusals = self.refusals.clone();
        Ok(Connection { stream, peer, chain, ends, until, greeted: 0, refusals, _place: place })
    }
}

fn peer_of(authorities: &dyn ClientCertVerifier, chain: &[CertificateDer<'_>]) -> Peer {
    let [leaf, intermediates @ ..] = chain else { return Peer { pod: None, key: None } };
    let ours = authorities.verify_client_cert(leaf, intermediates, UnixTime::now()).is_ok();
    let pod = if ours { pod_of_certificate(leaf).ok() } else { None };
    Peer { pod, key: key_of(leaf) }
}

/// SHA-256 of the public key (SubjectPublicKeyInfo, DER).
fn key_of(certificate: &CertificateDer<'_>) -> Option<Sha256> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    Some(Sha256(sha2::Sha256::digest(certificate.public_key().raw).into()))
}

/// Lets everybody in who owns the key of the certificate shown; whose it is, is decided afterwards.
#[derive(Debug)]
struct AnyClient(Arc<dyn ClientCertVerifier>);

impl ClientCertVerifier for AnyClient {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl Connection {
    /// Whether the pod that the peer proved to be is one no more, since others are trusted now.
    fn is_disowned(&mut self) -> bool {
        // Its sender ends with the listener only.
        if self.peer.pod.is_none() || !self.ends.has_changed().unwrap_or(false) {
            return false;
        }
        let authorities = Arc::clone(&self.ends.borrow_and_update().authorities);
        peer_of(&*authorities, &self.chain) != self.peer
    }

    /// Looks at what comes first, so that whoever speaks another protocol is counted.
    fn greet(&mut self, came: &[u8]) -> io::Result<()> {
        let due = &GREETING[self.greeted..];
        let length = due.len().min(came.len());
        if due[..length] != came[..length] {
            self.refusals.count(At::Connect, &fault(Code::Unsupported, "not HTTP/2"));
            return Err(io::ErrorKind::InvalidData.into());
        }
        self.greeted += length;
        Ok(())
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(until) = &mut self.until
            && until.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        // Pings of HTTP/2 see to it that somebody reads.
        if self.is_disowned() {
            return Poll::Ready(Err(io::ErrorKind::PermissionDenied.into()));
        }
        let before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if let Poll::Ready(Ok(())) = read {
            self.greet(&buf.filled()[before..])?;
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
