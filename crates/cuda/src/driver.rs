//! Objects of the CUDA driver with their lifetimes. Every call's result code is checked.

mod call;
pub(crate) mod call_thread;
mod context;
mod device_buffer;
mod event;
mod facts;
mod gpu_use;
mod graph;
mod module;
pub(crate) mod nvml;
mod pinned;
mod pinned_blocks;
mod pinned_pool;
pub(crate) mod process;
mod resource_counts;
pub(crate) mod slow_calls;
mod sm_partition;
mod stream;
mod tensor_map;
mod transfer;
mod virtual_memory;
pub(crate) mod xid;

pub use context::is_refused;
pub(crate) use context::{Context, was_opened};
pub(crate) use device_buffer::DeviceBuffer;
pub(crate) use event::Event;
pub(crate) use facts::DriverFacts;
pub(crate) use graph::Graph;
pub(crate) use module::{Function, Module};
pub(crate) use pinned::{PinnedBuffer, PinnedWord, is_reached};
pub(crate) use pinned_blocks::{BLOCK, PinnedBlocks};
pub(crate) use resource_counts::{CountedResource, ResourceKind};
pub(crate) use sm_partition::SmPartition;
pub(crate) use stream::{LaunchShape, Priority, Stream};
pub(crate) use tensor_map::encode_map;
pub(crate) use virtual_memory::{AddressRange, PhysicalMemory, granularity};
