//! The tensors of a model under their Hugging Face (HF) names, and where they are read from.

mod config;
mod error;
mod family;
mod index;
mod list;
mod safetensors;
mod table;

pub use config::{Attention, Experts, Family, ModelConfig};
pub use error::TableError;
pub use index::{Checkpoint, Index, ShardOffset};
pub use list::read_list;
pub use safetensors::{Header, LENGTH_BYTES, header_bytes, read_header};
pub use table::{TensorMeta, TensorTable};
