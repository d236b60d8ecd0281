//! A client of the operator's port that says whatever a test wants, with certificates that pods' tokens really bought.

use hyper_util::rt::TokioIo;
use prost::Message;
use rcgen::{CertificateParams, KeyPair};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_rustls::client::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Status, Streaming};
use weightrefit::identity::SERVER_NAME;
use weightrefit_core::membership::Membership;
use weightrefit_proto::v1;
use weightrefit_proto::v1::agent_message::Kind;
use weightrefit_proto::v1::coordinator_client::CoordinatorClient;
use weightrefit_proto::v1::instruction;

/// For an answer, unless the machine is busy.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where the operator listens, and which authority it has.
#[derive(Clone)]
pub(crate) struct Port {
    pub(crate) address: String,
    pub(crate) bundle: Vec<u8>,
}

/// A key, and the certificate that it has.
pub(crate) struct Rogue {
    port: Port,
    key: KeyPair,
    chain: Vec<CertificateDer<'static>>,
}

impl Rogue {
    /// With a certificate of its own making.
    pub(crate) fn stranger(port: &Port) -> Self {
        let key = KeyPair::generate().expect("a key");
        let own = CertificateParams::default().self_signed(&key).expect("a certificate");
        Self { port: port.clone(), key, chain: vec![own.der().clone()] }
    }

    /// The same where it finds another port.
    pub(crate) fn at(self, port: &Port) -> Self {
        Self { port: port.clone(), ..self }
    }

    /// With the certificate that the pod's token buys.
    pub(crate) async fn enrolled(port: &Port, pod_uid: &str, token: &str) -> Self {
        let mut rogue = Self::stranger(port);
        rogue.enrol(pod_uid, token).await.expect("the pod's own token");
        rogue
    }

    pub(crate) async fn enrol(&mut self, pod_uid: &str, token: &str) -> Result<(), v1::Fault> {
        let csr = CertificateParams::default().serialize_request(&self.key).expect("a request");
        self.enrol_with(csr.der().to_vec(), pod_uid, token).await
    }

    pub(crate) async fn enrol_with(
        &mut self,
        csr_der: Vec<u8>,
        pod_uid: &str,
        token: &str,
    ) -> Result<(), v1::Fault> {
        let request = v1::EnrolRequest { token: token.into(), csr_der, pod_uid: pod_uid.into() };
        let answer = self.client().await.enrol(request).await.map_err(|status| fault(&status))?.into_inner();
        self.chain = answer.certificate_chain_der.into_iter().map(CertificateDer::from).collect();
        Ok(())
    }

    /// A connection on which nothing has been said.
    pub(crate) async fn connect(&self) -> std::io::Result<TlsStream<TcpStream>> {
        connect(self.port.address.clone(), Arc::new(self.config())).await
    }

    fn config(&self) -> ClientConfig {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&self.port.bundle) {
            roots.add(certificate.expect("PEM")).expect("an authority");
        }
        let key = PrivatePkcs8KeyDer::from(self.key.serialize_der());
        let mut config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .expect("TLS")
            .with_root_certificates(roots)
            .with_client_auth_cert(self.chain.clone(), key.into())
            .expect("key and certificate");
        config.alpn_protocols = vec![b"h2".to_vec()];
        config
    }

    async fn client(&self) -> CoordinatorClient<Channel> {
        let (config, address) = (Arc::new(self.config()), self.port.address.clone());
        let dial = move |_: tonic::codegen::http::Uri| {
            let stream = connect(address.clone(), Arc::clone(&config));
            async move { Ok::<_, std::io::Error>(TokioIo::new(stream.await?)) }
        };
        let endpoint = Endpoint::from_static("http://coordinator");
        let channel = endpoint.connect_with_connector(tower::service_fn(dial)).await.expect("a connection");
        CoordinatorClient::new(channel)
    }

    /// Opens a stream and says this first, if anything.
    pub(crate) async fn open(&self, first: Option<Kind>) -> Result<Line, v1::Fault> {
        let (messages, outgoing) = mpsc::channel(16);
        if let Some(kind) = first {
            messages.send(v1::AgentMessage { kind: Some(kind) }).await.expect("room");
        }
        let answer = self.client().await.join(ReceiverStream::new(outgoing)).await;
        let instructions = answer.map_err(|status| fault(&status))?.into_inner();
        Ok(Line { messages, instructions })
    }
}

async fn connect(address: String, config: Arc<ClientConfig>) -> std::io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(address).await?;
    let name = ServerName::try_from(SERVER_NAME).expect("a name");
    tokio_rustls::TlsConnector::from(config).connect(name, stream).await
}

/// A stream that is open.
pub(crate) struct Line {
    messages: mpsc::Sender<v1::AgentMessage>,
    instructions: Streaming<v1::Instruction>,
}

impl Line {
    pub(crate) async fn say(&self, kind: Kind) {
        // The other side may have ended the stream.
        let _ = self.messages.send(v1::AgentMessage { kind: Some(kind) }).await;
    }

    /// The next instruction; `None` once the stream has ended.
    pub(crate) async fn hear(&mut self) -> Option<instruction::Kind> {
        let next = tokio::time::timeout(PATIENCE, self.instructions.message()).await.expect("an answer");
        next.ok().flatten().and_then(|instruction| instruction.kind)
    }

    pub(crate) async fn membership(&mut self) -> Membership {
        match self.hear().await {
            Some(instruction::Kind::Configure(configure)) => {
                serde_json::from_slice(&configure.membership).expect("a membership")
            }
            other => panic!("{other:?} where a membership was due"),
        }
    }

    /// Why it is refused, and that nothing follows.
    pub(crate) async fn refusal(mut self) -> v1::Fault {
        loop {
            match self.hear().await {
                Some(instruction::Kind::Refused(fault)) => {
                    assert_eq!(self.hear().await, None, "nothing follows");
                    return fault;
                }
                Some(instruction::Kind::Configure(_)) => {}
                other => panic!("{other:?} where a refusal was due"),
            }
        }
    }
}

/// What the details of a status say.
fn fault(status: &Status) -> v1::Fault {
    v1::Fault::decode(status.details()).unwrap_or_else(|_| panic!("no fault in the details of {status:?}"))
}

/// The claim of an honest agent.
pub(crate) fn joining(refit: &str, pod_uid: &str, process: u8, claims: Vec<v1::Claim>) -> v1::Joining {
    v1::Joining {
        refit: refit.into(),
        pod_uid: pod_uid.into(),
        incarnation: vec![process; 16],
        claims,
        round_addresses: vec!["127.0.0.1:1".into()],
        byte_addresses: vec!["127.0.0.1:2".into()],
        agent_version: "0.1.0".into(),
        protocol_min: 1,
        protocol_max: 1,
        planner_version: 1,
        ..v1::Joining::default()
    }
}

pub(crate) fn training(rank: u32) -> v1::Claim {
    v1::Claim { side: "training".into(), rank, ..v1::Claim::default() }
}

pub(crate) fn inference(replica: &str, rank: u32) -> v1::Claim {
    v1::Claim { side: "inference".into(), pool: "default".into(), replica: replica.into(), rank }
}
