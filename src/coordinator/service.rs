//! The gRPC service: Enrol by token, Join by certificate.

use super::gate::Gate;
use super::hub::{Input, Instructions};
use super::server::Desk;
use super::tls::Peer;
use super::wire;
use crate::identity::{Authority, IdentityError};
use crate::limits;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use weightrefit_core::code::Code;
use weightrefit_core::id::Sha256;
use weightrefit_proto::v1;
use weightrefit_proto::v1::agent_message::Kind;
use weightrefit_proto::v1::coordinator_server::{Coordinator, CoordinatorServer};
use weightrefit_proto::v1::instruction;

/// Serves all refits of one listener.
pub(super) struct Service<G> {
    authority: Arc<Authority>,
    gate: Arc<G>,
    desk: Desk,
    sessions: AtomicU64,
}

impl<G: Gate> Service<G> {
    pub(super) fn new(authority: Arc<Authority>, gate: G, desk: Desk) -> Self {
        Self { authority, gate: Arc::new(gate), desk, sessions: AtomicU64::new(0) }
    }

    pub(super) fn into_server(self) -> CoordinatorServer<Self> {
        CoordinatorServer::new(self).max_decoding_message_size(limits::AGENT_MESSAGE_BYTES_MAX)
    }
}

#[tonic::async_trait]
impl<G: Gate> Coordinator for Service<G> {
    async fn enrol(&self, request: Request<v1::EnrolRequest>) -> Result<Response<v1::EnrolResponse>, Status> {
        let v1::EnrolRequest { token, csr_der, pod_uid } = request.into_inner();
        // Signing first: a request that cannot be signed does not cost the pod its token.
        let chain = self.authority.sign(&csr_der, &pod_uid).map_err(|error| match error {
            IdentityError::Request { .. } | IdentityError::PodUid(_) => {
                Status::invalid_argument(error.to_string())
            }
            IdentityError::NoPod | IdentityError::Kept(_) | IdentityError::Signing(_) => {
                Status::internal(error.to_string())
            }
        })?;
        self.gate.enrol(&pod_uid, &token).await.map_err(|fault| {
            tracing::warn!(pod = pod_uid, code = fault.code, message = fault.message, "enrolment refused");
            // What may be asked again must not end the agent.
            match fault.code == Code::Busy.name() {
                true => Status::unavailable(fault.message),
                false => Status::unauthenticated(fault.message),
            }
        })?;
        Ok(Response::new(v1::EnrolResponse {
            certificate_chain_der: chain.into_iter().map(|certificate| certificate.to_vec()).collect(),
            trust_bundle_der: vec![self.authority.certificate().to_vec()],
        }))
    }

    type JoinStream = ReceiverStream<Result<v1::Instruction, Status>>;

    async fn join(
        &self,
        request: Request<Streaming<v1::AgentMessage>>,
    ) -> Result<Response<Self::JoinStream>, Status> {
        let peer = request.extensions().get::<Peer>();
        let Some(Peer { pod: Some(pod), key: Some(key) }) = peer.cloned() else {
            return Err(Status::unauthenticated("no certificate of this coordinator's authority was shown"));
        };
        let (instructions, outgoing) = mpsc::channel(limits::INSTRUCTIONS_MAX);
        let stream = Stream {
            session: self.sessions.fetch_add(1, Ordering::Relaxed),
            gate: Arc::clone(&self.gate),
            desk: self.desk.clone(),
            instructions,
        };
        tokio::spawn(stream.run(pod, key, request.into_inner()));
        Ok(Response::new(ReceiverStream::new(outgoing)))
    }
}

/// One agent's stream, after its certificate was accepted.
struct Stream<G> {
    session: u64,
    gate: Arc<G>,
    desk: Desk,
    instructions: Instructions,
}

impl<G: Gate> Stream<G> {
    async fn run(self, pod: String, key: Sha256, messages: Streaming<v1::AgentMessage>) {
        if let Err(error) = self.converse(&pod, key, messages).await {
            tracing::debug!(pod, %error, "agent's stream ended");
        }
    }

    async fn converse(
        self,
        pod: &str,
        key: Sha256,
        mut messages: Streaming<v1::AgentMessage>,
    ) -> Result<(), Status> {
        let first = tokio::time::timeout(limits::JOIN_TIMEOUT, messages.message()).await;
        let first = first.map_err(|_| Status::deadline_exceeded("no joining message"))??;
        let Some(v1::AgentMessage { kind: Some(Kind::Joining(joining)) }) = first else {
            return Err(Status::invalid_argument("first message is not `joining`"));
        };
        let session = self.session;
        let hub = match self.join(pod, key, joining).await {
            Ok(hub) => hub?,
            Err(fault) => {
                tracing::warn!(pod, code = fault.code, message = fault.message, "join refused");
                let refused = v1::Instruction { kind: Some(instruction::Kind::Refused(fault)) };
                // The agent that is gone needs no answer.
                let _ = self.instructions.send(Ok(refused)).await;
                return Ok(());
            }
        };
        // From here on only the hub holds the agent's queue: when it lets go, the stream ends.
        let held = self.instructions.downgrade();
        drop(self);
        let ended = relay(session, &hub, &held, messages).await;
        // The hub ends only with the coordinator.
        let _ = hub.send(Input::Left { session }).await;
        ended
    }

    /// The hub of the refit that took the agent in; the outer error is for the agent.
    async fn join(
        &self,
        pod: &str,
        key: Sha256,
        joining: v1::Joining,
    ) -> Result<Result<mpsc::Sender<Input>, Status>, v1::Fault> {
        let (refit, agent_version) = (joining.refit.clone(), joining.agent_version.clone());
        let joining = wire::joining(pod, key, joining)?;
        let hub = self.desk.find(&refit).ok_or_else(|| {
            let text =
                format!("pod {pod} claims refit {}, which has no coordinator here", wire::shown(&refit));
            wire::fault(Code::NotConfigured, text)
        })?;
        self.gate.admit(&refit, pod, &joining.seats).await?;
        let (answer, answered) = oneshot::channel();
        let (session, instructions) = (self.session, self.instructions.clone());
        let agent_version = wire::shown(&agent_version);
        let stopping = || Ok(Err(Status::unavailable("stopping")));
        if hub.send(Input::Join { session, joining, agent_version, instructions, answer }).await.is_err() {
            return stopping();
        }
        match answered.await {
            Ok(joined) => joined.map(|()| Ok(hub)),
            Err(_) => stopping(),
        }
    }
}

/// Until the agent or the hub ends it.
async fn relay(
    session: u64,
    hub: &mpsc::Sender<Input>,
    held: &mpsc::WeakSender<Result<v1::Instruction, Status>>,
    mut messages: Streaming<v1::AgentMessage>,
) -> Result<(), Status> {
    loop {
        let message = messages.message().await?;
        let Some(v1::AgentMessage { kind }) = message else { return Ok(()) };
        if held.strong_count() == 0 {
            return Ok(());
        }
        if let Some(message) = kind {
            let input = Input::Heard { session, message };
            hub.send(input).await.map_err(|_| Status::unavailable("stopping"))?;
        }
    }
}
