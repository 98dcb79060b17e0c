//! Depthwise convolution of one plane.

use model::op::Activation;
use rten_simd::ops::{BitOps, NumOps};
use rten_simd::{Isa, Simd, SimdOp};

use super::super::activation;
use super::super::gemm::IMAGE_GUARD;
use crate::yield_point;

/// Vectors of the result that are summed at the same time, to hide the latency of additions.
const SIDE_BY_SIDE: usize = 8;

/// Multiplications that are added up before they are reported.
const LOOK_AFTER: usize = 64 * 1024;

/// One plane of the result and its operands.
pub(super) struct DepthwisePlane<'a> {
    pub(super) out: &'a mut [f32],
    /// The bordered image.
    pub(super) image: &'a [f32],
    /// The offset of each tap.
    pub(super) taps: &'a [usize],
    /// The offset of each row of windows.
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
pub(super) fn run(plane: DepthwisePlane) {
    let DepthwisePlane { activation, residual, .. } = plane;
    let out = plane.dispatch();
    if let Some(residual) = residual {
        activation::add(out, residual);
    }
    activation::apply(activation, out);
}

impl<'a> SimdOp for DepthwisePlane<'a> {
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
            // Vectors past the end repeat the last one and are not written.
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
                yield_point::did_multiplications(multiplied);
                multiplied = 0;
            }
        }
        yield_point::did_multiplications(multiplied);
        self.out
    }
}
