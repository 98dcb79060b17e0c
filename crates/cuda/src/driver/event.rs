//! CUDA events.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUevent};

use super::call_thread::at_normal_priority;
use super::slow_calls;
use super::{Context, Stream};
use crate::error::CudaError;

/// A point in a stream.
pub(crate) struct Event {
    raw: CUevent,
    context: Arc<Context>,
}

// SAFETY: an event handle may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above; the driver locks its own state.
unsafe impl Sync for Event {}

impl Event {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Event, CudaError> {
        Event::with_flags(context, 0)
    }

    /// An event without a time, which is cheaper to wait for.
    pub(crate) fn untimed(context: &Arc<Context>) -> Result<Event, CudaError> {
        Event::with_flags(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)
    }

    fn with_flags(context: &Arc<Context>, flags: u32) -> Result<Event, CudaError> {
        at_normal_priority(|| {
            context.enter()?;
            let mut raw: CUevent = std::ptr::null_mut();
            // SAFETY: `raw` receives the result; destroyed when this value is dropped.
            context.check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags) })?;
            Ok(Event { raw, context: context.clone() })
        })
    }

    /// Records the point after everything in `stream` so far.
    pub(crate) fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: both handles are alive.
        self.context.check("cuEventRecord", unsafe { sys::cuEventRecord(self.raw, stream.raw()) })
    }

    /// Work enqueued on `stream` from now on starts after the event, which has been recorded.
    pub(crate) fn block_stream(&self, stream: &Stream) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: both handles are alive; the driver keeps what it needs of the event.
        let code = unsafe { sys::cuStreamWaitEvent(stream.raw(), self.raw, 0) };
        self.context.check("cuStreamWaitEvent", code)
    }

    /// Waits for the event.
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: the handle is alive.
        self.context.check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw) })
    }

    /// Microseconds from `earlier` to this; both must have completed.
    pub(crate) fn micros_since(&self, earlier: &Event) -> Result<f64, CudaError> {
        self.context.enter()?;
        let mut millis = 0f32;
        // SAFETY: both handles are alive and `millis` receives the result.
        let code = unsafe { sys::cuEventElapsedTime_v2(&mut millis, earlier.raw, self.raw) };
        self.context.check("cuEventElapsedTime", code)?;
        Ok(f64::from(millis) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let event = &*self;
        at_normal_priority(|| {
            if event.context.enter().is_ok() {
                // SAFETY: created in `new` and not used after this.
                let _ = unsafe { sys::cuEventDestroy_v2(event.raw) };
                slow_calls::end("cuEventDestroy");
            }
        });
    }
}
