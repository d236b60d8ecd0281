//! Regions: where the elements of one Hugging Face (HF) tensor lie in one local tensor of one rank.
//!
//! A piece is a product over the HF tensor's dims of run lists, plus an optional index on a stacked leading
//! axis of the local tensor. Every layout of the vocabulary fits this form; intersecting two pieces
//! dimension by dimension is the whole geometry of the planner.

use crate::dtype::DType;
use crate::id::{LocalId, TensorId};

/// `len` consecutive positions of one dim: local positions `local..local+len` hold HF positions `hf..hf+len`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Run {
    /// First position in the local tensor's dim (elements).
    pub local: u64,
    /// First position in the HF tensor's dim (elements).
    pub hf: u64,
    /// Number of positions; never 0.
    pub len: u64,
}

/// Part of one HF tensor on one rank: the product of its per-dim run lists.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Piece {
    /// The HF tensor (index in the tensor table).
    pub tensor: TensorId,
    /// The local tensor that holds it.
    pub local: LocalId,
    /// Index on the local tensor's stacked leading axis, where it has one (it then has one dim more than HF).
    pub lead: Option<u64>,
    /// One run list per HF dim, each sorted by `local` and not empty; a scalar has no dims.
    pub dims: Vec<Vec<Run>>,
    /// Local dim `i` (after `lead`) is HF dim `permute[i]`; `None` is the identity. Only from registered pieces.
    pub permute: Option<Vec<u8>>,
}

/// One tensor as a rank stores it: row-major, contiguous.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LocalTensor {
    /// The side's own name of the parameter.
    pub name: String,
    /// Extents in elements, stacked leading axis included.
    pub shape: Vec<u64>,
    /// Storage dtype.
    pub dtype: DType,
}

/// What one rank holds: its local tensors (sorted by name, bytewise) and the pieces in them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RankRegions {
    /// Indexed by [`LocalId`].
    pub locals: Vec<LocalTensor>,
    /// Sorted by (tensor, local, lead).
    pub pieces: Vec<Piece>,
}
