//! gRPC over TLS settings of our own: tonic's cannot pin a key.

use crate::limits;
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use std::io;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint};

/// Opens a channel to `address` (`host:port`), with TLS by `config` under the name `name`. Connects before it
/// returns; the channel does not reconnect to another key, since each new connection is verified the same way.
pub(crate) async fn connect(
    address: &str,
    name: ServerName<'static>,
    config: Arc<ClientConfig>,
) -> Result<Channel, tonic::transport::Error> {
    let target = address.to_owned();
    let connector = tower::service_fn(move |_: tonic::codegen::http::Uri| {
        let (target, name, config) = (target.clone(), name.clone(), Arc::clone(&config));
        async move {
            let stream = TcpStream::connect(&target).await?;
            stream.set_nodelay(true)?;
            let stream = TlsConnector::from(config).connect(name, stream).await?;
            Ok::<_, io::Error>(TokioIo::new(stream))
        }
    });
    // The URI only fills the request's authority; the connector above knows the address.
    Endpoint::from_static("http://weightrefit.invalid")
        .connect_timeout(limits::DIAL_TIMEOUT)
        .connect_with_connector(connector)
        .await
}
