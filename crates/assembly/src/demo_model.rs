//! The model that is built into the binary: handwritten digits, 8 x 8 pixels.

/// Its ONNX file.
pub const DIGITS_ONNX: &[u8] = include_bytes!("../../../assets/digits.onnx");
