//! Types narrower than a byte allows, and floats of one byte.
//!
//! No device computes in them. A value of such a type is a tensor of bytes, one per element:
//! integers as themselves, floats as their codes. Which of the two it is, and of which type, the
//! graph knows; a plan sees bytes, and converts codes with [`Op::Decode`](crate::op::Op::Decode)
//! and [`Op::Encode`](crate::op::Op::Encode).

use serde::{Deserialize, Serialize};

use crate::DataType;

/// A type whose elements are stored in a byte each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum NarrowType {
    /// Four bits of exponent, three of mantissa, no infinities.
    F8E4M3Fn,
    /// Like `F8E4M3Fn`, with one zero and one NaN.
    F8E4M3FnUz,
    /// Five bits of exponent, two of mantissa, as IEEE would have it.
    F8E5M2,
    /// Like `F8E5M2`, with one zero, one NaN and no infinities.
    F8E5M2FnUz,
    /// A power of two.
    F8E8M0,
    /// Two bits of exponent, one of mantissa; neither infinities nor NaN.
    F4E2M1,
    /// Signed 4 bits.
    I4,
    /// Unsigned 4 bits.
    U4,
    /// Signed 2 bits.
    I2,
    /// Unsigned 2 bits.
    U2,
}

/// How a number between two powers of two becomes one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // Each is the ONNX mode of the same name.
pub enum PowerRounding {
    Up,
    Down,
    Nearest,
}

/// Where the bits of a float are, and what its last codes mean.
struct FloatFormat {
    mantissa_bits: u32,
    bias: i32,
    /// The largest positive number.
    max_code: u8,
    sign_bit: u8,
    /// The only zero is positive, and the code of a negative one is NaN.
    one_zero: bool,
}

impl NarrowType {
    /// The type of the bytes.
    pub const fn storage(self) -> DataType {
        match self {
            NarrowType::I4 | NarrowType::I2 => DataType::I8,
            _ => DataType::U8,
        }
    }

    /// Bits of an element in a file.
    pub const fn bits(self) -> usize {
        match self {
            NarrowType::I2 | NarrowType::U2 => 2,
            NarrowType::I4 | NarrowType::U4 | NarrowType::F4E2M1 => 4,
            _ => 8,
        }
    }

    /// Whether bytes are codes rather than the numbers themselves.
    pub const fn is_float(self) -> bool {
        self.range().is_none()
    }

    /// The least and the greatest integer; `None` for floats.
    pub const fn range(self) -> Option<(i64, i64)> {
        match self {
            NarrowType::I4 => Some((-8, 7)),
            NarrowType::U4 => Some((0, 15)),
            NarrowType::I2 => Some((-2, 1)),
            NarrowType::U2 => Some((0, 3)),
            _ => None,
        }
    }

    /// ONNX's name.
    pub const fn name(self) -> &'static str {
        match self {
            NarrowType::F8E4M3Fn => "FLOAT8E4M3FN",
            NarrowType::F8E4M3FnUz => "FLOAT8E4M3FNUZ",
            NarrowType::F8E5M2 => "FLOAT8E5M2",
            NarrowType::F8E5M2FnUz => "FLOAT8E5M2FNUZ",
            NarrowType::F8E8M0 => "FLOAT8E8M0",
            NarrowType::F4E2M1 => "FLOAT4E2M1",
            NarrowType::I4 => "INT4",
            NarrowType::U4 => "UINT4",
            NarrowType::I2 => "INT2",
            NarrowType::U2 => "UINT2",
        }
    }

    const fn format(self) -> Option<FloatFormat> {
        let (mantissa_bits, bias, max_code, sign_bit, one_zero) = match self {
            NarrowType::F8E4M3Fn => (3, 7, 0x7e, 0x80, false),
            NarrowType::F8E4M3FnUz => (3, 8, 0x7f, 0x80, true),
            NarrowType::F8E5M2 => (2, 15, 0x7b, 0x80, false),
            NarrowType::F8E5M2FnUz => (2, 16, 0x7f, 0x80, true),
            NarrowType::F4E2M1 => (1, 1, 0x7, 0x8, false),
            _ => return None,
        };
        Some(FloatFormat { mantissa_bits, bias, max_code, sign_bit, one_zero })
    }

    /// The number that a byte stands for.
    pub fn decode(self, byte: u8) -> f32 {
        let Some(format) = self.format() else {
            return match self.storage() {
                DataType::I8 => f32::from(byte as i8),
                _ if self == NarrowType::F8E8M0 => match byte {
                    0xff => f32::NAN,
                    power => 2f64.powi(i32::from(power) - 127) as f32,
                },
                _ => f32::from(byte),
            };
        };
        let code = byte & (format.sign_bit - 1);
        let negative = byte & format.sign_bit != 0;
        if format.one_zero && negative && code == 0 {
            return f32::NAN;
        }
        if code > format.max_code {
            let infinite = self == NarrowType::F8E5M2 && code == 0x7c;
            let value = if infinite { f32::INFINITY } else { f32::NAN };
            return if negative { -value } else { value };
        }
        let value = positive(code, &format);
        if negative { -value } else { value }
    }

    /// The byte of the nearest number to `x`. Floats beyond the largest one become it if
    /// `saturate`; otherwise they become an infinity or NaN. Integers keep their low bits.
    pub fn encode(self, x: f32, saturate: bool, rounding: PowerRounding) -> u8 {
        if self == NarrowType::F8E8M0 {
            return power_code(x, saturate, rounding);
        }
        let Some(format) = self.format() else { return self.low_bits(x as i64) };
        let sign = if x.is_sign_negative() { format.sign_bit } else { 0 };
        if x.is_nan() {
            return match self {
                NarrowType::F4E2M1 => sign ^ format.sign_bit,
                NarrowType::F8E5M2 => sign | 0x7e,
                NarrowType::F8E4M3Fn => sign | 0x7f,
                _ => format.sign_bit,
            };
        }
        match nearest(x.abs(), &format) {
            Some(0) if format.one_zero => 0,
            Some(code) => sign | code,
            None if saturate || self == NarrowType::F4E2M1 => sign | format.max_code,
            None => match self {
                NarrowType::F8E5M2 => sign | 0x7c,
                NarrowType::F8E4M3Fn => sign | 0x7f,
                _ => format.sign_bit,
            },
        }
    }

    /// The low bits of an integer, extended to a byte.
    pub fn low_bits(self, x: i64) -> u8 {
        let shift = 8 - self.bits().min(8) as u32;
        let top = (x as u8) << shift;
        match self.storage() {
            DataType::I8 => ((top as i8) >> shift) as u8,
            _ => top >> shift,
        }
    }
}

fn positive(code: u8, format: &FloatFormat) -> f32 {
    let mantissa = i32::from(code) & ((1 << format.mantissa_bits) - 1);
    let exponent = i32::from(code) >> format.mantissa_bits;
    let (whole, power) = match exponent {
        0 => (mantissa, 1 - format.bias),
        _ => (mantissa + (1 << format.mantissa_bits), exponent - format.bias),
    };
    (f64::from(whole) * 2f64.powi(power - format.mantissa_bits as i32)) as f32
}

/// The code of the number nearest to `x`, halves to even; `None` beyond the largest.
fn nearest(x: f32, format: &FloatFormat) -> Option<u8> {
    let (mut low, mut high) = (0, format.max_code);
    // The largest code whose number is at most `x`.
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        match positive(middle, format) <= x {
            true => low = middle,
            false => high = middle - 1,
        }
    }
    let below = f64::from(positive(low, format));
    let above = match low == format.max_code {
        true => 2.0 * below - f64::from(positive(low - 1, format)),
        false => f64::from(positive(low + 1, format)),
    };
    let half = (below + above) / 2.0;
    let up = f64::from(x) > half || (f64::from(x) == half && low % 2 == 1);
    let code = low + u8::from(up);
    (code <= format.max_code).then_some(code)
}

/// The code of a power of two, as ONNX's reference computes it from the bits of the number.
fn power_code(x: f32, saturate: bool, rounding: PowerRounding) -> u8 {
    let bits = x.to_bits();
    let exponent = (bits >> 23) & 0xff;
    if exponent == 0xff {
        return 0xff;
    }
    let has = |mask: u32| bits & mask != 0;
    let up = match rounding {
        PowerRounding::Down => false,
        PowerRounding::Up => has(0x7f_ffff),
        PowerRounding::Nearest => has(0x40_0000) && (has(0x3f_ffff) || exponent > 0),
    };
    let up = up && !(saturate && exponent == 0xfe);
    (exponent + u32::from(up)) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLOATS: [NarrowType; 5] = [
        NarrowType::F8E4M3Fn,
        NarrowType::F8E4M3FnUz,
        NarrowType::F8E5M2,
        NarrowType::F8E5M2FnUz,
        NarrowType::F4E2M1,
    ];

    fn encode(narrow: NarrowType, x: f32, saturate: bool) -> u8 {
        narrow.encode(x, saturate, PowerRounding::Up)
    }

    #[test]
    fn every_number_round_trips() {
        for narrow in FLOATS {
            for byte in 0..=(1u16 << narrow.bits()) - 1 {
                let x = narrow.decode(byte as u8);
                if !x.is_nan() && x.is_finite() {
                    assert_eq!(encode(narrow, x, true), byte as u8, "{narrow:?} {x}");
                }
            }
        }
        for power in 0..=0xfeu8 {
            let x = NarrowType::F8E8M0.decode(power);
            if power > 0 {
                assert_eq!(encode(NarrowType::F8E8M0, x, true), power);
            }
        }
    }

    /// A slow reference: the nearest of all codes, of two the even one.
    #[test]
    fn the_nearest_number_is_found() {
        let mut random = base::Random::new(5);
        for narrow in FLOATS {
            let largest = f64::from(narrow.decode(narrow.format().unwrap().max_code));
            for _ in 0..2000 {
                let power = f64::from(random.symmetric_f32()) * 12.0;
                let x = (f64::from(random.symmetric_f32()) * 2f64.powf(power)) as f32;
                if f64::from(x.abs()) > largest {
                    continue;
                }
                let got = encode(narrow, x, true);
                let distance = |byte: u8| (f64::from(narrow.decode(byte)) - f64::from(x)).abs();
                let codes = (0..=(1u16 << narrow.bits()) - 1).map(|byte| byte as u8);
                let best = codes.map(distance).filter(|d| !d.is_nan()).fold(f64::MAX, f64::min);
                assert_eq!(distance(got), best, "{narrow:?} {x}");
            }
        }
    }

    #[test]
    fn numbers_beyond_the_largest_saturate_or_not() {
        let both = |narrow, x| (encode(narrow, x, true), encode(narrow, x, false));
        assert_eq!(both(NarrowType::F8E4M3Fn, 464.0), (0x7e, 0x7e));
        assert_eq!(both(NarrowType::F8E4M3Fn, -465.0), (0xfe, 0xff));
        assert_eq!(both(NarrowType::F8E5M2, f32::INFINITY), (0x7b, 0x7c));
        assert_eq!(both(NarrowType::F8E4M3FnUz, 1e6), (0x7f, 0x80));
        assert_eq!(both(NarrowType::F4E2M1, -9.0), (0xf, 0xf));
        assert!(NarrowType::F8E5M2FnUz.decode(0x80).is_nan());
        assert_eq!(encode(NarrowType::F8E8M0, f32::MAX, true), 0xfe);
    }

    #[test]
    fn integers_keep_their_low_bits() {
        let signed = |narrow: NarrowType, x| narrow.low_bits(x) as i8;
        assert_eq!([-9, 8, 15, 300].map(|x| signed(NarrowType::I4, x)), [7, -8, -1, -4]);
        assert_eq!([-3, 2, 3].map(|x| signed(NarrowType::I2, x)), [1, -2, -1]);
        assert_eq!([-1, 17].map(|x| NarrowType::U4.low_bits(x)), [15, 1]);
    }
}
