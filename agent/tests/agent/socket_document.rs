//! The byte-level example of `docs/agent-socket.md`, replayed against a real agent: what the page says a client
//! sends is sent byte for byte, and what it says the agent answers must come. `WEIGHTREFIT_REWRITE=1` writes the
//! agent's answers into the page.

use crate::support::client::{Client, Engine, Trainer};
use crate::support::coordinator::Coordinator;
use crate::support::{Agent, tiny_refit};
use std::io::{Read, Write};
use weightrefit_agent::session::fd;
use weightrefit_proto::socket::{AgentFrame, ClientFrame, decode, encode, frame_length};

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/agent-socket.md");

/// Stands for the incarnation that the agent draws at its start.
const AGENT: &str = "a1a1a1a1a1a1a1a1a1a1a1a1a1a1a1a1";

/// One line of the page: direction, length prefix in hexadecimal, JSON, descriptors.
#[derive(Debug)]
struct Line<'a> {
    sent: bool,
    prefix: [u8; 4],
    json: &'a str,
    fds: usize,
}

impl<'a> Line<'a> {
    fn parse(line: &'a str) -> Self {
        let mut words = line.splitn(3, ' ');
        let sent = match words.next() {
            Some("→") => true,
            Some("←") => false,
            other => panic!("{other:?} is no direction in `{line}`"),
        };
        let hex = words.next().expect(line);
        let prefix = u32::from_str_radix(hex, 16).expect(line).to_be_bytes();
        let rest = words.next().expect(line);
        let (json, fds) = rest.split_once(" + fd").map_or((rest, 0), |(json, _)| (json, 1));
        Self { sent, prefix, json, fds }
    }
}

fn show(prefix: [u8; 4], json: &str, fds: usize) -> String {
    let hex: String = prefix.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("← {hex} {json}{}", " + fd".repeat(fds))
}

#[test]
fn the_documented_bytes_are_the_bytes_on_the_socket() {
    let page = std::fs::read_to_string(PAGE).expect("docs/agent-socket.md");
    let (head, rest) = page.split_once("```frames\n").expect("a block of frames");
    let (block, tail) = rest.split_once("```").expect("the end of the block");

    let coordinator = Coordinator::start(tiny_refit());
    let trainer_agent = Agent::start(&coordinator, "trainer", &["training/0"]);
    let claims = ["inference/default/a/0", "inference/default/a/1"];
    let engine_agent = Agent::start(&coordinator, "engine", &claims);
    let trainer = Trainer::start(&trainer_agent.socket, 0, &[8, 4]);
    let mut other = Engine::start(&engine_agent.socket, "a", 1, &[4, 4]);
    let mut client = Client::connect(&engine_agent.socket, 0);
    coordinator.configure(1, &["trainer", "engine"]);
    let mut trainer = trainer.registered();
    trainer.publish(7, &std::array::from_fn::<f32, 32, _>(|n| n as f32));
    let other = std::thread::spawn(move || other.refit());

    let mut seen = String::new();
    for line in block.lines() {
        let want = Line::parse(line);
        if want.sent {
            assert_eq!(frame_length(want.prefix).expect(line), want.json.len(), "length of `{line}`");
            let frame: ClientFrame = decode(want.json.as_bytes()).expect(line);
            assert_eq!(&encode(&frame).expect(line)[4..], want.json.as_bytes(), "spelling of `{line}`");
            client.stream.write_all(&want.prefix).expect("the agent reads");
            client.stream.write_all(want.json.as_bytes()).expect("the agent reads");
            seen += &format!("{line}\n");
            continue;
        }
        let mut prefix = [0; 4];
        let first = fd::receive(&client.stream, &mut prefix).expect("the agent answers");
        client.stream.read_exact(&mut prefix[first.bytes..]).expect("a prefix");
        let mut body = vec![0; frame_length(prefix).expect("a length")];
        client.stream.read_exact(&mut body).expect("a frame");
        let mut json = String::from_utf8(body).expect("JSON is UTF-8");
        if let AgentFrame::Welcome { agent, .. } = decode(json.as_bytes()).expect("a frame") {
            json = json.replace(&agent.to_string(), AGENT);
        }
        assert_eq!(first.fds.len(), want.fds, "descriptors with {json}");
        seen += &format!("{}\n", show(prefix, &json, first.fds.len()));
    }
    other.join().expect("the other rank serves too");
    if std::env::var_os("WEIGHTREFIT_REWRITE").is_some() {
        std::fs::write(PAGE, format!("{head}```frames\n{seen}```{tail}")).expect("the page");
    }
    assert_eq!(seen, block);
    let recorded = String::from_utf8(coordinator.recorded()).expect("JSON is UTF-8");
    let want = r#"[{"name":"w","dtype":"f32","shape":[4,4],"pieces":[{"tensor":"w","dims":[[[0,0,4]],[[0,0,4]]]}]}]"#;
    assert_eq!(recorded, want, "the coordinator hears what a client recorded");
}

/// Trainer and driver frames of the page, as text.
#[test]
fn every_documented_frame_is_a_frame() {
    let page = std::fs::read_to_string(PAGE).expect("docs/agent-socket.md");
    let blocks: Vec<&str> =
        page.split("```json\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    // By turns what clients send and what agents do.
    let (turns, rest) = blocks.as_chunks::<2>();
    assert!(turns.len() == 2 && rest.is_empty(), "{} blocks of frames", blocks.len());
    for line in turns.iter().flat_map(|[clients, _]| clients.lines()) {
        let frame: ClientFrame = decode(line.as_bytes()).unwrap_or_else(|error| panic!("{line}: {error}"));
        assert_eq!(&encode(&frame).expect(line)[4..], line.as_bytes());
    }
    for line in turns.iter().flat_map(|[_, agents]| agents.lines()) {
        let frame: AgentFrame = decode(line.as_bytes()).unwrap_or_else(|error| panic!("{line}: {error}"));
        assert_eq!(&encode(&frame).expect(line)[4..], line.as_bytes());
    }
}

/// What an executor and its agent say to each other, as text.
#[test]
fn every_documented_frame_of_an_executor_is_a_frame() {
    let page = std::fs::read_to_string(PAGE).expect("docs/agent-socket.md");
    let block =
        page.split("```executor\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a block");
    for line in block.lines() {
        let (arrow, json) = line.split_once(' ').expect(line);
        let encoded = match arrow {
            "→" => encode(&decode::<ClientFrame>(json.as_bytes()).expect(line)),
            _ => encode(&decode::<AgentFrame>(json.as_bytes()).expect(line)),
        };
        assert_eq!(&encoded.expect(line)[4..], json.as_bytes());
    }
}
