//! Images in channel blocks: as many channels as a vector has lanes are stored side by side, so
//! that `[images, channels, .., width]` becomes `[images, blocks, .., width, lanes]`.
//!
//! A vector then holds one position of an image, whatever the extents of the image are. The last
//! block is filled up with channels whose content is arbitrary and finite for finite inputs: what
//! reads them multiplies them by zero or leaves them out.

mod conv;
mod depthwise;
mod layout;
mod pool;
mod positions;
mod scale;
mod tile;

pub(crate) use conv::{DenseConv, ImageForm, image_form};
pub(crate) use depthwise::{DepthwiseConv, supports as supports_depthwise};
pub(crate) use layout::{to_blocks, to_plain};
pub(crate) use pool::{build_global, build_window, supports_global, supports_window};
pub(super) use positions::Positions;
pub(crate) use scale::build as build_scale;

use super::gemm;
use crate::kernel::{KernelError, invalid};

/// Most channels of a block.
const MAX_LANES: usize = 16;

/// Channels of a block: the lanes of a vector. `None` where vectors are too short to gain from it.
pub(crate) fn channels_per_block() -> Option<usize> {
    Some(gemm::lanes()).filter(|lanes| (8..=MAX_LANES).contains(lanes))
}

/// Whether `channels` fill their blocks so far that blocks pay: empty lanes cost as much as others.
fn fills_blocks(channels: usize, lanes: usize) -> bool {
    channels > 0 && channels.next_multiple_of(lanes) * 3 <= channels * 4
}

/// The dimensions of an image in channel blocks.
struct BlockedShape<'a> {
    images: usize,
    blocks: usize,
    spatial: &'a [usize],
    lanes: usize,
}

impl<'a> BlockedShape<'a> {
    fn new(shape: &'a [usize]) -> Result<BlockedShape<'a>, KernelError> {
        match shape {
            [images, blocks, spatial @ .., lanes] if Some(*lanes) == channels_per_block() => {
                Ok(BlockedShape { images: *images, blocks: *blocks, spatial, lanes: *lanes })
            }
            _ => Err(invalid!("shape {shape:?} has no channel blocks")),
        }
    }

    /// The shape with as many channels as the blocks hold.
    fn plain(&self) -> Vec<usize> {
        let channels = self.blocks * self.lanes;
        [self.images, channels].iter().chain(self.spatial).copied().collect()
    }

    /// Elements of one block of one image.
    fn plane(&self) -> usize {
        self.spatial.iter().product::<usize>() * self.lanes
    }
}

/// `shape`, which is plain, in blocks.
fn blocked(shape: &[usize], lanes: usize) -> Result<Vec<usize>, KernelError> {
    let [images, channels, spatial @ ..] = shape else {
        return Err(invalid!("shape {shape:?} has no channels"));
    };
    let mut all = vec![*images, channels.div_ceil(lanes)];
    all.extend(spatial);
    all.push(lanes);
    Ok(all)
}
