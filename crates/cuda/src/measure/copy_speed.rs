//! The speed of copies from pinned host memory to the device.

use std::time::Instant;

use device::DeviceError;

use crate::device::CudaDevice;
use crate::driver::{DeviceBuffer, PinnedBuffer, Priority, Stream};
use crate::error::CudaError;

/// Bytes of one copy: large enough that its start is negligible.
const COPIED: usize = 64 << 20;

/// Timed copies, after one that is not.
const COPIES: usize = 12;

impl CudaDevice {
    /// Bytes per second of large copies from pinned memory, the device being idle.
    pub fn copy_speed(&self) -> Result<f64, DeviceError> {
        let services = self.services();
        services.device.check_healthy()?;
        let measure = || -> Result<f64, CudaError> {
            let host = PinnedBuffer::zeroed(services.device.context(), COPIED)?;
            let target = DeviceBuffer::zeroed(&services.memory.memory_stream, COPIED as u64)?;
            let stream = Stream::new(services.device.context(), Priority::Low)?;
            let copy = |count: usize| {
                for _ in 0..count {
                    // SAFETY: both sides are that long and live until the wait below.
                    unsafe { stream.copy_in(target.address(), host.as_ptr(), COPIED) }?;
                }
                stream.synchronize()
            };
            copy(1)?;
            let began = Instant::now();
            copy(COPIES)?;
            Ok((COPIED * COPIES) as f64 / began.elapsed().as_secs_f64())
        };
        measure().map_err(|err| services.device.error(err))
    }
}
