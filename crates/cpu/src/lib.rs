//! The CPU device: a plan's steps on rten's kernels and a few of our own, one step after another, so
//! that work can be left between any two of them.

mod device;
mod evaluate;
mod kernel;
mod program;
mod queue;
mod spare;
mod value;

pub use device::{CpuDevice, CpuOptions};
pub use evaluate::evaluate;
