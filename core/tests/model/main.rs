//! Tests of `core::model` that read files: configs of published models, and headers that tell the truth or lie.

use proptest::prelude::*;
use serde::Deserialize;
use std::path::Path;
use weightrefit_core::dtype::DType;
use weightrefit_core::model::{Family, Header, Index, ModelConfig, TensorTable, read_header, read_list};

fn read(file: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/model").join(file)).unwrap()
}

fn table(model: &str) -> TensorTable {
    ModelConfig::read(&read(&format!("{model}.json"))).unwrap().table().unwrap()
}

#[test]
fn tables_of_published_models_have_the_published_counts() {
    // Model, tensors, parameters without scales, bytes. `lm_head` is counted where it is tied, too.
    let published = [
        ("qwen3-0.6b", 311, 751_632_384, 1_503_264_768),
        ("qwen3-32b", 707, 32_762_123_264, 65_524_246_528),
        ("qwen3-30b-a3b", 18_867, 30_532_122_624, 61_064_245_248),
        ("qwen3-235b-a22b", 36_945, 235_093_634_560, 470_187_269_120),
        ("deepseek-v3", 91_991, 684_489_845_504, 688_574_839_360),
        ("deepseek-v3-bf16", 45_395, 671_026_419_200, 1_342_052_868_096),
        ("qwen2.5-0.5b", 291, 494_032_768 + 151_936 * 896, 2 * (494_032_768 + 151_936 * 896)),
        ("llama-3.1-8b", 291, 8_030_261_248, 16_060_522_496),
    ];
    for (model, tensors, parameters, bytes) in published {
        let table = table(model);
        let weights = table.iter().filter(|(_, tensor)| !tensor.name.ends_with("_scale_inv"));
        let counted: u64 = weights.map(|(_, tensor)| tensor.elements()).sum();
        assert_eq!((table.len(), counted, table.bytes()), (tensors, parameters, bytes), "{model}");
    }
}

#[test]
fn fp8_weights_come_with_a_scale_per_block() {
    let table = table("deepseek-v3");
    let shape = |name: &str| {
        let tensor = &table[table.find(name).unwrap()];
        format!("{} {:?}", tensor.dtype, tensor.shape)
    };
    let layer = "model.layers.61.";
    assert_eq!(shape(&format!("{layer}self_attn.kv_a_proj_with_mqa.weight")), "f8e4m3 [576, 7168]");
    assert_eq!(shape(&format!("{layer}self_attn.kv_a_proj_with_mqa.weight_scale_inv")), "f32 [5, 56]");
    assert_eq!(shape(&format!("{layer}eh_proj.weight")), "bf16 [7168, 14336]");
    assert_eq!(shape("model.layers.3.mlp.gate.e_score_correction_bias"), "f32 [256]");
    assert!(table.find("model.layers.2.mlp.gate.weight").is_none());
}

#[test]
fn a_config_that_does_not_determine_the_tensors_is_refused_by_its_key() {
    let base = read("qwen3-30b-a3b.json");
    let with = |from: &str, to: &str| {
        assert!(base.contains(from), "{from}");
        match ModelConfig::read(&base.replace(from, to)).and_then(|config| config.table()) {
            Ok(table) => format!("{} tensors", table.len()),
            Err(error) => error.to_string(),
        }
    };
    assert_eq!(
        with("\"model_type\": \"qwen3_moe\"", "\"model_type\": \"mamba\""),
        "model_type is `mamba`, known are llama, qwen2, qwen3, qwen3_moe and deepseek_v3"
    );
    assert_eq!(with("\"num_experts\"", "\"experts\""), "the model config has no `num_experts`, or it is 0");
    assert_eq!(
        with("\"hidden_size\": 2048", "\"hidden_size\": 0"),
        "the model config has no `hidden_size`, or it is 0"
    );
    assert_eq!(
        with("\"bfloat16\"", "\"int3\""),
        "the model config has `torch_dtype` int3, which is no dtype"
    );
    assert_eq!(
        with("\"num_hidden_layers\": 48", "\"num_hidden_layers\": 5000"),
        "the model config has `num_hidden_layers` 5000, which is not supported"
    );
    assert_eq!(
        with("\"num_experts\": 128", "\"num_experts\": 16384"),
        "the table has 1048577 tensors, at most 1048576 are read"
    );
    assert_eq!(
        with("\"head_dim\": 128", "\"head_dim\": 18446744073709551615"),
        "the model config's sizes 32 and 18446744073709551615 make an extent beyond 64 bits"
    );
    assert_eq!(
        with(
            "\"vocab_size\": 151936",
            "\"quantization_config\": {\"quant_method\": \"gptq\"}, \"vocab_size\": 5"
        ),
        "the model config has `quantization_config.quant_method` gptq, which is not supported"
    );
    // Layers 1, 3, 5… have experts, of which layer 3 is taken out.
    let sparse = base.replace("\"decoder_sparse_step\": 1", "\"decoder_sparse_step\": 2");
    let config =
        ModelConfig::read(&sparse.replace("\"mlp_only_layers\": []", "\"mlp_only_layers\": [3]")).unwrap();
    let experts = config.experts.unwrap();
    assert_eq!((0..6).filter(|layer| experts.on_layer(*layer)).collect::<Vec<_>>(), [1, 5]);
    assert_eq!(config.family, Family::Qwen3Moe);
}

#[test]
fn what_a_config_lacks_is_asked_for_with_a_line_to_write() {
    let config = |model: &str, from: &str, to: &str| {
        let text = read(&format!("{model}.json"));
        assert!(text.contains(from), "{from}");
        ModelConfig::read(&text.replacen(from, to, 1))
    };
    for (model, key) in [
        ("qwen3-32b", "hidden_size"),
        ("qwen3-32b", "num_hidden_layers"),
        ("qwen3-32b", "vocab_size"),
        ("qwen3-32b", "intermediate_size"),
        ("qwen3-32b", "num_attention_heads"),
        ("qwen3-32b", "num_key_value_heads"),
        ("qwen3-30b-a3b", "num_experts"),
        ("qwen3-30b-a3b", "moe_intermediate_size"),
        ("deepseek-v3", "n_routed_experts"),
        ("deepseek-v3", "q_lora_rank"),
        ("deepseek-v3", "kv_lora_rank"),
        ("deepseek-v3", "qk_nope_head_dim"),
        ("deepseek-v3", "qk_rope_head_dim"),
        ("deepseek-v3", "v_head_dim"),
    ] {
        let error = config(model, &format!("\"{key}\""), "\"other\"").expect_err(key);
        assert_eq!(error.to_string(), format!("the model config has no `{key}`, or it is 0"));
        let hint = error.hint();
        let line = hint.split('`').nth(1).expect(key);
        let number = line.strip_prefix(&format!("\"{key}\": ")).expect(line);
        assert!(number.parse::<u64>().is_ok_and(|number| number > 1), "{line}");
    }
    let error = config("qwen3-32b", "\"torch_dtype\"", "\"other\"").unwrap_err();
    assert_eq!(error.to_string(), "the model config has neither `torch_dtype` nor `dtype`");
    assert!(error.hint().contains("\"torch_dtype\": \"bfloat16\""), "{}", error.hint());
    let error = config("qwen3-32b", "\"bfloat16\"", "\"bfloat\"").unwrap_err();
    assert!(error.hint().contains("\"torch_dtype\": \"bfloat16\""), "{}", error.hint());
    let llama = config("llama-3.1-8b", "\"num_key_value_heads\"", "\"other\"").unwrap();
    assert_eq!(
        llama.assumed,
        ["the model config has no `num_key_value_heads`: 32 are assumed, as many as `num_attention_heads`"]
    );
    assert!(config("llama-3.1-8b", "{", "{").unwrap().assumed.is_empty());
}

#[derive(Deserialize)]
struct HeaderCase {
    name: String,
    header: String,
    data_bytes: u64,
    /// What the length field claims; absent: the truth.
    length: Option<u64>,
    /// What the file's length is; absent: the truth.
    file_bytes: Option<u64>,
    /// How many bytes of the file are given; absent: up to the data.
    cut: Option<usize>,
    want: String,
}

fn show(header: &Header, data: u64) -> String {
    let tensors = header.table.iter().zip(&header.offsets);
    let show = |((_, t), at): ((_, &weightrefit_core::model::TensorMeta), &u64)| {
        format!("{} {} {:?} @{}", t.name, t.dtype, t.shape, at - data)
    };
    tensors.map(show).collect::<Vec<_>>().join(", ")
}

#[test]
fn headers_are_believed_only_as_far_as_the_file_confirms_them() {
    let cases: Vec<HeaderCase> = serde_json::from_str(&read("headers.json")).unwrap();
    let mut differences = String::new();
    for case in cases {
        let length = case.length.unwrap_or(case.header.len() as u64);
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend(case.header.as_bytes());
        let data = bytes.len() as u64;
        bytes.truncate(case.cut.unwrap_or(bytes.len()));
        let got = match read_header(&bytes, case.file_bytes.unwrap_or(data + case.data_bytes)) {
            Ok(header) => show(&header, data),
            Err(error) => error.to_string(),
        };
        if got != case.want {
            differences += &format!("{}\n  want {}\n  got  {got}\n", case.name, case.want);
        }
    }
    assert!(differences.is_empty(), "{differences}");
}

fn file(header: &str, data_bytes: u64) -> Header {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    let file_bytes = bytes.len() as u64 + data_bytes;
    read_header(&bytes, file_bytes).unwrap()
}

#[test]
fn an_index_and_its_files_must_agree() {
    let one = file(
        r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"c":{"dtype":"U8","shape":[1],"data_offsets":[3,4]}}"#,
        4,
    );
    let two = file(r#"{"b":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}"#, 4);
    let join = |map: &str, headers: &[Header]| {
        let index = Index::read(&format!(r#"{{"metadata":{{"total_size":8}},"weight_map":{map}}}"#));
        match index.and_then(|index| index.join(headers)) {
            Ok(checkpoint) => {
                let names = checkpoint.table.iter().zip(&checkpoint.places);
                let show = |((_, t), place): (
                    (_, &weightrefit_core::model::TensorMeta),
                    &weightrefit_core::model::ShardOffset,
                )| {
                    format!("{}@{}+{}", t.name, checkpoint.shards[place.shard], place.offset - 8)
                };
                names.map(show).collect::<Vec<_>>().join(" ")
            }
            Err(error) => error.to_string(),
        }
    };
    let both = [one, two];
    let good = join(r#"{"c":"1.safetensors","b":"2.safetensors","a":"1.safetensors"}"#, &both);
    assert_eq!(good, "c@1.safetensors+108 b@2.safetensors+55 a@1.safetensors+105");
    for (map, want) in [
        (r#"{"a":"1","b":"2"}"#, "`1` holds tensor `c`, which the index does not place there"),
        (r#"{"a":"1","c":"2","b":"2"}"#, "the index places tensor `c` in `2`, which does not hold it"),
        (r#"{"a":"1"}"#, "2 headers are given for 1 files"),
        (r#"{"a":"../1"}"#, r#"the index places tensor `a` in "../1", which is no plain file name"#),
        (r#"{"a":7}"#, "the index places tensor `a` in 7, which is no plain file name"),
        (
            r#"[]"#,
            "the safetensors index cannot be read: invalid type: sequence, expected a map at line 1 column 42",
        ),
    ] {
        assert_eq!(join(map, &both), want, "{map}");
    }
}

#[test]
fn a_list_of_tensors_is_read_in_its_order() {
    let table = read_list(
        r#"{"tensors":[{"name":"b","shape":[2,3],"dtype":"bfloat16"},{"name":"a","shape":[],"dtype":"F8_E4M3"}]}"#,
    );
    let table = table.unwrap();
    let shown: Vec<_> = table.iter().map(|(id, t)| (id.0, t.name.as_str(), t.dtype, t.bytes())).collect();
    assert_eq!(shown, [(0, "b", DType::Bf16, 12), (1, "a", DType::F8E4M3, 1)]);
    assert_eq!(table.find("a").map(|id| id.0), Some(1));
    let error = |json: &str| read_list(json).unwrap_err().to_string();
    assert_eq!(
        error(r#"{"tensors":[{"name":"a","shape":[1],"dtype":"complex"}]}"#),
        "the tensor list cannot be read: unknown dtype `complex`, nearest is `f64` at line 1 column 54"
    );
    assert_eq!(
        error(r#"{"tensors":[{"name":"a","shape":[],"dtype":"u8"},{"name":"a","shape":[],"dtype":"u8"}]}"#),
        "tensor `a` is in the table twice"
    );
}

proptest! {
    #[test]
    fn no_bytes_make_a_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..64), length: u64, file_bytes: u64) {
        let _ = read_header(&bytes, file_bytes);
        let mut framed = length.to_le_bytes().to_vec();
        framed.extend(&bytes);
        let _ = read_header(&framed, file_bytes);
        let text = String::from_utf8_lossy(&bytes);
        let _ = (read_list(&text), Index::read(&text), ModelConfig::read(&text));
    }

    #[test]
    fn a_header_with_one_byte_changed_is_refused_or_still_consistent(at in 0_usize..200, byte: u8) {
        let header = r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"c":{"dtype":"BF16","shape":[1,2],"data_offsets":[3,7]}}"#;
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        let data = bytes.len() as u64;
        let at = at % bytes.len();
        bytes[at] = byte;
        if let Ok(header) = read_header(&bytes, data + 7) {
            prop_assert_eq!(header.table.bytes(), 7);
        }
    }
}
