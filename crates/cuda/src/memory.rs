//! Memory of a device: weights, inputs that wait for their batch, pinned host memory.
//!
//! Weights are evicted in `weights::loader`.

mod block_pool;
pub(crate) mod input_copier;
pub(crate) mod input_pool;
mod input_writer;
pub(crate) mod memory_report;
pub(crate) mod pinned_host_pool;
mod services;
mod spare_memory;
pub(crate) mod weights;

pub(crate) use block_pool::Block;
pub(crate) use input_writer::write_inputs;
pub(crate) use services::MemoryServices;
pub(crate) use spare_memory::{SpareMemory, SpareOwner};
