//! The tensor table that follows from a config: HF names and shapes of the known families.
//!
//! `lm_head.weight` is always in it, as in the published checkpoints, tied ones included: whether it is a tensor of
//! its own is for the layout (`alias`) to say.

use super::config::{Attention, Experts, ModelConfig};
use super::error::TableError;
use super::table::{TensorMeta, TensorTable};
use crate::dtype::DType;
use crate::limits::TENSORS_MAX;

impl ModelConfig {
    /// All tensors of the checkpoint, in the order of the model.
    ///
    /// # Errors
    /// More tensors than a table holds, or extents beyond 63 bits.
    pub fn table(&self) -> Result<TensorTable, TableError> {
        let mut out = Builder { config: self, tensors: Vec::new() };
        out.add("model.embed_tokens.weight", &[self.vocab, self.hidden])?;
        for layer in 0..self.layers {
            out.layer(layer)?;
        }
        out.add("model.norm.weight", &[self.hidden])?;
        out.add("lm_head.weight", &[self.vocab, self.hidden])?;
        for layer in self.layers..self.layers + self.mtp_layers {
            out.layer(layer)?;
            let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
            out.add(&name("enorm"), &[self.hidden])?;
            out.add(&name("hnorm"), &[self.hidden])?;
            out.add(&name("eh_proj"), &[self.hidden, times(2, self.hidden)?])?;
            out.add(&name("embed_tokens"), &[self.vocab, self.hidden])?;
            out.add(&name("shared_head.norm"), &[self.hidden])?;
            out.add(&name("shared_head.head"), &[self.vocab, self.hidden])?;
        }
        TensorTable::new(out.tensors)
    }
}

fn times(a: u64, b: u64) -> Result<u64, TableError> {
    a.checked_mul(b).ok_or(TableError::ConfigProduct { a, b })
}

fn plus(a: u64, b: u64) -> Result<u64, TableError> {
    a.checked_add(b).ok_or(TableError::ConfigProduct { a, b })
}

struct Builder<'a> {
    config: &'a ModelConfig,
    tensors: Vec<TensorMeta>,
}

impl Builder<'_> {
    fn add(&mut self, name: &str, shape: &[u64]) -> Result<(), TableError> {
        self.add_as(name, shape, self.config.dtype)
    }

    fn add_as(&mut self, name: &str, shape: &[u64], dtype: DType) -> Result<(), TableError> {
        if self.tensors.len() == TENSORS_MAX {
            return Err(TableError::TooMany { found: TENSORS_MAX + 1 });
        }
        self.tensors.push(TensorMeta { name: name.to_owned(), shape: shape.to_vec(), dtype });
        Ok(())
    }

    /// A linear layer of `[rows, columns]`, with its scales where weights are FP8.
    fn linear(&mut self, name: &str, rows: u64, columns: u64, bias: bool) -> Result<(), TableError> {
        let weight = format!("{name}.weight");
        if let Some((block_rows, block_columns)) = self.config.fp8_block {
            self.add_as(&weight, &[rows, columns], DType::F8E4M3)?;
            let blocks = [rows.div_ceil(block_rows), columns.div_ceil(block_columns)];
            self.add_as(&format!("{weight}_scale_inv"), &blocks, DType::F32)?;
        } else {
            self.add(&weight, &[rows, columns])?;
        }
        if bias {
            self.add(&format!("{name}.bias"), &[rows])?;
        }
        Ok(())
    }

    fn layer(&mut self, layer: u64) -> Result<(), TableError> {
        let hidden = self.config.hidden;
        let prefix = format!("model.layers.{layer}");
        self.add(&format!("{prefix}.input_layernorm.weight"), &[hidden])?;
        self.add(&format!("{prefix}.post_attention_layernorm.weight"), &[hidden])?;
        self.attention(&format!("{prefix}.self_attn"))?;
        let mlp = format!("{prefix}.mlp");
        match &self.config.experts {
            Some(experts) if experts.on_layer(layer) => self.experts(&mlp, experts),
            _ => self.mlp(&mlp, self.config.intermediate),
        }
    }

    fn mlp(&mut self, prefix: &str, width: u64) -> Result<(), TableError> {
        let (hidden, bias) = (self.config.hidden, self.config.mlp_bias);
        self.linear(&format!("{prefix}.gate_proj"), width, hidden, bias)?;
        self.linear(&format!("{prefix}.up_proj"), width, hidden, bias)?;
        self.linear(&format!("{prefix}.down_proj"), hidden, width, bias)
    }

    fn experts(&mut self, prefix: &str, experts: &Experts) -> Result<(), TableError> {
        self.add(&format!("{prefix}.gate.weight"), &[experts.count, self.config.hidden])?;
        if matches!(self.config.attention, Attention::Latent { .. }) {
            self.add_as(&format!("{prefix}.gate.e_score_correction_bias"), &[experts.count], DType::F32)?;
        }
        for expert in 0..experts.count {
            self.mlp(&format!("{prefix}.experts.{expert}"), experts.intermediate)?;
        }
        if experts.shared > 0 {
            self.mlp(&format!("{prefix}.shared_experts"), times(experts.intermediate, experts.shared)?)?;
        }
        Ok(())
    }

    fn attention(&mut self, prefix: &str) -> Result<(), TableError> {
        let hidden = self.config.hidden;
        let name = |part: &str| format!("{prefix}.{part}");
        match self.config.attention {
            Attention::Grouped { heads, kv_heads, head_dim, bias, output_bias, norms } => {
                let (q, kv) = (times(heads, head_dim)?, times(kv_heads, head_dim)?);
                self.linear(&name("q_proj"), q, hidden, bias)?;
                self.linear(&name("k_proj"), kv, hidden, bias)?;
                self.linear(&name("v_proj"), kv, hidden, bias)?;
                self.linear(&name("o_proj"), hidden, q, output_bias)?;
                if norms {
                    self.add(&name("q_norm.weight"), &[head_dim])?;
                    self.add(&name("k_norm.weight"), &[head_dim])?;
                }
            }
            Attention::Latent { heads, q_rank, kv_rank, nope, rope, value } => {
                self.linear(&name("q_a_proj"), q_rank, hidden, false)?;
                self.add(&name("q_a_layernorm.weight"), &[q_rank])?;
                self.linear(&name("q_b_proj"), times(heads, plus(nope, rope)?)?, q_rank, false)?;
                self.linear(&name("kv_a_proj_with_mqa"), plus(kv_rank, rope)?, hidden, false)?;
                self.add(&name("kv_a_layernorm.weight"), &[kv_rank])?;
                self.linear(&name("kv_b_proj"), times(heads, plus(nope, value)?)?, kv_rank, false)?;
                self.linear(&name("o_proj"), hidden, times(heads, value)?, false)?;
            }
        }
        Ok(())
    }
}
