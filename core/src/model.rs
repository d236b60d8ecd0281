//! The tensors of a model under their Hugging Face (HF) names, and where they are read from.

mod error;
mod list;
mod table;

pub use error::TableError;
pub use list::read_list;
pub use table::{TensorMeta, TensorTable};
