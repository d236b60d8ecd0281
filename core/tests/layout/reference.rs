//! The layouts agree with the executable reference of the vocabulary, whose results are stored in
//! `testdata/layout` by `regenerate.py`.

use crate::listing::listing;
use serde_json::Value;
use sha2::Digest;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use weightrefit_core::id::{Rank, Sha256};
use weightrefit_core::layout::{Document, Layout, preset};
use weightrefit_core::model::{ModelConfig, TensorTable, read_list};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/layout")
}

#[test]
fn every_rank_of_the_small_cases_holds_what_the_reference_says() {
    let mut cases = 0;
    for entry in std::fs::read_dir(folder().join("small")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let mut case: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let document = Document::from_value(&case["document"]).unwrap();
        let tensors = serde_json::json!({"tensors": case["tensors"].take()}).to_string();
        let table = read_list(&tensors).unwrap();
        let layout = Layout::new(&document, &table).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let mut text = String::new();
        for rank in layout.ranks() {
            let regions = layout.rank_regions(rank).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            text += &listing(&table, rank, &regions);
        }
        let want = std::fs::read_to_string(path.with_extension("txt")).unwrap();
        for (line, (got, want)) in text.lines().zip(want.lines()).enumerate() {
            assert_eq!(got, want, "{} line {}", path.display(), line + 1);
        }
        assert_eq!(text.len(), want.len(), "{}", path.display());
        cases += 1;
    }
    assert!(cases >= 14, "{cases} cases");
}

fn model(name: &str) -> TensorTable {
    let path = folder().join(format!("../model/{name}.json"));
    ModelConfig::read(&std::fs::read_to_string(path).unwrap()).unwrap().table().unwrap()
}

/// `vllm-qwen-dense` is the file of the preset `vllm/qwen-dense`.
fn document(file: &str) -> Document {
    Document::parse(preset::text(&file.replacen('-', "/", 1)).unwrap()).unwrap()
}

#[test]
fn sampled_ranks_of_whole_models_hold_what_the_reference_says() {
    let golden = std::fs::read_to_string(folder().join("full.txt")).unwrap();
    let mut layouts = BTreeMap::new();
    for line in golden.lines() {
        let [file, name, rank, want] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let layout = layouts.entry((file, name)).or_insert_with(|| {
            Layout::new(&document(file), &model(name)).unwrap_or_else(|e| panic!("{line}: {e}"))
        });
        let rank = Rank(rank.parse().unwrap());
        let text = listing(layout.table(), rank, &layout.rank_regions(rank).unwrap());
        let digest = Sha256(sha2::Sha256::digest(text).into());
        assert_eq!(digest.to_string(), format!("sha256:{want}"), "{line}");
    }
    assert_eq!(layouts.len(), 9);
    for ((file, name), layout) in layouts {
        layout.check().unwrap_or_else(|error| panic!("{file} on {name}: {error}"));
    }
}

#[test]
fn pads_grains_and_posts_are_told_apart_from_holes() {
    let layout = Layout::new(&document("vllm-deepseek-v3"), &model("deepseek-v3")).unwrap();
    let rank = layout.rank(Rank(13)).unwrap();
    let local = |name: &str| {
        let at = rank.regions.locals.iter().position(|local| local.name == name).unwrap();
        let local = &rank.regions.locals[at];
        format!(
            "{} {:?} {:?} {}",
            local.dtype,
            local.shape,
            rank.post[at].as_deref().unwrap_or("-"),
            rank.pads[at]
        )
    };
    let experts = "model.layers.3.mlp.experts.routed_experts";
    assert_eq!(local(&format!("{experts}.w13_weight")), "f8e4m3 [4, 4096, 7168] \"moe\" 0");
    assert_eq!(local(&format!("{experts}.w13_weight_scale_inv")), "f32 [4, 32, 56] \"moe\" 0");
    assert_eq!(local("model.layers.3.self_attn.kv_b_proj.weight"), "f8e4m3 [4096, 512] \"mla\" 0");
    assert_eq!(local("model.layers.3.mlp.gate.e_score_correction_bias"), "f32 [256] \"-\" 0");
    assert_eq!(local("model.embed_tokens.weight"), "bf16 [16160, 7168] \"-\" 0");

    let layout = Layout::new(&document("megatron-qwen3-moe"), &model("qwen3-235b-a22b")).unwrap();
    let pads = |rank: u32| {
        let rank = layout.rank(Rank(rank)).unwrap();
        let named = rank.regions.locals.iter().zip(&rank.pads).filter(|(_, pads)| **pads > 0);
        named.map(|(local, pads)| format!("{} {pads}", local.name)).collect::<Vec<_>>()
    };
    // 128 rows of padding at the end of the second half of the vocabulary.
    assert_eq!(pads(0), Vec::<String>::new());
    assert_eq!(pads(1), [format!("embedding.word_embeddings.weight {}", 128 * 4096)]);
}

#[test]
fn an_alias_is_carried_by_its_target_or_by_the_first_of_its_kind() {
    let layout = Layout::new(&document("vllm-qwen-dense"), &model("qwen3-0.6b")).unwrap();
    let id = |name: &str| layout.table().find(name).unwrap();
    assert_eq!(layout.alias(id("lm_head.weight")), id("model.embed_tokens.weight"));
    assert_eq!(layout.alias(id("model.norm.weight")), id("model.norm.weight"));
    assert!(layout.holds(id("lm_head.weight")));
    let training = Layout::new(&document("megatron-deepseek-v3"), &model("deepseek-v3")).unwrap();
    let scale = training.table().find("model.layers.0.mlp.up_proj.weight_scale_inv").unwrap();
    assert!(!training.holds(scale));

    let text = "{layout: v1, world: 1, grids: {all: [r]}, stages: {axis: r, layers: [[0, 1]]},
        alias: {a: x, b: x}, rules: [{hf: x, to: local}]}";
    let table = read_list(
        r#"{"tensors":[{"name":"b","shape":[2],"dtype":"u8"},{"name":"a","shape":[2],"dtype":"u8"}]}"#,
    );
    let table = table.unwrap();
    let layout = Layout::new(&Document::parse(text).unwrap(), &table).unwrap();
    let (a, b) = (table.find("a").unwrap(), table.find("b").unwrap());
    assert_eq!((layout.alias(a), layout.alias(b)), (b, b));
    assert_eq!(
        listing(&table, Rank(0), &layout.rank_regions(Rank(0)).unwrap()),
        "rank 0\nlocal local [2]\npiece b > local 0:0+2\n"
    );
    layout.check().unwrap();
}

#[test]
fn the_storage_dtype_is_that_of_the_rule_then_the_document_then_the_table() {
    let table = read_list(
        r#"{"tensors":[{"name":"a","shape":[],"dtype":"f16"},{"name":"b","shape":[],"dtype":"f16"}]}"#,
    );
    let table = table.unwrap();
    let dtypes = |document: &str, rule: &str| {
        let text = format!(
            "{{layout: v1, world: 1, {document} grids: {{all: [r]}}, stages: {{axis: r, layers: [[0, 1]]}},
               rules: [{{hf: a, to: a{rule}}}, {{hf: b, to: b}}]}}"
        );
        let layout = Layout::new(&Document::parse(&text).unwrap(), &table).unwrap();
        let locals = layout.rank_regions(Rank(0)).unwrap().locals;
        locals.iter().map(|local| local.dtype.name()).collect::<Vec<_>>()
    };
    assert_eq!(dtypes("", ""), ["f16", "f16"]);
    assert_eq!(dtypes("dtype: float32,", ""), ["f32", "f32"]);
    assert_eq!(dtypes("dtype: BF16,", ", dtype: f32"), ["f32", "bf16"]);
}

#[test]
fn the_canonical_form_is_a_document_that_means_the_same() {
    for (file, name) in [
        ("megatron-qwen-dense", "qwen3-0.6b"),
        ("vllm-qwen-dense", "qwen3-0.6b"),
        ("megatron-qwen3-moe", "qwen3-30b-a3b"),
        ("vllm-qwen3-moe", "qwen3-30b-a3b"),
        ("sglang-qwen3-moe", "qwen3-30b-a3b"),
        ("fsdp2-hf", "qwen3-30b-a3b"),
        ("megatron-deepseek-v3", "deepseek-v3"),
        ("vllm-deepseek-v3", "deepseek-v3"),
    ] {
        let table = model(name);
        let mut first = document(file);
        // 235B numbers in the file; the head counts only change what the stripes are.
        if let Some(heads) = first.vars.get_mut("nq").filter(|_| name == "qwen3-30b-a3b") {
            *heads = 32;
        }
        let first = Layout::new(&first, &table).unwrap();
        let second = Layout::new(&Document::parse(&first.canonical()).unwrap(), &table).unwrap();
        assert_eq!(second.canonical(), first.canonical(), "{file}");
        assert_eq!(second.digest(), first.digest(), "{file}");
        for rank in [0, 1, first.world() - 1].map(Rank) {
            assert_eq!(second.rank(rank), first.rank(rank), "{file} rank {rank}");
        }
    }
}

#[test]
fn the_canonical_form_does_not_change_between_versions() {
    let layout = Layout::new(&document("vllm-qwen-dense"), &model("qwen3-0.6b")).unwrap();
    let path = folder().join("canonical/vllm-qwen-dense.json");
    if std::env::var_os("REWRITE").is_some() {
        std::fs::write(&path, layout.canonical()).unwrap();
    }
    assert_eq!(layout.canonical(), std::fs::read_to_string(path).unwrap());
    assert_eq!(layout.digest(), Sha256(sha2::Sha256::digest(layout.canonical()).into()));
}
