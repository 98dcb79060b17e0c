//! Memory of the device.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUdeviceptr};

use super::{CountedResource, ResourceKind, Stream};
use crate::error::CudaError;

/// Device memory from the device's pool. Freeing does not wait for the device, as a plain free would.
pub(crate) struct DeviceBuffer {
    address: CUdeviceptr,
    bytes: u64,
    /// Allocations and frees are ordered by this stream alone; users wait before they let go of a buffer.
    stream: Arc<Stream>,
    pooled: bool,
    _counted: CountedResource,
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
        context.check("cuMemAllocFromPoolAsync", code).map_err(|err| err.with_bytes(bytes))?;
        let counted = context.resource_counts().count(ResourceKind::Buffer, size as u64);
        let stream = stream.clone();
        DeviceBuffer { address, bytes, stream, pooled: true, _counted: counted }.cleared(size)
    }

    /// The same outside of the pool, for words that the driver itself writes on request.
    pub(crate) fn fixed(stream: &Arc<Stream>, bytes: u64) -> Result<DeviceBuffer, CudaError> {
        let context = stream.context();
        context.enter()?;
        let size = usize::try_from(bytes.max(4).next_multiple_of(4)).unwrap_or(usize::MAX);
        let mut address: CUdeviceptr = 0;
        // SAFETY: `address` is a place for the answer; freed when this value is dropped.
        let code = unsafe { sys::cuMemAlloc_v2(&mut address, size) };
        context.check("cuMemAlloc", code).map_err(|err| err.with_bytes(bytes))?;
        let counted = context.resource_counts().count(ResourceKind::FixedBuffer, size as u64);
        let stream = stream.clone();
        DeviceBuffer { address, bytes, stream, pooled: false, _counted: counted }.cleared(size)
    }

    fn cleared(self, size: usize) -> Result<DeviceBuffer, CudaError> {
        // SAFETY: the buffer was just made with this size, and is the only one who knows its address.
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
