//! Kernels: from CUDA C++ text to functions on the device.
//!
//! `kernel_text` writes the text of a module, `nvrtc` compiles it, `cubin_cache` keeps the result
//! on disk and `kernel_cache` on the device. `kernel_library` is a file of kernels that were
//! compiled ahead (by `crate::library_builder`), and `kernel_sources` decides where a cubin comes
//! from. `tuning` selects the variants that are launched.

pub(crate) mod cubin_cache;
pub(crate) mod kernel_cache;
pub(crate) mod kernel_library;
pub(crate) mod kernel_sources;
pub(crate) mod kernel_text;
pub(crate) mod nvrtc;
mod service;
pub(crate) mod toolkit;
pub(crate) mod tuning;

pub(crate) use service::CompileService;
