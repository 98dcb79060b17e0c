//! The two streams of a best-effort queue, and the fences that are enqueued on them.

use crate::device_context::DeviceContext;
use crate::driver::{PinnedWord, Priority, Stream, is_reached};
use crate::error::CudaError;
use crate::program::graph_recorder::{GraphRecorder, LaunchTarget};
use crate::queue::POLLS_PER_QUERY;

/// A stream on the whole device and one in the SM partition; a run uses one of them at a time.
pub(super) struct QueueStreams {
    pub(super) priority: Priority,
    whole_device: Stream,
    partition: Option<Stream>,
    /// The run is in the partition.
    pub(super) in_partition: bool,
    /// The last fence value that the device has written.
    word: PinnedWord,
    /// The last fence value that was enqueued.
    last_fence: u32,
    /// Polls since the last fence was reached.
    polls: u32,
    /// The thread sleeps between polls.
    pauses: bool,
}

impl QueueStreams {
    pub(super) fn new(
        device: &DeviceContext,
        recorder: &GraphRecorder,
        priority: Priority,
    ) -> Result<QueueStreams, CudaError> {
        let context = device.context();
        let partition = recorder.partition.as_ref().filter(|_| priority == Priority::Low);
        let partition =
            partition.map(|partition| Stream::in_partition(context, partition)).transpose()?;
        let whole_device = Stream::new(context, priority)?;
        Ok(QueueStreams {
            priority,
            whole_device,
            partition,
            in_partition: false,
            word: PinnedWord::new(context)?,
            last_fence: 0,
            polls: 0,
            pauses: !device.options().polling.pause.is_zero(),
        })
    }

    /// The stream that the run uses.
    pub(super) fn current(&self) -> &Stream {
        match &self.partition {
            Some(partition) if self.in_partition => partition,
            _ => &self.whole_device,
        }
    }

    pub(super) fn launch_target(&self) -> LaunchTarget {
        if self.in_partition { LaunchTarget::Partition } else { self.priority.into() }
    }

    /// Enqueues a fence and returns its value.
    pub(super) fn queue_fence(&mut self) -> Result<u32, CudaError> {
        self.last_fence = self.last_fence.wrapping_add(1);
        // SAFETY: the word lives as long as these streams, which are drained before it is dropped.
        unsafe { self.current().write_word(self.word.device_address(), self.last_fence) }?;
        Ok(self.last_fence)
    }

    /// Whether the device has reached `fence`. Now and then asks the driver whether it still can.
    pub(super) fn is_reached(&mut self, fence: u32) -> Result<bool, CudaError> {
        if is_reached(self.word.load(), fence) {
            self.polls = 0;
            return Ok(true);
        }
        self.polls = self.polls.wrapping_add(1);
        if self.pauses || self.polls.is_multiple_of(POLLS_PER_QUERY) {
            self.current().is_idle()?;
        }
        Ok(false)
    }
}

impl Drop for QueueStreams {
    fn drop(&mut self) {
        // The fence word, and the buffers of the executor, must outlive what is enqueued.
        let _ = self.whole_device.synchronize();
        let _ = self.partition.as_ref().map(Stream::synchronize);
    }
}
