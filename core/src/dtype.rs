//! Element types: names, sizes, and the casts that a transfer may imply.

pub mod cast;

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

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The text names no dtype.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown dtype `{0}`")]
pub struct UnknownDType(pub String);

impl std::str::FromStr for DType {
    type Err = UnknownDType;
    /// Accepts the canonical names, those of safetensors (`BF16`, `F8_E4M3`) and torch's (`bfloat16`).
    fn from_str(text: &str) -> Result<Self, UnknownDType> {
        let lower = text.strip_prefix("torch.").unwrap_or(text).to_ascii_lowercase();
        Ok(match lower.as_str() {
            "bool" => Self::Bool,
            "u8" | "uint8" => Self::U8,
            "i8" | "int8" => Self::I8,
            "i16" | "int16" | "short" => Self::I16,
            "i32" | "int32" | "int" => Self::I32,
            "i64" | "int64" | "long" => Self::I64,
            "f16" | "float16" | "half" => Self::F16,
            "bf16" | "bfloat16" => Self::Bf16,
            "f32" | "float32" | "float" => Self::F32,
            "f64" | "float64" | "double" => Self::F64,
            "f8e4m3" | "f8_e4m3" | "float8_e4m3fn" => Self::F8E4M3,
            "f8e5m2" | "f8_e5m2" | "float8_e5m2" => Self::F8E5M2,
            _ => return Err(UnknownDType(text.chars().take(40).collect())),
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
