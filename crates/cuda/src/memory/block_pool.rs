//! Device memory of runs, reused across specializations.
//!
//! Sizes that requests bring need memory of other sizes each. The driver's pool would map new
//! memory for most of them, which takes tens of milliseconds.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::driver::{DeviceBuffer, Stream};
use crate::error::CudaError;
use crate::memory::SpareOwner;

/// Free blocks that are kept, in bytes.
const MAX_SPARE_BYTES: u64 = 512 << 20;

/// The smallest block.
const MIN_BLOCK: u64 = 64 << 10;

/// Free blocks of one device.
pub(crate) struct BlockPool {
    stream: Arc<Stream>,
    spare: Mutex<SpareBlocks>,
}

#[derive(Default)]
struct SpareBlocks {
    by_size: BTreeMap<u64, Vec<DeviceBuffer>>,
    bytes: u64,
}

/// Memory of one run; goes back to its pool.
pub(crate) struct Block {
    buffer: Option<DeviceBuffer>,
    address: u64,
    size: u64,
    pool: Arc<BlockPool>,
}

impl BlockPool {
    pub(crate) fn new(stream: Arc<Stream>) -> BlockPool {
        BlockPool { stream, spare: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, SpareBlocks> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// At least `bytes`, all zero.
    pub(crate) fn take(self: &Arc<BlockPool>, bytes: u64) -> Result<Block, CudaError> {
        let size = block_size(bytes);
        let spare = self.lock().take(size);
        let (size, buffer) = match spare {
            Some((size, buffer)) => (size, buffer.recleared()?),
            None => (size, DeviceBuffer::zeroed(&self.stream, size)?),
        };
        let (address, pool) = (buffer.address(), self.clone());
        Ok(Block { buffer: Some(buffer), address, size, pool })
    }
}

impl SpareBlocks {
    /// A free block of `size` or up to twice that.
    fn take(&mut self, size: u64) -> Option<(u64, DeviceBuffer)> {
        let mut sizes = self.by_size.range_mut(size..=size.saturating_mul(2));
        let (size, buffer) = sizes.find_map(|(size, spare)| Some((*size, spare.pop()?)))?;
        self.bytes -= size;
        Some((size, buffer))
    }
}

impl SpareOwner for BlockPool {
    fn drop_spares(&self) -> bool {
        let SpareBlocks { by_size, bytes } = std::mem::take(&mut *self.lock());
        drop(by_size);
        bytes > 0
    }
}

impl Block {
    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take() else { return };
        let mut spare = self.pool.lock();
        if spare.bytes + self.size <= MAX_SPARE_BYTES {
            spare.bytes += self.size;
            spare.by_size.entry(self.size).or_default().push(buffer);
        }
    }
}

/// The size of the block for `bytes`: four sizes per power of two.
fn block_size(bytes: u64) -> u64 {
    let bytes = bytes.max(MIN_BLOCK);
    let step = (bytes.next_power_of_two() / 8).max(MIN_BLOCK);
    bytes.next_multiple_of(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_fit_and_waste_little() {
        for bytes in [0, 1, 65_536, 65_537, 5_000_000, 100 << 20, 100_000_001] {
            let size = block_size(bytes);
            assert!(size >= bytes, "{size} for {bytes}");
            assert!(size <= (bytes + bytes / 4).max(2 * MIN_BLOCK), "{size} for {bytes}");
            assert_eq!(block_size(size), size, "a block is of its own size");
        }
    }
}
