//! Convolutions of images in channel blocks where every channel has a filter of its own.

use model::op::{Activation, Conv};
use rten_simd::ops::{BitOps, NumOps};
use rten_simd::{Isa, SimdOp};

use super::super::conv::ConvShapes;
use super::super::geometry::Geometry;
use super::super::parallel::for_each;
use super::super::{Context, Inputs, Kernel, KernelResult, activation, gemm};
use super::conv::{Operands, result_memory};
use super::layout::{Piece, output, pieces_of};
use super::{BlockedShape, blocked, channels_per_block, fills_blocks};
use crate::buffer::Buffer;
use crate::kernel::{KernelError, invalid};
use crate::value::{TypedTensor, elements};
use crate::yield_point;

/// Multiplications of one task, where there is enough for all threads.
const TASK_WORK: usize = 256 * 1024;

/// Whether a convolution with weights of this shape is computed in blocks.
pub(crate) fn supports(conv: &Conv, weight: &[usize]) -> bool {
    let Some(lanes) = channels_per_block() else { return false };
    let [outputs, 1, kernel @ ..] = weight else { return false };
    let stride = conv.window.strides.last().copied().unwrap_or(1);
    conv.groups > 1
        && conv.groups == *outputs
        && (1..=3).contains(&kernel.len())
        && !kernel.contains(&0)
        && matches!(stride, 1 | 2)
        && fills_blocks(*outputs, lanes)
}

/// A depthwise convolution with constant weights.
pub(crate) struct DepthwiseConv {
    conv: Conv,
    /// Of the weights.
    shape: Vec<usize>,
    /// For each block and tap, the factors of its channels.
    weights: Buffer<f32>,
    lanes: usize,
}

impl DepthwiseConv {
    /// Packs `weight`, for which [`supports`] holds.
    pub(crate) fn new(conv: Conv, weight: &TypedTensor<f32>) -> Result<Self, KernelError> {
        let lanes = channels_per_block().ok_or("vectors are too short for channel blocks")?;
        let shape = weight.shape().to_vec();
        let taps: usize = shape.iter().skip(2).product();
        let channels = conv.groups;
        let mut weights = Buffer::filled(channels.next_multiple_of(lanes) * taps, 0.0)?;
        for (index, x) in elements(weight).iter().enumerate() {
            let (channel, tap) = (index / taps, index % taps);
            weights[(channel / lanes * taps + tap) * lanes + channel % lanes] = *x;
        }
        gemm::flush_subnormal(&mut weights);
        Ok(DepthwiseConv { conv, shape, weights, lanes })
    }

    /// Its kernel: `x, weight, [bias], [residual]`, image and residual in blocks.
    pub(crate) fn into_kernel(self) -> Kernel {
        let resident_bytes = size_of_val(&*self.weights);
        let run = move |context: &Context, inputs: Inputs| self.run(context, inputs);
        Kernel { run: Box::new(run), resident_bytes, packed_inputs: vec![1] }
    }

    fn run(&self, context: &Context, mut inputs: Inputs) -> KernelResult {
        let lanes = self.lanes;
        let (shapes, blocks) = {
            let x = BlockedShape::new(inputs.get(0)?.shape())?;
            let mut plain = x.plain();
            if x.blocks != self.conv.groups.div_ceil(lanes) {
                return Err(invalid!("{} blocks for {} channels", x.blocks, self.conv.groups));
            }
            plain[1] = self.conv.groups;
            (ConvShapes::new(&plain, &self.shape, &self.conv)?, x.blocks)
        };
        let out_shape = blocked(&shapes.output, lanes)?;
        let (mut out, accumulate) = result_memory(context, &mut inputs, &out_shape)?;
        let Operands { residual, bias } = Operands::new(&inputs, &shapes, &out_shape, lanes)?;
        if out.is_empty() {
            return output(&out_shape, out);
        }
        let x = elements(inputs.typed::<f32>(0)?);
        let g = &shapes.geometry;
        let (in_plane, plane) = (g.input_size() * lanes, g.output_size() * lanes);
        let row = g.output[2] * lanes;
        let rows = (TASK_WORK / (row * g.taps())).max(1);
        let parallel = out.len() * g.taps() >= gemm::MIN_PARALLEL_WORK;
        let mut pieces = pieces_of(&mut out, plane, rows * row)?;
        let compute = |piece: &mut Piece| {
            let block = piece.number % blocks;
            let at = piece.number * plane + piece.start;
            let length = piece.data.len();
            Rows {
                geometry: g,
                image: &x[piece.number * in_plane..][..in_plane],
                weights: &self.weights[block * g.taps() * lanes..][..g.taps() * lanes],
                bias: bias.as_deref().map(|bias| &bias[block * lanes..][..lanes]),
                residual: residual.as_deref().map(|all| &all[at..at + length]),
                accumulate,
                clamp: activation::as_clamp(self.conv.activation),
                first: piece.start / row,
                out: &mut *piece.data,
            }
            .dispatch();
            if activation::as_clamp(self.conv.activation).is_none()
                && self.conv.activation != Activation::None
            {
                activation::apply(self.conv.activation, piece.data);
            }
        };
        match parallel {
            true => for_each(pieces.iter_mut(), &compute),
            false => pieces.iter_mut().for_each(compute),
        }
        drop(pieces);
        output(&out_shape, out)
    }
}

/// Rows of one block of the result, and what they read.
struct Rows<'a> {
    geometry: &'a Geometry,
    image: &'a [f32],
    weights: &'a [f32],
    bias: Option<&'a [f32]>,
    /// As `out`.
    residual: Option<&'a [f32]>,
    accumulate: bool,
    clamp: Option<(f32, f32)>,
    /// The first row.
    first: usize,
    out: &'a mut [f32],
}

impl SimdOp for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(mut self, isa: I) {
        let g = self.geometry;
        let lanes = isa.f32().len();
        let width = g.output[2];
        let rows = self.out.len() / (width * lanes);
        // Positions whose windows lie in the image from side to side.
        let reach = (g.kernel[2] - 1) * g.dilations[2];
        let begin = g.begin[2].div_ceil(g.strides[2]).min(width);
        let last = (g.input[2] + g.begin[2]).saturating_sub(reach);
        let end = last.div_ceil(g.strides[2]).clamp(begin, width);
        for row in 0..rows {
            let at = self.first + row;
            let place = [at / g.output[1], at % g.output[1]];
            let line = Line::new(g, place, lanes);
            for x in (0..begin).chain(end..width) {
                let (taps, from) = g.inside(2, x);
                let window = Window { line: &line, taps, from, x, row };
                self.compute::<I, 1, 1>(isa, &window);
            }
            let mut x = begin;
            while x < end {
                let count = if end - x >= 8 {
                    8
                } else if end - x >= 4 {
                    4
                } else {
                    1
                };
                let from = x * g.strides[2] - g.begin[2];
                let window = Window { line: &line, taps: 0..g.kernel[2], from, x, row };
                match (count, g.strides[2]) {
                    (8, 1) => self.compute::<I, 8, 1>(isa, &window),
                    (8, _) => self.compute::<I, 8, 2>(isa, &window),
                    (4, 1) => self.compute::<I, 4, 1>(isa, &window),
                    (4, _) => self.compute::<I, 4, 2>(isa, &window),
                    _ => self.compute::<I, 1, 1>(isa, &window),
                }
                x += count;
            }
            yield_point::did_multiplications(width * lanes * g.taps());
        }
    }
}

/// The rows of an image that a row of the result reads.
struct Line {
    /// Taps of depth and height inside the image, and where the first ones read.
    z: (std::ops::Range<usize>, usize),
    y: (std::ops::Range<usize>, usize),
    lanes: usize,
}

impl Line {
    fn new(g: &Geometry, place: [usize; 2], lanes: usize) -> Line {
        Line { z: g.inside(0, place[0]), y: g.inside(1, place[1]), lanes }
    }
}

/// Adjacent windows with the same taps inside the image.
struct Window<'a> {
    line: &'a Line,
    taps: std::ops::Range<usize>,
    /// Where the first tap of the first window reads in its row.
    from: usize,
    /// The first position of the result, and its row among those of the task.
    x: usize,
    row: usize,
}

impl Rows<'_> {
    #[inline(always)]
    fn compute<I: Isa, const POSITIONS: usize, const STRIDE: usize>(
        &mut self,
        isa: I,
        window: &Window,
    ) {
        let ops = isa.f32();
        let lanes = ops.len();
        let (g, line) = (self.geometry, window.line);
        let start = match self.bias {
            Some(bias) => ops.load(bias),
            None => ops.zero(),
        };
        let mut sums = [start; POSITIONS];
        let reach = ((POSITIONS - 1) * STRIDE + 1) * lanes;
        for (z_index, z) in line.z.0.clone().enumerate() {
            let depth = (line.z.1 + z_index * g.dilations[0]) * g.input[1];
            for (y_index, y) in line.y.0.clone().enumerate() {
                let row = (depth + line.y.1 + y_index * g.dilations[1]) * g.input[2];
                let taps = (z * g.kernel[1] + y) * g.kernel[2];
                for (x_index, x) in window.taps.clone().enumerate() {
                    let at = (row + window.from + x_index * g.dilations[2]) * line.lanes;
                    let image = &self.image[at..][..reach];
                    let weight = ops.load(&self.weights[(taps + x) * lanes..]);
                    for position in 0..POSITIONS {
                        let x = ops.load(&image[position * STRIDE * lanes..]);
                        sums[position] = ops.mul_add(x, weight, sums[position]);
                    }
                }
            }
        }
        let at = (window.row * g.output[2] + window.x) * lanes;
        let out = &mut self.out[at..at + POSITIONS * lanes];
        let residual = self.residual.map(|all| &all[at..at + POSITIONS * lanes]);
        for (position, out) in out.chunks_exact_mut(lanes).enumerate() {
            let mut value = sums[position];
            if self.accumulate {
                value = ops.add(value, ops.load(out));
            }
            if let Some(residual) = residual {
                value = ops.add(value, ops.load(&residual[position * lanes..]));
            }
            if let Some((low, high)) = self.clamp {
                value = ops.min(ops.splat(high), ops.max(ops.splat(low), value));
            }
            ops.store(value, out);
        }
    }
}
