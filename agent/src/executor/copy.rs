//! Copying between memory and chunks of wire bytes.

use super::{Cursor, HostMemory, Span};
use weightrefit_core::dtype::Cast;

/// Bytes of tiny runs collected at once before a cast: in the first-level cache with what they become.
const CAST_BYTES: usize = 8 << 10;

/// Fills `chunk` with the wire bytes that come next, cast on the way, and returns how many. Less than the chunk
/// only at the end, in front of a span that `stop` wants, or where less than an element that is cast has room.
pub fn gather(
    cursor: &mut Cursor<'_>,
    memory: &HostMemory,
    chunk: &mut [u8],
    stop: impl Fn(&Span) -> bool,
) -> usize {
    let mut filled = 0;
    let mut uncast = [0; CAST_BYTES];
    while filled < chunk.len() {
        let room = &mut chunk[filled..];
        let Some(mut span) = cursor.span(room.len() as u64) else { break };
        if stop(&span) {
            break;
        }
        match span.cast.sizes() {
            Some((from, to)) if span.count > 1 => {
                let wire_max = CAST_BYTES as u64 / from * to;
                if span.wire_bytes > wire_max {
                    let Some(shorter) = cursor.span(wire_max) else { break };
                    span = shorter;
                }
                let uncast = &mut uncast[..(span.run * span.count) as usize];
                read(memory, &span, uncast);
                span.cast.apply(uncast, &mut room[..span.wire_bytes as usize]);
            }
            Some(_) => {
                let room = &mut room[..span.wire_bytes as usize];
                memory.mapping(span.mapping).read_cast(span.offset, span.cast, room);
            }
            None => read(memory, &span, &mut room[..span.wire_bytes as usize]),
        }
        filled += span.wire_bytes as usize;
        cursor.pass(&span);
    }
    filled
}

/// Writes the wire bytes that come next to memory.
///
/// # Panics
/// Where `chunk` is longer than what is left.
pub fn scatter(cursor: &mut Cursor<'_>, memory: &HostMemory, mut chunk: &[u8]) {
    while !chunk.is_empty() {
        let span = cursor.span(chunk.len() as u64).expect("a chunk ends where its stream ends");
        debug_assert_eq!(span.cast, Cast::None);
        let (now, rest) = chunk.split_at(span.wire_bytes as usize);
        let mapping = memory.mapping(span.mapping);
        if span.count == 1 {
            mapping.write(span.offset, now);
        } else {
            mapping.write_rows(span.offset, span.stride, span.run as usize, now);
        }
        cursor.pass(&span);
        chunk = rest;
    }
}

fn read(memory: &HostMemory, span: &Span, out: &mut [u8]) {
    let mapping = memory.mapping(span.mapping);
    if span.count == 1 {
        mapping.read(span.offset, out);
    } else {
        mapping.read_rows(span.offset, span.stride, span.run as usize, out);
    }
}
