//! Kernels: from CUDA C++ text to functions on the device.

pub(crate) mod cubin_cache;
pub(crate) mod kernel_cache;
pub(crate) mod kernel_text;
pub(crate) mod nvrtc;
pub(crate) mod toolkit;
pub(crate) mod tuning;
