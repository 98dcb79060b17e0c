//! Counts of driver objects held by this process, and their bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A kind of resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResourceKind {
    /// Compiled kernels; bytes of their images.
    Module,
    /// Executable graphs.
    Graph,
    /// Buffers from the memory pool.
    Buffer,
    /// Buffers outside of the memory pool.
    FixedBuffer,
    /// Memory of runs, which is in buffers.
    Instance,
    /// Input pools, which are in buffers.
    InputPool,
    /// Physical memory of weights, in use or kept.
    PhysicalMemory,
    /// Address ranges of weights, with or without memory mapped.
    Range,
    /// Pinned host memory in separate allocations.
    Pinned,
    /// Pinned host memory that small buffers are cut from.
    PinnedSlab,
}

const KINDS: usize = 10;

#[derive(Debug, Default)]
struct Count {
    number: AtomicU64,
    bytes: AtomicU64,
}

/// The counts of one context.
#[derive(Debug, Default)]
pub(crate) struct ResourceCounts {
    counts: [Count; KINDS],
    /// The maximum of bytes that a thread of any kernel spills: the driver reserves memory for all
    /// threads.
    local_bytes: AtomicU32,
}

impl ResourceCounts {
    /// Counts one more until the result is dropped.
    pub(crate) fn count(
        self: &Arc<ResourceCounts>,
        held: ResourceKind,
        bytes: u64,
    ) -> CountedResource {
        let count = &self.counts[held as usize];
        count.number.fetch_add(1, Ordering::Relaxed);
        count.bytes.fetch_add(bytes, Ordering::Relaxed);
        CountedResource { resource_counts: self.clone(), held, bytes }
    }

    /// Number and bytes of a kind.
    pub(crate) fn read(&self, held: ResourceKind) -> (u64, u64) {
        let count = &self.counts[held as usize];
        (count.number.load(Ordering::Relaxed), count.bytes.load(Ordering::Relaxed))
    }

    pub(super) fn record_local_bytes(&self, bytes: u32) {
        self.local_bytes.fetch_max(bytes, Ordering::Relaxed);
    }

    /// The maximum of bytes that a thread of any kernel ever loaded spills.
    pub(crate) fn local_bytes(&self) -> u32 {
        self.local_bytes.load(Ordering::Relaxed)
    }
}

/// A resource that is counted while this lives.
#[derive(Debug)]
pub(crate) struct CountedResource {
    resource_counts: Arc<ResourceCounts>,
    held: ResourceKind,
    bytes: u64,
}

impl Drop for CountedResource {
    fn drop(&mut self) {
        let count = &self.resource_counts.counts[self.held as usize];
        count.number.fetch_sub(1, Ordering::Relaxed);
        count.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_are_counted_while_they_live() {
        let resource_counts = Arc::new(ResourceCounts::default());
        let graphs: Vec<CountedResource> =
            (0..3).map(|_| resource_counts.count(ResourceKind::Graph, 0)).collect();
        let slab = resource_counts.count(ResourceKind::PinnedSlab, 100);
        assert_eq!(
            (
                resource_counts.read(ResourceKind::Graph),
                resource_counts.read(ResourceKind::PinnedSlab)
            ),
            ((3, 0), (1, 100))
        );
        drop((graphs, slab));
        for held in [ResourceKind::Module, ResourceKind::Graph, ResourceKind::PinnedSlab] {
            assert_eq!(resource_counts.read(held), (0, 0));
        }
    }
}
