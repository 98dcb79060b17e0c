//! Convolutions of bytes in channel blocks where every channel has a filter of its own. A few rows
//! at a time become numbers in the cache, with zeros around them.

use model::op::Conv;
use rten_simd::ops::{BitOps, NumOps};
use rten_simd::{Isa, SimdOp};

use super::super::super::conv::ConvShapes;
use super::super::super::geometry::Geometry;
use super::super::super::parallel::try_for_each;
use super::super::super::{Context, Inputs, Kernel, KernelResult, dense, gemm};
use super::super::finish::{clamped, lanes, rounded};
use super::super::{ByteLayout, ByteSpec, extents, numbers_of};
use super::{BlockedShape, LANES, Terms, blocked, filled_up, stored_zero};
use crate::buffer::Buffer;
use crate::kernel::{KernelError, invalid};
use crate::value::Value;
use crate::yield_point;

/// Numbers of the image that a task keeps in the cache.
const CACHED_NUMBERS: usize = 24 * 1024;

/// Whether a convolution whose weight has this shape is computed in blocks.
pub(crate) fn supports(conv: &Conv, weight: &[usize]) -> bool {
    let [outputs, 1, kernel @ ..] = weight else { return false };
    conv.groups > 1
        && conv.groups == *outputs
        && (1..=3).contains(&kernel.len())
        && !kernel.contains(&0)
        && extents(&ByteLayout::Convolution(conv.clone()), weight).is_ok()
}

/// A depthwise convolution with a constant weight.
pub(crate) struct BlockDepthwise {
    conv: Conv,
    /// Of the weight.
    shape: Vec<usize>,
    /// The zero point of the image.
    zero: i32,
    /// For each block and tap, the factors of its channels.
    weights: Buffer<f32>,
    /// Added to the sums.
    offsets: Buffer<f32>,
    terms: Terms,
}

impl BlockDepthwise {
    /// Packs `weight`, for which [`supports`] holds.
    pub(crate) fn new(spec: &ByteSpec, weight: &Value) -> Result<BlockDepthwise, KernelError> {
        let ByteLayout::Convolution(conv) = &spec.layout else {
            return Err("a matrix has no channel blocks".into());
        };
        let shape = weight.shape().to_vec();
        let (channels, taps) = extents(&spec.layout, &shape)?;
        let numbers = numbers_of(spec, weight)?;
        let mut weights = Buffer::filled(channels.next_multiple_of(LANES) * taps, 0.0)?;
        for (index, x) in numbers.iter().enumerate() {
            let (channel, tap) = (index / taps, index % taps);
            weights[(channel / LANES * taps + tap) * LANES + channel % LANES] = *x;
        }
        let offsets: Vec<f32> = spec.sum_bias.iter().flatten().map(|bias| *bias as f32).collect();
        let offsets = if offsets.is_empty() { vec![0.0] } else { offsets };
        let zero = spec.activations_zero.ok_or("the zero point of the image is not known")?;
        Ok(BlockDepthwise {
            conv: conv.clone(),
            shape,
            zero: stored_zero(zero, spec.activations_signed),
            weights,
            offsets: filled_up(&offsets, channels, "biases")?,
            terms: Terms::new(spec, channels)?,
        })
    }

    /// Its kernel: `x` in blocks.
    pub(crate) fn into_kernel(self) -> Kernel {
        let resident_bytes =
            size_of_val(&*self.weights) + size_of_val(&*self.offsets) + self.terms.size_bytes();
        let run = move |context: &Context, inputs: Inputs| self.run(context, &inputs);
        Kernel { run: Box::new(run), resident_bytes, packed_inputs: Vec::new() }
    }

    fn run(&self, context: &Context, inputs: &Inputs) -> KernelResult {
        let (dims, x) = BlockedShape::of(inputs.get(0)?)?;
        if dims.lanes != LANES {
            return Err(invalid!("blocks of {} channels instead of {LANES}", dims.lanes));
        }
        let shapes = ConvShapes::new(&dims.plain(self.shape[0])?, &self.shape, &self.conv)?;
        let out_shape = blocked(&shapes.output, LANES)?;
        let mut out = context.pool.any_bytes(dense::count(&out_shape)?)?;
        if out.is_empty() {
            return dense::output(&out_shape, out);
        }
        let g = &shapes.geometry;
        let slice = g.output[1] * g.output[2] * LANES;
        let band = Band::new(g);
        let piece = band.rows * g.output[2] * LANES;
        let per_slice = g.output[1].div_ceil(band.rows);
        let mut pieces = Buffer::with_capacity(out.len() / slice * per_slice)?;
        for (number, slice) in out.chunks_exact_mut(slice).enumerate() {
            pieces.extend(slice.chunks_mut(piece).enumerate().map(|piece| (number, piece)));
        }
        let compute =
            |(number, (part, out)): (usize, (usize, &mut [u8]))| -> Result<(), KernelError> {
                let (plane, z) = (number / g.output[0], number % g.output[0]);
                let block = plane % dims.blocks;
                let image = &x[plane * dims.plane()..][..dims.plane()];
                gemm::with_scratch(band.length, |scratch| {
                    Rows { conv: self, geometry: g, image, band: &band, block, scratch }.run(
                        z,
                        part * band.rows,
                        out,
                    );
                })?;
                Ok(())
            };
        let mut all = pieces.into_vec().into_iter();
        match out_work(g, &out_shape) >= gemm::MIN_PARALLEL_WORK {
            true => try_for_each(all, &compute)?,
            false => all.try_for_each(compute)?,
        }
        dense::output(&out_shape, out)
    }
}

/// Multiplications of a result of `shape`.
fn out_work(g: &Geometry, shape: &[usize]) -> usize {
    shape.iter().product::<usize>().saturating_mul(g.taps())
}

/// The numbers that a few rows of the result read.
struct Band {
    /// Rows of the result.
    rows: usize,
    /// Rows of the image that these read in each of its slices.
    height: usize,
    /// Numbers of a row with what surrounds it.
    width: usize,
    /// Numbers of all.
    length: usize,
}

impl Band {
    fn new(g: &Geometry) -> Band {
        let reach = |axis: usize, count: usize| {
            (count - 1) * g.strides[axis] + (g.kernel[axis] - 1) * g.dilations[axis] + 1
        };
        let width = reach(2, g.output[2]) * LANES;
        let least = g.kernel[0] * reach(1, 1) * width;
        let each = g.kernel[0] * g.strides[1] * width;
        let more = CACHED_NUMBERS.saturating_sub(least) / each;
        let rows = (1 + more).min(g.output[1]);
        let height = reach(1, rows);
        Band { rows, height, width, length: g.kernel[0] * height * width }
    }
}

/// A few rows of one block of the result.
struct Rows<'a> {
    conv: &'a BlockDepthwise,
    geometry: &'a Geometry,
    /// One block.
    image: &'a [u8],
    band: &'a Band,
    block: usize,
    scratch: &'a mut [f32],
}

impl Rows<'_> {
    /// Computes `out`, the rows from `first` on of slice `z`.
    fn run(&mut self, z: usize, first: usize, out: &mut [u8]) {
        let (g, band) = (self.geometry, self.band);
        let rows = out.len() / (g.output[2] * LANES);
        let used = band.height - (band.rows - rows) * g.strides[1];
        for (index, slice) in self.scratch.chunks_exact_mut(band.height * band.width).enumerate() {
            let depth = z * g.strides[0] + index * g.dilations[0];
            let depth = depth.checked_sub(g.begin[0]).filter(|at| *at < g.input[0]);
            for (row, target) in slice.chunks_exact_mut(band.width).take(used).enumerate() {
                let at = (first * g.strides[1] + row).checked_sub(g.begin[1]);
                match (depth, at.filter(|at| *at < g.input[1])) {
                    (Some(depth), Some(at)) => {
                        let length = g.input[2] * LANES;
                        let source = &self.image[(depth * g.input[1] + at) * length..][..length];
                        let begin = g.begin[2] * LANES;
                        Centred { source, target, begin, zero: self.conv.zero }.dispatch();
                    }
                    _ => target.fill(0.0),
                }
                yield_point::did_work(band.width / 8);
            }
        }
        let conv = self.conv;
        let channels = self.block * LANES..(self.block + 1) * LANES;
        let taps = g.taps() * LANES;
        FewRows {
            geometry: g,
            band,
            numbers: self.scratch,
            weights: &conv.weights[self.block * taps..][..taps],
            finish: &BlockTerms {
                offsets: lanes(&conv.offsets[channels.clone()]),
                scales: lanes(&conv.terms.scales[channels.clone()]),
                bias: lanes(&conv.terms.bias[channels]),
                clamp: conv.terms.clamp,
                zero: conv.terms.zero,
            },
            out,
        }
        .dispatch();
    }
}

/// A row of bytes as numbers less the zero point, with zeros around them.
struct Centred<'a> {
    source: &'a [u8],
    target: &'a mut [f32],
    /// Numbers before it.
    begin: usize,
    zero: i32,
}

impl SimdOp for Centred<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        let (before, rest) = self.target.split_at_mut(self.begin.min(self.target.len()));
        let (middle, after) = rest.split_at_mut(self.source.len().min(rest.len()));
        before.fill(0.0);
        for (slot, byte) in middle.iter_mut().zip(self.source) {
            *slot = (i32::from(*byte) - self.zero) as f32;
        }
        after.fill(0.0);
    }
}

/// Rows of the result whose numbers are in the cache.
struct FewRows<'a> {
    geometry: &'a Geometry,
    band: &'a Band,
    numbers: &'a [f32],
    weights: &'a [f32],
    finish: &'a BlockTerms,
    out: &'a mut [u8],
}

/// Positions that are computed at a time.
const POSITIONS: usize = 8;

impl SimdOp for FewRows<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(mut self, isa: I) {
        let g = self.geometry;
        let width = g.output[2];
        for row in 0..self.out.len() / (width * LANES) {
            let start = row * g.strides[1] * self.band.width;
            let mut x = 0;
            while x < width {
                let (from, at) = (start + x * g.strides[2] * LANES, (row * width + x) * LANES);
                x += match (width - x, g.strides[2]) {
                    (POSITIONS.., 1) => self.compute::<I, POSITIONS, 1>(isa, from, at),
                    (POSITIONS.., 2) => self.compute::<I, POSITIONS, 2>(isa, from, at),
                    (4.., 1) => self.compute::<I, 4, 1>(isa, from, at),
                    (4.., 2) => self.compute::<I, 4, 2>(isa, from, at),
                    _ => self.compute::<I, 1, 1>(isa, from, at),
                };
            }
            yield_point::did_multiplications(width * LANES * g.taps());
        }
    }
}

impl FewRows<'_> {
    /// `COUNT` positions whose windows begin at `from`, written from `at` on; returns `COUNT`.
    #[inline(always)]
    fn compute<I: Isa, const COUNT: usize, const STRIDE: usize>(
        &mut self,
        isa: I,
        from: usize,
        at: usize,
    ) -> usize {
        let ops = isa.f32();
        let width = ops.len();
        let g = self.geometry;
        let reach = ((COUNT - 1) * STRIDE + 1) * LANES;
        let mut values = [[0f32; LANES]; COUNT];
        for lane in (0..LANES).step_by(width) {
            let mut sums = [ops.zero(); COUNT];
            let mut weights = self.weights.chunks_exact(LANES);
            for z in 0..g.kernel[0] {
                for y in 0..g.kernel[1] {
                    let row = z * self.band.height + y * g.dilations[1];
                    for x in 0..g.kernel[2] {
                        let Some(weight) = weights.next() else { continue };
                        let weight = ops.load(&weight[lane..]);
                        let tap = row * self.band.width + x * g.dilations[2] * LANES;
                        let numbers = &self.numbers[tap + from..][..reach];
                        for (position, sum) in sums.iter_mut().enumerate() {
                            let x = ops.load(&numbers[position * STRIDE * LANES + lane..]);
                            *sum = ops.mul_add(weight, x, *sum);
                        }
                    }
                }
            }
            for (values, sum) in values.iter_mut().zip(sums) {
                ops.store(sum, &mut values[lane..]);
            }
        }
        let out = self.out[at..].chunks_exact_mut(LANES);
        for (values, out) in values.iter().zip(out) {
            out.copy_from_slice(&finished(values, self.finish));
        }
        COUNT
    }
}

/// What turns the sums of a block into bytes.
struct BlockTerms {
    offsets: [f32; LANES],
    scales: [f32; LANES],
    bias: [f32; LANES],
    clamp: (f32, f32),
    zero: i32,
}

/// The bytes of the sums of one position.
#[inline(always)]
fn finished(sums: &[f32; LANES], terms: &BlockTerms) -> [u8; LANES] {
    let (low, high) = terms.clamp;
    let mut bytes = [0; LANES];
    for lane in 0..LANES {
        let value = (sums[lane] + terms.offsets[lane]) * terms.scales[lane] + terms.bias[lane];
        bytes[lane] = rounded(clamped(value, low, high), terms.zero) as u8;
    }
    bytes
}
