//! Small buffers of pinned host memory, cut from large allocations.
//!
//! An allocation of pinned memory blocks every other driver call, for half a millisecond a MiB, so
//! the pool makes few of them, and none is large. Buffers are pieces of that, and a freed piece
//! waits for the next request of its size.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;

use super::resource_counts::CountedResource;
use super::slow_calls;
use crate::error::CudaError;

/// Bytes of one allocation.
const SLAB_BYTES: usize = 4 << 20;

/// Larger buffers are allocations of their own.
pub(super) const MAX_PIECE: usize = SLAB_BYTES;

/// Such allocations that are kept for the next buffer, in bytes.
const MAX_SPARE_BYTES: usize = 1 << 30;

/// The smallest piece, so that no two share a cache line.
const MIN_PIECE: usize = 256;

/// Pinned memory of a context.
#[derive(Default)]
pub(crate) struct PinnedPool {
    state: Mutex<PoolState>,
    /// Held while the driver is asked for memory, in place of the state: a thread that finds a
    /// piece must not wait for that.
    growing: Mutex<()>,
}

#[derive(Default)]
struct PoolState {
    slabs: Vec<(Address, CountedResource)>,
    /// Bytes of the last slab that were never handed out.
    left: usize,
    /// Free pieces, by size.
    free: BTreeMap<usize, Vec<Address>>,
    /// Free allocations that are larger than a piece, by size.
    large: BTreeMap<usize, Vec<(Address, CountedResource)>>,
    large_bytes: usize,
}

#[derive(Clone, Copy)]
struct Address(*mut u8);

// SAFETY: an address of memory that the pool owns; who got it handed out is its only user.
unsafe impl Send for Address {}

impl PoolState {
    /// A free piece of `size`, or one of the last slab.
    fn take(&mut self, size: usize) -> Option<*mut u8> {
        if let Some(piece) = self.free.get_mut(&size).and_then(Vec::pop) {
            return Some(piece.0);
        }
        let (slab, _) = self.slabs.last().filter(|_| self.left >= size)?;
        // SAFETY: `left` is at most the slab's size, so this is inside it.
        let piece = unsafe { slab.0.add(SLAB_BYTES - self.left) };
        self.left -= size;
        Some(piece)
    }
}

impl PinnedPool {
    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A piece of `size`, which is a result of `piece_size`.
    ///
    /// `allocate` gets memory of a number of bytes from the driver.
    pub(super) fn take(
        &self,
        size: usize,
        allocate: impl FnOnce(usize) -> Result<(*mut u8, CountedResource), CudaError>,
    ) -> Result<*mut u8, CudaError> {
        if let Some(piece) = self.lock().take(size) {
            return Ok(piece);
        }
        let _growing = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have asked meanwhile.
        if let Some(piece) = self.lock().take(size) {
            return Ok(piece);
        }
        let (slab, counted) = allocate(SLAB_BYTES)?;
        let mut state = self.lock();
        state.slabs.push((Address(slab), counted));
        state.left = SLAB_BYTES;
        state.take(size).ok_or(CudaError::Misuse("a piece larger than a slab of the pinned pool"))
    }

    pub(super) fn give(&self, piece: *mut u8, size: usize) {
        self.lock().free.entry(size).or_default().push(Address(piece));
    }

    /// A free allocation of at least `bytes` that is not much larger, and its size.
    pub(super) fn take_large(&self, bytes: usize) -> Option<(*mut u8, usize, CountedResource)> {
        let mut state = self.lock();
        let mut sizes = state.large.range_mut(bytes..=bytes.saturating_mul(2));
        let (size, (address, counted)) =
            sizes.find_map(|(size, spare)| Some((*size, spare.pop()?)))?;
        state.large_bytes -= size;
        Some((address.0, size, counted))
    }

    /// Keeps an allocation for later, or returns it when enough are kept.
    pub(super) fn give_large(
        &self,
        address: *mut u8,
        size: usize,
        counted: CountedResource,
    ) -> Result<(), CountedResource> {
        let mut state = self.lock();
        if state.large_bytes + size > MAX_SPARE_BYTES {
            return Err(counted);
        }
        state.large_bytes += size;
        state.large.entry(size).or_default().push((Address(address), counted));
        Ok(())
    }

    /// Frees everything; no piece is in use any more.
    pub(super) fn release(&self) {
        let PoolState { slabs, large, .. } = std::mem::take(&mut *self.lock());
        for (address, _) in slabs.into_iter().chain(large.into_values().flatten()) {
            free(address.0);
        }
    }
}

/// The size of the piece for `bytes`: four sizes per power of two, so that pieces are reused often
/// and waste little.
pub(super) fn piece_size(bytes: usize) -> usize {
    let bytes = bytes.max(MIN_PIECE);
    let step = (bytes.next_power_of_two() / 8).max(MIN_PIECE);
    bytes.next_multiple_of(step)
}

pub(super) fn free(address: *mut u8) {
    // SAFETY: from `allocate`, and not used after this; the context is the thread's.
    let _ = unsafe { sys::cuMemFreeHost(address.cast()) };
    slow_calls::end("cuMemFreeHost");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_fit_the_request_and_waste_little() {
        for bytes in [1, 64, 256, 257, 5_000, 602_112, 1 << 20, MAX_PIECE] {
            let size = piece_size(bytes);
            assert!(size >= bytes, "{size} for {bytes}");
            assert!(size <= (bytes + bytes / 4).max(2 * MIN_PIECE), "{size} for {bytes}");
            assert_eq!(piece_size(size), size, "a piece is of its own size");
            assert_eq!(size % MIN_PIECE, 0);
        }
    }
}
