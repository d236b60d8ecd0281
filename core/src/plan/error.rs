//! What a planner refuses, and the code of each refusal.

use crate::code::Code;
use crate::dtype::DType;
use crate::id::Rank;
use std::fmt;

/// One rank of a side, as messages name it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holder {
    /// A training rank.
    Training(Rank),
    /// A rank of every replica of a pool.
    Inference(String, Rank),
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Training(rank) => write!(f, "training rank {rank}"),
            Self::Inference(pool, rank) => write!(f, "pool `{pool}` rank {rank}"),
        }
    }
}

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// A destination needs elements that no source holds.
    #[error("no training rank holds `{tensor}`{range}, which {destination} needs")]
    CoverageGap {
        /// The HF tensor, after the training side's alias.
        tensor: String,
        /// Who needs them.
        destination: Holder,
        /// First missing box as `[0:4, 8:16]` (half-open, HF dims); empty for a scalar.
        range: String,
    },
    /// Source and destination store a tensor in dtypes between which no cast is allowed.
    #[error(
        "`{tensor}` is {source_dtype} on {source_rank} and {wire} on {destination}, and no cast is allowed between them"
    )]
    DtypeMismatch {
        /// The HF tensor.
        tensor: String,
        /// First rank that holds it in such a dtype.
        source_rank: Holder,
        /// Its dtype.
        source_dtype: DType,
        /// Who needs it.
        destination: Holder,
        /// The wire dtype: the destination's storage dtype.
        wire: DType,
    },
    /// A piece does not fit its HF tensor or its local tensor.
    #[error("a piece of `{tensor}` on {holder} is malformed: {problem}")]
    MalformedPiece {
        /// The HF tensor.
        tensor: String,
        /// Whose piece.
        holder: Holder,
        /// What does not fit, with both values.
        problem: String,
    },
    /// An alias joins tensors of different shapes.
    #[error("`{name}` has shape {shape:?}, but its alias `{target}` has shape {target_shape:?}")]
    AliasShape {
        /// The aliased tensor.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
        /// The tensor that it shares bytes with.
        target: String,
        /// Its shape.
        target_shape: Vec<u64>,
    },
    /// Two tensors of the table, two pools or two replicas of a pool have one name.
    #[error("{what} `{name}` is named twice")]
    DuplicateName {
        /// What kind of thing.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// A number does not fit: the sizes claimed cannot be those of real memory.
    #[error("{what} does not fit in 63 bits")]
    TooLarge {
        /// What kind of number.
        what: String,
    },
}

impl PlanError {
    /// The stable code.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::CoverageGap { .. } => Code::CoverageGap,
            Self::DtypeMismatch { .. } => Code::DtypeMismatch,
            Self::MalformedPiece { .. }
            | Self::AliasShape { .. }
            | Self::DuplicateName { .. }
            | Self::TooLarge { .. } => Code::LayoutRejected,
        }
    }
}
