//! Moves: the boxes that a pair of ranks exchanges, without an allocation per box.

use crate::id::{LocalId, Rank, TensorId};

/// Most dims of a tensor, a stacked leading axis included: 5-D convolutions exist, one more is for the lead.
pub const DIMS_MAX: usize = 6;

/// Up to [`DIMS_MAX`] extents or positions in elements, row-major order of dims.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Dims {
    len: u8,
    values: [u64; DIMS_MAX],
}

impl Dims {
    /// `None` when `values` has more than [`DIMS_MAX`] entries.
    #[must_use]
    pub fn new(values: &[u64]) -> Option<Self> {
        let mut out = [0; DIMS_MAX];
        out.get_mut(..values.len())?.copy_from_slice(values);
        Some(Self { len: u8::try_from(values.len()).ok()?, values: out })
    }

    /// The entries.
    #[must_use]
    pub fn as_slice(&self) -> &[u64] {
        &self.values[..usize::from(self.len)]
    }

    /// Entry `d`; 0 past the end.
    pub(super) fn at(&self, d: usize) -> u64 {
        self.values.get(d).copied().unwrap_or(0)
    }

    /// The same dims with entry `d` replaced.
    ///
    /// # Panics
    /// Where `d` is not below the number of entries: callers take `d` from a loop over them.
    pub(super) fn with(mut self, d: usize, value: u64) -> Self {
        assert!(d < self.rank(), "dim {d} of {self:?}");
        self.values[d] = value;
        self
    }

    /// Number of entries.
    pub(super) fn rank(&self) -> usize {
        usize::from(self.len)
    }
}

impl std::fmt::Debug for Dims {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.as_slice().fmt(f)
    }
}

/// A dense hyper-rectangle of one HF tensor that one move copies. Its bytes on the wire are its elements in
/// row-major order of the *destination's* dims, in wire dtype (the destination's storage dtype), no padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoveBox {
    /// The HF tensor, after the destination's alias.
    pub tensor: TensorId,
    /// First element in the HF tensor (HF dims).
    pub hf: Dims,
    /// Extents in the order of the source's local dims (lead not counted): HF dims, unless the source stores
    /// the tensor transposed. Those of the destination are `shape[permute[i]]`.
    pub shape: Dims,
    /// Local tensor of the source.
    pub source: LocalId,
    /// First element in it (lead first where it is stacked, then local dims).
    pub source_start: Dims,
    /// Local tensor of the destination.
    pub destination: LocalId,
    /// First element in it (lead first where it is stacked, then local dims).
    pub destination_start: Dims,
    /// Where an end stores the tensor transposed: destination dim `i` = source dim `permute[i]` (lead not
    /// counted); the entries past the tensor's dims are 0. `None` is the identity.
    pub permute: Option<[u8; DIMS_MAX]>,
}

/// One rank of one side, as a plan names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Endpoint {
    /// A training rank.
    Training {
        /// Its rank.
        rank: Rank,
    },
    /// An inference rank.
    Inference {
        /// Index of the pool (order of the resource).
        pool: u32,
        /// Index of the replica in its pool's names, sorted bytewise.
        replica: u32,
        /// Rank inside the replica.
        rank: Rank,
    },
}

impl Endpoint {
    /// A training rank.
    #[must_use]
    pub const fn training(rank: u32) -> Self {
        Self::Training { rank: Rank(rank) }
    }
}

/// All that one source rank sends to one destination rank, in wire order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PairMoves {
    /// Sender.
    pub source: Endpoint,
    /// Receiver.
    pub destination: Endpoint,
    /// Bytes in wire dtype.
    pub bytes: u64,
    /// In order of (tensor, HF start, destination tensor, destination start).
    pub boxes: Vec<MoveBox>,
}
