//! Resampling: how elements between those of the input are found.

use serde::{Deserialize, Serialize};

/// Interpolation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // Each is the ONNX mode of the same name.
pub enum ResizeMode {
    Nearest,
    Linear,
    Cubic,
}

/// What is read outside a sampled image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // Each is the ONNX mode of the same name.
pub enum GridPadding {
    Zeros,
    Border,
    Reflection,
}

/// Resampling of any dimensions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Resize {
    /// Interpolation.
    pub mode: ResizeMode,
    /// From output to input coordinates.
    pub coordinates: CoordinateMode,
    /// Rounding of `Nearest`.
    pub nearest: NearestMode,
    /// Coefficient of `Cubic`.
    pub cubic_coefficient: f32,
    /// Ignore taps outside the image and rescale the others.
    pub exclude_outside: bool,
    /// What `CropAndResize` reads outside the image.
    pub extrapolation_value: f32,
    /// Widen the filter when shrinking.
    pub antialias: bool,
    /// Dimensions that scales and sizes apply to; all when absent. May be negative.
    pub axes: Option<Vec<i64>>,
    /// How sizes and the aspect ratio are reconciled.
    pub keep_aspect: AspectPolicy,
}

/// ONNX `coordinate_transformation_mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // Each is the ONNX mode of the same name.
pub enum CoordinateMode {
    HalfPixel,
    HalfPixelSymmetric,
    PytorchHalfPixel,
    AlignCorners,
    Asymmetric,
    CropAndResize,
}

/// ONNX `nearest_mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // Each is the ONNX mode of the same name.
pub enum NearestMode {
    RoundPreferFloor,
    RoundPreferCeil,
    Floor,
    Ceil,
}

/// ONNX `keep_aspect_ratio_policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // Each is the ONNX policy of the same name.
pub enum AspectPolicy {
    Stretch,
    NotLarger,
    NotSmaller,
}
