//! ONNX in, a small typed IR of our own out, and the passes over it. No word of any device.
