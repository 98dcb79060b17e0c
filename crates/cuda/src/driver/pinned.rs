//! Pinned host memory: the device copies from and to it directly.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys::{self, CUdeviceptr};

use super::Context;
use super::call_thread::at_normal_priority;
use super::pinned_pool::{MAX_PIECE, free, piece_size};
use super::resource_counts::{CountedResource, ResourceKind};
use crate::error::CudaError;

fn allocate(context: &Context, bytes: usize) -> Result<*mut u8, CudaError> {
    let address = at_normal_priority(|| {
        context.may_allocate("cuMemHostAlloc", bytes as u64)?;
        let mut address: *mut c_void = std::ptr::null_mut();
        // SAFETY: `address` receives the result; the caller frees it.
        let code = unsafe { sys::cuMemHostAlloc(&mut address, bytes, 0) };
        context.check("cuMemHostAlloc", code).map_err(|err| err.with_bytes(bytes as u64))?;
        Ok::<usize, CudaError>(address as usize)
    })?;
    Ok(address as *mut u8)
}

/// Memory for the pool of `context`.
fn allocate_slab(context: &Context, bytes: usize) -> Result<(*mut u8, CountedResource), CudaError> {
    let slab = allocate(context, bytes)?;
    // SAFETY: just allocated with this size.
    unsafe { slab.write_bytes(0, bytes) };
    let counted = context.resource_counts().count(ResourceKind::PinnedSlab, bytes as u64);
    Ok((slab, counted))
}

/// Pinned host memory.
pub(crate) struct PinnedBuffer {
    address: *mut u8,
    bytes: usize,
    /// Bytes of the allocation or piece.
    size: usize,
    context: Arc<Context>,
    /// Present where it is an allocation of its own.
    counted: Option<CountedResource>,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for PinnedBuffer {}
// SAFETY: shared references only read it.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// `bytes` of memory, all zero.
    pub(crate) fn zeroed(context: &Arc<Context>, bytes: usize) -> Result<PinnedBuffer, CudaError> {
        let mut buffer = PinnedBuffer::recycled(context, bytes)?;
        buffer.as_mut_slice().fill(0);
        Ok(buffer)
    }

    /// `bytes` of memory, with whatever its last user left there.
    pub(crate) fn recycled(
        context: &Arc<Context>,
        bytes: usize,
    ) -> Result<PinnedBuffer, CudaError> {
        let size = piece_size(bytes);
        let (address, size, counted) = match bytes > MAX_PIECE {
            false => {
                let slab = |bytes| allocate_slab(context, bytes);
                (context.pinned().take(size, slab)?, size, None)
            }
            true => match context.pinned().take_large(size) {
                Some((address, size, counted)) => (address, size, Some(counted)),
                None => {
                    let address = allocate(context, size)?;
                    // SAFETY: just allocated with this size.
                    unsafe { address.write_bytes(0, size) };
                    let counted =
                        context.resource_counts().count(ResourceKind::Pinned, size as u64);
                    (address, size, Some(counted))
                }
            },
        };
        Ok(PinnedBuffer { address, bytes, size, context: context.clone(), counted })
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.address
    }

    /// The bytes. No copy from or to them may be in flight.
    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: handed out with this size and initialised; the owner reads only after the device
        // is done.
        unsafe { std::slice::from_raw_parts(self.address, self.bytes) }
    }

    /// The bytes. No copy from or to them may be in flight.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: handed out with this size and initialised; the owner writes only before the
        // device begins.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.bytes) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let Some(counted) = self.counted.take() else {
            return self.context.pinned().give(self.address, self.size);
        };
        // The device may still write to memory of a lost context.
        if self.context.enter().is_ok()
            && self.context.pinned().give_large(self.address, self.size, counted).is_err()
        {
            free(self.address);
        }
    }
}

/// A word in pinned memory that the device writes and a thread polls.
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

    /// Its address on the device.
    pub(crate) fn device_address(&self) -> u64 {
        self.device_address
    }

    /// Its current value.
    pub(crate) fn load(&self) -> u32 {
        // SAFETY: aligned, alive, and only ever accessed as an atomic word from the host side.
        unsafe { AtomicU32::from_ptr(self.memory.as_ptr().cast()) }.load(Ordering::Acquire)
    }
}

/// Whether the device has reached `fence`, `now` being the last value it wrote. Values count up and
/// may wrap.
pub(crate) fn is_reached(now: u32, fence: u32) -> bool {
    now.wrapping_sub(fence) < u32::MAX / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fence_values_may_wrap() {
        assert!(is_reached(5, 5));
        assert!(is_reached(6, 5));
        assert!(!is_reached(4, 5));
        assert!(is_reached(2, u32::MAX));
        assert!(!is_reached(u32::MAX, 2));
    }
}
