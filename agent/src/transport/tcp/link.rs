//! A connection, plain or TLS, with deadlines.

use crate::identity::key_of;
use crate::limits::{ADMISSION_TIMEOUT, PARTING_TIMEOUT, STREAM_HEADER_BYTES_MAX, STREAM_SILENCE_MAX};
use rustls::{ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::Instant;
use weightrefit_core::id::Sha256;

/// One end of a stream.
#[derive(Debug)]
pub(crate) struct Link {
    socket: Arc<TcpStream>,
    tls: Option<Box<Connection>>,
    deadline: Option<Instant>,
}

impl Link {
    /// Without TLS. Everything until [`Self::unhurry`] must be over by `deadline`.
    pub(super) fn plain(socket: Arc<TcpStream>, deadline: Instant) -> Result<Self> {
        // Frames are small and waited for. Buffer sizes are left to the kernel: setting one turns its tuning off
        // and is capped far below what the tuning reaches.
        socket.set_nodelay(true)?;
        Ok(Self { socket, tls: None, deadline: Some(deadline) })
    }

    /// As the source: accepts TLS. Also returns the key that the peer has proved.
    pub(super) fn accept_tls(
        socket: Arc<TcpStream>,
        config: &Arc<ServerConfig>,
        deadline: Instant,
    ) -> Result<(Self, Sha256)> {
        let connection = ServerConnection::new(Arc::clone(config)).map_err(Error::other)?;
        Self::plain(socket, deadline)?.handshake(connection.into())
    }

    /// As the destination: starts TLS.
    pub(super) fn start_tls(
        socket: Arc<TcpStream>,
        config: Arc<ClientConfig>,
        deadline: Instant,
    ) -> Result<Self> {
        // The name is not looked at: the key is pinned (B2).
        let name = rustls::pki_types::ServerName::IpAddress(socket.peer_addr()?.ip().into());
        let connection = ClientConnection::new(config, name).map_err(Error::other)?;
        Ok(Self::plain(socket, deadline)?.handshake(connection.into())?.0)
    }

    fn handshake(mut self, mut connection: Connection) -> Result<(Self, Sha256)> {
        let mut wire = Wire { socket: &self.socket, deadline: self.deadline };
        while connection.is_handshaking() {
            match connection.complete_io(&mut wire) {
                Ok((0, 0)) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(error) => {
                    self.part();
                    return Err(error);
                }
            }
        }
        let certificate = connection.peer_certificates().and_then(<[_]>::first);
        let certificate = certificate.ok_or_else(|| Error::other(rustls::Error::NoCertificatesPresented))?;
        let key = key_of(certificate).map_err(Error::other)?;
        // The chunk is the bound of what is buffered, not a number of the library's.
        connection.set_buffer_limit(None);
        self.tls = Some(Box::new(connection));
        Ok((self, key))
    }

    /// The next that is said must be answered as soon as the first was.
    pub(super) fn hurry(&mut self) {
        self.deadline = Some(Instant::now() + ADMISSION_TIMEOUT);
    }

    /// From now on only a long silence ends the stream.
    pub(crate) fn unhurry(&mut self) -> Result<()> {
        self.deadline = None;
        self.socket.set_read_timeout(Some(STREAM_SILENCE_MAX))?;
        self.socket.set_write_timeout(Some(STREAM_SILENCE_MAX))
    }

    /// Ends a refused connection so that the peer can read why: closing with its bytes unread would reset it.
    pub(super) fn part(&self) {
        let _ = self.socket.shutdown(Shutdown::Write);
        let deadline = Some(Instant::now() + PARTING_TIMEOUT);
        let mut wire = Wire { socket: &self.socket, deadline };
        let mut ignored = [0; STREAM_HEADER_BYTES_MAX];
        // Bounded by time; what a peer sends after its header is its own affair.
        while matches!(wire.read(&mut ignored), Ok(n) if n > 0) {}
    }

    /// The socket.
    pub(crate) fn socket(&self) -> &Arc<TcpStream> {
        &self.socket
    }

    /// True where bytes on the socket are those of the stream, so that they may go straight to memory.
    pub(super) fn is_plain(&self) -> bool {
        self.tls.is_none()
    }
}

impl Read for Link {
    fn read(&mut self, out: &mut [u8]) -> Result<usize> {
        let mut wire = Wire { socket: &self.socket, deadline: self.deadline };
        let Some(tls) = &mut self.tls else { return wire.read(out) };
        loop {
            match tls.reader().read(out) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                done => return done,
            }
            if tls.read_tls(&mut wire)? == 0 {
                return Ok(0);
            }
            if let Err(error) = tls.process_new_packets() {
                // The alert tells the peer why; the error is worth more than a failure to send it.
                let _ = tls.write_tls(&mut wire);
                return Err(Error::new(ErrorKind::InvalidData, error));
            }
        }
    }
}

impl Write for Link {
    fn write(&mut self, data: &[u8]) -> Result<usize> {
        let mut wire = Wire { socket: &self.socket, deadline: self.deadline };
        let Some(tls) = &mut self.tls else { return wire.write(data) };
        let n = tls.writer().write(data)?;
        while tls.wants_write() {
            if tls.write_tls(&mut wire)? == 0 {
                return Err(ErrorKind::WriteZero.into());
            }
        }
        Ok(n)
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

/// The socket as it is, under a deadline for all that is read and written together: a peer that sends a byte now
/// and then gains nothing.
struct Wire<'s> {
    socket: &'s TcpStream,
    deadline: Option<Instant>,
}

impl Wire<'_> {
    fn left(&self) -> Result<Option<std::time::Duration>> {
        let Some(deadline) = self.deadline else { return Ok(None) };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

impl Read for Wire<'_> {
    fn read(&mut self, out: &mut [u8]) -> Result<usize> {
        if let Some(left) = self.left()? {
            self.socket.set_read_timeout(Some(left))?;
        }
        self.socket.read(out)
    }
}

impl Write for Wire<'_> {
    fn write(&mut self, data: &[u8]) -> Result<usize> {
        if let Some(left) = self.left()? {
            self.socket.set_write_timeout(Some(left))?;
        }
        self.socket.write(data)
    }

    fn write_vectored(&mut self, slices: &[std::io::IoSlice<'_>]) -> Result<usize> {
        if let Some(left) = self.left()? {
            self.socket.set_write_timeout(Some(left))?;
        }
        self.socket.write_vectored(slices)
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}
