//! Keeps one link to one agent up.

use super::{Links, outgoing};
use crate::identity::{DialError, Identity};
use crate::limits;
use std::sync::Arc;
use tokio::time::sleep;
use tokio_stream::wrappers::ReceiverStream;
use weightrefit_core::id::Sha256;
use weightrefit_proto::v1::round_client::RoundClient;

/// Why there is no link.
#[derive(Debug, thiserror::Error)]
enum LinkError {
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error("peer refused the stream: {}", .0.message())]
    Refused(#[from] Box<tonic::Status>),
}

/// Dials until aborted; addresses in turn, with a growing pause between failures.
pub(super) async fn keep_up(identity: Arc<Identity>, links: Links, key: Sha256, addresses: Vec<String>) {
    let mut pause = limits::REDIAL_PAUSE_MIN;
    for address in addresses.iter().cycle() {
        match dial_once(&identity, &links, key, address).await {
            Ok(()) => pause = limits::REDIAL_PAUSE_MIN,
            Err(error) => {
                tracing::debug!(peer = %key, address, error = %error, "cannot reach peer");
                pause = (pause * 2).min(limits::REDIAL_PAUSE_MAX);
            }
        }
        sleep(pause).await;
    }
}

/// One link from its handshake to its end.
async fn dial_once(identity: &Identity, links: &Links, key: Sha256, address: &str) -> Result<(), LinkError> {
    let channel = identity.dial_agent(address, key).await?;
    let mut client = RoundClient::new(channel)
        .max_decoding_message_size(limits::ENVELOPE_BYTES_MAX)
        .max_encoding_message_size(limits::ENVELOPE_BYTES_MAX);
    let (sender, receiver) = outgoing();
    let incoming = client.exchange(ReceiverStream::new(receiver)).await.map_err(Box::new)?.into_inner();
    links.run(key, incoming, sender).await;
    Ok(())
}
