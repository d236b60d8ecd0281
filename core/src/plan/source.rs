//! The training side of a plan: who holds which part of each tensor.

use super::check;
use super::error::{Holder, PlanError};
use super::intern::Interner;
use super::moves::DIMS_MAX;
use crate::dtype::DType;
use crate::id::{LocalId, Rank, Sha256, TensorId};
use crate::region::{Piece, RankRegions, Run};
use std::collections::BTreeMap;

/// Per dim, the runs of a piece, joined where they touch.
pub(super) type Region = Vec<Vec<Run>>;

/// Local dim `i` is HF dim `[i]`; entries past the tensor's dims are 0.
pub(super) type Permute = [u8; DIMS_MAX];

/// A tensor of the table.
#[derive(Debug)]
pub(super) struct Tensor {
    pub(super) name: String,
    pub(super) shape: Vec<u64>,
    /// Where the training side keeps its bytes: itself, or its alias.
    pub(super) stored_as: TensorId,
}

/// A piece without its runs, which are interned.
#[derive(Debug, Clone, Copy)]
pub(super) struct Held {
    pub(super) tensor: TensorId,
    pub(super) local: LocalId,
    pub(super) lead: Option<u64>,
    pub(super) region: u32,
    pub(super) permute: Option<Permute>,
}

/// A local tensor's interned name and dtype.
#[derive(Debug, Clone, Copy)]
pub(super) struct Local {
    pub(super) name: u32,
    pub(super) dtype: DType,
}

/// The tensor table, and what the training ranks seen so far hold. Feed every rank in order, then hand it to
/// [`Planner::new`](super::Planner::new). The regions of a rank may be dropped once they are added.
#[derive(Debug)]
pub struct Sources {
    pub(super) layout: Sha256,
    pub(super) tensors: Vec<Tensor>,
    pub(super) names: Interner<String>,
    pub(super) regions: Interner<Region>,
    /// By tensor, then in order of (rank, local, lead).
    pub(super) pieces: Vec<Vec<(Rank, Held)>>,
    /// By rank, then [`LocalId`].
    pub(super) locals: Vec<Vec<Local>>,
}

impl Sources {
    /// `tensors` are (name, shape in elements) in table order, `alias` the training layout's names that share
    /// another's bytes (a name outside the table is ignored), `layout` the digest of its canonical layout.
    ///
    /// # Errors
    /// `DuplicateName`, `TooLarge`, `AliasShape`.
    pub fn new<'a>(
        tensors: impl IntoIterator<Item = (&'a str, &'a [u64])>,
        alias: &BTreeMap<String, String>,
        layout: Sha256,
    ) -> Result<Self, PlanError> {
        let mut table = Vec::new();
        let mut ids = BTreeMap::new();
        for (name, shape) in tensors {
            check::tensor_bytes(name, shape, DType::F64.size())?;
            if shape.len() > DIMS_MAX {
                return Err(PlanError::TooLarge { what: format!("the number of dims of `{name}`") });
            }
            let id = TensorId(
                u32::try_from(table.len())
                    .map_err(|_| PlanError::TooLarge { what: "the number of tensors".into() })?,
            );
            if ids.insert(name, id).is_some() {
                return Err(PlanError::DuplicateName { what: "tensor", name: name.into() });
            }
            table.push(Tensor { name: name.into(), shape: shape.into(), stored_as: id });
        }
        for (name, target) in alias {
            let (Some(&id), Some(&to)) = (ids.get(name.as_str()), ids.get(target.as_str())) else { continue };
            let (shape, target_shape) = (&table[id.0 as usize].shape, &table[to.0 as usize].shape);
            if shape != target_shape {
                return Err(PlanError::AliasShape {
                    name: name.clone(),
                    shape: shape.clone(),
                    target: target.clone(),
                    target_shape: target_shape.clone(),
                });
            }
            table[id.0 as usize].stored_as = to;
        }
        let pieces = table.iter().map(|_| Vec::new()).collect();
        Ok(Self {
            layout,
            tensors: table,
            names: Interner::default(),
            regions: Interner::default(),
            pieces,
            locals: Vec::new(),
        })
    }

    /// Adds the next training rank, counted from 0.
    ///
    /// # Errors
    /// `MalformedPiece`, `TooLarge`.
    pub fn add_rank(&mut self, regions: &RankRegions) -> Result<(), PlanError> {
        let rank = Rank(
            u32::try_from(self.locals.len())
                .map_err(|_| PlanError::TooLarge { what: "the number of training ranks".into() })?,
        );
        let (locals, pieces) = self.intern(&Holder::Training(rank), regions)?;
        for held in pieces {
            self.pieces[held.tensor.0 as usize].push((rank, held));
        }
        self.locals.push(locals);
        Ok(())
    }

    /// Checks a rank of either side and stores its names and runs once; pieces in order.
    pub(super) fn intern(
        &mut self,
        holder: &Holder,
        rank: &RankRegions,
    ) -> Result<(Vec<Local>, Vec<Held>), PlanError> {
        let mut locals = Vec::with_capacity(rank.locals.len());
        for local in &rank.locals {
            check::tensor_bytes(&local.name, &local.shape, local.dtype.size())?;
            locals.push(Local { name: self.names.id(local.name.clone()), dtype: local.dtype });
        }
        let mut pieces = Vec::with_capacity(rank.pieces.len());
        for piece in &rank.pieces {
            let tensor =
                self.tensors.get(piece.tensor.0 as usize).ok_or_else(|| PlanError::MalformedPiece {
                    tensor: piece.tensor.to_string(),
                    holder: holder.clone(),
                    problem: format!("the table has {} tensors", self.tensors.len()),
                })?;
            check::piece(holder, &tensor.name, &tensor.shape, &rank.locals, piece)?;
            if piece.dims.iter().any(Vec::is_empty) {
                continue; // An empty shard holds nothing.
            }
            let region = self.regions.id(piece.dims.iter().map(|runs| check::joined(runs)).collect());
            pieces.push(Held {
                tensor: piece.tensor,
                local: piece.local,
                lead: piece.lead,
                region,
                permute: permute(piece),
            });
        }
        // By content, not by region number: the plan must not depend on the order in which pieces were given.
        pieces.sort_by(|a: &Held, b: &Held| {
            (a.tensor, a.local, a.lead)
                .cmp(&(b.tensor, b.local, b.lead))
                .then_with(|| self.regions.get(a.region).cmp(self.regions.get(b.region)))
        });
        Ok((locals, pieces))
    }
}

/// `None` where the piece is stored in HF order.
fn permute(piece: &Piece) -> Option<Permute> {
    let given = piece.permute.as_ref()?;
    if given.iter().enumerate().all(|(i, &d)| i == usize::from(d)) {
        return None;
    }
    let mut out = [0; DIMS_MAX];
    out[..given.len()].copy_from_slice(given);
    Some(out)
}
