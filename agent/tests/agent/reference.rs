//! The reference clients against an agent's socket that the test holds.

use crate::support::{PATIENCE, tiny_refit, wait_for};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use weightrefit_core::id::Rank;
use weightrefit_proto::socket::{AgentFrame, ClientFrame, ReleaseKind, Role, decode, encode, frame_length};

/// Bytes of the client that an agent has read when it dies: part of a prefix, a prefix, part of a frame.
const READ_BEFORE_DEATH: [usize; 3] = [1, 4, 20];

/// Agents that die before they read anything. Whether the client is about to write, or has written, is a race: of so
/// many, some end either way.
const DEAD_AT_ONCE: usize = 200;

const TRAINER: &[&str] = &["reference-trainer", "--training-rank", "0", "--world", "world"];
const ENGINE: &[&str] =
    &["reference-engine", "--pool", "default", "--replica", "a", "--replica-rank", "0", "--replica-socket"];

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_client_outlives_agents_that_die_at_any_byte() {
    for arguments in [TRAINER, ENGINE] {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        let listener = UnixListener::bind(path("agent.sock")).expect("a socket");
        write_inputs(folder.path());
        let mut command = Command::new(env!("CARGO_BIN_EXE_weightrefit-agent"));
        command.args(arguments);
        if arguments == ENGINE {
            command.arg(path("replica.sock"));
        }
        command.arg("--socket").arg(path("agent.sock")).arg("--refit").arg(path("refit.json"));
        command.arg("--weights").arg(path("weights.safetensors"));
        let child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts");
        let mut client = Ended(child);
        for read in READ_BEFORE_DEATH.into_iter().chain([0; DEAD_AT_ONCE]) {
            let mut agent = accept(&listener);
            agent.read_exact(&mut vec![0; read]).expect("the client says more");
        }
        let mut agent = accept(&listener);
        assert!(matches!(receive(&mut agent), ClientFrame::Hello { .. }), "{arguments:?}");
        assert!(
            matches!(receive(&mut agent), ClientFrame::Register { page: 0, pages: 1, .. }),
            "{arguments:?}"
        );
        send(&mut agent, &AgentFrame::Registered {});
        let said = BufReader::new(client.0.stdout.take().expect("is piped")).lines().map_while(Result::ok);
        assert!(said.take(2).any(|line| line.contains("registered")), "{arguments:?}");
    }
}

#[test]
fn an_unattended_trainer_publishes_step_after_step_on_all_its_ranks_until_it_is_told_to_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let listener = UnixListener::bind(path("agent.sock")).expect("a socket");
    let mut refit = tiny_refit();
    refit.training["world"] = 2.into();
    refit.training["sizes"]["tp"] = 2.into();
    write_inputs(folder.path());
    std::fs::write(path("refit.json"), serde_json::to_vec(&refit).expect("JSON")).expect("a file");
    let mut command = Command::new(env!("CARGO_BIN_EXE_weightrefit-agent"));
    command.args(["reference-trainer", "--unattended", "--every", "0"]);
    command.args(["--training-rank", "0", "--training-rank", "1"]);
    command.arg("--socket").arg(path("agent.sock")).arg("--refit").arg(path("refit.json"));
    command.arg("--weights").arg(path("weights.safetensors"));
    // As a container has it: its end must mean nothing.
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("it starts");
    let mut trainer = Ended(child);
    let mut worlds = Vec::new();
    let mut ranks = [(); 2].map(|()| {
        let mut agent = accept(&listener);
        let ClientFrame::Hello { role: Role::Trainer { rank, world, .. }, .. } = receive(&mut agent) else {
            panic!("no hello of a trainer")
        };
        assert!(matches!(receive(&mut agent), ClientFrame::Register { .. }));
        worlds.push(world);
        (rank, agent)
    });
    ranks.sort_by_key(|(rank, _)| *rank);
    assert_eq!([ranks[0].0, ranks[1].0], [Rank(0), Rank(1)]);
    assert_eq!(worlds[0], worlds[1], "one start of a trainer has one token");
    for (_, agent) in &mut ranks {
        send(agent, &AgentFrame::Registered {});
    }
    for step in 1..4 {
        for (rank, agent) in &mut ranks {
            let published = receive(agent);
            let wanted = ClientFrame::Publish { step, world: worlds[0].clone(), extras: None };
            assert_eq!(published, wanted, "{rank:?}");
            send(agent, &AgentFrame::Released { step, outcome: ReleaseKind::Read });
        }
    }
    let pid = rustix::process::Pid::from_child(&trainer.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("it runs");
    let status = wait_for("its end", || trainer.0.try_wait().expect("a child"));
    assert_eq!(status.code(), Some(0));
}

fn send(agent: &mut UnixStream, frame: &AgentFrame) {
    agent.write_all(&encode(frame).expect("a frame")).expect("the client listens");
}

/// The next connection of the client, whose reads block.
fn accept(listener: &UnixListener) -> UnixStream {
    listener.set_nonblocking(true).expect("a socket");
    let (stream, _) = wait_for("connection of the client", || listener.accept().ok());
    stream.set_nonblocking(false).expect("a socket");
    stream.set_read_timeout(Some(PATIENCE)).expect("a limit");
    stream
}

fn receive(stream: &mut UnixStream) -> ClientFrame {
    let mut prefix = [0; 4];
    stream.read_exact(&mut prefix).expect("a frame");
    let mut body = vec![0; frame_length(prefix).expect("a length")];
    stream.read_exact(&mut body).expect("a frame");
    decode(&body).expect("a frame of the protocol")
}

fn write_inputs(folder: &Path) {
    let refit = serde_json::to_vec(&tiny_refit()).expect("JSON");
    std::fs::write(folder.join("refit.json"), refit).expect("a file");
    let header = br#"{"w":{"dtype":"F32","shape":[8,4],"data_offsets":[0,128]}}"#;
    let weights = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 128]].concat();
    std::fs::write(folder.join("weights.safetensors"), weights).expect("a file");
}
