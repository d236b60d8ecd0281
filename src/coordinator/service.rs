//! The gRPC service: Enrol by token, Join by certificate.

use super::gate::{Admitted, Gate};
use super::hub::{Input, Instructions, Present};
use super::refusals::At;
use super::server::Desk;
use super::tls::Peer;
use super::wire;
use crate::identity::{IdentityError, Trust};
use crate::limits;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::{mpsc, oneshot, watch};
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
    trust: watch::Receiver<Trust>,
    gate: Arc<G>,
    desk: Desk,
    sessions: AtomicU64,
}

impl<G: Gate> Service<G> {
    pub(super) fn new(trust: watch::Receiver<Trust>, gate: G, desk: Desk) -> Self {
        Self { trust, gate: Arc::new(gate), desk, sessions: AtomicU64::new(0) }
    }

    pub(super) fn into_server(self) -> CoordinatorServer<Self> {
        CoordinatorServer::new(self).max_decoding_message_size(limits::AGENT_MESSAGE_BYTES_MAX)
    }
}

impl<G: Gate> Service<G> {
    fn not_enrolled(&self, pod: &str, code: tonic::Code, fault: &v1::Fault) -> Status {
        self.desk.refusals().count(At::Enrol, fault);
        tracing::warn!(
            pod = wire::shown(pod),
            code = fault.code,
            message = fault.message,
            "enrolment refused"
        );
        wire::status(code, fault)
    }
}

#[tonic::async_trait]
impl<G: Gate> Coordinator for Service<G> {
    async fn enrol(&self, request: Request<v1::EnrolRequest>) -> Result<Response<v1::EnrolResponse>, Status> {
        let v1::EnrolRequest { token, csr_der, pod_uid } = request.into_inner();
        // Signing first: a request that cannot be signed does not cost the pod its token.
        let trust = self.trust.borrow().clone();
        let chain = trust.signer().sign(&csr_der, &pod_uid).map_err(|error| match error {
            IdentityError::Request { .. } | IdentityError::PodUid(_) => {
                let fault = wire::fault(Code::Unsupported, error.to_string());
                self.not_enrolled(&pod_uid, tonic::Code::InvalidArgument, &fault)
            }
            IdentityError::NoPod | IdentityError::Kept(_) | IdentityError::Signing(_) => {
                Status::internal(error.to_string())
            }
        })?;
        self.gate.enrol(&pod_uid, &token).await.map_err(|fault| {
            // What may be asked again must not end the agent.
            let code = match fault.code == Code::Busy.name() {
                true => tonic::Code::Unavailable,
                false => tonic::Code::Unauthenticated,
            };
            self.not_enrolled(&pod_uid, code, &fault)
        })?;
        Ok(Response::new(v1::EnrolResponse {
            certificate_chain_der: chain.into_iter().map(|certificate| certificate.to_vec()).collect(),
            trust_bundle_der: trust.certificates().map(|certificate| certificate.to_vec()).collect(),
        }))
    }

    async fn seats(&self, request: Request<v1::SeatsRequest>) -> Result<Response<v1::SeatsResponse>, Status> {
        let (pod, _) =
            proven(&request).map_err(|fault| wire::status(tonic::Code::Unauthenticated, &fault))?;
        let refit = request.into_inner().refit;
        match self.gate.seats(&refit, &pod).await {
            Ok(seats) => {
                Ok(Response::new(v1::SeatsResponse { claims: seats.iter().map(v1::Claim::from).collect() }))
            }
            Err(fault) => {
                tracing::debug!(pod, code = fault.code, message = fault.message, "no seats told");
                Err(wire::status(tonic::Code::FailedPrecondition, &fault))
            }
        }
    }

    type JoinStream = ReceiverStream<Result<v1::Instruction, Status>>;

    async fn join(
        &self,
        request: Request<Streaming<v1::AgentMessage>>,
    ) -> Result<Response<Self::JoinStream>, Status> {
        let (pod, key) = proven(&request).map_err(|fault| {
            self.desk.refusals().count(At::Join, &fault);
            wire::status(tonic::Code::Unauthenticated, &fault)
        })?;
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

/// The pod whose certificate was shown, and its key.
fn proven<T>(request: &Request<T>) -> Result<(String, Sha256), v1::Fault> {
    match request.extensions().get::<Peer>().cloned() {
        Some(Peer { pod: Some(pod), key: Some(key) }) => Ok((pod, key)),
        _ => {
            let text = "no certificate of this coordinator's authority was shown";
            Err(wire::fault(Code::Unauthenticated, text))
        }
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
        let joining = match first(&mut messages).await {
            Ok(joining) => joining?,
            Err(fault) => return self.refuse(pod, None, fault).await,
        };
        let (session, refit, was_member) = (self.session, joining.refit.clone(), joining.epoch_seen > 0);
        let (hub, present) = match self.join(pod, key, joining).await {
            Ok(taken) => taken?,
            // Else the members of a refit that was deleted while nobody coordinated would go on for ever.
            Err(_) if was_member && self.gate.is_gone(&refit).await => {
                tracing::info!(pod, refit, "refit was deleted");
                return self.instruct(instruction::Kind::Drain(v1::Drain {})).await;
            }
            Err(fault) => return self.refuse(pod, Some(refit), fault).await,
        };
        // From here on only the hub holds the agent's queue: when it lets go, the stream ends.
        drop(self);
        let ended = relay(session, &hub, present, messages).await;
        // The hub ends only with the coordinator.
        let _ = hub.send(Input::Left { session }).await;
        ended
    }

    /// Tells the agent, and whoever looks at the refit that its pod belongs to.
    async fn refuse(&self, pod: &str, refit: Option<String>, fault: v1::Fault) -> Result<(), Status> {
        self.desk.refusals().count(At::Join, &fault);
        tracing::warn!(pod, code = fault.code, message = fault.message, "join refused");
        let refit = self.gate.refit_of(pod).or(refit);
        if let Some(hub) = refit.and_then(|refit| self.desk.find(&refit)) {
            // One of many may be lost where the hub has too much to do.
            let _ = hub.try_send(Input::Refused { pod_uid: pod.to_owned(), fault: fault.clone() });
        }
        self.instruct(instruction::Kind::Refused(fault)).await
    }

    async fn instruct(&self, kind: instruction::Kind) -> Result<(), Status> {
        // The agent that is gone needs no answer.
        let _ = self.instructions.send(Ok(v1::Instruction { kind: Some(kind) })).await;
        Ok(())
    }

    /// The hub of the refit that took the agent in; the outer error is for the agent.
    async fn join(
        &self,
        pod: &str,
        key: Sha256,
        joining: v1::Joining,
    ) -> Result<Result<(mpsc::Sender<Input>, Present), Status>, v1::Fault> {
        let (refit, agent_version) = (joining.refit.clone(), joining.agent_version.clone());
        let mut joining = wire::joining(pod, key, joining)?;
        let hub = self.desk.find(&refit).ok_or_else(|| {
            let text =
                format!("pod {pod} claims refit {}, which has no coordinator here", wire::shown(&refit));
            wire::fault(Code::NotConfigured, text)
        })?;
        let Admitted { pod: name, created_s } = self.gate.admit(&refit, pod, &joining.seats).await?;
        (joining.pod, joining.created_s) = (name, created_s);
        let (answer, answered) = oneshot::channel();
        let (session, instructions) = (self.session, self.instructions.clone());
        let agent_version = wire::shown(&agent_version);
        let stopping = || Ok(Err(Status::unavailable("stopping")));
        if hub.send(Input::Join { session, joining, agent_version, instructions, answer }).await.is_err() {
            return stopping();
        }
        match answered.await {
            Ok(joined) => joined.map(|present| Ok((hub, present))),
            Err(_) => stopping(),
        }
    }
}

/// The claim that opens a stream. The outer error is for the agent.
async fn first(messages: &mut Streaming<v1::AgentMessage>) -> Result<Result<v1::Joining, Status>, v1::Fault> {
    let message = tokio::time::timeout(limits::JOIN_TIMEOUT, messages.message()).await;
    let message = message.map_err(|_| {
        let text = format!("no message within {} s of opening a stream", limits::JOIN_TIMEOUT.as_secs());
        wire::fault(Code::Unsupported, text)
    })?;
    match message {
        Ok(Some(v1::AgentMessage { kind: Some(Kind::Joining(joining)) })) => Ok(Ok(joining)),
        Ok(Some(_)) => Err(wire::fault(Code::Unsupported, "first message is not `joining`")),
        Ok(None) => Ok(Err(Status::cancelled("stream ended before its first message"))),
        Err(status) => match wire::misunderstood(&status) {
            Some(fault) => Err(fault),
            None => Ok(Err(status)),
        },
    }
}

/// Until the agent or the hub ends it.
async fn relay(
    session: u64,
    hub: &mpsc::Sender<Input>,
    mut present: Present,
    mut messages: Streaming<v1::AgentMessage>,
) -> Result<(), Status> {
    loop {
        let message = tokio::select! {
            message = messages.message() => message,
            _ = &mut present => return Ok(()),
        };
        let input = match message {
            Ok(Some(v1::AgentMessage { kind: Some(message) })) => Input::Heard { session, message },
            Ok(Some(v1::AgentMessage { kind: None })) => continue,
            Ok(None) => return Ok(()),
            Err(status) => match wire::misunderstood(&status) {
                Some(fault) => Input::Misunderstood { session, fault },
                None => return Err(status),
            },
        };
        let is_last = matches!(input, Input::Misunderstood { .. });
        hub.send(input).await.map_err(|_| Status::unavailable("stopping"))?;
        if is_last {
            return Ok(());
        }
    }
}
