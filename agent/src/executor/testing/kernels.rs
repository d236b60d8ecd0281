//! The kernels of `agent/kernels`: their code, compiled for this machine, against gather and scatter of the TCP path,
//! over random pairs cut into chunks. What the test cannot see is the compiler for the device.

use super::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

const PAIRS: usize = 150;

/// A window of a pair at both ends, as the TCP path moves it.
struct Window {
    first: u64,
    packed: Vec<u8>,
    before: Vec<u8>,
    after: Vec<u8>,
}

fn windows(out: &Program, into: &Program, source: &HostMemory, to: &HostMemory, chunk: u64) -> Vec<Window> {
    let mut windows = Vec::new();
    for wave in 0..out.bytes().div_ceil(chunk) {
        let (first, last) = (out.boundary(wave * chunk), out.boundary((wave + 1) * chunk));
        assert_eq!((first, last), (into.boundary(wave * chunk), into.boundary((wave + 1) * chunk)));
        let mut packed = vec![0; (last - first) as usize];
        let n = gather(&mut Cursor::range(out, first, last), source, &mut packed, |_| false);
        assert_eq!(n, packed.len());
        let before = contents(to.mapping(0));
        scatter(&mut Cursor::range(into, first, last), to, &packed);
        windows.push(Window { first, packed, before, after: contents(to.mapping(0)) });
    }
    windows
}

fn feed(input: &mut Vec<u8>, kind: u64, program: &Program, memory: &[u8], window: &Window, packed: &[u8]) {
    let head = [kind, program.entries().into(), memory.len() as u64, window.first, packed.len() as u64];
    head.iter().for_each(|word| input.extend(word.to_le_bytes()));
    input.extend(program.table(|_| 0));
    input.extend(memory);
    input.extend(packed);
}

/// What the kernels' code makes of cases, as `host.cpp` describes them.
pub(in crate::executor) fn run(input: Vec<u8>) -> Vec<u8> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("kernels");
    let mut compiler = Command::new("c++");
    compiler.args(["-O2", "-fno-strict-aliasing", "-Wall", "-Werror", "-o"]).arg(&program);
    compiler.arg(sources.join("host.cpp"));
    let compiled = compiler.status().expect("a C++ compiler, which linking needs too");
    assert!(compiled.success(), "the kernels compile");
    let mut child =
        Command::new(&program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("runs");
    let mut stdin = child.stdin.take().expect("piped");
    let writer = std::thread::spawn(move || stdin.write_all(&input).expect("is read"));
    let output = child.wait_with_output().expect("ends");
    writer.join().expect("written");
    assert!(output.status.success());
    output.stdout
}

#[test]
fn the_kernels_move_what_the_tcp_path_moves() {
    let mut runner = TestRunner::deterministic();
    let strategy = (prop::collection::vec(case(), 1..6), 20_u64..600);
    let (mut input, mut want) = (Vec::new(), Vec::<u8>::new());
    for seed in 1..=PAIRS as u64 {
        let (cases, chunk) = strategy.new_tree(&mut runner).expect("a pair").current();
        let (moves, from, to) = pair(&cases);
        let source = memory(from, |i| (i.wrapping_mul(seed * 2 + 1) >> 3) as u8);
        let destination = memory(to, |_| 0xaa);
        let out = Program::for_source(&moves, source.placements(), destination.placements().locals());
        let into = Program::for_destination(&moves, destination.placements());
        let (out, into) = (out.expect("fits"), into.expect("fits"));
        assert_eq!(
            Program::of_table(&out.table(|_| 0)).map(|read| read.copies),
            Some(out.copies.clone()).map(|mut copies| {
                copies.iter_mut().for_each(|copy| {
                    copy.mapping = 0;
                    // A loop that is not there is one of one turn.
                    copy.loops[copy.depth..].iter_mut().for_each(|each| each.count = 1);
                });
                copies
            }),
            "a table reads back"
        );
        for window in windows(&out, &into, &source, &destination, chunk) {
            feed(&mut input, 0, &out, &contents(source.mapping(0)), &window, &vec![0; window.packed.len()]);
            want.extend(&window.packed);
            feed(&mut input, 1, &into, &window.before, &window, &window.packed);
            want.extend(&window.after);
        }
    }
    let found = run(input);
    assert_eq!(found.len(), want.len());
    let differs = found.iter().zip(&want).position(|(a, b)| a != b);
    assert_eq!(differs, None, "of {} bytes", want.len());
}
