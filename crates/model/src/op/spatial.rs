//! Operators on images beside convolution and pooling.

use serde::{Deserialize, Serialize};

use super::Window;

/// Operators on images and volumes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Spatial {
    /// `theta, size`: where an affine transform samples.
    AffineGrid {
        /// -1 and 1 are the centres of the corner pixels.
        align_corners: bool,
    },
    /// `x, shape`: cut or padded around the centre.
    CenterCropPad {
        /// Dimensions that the shape gives; all when absent. May be negative.
        axes: Option<Vec<i64>>,
    },
    /// `x, image shape, block shape`: the sums of overlapping blocks.
    Col2Im {
        /// Distance of the taps; empty means ones.
        dilations: Vec<usize>,
        /// All begins, then all ends; empty means none.
        pads: Vec<usize>,
        /// Step of the blocks; empty means ones.
        strides: Vec<usize>,
    },
    /// `x, indices, [shape]`: maxima where they were before pooling, zeros elsewhere.
    MaxUnpool {
        /// Extent of the pooling windows.
        kernel: Vec<usize>,
        /// All begins, then all ends; empty means none.
        pads: Vec<usize>,
        /// Step of the windows; empty means ones.
        strides: Vec<usize>,
    },
    /// `x, boxes, image of each box`: boxes resampled to one size.
    RoiAlign(RoiAlign),
    /// `x, weight, offset, [bias], [mask]`: a convolution whose taps are moved.
    DeformConv {
        /// Geometry.
        window: Window,
        /// Channel groups.
        groups: usize,
        /// Groups of channels with offsets of their own.
        offset_groups: usize,
    },
}

/// Resampling of boxes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoiAlign {
    /// The largest sample of a cell rather than their mean.
    pub max: bool,
    /// Pixel centres are at halves.
    pub half_pixel: bool,
    /// Rows of a box.
    pub height: usize,
    /// Columns of a box.
    pub width: usize,
    /// Samples per cell and direction; as many as pixels when 0.
    pub sampling_ratio: usize,
    /// From box coordinates to pixels.
    pub scale: f32,
}
