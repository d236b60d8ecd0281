//! Moves and digests the bytes of one rank.
//!
//! A pair's moves are compiled once per plan into a [`Program`]: per box a base address, a contiguous run and a
//! few loops, so that nothing is allocated and nothing is looked up per box afterwards. A [`Cursor`] walks a
//! range of its wire bytes; [`gather`] and [`scatter`] copy between memory and chunks, and the transport takes
//! long runs straight from or to the tensors.
//!
//! X1: what a program touches lies inside its local tensors; compiling checks it.
//! X2: the wire bytes of a box are its elements in row-major order of the destination's dims, in wire dtype.
//! X3: both ends cut a pair into the same streams, at element boundaries, from the boxes alone.

mod copy;
mod cursor;
mod digest;
mod memory;
mod passed;
mod placement;
mod program;
mod shadow;
mod table;
#[cfg(test)]
mod testing;

pub use copy::{gather, scatter};
pub use cursor::{Cursor, Span};
pub use digest::{DigestProgram, DigestTable, ROWS_ENTRY_BYTES, RowsEntry};
pub use memory::{Part, RankMemory, ShadowError};
pub use passed::Passed;
pub use placement::{HostMemory, Place, Placements};
pub use program::Program;
pub use table::ENTRY_BYTES;

use weightrefit_core::dtype::DType;

/// A plan, registration or memory that do not fit each other.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExecutorError {
    /// The plan names a local tensor that the rank does not have.
    #[error("the plan names local tensor {index}, the rank has {count}")]
    UnknownLocal {
        /// Its id.
        index: u32,
        /// Local tensors of the rank.
        count: usize,
    },
    /// A box reaches outside its local tensor.
    #[error("box at {start:?} of extents {extents:?} does not fit local tensor `{name}` of shape {shape:?}")]
    OutsideTensor {
        /// Local tensor.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
        /// First element of the box.
        start: Vec<u64>,
        /// Extents, lead not counted.
        extents: Vec<u64>,
    },
    /// No cast exists for the two dtypes.
    #[error("local tensor `{name}` is {source_dtype}, its destination {wire}: no cast exists")]
    NoCast {
        /// Local tensor of the source.
        name: String,
        /// Its dtype.
        source_dtype: DType,
        /// Dtype of the destination.
        wire: DType,
    },
    /// The plan and its boxes disagree.
    #[error("the plan says {planned} bytes, its boxes have {boxes}")]
    ByteCount {
        /// Bytes of the plan.
        planned: u64,
        /// Bytes of the boxes.
        boxes: u64,
    },
    /// A local tensor does not lie in the memory that was passed.
    #[error(
        "local tensor `{name}` of {bytes} bytes at {offset} does not fit memory {memory} of {available} bytes"
    )]
    OutsideMemory {
        /// Local tensor.
        name: String,
        /// Its bytes.
        bytes: u64,
        /// Where it begins.
        offset: u64,
        /// Index of the memory.
        memory: u32,
        /// Bytes of that memory; 0 where there is none of this index.
        available: u64,
    },
    /// There are not as many places as local tensors.
    #[error("{places} places for {locals} local tensors")]
    PlaceCount {
        /// Places given.
        places: usize,
        /// Local tensors of the layout.
        locals: usize,
    },
    /// Sizes beyond 64 bits.
    #[error("local tensor `{name}` of shape {shape:?} has 2^64 bytes or more")]
    TooLarge {
        /// Local tensor.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
    },
}
