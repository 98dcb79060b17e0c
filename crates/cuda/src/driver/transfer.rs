//! Copies and clears within device memory.

use cudarc::driver::sys;

use super::Stream;
use crate::error::CudaError;

impl Stream {
    /// Copies from one address on the device to another.
    ///
    /// # Safety
    /// Both sides are `bytes` long, disjoint and alive, and nothing writes to them, until the copy
    /// is done.
    pub(crate) unsafe fn copy_within(
        &self,
        to: u64,
        from: u64,
        bytes: usize,
    ) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        self.context().enter()?;
        // SAFETY: the caller is responsible for both sides.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.raw()) };
        self.context().check("cuMemcpyDtoDAsync", code)
    }

    /// Writes zeros over `bytes`.
    ///
    /// # Safety
    /// The bytes are alive until the write is done.
    pub(crate) unsafe fn clear_bytes(&self, address: u64, bytes: usize) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        self.context().enter()?;
        // SAFETY: the caller is responsible for the bytes.
        let code = unsafe { sys::cuMemsetD8Async(address, 0, bytes, self.raw()) };
        self.context().check("cuMemsetD8Async", code)
    }
}
