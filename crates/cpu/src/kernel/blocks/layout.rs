//! Between plain images and images in channel blocks.

use smallvec::SmallVec;

use super::super::dense;
use super::super::parallel::for_each;
use super::super::{Context, KernelResult, Outputs};
use super::{BlockedShape, MAX_LANES, blocked, channels_per_block};
use crate::buffer::Buffer;
use crate::kernel::{KernelError, invalid};
use crate::spare_buffers;
use crate::value::{TypedTensor, Value, elements};
use crate::yield_point;

/// Positions that are exchanged with their channels at a time, so that both sides stay in cache.
const TILE: usize = 16;

/// Positions of a block that one task moves.
const TASK_POSITIONS: usize = 1024;

/// `tensor` in blocks, to be combined with an image of `rank` dimensions and `channels` channels.
/// A tensor with one channel for all of them has one lane.
pub(crate) fn to_blocks(
    context: &Context,
    tensor: &TypedTensor<f32>,
    rank: usize,
    channels: usize,
) -> Result<Value, KernelError> {
    let lanes = channels_per_block().ok_or("vectors are too short for channel blocks")?;
    let missing = rank
        .checked_sub(tensor.shape().len())
        .ok_or_else(|| invalid!("shape {:?} has more than {rank} dimensions", tensor.shape()))?;
    let ones = std::iter::repeat_n(1, missing);
    let mut shape: Vec<usize> = ones.chain(tensor.shape().iter().copied()).collect();
    let data = elements(tensor);
    match shape.get(1) {
        Some(own) if *own == channels => {}
        Some(1) => {
            let mut out = spare_buffers::take(context.pool, data.len())?;
            out.copy_from_slice(data);
            shape.push(1);
            return dense::tensor(&shape, out);
        }
        _ => return Err(invalid!("shape {shape:?} does not fit {channels} channels")),
    }
    let out_shape = blocked(&shape, lanes)?;
    let mut out = spare_buffers::take(context.pool, dense::count(&out_shape)?)?;
    let positions: usize = shape[2..].iter().product();
    let (blocks, plane) = (out_shape[1], positions * lanes);
    if out.is_empty() {
        return dense::tensor(&out_shape, out);
    }
    let mut pieces = pieces_of(&mut out, plane, TASK_POSITIONS * lanes)?;
    for_each(pieces.iter_mut(), &|piece: &mut Piece| {
        let Piece { number, start, data: out } = piece;
        let (image, block) = (*number / blocks, *number % blocks);
        let first = (image * channels + block * lanes) * positions + *start / lanes;
        let used = (channels - block * lanes).min(lanes);
        let count = out.len() / lanes;
        let rows: SmallVec<[&[f32]; MAX_LANES]> =
            (0..used).map(|lane| &data[first + lane * positions..][..count]).collect();
        interleave(out, &rows, lanes);
        yield_point::did_work(out.len() / 4);
    });
    dense::tensor(&out_shape, out)
}

/// Element `i` of each row becomes element `i` of a group of `lanes`; missing rows are zeros.
fn interleave(out: &mut [f32], rows: &[&[f32]], lanes: usize) {
    for (tile, out) in out.chunks_mut(TILE * lanes).enumerate() {
        let from = tile * TILE;
        let count = out.len() / lanes;
        for (lane, row) in rows.iter().enumerate() {
            let source = &row[from..from + count];
            out[lane..].iter_mut().step_by(lanes).zip(source).for_each(|(y, &x)| *y = x);
        }
        if rows.len() < lanes {
            out.chunks_exact_mut(lanes).for_each(|group| group[rows.len()..].fill(0.0));
        }
    }
}

/// The first `channels` channels of an image in blocks.
pub(crate) fn to_plain(
    context: &Context,
    tensor: &TypedTensor<f32>,
    channels: usize,
) -> Result<Value, KernelError> {
    let shape = BlockedShape::new(tensor.shape())?;
    let lanes = shape.lanes;
    if channels.div_ceil(lanes) != shape.blocks {
        return Err(invalid!("{} blocks do not hold {channels} channels", shape.blocks));
    }
    let mut out_shape = vec![shape.images, channels];
    out_shape.extend(shape.spatial);
    let mut out = spare_buffers::take(context.pool, dense::count(&out_shape)?)?;
    let positions: usize = shape.spatial.iter().product();
    if out.is_empty() {
        return dense::tensor(&out_shape, out);
    }
    let data = elements(tensor);
    let mut blocks = Buffer::with_capacity(shape.images * shape.blocks)?;
    for image in out.chunks_exact_mut(channels * positions) {
        blocks.extend(image.chunks_mut(lanes * positions));
    }
    for_each(blocks.iter_mut().enumerate(), &|(number, out): (usize, &mut &mut [f32])| {
        let source = &data[number * shape.plane()..][..shape.plane()];
        let mut rows: SmallVec<[&mut [f32]; MAX_LANES]> = out.chunks_exact_mut(positions).collect();
        for (tile, source) in source.chunks(TILE * lanes).enumerate() {
            let from = tile * TILE;
            for (lane, row) in rows.iter_mut().enumerate() {
                let row = &mut row[from..from + source.len() / lanes];
                row.iter_mut().zip(source[lane..].iter().step_by(lanes)).for_each(|(y, &x)| *y = x);
            }
            yield_point::did_work(source.len() / 4);
        }
    });
    dense::tensor(&out_shape, out)
}

/// Part of one block of one image.
pub(super) struct Piece<'a> {
    /// Of the block, over all images.
    pub(super) number: usize,
    /// The part's first element in its block.
    pub(super) start: usize,
    pub(super) data: &'a mut [f32],
}

/// `out` in pieces of at most `size` elements that each belong to one block of `plane` elements.
pub(super) fn pieces_of(
    out: &mut [f32],
    plane: usize,
    size: usize,
) -> Result<Buffer<Piece<'_>>, KernelError> {
    let size = size.clamp(1, plane.max(1));
    let planes = out.len() / plane.max(1);
    let mut pieces = Buffer::with_capacity(planes * plane.div_ceil(size))?;
    for (number, block) in out.chunks_exact_mut(plane.max(1)).enumerate() {
        let parts = block.chunks_mut(size).enumerate();
        pieces.extend(parts.map(|(part, data)| Piece { number, start: part * size, data }));
    }
    Ok(pieces)
}

/// One output of `shape`.
pub(super) fn output(shape: &[usize], data: Buffer<f32>) -> KernelResult {
    Ok(Outputs::from_iter([dense::tensor(shape, data)?]))
}
