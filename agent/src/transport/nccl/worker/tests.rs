//! What a worker does when its attempt is over, on the double of CUDA and NCCL, which the workspace's build puts beside
//! this program.

use super::super::flow::{Direction, Pair};
use super::*;
use crate::cuda::Driver;
use crate::executor::{HostMemory, Placements, Program};
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::sync_channel;
use weightrefit_core::code::Code;
use weightrefit_core::dtype::DType;
use weightrefit_core::region::LocalTensor;

/// Long after what is tested has happened, where it does; the flight itself has an hour.
const PATIENCE: Duration = Duration::from_secs(30);

/// Two ranks of a lane in this process, each with a GPU of the double, joined.
fn lane() -> Vec<Thread> {
    let double = std::env::current_exe().expect("a path").with_file_name("libweightrefit_fakegpu.so");
    let driver = Driver::open(Some(&double)).expect("the double: build the workspace first");
    let nccl = Nccl::open(Some(&double)).expect("the double");
    let id = nccl.unique_id().expect("an id");
    let (formed, all) = sync_channel(2);
    let worker = |(rank, device)| {
        let gpu = Arc::new(Gpu::new(&driver, device, 1 << 20).expect("a GPU"));
        let on_wedge = Box::new(|| panic!("an abort was late"));
        let worker = Thread::start(nccl.clone(), gpu, format!("rank-{rank}"), on_wedge).expect("a thread");
        let formed = formed.clone();
        let join = Join { id, rank, ranks: 2, degree: 1, ctas_max: 1 };
        worker.form(1, join, 1 << 16, Box::new(move |result| formed.send(result).expect("heard")));
        worker
    };
    let workers = (0..).zip(driver.devices().expect("devices")).take(2).map(worker).collect();
    for _ in 0..2 {
        all.recv_timeout(PATIENCE).expect("in time").expect("formed");
    }
    workers
}

/// 64 bytes from the other rank.
fn receive() -> Job {
    let local = LocalTensor { name: "w".into(), shape: vec![64], dtype: DType::U8 };
    let (placements, bytes) = Placements::staging(vec![local]).expect("small");
    let (_, mapping) = crate::memory::create("staging", bytes).expect("memory");
    let memory = HostMemory::new(vec![Arc::new(mapping)], Arc::new(placements)).expect("fits");
    let mut table = vec![0; crate::executor::ENTRY_BYTES];
    // One run of 64 bytes, whose elements have one.
    table[16] = 64;
    let tail = table.len() - 16;
    table[tail + 8] = 1;
    let program = Program::of_table(&table).expect("a table");
    Job {
        direction: Direction::Receive,
        memory: memory.into(),
        pairs: vec![Pair { peer: 1, program: Arc::new(program) }],
        deadline: Instant::now() + Duration::from_secs(3600),
        moved: Arc::new(AtomicU64::new(0)),
    }
}

#[test]
fn a_flight_ends_with_its_attempt_and_says_what_ended_that() {
    let lane = lane();
    let (told, end) = sync_channel(1);
    // The other rank never sends, and nobody asks this one to stop.
    lane[0].run(1, receive(), Box::new(|| false), Box::new(move |result| told.send(result).expect("heard")));
    let reason = Reason::new(Code::PeerLost, "a rank has fallen silent");
    let (aborted, over) = sync_channel(1);
    lane[0].abort(1, Some(reason), Box::new(move || aborted.send(()).expect("heard")));
    let result = end.recv_timeout(PATIENCE).expect("the flight ends long before its deadline");
    let detail = "a rank has fallen silent".to_owned();
    assert_eq!(result, Err(FlowError::Ended { code: Code::PeerLost, detail }));
    over.recv_timeout(PATIENCE).expect("and with it the attempt");
    let (told, end) = sync_channel(1);
    lane[0].run(1, receive(), Box::new(|| false), Box::new(move |result| told.send(result).expect("heard")));
    assert!(
        end.recv_timeout(PATIENCE).expect("at once").is_err(),
        "nothing flies by an attempt that is over"
    );
}
