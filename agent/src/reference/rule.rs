//! What the reference trainer does to its weights: an elementwise rule of the file's element and the step. The
//! engine's check computes the same from the file, with arithmetic and casts of its own.

use weightrefit_core::dtype::DType;

/// The trainer's step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Step(pub(super) i64);

impl Step {
    /// Changes nearly every weight by several units in the last place of bf16 from step to step. Products and
    /// sums are rounded one by one, so every process gets the same bits.
    pub(super) fn float(self, weight: f32) -> f32 {
        let step = self.0 as f32;
        weight * (1.0 + step / 32.0) + step / 1024.0
    }

    /// Integers are counted up, modulo their width.
    pub(super) fn integer(self, weight: i64) -> i64 {
        weight.wrapping_add(self.0)
    }
}

/// True for the float types that the rule can be applied to.
pub(super) fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::Bf16 | DType::F16)
}

/// True for the integer types that the rule can be applied to.
pub(super) fn is_integer(dtype: DType) -> bool {
    matches!(dtype, DType::U8 | DType::I8 | DType::I16 | DType::I32 | DType::I64)
}

/// Nearest value of a float type, ties to even, as its little-endian bits in the low bytes.
pub(super) fn encode_float(dtype: DType, value: f32) -> u32 {
    match dtype {
        DType::Bf16 => u32::from(to_bf16(value)),
        DType::F16 => u32::from(to_f16(value)),
        _ => value.to_bits(),
    }
}

/// The value of bits of a float type.
pub(super) fn decode_float(dtype: DType, bits: u32) -> f32 {
    match dtype {
        DType::Bf16 => f32::from_bits(bits << 16),
        DType::F16 => from_f16(bits as u16),
        _ => f32::from_bits(bits),
    }
}

fn to_bf16(value: f32) -> u16 {
    if value.is_nan() {
        return 0x7fc0;
    }
    let bits = value.to_bits();
    let (kept, dropped) = ((bits >> 16) as u16, bits & 0xffff);
    // A carry out of the mantissa raises the exponent, and past the largest one gives infinity.
    let up = dropped > 0x8000 || (dropped == 0x8000 && kept & 1 == 1);
    kept + u16::from(up)
}

fn to_f16(value: f32) -> u16 {
    if value.is_nan() {
        return 0x7e00;
    }
    let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
    if value.is_infinite() {
        return sign | 0x7c00;
    }
    let magnitude = f64::from(value.abs());
    // The spacing of f16 at this magnitude: 2^-24 below 2^-14, else 2^(exponent - 10).
    let exponent = if value == 0.0 { -14 } else { (magnitude.log2().floor() as i32).max(-14) };
    let units = (magnitude / f64::from(exponent - 10).exp2()).round_ties_even();
    // Subnormals have exponent field 0 and no hidden bit; a mantissa that rounds up to 2048 carries over.
    let bits = f64::from((exponent + 14) << 10) + units;
    if bits >= f64::from(0x7c00) { sign | 0x7c00 } else { sign | bits as u16 }
}

fn from_f16(bits: u16) -> f32 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (i32::from(bits >> 10 & 0x1f), f32::from(bits & 0x3ff));
    match exponent {
        0 => sign * mantissa * (-24_f32).exp2(),
        31 if mantissa == 0.0 => sign * f32::INFINITY,
        31 => f32::from_bits(0x7fc0_0000),
        _ => sign * (1024.0 + mantissa) * ((exponent - 25) as f32).exp2(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn casts_to_bf16_round_to_nearest_even() {
        let cases = [
            (0x3f80_0000, 0x3f80),
            (0x3f80_8000, 0x3f80),
            (0x3f81_8000, 0x3f82),
            (0x3f80_8001, 0x3f81),
            (0x7f7f_ffff, 0x7f80),
            (0xff80_0000, 0xff80),
            (0x7f80_0001, 0x7fc0),
            (0x8000_0000, 0x8000),
            (0x0000_8001, 0x0001),
        ];
        for (from, to) in cases {
            assert_eq!(encode_float(DType::Bf16, f32::from_bits(from)), to, "{from:#x}");
        }
    }

    #[test]
    fn every_f16_survives_the_way_to_f32_and_back() {
        for bits in 0..=u16::MAX {
            let nan = bits & 0x7c00 == 0x7c00 && bits & 0x3ff != 0;
            let expected = if nan { 0x7e00 } else { u32::from(bits) };
            assert_eq!(
                encode_float(DType::F16, decode_float(DType::F16, u32::from(bits))),
                expected,
                "{bits:#x}"
            );
        }
    }

    #[test]
    fn casts_to_f16_round_to_nearest_even_and_overflow_to_infinity() {
        let cases = [
            (1.0 + 1.0 / 2048.0, 0x3c00),
            (1.0 + 3.0 / 2048.0, 0x3c02),
            (65519.0, 0x7bff),
            (65520.0, 0x7c00),
            (-1e9, 0xfc00),
            (2.0_f32.powi(-25), 0x0000),
            (2.0_f32.powi(-25) * 1.5, 0x0001),
            (2.0_f32.powi(-14) - 2.0_f32.powi(-26), 0x0400),
            (2.0 - 1.0 / 4096.0, 0x4000),
        ];
        for (from, to) in cases {
            assert_eq!(encode_float(DType::F16, from), to, "{from}");
        }
    }

    #[test]
    fn a_step_changes_weights_by_more_than_one_unit_of_bf16() {
        for weight in [0.0_f32, 0.02, -0.05, 0.5, -1.0, 3.0] {
            for step in 0..8 {
                let bits = |step| encode_float(DType::Bf16, Step(step).float(weight));
                let (before, after) = (bits(step) as i32, bits(step + 1) as i32);
                assert!((before - after).abs() > 1, "{weight} at step {step}: {before:#x} {after:#x}");
            }
        }
        assert_eq!(Step(0).float(0.1), 0.1, "step 0 is the file itself");
    }
}
