//! Newtypes for the numbers that must not be mistaken for one another.

use serde::{Deserialize, Serialize};
use std::fmt;

/// One model-parallel process of a side: training ranks `0..T`, inference ranks `0..S` inside a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rank(pub u32);

/// Number of a membership of one refit; grows, never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default)]
#[serde(transparent)]
pub struct Epoch(pub u64);

/// Number of a round inside an epoch; grows, never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default)]
#[serde(transparent)]
pub struct RoundId(pub u64);

/// Index of a tensor in the tensor table of the refit (table order).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TensorId(pub u32);

/// Index of a local tensor on one rank (order of its name, bytewise).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LocalId(pub u32);

/// Index of a member in the accepted membership; meaningless without its digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MemberId(pub u32);

macro_rules! show_number {
    ($($name:ident),*) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    )*};
}
show_number!(Rank, Epoch, RoundId, TensorId, LocalId, MemberId);

/// Random 128-bit id that an agent (incarnation) or a client process (instance) draws at its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Incarnation(pub u128);

/// SHA-256 of something both ends must agree on (plan, pair, layout, membership, public key).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sha256(pub [u8; 32]);

/// 128-bit digest of one tensor's content or of a table of them (bytes of lanes 0..3, each little-endian). Its
/// text is `%08x` of each lane, in order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ContentSum(pub [u8; 16]);

impl ContentSum {
    /// The four 32-bit lanes.
    #[must_use]
    pub fn lanes(self) -> [u32; 4] {
        let (lanes, _) = self.0.as_chunks::<4>();
        std::array::from_fn(|lane| u32::from_le_bytes(lanes[lane]))
    }

    /// From four 32-bit lanes.
    #[must_use]
    pub fn from_lanes(lanes: [u32; 4]) -> Self {
        let mut out = [0; 16];
        for (bytes, lane) in out.chunks_exact_mut(4).zip(lanes) {
            bytes.copy_from_slice(&lane.to_le_bytes());
        }
        Self(out)
    }

    /// The digest of two disjoint parts together; order and grouping do not matter.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        let (a, b) = (self.lanes(), other.lanes());
        Self::from_lanes(std::array::from_fn(|lane| a[lane].wrapping_add(b[lane])))
    }
}

impl fmt::Display for ContentSum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lanes().iter().try_for_each(|lane| write!(f, "{lane:08x}"))
    }
}

impl fmt::Debug for ContentSum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Display for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("sha256:")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The text is not an id of this kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not {expected}")]
pub struct IdError {
    text: String,
    expected: &'static str,
}

impl std::str::FromStr for Incarnation {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        let error = || IdError { text: text.chars().take(80).collect(), expected: "32 hexadecimal digits" };
        if text.len() != 32 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(error());
        }
        u128::from_str_radix(text, 16).map(Self).map_err(|_| error())
    }
}

impl std::str::FromStr for ContentSum {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        let Incarnation(number) = text.parse()?;
        let bytes = number.to_be_bytes();
        let (lanes, _) = bytes.as_chunks::<4>();
        Ok(Self::from_lanes(std::array::from_fn(|lane| u32::from_be_bytes(lanes[lane]))))
    }
}

impl std::str::FromStr for Sha256 {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        let error = || IdError {
            text: text.chars().take(80).collect(),
            expected: "`sha256:` and 64 hexadecimal digits",
        };
        let hex = text.strip_prefix("sha256:").ok_or_else(error)?.as_bytes();
        if hex.len() != 64 {
            return Err(error());
        }
        let mut out = [0; 32];
        for (byte, pair) in out.iter_mut().zip(hex.chunks_exact(2)) {
            let digit = |c: u8| (c as char).to_digit(16).ok_or_else(error);
            *byte = (digit(pair[0])? * 16 + digit(pair[1])?) as u8;
        }
        Ok(Self(out))
    }
}

macro_rules! serde_as_text {
    ($($name:ident),*) => {$(
        impl Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    )*};
}
serde_as_text!(Incarnation, Sha256, ContentSum);
