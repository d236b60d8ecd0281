//! One listener for all refits: finds the refit that an agent names.

use super::gate::Gate;
use super::hub::{Coordinator, Input, Settings};
use super::record::EpochRecord;
use super::refusals::Refusals;
use super::service::Service;
use super::tls::{self, Tls, TlsError};
use crate::identity::Trust;
use crate::limits;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tokio_stream::wrappers::ReceiverStream;

/// Refits that have a coordinator here, by namespace/name.
#[derive(Debug, Clone)]
pub(super) struct Desk {
    open: Arc<Mutex<BTreeMap<String, mpsc::Sender<Input>>>>,
    refusals: Refusals,
}

impl Desk {
    /// Where to send what agents of this refit say.
    pub(super) fn find(&self, refit: &str) -> Option<mpsc::Sender<Input>> {
        self.lock().get(refit).cloned()
    }

    fn open(&self, refit: String, inputs: mpsc::Sender<Input>) {
        self.lock().insert(refit, inputs);
    }

    /// Closes it, unless a newer coordinator of the same name has taken its place.
    pub(super) fn close(&self, refit: &str, inputs: &mpsc::Sender<Input>) {
        let mut open = self.lock();
        if open.get(refit).is_some_and(|other| other.same_channel(inputs)) {
            open.remove(refit);
        }
    }

    pub(super) fn refusals(&self) -> Refusals {
        self.refusals.clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, mpsc::Sender<Input>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner) // a map of senders is whole after any panic
    }
}

/// Serves agents of any number of refits until dropped.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    desk: Desk,
    tasks: [AbortHandle; 3],
}

impl Server {
    /// Serves on `listener`, and counts whom it refuses. Who is trusted may change while it serves.
    ///
    /// # Errors
    /// TLS cannot be set up.
    pub fn start(
        listener: TcpListener,
        trust: watch::Receiver<Trust>,
        gate: impl Gate,
        refusals: Refusals,
    ) -> Result<Self, TlsError> {
        let (tls, follow) = Tls::new(trust.clone(), refusals.clone())?;
        let address = listener.local_addr().unwrap_or_else(|_| ([0, 0, 0, 0], 0).into());
        let desk = Desk { open: Arc::default(), refusals };
        let service = Service::new(trust, gate, desk.clone());
        let (accepted, connections) = mpsc::channel(limits::HANDSHAKES_MAX);
        let server = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(limits::KEEPALIVE_INTERVAL))
            .http2_keepalive_timeout(Some(limits::KEEPALIVE_TIMEOUT))
            .max_concurrent_streams(limits::CALLS_PER_CONNECTION_MAX)
            .serve_with_incoming(service.into_server(), ReceiverStream::new(connections));
        let tasks = [
            tokio::spawn(tls::accept(listener, move |stream| tls.clone().shake(stream), accepted))
                .abort_handle(),
            tokio::spawn(server).abort_handle(),
            tokio::spawn(follow).abort_handle(),
        ];
        Ok(Self { address, desk, tasks })
    }

    /// Where agents dial.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Coordinates one refit from now on. A coordinator of the same name that is still there gets no new agents.
    #[must_use]
    pub fn coordinate(&self, settings: Settings, record: impl EpochRecord) -> Coordinator {
        let refit = settings.refit.clone();
        let coordinator = Coordinator::start(settings, record, self.desk.clone());
        self.desk.open(refit, coordinator.inputs());
        coordinator
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}
