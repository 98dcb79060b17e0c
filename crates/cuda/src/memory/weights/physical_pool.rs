//! Physical device memory, kept for the next weights.
//!
//! The driver clears new memory, and other work on the device takes longer meanwhile (ADR 90). So
//! memory of models that were evicted or removed is kept for the next one. Sizes of allocations are
//! powers of two up to [`PIECE_BYTES`]: those of one model are then what another needs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::driver::{Context, PhysicalMemory};
use crate::error::CudaError;

/// The largest allocation. Copies begin when the first one is mapped, and the device is not busy
/// with clearing much at once.
const PIECE_BYTES: u64 = 32 << 20;

/// Allocations for one slab beyond one per [`PIECE_BYTES`], at most: each is a call more to map and
/// to unmap, which costs more than a new allocation if there are many.
const MAX_MORE_PIECES: u64 = 8;

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
    /// Of allocations.
    granularity: u64,
    /// Smallest first.
    free: Vec<PhysicalMemory>,
    counts: Arc<WeightMemoryCounts>,
    /// Bytes that are kept where nobody needs the memory.
    max_kept: u64,
}

/// Which of the `kept` sizes, smallest first, are combined for `bytes`: large ones as long as they
/// fit. Returns positions from last to first, and the bytes still missing.
fn choose(kept: &[u64], bytes: u64) -> (Vec<usize>, u64) {
    let most = bytes / PIECE_BYTES + MAX_MORE_PIECES;
    let (mut chosen, mut missing) = (Vec::new(), bytes);
    for (at, size) in kept.iter().enumerate().rev() {
        if *size <= missing && (chosen.len() as u64) < most {
            chosen.push(at);
            missing -= size;
        }
    }
    (chosen, missing)
}

/// Sizes of new allocations for `bytes`, a multiple of `granularity`: the largest first, then
/// powers of two.
fn new_sizes(bytes: u64, granularity: u64) -> impl Iterator<Item = u64> {
    let mut missing = bytes;
    let mut size = PIECE_BYTES.max(granularity);
    std::iter::from_fn(move || {
        while size > missing && size > granularity {
            size = (size / 2).max(granularity);
        }
        let next = size.min(missing);
        missing -= next;
        (next > 0).then_some(next)
    })
}

impl PhysicalMemoryPool {
    pub(crate) fn new(
        context: Arc<Context>,
        counts: Arc<WeightMemoryCounts>,
        granularity: u64,
        max_kept: u64,
    ) -> PhysicalMemoryPool {
        PhysicalMemoryPool { context, granularity, free: Vec::new(), counts, max_kept }
    }

    fn kept(&self) -> u64 {
        self.free.iter().map(PhysicalMemory::bytes).sum()
    }

    fn count(&self) {
        self.counts.kept.store(self.kept(), Ordering::Relaxed);
    }

    /// Memory of `bytes`, a multiple of the granularity. `unmap` is called before kept allocations
    /// are released, because the driver frees none that is mapped. That happens where more is kept
    /// than may be, or new memory was refused.
    pub(crate) fn take(
        &mut self,
        bytes: u64,
        unmap: &mut dyn FnMut() -> Result<(), CudaError>,
    ) -> Result<Vec<PhysicalMemory>, CudaError> {
        let kept: Vec<u64> = self.free.iter().map(PhysicalMemory::bytes).collect();
        let (chosen, missing) = choose(&kept, bytes);
        let mut pieces: Vec<PhysicalMemory> =
            chosen.into_iter().map(|at| self.free.remove(at)).collect();
        if let Err(err) = self.extend(&mut pieces, missing, unmap) {
            self.keep(pieces);
            return Err(err);
        }
        let used = self.counts.used.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.counts.peak_used.fetch_max(used, Ordering::Relaxed);
        self.count();
        Ok(pieces)
    }

    /// Adds new allocations of `missing` bytes.
    fn extend(
        &mut self,
        pieces: &mut Vec<PhysicalMemory>,
        missing: u64,
        unmap: &mut dyn FnMut() -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        if missing == 0 {
            return Ok(());
        }
        self.release_beyond(self.max_kept, unmap)?;
        for size in new_sizes(missing, self.granularity) {
            let piece = match PhysicalMemory::new(&self.context, size) {
                Err(CudaError::OutOfMemory { .. }) if !self.free.is_empty() => {
                    self.release_beyond(0, unmap)?;
                    PhysicalMemory::new(&self.context, size)
                }
                made => made,
            };
            pieces.push(piece?);
        }
        Ok(())
    }

    /// Returns kept allocations to the driver, the largest first, until at most `limit` bytes are
    /// kept. `unmap` is called before the first.
    pub(crate) fn release_beyond(
        &mut self,
        limit: u64,
        unmap: &mut dyn FnMut() -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let mut kept = self.kept();
        if kept > limit {
            unmap()?;
        }
        while kept > limit
            && let Some(piece) = self.free.pop()
        {
            kept -= piece.bytes();
        }
        self.count();
        Ok(())
    }

    /// Bytes that are kept where nobody needs the memory.
    pub(crate) fn max_kept(&self) -> u64 {
        self.max_kept
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::Random;

    const MIB: u64 = 1 << 20;

    #[test]
    fn combines_large_ones_first() {
        assert_eq!(choose(&[2, 10, 50, 50, 60], 50), (vec![3], 0));
        assert_eq!(choose(&[], 50), (vec![], 50));
        assert_eq!(choose(&[60], 50), (vec![], 50), "larger ones are of no use");
    }

    #[test]
    fn chosen_allocations_fit_and_are_few() {
        let mut random = Random::new(3);
        for _ in 0..1000 {
            let mut kept: Vec<u64> =
                (0..random.below(20)).map(|_| (2 + random.below(40)) * MIB).collect();
            kept.sort_unstable();
            let bytes = (1 + random.below(200)) * MIB;
            let (chosen, missing) = choose(&kept, bytes);
            let sum: u64 = chosen.iter().map(|at| kept[*at]).sum();
            assert_eq!(sum + missing, bytes);
            assert!(chosen.len() as u64 <= bytes / PIECE_BYTES + MAX_MORE_PIECES);
            assert!(chosen.is_sorted_by(|a, b| a > b));
        }
    }

    #[test]
    fn new_allocations_have_exactly_the_missing_bytes_and_few_sizes() {
        let mut random = Random::new(5);
        for granularity in [2 * MIB, 64 << 10, 64 * MIB] {
            for _ in 0..300 {
                let bytes = random.below(600) * granularity;
                let sizes: Vec<u64> = new_sizes(bytes, granularity).collect();
                assert_eq!(sizes.iter().sum::<u64>(), bytes);
                let largest = PIECE_BYTES.max(granularity);
                for size in &sizes {
                    assert!(*size <= largest && size.is_multiple_of(granularity));
                    assert!((size / granularity).is_power_of_two(), "{size} of {bytes}");
                }
                assert!(sizes.len() as u64 <= bytes / largest + 10);
            }
        }
    }

    #[test]
    fn what_one_model_leaves_serves_others_of_its_size_or_less() {
        let mut random = Random::new(7);
        for _ in 0..1000 {
            let bytes = (1 + random.below(300)) * 2 * MIB;
            let mut kept: Vec<u64> = new_sizes(bytes, 2 * MIB).collect();
            kept.sort_unstable();
            assert_eq!(choose(&kept, bytes).1, 0, "all of it again");
            let smaller = (1 + random.below(bytes / (2 * MIB))) * 2 * MIB;
            assert!(choose(&kept, smaller).1 < PIECE_BYTES, "new memory for less than one piece");
        }
    }
}
