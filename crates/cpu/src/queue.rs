//! A queue of the CPU, as the rest of the system sees it.

use std::sync::Arc;

use device::{CompletionSink, Queue, QueueOptions, Segment};

use crate::line::Line;
use crate::standing::Shared;

/// Segments in, completions out.
pub(crate) struct CpuQueue(Arc<Line>);

impl CpuQueue {
    pub(crate) fn open(
        options: QueueOptions,
        threads: usize,
        sink: Arc<dyn CompletionSink>,
        shared: Arc<Shared>,
    ) -> Result<CpuQueue, String> {
        Line::open(options, threads, sink, shared).map(CpuQueue)
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
