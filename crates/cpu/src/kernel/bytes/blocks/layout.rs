//! Between plain images of bytes and images in channel blocks.

use rten_simd::{Isa, SimdOp};

use super::super::super::parallel::for_each;
use super::super::super::{Context, dense};
use super::super::bytes_of;
use super::{BlockedShape, LANES, blocked};
use crate::buffer::Buffer;
use crate::kernel::{KernelError, invalid};
use crate::value::Value;
use crate::yield_point;

/// Positions that are exchanged with their channels at a time.
const TILE: usize = 16;

/// `value`, an image of bytes, in blocks of `lanes` channels.
pub(crate) fn to_blocks(
    context: &Context,
    value: &Value,
    channels: usize,
    lanes: usize,
) -> Result<Value, KernelError> {
    let (data, signed) = bytes_of(value)?;
    let shape = value.shape();
    if shape.get(1) != Some(&channels) {
        return Err(invalid!("shape {shape:?} does not fit {channels} channels"));
    }
    let out_shape = blocked(shape, lanes)?;
    let mut out = context.pool.any_bytes(dense::count(&out_shape)?)?;
    let positions: usize = shape[2..].iter().product();
    if out.is_empty() {
        return dense::tensor(&out_shape, out);
    }
    let flip = if signed { 0x80 } else { 0 };
    let blocks = out_shape[1];
    for_each(out.chunks_exact_mut(positions * lanes).enumerate(), &|(number, out)| {
        let (image, block) = (number / blocks, number % blocks);
        let first = image * channels + block * lanes;
        let used = (channels - block * lanes).min(lanes);
        let source = &data[first * positions..][..used * positions];
        Exchange { source, positions, lanes, flip, out }.dispatch();
    });
    dense::tensor(&out_shape, out)
}

/// Channels of one block side by side.
struct Exchange<'a> {
    /// Plain channels, one after the other.
    source: &'a [u8],
    positions: usize,
    lanes: usize,
    flip: u8,
    out: &'a mut [u8],
}

impl SimdOp for Exchange<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        let Exchange { source, positions, lanes, flip, out } = self;
        for (tile, out) in out.chunks_mut(TILE * lanes).enumerate() {
            let rows = source.chunks_exact(positions).map(|row| &row[tile * TILE..]);
            if out.len() == TILE * LANES {
                let mut block = [[0u8; TILE]; LANES];
                for (target, row) in block.iter_mut().zip(rows) {
                    target.copy_from_slice(&row[..TILE]);
                }
                for (position, out) in out.chunks_exact_mut(LANES).enumerate() {
                    for (slot, row) in out.iter_mut().zip(&block) {
                        *slot = row[position] ^ flip;
                    }
                }
            } else {
                for (lane, row) in rows.enumerate() {
                    let slots = out[lane..].iter_mut().step_by(lanes);
                    slots.zip(row).for_each(|(slot, byte)| *slot = byte ^ flip);
                }
            }
            yield_point::did_work(out.len() / 4);
        }
    }
}

/// The first `channels` channels of an image in blocks, signed or not.
pub(crate) fn to_plain(
    context: &Context,
    value: &Value,
    channels: usize,
    signed: bool,
) -> Result<Value, KernelError> {
    let (dims, data) = BlockedShape::of(value)?;
    let out_shape = dims.plain(channels)?;
    let mut out = context.pool.any_bytes(dense::count(&out_shape)?)?;
    let positions: usize = dims.spatial.iter().product();
    if !out.is_empty() {
        let flip = if signed { 0x80 } else { 0 };
        let lanes = dims.lanes;
        let mut blocks = Buffer::with_capacity(dims.images * dims.blocks)?;
        for image in out.chunks_exact_mut(channels * positions) {
            blocks.extend(image.chunks_mut(lanes * positions));
        }
        for_each(blocks.iter_mut().enumerate(), &|(number, out): (usize, &mut &mut [u8])| {
            let source = &data[number * dims.plane()..][..dims.plane()];
            for (lane, row) in out.chunks_exact_mut(positions).enumerate() {
                let bytes = source[lane..].iter().step_by(lanes);
                row.iter_mut().zip(bytes).for_each(|(slot, byte)| *slot = byte ^ flip);
                yield_point::did_work(positions);
            }
        });
    }
    match signed {
        true => dense::tensor(&out_shape, out.cast::<i8>()),
        false => dense::tensor(&out_shape, out),
    }
}
