//! A pair of ranks with the shapes of a model: a source that holds whole tensors, a destination that is rank 0 of
//! two in tensor parallelism, in bf16.

use crate::loopback::Ends;
use anyhow::ensure;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use weightrefit_agent::executor::{Cursor, HostMemory, Placements, Program, gather, scatter};
use weightrefit_agent::memory::create;
use weightrefit_agent::transport::tcp::{ByteServer, ReceiveFrom, ReceiveJob, SendJob, SendTo, receive};
use weightrefit_core::dtype::DType;
use weightrefit_core::id::{LocalId, MemberId, Rank, RoundId, Sha256, TensorId};
use weightrefit_core::plan::moves::{Dims, Endpoint, MoveBox, PairMoves};
use weightrefit_core::region::LocalTensor;

/// Whose shapes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Model {
    /// all-MiniLM-L6-v2.
    MiniLm,
    /// Qwen3-0.6B.
    Qwen06,
}

/// How tensor parallelism cuts a tensor.
#[derive(Debug, Clone, Copy)]
enum Cut {
    Rows,
    Columns,
    None,
}

pub(crate) struct Workload {
    name: String,
    source: HostMemory,
    destination: HostMemory,
    out: Arc<Program>,
    into: Arc<Program>,
}

impl Workload {
    pub(crate) fn new(model: Model, source: DType) -> anyhow::Result<Self> {
        let name = match model {
            Model::MiniLm => format!("minilm {source} to bf16"),
            Model::Qwen06 => format!("qwen3-0.6b {source} to bf16"),
        };
        let tensors = tensors(model);
        let (mut from, mut to, mut boxes, mut bytes) = (Vec::new(), Vec::new(), Vec::new(), 0);
        for (at, (shape, cut)) in tensors.iter().enumerate() {
            let mut part = shape.clone();
            match cut {
                Cut::Rows => part[0] /= 2,
                Cut::Columns => part[1] /= 2,
                Cut::None => {}
            }
            let dims = |values: &[u64]| Dims::new(values).expect("one or two dims");
            let zero = dims(&vec![0; shape.len()]);
            boxes.push(MoveBox {
                tensor: TensorId(at as u32),
                hf: zero,
                shape: dims(&part),
                source: LocalId(at as u32),
                source_start: zero,
                destination: LocalId(at as u32),
                destination_start: zero,
                permute: None,
            });
            bytes += part.iter().product::<u64>() * DType::Bf16.size();
            from.push(LocalTensor { name: format!("t{at:03}"), shape: shape.clone(), dtype: source });
            to.push(LocalTensor { name: format!("t{at:03}"), shape: part, dtype: DType::Bf16 });
        }
        let moves = PairMoves {
            source: Endpoint::Training { rank: Rank(0) },
            destination: Endpoint::Inference { pool: 0, replica: 0, rank: Rank(0) },
            bytes,
            boxes,
        };
        let source = memory(from, true)?;
        let destination = memory(to, false)?;
        let out = Program::for_source(&moves, source.placements(), destination.placements().locals())?;
        let into = Program::for_destination(&moves, destination.placements())?;
        Ok(Self { name, source, destination, out: Arc::new(out), into: Arc::new(into) })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.out.bytes()
    }

    /// GB/s of one transfer, from the dial to the last byte in memory.
    pub(crate) fn transfer(&self, ends: &Ends, streams: u32) -> anyhow::Result<f64> {
        let server = ByteServer::bind("127.0.0.1:0".parse()?, &ends.security[0])?;
        server.configure(Some(Arc::clone(&ends.peers)));
        let pair = Sha256([3; 32]);
        let job = SendJob {
            peers: Arc::clone(&ends.peers),
            round: RoundId(1),
            member: MemberId(0),
            memory: self.source.clone().into(),
            replicas: vec![0],
            destinations: vec![SendTo {
                member: MemberId(1),
                replica: 0,
                pair,
                program: Arc::clone(&self.out),
            }],
            lane: None,
        };
        let senders = server.allow(job, |_| {});
        let job = ReceiveJob {
            peers: Arc::clone(&ends.peers),
            round: RoundId(1),
            member: MemberId(1),
            memory: self.destination.clone().into(),
            sources: vec![ReceiveFrom {
                member: MemberId(0),
                addresses: vec![server.local_addr()?],
                pair,
                program: Arc::clone(&self.into),
            }],
            streams,
            deadline: Instant::now() + Duration::from_secs(60),
            lane: None,
            resting: Arc::default(),
        };
        let (ended, end) = channel();
        let begin = Instant::now();
        let receivers = receive(job, &ends.security[1], move |result| drop(ended.send(result)));
        let bytes = end.recv()??;
        let seconds = begin.elapsed().as_secs_f64();
        receivers.join();
        senders.join();
        Ok(bytes as f64 / seconds / 1e9)
    }

    /// What was transferred is what a copy without a network gives.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        let copied = memory(self.destination.placements().locals().to_vec(), false)?;
        let (mut from, mut to) = (Cursor::stream(&self.out, 0, 1), Cursor::stream(&self.into, 0, 1));
        let mut chunk = vec![0; 1 << 20];
        while from.left() > 0 {
            let n = gather(&mut from, &self.source, &mut chunk, |_| false);
            scatter(&mut to, &copied, &chunk[..n]);
        }
        let (mut a, mut b) = (chunk.clone(), chunk);
        let len = copied.mapping(0).len();
        for at in (0..len).step_by(a.len()) {
            let n = (len - at).min(a.len() as u64) as usize;
            copied.mapping(0).read(at, &mut a[..n]);
            self.destination.mapping(0).read(at, &mut b[..n]);
            ensure!(a[..n] == b[..n], "{}: what arrived differs near byte {at}", self.name);
        }
        Ok(())
    }
}

/// Memory in one memfd; the source's is filled with numbers.
pub(crate) fn memory(locals: Vec<LocalTensor>, fill: bool) -> anyhow::Result<HostMemory> {
    let (placements, len) = Placements::staging(locals)?;
    let (_, mapping) = create("bench", len)?;
    if fill {
        let mut state = 1_u64;
        let mut chunk = vec![0; 1 << 16];
        for at in (0..len).step_by(chunk.len()) {
            for word in chunk.as_chunks_mut::<8>().0 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                // Exponents near one in both f32 and bf16.
                *word = ((state >> 2) & 0x3fff_ffff_3fff_ffff).to_le_bytes();
            }
            let n = (len - at).min(chunk.len() as u64) as usize;
            mapping.write(at, &chunk[..n]);
        }
    }
    Ok(HostMemory::new(vec![Arc::new(mapping)], Arc::new(placements))?)
}

fn tensors(model: Model) -> Vec<(Vec<u64>, Cut)> {
    let mut out = Vec::new();
    match model {
        Model::MiniLm => {
            let whole = |size| (vec![size], Cut::None);
            out.push((vec![30_522, 384], Cut::Rows));
            out.extend([(vec![512, 384], Cut::None), (vec![2, 384], Cut::None), whole(384), whole(384)]);
            for _ in 0..6 {
                for _ in 0..3 {
                    out.extend([(vec![384, 384], Cut::Rows), (vec![384], Cut::Rows)]);
                }
                out.extend([(vec![384, 384], Cut::Columns), whole(384), whole(384), whole(384)]);
                out.extend([(vec![1536, 384], Cut::Rows), (vec![1536], Cut::Rows)]);
                out.extend([(vec![384, 1536], Cut::Columns), whole(384), whole(384), whole(384)]);
            }
        }
        Model::Qwen06 => {
            out.extend([(vec![151_936, 1024], Cut::Rows), (vec![1024], Cut::None)]);
            for _ in 0..28 {
                out.extend([
                    (vec![2048, 1024], Cut::Rows),
                    (vec![1024, 1024], Cut::Rows),
                    (vec![1024, 1024], Cut::Rows),
                ]);
                out.extend([
                    (vec![128], Cut::None),
                    (vec![128], Cut::None),
                    (vec![1024, 2048], Cut::Columns),
                ]);
                out.extend([(vec![3072, 1024], Cut::Rows), (vec![3072, 1024], Cut::Rows)]);
                out.extend([
                    (vec![1024, 3072], Cut::Columns),
                    (vec![1024], Cut::None),
                    (vec![1024], Cut::None),
                ]);
            }
        }
    }
    out
}
