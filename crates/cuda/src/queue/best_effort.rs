//! Work that leaves, best effort above all: few launches in flight, out of the way within microseconds.

use std::sync::Arc;

use device::{CompletionSink, DeviceError, Queue, QueueOptions, Segment};

use super::dispatcher::{DispatcherContext, DispatcherWaker};
use super::executor::{QueueExecutor, SegmentQueue};
use crate::driver::Priority;
use crate::hub::Hub;
use crate::preempt::driver_backoff::DriverBackoff;

/// A queue whose work leaves when it is told to.
pub(crate) struct BestEffortQueue {
    segments: Arc<SegmentQueue>,
    waker: DispatcherWaker,
    has_partition: bool,
    /// KernelRequest for launches elsewhere, where this queue's are not among those that others keep driver_backoff for.
    driver_backoff: Option<Arc<DriverBackoff>>,
}

impl BestEffortQueue {
    pub(crate) fn open(
        hub: &Arc<Hub>,
        options: QueueOptions,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<BestEffortQueue, DeviceError> {
        let segments = Arc::new(SegmentQueue::new(options.capacity.max(1)));
        let priority = if options.high_priority { Priority::High } else { Priority::Low };
        let executor =
            QueueExecutor::new(hub.clone(), options.id, priority, segments.clone(), sink);
        let executor = executor.map_err(|err| hub.error(err))?;
        let context_of_thread = DispatcherContext {
            polling: hub.options().polling,
            driver_backoff: hub.driver_backoff.clone(),
            epoch_counters: hub.epoch_counters.clone(),
        };
        let added = hub.dispatcher.add(executor, context_of_thread);
        added.map_err(|err| DeviceError::Faulted {
            device: hub.info.name.clone(),
            reason: format!("cannot start the thread of best effort: {err}"),
        })?;
        Ok(BestEffortQueue {
            segments,
            waker: hub.dispatcher.waker(),
            has_partition: hub.partition.is_some() && priority == Priority::Low,
            driver_backoff: (priority == Priority::High).then(|| hub.driver_backoff.clone()),
        })
    }
}

impl Queue for BestEffortQueue {
    fn launch(&self, segment: Segment) -> Result<(), Segment> {
        self.segments.put(segment)?;
        if let Some(driver_backoff) = &self.driver_backoff {
            driver_backoff.cancel();
        }
        self.waker.wake();
        Ok(())
    }

    fn preempt(&self) {
        self.segments.preemption.preempt();
    }

    fn confine(&self, confined: bool) {
        if self.has_partition {
            self.segments.preemption.confine(confined);
        }
    }
}

impl Drop for BestEffortQueue {
    fn drop(&mut self) {
        self.segments.close();
        self.waker.wake();
    }
}
