//! Agents that lie, misspeak or say nothing: each is refused by name and counted, and neither its own refit's honest
//! agents nor another refit of the same operator notice.

use crate::members::{create_pod, token};
use crate::operator::{is_true, ready};
use crate::rogue::{Port, Rogue, inference, joining, training};
use crate::world::{AUDIENCE, Side, World, condition};
use serde_json::json;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use weightrefit::limits;
use weightrefit_core::membership::Membership;
use weightrefit_proto::v1;
use weightrefit_proto::v1::agent_message::Kind;

/// The refit `other`: one training rank, one replica. Its pods are of the account `default`.
fn another_refit(world: &World) {
    let documents = world.documents();
    let (refit, _) = documents.split_once("---\n").expect("two documents");
    let mut refit = refit.replace("  name: tiny\n", "  name: other\n");
    for (large, small) in [
        ("worldSize: 3", "worldSize: 1"),
        ("dp_shard: 3", "dp_shard: 1"),
        ("world: 3", "world: 1"),
        ("minReplicas: 2", "minReplicas: 1"),
    ] {
        assert!(refit.contains(large), "{large}");
        refit = refit.replace(large, small);
    }
    world.bed.send("create", refit);
    let namespace = world.namespace.as_str();
    let account = format!("--serviceaccount={namespace}:default");
    let resource = ["--resource=weightrefits.weightrefit.dev", "--resource-name=other"];
    let verbs = ["--verb=publish", "--verb=receive"];
    let role = ["create", "role", "others", "-n", namespace];
    world.bed.kubectl(&[&role[..], &verbs, &resource].concat());
    world.bed.kubectl(&["create", "rolebinding", "others", "-n", namespace, "--role=others", &account]);
}

fn of_other(side: &str) -> serde_json::Value {
    json!({"weightrefit.dev/refit": "other", "weightrefit.dev/side": side})
}

/// The pod's UID and token.
fn pod_of_other(world: &World, name: &str, side: &str) -> (String, String) {
    let uid = create_pod(world.bed, &world.namespace, name, of_other(side));
    (uid, token(world.bed, &world.namespace, AUDIENCE, Some(name)))
}

/// A refused row: what was done, with which code and text it was answered.
fn check(what: &str, fault: &v1::Fault, code: &str, text: &str) {
    assert_eq!(fault.code, code, "{what}: {fault:?}");
    assert!(fault.message.contains(text) && !fault.hint.is_empty(), "{what}: {fault:?}");
}

#[test]
fn liars_are_refused_by_name_and_all_others_go_on() {
    let mut world = ready("liars");
    another_refit(&world);
    let honest = [pod_of_other(&world, "solo-0", "training"), pod_of_other(&world, "duo-0", "inference")];
    world.create_pod(Side::Inference, 2);
    let liar = world.credentials("engine-2");
    let neighbour = world.credentials("engine-0");
    let stranger = create_pod(world.bed, "liars", "stranger-0", json!({}));
    let strangers = token(world.bed, "liars", AUDIENCE, Some("stranger-0"));
    let gone = pod_of_other(&world, "gone-0", "training");
    world.bed.kubectl(&["delete", "pod", "gone-0", "-n", "liars", "--force", "--grace-period=0"]);
    let unbound = token(world.bed, "liars", AUDIENCE, None);
    let elsewhere = world.bed.token("liars", "engine", "elsewhere", "engine-2");
    let port = world.port();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");

    let enrolments: &[(&str, &str, &str, &str, &str)] = &[
        (
            "another pod's token",
            &liar.0,
            &neighbour.1,
            "Unauthenticated",
            "token is bound to pod liars/engine-0",
        ),
        ("another account's token", &liar.0, &honest[0].1, "Unauthenticated", "bound to pod liars/solo-0"),
        ("another audience's token", &liar.0, &elsewhere, "Unauthenticated", "is not valid for audience"),
        ("an unbound token", &liar.0, &unbound, "Unauthenticated", "is not bound to a pod"),
        ("no token", &liar.0, "", "Unauthenticated", "token has 0 bytes"),
        ("garbage", &liar.0, "garbage", "Unauthenticated", "is not valid for audience"),
        (
            "a token of no refit's pod",
            &stranger,
            &strangers,
            "Unauthorized",
            "no label weightrefit.dev/refit",
        ),
        ("a deleted pod's token", &gone.0, &gone.1, "Unauthenticated", ""),
        ("a name that is none", "a/b", &liar.1, "Unsupported", "pod uid `a/b`"),
    ];
    let (rogue, quiet) = runtime.block_on(async {
        for (what, uid, token, code, text) in enrolments {
            let fault = Rogue::stranger(&port).enrol(uid, token).await.expect_err(what);
            check(what, &fault, code, text);
        }
        let request = Rogue::stranger(&port).enrol_with(vec![7; 300], &liar.0, &liar.1).await;
        check("a request that is none", &request.expect_err("garbage"), "Unsupported", "certificate request");
        let rogue = Rogue::enrolled(&port, &liar.0, &liar.1).await;
        // It is refused only after a while: the others do not wait for it.
        let quiet = rogue.open(None).await.expect("a stream");
        speak_no_http(&port, &rogue).await;
        claim_too_much(&rogue, &liar.0, &neighbour.0, &port).await;
        (rogue, tokio::spawn(quiet.refusal()))
    });
    let status = world.wait_for_status("the liar is named", |status| {
        condition(status, "Degraded").1 == "AgentRefused" && is_true(status, "Ready")
    });
    let message = condition(&status, "Degraded").2;
    assert!(message.starts_with("agent of pod liars/engine-2 is refused: "), "{message}");

    let mut lines = runtime.block_on(async {
        let mut lines = Vec::new();
        for (process, ((uid, token), claim)) in (1..)
            .zip(honest.iter().zip([vec![training(0)], vec![inference("duo-0", 0), inference("duo-0", 1)]]))
        {
            let rogue = Rogue::enrolled(&port, uid, token).await;
            let claim = joining("liars/other", uid, process, claim);
            lines.push((
                rogue.open(Some(Kind::Joining(claim.clone()))).await.expect("a stream"),
                rogue,
                claim,
            ));
        }
        for (line, ..) in &mut lines {
            assert_eq!(line.membership().await.epoch().0, 1, "the other refit is formed");
        }
        lie_on_a_stream(&rogue, &liar.0).await;
        lines
    });

    // It tells the truth at last and is a member; what it says then is judged as well.
    let members = runtime.block_on(async {
        let claim = joining("liars/tiny", &liar.0, 99, own());
        let mut line = rogue.open(Some(Kind::Joining(claim.clone()))).await.expect("a stream");
        let members = line.membership().await;
        let impostor = v1::Joining { incarnation: incarnation(&members), ..claim };
        let refused = rogue.open(Some(Kind::Joining(impostor))).await.expect("a stream").refusal().await;
        check("another's process", &refused, "Unauthenticated", "is an agent of pod liars/trainer-0");
        line.say(Kind::RoundEnded(v1::RoundEnded { json: "{}".into() })).await;
        check("a round", &line.refusal().await, "Unauthorized", "which does not lead");
        crowd(&rogue).await;
        check("silence", &quiet.await.expect("no panic"), "Unsupported", "no message within");
        members
    });
    assert_eq!(members.epoch().0, 2, "only when it was honest there was a new membership");

    world.refit(1);
    let status = world.wait_for_status("honest replicas go on", |status| {
        status["inference"]["committed"]["step"] == 1 && status["inference"]["currentReplicas"] == 2
    });
    assert!(is_true(&status, "Ready"), "{status:#}");
    runtime.block_on(async {
        let (_, rogue, claim) = lines.pop().expect("the engine");
        let claim = v1::Joining { incarnation: vec![77; 16], ..claim };
        let mut line = rogue.open(Some(Kind::Joining(claim))).await.expect("a stream");
        assert_eq!(line.membership().await.epoch().0, 2, "the other refit goes on");
        assert_eq!(lines[0].0.membership().await.epoch().0, 2);
    });
    let metrics = world.metrics();
    for (at, code) in [
        ("connect", "Unauthenticated"),
        ("connect", "Unsupported"),
        ("connect", "Busy"),
        ("enrol", "Unauthenticated"),
        ("join", "Unauthorized"),
        ("join", "StaleEpoch"),
        ("stream", "Unauthorized"),
        ("stream", "Unsupported"),
    ] {
        let start = format!("weightrefit_operator_refusals_total{{at=\"{at}\",code=\"{code}\"}} ");
        let line = metrics.lines().find_map(|line| line.strip_prefix(&start));
        assert!(line.is_some_and(|count| count != "0"), "{start}\n{metrics}");
    }
}

/// What the liar's pod may claim.
fn own() -> Vec<v1::Claim> {
    vec![inference("engine-2", 0), inference("engine-2", 1)]
}

/// Of the first member.
fn incarnation(membership: &Membership) -> Vec<u8> {
    membership.members()[0].incarnation.0.to_be_bytes().to_vec()
}

/// Reads until the other side has had enough.
async fn is_closed(stream: &mut (impl AsyncReadExt + Unpin)) {
    let mut bytes = [0; 1024];
    let end = async { while stream.read(&mut bytes).await.is_ok_and(|read| read > 0) {} };
    tokio::time::timeout(Duration::from_secs(60), end).await.expect("it is closed");
}

async fn speak_no_http(port: &Port, rogue: &Rogue) {
    let mut plain = TcpStream::connect(&port.address).await.expect("a connection");
    plain.write_all(b"GET / HTTP/1.1\r\nhost: operator\r\n\r\n").await.expect("it is taken");
    is_closed(&mut plain).await;
    let greeting = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    for said in [
        b"GET / HTTP/1.1\r\nhost: operator\r\n\r\n".to_vec(),
        [&greeting[..], &[0xff; 200]].concat(),
        // A frame of 16 MiB.
        [&greeting[..], &[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1]].concat(),
    ] {
        let mut stream = rogue.connect().await.expect("a handshake");
        stream.write_all(&said).await.expect("it is taken");
        is_closed(&mut stream).await;
    }
}

/// First messages that are refused.
async fn claim_too_much(rogue: &Rogue, uid: &str, neighbour: &str, port: &Port) {
    let honest = || joining("liars/tiny", uid, 9, own());
    let with = |change: &dyn Fn(&mut v1::Joining)| {
        let mut claim = honest();
        change(&mut claim);
        Kind::Joining(claim)
    };
    let seats = |claims: Vec<v1::Claim>| with(&|claim| claim.claims = claims.clone());
    let run = v1::VersionName { run: u64::MAX, step: 0 };
    let rows = [
        (
            "another's pod",
            with(&|c| c.pod_uid = neighbour.into()),
            "Unauthenticated",
            "certificate names pod",
        ),
        ("no refit", with(&|c| c.refit = "liars/none".into()), "NotConfigured", "no coordinator here"),
        (
            "another refit",
            with(&|c| c.refit = "liars/other".into()),
            "Unauthorized",
            "claims refit liars/tiny",
        ),
        (
            "another's rank",
            seats(vec![inference("engine-0", 0)]),
            "Unauthorized",
            "announces inference/default/engine-0/0",
        ),
        ("another side", seats(vec![training(0)]), "Unauthorized", "announces training/0"),
        (
            "no side",
            seats(vec![v1::Claim { side: "sideways".into(), ..training(0) }]),
            "Unsupported",
            "side `sideways`",
        ),
        (
            "no pool",
            seats(vec![v1::Claim { pool: "big".into(), ..inference("engine-2", 0) }]),
            "Unauthorized",
            "inference/big",
        ),
        (
            "a rank beyond",
            seats(vec![inference("engine-2", 2)]),
            "Unauthorized",
            "inference/default/engine-2/2",
        ),
        ("half", seats(vec![inference("engine-2", 0)]), "Unauthorized", "announces no seat"),
        ("nothing", seats(vec![]), "Unsupported", "claims 0 ranks"),
        ("too many", seats(vec![training(0); limits::CLAIMS_MAX + 1]), "Unsupported", "claims 1025 ranks"),
        ("one twice", seats([own(), own()].concat()), "Unsupported", "is claimed twice"),
        (
            "a long name",
            seats(vec![inference(&"x".repeat(5000), 0)]),
            "Unauthorized",
            "announces inference/default/xxx",
        ),
        ("no process", with(&|c| c.incarnation = vec![1; 15]), "Unsupported", "incarnation of 15 bytes"),
        (
            "another time",
            with(&|c| (c.protocol_min, c.protocol_max) = (2, 3)),
            "VersionSkew",
            "speaks protocols 2 to 3",
        ),
        ("nowhere", with(&|c| c.round_addresses.clear()), "Unsupported", "has 0 addresses"),
        (
            "everywhere",
            with(&|c| c.byte_addresses = vec!["h:1".into(); 99]),
            "Unsupported",
            "has 99 addresses",
        ),
        (
            "far away",
            with(&|c| c.byte_addresses = vec!["h".repeat(999)]),
            "Unsupported",
            "address of 999 bytes",
        ),
        ("the last epoch", with(&|c| c.epoch_seen = u64::MAX), "StaleEpoch", "epoch 18446744073709551615"),
        ("the last run", with(&|c| c.version_seen = Some(run)), "StaleEpoch", "run 18446744073709551615"),
        ("no claim", Kind::State(v1::State::default()), "Unsupported", "first message is not `joining`"),
        (
            "two megabytes",
            with(&|c| c.agent_version = "v".repeat(2 << 20)),
            "Unsupported",
            "message is not taken",
        ),
    ];
    for (what, first, code, text) in rows {
        let refused = rogue.open(Some(first)).await.expect("a stream").refusal().await;
        check(what, &refused, code, text);
    }
    let Err(refused) = Rogue::stranger(port).open(Some(Kind::Joining(honest()))).await else {
        panic!("a stranger is let in");
    };
    check("a stranger", &refused, "Unauthenticated", "no certificate of this coordinator's authority");
}

/// Later messages that are refused.
async fn lie_on_a_stream(rogue: &Rogue, uid: &str) {
    let rank =
        |claim: v1::Claim| v1::RankState { claim: Some(claim), registered: true, ..Default::default() };
    let state = |ranks: Vec<v1::RankState>| v1::State { ranks, ..Default::default() };
    let own_rank = || rank(inference("engine-2", 0));
    let carrier = |(replica, transport): &(&str, &str)| v1::Carrier {
        pool: "default".into(),
        replica: (*replica).into(),
        transport: (*transport).into(),
        ..Default::default()
    };
    let carried = |carriers: &[(&str, &str)]| v1::State {
        carriers: carriers.iter().map(carrier).collect(),
        ..Default::default()
    };
    let last = Some(v1::VersionName { run: u64::MAX, step: 0 });
    let accepted = |epoch| v1::Accepted { epoch, ..Default::default() };
    let rows = [
        ("two claims", Kind::Joining(joining("liars/tiny", uid, 9, own())), "Unsupported", "joined twice"),
        (
            "another's state",
            Kind::State(state(vec![rank(inference("engine-0", 0))])),
            "Unauthorized",
            "does not hold",
        ),
        (
            "the trainer's state",
            Kind::State(state(vec![rank(training(0))])),
            "Unauthorized",
            "state of training/0",
        ),
        (
            "nobody's state",
            Kind::State(state(vec![v1::RankState::default()])),
            "Unsupported",
            "state of no rank",
        ),
        ("two states", Kind::State(state(vec![own_rank(), own_rank()])), "Unsupported", "two states of"),
        (
            "no engine's state",
            Kind::State(state(vec![v1::RankState { engine_state: "Flying".into(), ..own_rank() }])),
            "Unsupported",
            "no engine is `Flying`",
        ),
        (
            "another's carrier",
            Kind::State(carried(&[("engine-0", "nccl")])),
            "Unauthorized",
            "carrier of default/engine-0, of which",
        ),
        (
            "a carrier pigeon",
            Kind::State(carried(&[("engine-2", "pigeon")])),
            "Unsupported",
            "bytes of default/engine-2 do not go by `pigeon`",
        ),
        (
            "two carriers",
            Kind::State(carried(&[("engine-2", "tcp"), ("engine-2", "nccl")])),
            "Unsupported",
            "two carriers of default/engine-2",
        ),
        (
            "the last version",
            Kind::State(state(vec![v1::RankState { live: last, ..own_rank() }])),
            "StaleEpoch",
            "run 18446744073709551615",
        ),
        (
            "the last epoch",
            Kind::State(v1::State { epoch_seen: u64::MAX, ..Default::default() }),
            "StaleEpoch",
            "epoch 18446744073709551615",
        ),
        (
            "the last step",
            Kind::State(state(vec![v1::RankState { published_step: Some(i64::MAX), ..own_rank() }])),
            "Unsupported",
            "no status can hold step 9223372036854775807",
        ),
        ("a future membership", Kind::Accepted(accepted(1000)), "StaleEpoch", "epoch 1000 is answered to"),
        (
            "a round",
            Kind::RoundEnded(v1::RoundEnded { json: "{}".into() }),
            "Unauthorized",
            "which does not lead",
        ),
        (
            "two megabytes",
            Kind::RoundEnded(v1::RoundEnded { json: "x".repeat(2 << 20) }),
            "Unsupported",
            "message is not taken",
        ),
    ];
    for (process, (what, lie, code, text)) in (10..).zip(rows) {
        let claim = joining("liars/tiny", uid, process, own());
        let line = rogue.open(Some(Kind::Joining(claim))).await.expect("a stream");
        line.say(lie).await;
        check(what, &line.refusal().await, code, text);
    }
}

/// One pod opens connections until it gets no more.
async fn crowd(rogue: &Rogue) {
    let mut open = Vec::new();
    loop {
        let mut stream = rogue.connect().await.expect("a handshake");
        let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
        // The one too many is closed at any time.
        let _ = stream.write_all(&[b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice(), &settings].concat()).await;
        let answer = tokio::time::timeout(Duration::from_secs(60), stream.read(&mut [0; 64])).await;
        if !answer.expect("an answer").is_ok_and(|read| read > 0) {
            break;
        }
        open.push(stream);
        assert!(open.len() <= limits::CONNECTIONS_PER_POD_MAX, "one pod has {} connections", open.len());
    }
}
