//! Depthwise convolution of one plane.

use model::op::Activation;
use rten_simd::ops::{BitOps, NumOps};
use rten_simd::{Isa, Simd, SimdOp};

use super::super::activation;
use super::super::gemm::IMAGE_GUARD;
use crate::watch;

/// Vectors of the result that are summed up side by side, so that one's latency hides behind others.
const SIDE_BY_SIDE: usize = 8;

/// Multiplications that are added up before they are told.
const LOOK_AFTER: usize = 64 * 1024;

/// One plane of the result and what it is made of.
pub(super) struct Plane<'a> {
    pub(super) out: &'a mut [f32],
    /// The bordered image.
    pub(super) image: &'a [f32],
    /// Where each tap starts.
    pub(super) taps: &'a [usize],
    /// Where each row of windows starts.
    pub(super) rows: &'a [usize],
    /// Windows per row.
    pub(super) width: usize,
    pub(super) weights: &'a [f32],
    pub(super) bias: f32,
    pub(super) residual: Option<&'a [f32]>,
    /// Add to what `out` holds already.
    pub(super) accumulate: bool,
    pub(super) activation: Activation,
}

/// Computes `plane`.
pub(super) fn run(plane: Plane) {
    let Plane { activation, residual, .. } = plane;
    let out = plane.dispatch();
    if let Some(residual) = residual {
        activation::add(out, residual);
    }
    activation::apply(activation, out);
}

impl<'a> SimdOp for Plane<'a> {
    type Output = &'a mut [f32];

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) -> &'a mut [f32] {
        let ops = isa.f32();
        let lanes = ops.len();
        let per_row = self.width.div_ceil(lanes);
        let total = self.rows.len() * per_row;
        let image = &self.image[IMAGE_GUARD..];
        let place = |index: usize| {
            let (row, column) = (index / per_row, index % per_row * lanes);
            (row * self.width + column, self.rows[row] + column, (self.width - column).min(lanes))
        };
        let (mut start, mut multiplied) = (0, 0);
        while start < total {
            // What is past the end repeats the last vector and is not written.
            let places: [_; SIDE_BY_SIDE] =
                std::array::from_fn(|offset| place((start + offset).min(total - 1)));
            let mut sums = [ops.splat(self.bias); SIDE_BY_SIDE];
            for (&tap, &weight) in self.taps.iter().zip(self.weights) {
                let weight = ops.splat(weight);
                let image = &image[tap..];
                for (sum, (_, from, _)) in sums.iter_mut().zip(&places) {
                    *sum = ops.mul_add(weight, ops.load(&image[*from..]), *sum);
                }
            }
            let used = SIDE_BY_SIDE.min(total - start);
            for (sum, (to, _, count)) in sums.into_iter().zip(places).take(used) {
                let out = &mut self.out[to..to + count];
                let sum = if self.accumulate { ops.add(sum, ops.load_pad(out).0) } else { sum };
                if count == lanes {
                    ops.store(sum, out);
                } else {
                    out.copy_from_slice(&sum.to_array().as_ref()[..count]);
                }
            }
            start += SIDE_BY_SIDE;
            multiplied += self.taps.len() * SIDE_BY_SIDE * lanes;
            if multiplied >= LOOK_AFTER {
                watch::multiplied(multiplied);
                multiplied = 0;
            }
        }
        watch::multiplied(multiplied);
        self.out
    }
}
