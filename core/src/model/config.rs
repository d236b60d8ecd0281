//! The facts of a Hugging Face `config.json` that tensors and presets follow from.

use super::error::TableError;
use crate::dtype::{DType, UnknownDType};
use crate::limits::{EXPERTS_MAX, LAYERS_MAX};
use serde::Deserialize;

/// Model families whose tensors follow from their config.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Llama 2 and 3.
    Llama,
    /// Qwen2 and Qwen2.5.
    Qwen2,
    /// Qwen3, dense.
    Qwen3,
    /// Qwen3 with experts.
    Qwen3Moe,
    /// DeepSeek-V3 and R1.
    DeepseekV3,
}

/// The facts of a config.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelConfig {
    /// Family.
    pub family: Family,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Decoder layers, without those for multi-token prediction; at least 1.
    pub layers: u64,
    /// Rows of the embedding.
    pub vocab: u64,
    /// Width of a dense MLP.
    pub intermediate: u64,
    /// Attention.
    pub attention: Attention,
    /// Whether the projections of the MLP have a bias.
    pub mlp_bias: bool,
    /// Routed experts, if any.
    pub experts: Option<Experts>,
    /// Layers for multi-token prediction, numbered after the others.
    pub mtp_layers: u64,
    /// Whether `lm_head` shares the bytes of the embedding.
    pub tied: bool,
    /// Dtype of the weights.
    pub dtype: DType,
    /// Rows and columns that share one FP8 scale, where linear weights are FP8.
    pub fp8_block: Option<(u64, u64)>,
    /// What the config leaves out and was assumed as the family's own reader does, in sentences.
    pub assumed: Vec<String>,
}

/// Attention.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Attention {
    /// Query heads share fewer key and value heads.
    Grouped {
        /// Query heads.
        heads: u64,
        /// Key and value heads.
        kv_heads: u64,
        /// Elements of a head.
        head_dim: u64,
        /// Whether q, k and v have a bias.
        bias: bool,
        /// Whether the output has one.
        output_bias: bool,
        /// Whether q and k heads are normalised.
        norms: bool,
    },
    /// Keys and values come from a small latent (MLA).
    Latent {
        /// Heads.
        heads: u64,
        /// Rank of the query latent.
        q_rank: u64,
        /// Rank of the key and value latent.
        kv_rank: u64,
        /// Elements of a head without position.
        nope: u64,
        /// Elements of a head with rotary position.
        rope: u64,
        /// Elements of a value head.
        value: u64,
    },
}

/// Routed experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Experts {
    /// Their number.
    pub count: u64,
    /// Width of one.
    pub intermediate: u64,
    /// Shared experts, as wide as that many routed ones.
    pub shared: u64,
    /// The first layer with experts.
    first: u64,
    /// Every how many layers one has experts, counted so that layer `step - 1` is the first.
    step: u64,
    /// Layers without experts.
    except: Vec<u64>,
}

impl Experts {
    /// Whether a layer has experts instead of a dense MLP.
    #[must_use]
    pub fn on_layer(&self, layer: u64) -> bool {
        layer >= self.first && (layer + 1).is_multiple_of(self.step) && !self.except.contains(&layer)
    }

    /// Dense layers before the first with experts, as `first_k_dense_replace` says.
    #[must_use]
    pub const fn leading_dense_layers(&self) -> u64 {
        self.first
    }
}

/// What `config.json` may say; other keys do not change tensors.
#[derive(Deserialize)]
struct Raw {
    model_type: Option<String>,
    hidden_size: Option<u64>,
    num_hidden_layers: Option<u64>,
    vocab_size: Option<u64>,
    intermediate_size: Option<u64>,
    num_attention_heads: Option<u64>,
    num_key_value_heads: Option<u64>,
    head_dim: Option<u64>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    tie_word_embeddings: Option<bool>,
    #[serde(alias = "dtype")]
    torch_dtype: Option<String>,
    num_experts: Option<u64>,
    moe_intermediate_size: Option<u64>,
    decoder_sparse_step: Option<u64>,
    mlp_only_layers: Option<Vec<u64>>,
    q_lora_rank: Option<u64>,
    kv_lora_rank: Option<u64>,
    qk_nope_head_dim: Option<u64>,
    qk_rope_head_dim: Option<u64>,
    v_head_dim: Option<u64>,
    n_routed_experts: Option<u64>,
    n_shared_experts: Option<u64>,
    first_k_dense_replace: Option<u64>,
    moe_layer_freq: Option<u64>,
    num_nextn_predict_layers: Option<u64>,
    quantization_config: Option<RawQuantization>,
}

#[derive(Deserialize)]
struct RawQuantization {
    quant_method: Option<String>,
    weight_block_size: Option<Vec<u64>>,
}

/// A number that must be there and be at least 1.
fn need(key: &'static str, value: Option<u64>) -> Result<u64, TableError> {
    value.filter(|value| *value > 0).ok_or(TableError::ConfigKey { key })
}

impl ModelConfig {
    /// Reads `config.json`.
    ///
    /// # Errors
    /// A family or quantisation that is not known, or a missing key.
    pub fn read(json: &str) -> Result<Self, TableError> {
        let raw: Raw =
            serde_json::from_str(json).map_err(|error| TableError::json("model config", &error))?;
        let family = match raw.model_type.as_deref() {
            Some("llama") => Family::Llama,
            Some("qwen2") => Family::Qwen2,
            Some("qwen3") => Family::Qwen3,
            Some("qwen3_moe") => Family::Qwen3Moe,
            Some("deepseek_v3") => Family::DeepseekV3,
            other => {
                return Err(TableError::Family {
                    found: other.unwrap_or("nothing").chars().take(80).collect(),
                });
            }
        };
        let dtype = raw.torch_dtype.as_deref().ok_or(TableError::ConfigNoDtype)?;
        let unknown = |unknown: UnknownDType| TableError::ConfigDtype {
            found: unknown.found,
            nearest: unknown.nearest.torch_name(),
        };
        let layers =
            bounded("num_hidden_layers", need("num_hidden_layers", raw.num_hidden_layers)?, LAYERS_MAX)?;
        let mtp_layers = raw.num_nextn_predict_layers.filter(|_| family == Family::DeepseekV3).unwrap_or(0);
        Ok(Self {
            family,
            hidden: need("hidden_size", raw.hidden_size)?,
            layers,
            vocab: need("vocab_size", raw.vocab_size)?,
            intermediate: need("intermediate_size", raw.intermediate_size)?,
            attention: raw.attention(family)?,
            mlp_bias: family == Family::Llama && raw.mlp_bias.unwrap_or(false),
            experts: raw.experts(family)?,
            mtp_layers: bounded("num_nextn_predict_layers", mtp_layers, LAYERS_MAX)?,
            tied: raw.tie_word_embeddings.unwrap_or(false),
            dtype: dtype.parse().map_err(unknown)?,
            fp8_block: raw.fp8_block(family)?,
            assumed: raw.assumed(family),
        })
    }
}

fn bounded(key: &'static str, found: u64, most: u64) -> Result<u64, TableError> {
    if found > most {
        return Err(TableError::ConfigValue { key, found: found.to_string() });
    }
    Ok(found)
}

impl Raw {
    fn attention(&self, family: Family) -> Result<Attention, TableError> {
        let heads = need("num_attention_heads", self.num_attention_heads)?;
        if family == Family::DeepseekV3 {
            return Ok(Attention::Latent {
                heads,
                q_rank: need("q_lora_rank", self.q_lora_rank)?,
                kv_rank: need("kv_lora_rank", self.kv_lora_rank)?,
                nope: need("qk_nope_head_dim", self.qk_nope_head_dim)?,
                rope: need("qk_rope_head_dim", self.qk_rope_head_dim)?,
                value: need("v_head_dim", self.v_head_dim)?,
            });
        }
        let bias = self.attention_bias.unwrap_or(false);
        // The first Llamas have no such key, because every head has its own. Other families have numbers of their own
        // there, which would be a guess.
        let own_keys = (family == Family::Llama).then_some(heads);
        let qwen3 = matches!(family, Family::Qwen3 | Family::Qwen3Moe);
        // Qwen3's own default is 128, whatever the hidden size.
        let default = if qwen3 { 128 } else { need("hidden_size", self.hidden_size)? / heads };
        Ok(Attention::Grouped {
            heads,
            kv_heads: need("num_key_value_heads", self.num_key_value_heads.or(own_keys))?,
            head_dim: need("head_dim", Some(self.head_dim.unwrap_or(default)))?,
            bias: bias || family == Family::Qwen2,
            output_bias: bias && family != Family::Qwen2,
            norms: qwen3,
        })
    }

    fn assumed(&self, family: Family) -> Vec<String> {
        match (family, self.num_key_value_heads, self.num_attention_heads) {
            (Family::Llama, None, Some(heads)) => vec![format!(
                "the model config has no `num_key_value_heads`: {heads} are assumed, as many as `num_attention_heads`"
            )],
            _ => Vec::new(),
        }
    }

    fn experts(&self, family: Family) -> Result<Option<Experts>, TableError> {
        let intermediate = || need("moe_intermediate_size", self.moe_intermediate_size);
        let experts = match family {
            Family::Qwen3Moe => Experts {
                count: need("num_experts", self.num_experts)?,
                intermediate: intermediate()?,
                shared: 0,
                first: 0,
                step: need("decoder_sparse_step", Some(self.decoder_sparse_step.unwrap_or(1)))?,
                except: self.mlp_only_layers.clone().unwrap_or_default(),
            },
            Family::DeepseekV3 => {
                if let Some(found) = self.moe_layer_freq.filter(|freq| *freq != 1) {
                    return Err(TableError::ConfigValue { key: "moe_layer_freq", found: found.to_string() });
                }
                Experts {
                    count: need("n_routed_experts", self.n_routed_experts)?,
                    intermediate: intermediate()?,
                    shared: self.n_shared_experts.unwrap_or(0),
                    first: self.first_k_dense_replace.unwrap_or(0),
                    step: 1,
                    except: Vec::new(),
                }
            }
            Family::Llama | Family::Qwen2 | Family::Qwen3 => return Ok(None),
        };
        bounded("num_experts", experts.count, EXPERTS_MAX)?;
        Ok(Some(experts))
    }

    fn fp8_block(&self, family: Family) -> Result<Option<(u64, u64)>, TableError> {
        let Some(quantization) = &self.quantization_config else { return Ok(None) };
        let method = quantization.quant_method.as_deref().unwrap_or("nothing");
        match quantization.weight_block_size.as_deref() {
            Some([rows, columns])
                if method == "fp8" && *rows > 0 && *columns > 0 && family == Family::DeepseekV3 =>
            {
                Ok(Some((*rows, *columns)))
            }
            _ => Err(TableError::ConfigValue {
                key: "quantization_config.quant_method",
                found: method.to_owned(),
            }),
        }
    }
}
