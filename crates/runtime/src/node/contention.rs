//! How much the node's threads wait for each other.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use base::Nanos;

/// Waits for the node's lock since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contention {
    /// Times somebody else held it.
    pub waits: u64,
    /// All waits together.
    pub waited: Nanos,
    /// The longest.
    pub longest: Nanos,
}

#[derive(Debug, Default)]
pub(super) struct Waits {
    waits: AtomicU64,
    waited: AtomicU64,
    longest: AtomicU64,
}

impl Waits {
    pub(super) fn count(&self, span: Nanos) {
        self.waits.fetch_add(1, Relaxed);
        self.waited.fetch_add(span.0, Relaxed);
        self.longest.fetch_max(span.0, Relaxed);
    }

    pub(super) fn read(&self) -> Contention {
        Contention {
            waits: self.waits.load(Relaxed),
            waited: Nanos(self.waited.load(Relaxed)),
            longest: Nanos(self.longest.load(Relaxed)),
        }
    }
}
