//! Element types: names, sizes, and the casts that a transfer may imply.

pub mod cast;

use crate::nearest::nearest;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Storage type of a tensor's elements. Written in lower case everywhere (`bf16`, `f8e4m3`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DType {
    /// One byte, 0 or 1.
    Bool,
    /// Unsigned, one byte.
    U8,
    /// Signed, one byte.
    I8,
    /// Signed, two bytes.
    I16,
    /// Signed, four bytes.
    I32,
    /// Signed, eight bytes.
    I64,
    /// IEEE 754 half.
    F16,
    /// bfloat16.
    Bf16,
    /// IEEE 754 single.
    F32,
    /// IEEE 754 double.
    F64,
    /// 8-bit float, 4 exponent bits (`float8_e4m3fn`).
    F8E4M3,
    /// 8-bit float, 5 exponent bits.
    F8E5M2,
}

impl DType {
    /// All dtypes, in the order of their declaration.
    pub const ALL: [Self; 12] = [
        Self::Bool,
        Self::U8,
        Self::I8,
        Self::I16,
        Self::I32,
        Self::I64,
        Self::F16,
        Self::Bf16,
        Self::F32,
        Self::F64,
        Self::F8E4M3,
        Self::F8E5M2,
    ];

    /// Canonical name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bool => "bool",
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::I16 => "i16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::F8E4M3 => "f8e4m3",
            Self::F8E5M2 => "f8e5m2",
        }
    }

    /// The name that torch and `config.json` have for it.
    #[must_use]
    pub const fn torch_name(self) -> &'static str {
        match self {
            Self::Bool => "bool",
            Self::U8 => "uint8",
            Self::I8 => "int8",
            Self::I16 => "int16",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
            Self::F32 => "float32",
            Self::F64 => "float64",
            Self::F8E4M3 => "float8_e4m3fn",
            Self::F8E5M2 => "float8_e5m2",
        }
    }

    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> u64 {
        match self {
            Self::Bool | Self::U8 | Self::I8 | Self::F8E4M3 | Self::F8E5M2 => 1,
            Self::I16 | Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::F32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }
}

/// Spellings beside the canonical name and torch's, in lower case.
const SPELLINGS: [(&str, DType); 8] = [
    ("short", DType::I16),
    ("int", DType::I32),
    ("long", DType::I64),
    ("half", DType::F16),
    ("float", DType::F32),
    ("double", DType::F64),
    ("f8_e4m3", DType::F8E4M3),
    ("f8_e5m2", DType::F8E5M2),
];

/// Spelling and dtype of all that is read.
fn spellings() -> impl Iterator<Item = (&'static str, DType)> {
    let names = |dtype: DType| [(dtype.name(), dtype), (dtype.torch_name(), dtype)];
    DType::ALL.into_iter().flat_map(names).chain(SPELLINGS)
}

/// Without torch's prefix, in lower case.
fn plain(text: &str) -> String {
    text.strip_prefix("torch.").unwrap_or(text).to_ascii_lowercase()
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The text names no dtype.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown dtype `{found}`, nearest is `{}`", nearest.name())]
pub struct UnknownDType {
    /// The text, shortened.
    pub found: String,
    /// The dtype with the nearest spelling.
    pub nearest: DType,
}

impl std::str::FromStr for DType {
    type Err = UnknownDType;
    /// Accepts the canonical names, those of safetensors (`BF16`, `F8_E4M3`) and torch's (`bfloat16`).
    fn from_str(text: &str) -> Result<Self, UnknownDType> {
        let plain = plain(text);
        if let Some((_, dtype)) = spellings().find(|(spelling, _)| *spelling == plain) {
            return Ok(dtype);
        }
        let near = nearest(&plain, spellings().map(|(spelling, _)| spelling));
        let nearest = spellings().find(|(spelling, _)| Some(*spelling) == near);
        Err(UnknownDType {
            found: text.chars().take(40).collect(),
            nearest: nearest.map_or(Self::Bf16, |(_, dtype)| dtype),
        })
    }
}

impl Serialize for DType {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for DType {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// What happens to an element on its way from a source dtype to the wire dtype (the destination's).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cast {
    /// Bits are copied.
    None,
    /// f32 to bf16, nearest even.
    F32ToBf16,
    /// f32 to f16, nearest even.
    F32ToF16,
    /// f16 to f32, exact.
    F16ToF32,
    /// bf16 to f32, exact.
    Bf16ToF32,
}

impl Cast {
    /// The cast that a move from `source` to `wire` implies; `None` (the option) where the pair is refused.
    #[must_use]
    pub const fn between(source: DType, wire: DType) -> Option<Self> {
        match (source, wire) {
            (DType::F32, DType::Bf16) => Some(Self::F32ToBf16),
            (DType::F32, DType::F16) => Some(Self::F32ToF16),
            (DType::F16, DType::F32) => Some(Self::F16ToF32),
            (DType::Bf16, DType::F32) => Some(Self::Bf16ToF32),
            (a, b) if a as u8 == b as u8 => Some(Self::None),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{DType, spellings};

    #[test]
    fn every_spelling_is_read_and_names_one_dtype() {
        for (spelling, dtype) in spellings() {
            for text in [spelling.to_owned(), spelling.to_uppercase(), format!("torch.{spelling}")] {
                assert_eq!(text.parse(), Ok(dtype), "{text}");
            }
        }
    }

    #[test]
    fn what_is_no_dtype_is_near_one() {
        for (text, want) in [("bfloat", DType::Bf16), ("fp16", DType::F16), ("f33", DType::F32)] {
            assert_eq!(text.parse::<DType>().expect_err(text).nearest, want, "{text}");
        }
    }
}
