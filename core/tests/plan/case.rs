//! Random small refits, made from a seed: a table, training ranks and pools that the training side covers.

use std::collections::BTreeMap;
use weightrefit_core::dtype::DType;
use weightrefit_core::id::{LocalId, Sha256, TensorId};
use weightrefit_core::plan::{Plan, PlanError, Planner, Sources};
use weightrefit_core::region::{LocalTensor, Piece, RankRegions, Run};

/// Splitmix64: the test's only source of chance.
pub(crate) struct Chance(pub(crate) u64);

impl Chance {
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.below(at as u64 + 1) as usize);
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Pool {
    pub(crate) name: String,
    pub(crate) replicas: Vec<String>,
    pub(crate) ranks: Vec<RankRegions>,
}

#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) tensors: Vec<(String, Vec<u64>)>,
    pub(crate) alias: BTreeMap<String, String>,
    pub(crate) training: Vec<RankRegions>,
    pub(crate) pools: Vec<Pool>,
}

pub(crate) const LAYOUT: Sha256 = Sha256([7; 32]);

impl Case {
    pub(crate) fn planner(&self) -> Result<Planner, PlanError> {
        let table = self.tensors.iter().map(|(name, shape)| (name.as_str(), shape.as_slice()));
        let mut sources = Sources::new(table, &self.alias, LAYOUT)?;
        for rank in &self.training {
            sources.add_rank(rank)?;
        }
        let mut planner = Planner::new(sources);
        for pool in &self.pools {
            planner.add_pool(&pool.name, pool.replicas.clone(), LAYOUT)?;
            for rank in &pool.ranks {
                planner.add_rank(rank)?;
            }
        }
        Ok(planner)
    }

    pub(crate) fn plan(&self) -> Plan {
        self.planner().and_then(Planner::plan).expect("the training side covers everything")
    }

    /// The tensor whose bytes the training side keeps for `tensor`.
    pub(crate) fn stored_as(&self, tensor: TensorId) -> TensorId {
        let name = &self.tensors[tensor.0 as usize].0;
        let target = self.alias.get(name).unwrap_or(name);
        TensorId(self.tensors.iter().position(|(other, _)| other == target).unwrap() as u32)
    }
}

pub(crate) fn random(seed: u64) -> Case {
    let mut chance = Chance(seed);
    let c = &mut chance;
    let mut tensors: Vec<(String, Vec<u64>)> = (0..=c.below(4))
        .map(|at| (format!("t{at}"), (0..c.below(4)).map(|_| 1 + c.below(7)).collect()))
        .collect();
    let mut alias = BTreeMap::new();
    if c.one_in(3) {
        tensors.push(("tied".into(), tensors[0].1.clone()));
        alias.insert("tied".into(), "t0".into());
    }
    let world = 1 + c.below(6);
    let mut training = vec![RankBuilder::default(); world as usize];
    for (at, (name, shape)) in tensors.iter().enumerate() {
        let dtype = [DType::F32, DType::Bf16][c.below(2) as usize];
        if !alias.contains_key(name) {
            for (rank, held) in spread(c, shape, world).into_iter().enumerate() {
                training[rank].add(c, at, &held, dtype);
                if c.one_in(8) {
                    training[rank].add(c, at, &held, dtype); // The same elements twice on one rank.
                }
            }
        }
    }
    let pools = (0..1 + c.below(2)).map(|pool| {
        let ranks = 1 + c.below(4);
        let mut builders = vec![RankBuilder::default(); ranks as usize];
        for (at, (_, shape)) in tensors.iter().enumerate() {
            let dtype = [DType::F32, DType::Bf16][c.below(2) as usize];
            for (rank, held) in spread(c, shape, ranks).into_iter().enumerate() {
                if !c.one_in(10) {
                    builders[rank].add(c, at, &held, dtype);
                }
                if c.one_in(8) {
                    builders[rank].add(c, at, &held, DType::F32);
                }
            }
        }
        Pool {
            name: format!("pool{pool}"),
            replicas: (0..1 + c.below(3)).map(|replica| (replica * 9).to_string()).collect(),
            ranks: builders.into_iter().map(RankBuilder::finish).collect(),
        }
    });
    let pools = pools.collect();
    Case { training: training.into_iter().map(RankBuilder::finish).collect(), tensors, alias, pools }
}

/// Per rank and dim, HF positions in local order; together the ranks hold everything.
fn spread(c: &mut Chance, shape: &[u64], ranks: u64) -> Vec<Vec<Vec<u64>>> {
    let whole: Vec<Vec<u64>> = shape.iter().map(|&n| (0..n).collect()).collect();
    let mut out = vec![whole; ranks as usize];
    let style = c.below(4);
    for (d, &n) in shape.iter().enumerate() {
        if style == 0 || (d > 0 && c.one_in(2)) {
            continue; // Replicated along this dim.
        }
        let parts = 1 + c.below(ranks);
        for rank in 0..ranks {
            let part = rank % parts;
            out[rank as usize][d] = match style {
                1 => (0..n).filter(|i| i * parts / n == part).collect(),
                2 => (0..n).filter(|i| i % parts == part).collect(),
                // Overlapping windows, so that sets of holders differ from element to element.
                _ => (0..n).filter(|i| (i * parts / n).abs_diff(part) <= 1).collect(),
            };
        }
        if style == 2 || style == 3 {
            let rotate = c.below(n.max(1));
            for held in &mut out {
                let len = held[d].len().max(1);
                held[d].rotate_left(rotate as usize % len); // Local order need not be HF order.
            }
        }
        if style != 1 && parts > 1 {
            break; // One cut dim: products of two rotated or overlapping cuts would leave gaps.
        }
    }
    if style == 1 && shape.len() > 1 {
        out[0] = shape.iter().map(|&n| (0..n).collect()).collect(); // Two cuts may leave corners to nobody.
    }
    out
}

#[derive(Debug, Clone, Default)]
struct RankBuilder {
    held: Vec<(LocalTensor, Piece)>,
}

impl RankBuilder {
    /// Stores what `held` says in a local tensor of its own, with gaps, a lead or transposed at times.
    fn add(&mut self, c: &mut Chance, tensor: usize, held: &[Vec<u64>], dtype: DType) {
        let mut extents = Vec::new();
        let dims: Vec<Vec<Run>> = held
            .iter()
            .map(|positions| {
                let mut local = c.below(2);
                let mut runs: Vec<Run> = Vec::new();
                for &hf in positions {
                    let joins = runs.last().is_some_and(|last| last.hf + last.len == hf) && !c.one_in(6);
                    match runs.last_mut() {
                        Some(last) if joins => last.len += 1,
                        _ => {
                            local += u64::from(c.one_in(4));
                            runs.push(Run { local, hf, len: 1 });
                        }
                    }
                    local += 1;
                }
                extents.push(local + c.below(2));
                runs
            })
            .collect();
        let mut order: Vec<u8> = (0..dims.len() as u8).collect();
        let permuted = c.one_in(3);
        if permuted {
            c.shuffle(&mut order);
        }
        let lead = c.one_in(3).then(|| c.below(3));
        let mut shape: Vec<u64> = lead.iter().map(|lead| lead + 1 + c.below(2)).collect();
        shape.extend(order.iter().map(|&d| extents[usize::from(d)]));
        self.held.push((
            LocalTensor { name: format!("w{:02}", c.below(40)), shape, dtype },
            Piece {
                tensor: TensorId(tensor as u32),
                local: LocalId(0),
                lead,
                dims,
                permute: permuted.then_some(order),
            },
        ));
    }

    fn finish(mut self) -> RankRegions {
        self.held.sort_by(|a, b| a.0.name.cmp(&b.0.name));
        let mut out = RankRegions::default();
        for (at, (mut local, mut piece)) in self.held.into_iter().enumerate() {
            local.name = format!("{}.{at:02}", local.name);
            piece.local = LocalId(at as u32);
            if piece.dims.iter().all(|runs| !runs.is_empty()) {
                out.pieces.push(piece);
            }
            out.locals.push(local);
        }
        out.pieces.sort_by_key(|piece| (piece.tensor, piece.local, piece.lead));
        out
    }
}
