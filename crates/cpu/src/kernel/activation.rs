//! Functions fused onto the end of heavier steps, in place and vectorized.

use model::op::Activation;
use rten_simd::functional::simd_apply;
use rten_simd::ops::{BitOps, NumOps};
use rten_simd::{Isa, SimdOp, SimdUnaryOp};
use rten_vecmath as vecmath;

use super::parallel::in_pieces;

/// Applies `activation` to each element.
pub(super) fn apply(activation: Activation, row: &mut [f32]) {
    match activation {
        Activation::None => {}
        Activation::Relu => Clamp { row, low: 0.0, high: f32::INFINITY }.dispatch(),
        Activation::Clip { low, high } => Clamp { row, low, high }.dispatch(),
        Activation::LeakyRelu { alpha } => vecmath::LeakyRelu { alpha }.map_mut(row),
        Activation::Sigmoid => vecmath::Sigmoid {}.map_mut(row),
        Activation::Tanh => vecmath::Tanh {}.map_mut(row),
        Activation::Silu => vecmath::Silu {}.map_mut(row),
        Activation::Gelu { tanh: false } => vecmath::Gelu {}.map_mut(row),
        Activation::Gelu { tanh: true } => vecmath::ApproxGelu {}.map_mut(row),
        Activation::HardSwish => HardSwish(row).dispatch(),
        Activation::HardSigmoid { alpha, beta } => HardSigmoid { row, alpha, beta }.dispatch(),
    }
}

/// `activation` as limits, if that is what it is.
pub(super) fn as_clamp(activation: Activation) -> Option<(f32, f32)> {
    match activation {
        Activation::Relu => Some((0.0, f32::INFINITY)),
        Activation::Clip { low, high } => Some((low, high)),
        _ => None,
    }
}

/// Like [`apply`], on all threads if there is much to do.
pub(super) fn apply_in_pieces(activation: Activation, data: &mut [f32]) {
    if activation != Activation::None {
        in_pieces(data, &|_: usize, piece: &mut [f32]| apply(activation, piece));
    }
}

/// Adds `other` to `row`, element by element.
pub(super) fn add(row: &mut [f32], other: &[f32]) {
    Add { row, other }.dispatch();
}

/// One element of `activation`, in double precision.
pub(super) fn scalar(activation: Activation, x: f64) -> f64 {
    let hard_sigmoid = |alpha: f64, beta: f64| (alpha * x + beta).clamp(0.0, 1.0);
    match activation {
        Activation::None => x,
        Activation::Relu => {
            if x < 0.0 {
                0.0
            } else {
                x
            }
        }
        Activation::Clip { low, high } => {
            let x = if x < f64::from(low) { f64::from(low) } else { x };
            if x > f64::from(high) { f64::from(high) } else { x }
        }
        Activation::LeakyRelu { alpha } => {
            if x < 0.0 {
                f64::from(alpha) * x
            } else {
                x
            }
        }
        Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Activation::Tanh => x.tanh(),
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Gelu { tanh: false } => 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2)),
        Activation::Gelu { tanh: true } => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
        Activation::HardSwish => x * hard_sigmoid(1.0 / 6.0, 0.5),
        Activation::HardSigmoid { alpha, beta } => hard_sigmoid(f64::from(alpha), f64::from(beta)),
    }
}

/// The error function: its series near zero and the continued fraction of its complement beyond.
fn erf(x: f64) -> f64 {
    let magnitude = x.abs();
    if magnitude < 2.5 {
        let (mut term, mut sum, mut n) = (magnitude, magnitude, 0.0);
        while term.abs() > 1e-17 * sum.abs() {
            n += 1.0;
            term *= -magnitude * magnitude / n;
            sum += term / (2.0 * n + 1.0);
        }
        return (sum * std::f64::consts::FRAC_2_SQRT_PI).copysign(x);
    }
    let fraction = (1..=60).rev().fold(0.0, |tail, n| f64::from(n) / 2.0 / (magnitude + tail));
    let complement =
        (-magnitude * magnitude).exp() / std::f64::consts::PI.sqrt() / (magnitude + fraction);
    (1.0 - complement).copysign(x)
}

/// Limits each element; NaN stays NaN.
struct Clamp<'a> {
    row: &'a mut [f32],
    low: f32,
    high: f32,
}

impl SimdOp for Clamp<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) {
        let ops = isa.f32();
        let (low, high) = (ops.splat(self.low), ops.splat(self.high));
        // The element comes second: that is the operand that is returned if it is NaN.
        simd_apply::<_, _, _, 4>(
            ops,
            self.row,
            #[inline(always)]
            |x| ops.min(high, ops.max(low, x)),
        );
    }
}

struct HardSwish<'a>(&'a mut [f32]);

impl SimdOp for HardSwish<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) {
        let ops = isa.f32();
        let (sixth, half) = (ops.splat(1.0 / 6.0), ops.splat(0.5));
        simd_apply::<_, _, _, 2>(
            ops,
            self.0,
            #[inline(always)]
            |x| {
                let sigmoid = ops.min(ops.one(), ops.max(ops.zero(), ops.mul_add(x, sixth, half)));
                ops.mul(x, sigmoid)
            },
        );
    }
}

struct HardSigmoid<'a> {
    row: &'a mut [f32],
    alpha: f32,
    beta: f32,
}

impl SimdOp for HardSigmoid<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) {
        let ops = isa.f32();
        let (alpha, beta) = (ops.splat(self.alpha), ops.splat(self.beta));
        simd_apply::<_, _, _, 2>(
            ops,
            self.row,
            #[inline(always)]
            |x| ops.min(ops.one(), ops.max(ops.zero(), ops.mul_add(x, alpha, beta))),
        );
    }
}

struct Add<'a> {
    row: &'a mut [f32],
    other: &'a [f32],
}

impl SimdOp for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) {
        let ops = isa.f32();
        let lanes = ops.len();
        let whole = self.row.len().min(self.other.len()) / lanes * lanes;
        let (row, row_tail) = self.row.split_at_mut(whole);
        let (other, other_tail) = self.other.split_at(whole);
        for (y, x) in row.chunks_exact_mut(lanes).zip(other.chunks_exact(lanes)) {
            ops.store(ops.add(ops.load(y), ops.load(x)), y);
        }
        for (y, x) in row_tail.iter_mut().zip(other_tail) {
            *y += x;
        }
    }
}

#[cfg(test)]
mod tests {
    use base::Random;

    use super::super::testing_dense::assert_close;
    use super::*;

    #[test]
    fn vectors_match_single_elements() {
        let mut source = Random::new(111);
        for activation in [
            Activation::None,
            Activation::Relu,
            Activation::LeakyRelu { alpha: 0.1 },
            Activation::Clip { low: -1.0, high: 6.0 },
            Activation::Sigmoid,
            Activation::Tanh,
            Activation::Silu,
            Activation::Gelu { tanh: false },
            Activation::Gelu { tanh: true },
            Activation::HardSwish,
            Activation::HardSigmoid { alpha: 0.2, beta: 0.5 },
        ] {
            let mut row: Vec<f32> = (0..77).map(|_| source.symmetric_f32() * 8.0).collect();
            let expected: Vec<f64> =
                row.iter().map(|&x| scalar(activation, f64::from(x))).collect();
            apply(activation, &mut row);
            assert_close(&row, &expected, 1e-5, &format!("{activation:?}"));
        }
    }

    #[test]
    fn nan_stays_nan() {
        for activation in [Activation::Relu, Activation::Clip { low: 0.0, high: 6.0 }] {
            let mut row = [f32::NAN; 20];
            apply(activation, &mut row);
            assert!(row.iter().all(|x| x.is_nan()));
        }
    }

    #[test]
    fn error_function_matches_known_values() {
        assert!((erf(0.5) - 0.520_499_877_813_046_5).abs() < 1e-15);
        assert!((erf(-3.0) + 0.999_977_909_503_001_4).abs() < 1e-15);
    }
}
