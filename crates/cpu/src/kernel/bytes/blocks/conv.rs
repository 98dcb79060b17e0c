//! Convolutions of bytes in channel blocks. The dot products read the image where it is; only where
//! windows reach beyond it, it is copied with zero points around it.

use std::ops::Range;

use int8::{BlockFinish, BlockRun, MAX_BLOCKS, WORD_DEPTH};
use model::op::Conv;
use smallvec::SmallVec;

use super::super::super::blocks::Positions;
use super::super::super::conv::ConvShapes;
use super::super::super::parallel::{for_each, try_for_each};
use super::super::super::{Context, Inputs, Kernel, KernelResult, dense, gemm};
use super::super::{BYTES_PER_NUMBER, ByteLayout, ByteSpec, bytes_of, extents};
use super::{BlockedShape, FEW_LANES, LANES, Terms, blocked, filled_up, stored_zero};
use crate::buffer::Buffer;
use crate::kernel::{KernelError, invalid};
use crate::value::Value;
use crate::yield_point;

/// Multiplications of one task, where there is enough for all threads.
const TASK_WORK: usize = 4 << 20;

/// Multiplications between two yield points.
const RUN_WORK: usize = 256 * 1024;

/// Bytes of the image that a task reads for one group of blocks after the other.
const CACHED_BYTES: usize = 256 * 1024;

/// Positions of a pointwise convolution that no task divides: a multiple of what tiles have.
const UNIT: usize = 48;

/// Whether a convolution whose weight has this shape and these zero points is computed in blocks.
pub(crate) fn supports(conv: &Conv, weight: &[usize], zeros: &[i32], signed: bool) -> bool {
    let [outputs, inputs, kernel @ ..] = weight else { return false };
    let whole = inputs % LANES == 0 && outputs % (conv.groups.max(1) * LANES) == 0;
    let zero = if signed { 0 } else { 128 };
    (conv.groups == 1 || whole)
        && (1..=3).contains(&kernel.len())
        && !kernel.contains(&0)
        && zeros.iter().all(|own| *own == zero)
        && extents(&ByteLayout::Convolution(conv.clone()), weight).is_ok()
}

/// Channels of a block in which an image of `channels` plain channels is read.
pub(crate) fn lanes_for(channels: usize) -> usize {
    if channels <= FEW_LANES { FEW_LANES } else { LANES }
}

/// Part of the result's blocks.
struct Group {
    /// Its blocks of the result.
    blocks: Range<usize>,
    /// The first block of the image that it reads.
    input: usize,
    /// Where its weights begin.
    offset: usize,
}

/// A convolution with a constant weight.
pub(crate) struct BlockConv {
    conv: Conv,
    /// Of the weight.
    shape: Vec<usize>,
    /// Channels of a block of the image.
    lanes: usize,
    /// The zero point of the image.
    zero: i32,
    /// For each group, block of the image, tap and word, the words of the group's channels.
    weights: Buffer<u32>,
    groups: Buffer<Group>,
    /// What the sums begin with.
    start: Buffer<i32>,
    terms: Terms,
}

impl BlockConv {
    /// Packs `weight`, for which [`supports`] holds, for images in blocks of `lanes` channels.
    pub(crate) fn new(
        spec: &ByteSpec,
        weight: &Value,
        lanes: usize,
    ) -> Result<BlockConv, KernelError> {
        let ByteLayout::Convolution(conv) = &spec.layout else {
            return Err("a matrix has no channel blocks".into());
        };
        let (data, signed) = bytes_of(weight)?;
        let shape = weight.shape().to_vec();
        let (outputs, depth) = extents(&spec.layout, &shape)?;
        let (inputs, taps) = (shape[1], depth / shape[1]);
        let zero = spec.activations_zero.ok_or("the zero point of the image is not known")?;
        let zero = stored_zero(zero, spec.activations_signed);
        let flip = if signed { 0 } else { 0x80 };
        let per_group = outputs / conv.groups;
        let input_blocks = inputs.div_ceil(lanes);
        let words = lanes / WORD_DEPTH;
        let size = input_blocks * taps * words * LANES;
        let groups = groups_of(conv.groups, per_group.div_ceil(LANES), input_blocks, size)?;
        let blocks = groups.last().map_or(0, |group| group.blocks.end);
        let mut weights = Buffer::filled(blocks * size, 0)?;
        for group in &groups {
            let count = group.blocks.len();
            let vectors = weights[group.offset..][..count * size].chunks_exact_mut(LANES);
            for (index, vector) in vectors.enumerate() {
                let (row, block) = (index / count, group.blocks.start + index % count);
                let (tap, word) = (row / words % taps, row % words);
                let first = row / words / taps * lanes + word * WORD_DEPTH;
                let used = outputs.saturating_sub(block * LANES).min(LANES);
                for (lane, slot) in vector.iter_mut().enumerate().take(used) {
                    let filter = &data[(block * LANES + lane) * depth..][..depth];
                    let byte = |part: usize| match first + part {
                        channel if channel < inputs => filter[channel * taps + tap] ^ flip,
                        _ => 0,
                    };
                    *slot = u32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)]);
                }
            }
        }
        let sum = |row: &[u8]| row.iter().map(|byte| i32::from((byte ^ flip) as i8)).sum::<i32>();
        let sums = data.chunks_exact(depth).map(|row| sum(row).wrapping_mul(zero).wrapping_neg());
        let mut start = filled_up(&Buffer::collect(sums)?, outputs, "sums")?;
        if let Some(bias) = &spec.sum_bias {
            let bias = filled_up(bias, outputs, "biases")?;
            start.iter_mut().zip(&bias).for_each(|(sum, bias)| *sum = sum.wrapping_add(*bias));
        }
        let terms = Terms::new(spec, outputs)?;
        Ok(BlockConv { conv: conv.clone(), shape, lanes, zero, weights, groups, start, terms })
    }

    /// Its kernel: `x` in blocks.
    pub(crate) fn into_kernel(self) -> Kernel {
        let resident_bytes =
            size_of_val(&*self.weights) + size_of_val(&*self.start) + self.terms.size_bytes();
        let run = move |context: &Context, inputs: Inputs| self.run(context, &inputs);
        Kernel { run: Box::new(run), resident_bytes, packed_inputs: Vec::new() }
    }

    fn run(&self, context: &Context, inputs: &Inputs) -> KernelResult {
        let (dims, x) = BlockedShape::of(inputs.get(0)?)?;
        if dims.lanes != self.lanes {
            return Err(invalid!("blocks of {} channels instead of {}", dims.lanes, self.lanes));
        }
        let plain = dims.plain(self.shape[1] * self.conv.groups)?;
        let shapes = ConvShapes::new(&plain, &self.shape, &self.conv)?;
        let out_shape = blocked(&shapes.output, LANES)?;
        let mut out = context.pool.any_bytes(dense::count(&out_shape)?)?;
        if out.is_empty() {
            return dense::output(&out_shape, out);
        }
        let positions = Positions::new(&shapes.geometry, self.lanes, dims.blocks)?;
        let in_size = dims.blocks * dims.plane();
        let out_size = out.len() / dims.images;
        let one = |index: usize, out: &mut [u8], parallel: bool| {
            let input = &x[index * in_size..][..in_size];
            let call = ImageCall { conv: self, positions: &positions };
            if !positions.bordered {
                return call.run(out, input, parallel);
            }
            gemm::with_scratch(positions.image_len.div_ceil(size_of::<f32>()), |scratch| {
                let image: &mut [u8] = bytemuck::cast_slice_mut(scratch);
                let image = &mut image[..positions.image_len];
                positions.surround(image, input, self.zero as u8, parallel);
                call.run(out, image, parallel)
            })?
        };
        if dims.images < 2 * rayon::current_num_threads() {
            for (index, out) in out.chunks_exact_mut(out_size).enumerate() {
                one(index, out, true)?;
            }
        } else {
            let all = out.chunks_exact_mut(out_size).enumerate();
            try_for_each(all, &|(index, out): (usize, &mut [u8])| one(index, out, false))?;
        }
        dense::output(&out_shape, out)
    }
}

/// The blocks of the result in groups of one convolution each, of which runs compute all blocks.
fn groups_of(
    convolutions: usize,
    blocks: usize,
    inputs: usize,
    size: usize,
) -> Result<Buffer<Group>, KernelError> {
    let count = blocks.div_ceil(MAX_BLOCKS);
    let group = |index: usize| {
        let (convolution, part) = (index / count, index % count);
        let bound = |part: usize| convolution * blocks + blocks * part / count;
        let blocks = bound(part)..bound(part + 1);
        let offset = blocks.start * size;
        Group { blocks, input: convolution * inputs, offset }
    };
    Ok(Buffer::collect((0..convolutions * count).map(group))?)
}

/// One image of a call.
struct ImageCall<'a> {
    conv: &'a BlockConv,
    positions: &'a Positions<'a>,
}

/// Some positions of some groups of blocks.
struct Task<'a> {
    groups: Range<usize>,
    first: usize,
    /// One slice for each block of the groups.
    out: Buffer<&'a mut [u8]>,
}

impl ImageCall<'_> {
    fn run(&self, out: &mut [u8], image: &[u8], parallel: bool) -> Result<(), KernelError> {
        let g = self.positions.geometry;
        let count = g.output_size();
        let threads = if parallel { rayon::current_num_threads() } else { 1 };
        let depth = self.offsets().len() * self.conv.lanes;
        let work = depth.saturating_mul(out.len());
        let wanted = match threads {
            1 => 1,
            _ => (work / TASK_WORK).min(threads * 8).max(1),
        };
        // What the tasks of a chunk read of the image stays in the cache of their core.
        let taken = self.positions.blocks * self.conv.lanes * g.strides.iter().product::<usize>();
        let chunk = (CACHED_BYTES / taken).min(count.div_ceil(wanted.min(threads)));
        // Whole rows, or positions that fill tiles.
        let unit = if g.is_pointwise() { UNIT } else { self.positions.width };
        let chunk = chunk.max(1).next_multiple_of(unit);
        let chunks = count.div_ceil(chunk);
        let groups = self.conv.groups.len();
        let parts = wanted.div_ceil(chunks).min(groups);
        let mut tasks = Buffer::with_capacity(chunks * parts)?;
        for part in 0..parts {
            for index in 0..chunks {
                let groups = groups * part / parts..groups * (part + 1) / parts;
                let out = Buffer::with_capacity(self.conv.blocks_of(&groups))?;
                tasks.extend([Task { groups, first: index * chunk, out }]);
            }
        }
        let mut planes = out.chunks_exact_mut(count * LANES);
        for tasks in tasks.chunks_mut(chunks) {
            let blocks = tasks.first().map_or(0, |task| self.conv.blocks_of(&task.groups));
            for plane in planes.by_ref().take(blocks) {
                for (task, piece) in tasks.iter_mut().zip(plane.chunks_mut(chunk * LANES)) {
                    task.out.extend([piece]);
                }
            }
        }
        let compute = |task: &mut Task| self.compute(task, image);
        if threads > 1 && work >= gemm::MIN_PARALLEL_WORK * BYTES_PER_NUMBER {
            for_each(tasks.iter_mut(), &compute);
        } else {
            tasks.iter_mut().for_each(compute);
        }
        Ok(())
    }

    /// Where the blocks and taps of one group begin in a window.
    fn offsets(&self) -> &[usize] {
        let blocks = self.conv.shape[1].div_ceil(self.conv.lanes);
        &self.positions.offsets[..blocks * self.positions.geometry.taps()]
    }

    fn compute(&self, task: &mut Task, image: &[u8]) {
        let (conv, positions) = (self.conv, self.positions);
        let offsets = self.offsets();
        let block_size = positions.image_len / positions.blocks;
        let words = conv.lanes / WORD_DEPTH;
        let step = positions.geometry.strides[2] * conv.lanes;
        let mut blocks = &mut *task.out;
        for group in &conv.groups[task.groups.clone()] {
            let (own, rest) = blocks.split_at_mut(group.blocks.len());
            blocks = rest;
            let image = &image[group.input * block_size..];
            let size = offsets.len() * words * LANES * own.len();
            let per_position = offsets.len() * conv.lanes * own.len() * LANES;
            let most = (RUN_WORK / per_position).max(1).next_multiple_of(UNIT);
            let end = task.first + own.first().map_or(0, |out| out.len() / LANES);
            let mut at = task.first;
            while at < end {
                let row_end = at - at % positions.width + positions.width;
                let count = (row_end.min(end) - at).min(most);
                let from = (at - task.first) * LANES;
                let mut out: SmallVec<[&mut [u8]; MAX_BLOCKS]> =
                    own.iter_mut().map(|out| &mut out[from..]).collect();
                int8::convolve(BlockRun {
                    image: &image[positions.window(at)..],
                    offsets,
                    words,
                    step,
                    weights: &conv.weights[group.offset..][..size],
                    positions: count,
                    finish: conv.finish(&group.blocks),
                    out: &mut out,
                });
                yield_point::did_multiplications(count * per_position / BYTES_PER_NUMBER);
                at += count;
            }
        }
    }
}

impl BlockConv {
    /// How many blocks of the result `groups` have.
    fn blocks_of(&self, groups: &Range<usize>) -> usize {
        self.groups[groups.clone()].iter().map(|group| group.blocks.len()).sum()
    }

    fn finish(&self, blocks: &Range<usize>) -> BlockFinish<'_> {
        let channels = blocks.start * LANES..blocks.end * LANES;
        BlockFinish {
            start: &self.start[channels.clone()],
            scales: &self.terms.scales[channels.clone()],
            bias: &self.terms.bias[channels],
            clamp: self.terms.clamp,
            zero: self.terms.zero,
        }
    }
}
