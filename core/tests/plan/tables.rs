//! Tensor tables of whole models, from their configs: name, shape, dtype.

use weightrefit_core::dtype::DType;

pub(crate) type Table = Vec<(String, Vec<u64>, DType)>;

/// Sizes of a model's config; fields that a family lacks are 0.
#[derive(Clone, Copy, Default)]
pub(crate) struct Model {
    hidden: u64,
    layers: u64,
    heads: u64,
    kv_heads: u64,
    head: u64,
    intermediate: u64,
    vocabulary: u64,
    experts: u64,
    expert_intermediate: u64,
}

pub(crate) const QWEN3_0_6B: Model = Model {
    hidden: 1024,
    layers: 28,
    heads: 16,
    kv_heads: 8,
    head: 128,
    intermediate: 3072,
    vocabulary: 151_936,
    experts: 0,
    expert_intermediate: 0,
};

pub(crate) const QWEN3_235B_A22B: Model = Model {
    hidden: 4096,
    layers: 94,
    heads: 64,
    kv_heads: 4,
    head: 128,
    intermediate: 0,
    vocabulary: 151_936,
    experts: 128,
    expert_intermediate: 1536,
};

/// Without head sizes: its attention has latent sizes of its own (see [`deepseek_v3`]).
const DEEPSEEK_V3: Model = Model {
    hidden: 7168,
    layers: 61,
    heads: 128,
    kv_heads: 0,
    head: 0,
    intermediate: 18_432,
    vocabulary: 129_280,
    experts: 256,
    expert_intermediate: 2048,
};

#[derive(Default)]
struct Builder(Table);

impl Builder {
    fn add(&mut self, name: String, shape: &[u64]) {
        self.0.push((name, shape.to_vec(), DType::Bf16));
    }

    fn mlp(&mut self, at: &str, hidden: u64, width: u64) {
        self.add(format!("{at}.gate_proj.weight"), &[width, hidden]);
        self.add(format!("{at}.up_proj.weight"), &[width, hidden]);
        self.add(format!("{at}.down_proj.weight"), &[hidden, width]);
    }

    fn experts(&mut self, at: &str, model: &Model) {
        self.add(format!("{at}.gate.weight"), &[model.experts, model.hidden]);
        for expert in 0..model.experts {
            self.mlp(&format!("{at}.experts.{expert}"), model.hidden, model.expert_intermediate);
        }
    }

    fn ends(&mut self, model: &Model) {
        self.add("model.embed_tokens.weight".into(), &[model.vocabulary, model.hidden]);
        self.add("model.norm.weight".into(), &[model.hidden]);
        self.add("lm_head.weight".into(), &[model.vocabulary, model.hidden]);
    }

    fn norms(&mut self, at: &str, model: &Model) {
        self.add(format!("{at}.input_layernorm.weight"), &[model.hidden]);
        self.add(format!("{at}.post_attention_layernorm.weight"), &[model.hidden]);
    }

    fn latent_layer(&mut self, layer: u64, model: &Model) {
        let at = format!("model.layers.{layer}");
        self.norms(&at, model);
        let (query, latent, nope, rope, value) = (1536, 512, 128, 64, 128);
        let attention = format!("{at}.self_attn");
        self.add(format!("{attention}.q_a_proj.weight"), &[query, model.hidden]);
        self.add(format!("{attention}.q_a_layernorm.weight"), &[query]);
        self.add(format!("{attention}.q_b_proj.weight"), &[model.heads * (nope + rope), query]);
        self.add(format!("{attention}.kv_a_proj_with_mqa.weight"), &[latent + rope, model.hidden]);
        self.add(format!("{attention}.kv_a_layernorm.weight"), &[latent]);
        self.add(format!("{attention}.kv_b_proj.weight"), &[model.heads * (nope + value), latent]);
        self.add(format!("{attention}.o_proj.weight"), &[model.hidden, model.heads * value]);
        let mlp = format!("{at}.mlp");
        if layer < 3 {
            return self.mlp(&mlp, model.hidden, model.intermediate);
        }
        self.0.push((format!("{mlp}.gate.e_score_correction_bias"), vec![model.experts], DType::F32));
        self.experts(&mlp, model);
        self.mlp(&format!("{mlp}.shared_experts"), model.hidden, model.expert_intermediate);
    }
}

/// Qwen3, dense or with experts.
pub(crate) fn qwen3(model: &Model) -> Table {
    let mut out = Builder::default();
    out.ends(model);
    for layer in 0..model.layers {
        let at = format!("model.layers.{layer}");
        out.norms(&at, model);
        let attention = format!("{at}.self_attn");
        for (part, heads) in [("q", model.heads), ("k", model.kv_heads), ("v", model.kv_heads)] {
            out.add(format!("{attention}.{part}_proj.weight"), &[heads * model.head, model.hidden]);
        }
        out.add(format!("{attention}.o_proj.weight"), &[model.hidden, model.heads * model.head]);
        out.add(format!("{attention}.q_norm.weight"), &[model.head]);
        out.add(format!("{attention}.k_norm.weight"), &[model.head]);
        let mlp = format!("{at}.mlp");
        match model.experts {
            0 => out.mlp(&mlp, model.hidden, model.intermediate),
            _ => out.experts(&mlp, model),
        }
    }
    out.0
}

/// DeepSeek-V3 in bf16, with its MTP layer.
pub(crate) fn deepseek_v3() -> Table {
    let model = &DEEPSEEK_V3;
    let mut out = Builder::default();
    out.ends(model);
    for layer in 0..=model.layers {
        out.latent_layer(layer, model);
    }
    let at = format!("model.layers.{}", model.layers);
    for norm in ["enorm", "hnorm", "shared_head.norm"] {
        out.add(format!("{at}.{norm}.weight"), &[model.hidden]);
    }
    out.add(format!("{at}.eh_proj.weight"), &[model.hidden, 2 * model.hidden]);
    out.add(format!("{at}.embed_tokens.weight"), &[model.vocabulary, model.hidden]);
    out.add(format!("{at}.shared_head.head.weight"), &[model.vocabulary, model.hidden]);
    out.0
}
