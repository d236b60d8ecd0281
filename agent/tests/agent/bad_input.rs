//! What an agent does with bad input: it says no with a code, counts it, and goes on.

use crate::support::client::{Client, Engine, SEALS, Trainer, memfd, only_page};
use crate::support::coordinator::Coordinator;
use crate::support::{Agent, PATIENCE, tiny_refit, wait_for};
use rustix::fs::SealFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use weightrefit_agent::identity::Identity;
use weightrefit_core::code::Code;
use weightrefit_core::dtype::DType;
use weightrefit_core::id::{Incarnation, Rank};
use weightrefit_core::round::message::{EngineRecord, EngineState, RoundKey};
use weightrefit_proto::socket::{
    AgentFrame, ClientFrame, FRAME_BYTES_MAX, FRAME_FDS_MAX, Memory, MemoryAt, PROTOCOL, Role, Tensor, encode,
};

/// What the agent says before it ends the connection; `None` when it just ends it.
fn refusal(client: &mut Client) -> Option<Code> {
    loop {
        match client.receive()?.0 {
            AgentFrame::Welcome { .. } | AgentFrame::Registered {} => {}
            AgentFrame::Error { code, message, hint, request } => {
                assert!(!message.is_empty() && !hint.is_empty() && request.is_none());
                let more = client.receive();
                assert!(more.is_none(), "{more:?} after {message}");
                return Some(code);
            }
            other => panic!("{other:?}"),
        }
    }
}

fn trainer(rank: u32) -> Role {
    Role::Trainer { rank: Rank(rank), world: "w1".to_owned(), outstanding: None }
}

fn record() -> EngineRecord {
    EngineRecord {
        instance: Incarnation(9),
        live: None,
        state: EngineState::Cold,
        round: RoundKey::default(),
    }
}

fn hello(role: Role) -> Vec<u8> {
    encode(&ClientFrame::Hello { protocol: PROTOCOL, instance: Incarnation(9), role }).expect("a frame")
}

fn then(mut first: Vec<u8>, frame: &ClientFrame) -> Vec<u8> {
    first.extend(encode(frame).expect("a frame"));
    first
}

fn raw(json: &str) -> Vec<u8> {
    let mut bytes = (json.len() as u32).to_le_bytes().to_vec();
    bytes.extend(json.as_bytes());
    bytes
}

fn register(page: u32, pages: u32, memories: Vec<Memory>) -> ClientFrame {
    ClientFrame::Register { page, pages, memories, tensors: vec![], staging_device: None, groups: vec![] }
}

#[test]
fn what_is_no_frame_of_protocol_1_is_refused_and_others_go_on() {
    let coordinator = Coordinator::start(tiny_refit());
    let agent = Agent::start(&coordinator, "trainer", &["training/0"]);
    let driver = || hello(Role::Driver {});
    let engine = Role::Engine { pool: "p".into(), replica: "r".into(), rank: Rank(0), record: record() };
    let publish = ClientFrame::Publish { step: 1, world: "w1".into(), extras: None };
    let long_world = Role::Trainer { rank: Rank(0), world: "w".repeat(65), outstanding: None };
    let no_world = Role::Trainer { rank: Rank(0), world: String::new(), outstanding: None };
    let rows = [
        ("HTTP", b"GET / HTTP/1.1\r\n\r\n".to_vec()),
        ("length beyond the limit", (FRAME_BYTES_MAX as u32 + 1).to_le_bytes().to_vec()),
        ("not JSON", raw("garbage")),
        ("unknown frame", raw(r#"{"type":"reboot"}"#)),
        (
            "unknown key",
            raw(
                r#"{"type":"hello","protocol":1,"instance":"00000000000000000000000000000009","role":{"kind":"driver"},"extra":1}"#,
            ),
        ),
        ("no hello", encode(&publish).expect("a frame")),
        (
            "other protocol",
            encode(&ClientFrame::Hello { protocol: 2, instance: Incarnation(9), role: Role::Driver {} })
                .expect("a frame"),
        ),
        ("second hello", [driver(), driver()].concat()),
        ("driver publishes", then(driver(), &publish)),
        ("driver registers", then(driver(), &register(0, 1, vec![]))),
        ("trainer drives", then(hello(trainer(0)), &ClientFrame::Status { request: 1 })),
        ("rank of another agent", hello(trainer(5))),
        ("engine at a trainer's agent", hello(engine)),
        ("no world", hello(no_world)),
        ("long world", hello(long_world)),
        ("publish before registration", then(hello(trainer(0)), &publish)),
        ("pages out of order", then(hello(trainer(0)), &register(1, 2, vec![]))),
        ("too many pages", then(hello(trainer(0)), &register(0, u32::MAX, vec![]))),
        (
            "memory without descriptor",
            then(hello(trainer(0)), &register(0, 1, vec![Memory { bytes: 1, device: None }])),
        ),
    ];
    let count = rows.len();
    for (name, bytes) in rows {
        let mut client = Client::connect(&agent.socket, 9);
        client.stream.write_all(&bytes).expect(name);
        assert_eq!(refusal(&mut client), Some(Code::Unsupported), "{name}");
    }
    let refused = r#"weightrefit_agent_client_refusals_total{code="Unsupported"}"#;
    wait_for("count", || (agent.metric(refused) == count as f64).then_some(()));
    // A cut frame has nobody to tell.
    let mut client = Client::connect(&agent.socket, 9);
    client.stream.write_all(&hello(Role::Driver {})[..9]).expect("a part");
    client.stream.shutdown(std::net::Shutdown::Write).expect("an end");
    assert_eq!(refusal(&mut client), None);
    Client::hello(&agent.socket, 9, Role::Driver {}).welcome();
    assert_eq!(agent.get("/livez").0, 200);
}

#[test]
fn descriptors_are_counted_and_welcome_only_where_they_belong() {
    let coordinator = Coordinator::start(tiny_refit());
    let agent = Agent::start(&coordinator, "trainer", &["training/0"]);
    let memory = memfd("m", &[0; 8], SEALS);
    let mut client = Client::connect(&agent.socket, 9);
    let flood = vec![memory.as_fd(); FRAME_FDS_MAX + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FRAME_FDS_MAX + 1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&flood)));
    let bytes = hello(trainer(0));
    sendmsg(&client.stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::empty()).expect("sent");
    assert_eq!(refusal(&mut client), Some(Code::Unsupported), "too many");
    let mut client = Client::connect(&agent.socket, 9);
    let frame = ClientFrame::Hello { protocol: PROTOCOL, instance: Incarnation(9), role: trainer(0) };
    client.send(&frame, &[memory.as_fd()]);
    assert_eq!(refusal(&mut client), Some(Code::Unsupported), "hello brings none");
    let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", agent.pid())).expect("its files").count();
    let before = descriptors();
    for _ in 0..20 {
        let mut client = Client::hello(&agent.socket, 9, trainer(0)).welcome();
        client.send(&register(0, 2, vec![Memory { bytes: 8, device: None }; 4]), &[memory.as_fd(); 4]);
        drop(client);
    }
    // 80 came; the agent's own connections come and go meanwhile.
    wait_for("closed descriptors", || (descriptors() < before + 20).then_some(()));
}

#[test]
fn registrations_that_do_not_fit_are_refused_with_what_differs() {
    let coordinator = Coordinator::start(tiny_refit());
    let agent = Agent::start(&coordinator, "trainer", &["training/0"]);
    let _engine = Agent::start(&coordinator, "engine", &["inference/default/a/0", "inference/default/a/1"]);
    coordinator.configure(1, &["trainer", "engine"]);
    let bytes = vec![0; 128];
    let good = || memfd("m", &bytes, SEALS);
    let plain = || {
        let file = tempfile::tempfile().expect("a file");
        file.write_all_at(&bytes, 0).expect("room");
        OwnedFd::from(file)
    };
    let at = |memory, offset| Some(MemoryAt { memory, offset });
    let tensor = |name: &str, dtype, shape: &[u64], at| Tensor {
        name: name.into(),
        dtype,
        shape: shape.to_vec(),
        at,
        pieces: None,
    };
    let fits = tensor("w", DType::F32, &[8, 4], at(0, 0));
    let rows = [
        ("fd shorter than it claims", memfd("m", &bytes[..64], SEALS), 128, fits.clone()),
        ("not sealed", memfd("m", &bytes, SealFlags::empty()), 128, fits.clone()),
        ("may still shrink", memfd("m", &bytes, SealFlags::GROW), 128, fits.clone()),
        ("a file", plain(), 128, fits.clone()),
        ("claims less than the tensor", good(), 64, fits.clone()),
        ("offset outside", good(), 128, tensor("w", DType::F32, &[8, 4], at(0, 4))),
        ("offset overflows", good(), 128, tensor("w", DType::F32, &[8, 4], at(0, u64::MAX))),
        ("memory that is not there", good(), 128, tensor("w", DType::F32, &[8, 4], at(1, 0))),
        ("no place", good(), 128, tensor("w", DType::F32, &[8, 4], None)),
        ("other shape", good(), 128, tensor("w", DType::F32, &[4, 8], at(0, 0))),
        ("2^63 elements", good(), 128, tensor("w", DType::F32, &[1 << 63], at(0, 0))),
        ("other dtype", good(), 128, tensor("w", DType::Bf16, &[8, 4], at(0, 0))),
        ("other name", good(), 128, tensor("v", DType::F32, &[8, 4], at(0, 0))),
    ];
    for (name, memory, claimed, tensor) in rows {
        let mut client = Client::hello(&agent.socket, 9, trainer(0));
        let memories = vec![Memory { bytes: claimed, device: None }];
        client.send(&only_page(memories, tensor), &[memory.as_fd()]);
        assert_eq!(refusal(&mut client), Some(Code::RegistrationMismatch), "{name}");
    }
    Trainer::start(&agent.socket, 0, &[8, 4]).registered();
}

#[test]
fn a_rank_has_one_client() {
    let coordinator = Coordinator::start(tiny_refit());
    let agent = Agent::start(&coordinator, "trainer", &["training/0"]);
    let _engine = Agent::start(&coordinator, "engine", &["inference/default/a/0", "inference/default/a/1"]);
    coordinator.configure(1, &["trainer", "engine"]);
    let mut first = Trainer::start(&agent.socket, 0, &[8, 4]).registered();
    let mut second = Client::hello(&agent.socket, 9, trainer(0));
    assert_eq!(refusal(&mut second), Some(Code::DuplicateRank), "another process");
    // The same process again: its first connection ends, the second one speaks.
    let again = Trainer::start(&agent.socket, 0, &[8, 4]);
    assert!(first.client.receive().is_none(), "replaced");
    let again = again.registered();
    // Another process after the end of the first.
    drop(again);
    let mut third = Client::hello(&agent.socket, 9, trainer(0)).welcome();
    let memory = memfd("m", &[0; 128], SEALS);
    let tensor = Tensor {
        name: "w".into(),
        dtype: DType::F32,
        shape: vec![8, 4],
        at: Some(MemoryAt { memory: 0, offset: 0 }),
        pieces: None,
    };
    let memories = vec![Memory { bytes: 128, device: None }];
    third.send(&only_page(memories, tensor), &[memory.as_fd()]);
    assert_eq!(third.expect("registration"), AgentFrame::Registered {});
}

#[test]
fn garbage_on_every_port_disturbs_nobody() {
    let coordinator = Coordinator::start(tiny_refit());
    let mut trainer_agent = Agent::start(&coordinator, "trainer", &["training/0"]);
    let claims = ["inference/default/a/0", "inference/default/a/1"];
    let mut engine_agent = Agent::start(&coordinator, "engine", &claims);
    coordinator.configure(1, &["trainer", "engine"]);
    let mut trainer = Trainer::start(&trainer_agent.socket, 0, &[8, 4]).registered();
    let mut engines = [0, 1].map(|rank| Engine::start(&engine_agent.socket, "a", rank, &[4, 4]));
    let garbage: [&[u8]; 5] = [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        &[0x16, 3, 1, 0xff, 0xff],
        &[0; 4096],
        &[0xff; 70_000],
    ];
    let stranger = Identity::generate("stranger").expect("a key");
    for agent in [&trainer_agent, &engine_agent] {
        for port in [&agent.round, &agent.bytes, &agent.metrics] {
            for bytes in garbage {
                let mut stream = TcpStream::connect(port).expect("a port");
                // The agent may have closed it in the middle, which is as good as reading it.
                let _ = stream.write_all(bytes);
                let _ = stream.shutdown(std::net::Shutdown::Write);
                stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
                let _ = stream.read_to_end(&mut Vec::new());
            }
        }
        for port in [&agent.round, &agent.bytes] {
            assert!(!shakes_hands(&stranger, agent, port), "a stranger got in at {port}");
        }
        let refused = r#"weightrefit_agent_peer_refusals_total{code="Unauthenticated"}"#;
        wait_for("count", || (agent.metric(refused) >= 2.0).then_some(()));
    }
    trainer.publish(1, &[1.5; 32]);
    std::thread::scope(|scope| {
        for engine in &mut engines {
            scope.spawn(|| engine.refit());
        }
    });
    assert!(engines.iter().all(|engine| engine.live == [1.5; 16]));
    assert!(trainer_agent.is_running() && engine_agent.is_running());
}

/// Whether the port talks to this identity, which no membership names. The server's refusal comes after the
/// client's part of a TLS 1.3 handshake, so the first read shows it.
fn shakes_hands(stranger: &Identity, agent: &Agent, port: &str) -> bool {
    let config = stranger.client_config(agent.key).expect("settings");
    let name = "peer.invalid".try_into().expect("a name");
    let connection = rustls::ClientConnection::new(Arc::new(config), name).expect("a client");
    let stream = TcpStream::connect(port).expect("a port");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    let mut tls = rustls::StreamOwned::new(connection, stream);
    tls.write_all(b"hello").is_ok() && tls.read(&mut [0; 1]).is_ok_and(|read| read > 0)
}

#[test]
fn an_agent_that_cannot_start_says_why_and_ends() {
    let coordinator = Coordinator::start(tiny_refit());
    let good = Agent::start(&coordinator, "trainer", &["training/0"]);
    let open = coordinator.directory.path().join("open");
    std::fs::create_dir(&open).expect("a directory");
    std::fs::set_permissions(&open, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("a mode");
    let open_socket = open.join("s");
    let token = coordinator.directory.path().join("other-token");
    std::fs::write(&token, "not the token").expect("a file");
    let rows = [
        (
            "socket in use",
            ("--socket", good.socket.to_str().expect("text")),
            1,
            "DuplicateRank: another agent answers on",
        ),
        (
            "open directory",
            ("--socket", open_socket.to_str().expect("text")),
            1,
            "has mode 755, which lets others in",
        ),
        (
            "wrong token",
            ("--token", token.to_str().expect("text")),
            1,
            "Unauthenticated: coordinator refused the enrolment",
        ),
        ("foreign address", ("--listen", "192.0.2.1"), 1, "cannot listen on 192.0.2.1"),
        ("no port", ("--coordinator", "localhost"), 1, "`localhost` has no port"),
        ("no claim", ("--claim", "serving/0"), 2, "is neither `training/RANK` nor"),
        ("metrics port in use", ("--metrics", good.metrics.as_str()), 1, "cannot serve metrics on"),
    ];
    for (name, change, status, words) in rows {
        let output =
            Agent::command(&coordinator, "other", &["training/0"], &[change]).output().expect("it runs");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{name}: {stderr}");
        assert!(stderr.contains(words), "{name}: {stderr}");
        assert!(
            !stderr.contains(coordinator.token()) && !stderr.contains("not the token"),
            "{name}: a secret"
        );
    }
}
