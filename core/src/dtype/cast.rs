//! The casts that a transfer may imply, on bits and on little-endian slices: nearest even, overflow becomes
//! infinity, subnormals are kept, and every NaN becomes the one quiet NaN of its dtype, so that all devices
//! and vendors deliver the same bits.
//!
//! The scalar functions have no branch on purpose: each computes its cases and selects, which the compiler
//! turns into vector code.

use super::Cast;

const BF16_NAN: u32 = 0x7fc0_0000;
const F16_NAN: u32 = 0x7e00;
const F32_NAN: u32 = 0x7fc0_0000;
const F32_INFINITY: u32 = 0x7f80_0000;

/// f32 bits to bf16 bits.
#[inline]
#[must_use]
pub fn f32_to_bf16(bits: u32) -> u16 {
    // Half of the last kept place, less one where that place is even: a tie then stays, anything above carries.
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    let wide = if bits & 0x7fff_ffff > F32_INFINITY { BF16_NAN } else { rounded };
    // The arithmetic shift lets the compiler pack with signed saturation, the only one that SSE2 has.
    (wide.cast_signed() >> 16) as u16
}

/// f32 bits to f16 bits.
#[inline]
#[must_use]
pub fn f32_to_f16(bits: u32) -> u16 {
    const OVERFLOW: u32 = (127 + 16) << 23;
    const NORMAL: u32 = (127 - 14) << 23;
    // Adding this power of two aligns a small value so that the hardware rounds at f16's last subnormal place.
    const ALIGN: u32 = ((127 - 15) + (23 - 10) + 1) << 23;
    let magnitude = bits & 0x7fff_ffff;
    let sign = (bits >> 16) & 0x8000;
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(ALIGN)).to_bits().wrapping_sub(ALIGN);
    let odd = magnitude >> 13 & 1;
    let normal = magnitude.wrapping_sub((127 - 15) << 23).wrapping_add(0xfff + odd) >> 13;
    let finite = if magnitude < NORMAL { subnormal } else { normal };
    let number = sign | if magnitude >= OVERFLOW { 0x7c00 } else { finite };
    (if magnitude > F32_INFINITY { F16_NAN } else { number }) as u16
}

/// f16 bits to f32 bits.
#[inline]
#[must_use]
pub fn f16_to_f32(bits: u16) -> u32 {
    const REBIAS: u32 = (127 - 15) << 23;
    const SMALLEST_NORMAL: u32 = (127 - 14) << 23;
    let magnitude = u32::from(bits & 0x7fff) << 13;
    let sign = u32::from(bits & 0x8000) << 16;
    // A subnormal is read as if it had the implied leading bit, which is then taken off exactly.
    let subnormal = (f32::from_bits(magnitude + SMALLEST_NORMAL) - f32::from_bits(SMALLEST_NORMAL)).to_bits();
    let finite = if bits & 0x7c00 == 0 { subnormal } else { magnitude + REBIAS };
    let number = if bits & 0x7fff == 0x7c00 { F32_INFINITY } else { finite };
    if bits & 0x7fff > 0x7c00 { F32_NAN } else { sign | number }
}

/// bf16 bits to f32 bits.
#[inline]
#[must_use]
pub fn bf16_to_f32(bits: u16) -> u32 {
    if bits & 0x7fff > 0x7f80 { F32_NAN } else { u32::from(bits) << 16 }
}

impl Cast {
    /// Bytes of one element before the cast, for the casts that change it; `None` copies bits of any size.
    #[must_use]
    pub const fn sizes(self) -> Option<(u64, u64)> {
        match self {
            Self::None => None,
            Self::F32ToBf16 | Self::F32ToF16 => Some((4, 2)),
            Self::F16ToF32 | Self::Bf16ToF32 => Some((2, 4)),
        }
    }

    /// Casts the little-endian elements of `input` to `output`.
    ///
    /// # Panics
    /// Where the two do not hold the same number of whole elements.
    pub fn apply(self, input: &[u8], output: &mut [u8]) {
        match self {
            Self::None => output.copy_from_slice(input),
            Self::F32ToBf16 => narrow(input, output, f32_to_bf16),
            Self::F32ToF16 => narrow(input, output, f32_to_f16),
            Self::F16ToF32 => widen(input, output, f16_to_f32),
            Self::Bf16ToF32 => widen(input, output, bf16_to_f32),
        }
    }
}

#[inline]
fn narrow(input: &[u8], output: &mut [u8], cast: impl Fn(u32) -> u16) {
    let (from, to) = (input.as_chunks::<4>(), output.as_chunks_mut::<2>());
    assert!(from.1.is_empty() && to.1.is_empty() && from.0.len() == to.0.len(), "cast lengths differ");
    for (to, from) in to.0.iter_mut().zip(from.0) {
        *to = cast(u32::from_le_bytes(*from)).to_le_bytes();
    }
}

#[inline]
fn widen(input: &[u8], output: &mut [u8], cast: impl Fn(u16) -> u32) {
    let (from, to) = (input.as_chunks::<2>(), output.as_chunks_mut::<4>());
    assert!(from.1.is_empty() && to.1.is_empty() && from.0.len() == to.0.len(), "cast lengths differ");
    for (to, from) in to.0.iter_mut().zip(from.0) {
        *to = cast(u16::from_le_bytes(*from)).to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nearest even among all finite values of a 16-bit dtype, by search in f64, where both are exact. `top` is
    /// the first value that is out of range: half of the way to it and more is infinity.
    fn nearest(bits: u32, values: &[(f64, u16)], top: f64, infinity: u16) -> u16 {
        let x = f64::from(f32::from_bits(bits));
        let sign = if bits >> 31 == 1 { 0x8000 } else { 0 };
        let x = x.abs();
        let above = values.partition_point(|(value, _)| *value < x);
        let (low, high) = (values[above.max(1) - 1], values.get(above).copied().unwrap_or((top, infinity)));
        let to_low = (x - low.0).abs();
        let to_high = (high.0 - x).abs();
        let low_is_even = low.1 & 1 == 0;
        sign | if to_low < to_high || (to_low == to_high && low_is_even) { low.1 } else { high.1 }
    }

    fn f16_value(bits: u16) -> f64 {
        let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
        if exponent == 0 {
            fraction * 2f64.powi(-24)
        } else {
            (1.0 + fraction / 1024.0) * 2f64.powi(exponent - 15)
        }
    }

    fn bf16_value(bits: u16) -> f64 {
        f64::from(f32::from_bits(u32::from(bits) << 16))
    }

    /// All f32 whose low bits are interesting (ties, and just off them), for each of the 2^17 upper halves.
    fn interesting() -> impl Iterator<Item = u32> {
        let low = [0u32, 1, 0x0fff, 0x1000, 0x1001, 0x1fff, 0x2fff, 0x3000, 0x3001, 0x7fff];
        (0..=0x1ffff_u32).flat_map(move |high| low.into_iter().map(move |low| high << 15 | low))
    }

    #[test]
    fn narrowing_equals_a_search_for_the_nearest_even_value() {
        let f16: Vec<(f64, u16)> = (0..0x7c00).map(|bits| (f16_value(bits), bits)).collect();
        let bf16: Vec<(f64, u16)> = (0..0x7f80).map(|bits| (bf16_value(bits), bits)).collect();
        for bits in interesting() {
            if bits & 0x7fff_ffff > F32_INFINITY {
                assert_eq!((f32_to_bf16(bits), f32_to_f16(bits)), (0x7fc0, 0x7e00), "{bits:08x}");
            } else {
                let infinite = bits & 0x7fff_ffff == F32_INFINITY;
                let sign = (bits >> 16 & 0x8000) as u16;
                let half = if infinite { sign | 0x7c00 } else { nearest(bits, &f16, 65536.0, 0x7c00) };
                let brain =
                    if infinite { sign | 0x7f80 } else { nearest(bits, &bf16, 2f64.powi(128), 0x7f80) };
                assert_eq!(f32_to_f16(bits), half, "f16 of {bits:08x}");
                assert_eq!(f32_to_bf16(bits), brain, "bf16 of {bits:08x}");
            }
        }
    }

    #[test]
    fn widening_is_exact_for_every_value_and_makes_nan_canonical() {
        for bits in 0..=u16::MAX {
            let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
            let (half, brain) = (f16_to_f32(bits), bf16_to_f32(bits));
            match bits & 0x7fff {
                0x7c01.. => assert_eq!(half, F32_NAN, "{bits:04x}"),
                0x7c00 => assert_eq!(f32::from_bits(half), sign as f32 * f32::INFINITY),
                magnitude => {
                    assert_eq!(f64::from(f32::from_bits(half)), sign * f16_value(magnitude), "{bits:04x}");
                    assert_eq!(half >> 31, u32::from(bits >> 15), "sign of {bits:04x}");
                }
            }
            let nan = bits & 0x7fff > 0x7f80;
            assert_eq!(brain, if nan { F32_NAN } else { u32::from(bits) << 16 }, "{bits:04x}");
        }
    }

    #[test]
    fn slices_equal_scalars_at_every_length() {
        for n in 0..70_usize {
            let wide: Vec<u32> = (0..n as u32).map(|i| i.wrapping_mul(0x9e37_79b9) ^ 0x3f80_1234).collect();
            let bytes: Vec<u8> = wide.iter().flat_map(|x| x.to_le_bytes()).collect();
            let mut out = vec![0; n * 2];
            Cast::F32ToBf16.apply(&bytes, &mut out);
            let expected: Vec<u8> = wide.iter().flat_map(|x| f32_to_bf16(*x).to_le_bytes()).collect();
            assert_eq!(out, expected);
            let mut back = vec![0; n * 4];
            Cast::F16ToF32.apply(&out, &mut back);
            let halves = out.as_chunks::<2>().0;
            let expected: Vec<u8> =
                halves.iter().flat_map(|x| f16_to_f32(u16::from_le_bytes(*x)).to_le_bytes()).collect();
            assert_eq!(back, expected);
        }
    }
}
