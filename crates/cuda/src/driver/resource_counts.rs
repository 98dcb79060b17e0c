//! How many of the driver's objects we hold, and what they take.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Kinds of what is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResourceKind {
    /// Compiled kernels; bytes of their images.
    Module,
    /// Executable graphs.
    Graph,
    /// Buffers from the device's pool.
    Buffer,
    /// Buffers outside of the pool.
    FixedBuffer,
    /// Memory of runs, which lies in buffers.
    Instance,
    /// Places where inputs wait, which lie in buffers.
    InputPool,
    /// Memory under weights, in use or kept.
    PhysicalMemory,
    /// Addresses of weights, whether or not memory is behind them.
    Range,
    /// Host memory that was asked for in one piece.
    Pinned,
    /// Host memory that smaller buffers are cut from.
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
    /// The most bytes a thread of any kernel spills: the driver keeps room for all threads at once.
    local_bytes: AtomicU32,
}

impl ResourceCounts {
    /// Counts one more until what is returned is dropped.
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

    /// How many there are, and their bytes.
    pub(crate) fn read(&self, held: ResourceKind) -> (u64, u64) {
        let count = &self.counts[held as usize];
        (count.number.load(Ordering::Relaxed), count.bytes.load(Ordering::Relaxed))
    }

    pub(super) fn record_local_bytes(&self, bytes: u32) {
        self.local_bytes.fetch_max(bytes, Ordering::Relaxed);
    }

    /// The most bytes a thread of any kernel that was ever loaded spills.
    pub(crate) fn local_bytes(&self) -> u32 {
        self.local_bytes.load(Ordering::Relaxed)
    }
}

/// Something that is counted for as long as this lives.
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
    fn what_is_counted_is_counted_while_it_lives() {
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
