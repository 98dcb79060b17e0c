//! A queue of the CPU device.

use std::sync::Arc;

use device::{CompletionSink, Queue, QueueOptions, Segment};

use crate::device_state::DeviceState;
use crate::run_queue::RunQueue;

/// The public handle of a [`RunQueue`]; dropping it closes the queue.
pub(crate) struct CpuQueue(Arc<RunQueue>);

impl CpuQueue {
    pub(crate) fn open(
        options: QueueOptions,
        threads: usize,
        sink: Arc<dyn CompletionSink>,
        state: Arc<DeviceState>,
    ) -> Result<CpuQueue, String> {
        RunQueue::open(options, threads, sink, state).map(CpuQueue)
    }
}

impl Queue for CpuQueue {
    fn launch(&self, segment: Segment) -> Result<(), Segment> {
        self.0.launch(segment)
    }

    fn preempt(&self) {
        self.0.preempt();
    }
}

impl Drop for CpuQueue {
    fn drop(&mut self) {
        self.0.close();
    }
}
