//! Bytes of images in channel blocks: 16 channels of a position lie side by side, as
//! `[images, blocks, .., width, 16]`, so that four neighbouring channels are a word of a dot
//! product where they are. Images of few channels are read in blocks of 4.
//!
//! Bytes in blocks are unsigned. Those of a signed image have their highest bit inverted, which
//! adds 128 to them and to their zero point. The last block is filled up with channels of any
//! content: what reads them multiplies by zero or leaves them out.

mod conv;
mod depthwise;
mod layout;
mod pool;

pub(crate) use conv::{BlockConv, lanes_for, supports as supports_conv};
pub(crate) use depthwise::{BlockDepthwise, supports as supports_depthwise};
pub(crate) use layout::{to_blocks, to_plain};
pub(crate) use pool::{build_mean, build_window};

use super::{ByteOutput, ByteSpec};
use crate::buffer::Buffer;
use crate::kernel::bytes::elementwise::Quantum;
use crate::kernel::{KernelError, invalid};
use crate::value::{Typed, Value, elements};

/// Channels of a block.
pub(crate) const LANES: usize = int8::BLOCK;

/// Channels of a block of an image with at most as many.
pub(crate) const FEW_LANES: usize = int8::WORD_DEPTH;

/// What signed bytes differ by in blocks.
const SHIFT: i32 = 128;

/// The quantum of the same numbers in blocks.
pub(crate) fn in_blocks(quantum: Quantum) -> Quantum {
    Quantum { zero: stored_zero(quantum.zero, quantum.signed), signed: false, ..quantum }
}

/// A zero point as bytes in blocks have it.
fn stored_zero(zero: i32, signed: bool) -> i32 {
    zero + if signed { SHIFT } else { 0 }
}

/// The table of the same function of bytes in blocks.
pub(crate) fn table_in_blocks(table: &[u8; 256], from_signed: bool, to_signed: bool) -> [u8; 256] {
    let flip = |signed: bool| if signed { SHIFT as u8 } else { 0 };
    std::array::from_fn(|byte| table[byte ^ usize::from(flip(from_signed))] ^ flip(to_signed))
}

/// The dimensions of an image in blocks.
struct BlockedShape<'a> {
    images: usize,
    blocks: usize,
    spatial: &'a [usize],
    lanes: usize,
}

impl<'a> BlockedShape<'a> {
    /// The dimensions and the bytes of `value`.
    fn of(value: &'a Value) -> Result<(BlockedShape<'a>, &'a [u8]), KernelError> {
        match (u8::get(value), value.shape()) {
            (Some(tensor), [images, blocks, spatial @ .., lanes])
                if [LANES, FEW_LANES].contains(lanes) =>
            {
                let (images, blocks, lanes) = (*images, *blocks, *lanes);
                Ok((BlockedShape { images, blocks, spatial, lanes }, elements(tensor)))
            }
            (_, shape) => Err(invalid!("shape {shape:?} has no blocks of bytes")),
        }
    }

    /// The shape of the plain image of `channels` channels, which the blocks must hold.
    fn plain(&self, channels: usize) -> Result<Vec<usize>, KernelError> {
        if channels.div_ceil(self.lanes) != self.blocks {
            return Err(invalid!("{} blocks do not hold {channels} channels", self.blocks));
        }
        Ok([self.images, channels].iter().chain(self.spatial).copied().collect())
    }

    /// Bytes of one block of one image.
    fn plane(&self) -> usize {
        self.spatial.iter().product::<usize>() * self.lanes
    }
}

/// `shape`, which is plain, in blocks of `lanes` channels.
fn blocked(shape: &[usize], lanes: usize) -> Result<Vec<usize>, KernelError> {
    let [images, channels, spatial @ ..] = shape else {
        return Err(invalid!("shape {shape:?} has no channels"));
    };
    let mut all = vec![*images, channels.div_ceil(lanes)];
    all.extend(spatial);
    all.push(lanes);
    Ok(all)
}

/// What turns sums of each channel into bytes, as far as it is known when a plan is loaded.
struct Terms {
    scales: Buffer<f32>,
    bias: Buffer<f32>,
    /// The least and the largest number.
    clamp: (f32, f32),
    /// Added to rounded numbers.
    zero: i32,
}

impl Terms {
    /// Those of `spec` for `channels` channels, filled up to whole blocks.
    fn new(spec: &ByteSpec, channels: usize) -> Result<Terms, KernelError> {
        let ByteOutput::Bytes { zero, signed } = spec.output else {
            return Err("results in blocks are bytes".into());
        };
        Ok(Terms {
            scales: filled_up(&spec.scales, channels, "scales")?,
            bias: filled_up(spec.bias.as_deref().unwrap_or(&[0.0]), channels, "biases")?,
            clamp: spec.clamp(),
            zero: stored_zero(zero, signed),
        })
    }

    fn size_bytes(&self) -> usize {
        size_of_val(&*self.scales) + size_of_val(&*self.bias)
    }
}

/// `values` for each of `channels` channels, and defaults up to whole blocks.
fn filled_up<T: Copy + Default>(
    values: &[T],
    channels: usize,
    what: &str,
) -> Result<Buffer<T>, KernelError> {
    let mut all = Buffer::filled(channels.next_multiple_of(LANES), T::default())?;
    match values {
        [one] => all[..channels].fill(*one),
        each if each.len() == channels => all[..channels].copy_from_slice(each),
        each => return Err(invalid!("{} {what} for {channels} channels", each.len())),
    }
    Ok(all)
}
