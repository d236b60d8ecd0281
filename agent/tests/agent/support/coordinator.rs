//! The smallest coordinator that agents cannot tell from a real one: enrols whoever shows the token, and sends
//! one membership once all seats are claimed.

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;
use tonic::{Request, Response, Status, Streaming};
use weightrefit_agent::identity::key_of;
use weightrefit_core::id::{Epoch, Incarnation, Rank, Sha256};
use weightrefit_core::membership::{Member, Membership, Seat};
use weightrefit_proto::refit::Refit;
use weightrefit_proto::report::RoundReport;
use weightrefit_proto::v1;
use weightrefit_proto::v1::agent_message::Kind;
use weightrefit_proto::v1::coordinator_server::CoordinatorServer;

pub(crate) type Outgoing = mpsc::Sender<Result<v1::Instruction, Status>>;

/// What agents have said.
#[derive(Default)]
pub(crate) struct Heard {
    keys: BTreeMap<String, Sha256>,
    pub(crate) joined: BTreeMap<String, (v1::Joining, Outgoing)>,
    pub(crate) accepted: Vec<v1::Accepted>,
    pub(crate) states: BTreeMap<String, v1::State>,
    pub(crate) rounds: Vec<RoundReport>,
    /// JSON lists of what clients recorded.
    pub(crate) recorded: Vec<Vec<u8>>,
    /// What agents are told that ask for their ranks; none is refused.
    pub(crate) seats: Vec<v1::Claim>,
}

pub(crate) struct Coordinator {
    pub(crate) address: String,
    pub(crate) bundle: PathBuf,
    pub(crate) directory: tempfile::TempDir,
    pub(crate) heard: Arc<Mutex<Heard>>,
    refit: Refit,
    runtime: tokio::runtime::Runtime,
}

const TOKEN: &str = "the token of this test";

impl Coordinator {
    pub(crate) fn start(refit: Refit) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let ca_key = KeyPair::generate().expect("a key");
        let mut ca = CertificateParams::default();
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        ca.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let ca_certificate = ca.self_signed(&ca_key).expect("an authority");
        let issuer = Issuer::new(ca, ca_key);
        let key = KeyPair::generate().expect("a key");
        let names = vec!["coordinator.test".to_owned()];
        let leaf = CertificateParams::new(names).expect("a name").signed_by(&key, &issuer).expect("a leaf");
        let bundle = directory.path().join("bundle.pem");
        std::fs::write(&bundle, ca_certificate.pem()).expect("a bundle");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = rustls::ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("TLS 1.3")
            .with_no_client_auth()
            .with_single_cert(vec![leaf.der().clone()], key.serialize_der().try_into().expect("a key"))
            .expect("a certificate");
        config.alpn_protocols = vec![b"h2".to_vec()];
        let heard = Arc::new(Mutex::new(Heard::default()));
        let service = Service { heard: Arc::clone(&heard), issuer: Arc::new(issuer) };
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        runtime.spawn(serve(listener, TlsAcceptor::from(Arc::new(config)), service));
        Self { address, bundle, directory, heard, refit, runtime }
    }

    pub(crate) fn token(&self) -> &'static str {
        TOKEN
    }

    /// Waits for all `pods` and sends them one membership.
    pub(crate) fn configure(&self, epoch: u64, pods: &[&str]) {
        self.configure_with(epoch, pods, vec![]);
    }

    /// The same with members that no agent of the binary hosts.
    pub(crate) fn configure_with(&self, epoch: u64, pods: &[&str], more: Vec<Member>) -> Membership {
        let joined = super::wait_for("joins", || {
            let heard = self.heard.lock().expect("no panic");
            pods.iter().map(|pod| heard.joined.get(*pod).cloned()).collect::<Option<Vec<_>>>()
        });
        let heard = self.heard.lock().expect("no panic");
        let member = |joining: &v1::Joining, claim: &v1::Claim| Member {
            seat: seat(claim),
            pod_uid: joining.pod_uid.clone(),
            incarnation: Incarnation(u128::from_be_bytes(
                joining.incarnation.clone().try_into().expect("16"),
            )),
            key: heard.keys[&joining.pod_uid],
            round_addresses: joining.round_addresses.clone(),
            byte_addresses: joining.byte_addresses.clone(),
        };
        let members = joined
            .iter()
            .flat_map(|(joining, _)| joining.claims.iter().map(|c| member(joining, c)))
            .chain(more);
        let pools = self.refit.pools.iter().map(|pool| pool.name.clone()).collect();
        let membership =
            Membership::new("uid", Epoch(epoch), None, pools, members.collect()).expect("is valid");
        drop(heard);
        let configure = v1::Configure {
            membership: serde_json::to_vec(&membership).expect("JSON"),
            refit: serde_json::to_vec(&self.refit).expect("JSON"),
            epoch,
        };
        for (_, sender) in joined {
            self.send(&sender, v1::instruction::Kind::Configure(configure.clone()));
        }
        membership
    }

    /// Waits until the pod's agent has joined.
    pub(crate) fn joined(&self, pod: &str) {
        super::wait_for("join", || {
            let heard = self.heard.lock().expect("no panic");
            heard.joined.contains_key(pod).then_some(())
        });
    }

    /// Refuses the agent of the pod, whose stream is forgotten.
    pub(crate) fn refuse(&self, pod: &str) {
        let joined = self.heard.lock().expect("no panic").joined.remove(pod);
        let fault = v1::Fault { code: "Unauthorized".into(), message: "not now".into(), hint: String::new() };
        self.send(&joined.expect("it has joined").1, v1::instruction::Kind::Refused(fault));
    }

    fn send(&self, sender: &Outgoing, kind: v1::instruction::Kind) {
        let instruction = v1::Instruction { kind: Some(kind) };
        self.runtime.block_on(sender.send(Ok(instruction))).expect("is connected");
    }

    /// Waits for the round of this step.
    pub(crate) fn round(&self, step: i64) -> RoundReport {
        super::wait_for("round", || {
            let heard = self.heard.lock().expect("no panic");
            heard.rounds.iter().find(|round| round.version.step == step).cloned()
        })
    }

    /// Waits for what a client has recorded: a JSON list of tensors.
    pub(crate) fn recorded(&self) -> Vec<u8> {
        super::wait_for("recording", || self.heard.lock().expect("no panic").recorded.first().cloned())
    }
}

fn seat(claim: &v1::Claim) -> Seat {
    let rank = Rank(claim.rank);
    match claim.side.as_str() {
        "training" => Seat::Training { rank },
        _ => Seat::Inference { pool: claim.pool.clone(), replica: claim.replica.clone(), rank },
    }
}

#[derive(Clone)]
struct Service {
    heard: Arc<Mutex<Heard>>,
    issuer: Arc<Issuer<'static, KeyPair>>,
}

#[tonic::async_trait]
impl v1::coordinator_server::Coordinator for Service {
    type JoinStream = ReceiverStream<Result<v1::Instruction, Status>>;

    async fn enrol(&self, request: Request<v1::EnrolRequest>) -> Result<Response<v1::EnrolResponse>, Status> {
        let request = request.into_inner();
        if request.token != TOKEN {
            return Err(Status::unauthenticated("token is not the one of this test"));
        }
        let csr = CertificateSigningRequestParams::from_der(&request.csr_der.into()).expect("a request");
        let leaf = csr.signed_by(&self.issuer).expect("a certificate");
        let key = key_of(leaf.der()).expect("a key");
        self.heard.lock().expect("no panic").keys.insert(request.pod_uid, key);
        let chain = vec![leaf.der().to_vec()];
        Ok(Response::new(v1::EnrolResponse { certificate_chain_der: chain, trust_bundle_der: vec![] }))
    }

    async fn seats(&self, request: Request<v1::SeatsRequest>) -> Result<Response<v1::SeatsResponse>, Status> {
        assert_eq!(request.into_inner().refit, "ns/refit");
        match self.heard.lock().expect("no panic").seats.clone() {
            claims if claims.is_empty() => Err(Status::failed_precondition("NotConfigured: no refit yet")),
            claims => Ok(Response::new(v1::SeatsResponse { claims })),
        }
    }

    async fn join(
        &self,
        request: Request<Streaming<v1::AgentMessage>>,
    ) -> Result<Response<Self::JoinStream>, Status> {
        let (sender, receiver) = mpsc::channel(16);
        let (heard, mut incoming) = (Arc::clone(&self.heard), request.into_inner());
        tokio::spawn(async move {
            let mut pod = String::new();
            while let Ok(Some(message)) = incoming.message().await {
                let mut heard = heard.lock().expect("no panic");
                match message.kind.expect("a kind") {
                    Kind::Joining(joining) => {
                        pod.clone_from(&joining.pod_uid);
                        heard.joined.insert(pod.clone(), (joining, sender.clone()));
                    }
                    Kind::State(state) => drop(heard.states.insert(pod.clone(), state)),
                    Kind::Accepted(accepted) => heard.accepted.push(accepted),
                    Kind::RoundEnded(round) => {
                        heard.rounds.push(serde_json::from_str(&round.json).expect("JSON of a round"));
                    }
                    Kind::Recorded(page) => heard.recorded.push(page.tensors),
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

async fn serve(listener: TcpListener, acceptor: TlsAcceptor, service: Service) {
    let (accepted, connections) = mpsc::channel::<std::io::Result<Connection>>(16);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            if let Ok(stream) = acceptor.accept(stream).await {
                let _ = accepted.send(Ok(Connection(stream))).await;
            }
        }
    });
    let server = tonic::transport::Server::builder();
    let incoming = ReceiverStream::new(connections);
    server.serve_with_incoming(CoordinatorServer::new(service), incoming).await.expect("serves");
}

struct Connection(TlsStream<TcpStream>);

impl Connected for Connection {
    type ConnectInfo = ();
    fn connect_info(&self) {}
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}
