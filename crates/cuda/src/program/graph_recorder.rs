//! Records launches as CUDA graphs.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::driver::call_thread::at_normal_priority;
use crate::driver::{Context, Graph, Priority, SmPartition, Stream};
use crate::error::CudaError;

/// Where on the device a launch runs, and with which priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LaunchTarget {
    /// The whole device, high priority.
    High,
    /// The whole device, low priority.
    Low,
    /// The SM partition, low priority.
    Partition,
}

impl From<Priority> for LaunchTarget {
    fn from(priority: Priority) -> LaunchTarget {
        match priority {
            Priority::High => LaunchTarget::High,
            Priority::Low => LaunchTarget::Low,
        }
    }
}

/// The streams that graphs are recorded on, one per [`LaunchTarget`]: a recorded kernel inherits
/// priority and partition of its stream.
struct CaptureStreams {
    high: Stream,
    low: Stream,
    partition: Option<Stream>,
}

/// Records graphs of one device, one at a time.
pub(crate) struct GraphRecorder {
    /// SMs that best effort can be confined to.
    pub(crate) partition: Option<Arc<SmPartition>>,
    streams: Mutex<CaptureStreams>,
}

impl GraphRecorder {
    pub(crate) fn new(
        context: &Arc<Context>,
        partition: Option<Arc<SmPartition>>,
    ) -> Result<GraphRecorder, CudaError> {
        let streams = CaptureStreams {
            high: Stream::new(context, Priority::High)?,
            low: Stream::new(context, Priority::Low)?,
            partition: match &partition {
                Some(partition) => Some(Stream::in_partition(context, partition)?),
                None => None,
            },
        };
        Ok(GraphRecorder { partition, streams: Mutex::new(streams) })
    }

    /// The launches that `record` enqueues, as a graph for `target`.
    pub(crate) fn capture(
        &self,
        target: LaunchTarget,
        record: impl FnOnce(&Stream) -> Result<(), CudaError> + Send,
    ) -> Result<Graph, CudaError> {
        at_normal_priority(|| self.capture_here(target, record))
    }

    fn capture_here(
        &self,
        target: LaunchTarget,
        record: impl FnOnce(&Stream) -> Result<(), CudaError>,
    ) -> Result<Graph, CudaError> {
        let began = Instant::now();
        let streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let stream = match target {
            LaunchTarget::High => &streams.high,
            LaunchTarget::Low => &streams.low,
            LaunchTarget::Partition => streams
                .partition
                .as_ref()
                .ok_or(CudaError::Misuse("the device has no SM partition"))?,
        };
        let graph = stream.capture(record);
        tracing::debug!(?target, took = ?began.elapsed(), "graph recorded");
        graph
    }
}
