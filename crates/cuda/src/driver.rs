//! The driver's objects with their lifetimes, and every call's code looked at.

mod census;
mod context;
mod event;
mod graph;
mod memory;
mod module;
mod partition;
mod pinned;
mod pinned_blocks;
mod stream;
mod transfer;
mod virtual_memory;

pub(crate) use census::{Counted, Held};
pub(crate) use context::{Context, DriverFacts, was_opened};
pub(crate) use event::Event;
pub(crate) use graph::Graph;
pub(crate) use memory::DeviceBuffer;
pub(crate) use module::{Function, Module};
pub(crate) use partition::SmPartition;
pub(crate) use pinned::{PinnedBuffer, PinnedWord};
pub(crate) use pinned_blocks::{BLOCK, PinnedBlocks};
pub(crate) use stream::{LaunchShape, Priority, Stream};
pub(crate) use virtual_memory::{AddressRange, Piece, granularity};
