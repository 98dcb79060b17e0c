//! Memory of the device, and host memory it can reach.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use base::Bytes;
use cudarc::driver::sys::{self, CUdeviceptr};

use super::{Context, Stream};
use crate::error::CudaError;

/// Device memory from the device's pool. Freeing does not wait for the device, as a plain free would.
pub(crate) struct DeviceBuffer {
    address: CUdeviceptr,
    bytes: u64,
    /// Allocations and frees are ordered by this stream alone; users wait before they let go of a buffer.
    stream: Arc<Stream>,
    pooled: bool,
}

impl DeviceBuffer {
    /// `bytes` of memory, all zero.
    pub(crate) fn zeroed(stream: &Arc<Stream>, bytes: u64) -> Result<DeviceBuffer, CudaError> {
        let context = stream.context();
        context.enter()?;
        let size = usize::try_from(bytes.max(4).next_multiple_of(4)).unwrap_or(usize::MAX);
        let mut address: CUdeviceptr = 0;
        // SAFETY: `address` is a place for the answer; freed when this value is dropped.
        let code = unsafe {
            sys::cuMemAllocFromPoolAsync(&mut address, size, context.pool(), stream.raw())
        };
        context.check("cuMemAllocFromPoolAsync", code).map_err(|err| sized(err, bytes))?;
        DeviceBuffer { address, bytes, stream: stream.clone(), pooled: true }.cleared(size)
    }

    /// The same outside of the pool, for words that the driver itself writes on request.
    pub(crate) fn fixed(stream: &Arc<Stream>, bytes: u64) -> Result<DeviceBuffer, CudaError> {
        let context = stream.context();
        context.enter()?;
        let size = usize::try_from(bytes.max(4).next_multiple_of(4)).unwrap_or(usize::MAX);
        let mut address: CUdeviceptr = 0;
        // SAFETY: `address` is a place for the answer; freed when this value is dropped.
        let code = unsafe { sys::cuMemAlloc_v2(&mut address, size) };
        context.check("cuMemAlloc", code).map_err(|err| sized(err, bytes))?;
        DeviceBuffer { address, bytes, stream: stream.clone(), pooled: false }.cleared(size)
    }

    fn cleared(self, size: usize) -> Result<DeviceBuffer, CudaError> {
        // SAFETY: the buffer was just made with this size, and is the only one who knows its address.
        unsafe { self.stream.clear(self.address, size / 4) }?;
        self.stream.synchronize().map_err(|err| sized(err, self.bytes))?;
        Ok(self)
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.stream.context().enter().is_ok() {
            // SAFETY: allocated here and not used after this: whoever queued work on it has waited for that.
            let _ = unsafe {
                match self.pooled {
                    true => sys::cuMemFreeAsync(self.address, self.stream.raw()),
                    false => sys::cuMemFree_v2(self.address),
                }
            };
        }
    }
}

/// Says how much was asked for.
fn sized(err: CudaError, bytes: u64) -> CudaError {
    match err {
        CudaError::OutOfMemory { call, .. } => CudaError::OutOfMemory { call, bytes: Bytes(bytes) },
        other => other,
    }
}

/// Host memory the device copies from and to without a detour.
pub(crate) struct PinnedBuffer {
    address: *mut u8,
    bytes: usize,
    context: Arc<Context>,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for PinnedBuffer {}
// SAFETY: shared references only read it.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// `bytes` of memory, all zero.
    pub(crate) fn zeroed(context: &Arc<Context>, bytes: usize) -> Result<PinnedBuffer, CudaError> {
        context.enter()?;
        let mut address: *mut c_void = std::ptr::null_mut();
        // SAFETY: `address` is a place for the answer; freed when this value is dropped.
        let code = unsafe { sys::cuMemHostAlloc(&mut address, bytes.max(4), 0) };
        context.check("cuMemHostAlloc", code).map_err(|err| sized(err, bytes as u64))?;
        let address = address.cast::<u8>();
        // SAFETY: just allocated with this size.
        unsafe { address.write_bytes(0, bytes) };
        Ok(PinnedBuffer { address, bytes, context: context.clone() })
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.address
    }

    /// The bytes. Nothing the device does to them may be in flight.
    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: allocated with this size and initialised; the owner reads only after the device is done.
        unsafe { std::slice::from_raw_parts(self.address, self.bytes) }
    }

    /// The bytes. Nothing the device does to them may be in flight.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: allocated with this size and initialised; the owner writes only before the device begins.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.bytes) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: allocated in `zeroed` and not used after this.
            let _ = unsafe { sys::cuMemFreeHost(self.address.cast()) };
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

    /// Where the device writes it.
    pub(crate) fn device_address(&self) -> u64 {
        self.device_address
    }

    /// What it is now.
    pub(crate) fn load(&self) -> u32 {
        // SAFETY: aligned, alive, and only ever accessed as an atomic word from the host side.
        unsafe { AtomicU32::from_ptr(self.memory.as_ptr().cast()) }.load(Ordering::Acquire)
    }
}
