//! Operators whose window slides over the spatial dimensions: convolutions and pooling.

use serde::{Deserialize, Serialize};

use super::Activation;

/// How the padding of a windowed operator is determined.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Padding {
    /// All begins, then all ends. Empty means none.
    Explicit(Vec<usize>),
    /// So that the output is `ceil(input / stride)`; an odd element is added at the end.
    SameUpper,
    /// So that the output is `ceil(input / stride)`; an odd element is added at the beginning.
    SameLower,
}

/// A window that slides over the spatial dimensions. Empty strides or dilations mean ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// Extent; empty where the weight's shape gives it.
    pub kernel: Vec<usize>,
    /// Step per dimension.
    pub strides: Vec<usize>,
    /// Distance of the taps per dimension.
    pub dilations: Vec<usize>,
    /// Padding.
    pub padding: Padding,
}

/// A convolution with the operators fused into it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Conv {
    /// Geometry.
    pub window: Window,
    /// Channel groups; as many as channels is depthwise.
    pub groups: usize,
    /// Applied last, after bias and residual.
    pub activation: Activation,
}

/// A transposed convolution.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConvTranspose {
    /// Geometry.
    pub window: Window,
    /// Channel groups.
    pub groups: usize,
    /// Extra extent at the end per dimension; empty means none.
    pub output_padding: Vec<usize>,
    /// Spatial extent of the output; when given, it determines the padding.
    pub output_shape: Option<Vec<usize>>,
}

/// What a pooling window computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PoolKind {
    /// The largest element.
    Max,
    /// The largest element and its index in the flattened input.
    MaxWithIndices {
        /// Indices count column-major in the spatial dimensions.
        column_major: bool,
    },
    /// The mean.
    Average {
        /// The padding counts as zeros.
        count_include_pad: bool,
    },
    /// The `p`-norm.
    Lp {
        /// The norm's order.
        p: u32,
    },
}

/// Pooling over windows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pool {
    /// What is computed.
    pub kind: PoolKind,
    /// Geometry.
    pub window: Window,
    /// Round the output extent up.
    pub ceil_mode: bool,
}

/// Pooling over everything but batch and channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // Each is the ONNX operator of the same name.
pub enum GlobalPool {
    Average,
    Max,
    Lp { p: u32 },
}
