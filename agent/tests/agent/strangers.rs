//! Messages that a member may not send, from a peer whose key is right: nothing changes, and it is counted.

use crate::support::client::{Engine, Trainer};
use crate::support::coordinator::Coordinator;
use crate::support::{Agent, PATIENCE, tiny_refit, wait_for};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use weightrefit_agent::identity::Identity;
use weightrefit_core::code::Code;
use weightrefit_core::id::{Epoch, Incarnation, MemberId, RoundId, Sha256};
use weightrefit_core::membership::{Member, Seat};
use weightrefit_core::round::message::{Blame, ContentSum, Message, Version};
use weightrefit_proto::v1;
use weightrefit_proto::v1::round_client::RoundClient;

/// The test is a third agent of the membership, one that hosts the only rank of a second replica.
const OWN: Incarnation = Incarnation(0x5757);

#[test]
fn a_member_says_only_what_its_role_and_epoch_allow() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let mut refit = tiny_refit();
    refit.policy.timeouts.prepare_ms = 500; // replica b will not answer
    let coordinator = Coordinator::start(refit);
    let trainer_agent = Agent::start(&coordinator, "trainer", &["training/0"]);
    let claims = ["inference/default/a/0", "inference/default/a/1"];
    let engine_agent = Agent::start(&coordinator, "engine", &claims);
    let identity = Identity::generate("test").expect("a key");
    let seats = [0, 1].map(|rank| Seat::Inference {
        pool: "default".into(),
        replica: "b".into(),
        rank: weightrefit_core::id::Rank(rank),
    });
    let own = seats.map(|seat| Member {
        seat,
        pod_uid: "test".into(),
        incarnation: OWN,
        key: identity.key_hash(),
        round_addresses: vec!["127.0.0.1:9".into()],
        byte_addresses: vec!["127.0.0.1:9".into()],
    });
    let membership = coordinator.configure_with(4, &["trainer", "engine"], own.to_vec());
    let mut trainer = Trainer::start(&trainer_agent.socket, 0, &[8, 4]).registered();
    let mut engines = [0, 1].map(|rank| Engine::start(&engine_agent.socket, "a", rank, &[4, 4]));

    // An agent lets in the keys of a membership once it has accepted it.
    wait_for("acceptance", || {
        (coordinator.heard.lock().expect("no panic").accepted.len() >= 2).then_some(())
    });
    let (sender, receiver) = mpsc::channel(16);
    let _incoming = runtime.block_on(async {
        let mut client = RoundClient::new(identity_channel(&identity, &engine_agent).await);
        client.exchange(ReceiverStream::new(receiver)).await.expect("a pinned key gets in").into_inner()
    });
    let [trainers, engine] = [0, 1].map(|member| membership.members()[member].incarnation);
    let version = Version { run: 9, step: 9, origin: Epoch(4), sum: ContentSum::default() };
    let authorise = Message::Authorise { round: RoundId(1), version };
    let blame = Blame { code: Code::Cancelled, member: None };
    let abort = Message::Abort { round: RoundId(1), replicas: vec![0], blame };
    let pause = Message::Pause { round: RoundId(1), version };
    let resume = Message::Resume { round: RoundId(1), version };
    // Members: 0 trainer, 1 and 2 replica a, 3 and 4 the test's own replica b.
    let good = Header { epoch: 4, digest: membership.digest(), from: OWN, to: engine, members: (3, 1) };
    let rows = [
        ("older epoch", Header { epoch: 3, ..good }, &abort, Code::StaleEpoch),
        ("newer epoch", Header { epoch: 5, ..good }, &abort, Code::StaleEpoch),
        ("other membership", Header { digest: Sha256([1; 32]), ..good }, &abort, Code::StaleEpoch),
        ("dead incarnation of ours", Header { from: Incarnation(1), ..good }, &abort, Code::StaleEpoch),
        ("dead incarnation of theirs", Header { to: Incarnation(1), ..good }, &abort, Code::StaleEpoch),
        (
            "another's member",
            Header { members: (0, 1), from: trainers, ..good },
            &abort,
            Code::Unauthenticated,
        ),
        ("not the leader", good, &authorise, Code::Unauthenticated),
        ("not their head", good, &pause, Code::Unauthenticated),
        ("not their head, at the end", Header { members: (3, 2), ..good }, &resume, Code::Unauthenticated),
    ];
    for (name, header, message, code) in rows {
        let metric = format!(r#"weightrefit_agent_peer_refusals_total{{code="{code}"}}"#);
        let before = engine_agent.metric(&metric);
        let envelope = v1::Envelope {
            header: Some(header.on_the_wire()),
            message: serde_json::to_vec(message).expect("JSON"),
            extras: None,
        };
        runtime.block_on(sender.send(envelope)).expect("the link lives");
        wait_for(name, || (engine_agent.metric(&metric) > before).then_some(()));
    }
    // What is no message ends the link.
    let envelope = v1::Envelope { header: Some(good.on_the_wire()), message: b"{}".to_vec(), extras: None };
    runtime.block_on(sender.send(envelope)).expect("the link lives");
    wait_for("end of the link", || sender.is_closed().then_some(()));
    // Nothing of it has changed anything: replica a takes the next step as if nobody had spoken.
    trainer.publish(1, &[2.5; 32]);
    std::thread::scope(|scope| {
        for engine in &mut engines {
            scope.spawn(|| engine.refit());
        }
    });
    assert!(engines.iter().all(|engine| engine.live == [2.5; 16]));
}

#[derive(Clone, Copy)]
struct Header {
    epoch: u64,
    digest: Sha256,
    from: Incarnation,
    to: Incarnation,
    members: (u32, u32),
}

impl Header {
    fn on_the_wire(self) -> v1::Header {
        let (MemberId(from), MemberId(to)) = (MemberId(self.members.0), MemberId(self.members.1));
        v1::Header {
            refit_uid: "uid".into(),
            epoch: self.epoch,
            membership_digest: self.digest.0.to_vec(),
            from_incarnation: self.from.0.to_be_bytes().to_vec(),
            to_incarnation: self.to.0.to_be_bytes().to_vec(),
            from,
            to,
        }
    }
}

/// Dials the agent as a member does; it has its membership a moment after it was sent.
async fn identity_channel(identity: &Identity, agent: &Agent) -> tonic::transport::Channel {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        match identity.dial_agent(&agent.round, agent.key).await {
            Ok(channel) => return channel,
            Err(error) => assert!(tokio::time::Instant::now() < deadline, "{error}"),
        }
    }
}
