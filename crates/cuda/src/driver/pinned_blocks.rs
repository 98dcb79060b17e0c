//! Host memory in one range that is pinned and unpinned block by block.
//!
//! A call that pins much at once blocks calls of other threads for its whole duration, and takes
//! less time when the pages exist already. For copies only: a kernel may need another address.

use std::alloc::Layout;
use std::sync::Arc;

use cudarc::driver::sys;

use super::Context;
use super::gpu_use::Leftover;
use super::resource_counts::{CountedResource, ResourceKind};
use crate::error::CudaError;

/// Size of a page, or a divisor of it.
const PAGE: usize = 4096;

/// Size of a large page. Large pages are allocated several times as fast, and pinned faster.
const LARGE_PAGE: usize = 2 << 20;

/// Bytes pinned with one call. No copy may cross a block border.
pub(crate) const BLOCK: usize = LARGE_PAGE;

/// Pinned memory, initially zero.
pub(crate) struct PinnedBlocks {
    address: *mut u8,
    layout: Layout,
    bytes: usize,
    /// The pinned blocks, from the first on.
    pinned: Vec<CountedResource>,
    context: Arc<Context>,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for PinnedBlocks {}
// SAFETY: shared references only read it.
unsafe impl Sync for PinnedBlocks {}

/// The size of the block at `at` of `bytes`.
fn block_bytes(at: usize, bytes: usize) -> usize {
    BLOCK.min(bytes - at)
}

impl PinnedBlocks {
    /// `bytes` of memory. `wait` is called before each call that blocks others.
    pub(crate) fn new(
        context: &Arc<Context>,
        bytes: usize,
        wait: impl Fn(),
    ) -> Result<PinnedBlocks, CudaError> {
        let align = if bytes < LARGE_PAGE { PAGE } else { LARGE_PAGE };
        let layout = Layout::from_size_align(bytes.max(1), align)
            .map_err(|_| CudaError::Misuse("a buffer larger than memory can be"))?;
        context.may_allocate("cuMemHostRegister", bytes as u64)?;
        // SAFETY: the layout's size is not zero.
        let address = unsafe { std::alloc::alloc(layout) };
        if address.is_null() {
            return Err(CudaError::OutOfMemory { call: "alloc", bytes: base::Bytes(bytes as u64) });
        }
        #[cfg(target_os = "linux")]
        if bytes >= LARGE_PAGE {
            let whole = bytes - bytes % LARGE_PAGE;
            // SAFETY: asks for large pages under whole ones of the memory just allocated. Where
            // there are none, small ones do.
            let _ = unsafe { libc::madvise(address.cast(), whole, libc::MADV_HUGEPAGE) };
        }
        let context = context.clone();
        let mut blocks = PinnedBlocks { address, layout, bytes, pinned: Vec::new(), context };
        for at in (0..bytes).step_by(BLOCK) {
            // SAFETY: inside the memory just allocated, which nothing else has.
            unsafe { address.add(at).write_bytes(0, block_bytes(at, bytes)) };
            wait();
            blocks.pin_next()?;
        }
        Ok(blocks)
    }

    fn pin_next(&mut self) -> Result<(), CudaError> {
        let at = self.pinned.len() * BLOCK;
        let bytes = block_bytes(at, self.bytes);
        // SAFETY: inside memory of our own, which stays until it is given back to the driver again.
        let code = unsafe { sys::cuMemHostRegister_v2(self.address.add(at).cast(), bytes, 0) };
        self.context
            .check("cuMemHostRegister", code)
            .map_err(|err| err.with_bytes(bytes as u64))?;
        self.pinned.push(self.context.resource_counts().count(ResourceKind::Pinned, bytes as u64));
        Ok(())
    }

    /// Unpins everything block by block and frees it. No copy from it may be in flight.
    pub(crate) fn release(mut self, wait: impl Fn()) {
        self.unpin(wait);
    }

    fn unpin(&mut self, wait: impl Fn()) {
        if self.context.enter().is_err() {
            return;
        }
        while let Some(counted) = self.pinned.pop() {
            wait();
            // SAFETY: a block that was pinned, inside the memory.
            let block = unsafe { self.address.add(self.pinned.len() * BLOCK) };
            // SAFETY: as above, and nothing the device does to it is in flight.
            let code = unsafe { sys::cuMemHostUnregister(block.cast()) };
            if self.context.check("cuMemHostUnregister", code).is_err() {
                self.pinned.push(counted);
                return;
            }
        }
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.address
    }

    /// The bytes. No copy from or to them may be in flight.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: allocated with this size and initialised; the owner writes only before the device
        // begins.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.bytes) }
    }
}

impl Drop for PinnedBlocks {
    fn drop(&mut self) {
        self.unpin(|| {});
        if self.pinned.is_empty() {
            // SAFETY: allocated with this layout, and not used after this.
            unsafe { std::alloc::dealloc(self.address, self.layout) };
        } else {
            // The device may still write to pinned memory of a faulted context.
            self.context.keep(Leftover::Host(self.address as usize, self.layout));
        }
    }
}
