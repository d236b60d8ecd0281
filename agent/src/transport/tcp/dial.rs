//! Dialling the byte port of another agent.

use super::frame::{Purpose, StreamHeader, read_answer};
use super::link::Link;
use super::{Peers, Security};
use crate::limits::{ADMISSION_TIMEOUT, CONNECT_TIMEOUT};
use std::io::{Error, ErrorKind, Result};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Instant;
use weightrefit_core::code::Code;
use weightrefit_core::id::{MemberId, RoundId, Sha256};

/// Who dials, and what the membership says of the others.
#[derive(Debug, Clone)]
pub(crate) struct Dialer {
    pub(crate) security: Security,
    pub(crate) peers: Arc<Peers>,
}

impl Dialer {
    /// A header of this membership, for no stream yet.
    pub(super) fn header(
        &self,
        source: MemberId,
        destination: MemberId,
        pair: Sha256,
        purpose: Purpose,
    ) -> std::result::Result<StreamHeader, super::TransferError> {
        let peers = &self.peers;
        Ok(StreamHeader {
            refit_uid: Arc::clone(&peers.refit_uid),
            epoch: peers.epoch,
            membership: peers.membership,
            round: RoundId(0),
            source,
            destination,
            source_incarnation: peers.agent(source)?.0,
            destination_incarnation: peers.agent(destination)?.0,
            pair,
            purpose,
            stream: 0,
            streams: 1,
            bytes: 0,
        })
    }

    /// The first address that answers.
    pub(super) fn connect(addresses: &[SocketAddr]) -> Result<TcpStream> {
        let mut last = Error::new(ErrorKind::AddrNotAvailable, "the member has no address");
        for address in addresses {
            match TcpStream::connect_timeout(address, CONNECT_TIMEOUT) {
                Ok(socket) => return Ok(socket),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// TLS to a member's agent, where there is to be any.
    pub(super) fn secure(&self, member: MemberId, socket: Arc<TcpStream>) -> Result<Link> {
        let deadline = Instant::now() + ADMISSION_TIMEOUT;
        match &self.security {
            Security::Plain => Link::plain(socket, deadline),
            Security::Tls(identity) => {
                let key = self.peers.agent(member).map_err(Error::other)?.1;
                let config = identity.client_config(key).map_err(Error::other)?;
                Link::start_tls(socket, Arc::new(config), deadline)
            }
        }
    }

    /// Asks `other` for something that is no stream; answers with its refusal, or the connection.
    pub(crate) fn ask(
        &self,
        own: MemberId,
        other: MemberId,
        key: Sha256,
        purpose: Purpose,
        addresses: &[SocketAddr],
    ) -> Result<std::result::Result<Link, Code>> {
        let mut link = self.secure(other, Arc::new(Self::connect(addresses)?))?;
        self.header(other, own, key, purpose).map_err(Error::other)?.write(&mut link)?;
        Ok(read_answer(&mut link)?.map_or(Ok(link), Err))
    }
}
