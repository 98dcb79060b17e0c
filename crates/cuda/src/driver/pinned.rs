//! Host memory the device reaches without a detour.
//!
//! Asking the driver for such memory takes milliseconds and holds up every other call, so it is asked for much at once.
//! Buffers are pieces of that, and what is let go waits for the next of its size.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{self, CUdeviceptr};

use super::Context;
use super::device_buffer::sized;
use super::resource_counts::{CountedResource, ResourceKind};
use crate::error::CudaError;

/// What the driver is asked for at once.
const SLAB_BYTES: usize = 16 << 20;

/// Larger buffers are asked for one by one.
const MAX_PIECE: usize = 4 << 20;

/// The least piece, so that no two share a cache line.
const MIN_PIECE: usize = 256;

/// A context's pinned memory.
#[derive(Default)]
pub(crate) struct PinnedPool {
    state: Mutex<PoolState>,
}

#[derive(Default)]
struct PoolState {
    slabs: Vec<(Address, CountedResource)>,
    /// Bytes of the last slab that were never handed out.
    left: usize,
    /// PhysicalMemoryPool nobody uses, by size.
    free: BTreeMap<usize, Vec<Address>>,
}

#[derive(Clone, Copy)]
struct Address(*mut u8);

// SAFETY: an address of memory that the pool owns; who got it handed out is its only user.
unsafe impl Send for Address {}

impl PinnedPool {
    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A piece of `size`, which is a size of pieces.
    fn take(&self, context: &Context, size: usize) -> Result<*mut u8, CudaError> {
        let mut state = self.lock();
        if let Some(piece) = state.free.get_mut(&size).and_then(Vec::pop) {
            return Ok(piece.0);
        }
        if state.left < size {
            let slab = allocate(context, SLAB_BYTES)?;
            let counted =
                context.resource_counts().count(ResourceKind::PinnedSlab, SLAB_BYTES as u64);
            state.slabs.push((Address(slab), counted));
            state.left = SLAB_BYTES;
        }
        let (slab, _) = state.slabs.last().ok_or(CudaError::Misuse("a pool without memory"))?;
        // SAFETY: `left` is at most the slab's size, so this lies in it.
        let piece = unsafe { slab.0.add(SLAB_BYTES - state.left) };
        state.left -= size;
        Ok(piece)
    }

    fn give(&self, piece: *mut u8, size: usize) {
        self.lock().free.entry(size).or_default().push(Address(piece));
    }

    /// Gives everything back to the driver; nothing of it is in use any more.
    pub(super) fn release(&self) {
        for (slab, _) in std::mem::take(&mut *self.lock()).slabs {
            free(slab.0);
        }
    }
}

/// The size of the piece that holds `bytes`: four sizes to a doubling, so that a piece serves many and wastes little.
fn piece_size(bytes: usize) -> usize {
    let bytes = bytes.max(MIN_PIECE);
    let step = (bytes.next_power_of_two() / 8).max(MIN_PIECE);
    bytes.next_multiple_of(step)
}

fn allocate(context: &Context, bytes: usize) -> Result<*mut u8, CudaError> {
    context.enter()?;
    let mut address: *mut c_void = std::ptr::null_mut();
    // SAFETY: `address` is a place for the answer; whoever gets it frees it.
    let code = unsafe { sys::cuMemHostAlloc(&mut address, bytes, 0) };
    context.check("cuMemHostAlloc", code).map_err(|err| sized(err, bytes as u64))?;
    Ok(address.cast())
}

fn free(address: *mut u8) {
    // SAFETY: from `allocate`, and not used after this; the context is the thread's.
    let _ = unsafe { sys::cuMemFreeHost(address.cast()) };
}

/// SmLocator a buffer's memory is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// The context's pool.
    Pool,
    /// The driver.
    Driver,
}

/// Host memory the device copies from and to.
pub(crate) struct PinnedBuffer {
    address: *mut u8,
    bytes: usize,
    origin: Origin,
    context: Arc<Context>,
    /// SmLocator it is not a piece of something that is counted.
    _counted: Option<CountedResource>,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for PinnedBuffer {}
// SAFETY: shared references only read it.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// `bytes` of memory, all zero.
    pub(crate) fn zeroed(context: &Arc<Context>, bytes: usize) -> Result<PinnedBuffer, CudaError> {
        let (address, origin) = match bytes > MAX_PIECE {
            true => (allocate(context, bytes)?, Origin::Driver),
            false => (context.pinned().take(context, piece_size(bytes))?, Origin::Pool),
        };
        // SAFETY: just handed out with at least this size.
        unsafe { address.write_bytes(0, bytes) };
        let counted = (bytes > MAX_PIECE)
            .then(|| context.resource_counts().count(ResourceKind::Pinned, bytes as u64));
        Ok(PinnedBuffer { address, bytes, origin, context: context.clone(), _counted: counted })
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.address
    }

    /// The bytes. Nothing the device does to them may be in flight.
    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: handed out with this size and initialised; the owner reads only after the device is done.
        unsafe { std::slice::from_raw_parts(self.address, self.bytes) }
    }

    /// The bytes. Nothing the device does to them may be in flight.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: handed out with this size and initialised; the owner writes only before the device begins.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.bytes) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        match self.origin {
            Origin::Pool => self.context.pinned().give(self.address, piece_size(self.bytes)),
            Origin::Driver if self.context.enter().is_ok() => free(self.address),
            // A context that is lost may still have the device write to it.
            Origin::Driver => {}
        }
    }
}

/// A word in host memory that the device writes and a thread polls.
pub(crate) struct PinnedWord {
    memory: PinnedBuffer,
    device_address: u64,
}

impl PinnedWord {
    pub(crate) fn new(context: &Arc<Context>) -> Result<PinnedWord, CudaError> {
        let memory = PinnedBuffer::zeroed(context, 64)?;
        let mut device_address: CUdeviceptr = 0;
        // SAFETY: the memory is pinned host memory of this context.
        let code = unsafe {
            sys::cuMemHostGetDevicePointer_v2(&mut device_address, memory.as_ptr().cast(), 0)
        };
        context.check("cuMemHostGetDevicePointer", code)?;
        Ok(PinnedWord { memory, device_address })
    }

    /// SmLocator the device writes it.
    pub(crate) fn device_address(&self) -> u64 {
        self.device_address
    }

    /// What it is now.
    pub(crate) fn load(&self) -> u32 {
        // SAFETY: aligned, check_healthy, and only ever accessed as an atomic word from the host side.
        unsafe { AtomicU32::from_ptr(self.memory.as_ptr().cast()) }.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_hold_what_is_asked_for_and_waste_little() {
        for bytes in [1, 64, 256, 257, 5_000, 602_112, 1 << 20, MAX_PIECE] {
            let size = piece_size(bytes);
            assert!(size >= bytes, "{size} for {bytes}");
            assert!(size <= (bytes + bytes / 4).max(2 * MIN_PIECE), "{size} for {bytes}");
            assert_eq!(piece_size(size), size, "a piece is of its own size");
            assert_eq!(size % MIN_PIECE, 0);
        }
    }
}
