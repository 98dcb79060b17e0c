//! Weights packed together: fixed device addresses, a pinned host copy, and physical memory behind
//! the addresses while resident.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::driver::{AddressRange, BLOCK, Context, PinnedBlocks};
use crate::error::CudaError;
use crate::preempt::rt_activity::RtActivity;

/// How long pinning or unpinning a block waits for a gap in RT activity.
const GAP_WAIT: Duration = Duration::from_millis(5);

/// Time between two blocks that are unpinned, so that other threads get into the driver.
const UNPIN_INTERVAL: Duration = Duration::from_micros(50);

/// The weights that one plan added to its program.
pub(crate) struct Slab {
    pub(crate) range: AddressRange,
    /// Position in the order of arrival, over all slabs of the program.
    pub(crate) begins: u64,
    /// Bytes in use; the range is rounded up to the granularity.
    pub(crate) used: u64,
    host: Mutex<Option<PinnedBlocks>>,
    rt_activity: Arc<RtActivity>,
}

impl Slab {
    /// A slab of `used` bytes.
    pub(crate) fn new(
        context: &Arc<Context>,
        rt_activity: &Arc<RtActivity>,
        begins: u64,
        used: u64,
        granularity: u64,
    ) -> Result<Slab, CudaError> {
        let range = AddressRange::reserve(context, used.max(1).next_multiple_of(granularity))?;
        let wait = || {
            rt_activity.wait_for_gap(GAP_WAIT);
        };
        let host = Mutex::new(Some(PinnedBlocks::new(context, used as usize, wait)?));
        Ok(Slab { range, begins, used, host, rt_activity: rt_activity.clone() })
    }

    fn host(&self) -> MutexGuard<'_, Option<PinnedBlocks>> {
        self.host.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes `data` at offset `at` of the host copy, if there is one. No copy of it may be in
    /// flight.
    pub(crate) fn write(&self, at: u64, data: &[u8]) {
        if let Some(host) = &mut *self.host() {
            host.write(at as usize, data);
        }
    }

    /// Sources and targets of a copy of `bytes` at `at`: host address, size and device address,
    /// none across a block border. Valid as long as the slab and its host copy.
    pub(crate) fn sources(&self, at: u64, bytes: u64) -> Vec<(*const u8, u64, u64)> {
        let host = self.host();
        let Some(host) = host.as_ref() else { return Vec::new() };
        let address = self.range.address();
        let source = |(at, bytes)| Some((host.address(at as usize)?, bytes, address + at));
        pieces(at, bytes).filter_map(source).collect()
    }

    /// Frees the host copy. No copy of it may be in flight.
    pub(crate) fn release_host_copy(&self) {
        let host = self.host().take();
        if let Some(host) = host {
            host.release(|| {
                std::thread::sleep(UNPIN_INTERVAL);
                self.rt_activity.wait_for_gap(GAP_WAIT);
            });
        }
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        self.release_host_copy();
    }
}

/// Offsets and sizes of the pieces of `bytes` at `at`, none across a block border.
fn pieces(at: u64, bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let (mut at, end, block) = (at, at + bytes, BLOCK as u64);
    std::iter::from_fn(move || {
        let piece = (at, (end - at).min(block - at % block));
        at += piece.1;
        (piece.1 > 0).then_some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_do_not_cross_block_borders() {
        let block = BLOCK as u64;
        let all: Vec<_> = pieces(block - 10, block + 30).collect();
        assert_eq!(all, [(block - 10, 10), (block, block), (2 * block, 20)]);
        assert_eq!(pieces(5, 0).count(), 0);
        assert_eq!(pieces(block, 1).collect::<Vec<_>>(), [(block, 1)]);
    }
}
