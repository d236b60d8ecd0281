//! The gRPC service: Enrol by token, Join by certificate.

use super::hub::{Input, Instructions};
use super::tls::Peer;
use super::wire;
use crate::identity::{Authority, IdentityError, Tokens};
use crate::limits;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use weightrefit_core::id::Sha256;
use weightrefit_proto::v1;
use weightrefit_proto::v1::agent_message::Kind;
use weightrefit_proto::v1::coordinator_server::{Coordinator, CoordinatorServer};
use weightrefit_proto::v1::instruction;

/// Serves one coordinator.
pub(super) struct Service {
    refit: String,
    authority: Arc<Authority>,
    tokens: Arc<Tokens>,
    hub: mpsc::Sender<Input>,
    sessions: AtomicU64,
}

impl Service {
    pub(super) fn new(
        refit: String,
        authority: Arc<Authority>,
        tokens: Arc<Tokens>,
        hub: mpsc::Sender<Input>,
    ) -> Self {
        Self { refit, authority, tokens, hub, sessions: AtomicU64::new(0) }
    }

    pub(super) fn into_server(self) -> CoordinatorServer<Self> {
        CoordinatorServer::new(self).max_decoding_message_size(limits::AGENT_MESSAGE_BYTES_MAX)
    }
}

#[tonic::async_trait]
impl Coordinator for Service {
    async fn enrol(&self, request: Request<v1::EnrolRequest>) -> Result<Response<v1::EnrolResponse>, Status> {
        let v1::EnrolRequest { token, csr_der, pod_uid } = request.into_inner();
        // Signing first: a request that cannot be signed does not cost the pod its token.
        let chain = self.authority.sign(&csr_der, &pod_uid).map_err(|error| match error {
            IdentityError::Request { .. } | IdentityError::PodUid(_) => {
                Status::invalid_argument(error.to_string())
            }
            IdentityError::NoPod | IdentityError::Signing(_) => Status::internal(error.to_string()),
        })?;
        if !self.tokens.redeem(&pod_uid, &token) {
            return Err(Status::unauthenticated(format!("token is not the unused one of pod {pod_uid}")));
        }
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
            refit: self.refit.clone(),
            hub: self.hub.clone(),
            instructions,
        };
        tokio::spawn(stream.run(pod, key, request.into_inner()));
        Ok(Response::new(ReceiverStream::new(outgoing)))
    }
}

/// One agent's stream, after its certificate was accepted.
struct Stream {
    session: u64,
    refit: String,
    hub: mpsc::Sender<Input>,
    instructions: Instructions,
}

impl Stream {
    async fn run(self, pod: String, key: Sha256, messages: Streaming<v1::AgentMessage>) {
        let session = self.session;
        let hub = self.hub.clone();
        let ended = self.converse(&pod, key, messages).await;
        if let Err(error) = ended {
            tracing::debug!(pod, %error, "agent's stream ended");
        }
        // The hub ends only with the coordinator.
        let _ = hub.send(Input::Left { session }).await;
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
        let Self { session, refit, hub, instructions } = self;
        let joined = match wire::joining(&refit, pod, key, joining) {
            Ok(joining) => {
                let (answer, answered) = oneshot::channel();
                let instructions = instructions.clone();
                let input = Input::Join { session, joining, instructions, answer };
                hub.send(input).await.map_err(|_| Status::unavailable("stopping"))?;
                answered.await.map_err(|_| Status::unavailable("stopping"))?
            }
            Err(fault) => Err(fault),
        };
        if let Err(fault) = joined {
            tracing::warn!(pod, code = fault.code, message = fault.message, "join refused");
            let refused = v1::Instruction { kind: Some(instruction::Kind::Refused(fault)) };
            // The agent that is gone needs no answer.
            let _ = instructions.send(Ok(refused)).await;
            return Ok(());
        }
        // From here on only the hub holds the agent's queue: when it lets go, the stream ends.
        let held = instructions.downgrade();
        drop(instructions);
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
}
