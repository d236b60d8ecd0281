//! PyTorch DTensor placements over a device mesh.
//!
//! Invariants:
//! - D1: the internal form is, per tensor dim, the list of mesh dims that cut it, in order; every cut is
//!   `torch.chunk`. `_StridedShard` is only a way to write an order, and one that writes none is refused: what
//!   PyTorch computes for it from left to right differs from what FSDP2 stores as soon as a cut is uneven.
//! - D2: a mesh dim of size 1 cuts nothing, as `Replicate` does not, so equal placements have equal orders.
//! - D3: a rank outside the mesh holds nothing; the coordinate is the position in the rank array.

use super::document::Division;
use super::spans::{self, CutBy};
use crate::code::Code;
use crate::id::Rank;
use crate::region::Run;

/// What one mesh dim does to a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// `Shard(dim)`; negative dims count from the end.
    Shard {
        /// Tensor dim.
        dim: i64,
    },
    /// `Replicate()`.
    Replicate,
    /// `_StridedShard(dim, split_factor)`: cuts after mesh dims to its right whose sizes multiply to the factor.
    StridedShard {
        /// Tensor dim.
        dim: i64,
        /// Product of the sizes of the mesh dims to its right that cut earlier.
        split_factor: u64,
    },
    /// `Partial()`; refused.
    Partial,
}

/// Why placements are refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// The rank array does not fill the mesh.
    #[error("a mesh of shape {shape:?} cannot hold {ranks} ranks")]
    MeshSize {
        /// Sizes of the mesh dims.
        shape: Vec<u64>,
        /// Number of ranks given.
        ranks: usize,
    },
    /// A rank is in the mesh twice.
    #[error("rank {rank} is in the mesh twice")]
    MeshRank {
        /// The rank.
        rank: Rank,
    },
    /// Not one placement per mesh dim.
    #[error("{placements} placements are given for a mesh of {dims} dims")]
    Count {
        /// Their number.
        placements: usize,
        /// Mesh dims.
        dims: usize,
    },
    /// The tensor has no such dim.
    #[error("placement {mesh_dim} cuts dim {dim} of a tensor with {dims} dims")]
    Dim {
        /// Which placement.
        mesh_dim: usize,
        /// Dim as given.
        dim: i64,
        /// Dims of the tensor.
        dims: usize,
    },
    /// Weights are never partial.
    #[error("placement {mesh_dim} is Partial: a reduction was forgotten")]
    Partial {
        /// Which placement.
        mesh_dim: usize,
    },
    /// The split factor fits no order of cuts.
    #[error(
        "placement {mesh_dim} has split factor {split_factor}, which no mesh dims to its right multiply to"
    )]
    Order {
        /// Which placement.
        mesh_dim: usize,
        /// The factor.
        split_factor: u64,
    },
}

impl PlacementError {
    /// The stable code.
    #[must_use]
    pub const fn code(&self) -> Code {
        Code::LayoutRejected
    }
}

/// An n-dimensional array of ranks: any ranks in any order, each once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mesh {
    shape: Vec<u64>,
    ranks: Vec<Rank>,
}

impl Mesh {
    /// `ranks` in row-major order of `shape`.
    ///
    /// # Errors
    /// A number of ranks other than the product of `shape`, or a rank given twice.
    pub fn new(shape: Vec<u64>, ranks: Vec<Rank>) -> Result<Self, PlacementError> {
        let product = shape.iter().try_fold(1_u64, |product, size| product.checked_mul(*size));
        if product != Some(ranks.len() as u64) {
            return Err(PlacementError::MeshSize { shape, ranks: ranks.len() });
        }
        let mut sorted = ranks.clone();
        sorted.sort_unstable();
        match sorted.array_windows().find(|[a, b]| a == b) {
            Some([rank, _]) => Err(PlacementError::MeshRank { rank: *rank }),
            None => Ok(Self { shape, ranks }),
        }
    }

    /// `None` outside the mesh (D3).
    #[must_use]
    pub fn coordinate(&self, rank: Rank) -> Option<Vec<u64>> {
        let mut at = self.ranks.iter().position(|known| *known == rank)? as u64;
        let mut out = vec![0; self.shape.len()];
        for (coordinate, size) in out.iter_mut().zip(&self.shape).rev() {
            (*coordinate, at) = (at % size, at / size);
        }
        Some(out)
    }
}

/// A tensor placed on a mesh. Equal placements compare equal, however they were written (D2).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    mesh: Mesh,
    shape: Vec<u64>,
    /// Per tensor dim the mesh dims that cut it, the first cut first.
    order: Vec<Vec<usize>>,
}

/// What a rank of the mesh stores.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shard {
    /// Local extents; 0 where the rank got nothing of a dim.
    pub shape: Vec<u64>,
    /// Per dim the run that is stored; no run where the extent is 0.
    pub dims: Vec<Vec<Run>>,
}

impl Placed {
    /// One placement per mesh dim.
    ///
    /// # Errors
    /// A dim the tensor does not have, `Partial`, or a strided shard that writes no order of cuts.
    pub fn new(shape: Vec<u64>, mesh: Mesh, placements: &[Placement]) -> Result<Self, PlacementError> {
        let mesh_dims = mesh.shape.len();
        if placements.len() != mesh_dims {
            return Err(PlacementError::Count { placements: placements.len(), dims: mesh_dims });
        }
        let mut order: Vec<Vec<usize>> = vec![Vec::new(); shape.len()];
        // Right to left: what a strided shard cuts after stands to its right, and is in the order already.
        for (mesh_dim, placement) in placements.iter().enumerate().rev() {
            let (dim, split_factor) = match *placement {
                Placement::Replicate => continue,
                Placement::Partial => return Err(PlacementError::Partial { mesh_dim }),
                Placement::Shard { dim } => (dim, 1),
                Placement::StridedShard { dim, split_factor } => (dim, split_factor),
            };
            let dims = shape.len();
            let from_end =
                if dim < 0 { i64::try_from(dims).unwrap_or(i64::MAX).saturating_add(dim) } else { dim };
            let normal = usize::try_from(from_end).ok().filter(|dim| *dim < dims);
            let normal = normal.ok_or(PlacementError::Dim { mesh_dim, dim, dims })?;
            if mesh.shape[mesh_dim] == 1 {
                continue; // D2
            }
            let before =
                |at: &usize| order[normal][..*at].iter().map(|cut| mesh.shape[*cut]).product::<u64>();
            let at = (0..=order[normal].len()).find(|at| before(at) == split_factor);
            let at = at.ok_or(PlacementError::Order { mesh_dim, split_factor })?;
            order[normal].insert(at, mesh_dim);
        }
        Ok(Self { mesh, shape, order })
    }

    /// What the rank stores; `None` outside the mesh (D3).
    #[must_use]
    pub fn shard(&self, rank: Rank) -> Option<Shard> {
        let coordinate = self.mesh.coordinate(rank)?;
        let mut shard = Shard { shape: Vec::new(), dims: Vec::new() };
        for (extent, order) in self.shape.iter().zip(&self.order) {
            let (mut low, mut high) = (0, *extent);
            for mesh_dim in order {
                let (index, parts) = (coordinate[*mesh_dim], self.mesh.shape[*mesh_dim]);
                let by = CutBy { kind: Division::Chunk, unit: 1, spread: false, index, parts };
                let (from, to) = spans::part(high - low, by).expect("any extent can be chunked");
                (low, high) = (low + from, low + to);
            }
            shard.shape.push(high - low);
            shard.dims.push(
                (low < high).then_some(Run { local: 0, hf: low, len: high - low }).into_iter().collect(),
            );
        }
        Some(shard)
    }
}
