//! The three frames of a stream: header, answer, acknowledgement. Integers are little-endian.

use crate::limits::STREAM_HEADER_BYTES_MAX;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::sync::Arc;
use weightrefit_core::code::Code;
use weightrefit_core::id::{Epoch, Incarnation, MemberId, RoundId, Sha256};

/// First bytes of a header: no other protocol begins so.
const HEADER_MAGIC: [u8; 8] = *b"wrbytes2";
/// First bytes of an acknowledgement.
const ACKNOWLEDGE_MAGIC: [u8; 8] = *b"wrackn1\n";

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The bytes of a stream follow.
    Bytes,
    /// They go by this attempt of the replica's lane; the acknowledgement follows.
    Flight {
        /// Of the lane.
        attempt: u32,
    },
    /// To the first rank of a lane; `pair` is the lane's key.
    Lane,
    /// To the leader, for the turn to form this lane.
    Turn {
        /// Its replica.
        lane: u32,
    },
}

impl Purpose {
    const fn numbers(self) -> (u8, u32) {
        match self {
            Self::Bytes => (0, 0),
            Self::Flight { attempt } => (1, attempt),
            Self::Lane => (2, 0),
            Self::Turn { lane } => (3, lane),
        }
    }

    fn of(numbers: (u8, u32)) -> Result<Self> {
        match numbers {
            (0, 0) => Ok(Self::Bytes),
            (1, attempt) => Ok(Self::Flight { attempt }),
            (2, 0) => Ok(Self::Lane),
            (3, lane) => Ok(Self::Turn { lane }),
            _ => Err(invalid("the header has no purpose")),
        }
    }
}

/// What a destination asks for (B1).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StreamHeader {
    pub(crate) refit_uid: Arc<str>,
    pub(crate) epoch: Epoch,
    pub(crate) membership: Sha256,
    pub(crate) round: RoundId,
    pub(crate) source: MemberId,
    pub(crate) destination: MemberId,
    pub(crate) source_incarnation: Incarnation,
    pub(crate) destination_incarnation: Incarnation,
    pub(crate) pair: Sha256,
    pub(crate) purpose: Purpose,
    /// This stream, how many the pair has, and the bytes of this one.
    pub(crate) stream: u32,
    pub(crate) streams: u32,
    pub(crate) bytes: u64,
}

impl StreamHeader {
    /// Writes the frame.
    pub(super) fn write(&self, to: &mut impl Write) -> Result<()> {
        let mut body = Vec::with_capacity(STREAM_HEADER_BYTES_MAX);
        body.extend(self.epoch.0.to_le_bytes());
        body.extend(self.membership.0);
        body.extend(self.round.0.to_le_bytes());
        body.extend(self.source.0.to_le_bytes());
        body.extend(self.destination.0.to_le_bytes());
        body.extend(self.source_incarnation.0.to_le_bytes());
        body.extend(self.destination_incarnation.0.to_le_bytes());
        body.extend(self.pair.0);
        let (purpose, number) = self.purpose.numbers();
        body.push(purpose);
        body.extend(number.to_le_bytes());
        body.extend(self.stream.to_le_bytes());
        body.extend(self.streams.to_le_bytes());
        body.extend(self.bytes.to_le_bytes());
        body.extend(self.refit_uid.as_bytes());
        if body.len() > STREAM_HEADER_BYTES_MAX {
            return Err(invalid("the UID of the WeightRefit is too long for a stream header"));
        }
        let mut frame = HEADER_MAGIC.to_vec();
        frame.extend((body.len() as u16).to_le_bytes());
        frame.extend(body);
        to.write_all(&frame)
    }

    /// Reads the frame; never more than its bound, and nothing beyond it.
    pub(super) fn read(from: &mut impl Read) -> Result<Self> {
        if array::<8>(from)? != HEADER_MAGIC {
            return Err(invalid("not a byte stream"));
        }
        let length = usize::from(u16::from_le_bytes(array(from)?));
        if length > STREAM_HEADER_BYTES_MAX {
            return Err(invalid("stream header is too long"));
        }
        let mut body = vec![0; length];
        from.read_exact(&mut body)?;
        let rest = &mut body.as_slice();
        // A short body ends in `UnexpectedEof` of the slice.
        Ok(Self {
            epoch: Epoch(u64::from_le_bytes(array(rest)?)),
            membership: Sha256(array(rest)?),
            round: RoundId(u64::from_le_bytes(array(rest)?)),
            source: MemberId(u32::from_le_bytes(array(rest)?)),
            destination: MemberId(u32::from_le_bytes(array(rest)?)),
            source_incarnation: Incarnation(u128::from_le_bytes(array(rest)?)),
            destination_incarnation: Incarnation(u128::from_le_bytes(array(rest)?)),
            pair: Sha256(array(rest)?),
            purpose: Purpose::of((array::<1>(rest)?[0], u32::from_le_bytes(array(rest)?)))?,
            stream: u32::from_le_bytes(array(rest)?),
            streams: u32::from_le_bytes(array(rest)?),
            bytes: u64::from_le_bytes(array(rest)?),
            refit_uid: std::str::from_utf8(rest).map_err(|_| invalid("UID is not UTF-8"))?.into(),
        })
    }
}

/// Writes the source's answer: `None` admits the stream.
pub(super) fn write_answer(to: &mut impl Write, refusal: Option<Code>) -> Result<()> {
    let name = refusal.map_or("", Code::name);
    let mut frame = vec![name.len() as u8];
    frame.extend(name.as_bytes());
    to.write_all(&frame)
}

/// Reads the source's answer.
pub(super) fn read_answer(from: &mut impl Read) -> Result<Option<Code>> {
    let [length] = array(from)?;
    if length == 0 {
        return Ok(None);
    }
    let mut name = vec![0; usize::from(length)];
    from.read_exact(&mut name)?;
    let code = std::str::from_utf8(&name).ok().and_then(|name| name.parse().ok());
    code.map(Some).ok_or_else(|| invalid("the answer names no code"))
}

/// Writes the destination's count of the bytes that it has in memory.
pub(super) fn write_acknowledgement(to: &mut impl Write, bytes: u64) -> Result<()> {
    let mut frame = ACKNOWLEDGE_MAGIC.to_vec();
    frame.extend(bytes.to_le_bytes());
    to.write_all(&frame)
}

/// Reads it.
pub(super) fn read_acknowledgement(from: &mut impl Read) -> Result<u64> {
    if array::<8>(from)? != ACKNOWLEDGE_MAGIC {
        return Err(invalid("not an acknowledgement"));
    }
    Ok(u64::from_le_bytes(array(from)?))
}

fn array<const N: usize>(from: &mut impl Read) -> Result<[u8; N]> {
    let mut out = [0; N];
    from.read_exact(&mut out)?;
    Ok(out)
}

fn invalid(what: &'static str) -> Error {
    Error::new(ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> StreamHeader {
        StreamHeader {
            refit_uid: "0b5e".into(),
            epoch: Epoch(3),
            membership: Sha256([1; 32]),
            round: RoundId(4),
            source: MemberId(5),
            destination: MemberId(6),
            source_incarnation: Incarnation(7),
            destination_incarnation: Incarnation(8),
            pair: Sha256([9; 32]),
            purpose: Purpose::Flight { attempt: 0x0102_0304 },
            stream: 10,
            streams: 11,
            bytes: 12,
        }
    }

    #[test]
    fn frames_read_back_what_was_written() {
        let mut bytes = Vec::new();
        header().write(&mut bytes).expect("fits");
        write_answer(&mut bytes, None).expect("vec");
        write_answer(&mut bytes, Some(Code::StaleEpoch)).expect("vec");
        write_acknowledgement(&mut bytes, u64::MAX).expect("vec");
        let rest = &mut bytes.as_slice();
        assert_eq!(StreamHeader::read(rest).expect("header"), header());
        assert_eq!(read_answer(rest).expect("answer"), None);
        assert_eq!(read_answer(rest).expect("answer"), Some(Code::StaleEpoch));
        assert_eq!(read_acknowledgement(rest).expect("count"), u64::MAX);
        assert!(rest.is_empty());
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        let mut good = Vec::new();
        header().write(&mut good).expect("fits");
        for end in 0..good.len() - 4 {
            assert!(StreamHeader::read(&mut &good[..end]).is_err(), "cut at {end}");
        }
        let mut long = good.clone();
        long[8..10].copy_from_slice(&u16::MAX.to_le_bytes());
        assert!(StreamHeader::read(&mut long.as_slice()).is_err());
        let mut short = good.clone();
        short[8..10].copy_from_slice(&20_u16.to_le_bytes());
        assert!(StreamHeader::read(&mut short.as_slice()).is_err());
        assert!(StreamHeader::read(&mut b"GET / HTTP/1.1\r\n\r\n".as_slice()).is_err());
        assert!(read_answer(&mut [3, b'a', b'b', b'c'].as_slice()).is_err());
        assert!(read_acknowledgement(&mut [0; 16].as_slice()).is_err());
        let huge = StreamHeader { refit_uid: "u".repeat(1000).into(), ..header() };
        assert!(huge.write(&mut Vec::new()).is_err());
    }
}
