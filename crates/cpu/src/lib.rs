//! The CPU device: a plan's steps on rten's kernels and many of our own, one step after another. Work is left
//! between two steps or, where a kernel looks, inside one: its threads stand still there until it goes on.

mod buffer_pool;
mod crew;
mod device;
mod evaluate;
mod kernel;
mod line;
mod program;
mod queue;
mod spare;
mod standing;
mod value;
mod watch;

pub use device::{CpuDevice, CpuOptions, Leaves};
pub use evaluate::evaluate;
