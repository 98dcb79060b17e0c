//! Depthwise convolution of one plane.

use model::op::Activation;
use rten_simd::ops::{BitOps, NumOps};
use rten_simd::{Isa, Simd, SimdOp};

use super::super::activation;
use super::super::gemm::{IMAGE_GUARD, with_scratch};
use super::super::geometry::Geometry;
use crate::buffer::Buffer;
use crate::kernel::KernelError;
use crate::yield_point;

/// Vectors of the result that are summed at the same time, to hide the latency of additions.
const SIDE_BY_SIDE: usize = 8;

/// The most windows and products of a small plane.
const MAX_SMALL: usize = 32;
const MAX_PAIRS: usize = 256;

/// Multiplications that are added up before they are reported.
const LOOK_AFTER: usize = 64 * 1024;

/// One plane of the result and its operands.
pub(crate) struct DepthwisePlane<'a> {
    pub(crate) out: &'a mut [f32],
    /// The bordered image.
    pub(crate) image: &'a [f32],
    /// The offset of each tap.
    pub(crate) taps: &'a [usize],
    /// The offset of each row of windows.
    pub(crate) rows: &'a [usize],
    /// Windows per row.
    pub(crate) width: usize,
    pub(crate) weights: &'a [f32],
    pub(crate) bias: f32,
    pub(crate) residual: Option<&'a [f32]>,
    /// Add to what `out` holds already.
    pub(crate) accumulate: bool,
    pub(crate) activation: Activation,
}

/// Computes `plane`.
pub(crate) fn run(plane: DepthwisePlane) -> Result<(), KernelError> {
    let DepthwisePlane { activation, residual, .. } = plane;
    let out = match plane.pitch() {
        Some(pitch) => plane.by_line(pitch)?,
        None => plane.dispatch(),
    };
    if let Some(residual) = residual {
        activation::add(out, residual);
    }
    activation::apply(activation, out);
    Ok(())
}

impl<'a> DepthwisePlane<'a> {
    /// The distance of rows of windows in the image, if these follow each other so closely that the
    /// elements between two rows can be computed along with them.
    fn pitch(&self) -> Option<usize> {
        let [first, second, ..] = self.rows else { return None };
        let pitch = second.checked_sub(*first)?;
        let even = self.rows.windows(2).all(|pair| pair[1] - pair[0] == pitch);
        (even && pitch >= self.width && pitch <= self.width + self.width / 2).then_some(pitch)
    }

    /// Computes the whole plane as one line, and leaves out what is between its rows.
    fn by_line(self, pitch: usize) -> Result<&'a mut [f32], KernelError> {
        let length = (self.rows.len() - 1) * pitch + self.width;
        with_scratch(length, |line| {
            let image = &self.image[IMAGE_GUARD + self.rows[0]..];
            Line {
                out: &mut *line,
                image,
                taps: self.taps,
                weights: self.weights,
                bias: self.bias,
            }
            .dispatch();
            for (out, line) in self.out.chunks_exact_mut(self.width).zip(line.chunks(pitch)) {
                match self.accumulate {
                    true => activation::add(out, &line[..self.width]),
                    false => out.copy_from_slice(&line[..self.width]),
                }
            }
        })?;
        Ok(self.out)
    }
}

/// What the windows of a small plane read. Vectors along its rows would be nearly empty.
pub(super) struct SmallPlane {
    /// An element of the input and the tap that it is multiplied by, window after window.
    pairs: Buffer<(usize, usize)>,
    /// Where the pairs of each window end.
    ends: Buffer<usize>,
}

impl SmallPlane {
    /// The windows of `g`, if they read so few elements that this is the fastest way.
    pub(super) fn new(g: &Geometry) -> Result<Option<SmallPlane>, KernelError> {
        if g.output_size() > MAX_SMALL {
            return Ok(None);
        }
        let mut pairs = Buffer::with_capacity(MAX_PAIRS)?;
        let mut ends = Buffer::with_capacity(g.output_size())?;
        let [_, height, width] = g.input;
        for window in 0..g.output_size() {
            let [_, rows, columns] = g.output;
            let at = [window / (rows * columns), window / columns % rows, window % columns];
            let [z, y, x] = [0, 1, 2].map(|axis| g.inside(axis, at[axis]));
            if z.0.len() * y.0.len() * x.0.len() > MAX_PAIRS - pairs.len() {
                return Ok(None);
            }
            for (a, tap_z) in z.0.clone().enumerate() {
                for (b, tap_y) in y.0.clone().enumerate() {
                    for (c, tap_x) in x.0.clone().enumerate() {
                        let row = (z.1 + a * g.dilations[0]) * height + y.1 + b * g.dilations[1];
                        let tap = (tap_z * g.kernel[1] + tap_y) * g.kernel[2] + tap_x;
                        pairs.extend([(row * width + x.1 + c * g.dilations[2], tap)]);
                    }
                }
            }
            ends.extend([pairs.len()]);
        }
        Ok(Some(SmallPlane { pairs, ends }))
    }

    /// Computes one plane from its input and its taps.
    pub(super) fn run(&self, out: &mut [f32], input: &[f32], plane: SmallPlaneTerms) {
        let mut start = 0;
        for (y, end) in out.iter_mut().zip(&self.ends) {
            let before = if plane.accumulate { *y } else { 0.0 };
            let pairs = self.pairs[start..*end].iter();
            let sum: f32 = pairs.map(|(at, tap)| input[*at] * plane.weights[*tap]).sum();
            *y = before + plane.bias + sum;
            start = *end;
        }
        if let Some(residual) = plane.residual {
            activation::add(out, residual);
        }
        activation::apply(plane.activation, out);
        yield_point::did_multiplications(16 * self.pairs.len());
    }
}

/// The operands of a small plane beside its input.
pub(super) struct SmallPlaneTerms<'a> {
    pub(super) weights: &'a [f32],
    pub(super) bias: f32,
    pub(super) residual: Option<&'a [f32]>,
    pub(super) accumulate: bool,
    pub(super) activation: Activation,
}

/// Windows that follow each other without a gap.
struct Line<'a> {
    out: &'a mut [f32],
    image: &'a [f32],
    taps: &'a [usize],
    weights: &'a [f32],
    bias: f32,
}

impl SimdOp for Line<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) {
        let ops = isa.f32();
        let lanes = ops.len();
        let step = lanes * SIDE_BY_SIDE;
        let (mut at, mut multiplied) = (0, 0);
        for out in self.out.chunks_mut(step) {
            if out.len() == step {
                let mut sums = [ops.splat(self.bias); SIDE_BY_SIDE];
                for (&tap, &weight) in self.taps.iter().zip(self.weights) {
                    let weight = ops.splat(weight);
                    let image: [I::F32; SIDE_BY_SIDE] = ops.load_many(&self.image[tap + at..]);
                    for (sum, image) in sums.iter_mut().zip(image) {
                        *sum = ops.mul_add(weight, image, *sum);
                    }
                }
                for (out, sum) in out.chunks_exact_mut(lanes).zip(sums) {
                    ops.store(sum, out);
                }
            } else {
                for (index, out) in out.chunks_mut(lanes).enumerate() {
                    let mut sum = ops.splat(self.bias);
                    for (&tap, &weight) in self.taps.iter().zip(self.weights) {
                        let image = ops.load(&self.image[tap + at + index * lanes..]);
                        sum = ops.mul_add(ops.splat(weight), image, sum);
                    }
                    let count = out.len();
                    out.copy_from_slice(&sum.to_array().as_ref()[..count]);
                }
            }
            at += step;
            multiplied += self.taps.len() * step;
            if multiplied >= LOOK_AFTER {
                yield_point::did_multiplications(multiplied);
                multiplied = 0;
            }
        }
        yield_point::did_multiplications(multiplied);
    }
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
