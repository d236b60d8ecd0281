//! Bytes and file descriptors over a Unix socket, for either end: the calls themselves, blocking or not as the
//! socket is.

use crate::limits::FRAME_FDS_MAX;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

const CONTROL_BYTES: usize = rustix::cmsg_space!(ScmRights(FRAME_FDS_MAX));

/// Sends `bytes` with `fds` attached to the first of them; returns how many bytes went.
///
/// # Errors
/// Those of `sendmsg`; `InvalidInput` for more descriptors than a frame may carry.
pub fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let too_many = || io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors for one frame");
    if fds.len() > FRAME_FDS_MAX {
        return Err(too_many());
    }
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(too_many());
    }
    Ok(sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
}

/// What one [`receive`] got.
#[derive(Debug)]
pub struct Received {
    /// Bytes read; 0 at the end of the stream.
    pub bytes: usize,
    /// Descriptors that came with the first of them, close-on-exec.
    pub fds: Vec<OwnedFd>,
    /// The sender attached more than a frame may carry; the kernel closed the rest.
    pub fds_lost: bool,
}

/// Receives into `buffer`, with the descriptors attached to the first byte read.
///
/// # Errors
/// Those of `recvmsg`.
pub fn receive(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<Received> {
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let message = recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags)?;
    let mut fds = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = part {
            fds.extend(passed);
        }
    }
    // Padding may leave room for one more than asked for.
    let surplus = fds.len() > FRAME_FDS_MAX;
    fds.truncate(FRAME_FDS_MAX);
    let fds_lost = surplus || message.flags.contains(ReturnFlags::CTRUNC);
    Ok(Received { bytes: message.bytes, fds, fds_lost })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, Write};
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_descriptor_arrives_with_its_content() {
        let (a, b) = UnixStream::pair().expect("a socket pair");
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(b"weights").expect("a write");
        assert_eq!(send(&a, b"x", &[file.as_fd()]).expect("sent"), 1);
        let got = receive(&b, &mut [0; 8]).expect("received");
        assert_eq!((got.bytes, got.fds.len(), got.fds_lost), (1, 1, false));
        let mut copy = std::fs::File::from(got.fds.into_iter().next().expect("one"));
        copy.rewind().expect("seekable");
        let mut text = String::new();
        copy.read_to_string(&mut text).expect("readable");
        assert_eq!(text, "weights");
    }

    #[test]
    fn no_more_descriptors_go_or_come_than_a_frame_may_carry() {
        let (a, _b) = UnixStream::pair().expect("a socket pair");
        let file = tempfile::tempfile().expect("a file");
        let flood = vec![file.as_fd(); FRAME_FDS_MAX + 1];
        assert_eq!(send(&a, b"x", &flood).expect_err("refused").kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn descriptors_beyond_the_limit_are_noticed() {
        let (a, b) = UnixStream::pair().expect("a socket pair");
        let file = tempfile::tempfile().expect("a file");
        let flood = vec![file.as_fd(); FRAME_FDS_MAX + 1];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FRAME_FDS_MAX + 1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&flood)));
        sendmsg(&a, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).expect("sent");
        let got = receive(&b, &mut [0; 8]).expect("received");
        assert!(got.fds_lost && got.fds.len() <= FRAME_FDS_MAX);
    }
}
