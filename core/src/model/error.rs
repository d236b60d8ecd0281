//! Why a tensor table cannot be read.

use crate::code::Code;
use crate::limits::{HEADER_BYTES_MAX, HF_DIMS_MAX, TENSOR_NAME_BYTES_MAX, TENSORS_MAX};

/// Why a tensor table cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// Not the JSON that was expected.
    #[error("the {what} cannot be read: {reason}")]
    Json {
        /// Which text.
        what: &'static str,
        /// The parser's words, with line and column.
        reason: String,
    },
    /// More than `TENSORS_MAX` tensors.
    #[error("the table has {found} tensors, at most {TENSORS_MAX} are read")]
    TooMany {
        /// Their number.
        found: usize,
    },
    /// An empty or endless name.
    #[error("the tensor name `{start}` has {found} bytes, 1 to {TENSOR_NAME_BYTES_MAX} are allowed")]
    Name {
        /// Its first characters.
        start: String,
        /// Its length.
        found: usize,
    },
    /// Two tensors of one name.
    #[error("tensor `{name}` is in the table twice")]
    Duplicate {
        /// The name.
        name: String,
    },
    /// More than `HF_DIMS_MAX` dims.
    #[error("tensor `{name}` has {found} dims, at most {HF_DIMS_MAX} are supported")]
    Dims {
        /// The tensor.
        name: String,
        /// Its number of dims.
        found: usize,
    },
    /// More bytes than `i64` counts.
    #[error("tensor `{name}` of shape {shape:?} has more bytes than 63 bits count")]
    Size {
        /// The tensor.
        name: String,
        /// Its extents.
        shape: Vec<u64>,
    },
    /// The file ends before what it claims to hold.
    #[error("the file has {file_bytes} bytes, its header needs {needed}")]
    FileTooShort {
        /// Its length.
        file_bytes: u64,
        /// Length field and header.
        needed: u64,
    },
    /// A header beyond the format's limit.
    #[error("the header claims {found} bytes, at most {HEADER_BYTES_MAX} are read")]
    HeaderTooLong {
        /// What the length field says.
        found: u64,
    },
    /// The caller gave fewer bytes than the header has.
    #[error("{found} bytes of the file are given, its header needs {needed}")]
    StartTooShort {
        /// Bytes given.
        found: usize,
        /// Length field and header.
        needed: u64,
    },
    /// No dtype that can be moved.
    #[error("tensor `{name}` has the unsupported dtype `{found}`")]
    Dtype {
        /// The tensor.
        name: String,
        /// Its dtype.
        found: String,
    },
    /// Offsets that do not span the tensor's bytes.
    #[error("tensor `{name}` has {bytes} bytes, its offsets are {begin} to {end}")]
    Offsets {
        /// The tensor.
        name: String,
        /// First byte.
        begin: u64,
        /// End.
        end: u64,
        /// Bytes of its shape and dtype.
        bytes: u64,
    },
    /// Offsets beyond the data.
    #[error("tensor `{name}` ends at byte {end} of the data, which has {data_bytes}")]
    Outside {
        /// The tensor.
        name: String,
        /// End.
        end: u64,
        /// Bytes after the header.
        data_bytes: u64,
    },
    /// Two tensors share bytes.
    #[error("tensors `{first}` and `{second}` overlap in the file")]
    Overlap {
        /// The one that begins first.
        first: String,
        /// The other.
        second: String,
    },
    /// Bytes that no tensor has.
    #[error("no tensor has the bytes {begin} to {end} of the data")]
    Hole {
        /// First byte.
        begin: u64,
        /// End.
        end: u64,
    },
    /// A file name with a path.
    #[error("the index places tensor `{tensor}` in {file}, which is no plain file name")]
    ShardName {
        /// The tensor.
        tensor: String,
        /// What stands for a name.
        file: String,
    },
    /// Not one header per file.
    #[error("{found} headers are given for {expected} files")]
    ShardCount {
        /// Headers.
        found: usize,
        /// Files.
        expected: usize,
    },
    /// The index places a tensor in a file that does not hold it.
    #[error("the index places tensor `{name}` in `{file}`, which does not hold it")]
    NotInShard {
        /// The tensor.
        name: String,
        /// The file.
        file: String,
    },
    /// A file holds a tensor that the index places elsewhere or nowhere.
    #[error("`{file}` holds tensor `{name}`, which the index does not place there")]
    NotInIndex {
        /// The tensor.
        name: String,
        /// The file.
        file: String,
    },
    /// A family whose tensors do not follow from its config.
    #[error("model_type is `{found}`, known are llama, qwen2, qwen3, qwen3_moe and deepseek_v3")]
    Family {
        /// What the config says.
        found: String,
    },
    /// A key that the family needs is missing or 0.
    #[error("the model config has no `{key}`, or it is 0")]
    ConfigKey {
        /// The key.
        key: &'static str,
    },
    /// No dtype.
    #[error("the model config has neither `torch_dtype` nor `dtype`")]
    ConfigNoDtype,
    /// A dtype that does not exist.
    #[error("the model config has `torch_dtype` {found}, which is no dtype")]
    ConfigDtype {
        /// Its value, shortened.
        found: String,
        /// The dtype with the nearest spelling, as torch writes it.
        nearest: &'static str,
    },
    /// A value that is not supported.
    #[error("the model config has `{key}` {found}, which is not supported")]
    ConfigValue {
        /// The key.
        key: &'static str,
        /// Its value.
        found: String,
    },
    /// Sizes that multiply beyond 64 bits.
    #[error("the model config's sizes {a} and {b} make an extent beyond 64 bits")]
    ConfigProduct {
        /// One.
        a: u64,
        /// The other.
        b: u64,
    },
}

impl TableError {
    pub(super) fn json(what: &'static str, error: &serde_json::Error) -> Self {
        Self::Json { what, reason: error.to_string() }
    }

    /// What a person can do about it.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            Self::Json { what: "tensor list", .. } => {
                "Fetch the file again, or correct it; a tensor has these keys: {\"name\": \"q\", \"shape\": [8, 4], \"dtype\": \"bf16\"}.".into()
            }
            Self::Family { .. } => {
                "For another family give the tensors as a list (type TensorTable, or `--tensors`).".into()
            }
            Self::ConfigKey { key } => {
                let (sample, remark) = config_sample(key);
                format!(
                    "Add it as the published config.json of the model has it, for example `\"{key}\": {sample}`{remark}."
                )
            }
            Self::ConfigNoDtype => {
                "Add the dtype of the checkpoint, for example `\"torch_dtype\": \"bfloat16\"`.".into()
            }
            Self::ConfigDtype { nearest, .. } => format!("Did you mean `\"torch_dtype\": \"{nearest}\"`?"),
            Self::ConfigValue { key: "quantization_config.quant_method", .. } => {
                "Only DeepSeek-V3's `fp8` with a block size is known: give the tensors as a list (type TensorTable)."
                    .into()
            }
            Self::ConfigValue { .. } | Self::ConfigProduct { .. } => {
                "Correct that number in config.json.".into()
            }
            Self::Name { .. } | Self::Duplicate { .. } | Self::Dims { .. } | Self::Size { .. } | Self::TooMany { .. } => {
                "Correct the list of tensors: name, shape and dtype of each, once.".into()
            }
            _ => "Fetch the file again, or correct it at the place that the message names.".into(),
        }
    }

    /// The stable code.
    #[must_use]
    pub const fn code(&self) -> Code {
        Code::LayoutRejected
    }
}

/// What a key of `config.json` looks like, and what else is worth knowing.
fn config_sample(key: &str) -> (&'static str, &'static str) {
    match key {
        "num_key_value_heads" => {
            ("8", "; it is assumed only for Llama, where it then is as large as `num_attention_heads`")
        }
        "hidden_size" => ("4096", ""),
        "num_hidden_layers" => ("32", ""),
        "vocab_size" => ("151936", ""),
        "intermediate_size" => ("12288", ""),
        "num_attention_heads" => ("32", ""),
        "moe_intermediate_size" => ("768", ", the width of one expert"),
        "num_experts" | "n_routed_experts" => ("128", ""),
        "head_dim" | "qk_nope_head_dim" | "v_head_dim" => ("128", ""),
        "qk_rope_head_dim" => ("64", ""),
        "q_lora_rank" => ("1536", ""),
        "kv_lora_rank" => ("512", ""),
        _ => ("1", ""),
    }
}
