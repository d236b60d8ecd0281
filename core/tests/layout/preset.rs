//! Presets: which sizes, stages and aliases they get, and what they refuse.

use std::collections::BTreeMap;
use std::path::Path;
use weightrefit_core::layout::{Layout, LayoutError, preset};
use weightrefit_core::model::ModelConfig;

fn config(name: &str) -> ModelConfig {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("testdata/model/{name}.json"));
    ModelConfig::read(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// `tp=2 pp=2` as sizes.
fn sizes(text: &str) -> BTreeMap<String, u64> {
    let size = |word: &str| {
        let (axis, size) = word.split_once('=').unwrap();
        (axis.to_owned(), size.parse().unwrap())
    };
    text.split_whitespace().map(size).collect()
}

#[test]
fn every_preset_fits_a_model_of_its_family_on_all_ranks() {
    for (name, world, given, model) in [
        ("megatron/qwen3-moe", 32, "tp=2 pp=2 ep=8", "qwen3-30b-a3b"),
        ("megatron/qwen3-moe", 16, "tp=4 ep=8 etp=2", "qwen3-30b-a3b"),
        ("megatron/qwen-dense", 8, "tp=2 pp=2", "qwen3-0.6b"),
        ("megatron/qwen-dense", 16, "tp=4 pp=4", "qwen3-32b"),
        ("megatron/qwen-dense", 2, "tp=2", "qwen2.5-0.5b"),
        ("megatron/qwen-dense", 8, "tp=8", "llama-3.1-8b"),
        ("megatron/deepseek-v3", 32, "tp=8 ep=32", "deepseek-v3"),
        ("vllm/qwen3-moe", 8, "tp=4", "qwen3-30b-a3b"),
        ("vllm/qwen-dense", 4, "tp=2", "qwen3-0.6b"),
        ("vllm/qwen-dense", 4, "tp=2 pp=2", "qwen2.5-0.5b"),
        ("vllm/qwen-dense", 8, "tp=8", "qwen3-32b"),
        ("vllm/deepseek-v3", 16, "tp=8 dp=2", "deepseek-v3"),
        ("sglang/qwen3-moe", 8, "attn_tp=4 attn_dp=2 moe_tp=2 moe_ep=4", "qwen3-30b-a3b"),
        ("fsdp2/hf", 16, "dp_shard=8", "qwen3-30b-a3b"),
        ("fsdp2/hf", 12, "dp_shard=12", "qwen3-0.6b"),
    ] {
        let model_config = config(model);
        let document = preset::resolve(name, 1, &sizes(given), world, Some(&model_config));
        let document = document.unwrap_or_else(|error| panic!("{name} {model}: {error}"));
        let layout = Layout::new(&document, &model_config.table().unwrap());
        let layout = layout.unwrap_or_else(|error| panic!("{name} {model}: {error}"));
        layout.check().unwrap_or_else(|error| panic!("{name} {model}: {error}"));
        assert_eq!(u64::from(layout.world()), world);
    }
}

#[test]
fn the_embedding_is_shared_exactly_where_the_model_ties_it() {
    let shared = |name: &str, model: &str| {
        let model = config(model);
        let document = preset::resolve(name, 1, &BTreeMap::new(), 1, Some(&model)).unwrap();
        let layout = Layout::new(&document, &model.table().unwrap()).unwrap();
        let head = layout.table().find("lm_head.weight").unwrap();
        layout.alias(head) != head
    };
    for name in ["megatron/qwen-dense", "vllm/qwen-dense", "fsdp2/hf"] {
        assert!(shared(name, "qwen3-0.6b"), "{name}");
        assert!(!shared(name, "qwen3-32b"), "{name}");
    }
    // A vLLM engine with stages needs the tied embedding on the last one too, an untied one only its own head.
    let held = |model: &str| {
        let model = config(model);
        let document = preset::resolve("vllm/qwen-dense", 1, &sizes("pp=2"), 2, Some(&model)).unwrap();
        let layout = Layout::new(&document, &model.table().unwrap()).unwrap();
        let names = |rank| layout.rank_regions(weightrefit_core::id::Rank(rank)).unwrap().locals;
        let ends = |rank| {
            names(rank).into_iter().map(|l| l.name).filter(|n| !n.contains("layers")).collect::<Vec<_>>()
        };
        [ends(0), ends(1)]
    };
    let (embed, head, norm) = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight");
    assert_eq!(held("qwen3-0.6b"), [vec![embed], vec![embed, norm]]);
    assert_eq!(held("qwen3-32b"), [vec![embed], vec![head, norm]]);
}

#[test]
fn what_does_not_follow_is_refused_with_a_remedy() {
    let refuse = |name: &str, revision, given: &str, world, model: Option<&str>| -> LayoutError {
        let model = model.map(config);
        preset::resolve(name, revision, &sizes(given), world, model.as_ref()).unwrap_err()
    };
    for (name, revision, given, model, want) in [
        ("vlm/qwen3-moe", 1, "", None, "there is no preset `vlm/qwen3-moe`, nearest is `vllm/qwen3-moe`"),
        ("fsdp2/hf", 2, "", None, "preset `fsdp2/hf` has no revision 2, the newest is 1"),
        (
            "fsdp2/hf",
            1,
            "dp_shrad=2",
            None,
            "preset `fsdp2/hf` has no axis `dp_shrad`, nearest is `dp_shard`",
        ),
        (
            "vllm/qwen-dense",
            1,
            "",
            None,
            "preset `vllm/qwen-dense` needs the model's config, which is not given",
        ),
        (
            "vllm/qwen3-moe",
            1,
            "",
            Some("qwen3-0.6b"),
            "preset `vllm/qwen3-moe` needs `E`, which the model's config does not have",
        ),
        (
            "megatron/deepseek-v3",
            1,
            "pp=8",
            Some("deepseek-v3"),
            "preset `megatron/deepseek-v3` splits layers evenly, but 61 layers do not divide into 8 stages of `pp`",
        ),
        (
            "vllm/deepseek-v3",
            1,
            "",
            Some("qwen3-30b-a3b"),
            "preset `vllm/deepseek-v3` is written for 61 layers, 3 of them dense; the model has 48, 0 dense",
        ),
    ] {
        assert_eq!(refuse(name, revision, given, 8, model).to_string(), want);
    }
    let uneven = refuse("megatron/deepseek-v3", 1, "pp=8", 8, Some("deepseek-v3"));
    assert_eq!(uneven.fitting_sizes(), Some(("pp", vec![1, 61])));
    let mut tied = config("qwen3-30b-a3b");
    tied.tied = true;
    let error = preset::resolve("vllm/qwen3-moe", 1, &BTreeMap::new(), 1, Some(&tied)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "preset `vllm/qwen3-moe` is written for models without tied embeddings, this one ties them"
    );
}

#[test]
fn fsdp_needs_no_model_config() {
    let document = preset::resolve("fsdp2/hf", 1, &sizes("dp_shard=4"), 8, None).unwrap();
    let table = config("qwen3-30b-a3b").table().unwrap();
    let layout = Layout::new(&document, &table).unwrap();
    assert_eq!(layout.world(), 8);
    layout.rank_regions(weightrefit_core::id::Rank(7)).unwrap();
}
