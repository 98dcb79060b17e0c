//! Convolutions of images in channel blocks.
//!
//! A tile of the result reads the image where it is: for each tap it multiplies a channel of some
//! adjacent positions, one factor each, by vectors of weights. Nothing is gathered into panels;
//! only where windows reach beyond the image it is surrounded with zeros first.

use std::ops::Range;

use model::op::{Activation, Conv};
use rten_simd::{Isa, SimdOp};
use smallvec::SmallVec;

use super::super::conv::ConvShapes;
use super::super::parallel::{for_each, try_for_each};
use super::super::{Context, Inputs, Kernel, KernelResult, activation, dense, gemm};
use super::layout::output;
use super::positions::Positions;
use super::tile::{self, Finish, MAX_BLOCKS, Tile};
use super::{BlockedShape, blocked, channels_per_block, fills_blocks};
use crate::buffer::{Buffer, Data};
use crate::kernel::{KernelError, invalid};
use crate::spare_buffers;
use crate::value::{TypedTensor, Value, elements, into_elements};
use crate::yield_point;

/// Multiplications of one task, where there is enough for all threads.
const TASK_WORK: usize = 2 << 20;

/// Elements of the image that a task reads for one group of blocks after the other.
const CACHED_ELEMENTS: usize = 64 * 1024;

/// How the image of a convolution is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ImageForm {
    Blocks,
    /// Channel after channel: there are too few of them to fill a block.
    Plain,
}

/// How a convolution with weights of this shape, whose result is in blocks, reads its image; `None`
/// where it is not computed in blocks.
pub(crate) fn image_form(conv: &Conv, weight: &[usize]) -> Option<ImageForm> {
    let lanes = channels_per_block()?;
    let [outputs, inputs, kernel @ ..] = weight else { return None };
    let supported = conv.groups == 1
        && (1..=3).contains(&kernel.len())
        && !kernel.contains(&0)
        && fills_blocks(*outputs, lanes);
    let stride = conv.window.strides.last().copied().unwrap_or(1);
    match supported {
        true if fills_blocks(*inputs, lanes) => {
            matches!(stride, 1 | 2).then_some(ImageForm::Blocks)
        }
        true => (1..lanes).contains(inputs).then_some(ImageForm::Plain),
        false => None,
    }
}

/// Part of the result's blocks and their weights.
struct Group {
    first: usize,
    count: usize,
    /// Where its weights begin.
    offset: usize,
}

/// A convolution with constant weights, all groups of channels together.
pub(crate) struct DenseConv {
    conv: Conv,
    /// Of the weights.
    shape: Vec<usize>,
    /// For each group, block of the input, tap and channel, the factors of the group's channels.
    weights: Buffer<f32>,
    groups: Vec<Group>,
    lanes: usize,
    /// Channels of the image that lie side by side: one in a plain image.
    in_lanes: usize,
    /// Blocks of the image, which are channels of a plain one.
    inputs: usize,
}

impl DenseConv {
    /// Packs `weight`, for which [`image_form`] returns something.
    pub(crate) fn new(conv: Conv, weight: &TypedTensor<f32>) -> Result<DenseConv, KernelError> {
        let lanes = channels_per_block().ok_or("vectors are too short for channel blocks")?;
        let in_lanes = match image_form(&conv, weight.shape()) {
            Some(ImageForm::Blocks) => lanes,
            Some(ImageForm::Plain) => 1,
            None => return Err("the convolution is not one of channel blocks".into()),
        };
        let shape = weight.shape().to_vec();
        let [outputs, channels, kernel @ ..] = shape.as_slice() else {
            return Err(invalid!("weights of shape {shape:?} have no channels"));
        };
        let taps: usize = kernel.iter().product();
        let (blocks, inputs) = (outputs.div_ceil(lanes), channels.div_ceil(in_lanes));
        let depth = inputs * taps * in_lanes;
        let size = depth * lanes;
        let count = blocks.div_ceil(MAX_BLOCKS).max(1);
        let bounds = |group: usize| blocks * group / count;
        let groups: Vec<Group> = (0..count)
            .map(|group| Group {
                first: bounds(group),
                count: bounds(group + 1) - bounds(group),
                offset: bounds(group) * size,
            })
            .collect();
        let mut weights = Buffer::filled(blocks * size, 0.0)?;
        let data = elements(weight);
        for group in &groups {
            let width = group.count * lanes;
            let rows = weights[group.offset..].chunks_exact_mut(width).take(depth);
            for (row, target) in rows.enumerate() {
                let (place, lane) = (row / in_lanes, row % in_lanes);
                let (block, tap) = (place / taps, place % taps);
                let channel = block * in_lanes + lane;
                let used = (outputs - group.first * lanes).min(width);
                if channel < *channels {
                    for (index, y) in target[..used].iter_mut().enumerate() {
                        let output = group.first * lanes + index;
                        *y = data[(output * channels + channel) * taps + tap];
                    }
                }
            }
        }
        gemm::flush_subnormal(&mut weights);
        Ok(DenseConv { conv, shape, weights, groups, lanes, in_lanes, inputs })
    }

    /// Its kernel: `x, weight, [bias], [residual]`, the image in its form, the residual in blocks.
    pub(crate) fn into_kernel(self) -> Kernel {
        let resident_bytes = size_of_val(&*self.weights);
        let run = move |context: &Context, inputs: Inputs| self.run(context, inputs);
        Kernel { run: Box::new(run), resident_bytes, packed_inputs: vec![1] }
    }

    /// The shape of the image, which has the shape `given`, as if it were plain.
    fn plain_shape(&self, given: &[usize]) -> Result<Vec<usize>, KernelError> {
        if self.in_lanes == 1 {
            return Ok(given.to_vec());
        }
        let x = BlockedShape::new(given)?;
        if x.blocks != self.inputs {
            return Err(invalid!("{} blocks for {} channels", x.blocks, self.shape[1]));
        }
        let mut plain = x.plain();
        plain[1] = self.shape[1];
        Ok(plain)
    }

    /// How many blocks of the result `groups` have.
    fn blocks_of(&self, groups: &Range<usize>) -> usize {
        self.groups[groups.clone()].iter().map(|group| group.count).sum()
    }

    fn run(&self, context: &Context, mut inputs: Inputs) -> KernelResult {
        let lanes = self.lanes;
        let plain = self.plain_shape(inputs.get(0)?.shape())?;
        let (shapes, images) = (ConvShapes::new(&plain, &self.shape, &self.conv)?, plain[0]);
        let out_shape = blocked(&shapes.output, lanes)?;
        let (mut out, accumulate) = result_memory(context, &mut inputs, &out_shape)?;
        let Operands { residual, bias } = Operands::new(&inputs, &shapes, &out_shape, lanes)?;
        if out.is_empty() {
            return output(&out_shape, out);
        }
        let x = inputs.typed::<f32>(0)?;
        let positions = Positions::new(&shapes.geometry, self.in_lanes, self.inputs)?;
        let in_size = self.inputs * shapes.geometry.input_size() * self.in_lanes;
        let out_size = out.len() / images;
        let clamp = activation::as_clamp(self.conv.activation);
        let one = |index: usize, out: &mut [f32], parallel: bool| {
            let input = &elements(x)[index * in_size..][..in_size];
            let residual = residual.as_deref().map(|all| &all[index * out_size..][..out_size]);
            let call = ImageCall {
                conv: self,
                positions: &positions,
                accumulate,
                residual,
                bias: bias.as_deref(),
                clamp,
            };
            if !positions.bordered {
                return call.run(out, input, parallel);
            }
            spare_buffers::with_scratch(context.pool, positions.image_len, |scratch| {
                positions.surround(scratch, input, 0.0, parallel);
                call.run(out, scratch, parallel)
            })?
        };
        if images < 2 * rayon::current_num_threads() {
            for (index, out) in out.chunks_exact_mut(out_size).enumerate() {
                one(index, out, true)?;
            }
        } else {
            let all = out.chunks_exact_mut(out_size).enumerate();
            try_for_each(all, &|(index, out): (usize, &mut [f32])| one(index, out, false))?;
        }
        output(&out_shape, out)
    }
}

/// Memory for a result of `out_shape`, and whether it holds the residual to be added to: operand 3
/// if no later step reads it.
pub(super) fn result_memory(
    context: &Context,
    inputs: &mut Inputs,
    out_shape: &[usize],
) -> Result<(Buffer<f32>, bool), KernelError> {
    let count = dense::count(out_shape)?;
    if !inputs.is_owned(3) || inputs.get(3)?.shape() != out_shape {
        return Ok((spare_buffers::take(context.pool, count)?, false));
    }
    match inputs.take(3)? {
        Value::F32(tensor) => Ok((into_elements(tensor), true)),
        other => Err(invalid!("operand 3 is {}", other.dtype())),
    }
}

/// What a convolution reads beside its image and its weights.
pub(super) struct Operands<'a> {
    pub(super) residual: Option<Data<'a, f32>>,
    /// For every channel of the blocks.
    pub(super) bias: Option<Buffer<f32>>,
}

impl<'a> Operands<'a> {
    /// Operands 2 and 3 of a convolution whose result has the shape `out_shape`.
    pub(super) fn new(
        inputs: &'a Inputs,
        shapes: &ConvShapes,
        out_shape: &[usize],
        lanes: usize,
    ) -> Result<Operands<'a>, KernelError> {
        let bias = inputs.optional_typed::<f32>(2)?.map(elements);
        shapes.check_bias(bias.map(<[f32]>::len))?;
        let bias = match bias {
            Some(bias) => {
                let mut padded = Buffer::filled(bias.len().next_multiple_of(lanes), 0.0)?;
                padded[..bias.len()].copy_from_slice(bias);
                Some(padded)
            }
            None => None,
        };
        let residual = match inputs.optional_typed::<f32>(3)? {
            Some(tensor) if tensor.shape() == out_shape => Some(Data::Borrowed(elements(tensor))),
            Some(tensor) => Some(Data::Owned(dense::broadcast(tensor, out_shape)?)),
            None => None,
        };
        Ok(Operands { residual, bias })
    }
}

/// One image of a call.
struct ImageCall<'a> {
    conv: &'a DenseConv,
    positions: &'a Positions<'a>,
    accumulate: bool,
    residual: Option<&'a [f32]>,
    bias: Option<&'a [f32]>,
    clamp: Option<(f32, f32)>,
}

/// Some positions of some groups of blocks.
struct Task<'a> {
    groups: Range<usize>,
    first: usize,
    /// One slice for each block of the groups.
    out: Buffer<&'a mut [f32]>,
}

impl ImageCall<'_> {
    fn run(&self, out: &mut [f32], image: &[f32], parallel: bool) -> Result<(), KernelError> {
        let g = self.positions.geometry;
        let lanes = self.conv.lanes;
        let count = g.output_size();
        let depth = self.positions.offsets.len() * self.conv.in_lanes;
        let threads = if parallel { rayon::current_num_threads() } else { 1 };
        let work = depth.saturating_mul(out.len());
        let wanted = match threads {
            1 => 1,
            _ => (work / TASK_WORK).min(threads * 8).max(1),
        };
        // What the tasks of a chunk read of the image stays in the cache of their core.
        let taken = self.conv.inputs * self.conv.in_lanes * g.strides.iter().product::<usize>();
        let chunk = (CACHED_ELEMENTS / taken).min(count.div_ceil(wanted.min(threads)));
        // Whole rows, or positions that fill tiles.
        let unit = if g.is_pointwise() { tile::UNIT } else { self.positions.width };
        let chunk = chunk.max(1).next_multiple_of(unit);
        let chunks = count.div_ceil(chunk);
        let groups = self.conv.groups.len();
        let parts = wanted.div_ceil(chunks).min(groups);
        let mut tasks = Buffer::with_capacity(chunks * parts)?;
        for part in 0..parts {
            for index in 0..chunks {
                let groups = groups * part / parts..groups * (part + 1) / parts;
                let blocks = self.conv.blocks_of(&groups);
                let out = Buffer::with_capacity(blocks)?;
                tasks.extend([Task { groups, first: index * chunk, out }]);
            }
        }
        let mut planes = out.chunks_exact_mut(count * lanes);
        for tasks in tasks.chunks_mut(chunks) {
            let blocks = tasks.first().map_or(0, |task| self.conv.blocks_of(&task.groups));
            for plane in planes.by_ref().take(blocks) {
                for (task, piece) in tasks.iter_mut().zip(plane.chunks_mut(chunk * lanes)) {
                    task.out.extend([piece]);
                }
            }
        }
        let compute = |task: &mut Task| TaskRun { call: self, task, image }.dispatch();
        if threads > 1 && work >= gemm::MIN_PARALLEL_WORK {
            for_each(tasks.iter_mut(), &compute);
        } else {
            tasks.iter_mut().for_each(compute);
        }
        Ok(())
    }
}

/// A task on its thread.
struct TaskRun<'a, 'b, 'c> {
    call: &'a ImageCall<'a>,
    task: &'b mut Task<'c>,
    image: &'a [f32],
}

impl SimdOp for TaskRun<'_, '_, '_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) {
        let TaskRun { call, task, image } = self;
        let conv = call.conv;
        let mut blocks = &mut *task.out;
        for group in &conv.groups[task.groups.clone()] {
            let (out, rest) = blocks.split_at_mut(group.count);
            GroupRun { call, group, first: task.first, image }.compute(isa, out);
            blocks = rest;
        }
        if call.clamp.is_none() && conv.conv.activation != Activation::None {
            for out in task.out.iter_mut() {
                activation::apply(conv.conv.activation, out);
            }
        }
    }
}

/// Some positions of one group of blocks.
struct GroupRun<'a> {
    call: &'a ImageCall<'a>,
    group: &'a Group,
    first: usize,
    image: &'a [f32],
}

impl GroupRun<'_> {
    #[inline(always)]
    fn compute<I: Isa>(&self, isa: I, blocks: &mut [&mut [f32]]) {
        let GroupRun { call, group, first, image } = *self;
        let (conv, positions) = (call.conv, call.positions);
        let lanes = conv.lanes;
        let most = tile::most_positions(lanes, group.count);
        let end = first + blocks.first().map_or(0, |out| out.len() / lanes);
        let bias = call.bias.map(|bias| &bias[group.first * lanes..][..group.count * lanes]);
        let plane = positions.geometry.output_size() * lanes;
        let step = (gemm::MAX_DEPTH / conv.in_lanes).max(1);
        let width = group.count * lanes * conv.in_lanes;
        let steps = positions.offsets.len().div_ceil(step);
        for (index, offsets) in positions.offsets.chunks(step).enumerate() {
            let weights = &conv.weights[group.offset + index * step * width..];
            let weights = &weights[..offsets.len() * width];
            let finish = Finish {
                add: call.accumulate || index > 0,
                last: index + 1 == steps,
                bias,
                clamp: call.clamp,
            };
            let mut at = first;
            while at < end {
                // Tiles of one row are of about the same size.
                let row_end = (at - at % positions.width + positions.width).min(end);
                let count = (row_end - at).div_ceil((row_end - at).div_ceil(most));
                let from = (at - first) * lanes;
                let mut out: SmallVec<[&mut [f32]; MAX_BLOCKS]> =
                    blocks.iter_mut().map(|out| &mut out[from..]).collect();
                let residual = call.residual.filter(|_| finish.last).map(|residual| {
                    std::array::from_fn(|block| {
                        let block = (group.first + block.min(group.count - 1)) * plane;
                        &residual[block + at * lanes..]
                    })
                });
                let tile = Tile {
                    out: &mut out,
                    residual,
                    image: &image[positions.window(at)..],
                    offsets,
                    weights,
                    positions: count,
                    is_plain: conv.in_lanes == 1,
                    stride: positions.geometry.strides[2],
                    finish,
                };
                tile.compute(isa);
                let depth = offsets.len() * conv.in_lanes;
                yield_point::did_multiplications(count * group.count * lanes * depth);
                at += count;
            }
        }
    }
}
