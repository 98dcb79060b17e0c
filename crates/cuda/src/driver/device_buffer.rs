//! Device memory.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUdeviceptr};

use super::call_thread::at_normal_priority;
use super::{CountedResource, ResourceKind, Stream};
use crate::error::CudaError;

/// Device memory from the memory pool. Freeing does not wait for the device, as `cuMemFree` would.
pub(crate) struct DeviceBuffer {
    address: CUdeviceptr,
    bytes: u64,
    /// Orders allocations and frees; users wait for their work before they drop a buffer.
    stream: Arc<Stream>,
    pooled: bool,
    _counted: CountedResource,
}

impl DeviceBuffer {
    /// `bytes` of memory, all zero.
    pub(crate) fn zeroed(stream: &Arc<Stream>, bytes: u64) -> Result<DeviceBuffer, CudaError> {
        let context = stream.context();
        context.may_allocate("cuMemAllocFromPoolAsync", bytes)?;
        let size = usize::try_from(bytes.max(4).next_multiple_of(4)).unwrap_or(usize::MAX);
        let address = at_normal_priority(|| {
            context.enter()?;
            let mut address: CUdeviceptr = 0;
            // SAFETY: `address` receives the result; freed when this value is dropped.
            let code = unsafe {
                sys::cuMemAllocFromPoolAsync(&mut address, size, context.pool(), stream.raw())
            };
            let allocated = context.check("cuMemAllocFromPoolAsync", code);
            allocated.map_err(|err| err.with_bytes(bytes)).map(|()| address)
        })?;
        let counted = context.resource_counts().count(ResourceKind::Buffer, size as u64);
        let stream = stream.clone();
        DeviceBuffer { address, bytes, stream, pooled: true, _counted: counted }.cleared(size)
    }

    /// The same outside of the memory pool, for words that the driver itself writes.
    pub(crate) fn fixed(stream: &Arc<Stream>, bytes: u64) -> Result<DeviceBuffer, CudaError> {
        let context = stream.context();
        context.may_allocate("cuMemAlloc", bytes)?;
        let size = usize::try_from(bytes.max(4).next_multiple_of(4)).unwrap_or(usize::MAX);
        let mut address: CUdeviceptr = 0;
        // SAFETY: `address` receives the result; freed when this value is dropped.
        let code = unsafe { sys::cuMemAlloc_v2(&mut address, size) };
        context.check("cuMemAlloc", code).map_err(|err| err.with_bytes(bytes))?;
        let counted = context.resource_counts().count(ResourceKind::FixedBuffer, size as u64);
        let stream = stream.clone();
        DeviceBuffer { address, bytes, stream, pooled: false, _counted: counted }.cleared(size)
    }

    /// The same memory, all zero again. Nothing may use it.
    pub(crate) fn recleared(self) -> Result<DeviceBuffer, CudaError> {
        let size = usize::try_from(self.bytes.max(4).next_multiple_of(4)).unwrap_or(usize::MAX);
        self.stream.context().enter()?;
        self.cleared(size)
    }

    fn cleared(self, size: usize) -> Result<DeviceBuffer, CudaError> {
        // SAFETY: the buffer was just allocated with this size, and nothing else knows its address.
        unsafe { self.stream.clear(self.address, size / 4) }?;
        self.stream.synchronize().map_err(|err| err.with_bytes(self.bytes))?;
        Ok(self)
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        let buffer = &*self;
        at_normal_priority(|| {
            if buffer.stream.context().enter().is_ok() {
                // SAFETY: allocated here and not used after this: users have waited for their work
                // on it.
                let _ = unsafe {
                    match buffer.pooled {
                        true => sys::cuMemFreeAsync(buffer.address, buffer.stream.raw()),
                        false => sys::cuMemFree_v2(buffer.address),
                    }
                };
            }
        });
    }
}
