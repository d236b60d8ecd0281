//! Agents over real connections, as far as the coordinator can tell.

use super::{Coordinator, InMemory, Refusals, Server, Settings};
use crate::identity::{Authority, SERVER_NAME, Tokens, Trust};
use hyper_util::rt::TokioIo;
use rcgen::{CertificateParams, KeyPair};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};
use weightrefit_core::code::Code as CoreCode;
use weightrefit_core::id::{Rank, Sha256};
use weightrefit_core::membership::roster::{Basis, Cause, PoolSpec, Spec, Standing};
use weightrefit_core::membership::{Membership, Seat};
use weightrefit_proto::v1;
use weightrefit_proto::v1::agent_message::Kind;
use weightrefit_proto::v1::coordinator_client::CoordinatorClient;
use weightrefit_proto::v1::instruction;

struct World {
    trust: watch::Receiver<Trust>,
    tokens: Arc<Tokens>,
    server: Server,
    coordinator: Coordinator,
}

fn basis(generation: u64) -> Basis {
    Basis { generation, resolved: Sha256([0; 32]) }
}

fn settings(refit: &str) -> Settings {
    let pools = vec![PoolSpec { name: "default".into(), ranks_per_replica: 1, min_replicas: 1 }];
    let spec = Spec { basis: basis(1), training_ranks: 1, pools };
    Settings { refit: refit.into(), refit_uid: format!("uid of {refit}"), spec, resolved: b"{}".to_vec() }
}

impl World {
    async fn new() -> Self {
        let trust = Trust::alone(Authority::generate().unwrap());
        let tokens = Arc::new(Tokens::default());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server =
            Server::start(listener, trust.clone(), Arc::clone(&tokens), Refusals::default()).unwrap();
        let coordinator = server.coordinate(settings("rl/tiny"), InMemory::default());
        Self { trust, tokens, server, coordinator }
    }

    /// Enrols with a fresh token and joins.
    async fn agent(&self, pod: &str, incarnation: u8, seat: v1::Claim) -> Agent {
        let mut agent = Agent::new(self, pod);
        let token = self.tokens.issue(pod).unwrap();
        agent.enrol(&token).await.unwrap();
        agent.join(incarnation, seat).await.unwrap();
        agent
    }
}

struct Agent {
    address: SocketAddr,
    roots: RootCertStore,
    refit: String,
    pod: String,
    key: KeyPair,
    chain: Vec<CertificateDer<'static>>,
    stream: Option<(mpsc::Sender<v1::AgentMessage>, Streaming<v1::Instruction>)>,
}

impl Agent {
    fn new(world: &World, pod: &str) -> Self {
        let key = KeyPair::generate().unwrap();
        let own = CertificateParams::default().self_signed(&key).unwrap();
        let mut roots = RootCertStore::empty();
        world.trust.borrow().certificates().for_each(|of| roots.add(of.clone()).unwrap());
        let (address, chain) = (world.server.address(), vec![own.der().clone()]);
        Self { address, roots, refit: "rl/tiny".into(), pod: pod.into(), key, chain, stream: None }
    }

    async fn client(&self) -> CoordinatorClient<Channel> {
        let key = PrivatePkcs8KeyDer::from(self.key.serialize_der());
        let mut config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(self.roots.clone())
            .with_client_auth_cert(self.chain.clone(), key.into())
            .unwrap();
        config.alpn_protocols = vec![b"h2".to_vec()];
        let (config, address) = (Arc::new(config), self.address);
        let connect = move |_: tonic::codegen::http::Uri| {
            let config = Arc::clone(&config);
            async move {
                let stream = TcpStream::connect(address).await?;
                let name = ServerName::try_from(SERVER_NAME).unwrap();
                let stream = tokio_rustls::TlsConnector::from(config).connect(name, stream).await?;
                Ok::<_, std::io::Error>(TokioIo::new(stream))
            }
        };
        let endpoint = Endpoint::from_static("http://coordinator");
        CoordinatorClient::new(endpoint.connect_with_connector(tower::service_fn(connect)).await.unwrap())
    }

    async fn enrol(&mut self, token: &str) -> Result<(), Status> {
        let request = CertificateParams::default().serialize_request(&self.key).unwrap();
        let (token, csr_der, pod_uid) = (token.to_owned(), request.der().to_vec(), self.pod.clone());
        let answer =
            self.client().await.enrol(v1::EnrolRequest { token, csr_der, pod_uid }).await?.into_inner();
        self.chain = answer.certificate_chain_der.into_iter().map(CertificateDer::from).collect();
        Ok(())
    }

    async fn join(&mut self, incarnation: u8, claim: v1::Claim) -> Result<(), Status> {
        let (messages, outgoing) = mpsc::channel(4);
        let joining = v1::Joining {
            refit: self.refit.clone(),
            pod_uid: self.pod.clone(),
            incarnation: vec![incarnation; 16],
            claims: vec![claim],
            round_addresses: vec!["127.0.0.1:1".into()],
            byte_addresses: vec!["127.0.0.1:2".into()],
            protocol_min: 1,
            protocol_max: 1,
            ..Default::default()
        };
        messages.send(v1::AgentMessage { kind: Some(Kind::Joining(joining)) }).await.unwrap();
        let instructions = self.client().await.join(ReceiverStream::new(outgoing)).await?.into_inner();
        self.stream = Some((messages, instructions));
        Ok(())
    }

    async fn say(&self, kind: Kind) {
        self.stream.as_ref().unwrap().0.send(v1::AgentMessage { kind: Some(kind) }).await.unwrap();
    }

    async fn instruction(&mut self) -> Option<instruction::Kind> {
        self.stream.as_mut().unwrap().1.message().await.ok().flatten().and_then(|message| message.kind)
    }

    async fn membership(&mut self) -> Membership {
        match self.instruction().await {
            Some(instruction::Kind::Configure(configure)) => {
                serde_json::from_slice(&configure.membership).unwrap()
            }
            other => panic!("{other:?} where a membership was due"),
        }
    }

    async fn refusal(&mut self) -> String {
        match self.instruction().await {
            Some(instruction::Kind::Refused(fault)) => fault.code,
            other => panic!("{other:?} where a refusal was due"),
        }
    }
}

fn training(rank: u32) -> v1::Claim {
    v1::Claim { side: "training".into(), rank, ..Default::default() }
}

fn inference(replica: &str) -> v1::Claim {
    v1::Claim { side: "inference".into(), pool: "default".into(), replica: replica.into(), rank: 0 }
}

#[tokio::test]
async fn agents_that_are_all_there_get_the_same_membership() {
    let world = World::new().await;
    let mut trainer = world.agent("trainer-0", 1, training(0)).await;
    let mut view = world.coordinator.view();
    let missing =
        |standing: &Standing| matches!(standing, Standing::Forming { missing } if missing.len() == 1);
    view.wait_for(|view| missing(&view.standing)).await.unwrap();
    let mut engine = world.agent("engine-0", 2, inference("a")).await;
    let membership = trainer.membership().await;
    assert_eq!(engine.membership().await, membership);
    assert_eq!((membership.epoch().0, membership.members().len()), (1, 2));
    assert_eq!(membership.members()[0].seat, Seat::Training { rank: Rank(0) });
    let view = view.wait_for(|view| view.membership.is_some()).await.unwrap();
    assert_eq!((view.cause, view.is_ready()), (Some(Cause::Created), false));
}

#[tokio::test]
async fn a_replaced_training_agent_makes_a_new_epoch() {
    let world = World::new().await;
    let trainer = world.agent("trainer-0", 1, training(0)).await;
    let mut engine = world.agent("engine-0", 2, inference("a")).await;
    let first = engine.membership().await;
    drop(trainer);
    let mut successor = world.agent("trainer-0", 3, training(0)).await;
    let second = successor.membership().await;
    assert_eq!(engine.membership().await, second);
    assert_eq!((first.epoch().0, second.epoch().0), (1, 2));
    assert_ne!(first.digest(), second.digest());
}

#[tokio::test]
async fn nobody_joins_without_a_certificate_of_the_authority() {
    let world = World::new().await;
    let mut stranger = Agent::new(&world, "trainer-0");
    assert_eq!(stranger.join(1, training(0)).await.unwrap_err().code(), Code::Unauthenticated);
    let other = Authority::generate().unwrap();
    let request = CertificateParams::default().serialize_request(&stranger.key).unwrap();
    stranger.chain = other.sign(request.der(), "trainer-0").unwrap();
    assert_eq!(stranger.join(1, training(0)).await.unwrap_err().code(), Code::Unauthenticated);
}

#[tokio::test]
async fn a_token_enrols_one_pod_once() {
    let world = World::new().await;
    let token = world.tokens.issue("trainer-0").unwrap();
    let mut other = Agent::new(&world, "trainer-1");
    assert_eq!(other.enrol(&token).await.unwrap_err().code(), Code::Unauthenticated);
    let mut agent = Agent::new(&world, "trainer-0");
    agent.enrol(&token).await.unwrap();
    assert_eq!(agent.enrol(&token).await.unwrap_err().code(), Code::Unauthenticated);
}

#[tokio::test]
async fn an_agent_speaks_for_its_own_pod_and_free_seats_only() {
    let world = World::new().await;
    let _holder = world.agent("trainer-0", 1, training(0)).await;
    // Of pods of one age the lesser UID counts as older.
    let mut second = world.agent("trainer-1", 2, training(0)).await;
    assert_eq!(second.refusal().await, "DuplicateRank");
    let mut outside = world.agent("trainer-2", 3, training(7)).await;
    assert_eq!(outside.refusal().await, "Unsupported");
    let mut liar = Agent::new(&world, "trainer-3");
    liar.enrol(&world.tokens.issue("trainer-3").unwrap()).await.unwrap();
    liar.pod = "trainer-0".into();
    liar.join(4, training(0)).await.unwrap();
    assert_eq!(liar.refusal().await, "Unauthenticated");
    assert_eq!(world.coordinator.view().borrow().agents.len(), 1);
}

#[tokio::test]
async fn one_listener_serves_many_refits_and_knows_no_other() {
    let world = World::new().await;
    let mut stranger = Agent::new(&world, "trainer-9");
    stranger.refit = "rl/other".into();
    stranger.enrol(&world.tokens.issue("trainer-9").unwrap()).await.unwrap();
    stranger.join(9, training(0)).await.unwrap();
    assert_eq!(stranger.refusal().await, "NotConfigured");
    let other = world.server.coordinate(settings("rl/other"), InMemory::default());
    stranger.join(9, training(0)).await.unwrap();
    let mut engine = Agent::new(&world, "engine-9");
    engine.refit = "rl/other".into();
    engine.enrol(&world.tokens.issue("engine-9").unwrap()).await.unwrap();
    engine.join(10, inference("a")).await.unwrap();
    assert_eq!(engine.membership().await, stranger.membership().await);
    assert!(world.coordinator.view().borrow().agents.is_empty());
    drop(other);
    assert!(engine.instruction().await.is_none(), "its stream ends with its coordinator");
    stranger.join(11, training(0)).await.unwrap();
    assert_eq!(stranger.refusal().await, "NotConfigured");
}

#[tokio::test]
async fn a_dismissed_pod_hears_why_and_its_seats_are_free() {
    let world = World::new().await;
    let mut agent = world.agent("trainer-0", 1, training(0)).await;
    let mut view = world.coordinator.view();
    view.wait_for(|view| view.agents.len() == 1).await.unwrap();
    world.coordinator.dismiss("trainer-7".into(), super::fault(CoreCode::Unauthorized, "nobody")).await;
    world.coordinator.dismiss("trainer-0".into(), super::fault(CoreCode::Unauthorized, "deleted")).await;
    assert_eq!(agent.refusal().await, "Unauthorized");
    assert!(agent.instruction().await.is_none(), "nothing follows");
    view.wait_for(|view| view.agents.is_empty()).await.unwrap();
    let _successor = world.agent("trainer-1", 2, training(0)).await;
}

#[tokio::test]
async fn a_changed_resource_makes_a_new_epoch_with_what_it_resolves_to() {
    let world = World::new().await;
    let mut trainer = world.agent("trainer-0", 1, training(0)).await;
    let _engine = world.agent("engine-0", 2, inference("a")).await;
    assert_eq!(trainer.membership().await.epoch().0, 1);
    let spec = Spec { basis: basis(2), ..settings("rl/tiny").spec };
    world.coordinator.respec(spec, b"{\"changed\":true}".to_vec()).await;
    match trainer.instruction().await {
        Some(instruction::Kind::Configure(configure)) => {
            assert_eq!((configure.epoch, &configure.refit[..]), (2, &b"{\"changed\":true}"[..]));
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn only_a_member_accepts_its_membership_and_only_the_leader_reports() {
    let world = World::new().await;
    let mut trainer = world.agent("trainer-0", 1, training(0)).await;
    let mut engine = world.agent("engine-0", 2, inference("a")).await;
    let membership = trainer.membership().await;
    assert_eq!(engine.membership().await, membership);
    let accepted = |change: &dyn Fn(&mut v1::Accepted)| {
        let (membership_digest, plan_digest) = (membership.digest().to_string(), Sha256([5; 32]).to_string());
        let mut accepted = v1::Accepted { epoch: 1, membership_digest, plan_digest, refused: None };
        change(&mut accepted);
        Kind::Accepted(accepted)
    };
    let report = |epoch: u64, run: u64| {
        let json = format!(
            r#"{{"id": 1, "epoch": {epoch}, "version": {{"run": {run}, "step": 3}}, "outcome": "Committed", "reason": null,
                "member": null, "phaseMilliseconds": {{}}, "bytes": {{"sent": 0, "received": 0, "skipped": 0}}, "replicas": []}}"#
        );
        Kind::RoundEnded(v1::RoundEnded { json })
    };
    let recorded = |replica: &str, rank: u32, tensors: &str| {
        let (side, pool, replica) = ("inference".into(), "default".into(), replica.into());
        let claim = Some(v1::Claim { side, pool, replica, rank });
        Kind::Recorded(v1::Recorded { claim, page: 1, pages: 2, tensors: tensors.into() })
    };
    let (late, future) = (accepted(&|a| a.epoch = 0), accepted(&|a| a.epoch = 2));
    let rows = [
        ("a future epoch", future, "StaleEpoch"),
        ("another membership", accepted(&|a| a.membership_digest = "?".into()), "StaleEpoch"),
        ("no plan", accepted(&|a| a.plan_digest = "x".repeat(500)), "Unsupported"),
        ("an engine's report", report(1, 0), "Unauthorized"),
        ("a recording of another's rank", recorded("a", 1, "[]"), "Unauthorized"),
        ("a page that is not due", recorded("a", 0, "[]"), "Unsupported"),
    ];
    let mut view = world.coordinator.view();
    for (what, lie, want) in rows {
        engine.say(lie).await;
        assert_eq!(engine.refusal().await, want, "{what}");
        view.wait_for(|view| view.refused.get("engine-0").is_some_and(|refused| refused.fault.code == want))
            .await
            .unwrap();
        engine.join(2, inference("a")).await.unwrap();
        assert_eq!(engine.membership().await, membership, "{what}");
    }
    assert!(view.borrow().refused.is_empty(), "who was taken in again is no more refused");
    // What is late is left out, and what is right is believed.
    engine.say(late).await;
    engine.say(accepted(&|_| {})).await;
    let is_accepted = |view: &super::View| view.agents.values().any(|agent| agent.plan_digest.is_some());
    view.wait_for(is_accepted).await.unwrap();
    for (lie, want) in [(report(2, 0), "StaleEpoch"), (report(1, u64::MAX), "StaleEpoch")] {
        trainer.say(lie).await;
        assert_eq!(trainer.refusal().await, want);
        trainer.join(1, training(0)).await.unwrap();
        trainer.membership().await;
    }
    trainer.say(report(1, 0)).await;
    view.wait_for(|view| view.last_round.is_some()).await.unwrap();
    let outsider = Kind::Accepted(v1::Accepted { epoch: 1, ..Default::default() });
    let mut second = world.agent("engine-1", 3, inference("b")).await;
    second.say(outsider).await;
    assert_eq!(second.refusal().await, "StaleEpoch", "it is no member yet");
}
