//! Keys of columns and rows, drawn from splitmix64 so that every implementation has the same ones.

use super::LANES;

/// Words of the key table at most: 2 MiB of keys. Wider rows exist only as flattened 1-D tensors; their further
/// keys are computed, which is slower and right.
pub const TABLE_WORDS_MAX: u64 = 1 << 18;

/// splitmix64.
const fn mix(x: u64) -> u64 {
    let z = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

/// Key of word `word` of a row (column × words per element + word of the element) in `lane`; odd.
#[inline]
#[must_use]
pub(super) fn column_key(lane: usize, word: u64) -> i16 {
    (mix(((lane as u64) << 56).wrapping_add(word)) | 1) as i16
}

/// Key of row `row` in `lane`; odd.
#[inline]
#[must_use]
pub(super) fn row_key(lane: usize, row: u64) -> u32 {
    (mix(((lane as u64) << 56).wrapping_add(1 << 48).wrapping_add(row)) | 1) as u32
}

/// Keys of the first `rows` rows, the lanes of a row side by side: for a device, which is slower at computing them than
/// at reading them.
#[must_use]
pub fn row_keys(rows: u64) -> Vec<u32> {
    (0..rows).flat_map(|row| (0..LANES).map(move |lane| row_key(lane, row))).collect()
}

/// The first column keys of all lanes, shared by all tensors and threads.
#[derive(Debug)]
pub struct ColumnKeys {
    lanes: [Vec<i16>; LANES],
}

impl ColumnKeys {
    /// Keys for rows of up to `words` words; more than [`TABLE_WORDS_MAX`] are not kept.
    #[must_use]
    pub fn new(words: u64) -> Self {
        let words = words.min(TABLE_WORDS_MAX);
        Self { lanes: std::array::from_fn(|lane| (0..words).map(|word| column_key(lane, word)).collect()) }
    }

    /// Keys of words `start..start + words` per lane; `None` when the table ends before that.
    #[inline]
    pub(super) fn slices(&self, start: u64, words: usize) -> Option<[&[i16]; LANES]> {
        let start = usize::try_from(start).ok()?;
        let end = start.checked_add(words)?;
        let [a, b, c, d] = &self.lanes;
        Some([a.get(start..end)?, b.get(start..end)?, c.get(start..end)?, d.get(start..end)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mix_is_splitmix64() {
        assert_eq!(mix(0), 0xe220_a839_7b1d_cdaf);
    }

    #[test]
    fn the_table_is_bounded_and_holds_the_keys() {
        let keys = ColumnKeys::new(u64::MAX);
        let last = keys.slices(TABLE_WORDS_MAX - 1, 1).expect("in the table");
        assert_eq!(last[3], [column_key(3, TABLE_WORDS_MAX - 1)]);
        assert!(keys.slices(TABLE_WORDS_MAX, 1).is_none());
        assert!(keys.slices(u64::MAX, 1).is_none());
    }
}
