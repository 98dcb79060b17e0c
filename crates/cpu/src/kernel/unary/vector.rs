//! Functions of single precision on whole vectors that the library of them does not have.

use rten_simd::ops::{BitOps, FloatOps, IntOps, NumOps, ToFloat};
use rten_simd::{Isa, Simd, SimdUnaryOp};
use rten_vecmath::Exp;

/// `alpha * (exp(x / slope) - 1)` below zero and `x` above, both times `gamma`.
pub(super) struct Elu {
    pub(super) alpha: f32,
    pub(super) slope: f32,
    pub(super) gamma: f32,
}

impl SimdUnaryOp<f32> for Elu {
    #[inline(always)]
    fn eval<I: Isa>(&self, isa: I, x: I::F32) -> I::F32 {
        let ops = isa.f32();
        let below = ops.mul(ops.min(x, ops.zero()), ops.splat(1.0 / self.slope));
        let below = ops.mul(exp_minus_one(isa, below), ops.splat(self.alpha));
        // NaN is not below zero and stays.
        let chosen = ops.select(below, x, ops.lt(x, ops.zero()));
        ops.mul(chosen, ops.splat(self.gamma))
    }
}

/// `ln(1 + exp(x))` without overflow.
pub(super) struct Softplus;

impl SimdUnaryOp<f32> for Softplus {
    #[inline(always)]
    fn eval<I: Isa>(&self, isa: I, x: I::F32) -> I::F32 {
        let ops = isa.f32();
        let small = Exp::apply(isa, ops.neg(ops.abs(x)));
        // ln(1 + t) = 2 atanh(t / (2 + t)) for t in 0..=1, as a series of odd powers.
        let ratio = ops.div(small, ops.add(small, ops.splat(2.0)));
        let square = ops.mul(ratio, ratio);
        let mut sum = ops.splat(2.0 / 17.0);
        for odd in [15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
            sum = ops.mul_add(sum, square, ops.splat(2.0 / odd));
        }
        // The element comes second: that is the operand that is returned if it is NaN.
        ops.mul_add(sum, ratio, ops.max(ops.zero(), x))
    }
}

/// `x * tanh(ln(1 + exp(x)))`.
pub(super) struct Mish;

impl SimdUnaryOp<f32> for Mish {
    #[inline(always)]
    fn eval<I: Isa>(&self, isa: I, x: I::F32) -> I::F32 {
        let ops = isa.f32();
        // tanh(ln(1 + e)) = e (e + 2) / (e (e + 2) + 2), which is one from 20 on.
        let e = Exp::apply(isa, ops.min(ops.splat(20.0), x));
        let product = ops.mul(e, ops.add(e, ops.splat(2.0)));
        ops.mul(x, ops.div(product, ops.add(product, ops.splat(2.0))))
    }
}

/// The natural logarithm.
pub(super) struct Ln;

impl SimdUnaryOp<f32> for Ln {
    #[inline(always)]
    fn eval<I: Isa>(&self, isa: I, x: I::F32) -> I::F32 {
        let (ops, whole) = (isa.f32(), isa.i32());
        // Subnormal numbers become normal ones.
        let is_small = ops.lt(x, ops.splat(f32::MIN_POSITIVE));
        let scaled = ops.select(ops.mul(x, ops.splat((1 << 25) as f32)), x, is_small);
        let extra = ops.select(ops.splat(-25.0), ops.zero(), is_small);
        // x = 2^k * (1 + f), where 1 + f is between the roots of one half and of two.
        let root_of_half = whole.splat(0x3f35_04f3);
        let bits: I::I32 = scaled.reinterpret_cast();
        let moved = whole.add(whole.sub(bits, root_of_half), whole.splat(0x3f80_0000));
        let exponent = whole.sub(whole.shift_right::<23>(moved), whole.splat(127));
        let k = ops.add(whole.to_float(exponent), extra);
        let fraction = whole.add(whole.and(moved, whole.splat(0x007f_ffff)), root_of_half);
        let fraction: I::F32 = fraction.reinterpret_cast();
        let f = ops.sub(fraction, ops.one());
        let result = ops.mul_add(k, ops.splat(LN_2_HIGH), ln_of_one_plus(isa, f, k));
        let result = ops.select(ops.splat(f32::NEG_INFINITY), result, ops.eq(x, ops.zero()));
        let result = ops.select(ops.splat(f32::NAN), result, ops.lt(x, ops.zero()));
        let is_number = ops.lt(x, ops.splat(f32::INFINITY));
        ops.select(result, x, is_number)
    }
}

/// The natural logarithm of two in two parts: products of the first with an exponent are exact.
const LN_2_HIGH: f32 = 6.931_381e-1;
const LN_2_LOW: f32 = 9.058_001e-6;

/// `ln(1 + f) + k * LN_2_LOW` for `f` from -0.293 to 0.415: a series of odd powers of
/// `f / (2 + f)`, with the largest terms, `f - f * f / 2`, as they are.
#[inline(always)]
fn ln_of_one_plus<I: Isa>(isa: I, f: I::F32, k: I::F32) -> I::F32 {
    let ops = isa.f32();
    let ratio = ops.div(f, ops.add(f, ops.splat(2.0)));
    let square = ops.mul(ratio, ratio);
    let mut rest = ops.splat(2.0 / 11.0);
    for odd in [9.0, 7.0, 5.0, 3.0] {
        rest = ops.mul_add(rest, square, ops.splat(2.0 / odd));
    }
    let rest = ops.mul(rest, square);
    let half_square = ops.mul(ops.mul(f, f), ops.splat(0.5));
    let low = ops.mul(k, ops.splat(LN_2_LOW));
    let correction = ops.mul_add(ratio, ops.add(half_square, rest), low);
    ops.add(f, ops.sub(correction, half_square))
}

/// `exp(x) - 1`, also where that is small.
#[inline(always)]
fn exp_minus_one<I: Isa>(isa: I, x: I::F32) -> I::F32 {
    let ops = isa.f32();
    let far = ops.sub(Exp::apply(isa, x), ops.one());
    // The series of exp(x) - 1; the next term is a 2^29th of the sum at -0.5.
    let mut sum = ops.splat(1.0 / 40_320.0);
    for factorial in [5_040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0] {
        sum = ops.mul_add(sum, x, ops.splat(1.0 / factorial));
    }
    let near = ops.mul(sum, x);
    ops.select(near, far, ops.lt(ops.abs(x), ops.splat(0.5)))
}
