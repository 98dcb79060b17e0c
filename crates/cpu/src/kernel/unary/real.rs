//! Functions of real numbers that the standard library does not have.

use std::f64::consts::FRAC_2_SQRT_PI;

use num_traits::Float;
use rten_simd::ops::{BitOps, FloatOps, NumOps};
use rten_simd::{Isa, SimdUnaryOp};

use crate::kernel::operand::Element;

/// A floating-point number that kernels compute with.
pub(crate) trait Real: Float + Element {
    /// The nearest number to `x`.
    fn of(x: f64) -> Self;
    /// The nearest integer, halves to the even one.
    fn round_even(self) -> Self;
    /// The error function.
    fn erf(self) -> Self;

    /// `1 / (1 + exp(-x))` without overflow.
    fn sigmoid(self) -> Self {
        let one = Self::one();
        if self >= Self::zero() {
            one / (one + (-self).exp())
        } else {
            let e = self.exp();
            e / (one + e)
        }
    }

    /// `ln(1 + exp(x))` without overflow.
    fn softplus(self) -> Self {
        let rest = (-self.abs()).exp().ln_1p();
        if self > Self::zero() { self + rest } else { rest }
    }

    /// -1, 0 or 1; NaN stays.
    fn sign(self) -> Self {
        if self > Self::zero() {
            Self::one()
        } else if self < Self::zero() {
            -Self::one()
        } else {
            self
        }
    }

    /// Within `low..=high`; NaN stays.
    fn clamp_nan(self, low: Self, high: Self) -> Self {
        let raised = if self < low { low } else { self };
        if raised > high { high } else { raised }
    }
}

impl Real for f32 {
    fn of(x: f64) -> f32 {
        x as f32
    }

    fn round_even(self) -> f32 {
        self.round_ties_even()
    }

    fn erf(self) -> f32 {
        erf(f64::from(self)) as f32
    }
}

impl Real for f64 {
    fn of(x: f64) -> f64 {
        x
    }

    fn round_even(self) -> f64 {
        self.round_ties_even()
    }

    fn erf(self) -> f64 {
        erf(self)
    }
}

/// The error function to about the last bit: a series of positive terms near zero, where nothing
/// cancels, and a continued fraction of its complement far from it.
fn erf(x: f64) -> f64 {
    let magnitude = x.abs();
    if magnitude.is_nan() {
        return x;
    }
    if magnitude > 6.0 {
        return 1.0f64.copysign(x);
    }
    let square = magnitude * magnitude;
    if magnitude < 2.5 {
        let (mut term, mut sum, mut odd) = (magnitude, magnitude, 1.0);
        while term > sum * 1e-17 {
            odd += 2.0;
            term *= 2.0 * square / odd;
            sum += term;
        }
        return (FRAC_2_SQRT_PI * (-square).exp() * sum).copysign(x);
    }
    let mut tail = 0.0;
    for k in (1..=60).rev() {
        tail = f64::from(k) / 2.0 / (magnitude + tail);
    }
    let complement = FRAC_2_SQRT_PI / 2.0 * (-square).exp() / (magnitude + tail);
    (1.0 - complement).copysign(x)
}

/// Vectorized error function. The library's has an absolute error of 7e-7, which is much where the
/// function is small; there a polynomial takes over.
#[derive(Default)]
pub(super) struct Erf;

impl SimdUnaryOp<f32> for Erf {
    #[inline(always)]
    fn eval<I: Isa>(&self, isa: I, x: I::F32) -> I::F32 {
        let ops = isa.f32();
        let square = ops.mul(x, x);
        // Taylor coefficients of erf(x) / x in the square.
        let series = [
            std::f32::consts::FRAC_2_SQRT_PI,
            -0.376_126_4,
            0.112_837_92,
            -0.026_866_17,
            0.005_223_977_6,
            -0.000_854_832_7,
            0.000_120_553_3,
        ];
        let mut sum = ops.splat(series[6]);
        for &coefficient in series[..6].iter().rev() {
            sum = ops.mul_add(sum, square, ops.splat(coefficient));
        }
        let near = ops.mul(sum, x);
        let is_near = ops.lt(ops.abs(x), ops.splat(0.5));
        ops.select(near, rten_vecmath::Erf::apply(isa, x), is_near)
    }
}

/// Vectorized `x / 2 * (1 + erf(x / sqrt(2)))`.
pub(super) struct Gelu;

impl SimdUnaryOp<f32> for Gelu {
    #[inline(always)]
    fn eval<I: Isa>(&self, isa: I, x: I::F32) -> I::F32 {
        let ops = isa.f32();
        let erf = Erf::apply(isa, ops.mul(x, ops.splat(std::f32::consts::FRAC_1_SQRT_2)));
        ops.mul(ops.mul(x, ops.splat(0.5)), ops.add(erf, ops.one()))
    }
}
