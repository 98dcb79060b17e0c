//! Rational numbers of any size, not below zero.

use std::cmp::Ordering;

use num_bigint::BigUint;

/// A fraction. It is reduced by powers of two only: most denominators are nothing else.
#[derive(Clone, Debug)]
pub(super) struct Ratio {
    above: BigUint,
    below: BigUint,
}

impl Ratio {
    pub(super) fn whole(value: u64) -> Ratio {
        Ratio { above: BigUint::from(value), below: BigUint::from(1u32) }
    }

    pub(super) fn fraction(above: u64, below: u64) -> Ratio {
        Ratio { above: BigUint::from(above), below: BigUint::from(below.max(1)) }
    }

    /// The binary fraction that a number is; zero for what is not above zero.
    pub(super) fn from_f64(value: f64) -> Ratio {
        if !(value > 0.0 && value.is_finite()) {
            return Ratio::whole(0);
        }
        let bits = value.to_bits();
        let exponent = ((bits >> 52) & 0x7ff) as i64;
        let fraction = bits & ((1 << 52) - 1);
        let (mantissa, exponent) = match exponent {
            0 => (fraction, -1074),
            _ => (fraction | (1 << 52), exponent - 1075),
        };
        let (above, below) = (BigUint::from(mantissa), BigUint::from(1u32));
        match exponent >= 0 {
            true => Ratio { above: above << exponent as u64, below },
            false => Ratio { above, below: below << exponent.unsigned_abs() }.reduced(),
        }
    }

    fn reduced(self) -> Ratio {
        let zeros = |value: &BigUint| value.trailing_zeros().unwrap_or(u64::MAX);
        let shift = zeros(&self.above).min(zeros(&self.below));
        Ratio { above: self.above >> shift, below: self.below >> shift }
    }

    pub(super) fn plus(&self, other: &Ratio) -> Ratio {
        if self.below == other.below {
            return Ratio { above: &self.above + &other.above, below: self.below.clone() }
                .reduced();
        }
        let above = &self.above * &other.below + &other.above * &self.below;
        Ratio { above, below: &self.below * &other.below }.reduced()
    }

    /// The difference; `None` below zero.
    pub(super) fn minus(&self, other: &Ratio) -> Option<Ratio> {
        let (one, two) = (&self.above * &other.below, &other.above * &self.below);
        (one >= two)
            .then(|| Ratio { above: one - two, below: &self.below * &other.below }.reduced())
    }

    pub(super) fn times(&self, other: &Ratio) -> Ratio {
        let (above, below) = (&self.above * &other.above, &self.below * &other.below);
        Ratio { above, below }.reduced()
    }

    /// The quotient; `other` must not be zero.
    pub(super) fn over(&self, other: &Ratio) -> Ratio {
        self.times(&Ratio { above: other.below.clone(), below: other.above.clone() })
    }

    pub(super) fn max(self, other: Ratio) -> Ratio {
        if self >= other { self } else { other }
    }

    pub(super) fn min(self, other: Ratio) -> Ratio {
        if self <= other { self } else { other }
    }

    /// The whole number of units of `1 / 2^bits` below or at the value; `u128::MAX` if it does not
    /// fit.
    pub(super) fn floor_units(&self, bits: u64) -> u128 {
        let units = (&self.above << bits) / &self.below;
        u128::try_from(units).unwrap_or(u128::MAX)
    }

    /// The whole number of units of `1 / 2^bits` at or above the value; `u128::MAX` if it does not
    /// fit.
    pub(super) fn ceil_units(&self, bits: u64) -> u128 {
        let above = &self.above << bits;
        let units = (above + &self.below - BigUint::from(1u32)) / &self.below;
        u128::try_from(units).unwrap_or(u128::MAX)
    }

    pub(super) fn of_units(units: u128, bits: u64) -> Ratio {
        Ratio { above: BigUint::from(units), below: BigUint::from(1u32) << bits }.reduced()
    }

    pub(super) fn ceil_usize(&self) -> usize {
        usize::try_from(self.ceil_units(0)).unwrap_or(usize::MAX)
    }

    /// The nearest number below, for messages.
    pub(super) fn to_f64(&self) -> f64 {
        self.floor_units(40) as f64 / (1u64 << 40) as f64
    }
}

impl PartialEq for Ratio {
    fn eq(&self, other: &Ratio) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Ratio {}

impl PartialOrd for Ratio {
    fn partial_cmp(&self, other: &Ratio) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Ratio {
    fn cmp(&self, other: &Ratio) -> Ordering {
        if self.below == other.below {
            return self.above.cmp(&other.above);
        }
        (&self.above * &other.below).cmp(&(&other.above * &self.below))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::Random;

    #[test]
    fn binary_fractions_are_exact() {
        let mut random = Random::new(3);
        for _ in 0..1000 {
            let (a, b) = (random.below(1 << 26), random.below(1 << 26) + 1);
            let (x, y) = (a as f64 / 1024.0, b as f64 / 65536.0);
            let (one, two) = (Ratio::from_f64(x), Ratio::from_f64(y));
            // These sums and products have fewer than 53 bits.
            assert_eq!(one.plus(&two), Ratio::from_f64(x + y));
            assert_eq!(one.times(&two), Ratio::from_f64(x * y));
            assert_eq!(one.over(&two).times(&two), one);
            assert_eq!(one < two, x < y);
        }
        assert_eq!(Ratio::from_f64(2.5).floor_units(0), 2);
        assert_eq!(Ratio::from_f64(2.5).ceil_units(0), 3);
        assert_eq!(Ratio::from_f64(f64::NAN), Ratio::whole(0));
        assert!(Ratio::from_f64(0.1).plus(&Ratio::from_f64(0.2)) > Ratio::fraction(3, 10));
    }
}
