//! The pairs of shipped documents that plan, with their models' whole tables.

use crate::tables;
use weightrefit_core::layout::{Document, Layout};
use weightrefit_core::model::{TensorMeta, TensorTable};

pub(crate) struct Pair {
    pub(crate) name: &'static str,
    pub(crate) training: Layout,
    pub(crate) inference: Layout,
}

macro_rules! preset {
    ($name:literal) => {
        include_str!(concat!("../../presets/", $name, ".yaml"))
    };
}

fn pair(name: &'static str, training: &str, inference: &str, table: tables::Table) -> Pair {
    let meta = |(name, shape, dtype)| TensorMeta { name, shape, dtype };
    let table = TensorTable::new(table.into_iter().map(meta).collect()).expect("a model's table");
    let layout = |text: &str| {
        // bf16 on both sides: no scales beside the weights.
        let text =
            text.replace("{hf: '(?P<q>weight|weight_scale_inv)', to: '{q}'}", "{hf: weight, to: weight}");
        Layout::new(&Document::parse(&text).expect("a preset"), &table).expect("a preset fits its model")
    };
    Pair { name, training: layout(training), inference: layout(inference) }
}

/// Qwen3-235B-A22B, 64 ranks to 64.
pub(crate) fn qwen3_moe_to_vllm() -> Pair {
    pair(
        "qwen3-235b-a22b/megatron-64-to-vllm-64",
        preset!("megatron-qwen3-moe"),
        preset!("vllm-qwen3-moe"),
        tables::qwen3(&tables::QWEN3_235B_A22B),
    )
}

/// DeepSeek-V3 in bf16 with its MTP layer, 256 ranks to 64.
pub(crate) fn deepseek_v3_to_vllm() -> Pair {
    pair(
        "deepseek-v3/megatron-256-to-vllm-64",
        preset!("megatron-deepseek-v3"),
        preset!("vllm-deepseek-v3"),
        tables::deepseek_v3(),
    )
}

/// The rest of the named pairs.
pub(crate) fn others() -> Vec<Pair> {
    let moe = || tables::qwen3(&tables::QWEN3_235B_A22B);
    let dense = || tables::qwen3(&tables::QWEN3_0_6B);
    vec![
        pair(
            "qwen3-0.6b/megatron-8-to-vllm-2",
            preset!("megatron-qwen-dense"),
            preset!("vllm-qwen-dense"),
            dense(),
        ),
        pair(
            "qwen3-235b-a22b/megatron-64-to-sglang-8",
            preset!("megatron-qwen3-moe"),
            preset!("sglang-qwen3-moe"),
            moe(),
        ),
        pair("qwen3-235b-a22b/fsdp2-16-to-vllm-64", preset!("fsdp2-hf"), preset!("vllm-qwen3-moe"), moe()),
        pair("qwen3-0.6b/fsdp2-16-to-vllm-2", preset!("fsdp2-hf"), preset!("vllm-qwen-dense"), dense()),
    ]
}
