//! Pinned host memory in blocks, which are used again.
//!
//! A call that pins memory blocks calls of other threads for its whole duration, and waits itself
//! for every thread that maps or unmaps memory. So memory is pinned block by block, on pages that
//! exist already, and a freed block stays pinned for the next one who needs it. For copies only: a
//! kernel may need another address.

use std::alloc::Layout;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;

use super::Context;
use super::call_thread::at_normal_priority;
use super::gpu_use::Leftover;
use super::resource_counts::{CountedResource, ResourceKind};
use crate::error::CudaError;

/// Size of a page, or a divisor of it.
const PAGE: usize = 4096;

/// Size of a large page. Large pages are allocated several times as fast, and pinned faster.
const LARGE_PAGE: usize = 2 << 20;

/// Bytes pinned with one call. No copy may cross a block border.
pub(crate) const BLOCK: usize = LARGE_PAGE;

/// The smallest block. What follows the last whole [`BLOCK`] is rounded up to a power of two, so
/// that it can be used again, too.
const MIN_BLOCK: usize = 64 << 10;

/// Bytes of the free blocks of a context, at most.
const MAX_SPARE_BYTES: usize = 1 << 30;

/// The size of the block for the next of `missing` bytes.
fn block_size(missing: usize) -> usize {
    missing.clamp(MIN_BLOCK, BLOCK).next_power_of_two()
}

/// Memory that is pinned as a whole.
struct PinnedBlock {
    address: *mut u8,
    layout: Layout,
    _counted: CountedResource,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for PinnedBlock {}
// SAFETY: shared references only read it.
unsafe impl Sync for PinnedBlock {}

impl PinnedBlock {
    /// `bytes` of new memory, a size of [`block_size`]. `wait` is called before the call that
    /// blocks others.
    fn new(
        context: &Context,
        bytes: usize,
        wait: &(impl Fn() + Sync),
    ) -> Result<PinnedBlock, CudaError> {
        let align = if bytes < LARGE_PAGE { PAGE } else { LARGE_PAGE };
        let layout = Layout::from_size_align(bytes.max(1), align)
            .map_err(|_| CudaError::Misuse("a buffer larger than memory can be"))?;
        // SAFETY: the layout's size is not zero.
        let address = unsafe { std::alloc::alloc(layout) };
        if address.is_null() {
            return Err(CudaError::OutOfMemory { call: "alloc", bytes: base::Bytes(bytes as u64) });
        }
        #[cfg(target_os = "linux")]
        if bytes >= LARGE_PAGE {
            // SAFETY: asks for large pages under the memory just allocated. Where there are none,
            // small ones do.
            let _ = unsafe { libc::madvise(address.cast(), bytes, libc::MADV_HUGEPAGE) };
        }
        // SAFETY: the memory just allocated, which nothing else has.
        unsafe { address.write_bytes(0, bytes) };
        let at = address as usize;
        let pinned = at_normal_priority(|| {
            wait();
            context.enter()?;
            // SAFETY: memory of our own, which stays until it is given back to the driver again.
            let code = unsafe { sys::cuMemHostRegister_v2(at as *mut _, bytes, 0) };
            context.check("cuMemHostRegister", code).map_err(|err| err.with_bytes(bytes as u64))
        });
        if let Err(err) = pinned {
            // SAFETY: allocated with this layout, and not pinned.
            unsafe { std::alloc::dealloc(address, layout) };
            return Err(err);
        }
        let counted = context.resource_counts().count(ResourceKind::Pinned, bytes as u64);
        Ok(PinnedBlock { address, layout, _counted: counted })
    }

    /// Unpins and frees it. No copy from it may be in flight.
    fn release(self, context: &Context, wait: &(impl Fn() + Sync)) {
        let at = self.address as usize;
        let unpinned = at_normal_priority(|| {
            wait();
            context.enter().is_ok() && {
                // SAFETY: a block that was pinned, and nothing the device does to it is in flight.
                let code = unsafe { sys::cuMemHostUnregister(at as *mut _) };
                context.check("cuMemHostUnregister", code).is_ok()
            }
        });
        if unpinned {
            // SAFETY: allocated with this layout, and not used after this.
            unsafe { std::alloc::dealloc(self.address, self.layout) };
        } else {
            // The device may still write to pinned memory of a faulted context.
            context.keep(Leftover::Host(self.address as usize, self.layout));
        }
    }
}

/// Free blocks of a context.
#[derive(Default)]
pub(crate) struct SpareBlocks {
    blocks: Mutex<BlocksBySize>,
}

#[derive(Default)]
struct BlocksBySize {
    by_size: BTreeMap<usize, Vec<PinnedBlock>>,
    bytes: usize,
}

impl SpareBlocks {
    fn lock(&self) -> MutexGuard<'_, BlocksBySize> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, size: usize) -> Option<PinnedBlock> {
        let mut blocks = self.lock();
        let block = blocks.by_size.get_mut(&size)?.pop()?;
        blocks.bytes -= size;
        Some(block)
    }

    /// Keeps the block, or returns it where enough are kept.
    fn give(&self, block: PinnedBlock) -> Result<(), PinnedBlock> {
        let size = block.layout.size();
        let mut blocks = self.lock();
        if blocks.bytes + size > MAX_SPARE_BYTES {
            return Err(block);
        }
        blocks.bytes += size;
        blocks.by_size.entry(size).or_default().push(block);
        Ok(())
    }

    /// Frees all of them.
    pub(super) fn release(&self, context: &Context) {
        let blocks = std::mem::take(&mut *self.lock());
        let blocks = blocks.by_size.into_values().flatten();
        blocks.for_each(|block| block.release(context, &|| {}));
    }
}

/// Pinned memory, initially zero.
pub(crate) struct PinnedBlocks {
    /// All of size [`BLOCK`] but the last, which may be smaller.
    blocks: Vec<PinnedBlock>,
    context: Arc<Context>,
}

impl PinnedBlocks {
    /// `bytes` of memory. `wait` is called before each call that blocks others.
    pub(crate) fn new(
        context: &Arc<Context>,
        bytes: usize,
        wait: impl Fn() + Sync,
    ) -> Result<PinnedBlocks, CudaError> {
        context.may_allocate("cuMemHostRegister", bytes as u64)?;
        let mut made = PinnedBlocks { blocks: Vec::new(), context: context.clone() };
        for at in (0..bytes).step_by(BLOCK) {
            let size = block_size(bytes - at);
            let block = match context.spare_blocks().take(size) {
                Some(block) => {
                    // SAFETY: the whole block, which nothing else has.
                    unsafe { block.address.write_bytes(0, size) };
                    block
                }
                None => PinnedBlock::new(context, size, &wait)?,
            };
            made.blocks.push(block);
        }
        Ok(made)
    }

    /// Frees everything. No copy from it may be in flight.
    pub(crate) fn release(mut self, wait: impl Fn() + Sync) {
        self.free(wait);
    }

    fn free(&mut self, wait: impl Fn() + Sync) {
        for block in self.blocks.drain(..) {
            // Memory of a faulted context is not used again.
            let kept = match self.context.fault() {
                None => self.context.spare_blocks().give(block),
                Some(_) => Err(block),
            };
            if let Err(block) = kept {
                block.release(&self.context, &wait);
            }
        }
    }

    /// The address of offset `at`; what follows it up to the next block border is adjacent.
    pub(crate) fn address(&self, at: usize) -> Option<*const u8> {
        let block = self.blocks.get(at / BLOCK).filter(|block| at % BLOCK < block.layout.size())?;
        Some(block.address.wrapping_add(at % BLOCK))
    }

    /// Writes `data` at offset `at`; nothing past the end. No copy of it may be in flight.
    pub(crate) fn write(&mut self, mut at: usize, mut data: &[u8]) {
        while !data.is_empty()
            && let Some(block) = self.blocks.get(at / BLOCK)
        {
            let free = block.layout.size().saturating_sub(at % BLOCK);
            let (part, rest) = data.split_at(data.len().min(free));
            if part.is_empty() {
                return;
            }
            // SAFETY: inside the block by the lines above, and no other thread has `self`.
            unsafe {
                let to = block.address.add(at % BLOCK);
                to.copy_from_nonoverlapping(part.as_ptr(), part.len());
            }
            (at, data) = (at + part.len(), rest);
        }
    }
}

impl Drop for PinnedBlocks {
    fn drop(&mut self) {
        self.free(|| {});
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_few_sizes_and_fit() {
        for missing in [1, 4096, MIN_BLOCK, MIN_BLOCK + 1, 700_000, BLOCK - 1, BLOCK, 9 * BLOCK] {
            let size = block_size(missing);
            assert!(size.is_power_of_two() && (MIN_BLOCK..=BLOCK).contains(&size));
            assert!(size >= missing.min(BLOCK) && size < 2 * missing.max(MIN_BLOCK));
        }
    }
}
