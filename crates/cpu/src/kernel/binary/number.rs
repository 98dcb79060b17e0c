//! Arithmetic as ONNX defines it, for every numeric type.

use num_traits::ToPrimitive;

use crate::kernel::operand::Element;

/// A number that kernels compute with. Integers wrap around.
#[allow(missing_docs)] // The names say it.
pub(crate) trait Number: Element + Copy + PartialOrd {
    /// Whether division by zero has no result.
    const INTEGER: bool;
    /// The lowest value: negative infinity for floats.
    const LOWEST: Self;
    /// The highest value: infinity for floats.
    const HIGHEST: Self;
    const ONE: Self;

    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    /// Integers truncate; the divisor is not an integer zero.
    fn div(self, other: Self) -> Self;
    /// Remainder with the divisor's sign.
    fn floor_mod(self, other: Self) -> Self;
    /// Remainder with the dividend's sign.
    fn trunc_mod(self, other: Self) -> Self;
    /// The larger one; NaN if either is.
    fn larger(self, other: Self) -> Self;
    /// The smaller one; NaN if either is.
    fn smaller(self, other: Self) -> Self;
    fn to_f64(self) -> f64;
    fn to_i128(self) -> i128;
    fn from_f64(x: f64) -> Self;
    /// A key that sorts as the number does; NaN is the largest.
    fn sort_key(self) -> u64;
    /// Zero when every bit is shifted out; integers only.
    fn shift_left(self, by: Self) -> Self;
    /// Zero when every bit is shifted out; integers only.
    fn shift_right(self, by: Self) -> Self;
}

macro_rules! integers {
    ($($rust:ty),+) => {
        $(impl Number for $rust {
            const INTEGER: bool = true;
            const LOWEST: Self = <$rust>::MIN;
            const HIGHEST: Self = <$rust>::MAX;
            const ONE: Self = 1;

            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            fn sub(self, other: Self) -> Self {
                self.wrapping_sub(other)
            }
            fn mul(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            fn div(self, other: Self) -> Self {
                // Only the lowest number divided by -1 has no value; it wraps.
                self.checked_div(other).unwrap_or(self)
            }
            fn floor_mod(self, other: Self) -> Self {
                let rest = self.trunc_mod(other);
                #[allow(unused_comparisons)] // Unsigned numbers have no sign to adjust.
                if rest != 0 && (rest < 0) != (other < 0) { rest.wrapping_add(other) } else { rest }
            }
            fn trunc_mod(self, other: Self) -> Self {
                self.checked_rem(other).unwrap_or(0)
            }
            fn larger(self, other: Self) -> Self {
                self.max(other)
            }
            fn smaller(self, other: Self) -> Self {
                self.min(other)
            }
            fn to_f64(self) -> f64 {
                self as f64
            }
            fn to_i128(self) -> i128 {
                i128::from(self)
            }
            fn from_f64(x: f64) -> Self {
                x as $rust
            }
            fn sort_key(self) -> u64 {
                // Moves the lowest value to zero.
                (self as u64).wrapping_sub(<$rust>::MIN as u64)
            }
            fn shift_left(self, by: Self) -> Self {
                by.to_u32().and_then(|by| self.checked_shl(by)).unwrap_or(0)
            }
            fn shift_right(self, by: Self) -> Self {
                by.to_u32().and_then(|by| self.checked_shr(by)).unwrap_or(0)
            }
        })+
    };
}

macro_rules! floats {
    ($($rust:ty),+) => {
        $(impl Number for $rust {
            const INTEGER: bool = false;
            const LOWEST: Self = <$rust>::NEG_INFINITY;
            const HIGHEST: Self = <$rust>::INFINITY;
            const ONE: Self = 1.0;

            fn add(self, other: Self) -> Self {
                self + other
            }
            fn sub(self, other: Self) -> Self {
                self - other
            }
            fn mul(self, other: Self) -> Self {
                self * other
            }
            fn div(self, other: Self) -> Self {
                self / other
            }
            fn floor_mod(self, other: Self) -> Self {
                let rest = self % other;
                if rest != 0.0 && (rest < 0.0) != (other < 0.0) { rest + other } else { rest }
            }
            fn trunc_mod(self, other: Self) -> Self {
                self % other
            }
            fn larger(self, other: Self) -> Self {
                if self > other || self.is_nan() { self } else { other }
            }
            fn smaller(self, other: Self) -> Self {
                if self < other || self.is_nan() { self } else { other }
            }
            fn to_f64(self) -> f64 {
                f64::from(self)
            }
            fn to_i128(self) -> i128 {
                self as i128
            }
            fn from_f64(x: f64) -> Self {
                x as $rust
            }
            fn sort_key(self) -> u64 {
                if self.is_nan() {
                    return u64::MAX;
                }
                // Adding zero makes a negative zero positive. Of negative numbers, all bits are
                // inverted, so that a larger magnitude sorts first.
                let bits = (f64::from(self) + 0.0).to_bits();
                if bits >> 63 == 1 { !bits } else { bits | 1 << 63 }
            }
            fn shift_left(self, _: Self) -> Self {
                self
            }
            fn shift_right(self, _: Self) -> Self {
                self
            }
        })+
    };
}

integers!(u8, u16, u32, u64, i8, i16, i32, i64);
floats!(f32, f64);

#[cfg(test)]
mod tests {
    use super::Number;

    #[test]
    fn sort_keys_order_numbers() {
        let integers = [i64::MIN, -1, 0, 1, i64::MAX];
        assert!(integers.map(Number::sort_key).is_sorted_by(|a, b| a < b));
        assert!([0u8, 1, 255].map(Number::sort_key).is_sorted_by(|a, b| a < b));
        let floats = [f32::NEG_INFINITY, -2.0, -1.0, 0.0, 1.0, f32::INFINITY, f32::NAN];
        assert!(floats.map(Number::sort_key).is_sorted_by(|a, b| a < b));
        assert_eq!((-0.0f64).sort_key(), 0.0f64.sort_key());
        assert_eq!((-f32::NAN).sort_key(), f32::NAN.sort_key());
    }
}
