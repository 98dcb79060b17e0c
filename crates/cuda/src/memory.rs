//! Memory: weights, inputs that wait for their batch, pinned host memory.

pub(crate) mod input_copier;
pub(crate) mod input_pool;
pub(crate) mod memory_report;
pub(crate) mod pinned_host_pool;
pub(crate) mod weights;
