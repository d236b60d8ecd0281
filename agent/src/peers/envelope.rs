//! Envelopes on the wire and messages in core.

use weightrefit_core::id::{Epoch, Incarnation, MemberId, Sha256};
use weightrefit_core::round::message::{Header, Message};
use weightrefit_proto::socket::EXTRAS_BYTES_MAX;
use weightrefit_proto::v1;

/// An envelope that is no message.
#[derive(Debug, thiserror::Error)]
pub(super) enum EnvelopeError {
    /// A field of the header has the wrong size.
    #[error("header field {field} has {bytes} bytes")]
    Header { field: &'static str, bytes: usize },
    /// Longer than a trainer may publish.
    #[error("extras of {bytes} bytes, where {EXTRAS_BYTES_MAX} are possible")]
    Extras { bytes: usize },
    /// The message.
    #[error("malformed message: {0}")]
    Message(#[from] serde_json::Error),
}

/// Packs a message, and what goes beside it.
pub(super) fn pack(
    header: &Header,
    message: &Message,
    extras: Option<&str>,
) -> Result<v1::Envelope, EnvelopeError> {
    let header = v1::Header {
        refit_uid: header.refit_uid.to_string(),
        epoch: header.epoch.0,
        membership_digest: header.membership.0.to_vec(),
        from_incarnation: header.from_incarnation.0.to_be_bytes().to_vec(),
        to_incarnation: header.to_incarnation.0.to_be_bytes().to_vec(),
        from: header.from.0,
        to: header.to.0,
    };
    let (message, extras) = (serde_json::to_vec(message)?, extras.map(str::to_owned));
    Ok(v1::Envelope { header: Some(header), message, extras })
}

/// What keeps a quiet stream alive.
pub(super) fn heartbeat() -> v1::Envelope {
    v1::Envelope { header: None, message: Vec::new(), extras: None }
}

/// Unpacks a message; `None` for a heartbeat.
pub(super) fn unpack(
    envelope: v1::Envelope,
) -> Result<Option<(Header, Message, Option<String>)>, EnvelopeError> {
    let Some(header) = envelope.header else { return Ok(None) };
    let header = Header {
        refit_uid: header.refit_uid.into(),
        epoch: Epoch(header.epoch),
        membership: Sha256(fixed("membership_digest", &header.membership_digest)?),
        from_incarnation: incarnation("from_incarnation", &header.from_incarnation)?,
        to_incarnation: incarnation("to_incarnation", &header.to_incarnation)?,
        from: MemberId(header.from),
        to: MemberId(header.to),
    };
    if let Some(bytes) = envelope.extras.as_ref().map(String::len).filter(|bytes| *bytes > EXTRAS_BYTES_MAX) {
        return Err(EnvelopeError::Extras { bytes });
    }
    Ok(Some((header, serde_json::from_slice(&envelope.message)?, envelope.extras)))
}

fn incarnation(field: &'static str, bytes: &[u8]) -> Result<Incarnation, EnvelopeError> {
    Ok(Incarnation(u128::from_be_bytes(fixed(field, bytes)?)))
}

fn fixed<const N: usize>(field: &'static str, bytes: &[u8]) -> Result<[u8; N], EnvelopeError> {
    bytes.try_into().map_err(|_| EnvelopeError::Header { field, bytes: bytes.len() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightrefit_core::id::RoundId;

    #[test]
    fn messages_come_out_as_they_went_in() {
        let header = Header {
            refit_uid: "uid".into(),
            epoch: Epoch(7),
            membership: Sha256([3; 32]),
            from_incarnation: Incarnation(1 << 100),
            to_incarnation: Incarnation(2),
            from: MemberId(3),
            to: MemberId(4),
        };
        let message = Message::Transfer { round: RoundId(9) };
        let packed = pack(&header, &message, Some("{}")).expect("packs");
        let (mut cut, mut long) = (packed.clone(), packed.clone());
        assert_eq!(unpack(packed).expect("unpacks"), Some((header, message, Some("{}".to_owned()))));
        long.extras = Some("x".repeat(EXTRAS_BYTES_MAX + 1));
        assert!(matches!(unpack(long), Err(EnvelopeError::Extras { .. })));
        assert_eq!(unpack(heartbeat()).expect("unpacks"), None);
        cut.message.truncate(5);
        assert!(matches!(unpack(cut.clone()), Err(EnvelopeError::Message(_))));
        cut.header.as_mut().expect("is set").to_incarnation.push(0);
        assert!(matches!(unpack(cut), Err(EnvelopeError::Header { field: "to_incarnation", bytes: 17 })));
    }
}
