//! Serves `Round` to the agents of the membership, over TLS that proves their key.
//!
//! Invariants:
//! - V1: what does not finish a handshake with a pinned key reaches no handler.
//! - V2: handshakes, connections, streams and messages are bounded.

use crate::identity::{Identity, IdentityError, key_of};
use crate::limits;
use crate::peers::{Links, outgoing};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::transport::server::Connected;
use tonic::{Request, Response, Status, Streaming};
use weightrefit_core::id::Sha256;
use weightrefit_proto::v1;
use weightrefit_proto::v1::round_server::{Round, RoundServer};

/// The listening socket of `Round`, on a port that the kernel chose.
#[derive(Debug)]
pub struct PeerListener {
    socket: TcpListener,
    address: SocketAddr,
}

/// `Round` cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address.
    #[error("cannot listen on {ip}: {source}")]
    Listen {
        /// Asked for.
        ip: IpAddr,
        /// Why not.
        source: io::Error,
    },
    /// TLS settings.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The server.
    #[error("round service failed: {0}")]
    Transport(#[from] tonic::transport::Error),
}

impl PeerListener {
    /// Binds.
    pub async fn bind(ip: IpAddr) -> Result<Self, ServeError> {
        let failed = |source| ServeError::Listen { ip, source };
        let socket = TcpListener::bind((ip, 0)).await.map_err(failed)?;
        let address = socket.local_addr().map_err(failed)?;
        Ok(Self { socket, address })
    }

    /// Where other agents dial.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until dropped. `refused` is called for each connection that proves no pinned key.
    pub async fn serve(
        self,
        identity: &Identity,
        links: Links,
        refused: impl Fn() + Clone + Send + Sync + 'static,
    ) -> Result<(), ServeError> {
        let mut config = identity.server_config()?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let (accepted, connections) = mpsc::channel(limits::PEER_BACKLOG_MAX);
        let service = RoundServer::new(Exchange { links })
            .max_decoding_message_size(limits::ENVELOPE_BYTES_MAX)
            .max_encoding_message_size(limits::ENVELOPE_BYTES_MAX);
        let server = Server::builder()
            .max_concurrent_streams(limits::STREAMS_PER_CONNECTION_MAX)
            .concurrency_limit_per_connection(limits::STREAMS_PER_CONNECTION_MAX as usize)
            .http2_keepalive_interval(Some(limits::PEER_SILENCE_MAX))
            .serve_with_incoming(service, ReceiverStream::new(connections));
        tokio::select! {
            result = server => Ok(result?),
            () = accept(self.socket, acceptor, accepted, refused) => Ok(()),
        }
    }
}

async fn accept(
    socket: TcpListener,
    acceptor: TlsAcceptor,
    accepted: mpsc::Sender<io::Result<PeerStream>>,
    refused: impl Fn() + Clone + Send + Sync + 'static,
) {
    let room = Arc::new(Semaphore::new(limits::PEER_CONNECTIONS_MAX));
    loop {
        // The semaphore is never closed, so an error cannot come.
        let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
        let stream = match socket.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(error = %error, "cannot accept peers");
                tokio::time::sleep(limits::ACCEPT_PAUSE).await;
                continue;
            }
        };
        let (acceptor, accepted, refused) = (acceptor.clone(), accepted.clone(), refused.clone());
        tokio::spawn(async move {
            match timeout(limits::DIAL_TIMEOUT, handshake(acceptor, stream, permit)).await {
                Ok(Ok(stream)) => {
                    // The server is stopping when nobody takes it.
                    let _ = accepted.send(Ok(stream)).await;
                }
                Ok(Err(error)) => {
                    tracing::debug!(error = %error, "peer refused");
                    refused();
                }
                Err(_) => refused(),
            }
        });
    }
}

async fn handshake(
    acceptor: TlsAcceptor,
    stream: TcpStream,
    permit: OwnedSemaphorePermit,
) -> io::Result<PeerStream> {
    stream.set_nodelay(true)?;
    let inner = acceptor.accept(stream).await?;
    let certificates = inner.get_ref().1.peer_certificates().unwrap_or_default();
    let leaf = certificates.first().ok_or_else(|| io::Error::other("peer shows no certificate"))?;
    let key = PeerKey(key_of(leaf).map_err(io::Error::other)?);
    Ok(PeerStream { inner, key, _permit: permit })
}

/// A connection whose key is proved.
struct PeerStream {
    inner: TlsStream<TcpStream>,
    key: PeerKey,
    _permit: OwnedSemaphorePermit,
}

/// Key that a connection proved.
#[derive(Debug, Clone, Copy)]
struct PeerKey(Sha256);

impl Connected for PeerStream {
    type ConnectInfo = PeerKey;
    fn connect_info(&self) -> PeerKey {
        self.key
    }
}

impl AsyncRead for PeerStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

impl AsyncWrite for PeerStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

struct Exchange {
    links: Links,
}

#[tonic::async_trait]
impl Round for Exchange {
    type ExchangeStream =
        Pin<Box<dyn tokio_stream::Stream<Item = Result<v1::Envelope, Status>> + Send + 'static>>;

    async fn exchange(
        &self,
        request: Request<Streaming<v1::Envelope>>,
    ) -> Result<Response<Self::ExchangeStream>, Status> {
        let key = request.extensions().get::<PeerKey>().copied();
        let PeerKey(key) = key.ok_or_else(|| Status::unauthenticated("connection proved no key"))?;
        let (sender, receiver) = outgoing();
        let (links, incoming) = (self.links.clone(), request.into_inner());
        tokio::spawn(async move { links.run(key, incoming, sender).await });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver).map(Ok))))
    }
}
