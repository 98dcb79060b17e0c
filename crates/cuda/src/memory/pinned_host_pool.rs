//! The pinned host pool: request bodies are read into it, and the device copies from it.
//!
//! It is allocated once, before requests arrive, because the allocation takes milliseconds and
//! blocks other driver calls. A request that finds the pool full uses ordinary memory, and its
//! inputs are copied once more.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use model::{HostPool, HostPoolBuffer};

use crate::driver::{Context, PinnedBuffer};
use crate::error::CudaError;

/// Size of the pool.
const POOL_BYTES: usize = 128 << 20;

/// Buffers begin and end at multiples of this, so that no two share a cache line.
const ALIGNMENT: usize = 256;

/// The pool of one device.
pub(crate) struct PinnedHostPool {
    pool: Arc<PoolMemory>,
}

struct PoolMemory {
    memory: PinnedBuffer,
    free: Mutex<FreeRanges>,
}

impl PinnedHostPool {
    pub(crate) fn new(context: &Arc<Context>) -> Result<PinnedHostPool, CudaError> {
        let memory = PinnedBuffer::zeroed(context, POOL_BYTES)?;
        let free = Mutex::new(FreeRanges::of(POOL_BYTES));
        Ok(PinnedHostPool { pool: Arc::new(PoolMemory { memory, free }) })
    }

    /// Whether `bytes` are in this pool.
    pub(crate) fn contains(&self, bytes: &[u8]) -> bool {
        let (first, all) = (bytes.as_ptr() as usize, self.pool.memory.as_ptr() as usize);
        first >= all && first + bytes.len() <= all + self.pool.memory.len()
    }
}

impl HostPool for PinnedHostPool {
    fn allocate(&self, bytes: usize) -> Option<Box<dyn HostPoolBuffer>> {
        let first = self.pool.free().take(bytes.checked_next_multiple_of(ALIGNMENT)?)?;
        Some(Box::new(HostPoolSlice { pool: self.pool.clone(), range: first..first + bytes }))
    }
}

impl PoolMemory {
    fn free(&self) -> MutexGuard<'_, FreeRanges> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One buffer of the pool.
struct HostPoolSlice {
    pool: Arc<PoolMemory>,
    range: Range<usize>,
}

impl AsRef<[u8]> for HostPoolSlice {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: inside the pool, which is initialised; no other buffer overlaps while this lives,
        // and the device only reads it.
        unsafe {
            let first = self.pool.memory.as_ptr().add(self.range.start);
            std::slice::from_raw_parts(first, self.range.len())
        }
    }
}

impl AsMut<[u8]> for HostPoolSlice {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; a copy of dropped inputs may still read it, and its result is not used.
        unsafe {
            let first = self.pool.memory.as_ptr().add(self.range.start);
            std::slice::from_raw_parts_mut(first, self.range.len())
        }
    }
}

impl Drop for HostPoolSlice {
    fn drop(&mut self) {
        let bytes = self.range.len().next_multiple_of(ALIGNMENT);
        self.pool.free().give(self.range.start, bytes);
    }
}

/// The free parts of a range of numbers from zero.
struct FreeRanges {
    /// Lengths of the free parts by their begin; no two are adjacent.
    free: BTreeMap<usize, usize>,
}

impl FreeRanges {
    fn of(length: usize) -> FreeRanges {
        FreeRanges { free: BTreeMap::from([(0, length)]) }
    }

    /// The first free part of `length`: what was used last is at the front and may still be cached.
    fn take(&mut self, length: usize) -> Option<usize> {
        let (&first, &found) = self.free.iter().find(|(_, found)| **found >= length.max(1))?;
        self.free.remove(&first);
        if found > length {
            self.free.insert(first + length, found - length);
        }
        Some(first)
    }

    fn give(&mut self, mut first: usize, mut length: usize) {
        if let Some((&before, &free)) = self.free.range(..first).next_back()
            && before + free == first
        {
            (first, length) = (before, free + length);
        }
        if let Some(behind) = self.free.remove(&(first + length)) {
            length += behind;
        }
        if length > 0 {
            self.free.insert(first, length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_ranges_are_merged() {
        let mut ranges = FreeRanges::of(100);
        assert_eq!([40, 40, 20].map(|length| ranges.take(length)), [Some(0), Some(40), Some(80)]);
        assert_eq!(ranges.take(1), None, "the pool is full");
        ranges.give(0, 40);
        ranges.give(80, 20);
        assert_eq!(ranges.take(50), None, "no fifty in a row");
        ranges.give(40, 40);
        assert_eq!(ranges.take(100), Some(0));
    }

    #[test]
    fn ranges_never_overlap_and_none_is_lost() {
        let mut random = base::Random::new(9);
        let (mut ranges, mut held) = (FreeRanges::of(1 << 16), Vec::new());
        for _ in 0..20_000 {
            let length = 1 + random.below(4000) as usize;
            if random.below(2) == 0 && !held.is_empty() {
                let (first, length) = held.swap_remove(random.below(held.len() as u64) as usize);
                ranges.give(first, length);
            } else if let Some(first) = ranges.take(length) {
                let apart = |(other, count): &(usize, usize)| {
                    first + length <= *other || other + count <= first
                };
                assert!(first + length <= 1 << 16 && held.iter().all(apart));
                held.push((first, length));
            }
            let used: usize = held.iter().map(|(_, length)| length).sum();
            assert_eq!(used + ranges.free.values().sum::<usize>(), 1 << 16);
        }
        held.into_iter().for_each(|(first, length)| ranges.give(first, length));
        assert_eq!(ranges.free, BTreeMap::from([(0, 1 << 16)]));
    }
}
