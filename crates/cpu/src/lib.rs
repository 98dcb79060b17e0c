//! The CPU device: runs a plan's steps one after another on vectorized kernels.
//!
//! Work is preempted between two steps or, at a yield point of a kernel, inside one. The threads of
//! a task that is preempted inside a step park there until the task resumes.

mod bound_plan;
mod buffer;
mod buffer_pool;
mod byte_steps;
mod channel_blocks;
mod dequantized_weights;
mod device;
mod device_state;
mod evaluate;
mod kernel;
mod machine_probe;
mod program;
mod queue;
mod run_queue;
mod spare_buffers;
mod step_work;
mod string_contents;
mod suspended_task;
mod value;
mod wide_numbers;
mod worker_pool;
mod yield_point;

pub use device::{CpuDevice, CpuOptions, PreemptionCounts};
pub use evaluate::evaluate;
