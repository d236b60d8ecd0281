//! Content digest: the proof that what landed is what was published.
//!
//! For one Hugging Face (HF) tensor in one wire dtype, four u32 lanes: the sum over its elements of (bits as
//! delivered × keys of the element's index in the HF tensor), mod 2^32. Row r is all dims but the last, column
//! c the last dim; an element is one or more 16-bit words.
//!
//! D1: the digest does not depend on how the tensor is cut, ordered or padded, since it is a sum over elements.
//! D2: every element of a tensor is summed once, however many ranks hold it ([`ledger`]).
//! D3: nothing here knows the plan, so a wrong plan shows as a wrong digest.
//!
//! It finds faults, not forgery.

pub mod classes;
pub mod keys;
pub mod ledger;
mod overlap;
pub mod rows;

pub use classes::{Classes, DigestBox, LedgerError, Part};
pub use keys::{ColumnKeys, row_keys};
pub use ledger::{Ledger, Unverified};
pub use rows::{DigestError, Geometry, RowDigest};

/// Lanes of a digest.
pub(crate) const LANES: usize = 4;
