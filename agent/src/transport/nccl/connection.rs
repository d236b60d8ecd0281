//! Frames of a lane over a connection that the byte port has admitted: a length, then JSON. Both ends say something
//! every second, and who is silent for as long as a peer may be is gone.

use crate::limits::{HEARTBEAT_INTERVAL, LANE_FRAME_BYTES_MAX, PEER_SILENCE_MAX};
use crate::transport::tcp::Link;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::VecDeque;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// What others want to say on a connection, and that they do.
#[derive(Debug)]
pub(super) struct Outbox<M> {
    queue: Mutex<VecDeque<M>>,
    wake: OwnedFd,
}

impl<M> Outbox<M> {
    pub(super) fn new() -> Result<Arc<Self>> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Self { queue: Mutex::default(), wake }))
    }

    /// Says it; whoever serves the connection does so at once.
    pub(super) fn say(&self, message: M) {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).push_back(message);
        self.wake();
    }

    /// Makes whoever serves the connection look.
    pub(super) fn wake(&self) {
        // Fails only where the counter is full: then it is awake.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Forgets what was not said.
    pub(super) fn clear(&self) {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// One end.
pub(super) struct Connection<M> {
    link: Link,
    outbox: Arc<Outbox<M>>,
    unread: Vec<u8>,
    heard: Instant,
    said: Instant,
}

/// A frame; `None` is a sign of life. No message may be JSON's null.
type Frame<M> = Option<M>;

impl<M: Serialize> Connection<M> {
    pub(super) fn new(mut link: Link, outbox: Arc<Outbox<M>>) -> Result<Self> {
        link.unhurry()?;
        // What is not taken within this time never will be.
        link.socket().set_write_timeout(Some(PEER_SILENCE_MAX))?;
        let now = Instant::now();
        Ok(Self { link, outbox, unread: Vec::new(), heard: now, said: now })
    }

    /// Says what is to be said, and returns what has come by the next time that anything happens; nothing after a
    /// wake, or a second.
    ///
    /// # Errors
    /// The end of the connection, silence of the other end, or what is no frame.
    pub(super) fn turn<T: DeserializeOwned>(&mut self) -> Result<Vec<T>> {
        self.say_all()?;
        if self.said.elapsed() >= HEARTBEAT_INTERVAL {
            self.write(&None)?;
        }
        let socket = Arc::clone(self.link.socket());
        let mut ready = [
            PollFd::new(&*socket, PollFlags::IN),
            PollFd::from_borrowed_fd(self.outbox.wake.as_fd(), PollFlags::IN),
        ];
        let second = Timespec { tv_sec: HEARTBEAT_INTERVAL.as_secs().cast_signed(), tv_nsec: 0 };
        rustix::io::retry_on_intr(|| poll(&mut ready, Some(&second)))?;
        let (readable, woken) = (!ready[0].revents().is_empty(), !ready[1].revents().is_empty());
        if woken {
            // Empty where another thread's wake came between.
            let _ = rustix::io::read(&self.outbox.wake, &mut [0_u8; 8]);
        }
        if readable {
            // As much as the TLS library can have taken in at once, so that nothing is left in it.
            let mut bytes = vec![0; 64 << 10];
            match self.link.read(&mut bytes)? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                n => self.unread.extend(&bytes[..n]),
            }
            self.heard = Instant::now();
        } else if self.heard.elapsed() >= PEER_SILENCE_MAX {
            return Err(ErrorKind::TimedOut.into());
        }
        let mut heard = Vec::new();
        while let Some(frame) = self.frame::<T>()? {
            heard.extend(frame);
        }
        self.say_all()?;
        Ok(heard)
    }

    fn say_all(&mut self) -> Result<()> {
        loop {
            let message = self.outbox.queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            let Some(message) = message else { return Ok(()) };
            self.write(&Some(message))?;
        }
    }

    fn write(&mut self, frame: &Frame<M>) -> Result<()> {
        let json = serde_json::to_vec(frame).map_err(Error::other)?;
        let length = u32::try_from(json.len()).map_err(Error::other)?;
        let bytes = [&length.to_le_bytes(), json.as_slice()].concat();
        self.said = Instant::now();
        self.link.write_all(&bytes)
    }

    fn frame<T: DeserializeOwned>(&mut self) -> Result<Option<Frame<T>>> {
        let Some(length) = self.unread.first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length > LANE_FRAME_BYTES_MAX {
            return Err(Error::new(ErrorKind::InvalidData, "a frame of a lane is too long"));
        }
        let Some(json) = self.unread.get(4..4 + length) else { return Ok(None) };
        let frame = serde_json::from_slice(json).map_err(Error::other)?;
        self.unread.drain(..4 + length);
        Ok(Some(frame))
    }
}
