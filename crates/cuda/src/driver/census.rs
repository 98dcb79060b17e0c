//! How many of the driver's objects we hold, and what they take.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Kinds of what is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Held {
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
    Piece,
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
pub(crate) struct Census {
    counts: [Count; KINDS],
    /// The most bytes a thread of any kernel spills: the driver keeps room for all threads at once.
    local_bytes: AtomicU32,
}

impl Census {
    /// Counts one more until what is returned is dropped.
    pub(crate) fn count(self: &Arc<Census>, held: Held, bytes: u64) -> Counted {
        let count = &self.counts[held as usize];
        count.number.fetch_add(1, Ordering::Relaxed);
        count.bytes.fetch_add(bytes, Ordering::Relaxed);
        Counted { census: self.clone(), held, bytes }
    }

    /// How many there are, and their bytes.
    pub(crate) fn read(&self, held: Held) -> (u64, u64) {
        let count = &self.counts[held as usize];
        (count.number.load(Ordering::Relaxed), count.bytes.load(Ordering::Relaxed))
    }

    pub(super) fn note_local(&self, bytes: u32) {
        self.local_bytes.fetch_max(bytes, Ordering::Relaxed);
    }

    /// The most bytes a thread of any kernel that was ever loaded spills.
    pub(crate) fn local_bytes(&self) -> u32 {
        self.local_bytes.load(Ordering::Relaxed)
    }
}

/// Something that is counted for as long as this lives.
#[derive(Debug)]
pub(crate) struct Counted {
    census: Arc<Census>,
    held: Held,
    bytes: u64,
}

impl Drop for Counted {
    fn drop(&mut self) {
        let count = &self.census.counts[self.held as usize];
        count.number.fetch_sub(1, Ordering::Relaxed);
        count.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_is_counted_while_it_lives() {
        let census = Arc::new(Census::default());
        let graphs: Vec<Counted> = (0..3).map(|_| census.count(Held::Graph, 0)).collect();
        let slab = census.count(Held::PinnedSlab, 100);
        assert_eq!((census.read(Held::Graph), census.read(Held::PinnedSlab)), ((3, 0), (1, 100)));
        drop((graphs, slab));
        for held in [Held::Module, Held::Graph, Held::PinnedSlab] {
            assert_eq!(census.read(held), (0, 0));
        }
    }
}
