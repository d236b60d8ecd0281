//! Sums over rows: the formula, and its fast path.

use super::LANES;
use super::keys::{ColumnKeys, column_key, row_key};
use crate::dtype::DType;
use crate::id::ContentSum;
use wide::{i16x8, i32x4};

/// Words whose keys are computed at once where the table has ended: fits in a few cache lines per lane.
const COMPUTED_WORDS: usize = 256;

/// Rows and columns of one HF tensor in one wire dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Product of all dims but the last.
    pub rows: u64,
    /// Last dim; 1 for a scalar.
    pub columns: u64,
    /// Wire dtype.
    pub dtype: DType,
}

/// The tensor is outside what keys exist for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DigestError {
    /// r < 2^55.
    #[error("shape {shape:?} has 2^55 rows or more")]
    TooManyRows {
        /// HF shape.
        shape: Vec<u64>,
    },
    /// j < 2^48.
    #[error("rows of shape {shape:?} in {dtype} have 2^48 words or more")]
    RowTooLong {
        /// HF shape.
        shape: Vec<u64>,
        /// Wire dtype.
        dtype: DType,
    },
}

impl Geometry {
    /// Of a tensor of this HF shape.
    ///
    /// # Errors
    /// Where keys would repeat: 2^55 rows, or 2^48 words in a row.
    pub fn new(shape: &[u64], dtype: DType) -> Result<Self, DigestError> {
        let (columns, outer) = shape.split_last().map_or((1, &[][..]), |(last, outer)| (*last, outer));
        let rows = outer.iter().try_fold(1_u64, |product, dim| product.checked_mul(*dim));
        let rows = rows
            .filter(|rows| *rows < 1 << 55)
            .ok_or_else(|| DigestError::TooManyRows { shape: shape.to_vec() })?;
        let words = columns.checked_mul(words_of(dtype)).filter(|words| *words < 1 << 48);
        if words.is_none() {
            return Err(DigestError::RowTooLong { shape: shape.to_vec(), dtype });
        }
        Ok(Self { rows, columns, dtype })
    }

    /// Words of a whole row.
    #[must_use]
    pub fn row_words(&self) -> u64 {
        self.columns * words_of(self.dtype)
    }
}

/// 16-bit words of an element; a 1-byte element is one word.
const fn words_of(dtype: DType) -> u64 {
    if dtype.size() == 1 { 1 } else { dtype.size() / 2 }
}

/// Sum over some elements of one tensor, given as parts of rows in any order.
#[derive(Debug, Clone)]
pub struct RowDigest<'k> {
    keys: &'k ColumnKeys,
    bytes: bool,
    words: u64,
    lanes: [u32; LANES],
}

impl<'k> RowDigest<'k> {
    /// Nothing summed yet.
    #[must_use]
    pub fn new(keys: &'k ColumnKeys, dtype: DType) -> Self {
        Self { keys, bytes: dtype.size() == 1, words: words_of(dtype), lanes: [0; LANES] }
    }

    /// Adds the elements from column `column` of row `row` on (indices of the whole HF tensor, inside a
    /// [`Geometry`]), as little-endian bytes in wire dtype; whole elements.
    pub fn row(&mut self, row: u64, column: u64, elements: &[u8]) {
        let mut word = column.wrapping_mul(self.words);
        let words = if self.bytes { elements.len() } else { elements.len() / 2 };
        if let Some(keys) = self.keys.slices(word, words) {
            return self.add(row, self.dot(keys, elements));
        }
        let mut computed = [[0; COMPUTED_WORDS]; LANES];
        for block in elements.chunks(if self.bytes { COMPUTED_WORDS } else { 2 * COMPUTED_WORDS }) {
            let words = if self.bytes { block.len() } else { block.len() / 2 };
            for (lane, keys) in computed.iter_mut().enumerate() {
                for (offset, key) in keys[..words].iter_mut().enumerate() {
                    *key = column_key(lane, word.wrapping_add(offset as u64));
                }
            }
            self.add(row, self.dot(std::array::from_fn(|lane| &computed[lane][..words]), block));
            word = word.wrapping_add(words as u64);
        }
    }

    /// The sum so far.
    #[must_use]
    pub fn sum(&self) -> ContentSum {
        ContentSum::from_lanes(self.lanes)
    }

    #[inline]
    fn dot(&self, keys: [&[i16]; LANES], elements: &[u8]) -> [u32; LANES] {
        if self.bytes { dot_bytes(keys, elements) } else { dot_words(keys, elements) }
    }

    #[inline]
    fn add(&mut self, row: u64, dot: [u32; LANES]) {
        for (lane, dot) in dot.into_iter().enumerate() {
            let part = row_key(lane, row).wrapping_mul(dot);
            self.lanes[lane] = self.lanes[lane].wrapping_add(part);
        }
    }
}

/// Sums of word × key. Keys are odd, so no pair of products leaves i32; sums wrap, as the formula wants.
#[inline]
fn dot_words(keys: [&[i16]; LANES], elements: &[u8]) -> [u32; LANES] {
    let (blocks, rest) = elements.as_chunks::<16>();
    let rest = rest.as_chunks::<2>().0.iter().map(|word| i16::from_le_bytes(*word));
    let load = |block: &[u8; 16]| {
        let words = block.as_chunks::<2>().0;
        i16x8::new(std::array::from_fn(|i| i16::from_le_bytes(words[i])))
    };
    dot_blocks(keys, blocks, load, rest)
}

#[inline]
fn dot_bytes(keys: [&[i16]; LANES], elements: &[u8]) -> [u32; LANES] {
    let (blocks, rest) = elements.as_chunks::<8>();
    let load = |block: &[u8; 8]| i16x8::new(std::array::from_fn(|i| i16::from(block[i])));
    dot_blocks(keys, blocks, load, rest.iter().map(|byte| i16::from(*byte)))
}

#[inline]
fn dot_blocks<const N: usize>(
    keys: [&[i16]; LANES],
    blocks: &[[u8; N]],
    load: impl Fn(&[u8; N]) -> i16x8,
    rest: impl Iterator<Item = i16> + Clone,
) -> [u32; LANES] {
    let [a, b, c, d] = keys.map(|keys| keys.as_chunks::<8>().0);
    let mut sums = [i32x4::ZERO; LANES];
    for ((((block, a), b), c), d) in blocks.iter().zip(a).zip(b).zip(c).zip(d) {
        let words = load(block);
        sums[0] += words.dot(i16x8::new(*a));
        sums[1] += words.dot(i16x8::new(*b));
        sums[2] += words.dot(i16x8::new(*c));
        sums[3] += words.dot(i16x8::new(*d));
    }
    std::array::from_fn(|lane| {
        let vector =
            sums[lane].to_array().into_iter().fold(0_u32, |sum, x| sum.wrapping_add(x.cast_unsigned()));
        let tail = rest.clone().zip(&keys[lane][blocks.len() * 8..]);
        tail.fold(vector, |sum, (word, key)| {
            sum.wrapping_add((i32::from(word) * i32::from(*key)).cast_unsigned())
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn mix(x: u64) -> u64 {
        let z = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// The formula of the decisions page, word by word, in i128.
    fn naive(shape: &[u64], dtype: DType, data: &[u8]) -> ContentSum {
        let columns = shape.last().copied().unwrap_or(1).max(1);
        let words = words_of(dtype);
        ContentSum::from_lanes(std::array::from_fn(|lane| {
            let lane = (lane as u64) << 56;
            let mut sum = 0_i128;
            for (index, element) in data.chunks(dtype.size() as usize).enumerate() {
                let (row, column) = (index as u64 / columns, index as u64 % columns);
                for word in 0..words {
                    let value = match element {
                        [byte] => i128::from(*byte),
                        _ => {
                            let at = word as usize * 2;
                            i128::from(i16::from_le_bytes([element[at], element[at + 1]]))
                        }
                    };
                    let k = ((mix(lane + column * words + word) & 0xffff | 1) as u16).cast_signed();
                    let r = mix(lane + (1 << 48) + row) & 0xffff_ffff | 1;
                    sum += value * i128::from(k) * i128::from(r);
                }
            }
            sum.rem_euclid(1 << 32) as u32
        }))
    }

    fn digest(shape: &[u64], dtype: DType, data: &[u8], table: u64) -> ContentSum {
        let keys = ColumnKeys::new(table);
        let geometry = Geometry::new(shape, dtype).expect("small");
        let mut digest = RowDigest::new(&keys, dtype);
        let row_bytes = (geometry.columns * dtype.size()) as usize;
        for (row, elements) in data.chunks(row_bytes.max(1)).enumerate() {
            digest.row(row as u64, 0, elements);
        }
        digest.sum()
    }

    #[test]
    fn published_vectors_hold() {
        let bytes = |n: u64| (0..n).map(|i| mix(i) as u8).collect::<Vec<u8>>();
        let integers: Vec<u8> = [-1_i64, 1 << 62].iter().flat_map(|x| x.to_le_bytes()).collect();
        let eights: Vec<u8> = [0x00, 0x80].repeat(8000);
        let vectors: [(&[u64], DType, Vec<u8>, &str); 6] = [
            (&[3, 5], DType::Bf16, bytes(30), "7058c713ad2dea9d56f148991f9e89dd"),
            (&[2, 3, 4], DType::F32, bytes(96), "0bfb5acbefa4a0f3a5fd7e734570770f"),
            (&[7], DType::F8E4M3, bytes(7), "46cc891963b7a20b77837b6717165b2f"),
            (&[], DType::U8, vec![255], "9922b1a115f29d1f5b678feb48bfc267"),
            (&[1, 2], DType::I64, integers, "8383dd1475801efe9ef4bf50dfc780ec"),
            (&[8, 1000], DType::Bf16, eights, "3bc00000d856000005ea0000d2400000"),
        ];
        for (shape, dtype, data, expected) in vectors {
            assert_eq!(naive(shape, dtype, &data).to_string(), expected, "naive {dtype} {shape:?}");
            for table in [0, 6, 1000] {
                assert_eq!(digest(shape, dtype, &data, table).to_string(), expected, "{dtype} {shape:?}");
            }
        }
        for table in [0, 70_000, 70_001] {
            let keys = ColumnKeys::new(table);
            let mut one = RowDigest::new(&keys, DType::Bf16);
            one.row((1 << 32) + 1, 70_000, &[0x80, 0x3f]);
            assert_eq!(one.sum().to_string(), "b40c5f8096014680bf6f6980ec0e2f80");
        }
    }

    #[test]
    fn an_empty_tensor_has_digest_zero() {
        assert_eq!(Geometry::new(&[0, 5], DType::F32).expect("empty").rows, 0);
        assert_eq!(digest(&[3, 0], DType::F32, &[], 8), ContentSum::default());
    }

    #[test]
    fn shapes_beyond_the_keys_are_refused() {
        assert!(Geometry::new(&[(1 << 55) - 1, 4], DType::I8).is_ok());
        let rows = Geometry::new(&[1 << 54, 2, 4], DType::I8).expect_err("2^55 rows");
        assert_eq!(rows.to_string(), "shape [18014398509481984, 2, 4] has 2^55 rows or more");
        assert!(Geometry::new(&[u64::MAX, u64::MAX, 1], DType::I8).is_err());
        assert!(Geometry::new(&[1 << 47], DType::F16).is_ok());
        let row = Geometry::new(&[1 << 47], DType::F32).expect_err("2^48 words");
        assert_eq!(row.to_string(), "rows of shape [140737488355328] in f32 have 2^48 words or more");
    }

    proptest! {
        /// D1: any cut of rows into parts, in any order, has the sum of the whole.
        #[test]
        fn any_cut_sums_up(
            rows in 1_u64..5, columns in 1_u64..70, dtype in 0..12_usize, seed: u64, table in 0_u64..300,
            cuts in prop::collection::vec(0_u64..70, 0..4),
        ) {
            let dtype = DType::ALL[dtype];
            let size = dtype.size() as usize;
            let bytes = rows * columns * dtype.size();
            let data: Vec<u8> = (0..bytes).map(|i| mix(seed.wrapping_add(i)) as u8).collect();
            let mut cuts: Vec<u64> = cuts.into_iter().filter(|cut| *cut < columns).chain([0, columns]).collect();
            cuts.sort_unstable();
            let keys = ColumnKeys::new(table);
            let mut parts: Vec<ContentSum> = Vec::new();
            for pair in cuts.windows(2).rev() {
                let mut digest = RowDigest::new(&keys, dtype);
                for row in (0..rows).rev() {
                    let at = |column: u64| (row * columns + column) as usize * size;
                    digest.row(row, pair[0], &data[at(pair[0])..at(pair[1])]);
                }
                parts.push(digest.sum());
            }
            let sum = parts.into_iter().fold(ContentSum::default(), ContentSum::plus);
            prop_assert_eq!(sum, naive(&[rows, columns], dtype, &data));
        }

        /// Odd keys: no change of a single word goes unseen.
        #[test]
        fn every_single_word_change_is_seen(column in 0_u64..64, row: u32, a: u16, b: u16) {
            let keys = ColumnKeys::new(64);
            let lanes = |word: u16| {
                let mut digest = RowDigest::new(&keys, DType::F16);
                digest.row(u64::from(row), column, &word.to_le_bytes());
                digest.sum()
            };
            prop_assert_eq!(lanes(a) == lanes(b), a == b);
        }
    }
}
