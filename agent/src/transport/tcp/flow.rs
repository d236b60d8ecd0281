//! The bytes of one stream, between memory and link.

use super::link::Link;
use super::tasks::Tasks;
use crate::executor::{Cursor, HostMemory, Span, gather, scatter};
use crate::limits::{CHUNK_BYTES, DIRECT_BYTES_MIN};
use crate::memory::{ReceiveBatch, SendBatch};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use weightrefit_core::dtype::Cast;

/// Long enough to go between socket and tensor without a copy, and the same on both sides of it.
fn is_direct(span: &Span) -> bool {
    span.count == 1 && span.cast == Cast::None && span.run >= DIRECT_BYTES_MIN
}

/// Sends what is left of `cursor`.
pub(super) fn send(
    link: &mut Link,
    mut cursor: Cursor<'_>,
    memory: &HostMemory,
    tasks: &Tasks,
) -> Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES];
    while cursor.left() > 0 {
        if tasks.is_stopped() {
            return Err(ErrorKind::Interrupted.into());
        }
        if !link.is_plain() {
            let n = gather(&mut cursor, memory, &mut chunk, |_| false);
            link.write_all(&chunk[..n])?;
            tasks.bytes.fetch_add(n as u64, Ordering::Relaxed);
            continue;
        }
        let mut batch = SendBatch::new();
        let mut room = chunk.as_mut_slice();
        while !batch.is_full() && batch.bytes() < CHUNK_BYTES {
            let Some(span) = cursor.span((CHUNK_BYTES - batch.bytes()) as u64) else { break };
            if is_direct(&span) {
                batch.push_mapped(memory.mapping(span.mapping), span.offset, span.run as usize);
                cursor.pass(&span);
            } else {
                let n = gather(&mut cursor, memory, room, is_direct);
                if n == 0 {
                    break;
                }
                let (filled, rest) = std::mem::take(&mut room).split_at_mut(n);
                batch.push_private(filled);
                room = rest;
            }
        }
        while batch.bytes() > 0 {
            let n = batch.send(link.socket().as_fd())?;
            if n == 0 {
                return Err(ErrorKind::WriteZero.into());
            }
            tasks.bytes.fetch_add(n as u64, Ordering::Relaxed);
        }
    }
    Ok(())
}

/// Receives what is left of `cursor`.
pub(super) fn receive(
    link: &mut Link,
    mut cursor: Cursor<'_>,
    memory: &HostMemory,
    tasks: &Tasks,
) -> Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES];
    while let Some(span) = cursor.span(u64::MAX) {
        let n = if link.is_plain() && is_direct(&span) {
            let n = receive_direct(link, &cursor, memory)?;
            cursor.skip(n as u64);
            n
        } else {
            let want = cursor.left().min(CHUNK_BYTES as u64) as usize;
            let n = link.read(&mut chunk[..want])?;
            // The last look before memory is written: nothing is after a stop that was seen.
            if tasks.is_stopped() {
                return Err(ErrorKind::Interrupted.into());
            }
            scatter(&mut cursor, memory, &chunk[..n]);
            n
        };
        if n == 0 {
            return Err(Error::new(ErrorKind::UnexpectedEof, "the stream ended early"));
        }
        tasks.bytes.fetch_add(n as u64, Ordering::Relaxed);
        if tasks.is_stopped() {
            return Err(ErrorKind::Interrupted.into());
        }
    }
    Ok(())
}

/// One read straight into the runs that come next.
fn receive_direct(link: &Link, cursor: &Cursor<'_>, memory: &HostMemory) -> Result<usize> {
    let mut ahead = cursor.clone();
    let mut batch = ReceiveBatch::new();
    while !batch.is_full() && batch.bytes() < CHUNK_BYTES {
        let Some(span) = ahead.span((CHUNK_BYTES - batch.bytes()) as u64) else { break };
        // A run that the end of the chunk has made short may follow directs; it costs a slice, not a copy.
        if span.count != 1 || (batch.bytes() == 0 && !is_direct(&span)) {
            break;
        }
        batch.push_mapped(memory.mapping(span.mapping), span.offset, span.run as usize);
        ahead.pass(&span);
    }
    batch.receive(link.socket().as_fd())
}
