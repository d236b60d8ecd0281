//! Layouts that were recorded instead of written: every rank lists its local tensors, and the pieces in them, as its
//! engine's own loader made them. A document has such `ranks` in place of grids, stages and rules.

use super::error::LayoutError;
use super::evaluate::{RankLayout, elements};
use crate::dtype::DType;
use crate::id::{LocalId, Rank, TensorId};
use crate::limits::TENSOR_NAME_BYTES_MAX;
use crate::model::TensorTable;
use crate::plan::check::{joined, problem, tensor_bytes};
use crate::region::{LocalTensor, Piece, RankRegions, Run};
use serde::{Deserialize, Serialize};

/// A local tensor of one rank, as a client registers it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RecordedTensor {
    /// The side's own name.
    pub name: String,
    /// Storage dtype.
    pub dtype: DType,
    /// Extents in elements, stacked leading axis included.
    pub shape: Vec<u64>,
    /// What lies in it; what no piece claims is zero.
    pub pieces: Vec<RecordedPiece>,
}

/// A piece of one HF tensor in a local tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RecordedPiece {
    /// Name of the HF tensor.
    pub tensor: String,
    /// Index on the local tensor's stacked leading axis, where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lead: Option<u64>,
    /// Per HF dim its runs `[local, hf, len]`.
    pub dims: Vec<Vec<(u64, u64, u64)>>,
    /// Local dim `i` (after `lead`) is HF dim `permute[i]`; absent: the identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permute: Option<Vec<u8>>,
}

/// Brings pieces of one local tensor into the one form in which equal ones are equal.
pub fn normalize(pieces: &mut [RecordedPiece]) {
    for piece in &mut *pieces {
        for runs in &mut piece.dims {
            *runs = joined(&runs.iter().map(run).collect::<Vec<_>>()).iter().map(written).collect();
        }
        piece.permute.take_if(|permute| permute.is_sorted());
    }
    pieces.sort_by(|a, b| (&a.tensor, a.lead, &a.dims).cmp(&(&b.tensor, b.lead, &b.dims)));
}

fn run(&(local, hf, len): &(u64, u64, u64)) -> Run {
    Run { local, hf, len }
}

fn written(run: &Run) -> (u64, u64, u64) {
    (run.local, run.hf, run.len)
}

/// What a rank holds, as its client would have recorded it, in the form of [`normalize`].
#[must_use]
pub fn record(regions: &RankRegions, table: &TensorTable) -> Vec<RecordedTensor> {
    let recorded = |local: &LocalTensor| {
        let LocalTensor { name, shape, dtype } = local.clone();
        RecordedTensor { name, dtype, shape, pieces: Vec::new() }
    };
    let mut tensors: Vec<RecordedTensor> = regions.locals.iter().map(recorded).collect();
    for piece in &regions.pieces {
        tensors[piece.local.0 as usize].pieces.push(RecordedPiece {
            tensor: table[piece.tensor].name.clone(),
            lead: piece.lead,
            dims: piece.dims.iter().map(|runs| runs.iter().map(written).collect()).collect(),
            permute: piece.permute.clone(),
        });
    }
    tensors.iter_mut().for_each(|tensor| normalize(&mut tensor.pieces));
    tensors
}

/// What the ranks hold; `carrier` is the tensor whose bytes another one shares.
pub(super) fn bind(
    ranks: &[Vec<RecordedTensor>],
    table: &TensorTable,
    carrier: &[TensorId],
) -> Result<Vec<RankLayout>, LayoutError> {
    let bound =
        (0..).zip(ranks).map(|(rank, tensors)| Binder { table, carrier, rank: Rank(rank) }.rank(tensors));
    bound.collect()
}

struct Binder<'a> {
    table: &'a TensorTable,
    carrier: &'a [TensorId],
    rank: Rank,
}

impl Binder<'_> {
    fn rank(&self, tensors: &[RecordedTensor]) -> Result<RankLayout, LayoutError> {
        let mut sorted: Vec<&RecordedTensor> = tensors.iter().collect();
        sorted.sort_by(|a, b| a.name.cmp(&b.name));
        if let Some([_, twice]) = sorted.array_windows().find(|[a, b]| a.name == b.name) {
            return Err(self.refuse(twice, "is recorded twice".to_owned()));
        }
        let mut out = RankLayout::default();
        for tensor in &sorted {
            if tensor.name.is_empty() || tensor.name.len() > TENSOR_NAME_BYTES_MAX {
                let place = format!("ranks[{}]", self.rank);
                return Err(LayoutError::NameLength { place, found: tensor.name.len() });
            }
            tensor_bytes(&tensor.name, &tensor.shape, tensor.dtype.size()).map_err(|_| {
                let (local, shape) = (tensor.name.clone(), tensor.shape.clone());
                LayoutError::LocalSize { local, rank: self.rank, shape }
            })?;
            out.regions.locals.push(LocalTensor {
                name: tensor.name.clone(),
                shape: tensor.shape.clone(),
                dtype: tensor.dtype,
            });
        }
        for (local, tensor) in (0..).zip(&sorted) {
            self.pieces(LocalId(local), tensor, &mut out)?;
        }
        out.regions
            .pieces
            .sort_by(|a, b| (a.tensor, a.local, a.lead, &a.dims).cmp(&(b.tensor, b.local, b.lead, &b.dims)));
        Ok(out)
    }

    fn pieces(
        &self,
        local: LocalId,
        tensor: &RecordedTensor,
        out: &mut RankLayout,
    ) -> Result<(), LayoutError> {
        let first = out.regions.pieces.len();
        let mut claimed = 0_u128;
        for recorded in &tensor.pieces {
            let Some(id) = self.table.find(&recorded.tensor) else {
                let text = format!("holds `{}`, which is no tensor of the model", recorded.tensor);
                return Err(self.refuse(tensor, text));
            };
            let dims = recorded.dims.iter().map(|runs| runs.iter().map(run).collect()).collect();
            let (lead, permute) = (recorded.lead, recorded.permute.clone());
            let piece = Piece { tensor: self.carrier[id.0 as usize], local, lead, dims, permute };
            if let Some(problem) = problem(&self.table[id].shape, &out.regions.locals, &piece) {
                return Err(self.refuse(tensor, format!("holds `{}` wrongly: {problem}", recorded.tensor)));
            }
            let elements = elements(&piece);
            if elements == 0 {
                return Err(self.refuse(tensor, format!("holds nothing of `{}`", recorded.tensor)));
            }
            if let Some(other) = out.regions.pieces[first..].iter().find(|other| meet(other, &piece)) {
                let other = &self.table[other.tensor].name;
                let text = format!("holds `{other}` and `{}` in the same elements", recorded.tensor);
                return Err(self.refuse(tensor, text));
            }
            claimed += u128::from(elements);
            out.regions.pieces.push(piece);
        }
        // Pieces do not meet, so no more is claimed than there is (L2).
        let pads = u128::from(tensor.shape.iter().product::<u64>()).saturating_sub(claimed);
        out.pads.push(u64::try_from(pads).unwrap_or(u64::MAX));
        out.post.push(None);
        Ok(())
    }

    fn refuse(&self, tensor: &RecordedTensor, problem: String) -> LayoutError {
        LayoutError::Recorded { local: tensor.name.clone(), rank: self.rank, problem }
    }
}

/// Whether two pieces of one local tensor claim a common element of it.
fn meet(a: &Piece, b: &Piece) -> bool {
    let runs = |piece: &Piece, at: usize| {
        let dim = piece.permute.as_ref().map_or(at, |permute| usize::from(permute[at]));
        piece.dims[dim].iter().map(|run| (run.local, run.local + run.len)).collect::<Vec<_>>()
    };
    // Where one is stacked, the other must be: both have the local tensor's dims.
    a.lead == b.lead
        && (0..a.dims.len()).all(|at| {
            let (a, b) = (runs(a, at), runs(b, at));
            a.iter().any(|a| b.iter().any(|b| a.0 < b.1 && b.0 < a.1))
        })
}
