//! Physical device memory, kept after eviction for the next weights.
//!
//! Weights of a model use one allocation where possible: each further one is a call more to map
//! and to unmap, and such calls delay others. Models of other sizes are composed of what is free.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::driver::{Context, PhysicalMemory};
use crate::error::CudaError;

/// Free allocations combined for one slab, at most; more calls cost more than a new allocation.
const MAX_PIECES_PER_SLAB: usize = 6;

/// The largest allocation: copies begin when the first one is mapped.
const MAX_PIECE_BYTES: u64 = 256 << 20;

/// Bytes in use and kept.
#[derive(Default)]
pub(crate) struct WeightMemoryCounts {
    pub(crate) used: AtomicU64,
    /// The maximum of `used`.
    pub(crate) peak_used: AtomicU64,
    pub(crate) kept: AtomicU64,
}

/// Allocations that no weights use.
pub(crate) struct PhysicalMemoryPool {
    context: Arc<Context>,
    /// Smallest first.
    free: Vec<PhysicalMemory>,
    counts: Arc<WeightMemoryCounts>,
}

/// Which of the `kept` sizes, smallest first, are combined for `bytes`: one of that size, or large
/// ones as long as they fit. Returns positions from last to first, and the bytes still missing.
fn choose(kept: &[u64], bytes: u64) -> (Vec<usize>, u64) {
    let (mut chosen, mut missing) = (Vec::new(), bytes);
    for (at, size) in kept.iter().enumerate().rev() {
        if *size <= missing && chosen.len() < MAX_PIECES_PER_SLAB {
            chosen.push(at);
            missing -= size;
        }
    }
    (chosen, missing)
}

/// Sizes of new allocations for `bytes`.
fn new_sizes(bytes: u64) -> impl Iterator<Item = u64> {
    let rest = bytes % MAX_PIECE_BYTES;
    let whole = std::iter::repeat_n(MAX_PIECE_BYTES, (bytes / MAX_PIECE_BYTES) as usize);
    whole.chain((rest > 0).then_some(rest))
}

impl PhysicalMemoryPool {
    pub(crate) fn new(
        context: Arc<Context>,
        counts: Arc<WeightMemoryCounts>,
    ) -> PhysicalMemoryPool {
        PhysicalMemoryPool { context, free: Vec::new(), counts }
    }

    fn count(&self) {
        let kept = self.free.iter().map(PhysicalMemory::bytes).sum();
        self.counts.kept.store(kept, Ordering::Relaxed);
    }

    /// Memory of `bytes`, a multiple of the granularity. `unmap` is called before kept allocations
    /// are released, because the driver frees none that is mapped. Releases kept allocations before
    /// it makes new ones, so that the total does not grow without need.
    pub(crate) fn take(
        &mut self,
        bytes: u64,
        unmap: &mut dyn FnMut() -> Result<(), CudaError>,
    ) -> Result<Vec<PhysicalMemory>, CudaError> {
        let kept: Vec<u64> = self.free.iter().map(PhysicalMemory::bytes).collect();
        let (chosen, missing) = choose(&kept, bytes);
        let mut pieces: Vec<PhysicalMemory> =
            chosen.into_iter().map(|at| self.free.remove(at)).collect();
        if missing > 0 {
            let made = self.release(missing, unmap).and_then(|()| {
                new_sizes(missing)
                    .map(|size| PhysicalMemory::new(&self.context, size))
                    .collect::<Result<Vec<_>, _>>()
            });
            match made {
                Ok(made) => pieces.extend(made),
                Err(err) => {
                    self.keep(pieces);
                    return Err(err);
                }
            }
        }
        let used = self.counts.used.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.counts.peak_used.fetch_max(used, Ordering::Relaxed);
        self.count();
        Ok(pieces)
    }

    /// Returns kept allocations to the driver until that is at least `bytes`, or none remain.
    pub(crate) fn release(
        &mut self,
        bytes: u64,
        unmap: &mut dyn FnMut() -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let mut released = 0;
        while released < bytes {
            let Some(piece) = self.free.pop() else { break };
            if released == 0 {
                unmap()?;
            }
            released += piece.bytes();
        }
        self.count();
        Ok(())
    }

    fn keep(&mut self, pieces: impl IntoIterator<Item = PhysicalMemory>) {
        self.free.extend(pieces);
        self.free.sort_by_key(PhysicalMemory::bytes);
        self.count();
    }

    /// Keeps allocations that are no longer used.
    pub(crate) fn put_back(&mut self, pieces: Vec<PhysicalMemory>) {
        let bytes: u64 = pieces.iter().map(PhysicalMemory::bytes).sum();
        self.counts.used.fetch_sub(bytes, Ordering::Relaxed);
        self.keep(pieces);
    }

    /// Returns allocations that are not mapped to the driver.
    pub(crate) fn discard(&mut self, pieces: Vec<PhysicalMemory>) {
        let bytes: u64 = pieces.iter().map(PhysicalMemory::bytes).sum();
        self.counts.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::Random;

    #[test]
    fn prefers_one_allocation_of_the_same_size() {
        assert_eq!(choose(&[2, 10, 50, 50, 60], 50), (vec![3], 0));
        assert_eq!(choose(&[], 50), (vec![], 50));
        assert_eq!(choose(&[60], 50), (vec![], 50), "larger ones are of no use");
    }

    #[test]
    fn chosen_allocations_fit_and_are_few() {
        let mut random = Random::new(3);
        for _ in 0..1000 {
            let mut kept: Vec<u64> = (0..random.below(20)).map(|_| 2 + random.below(40)).collect();
            kept.sort_unstable();
            let bytes = 1 + random.below(200);
            let (chosen, missing) = choose(&kept, bytes);
            let sum: u64 = chosen.iter().map(|at| kept[*at]).sum();
            assert_eq!(sum + missing, bytes);
            assert!(chosen.len() <= MAX_PIECES_PER_SLAB && chosen.is_sorted_by(|a, b| a > b));
            if kept.contains(&bytes) {
                assert_eq!((chosen.len(), missing), (1, 0));
            }
        }
    }

    #[test]
    fn new_allocations_have_exactly_the_missing_bytes() {
        for bytes in [0, 1, MAX_PIECE_BYTES - 1, MAX_PIECE_BYTES, 5 * MAX_PIECE_BYTES + 7] {
            assert_eq!(new_sizes(bytes).sum::<u64>(), bytes);
            assert!(new_sizes(bytes).all(|size| size > 0 && size <= MAX_PIECE_BYTES));
        }
    }
}
