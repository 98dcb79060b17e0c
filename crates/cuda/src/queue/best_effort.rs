//! The queue of work that can be preempted, best effort above all.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use device::{CompletionSink, DeviceError, Queue, QueueOptions, Segment};

use super::dispatcher::{Dispatcher, DispatcherContext, DispatcherWaker};
use super::executor::QueueExecutor;
use super::segment_queue::SegmentQueue;
use crate::driver::Priority;
use crate::preempt::driver_backoff::DriverBackoff;
use crate::services::DeviceServices;

/// A queue whose work can be preempted.
pub(crate) struct BestEffortQueue {
    segments: Arc<SegmentQueue>,
    waker: DispatcherWaker,
    has_partition: bool,
    /// Set for a queue of high priority: best effort backs off for the launches of RT queues, and
    /// this queue launches from the best-effort thread, which must not wait for itself.
    driver_backoff: Option<Arc<DriverBackoff>>,
}

impl BestEffortQueue {
    pub(crate) fn open(
        services: &DeviceServices,
        dispatcher: &Dispatcher,
        options: QueueOptions,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<BestEffortQueue, DeviceError> {
        let DeviceServices { device, preemption, recorder, .. } = services;
        let segments = Arc::new(SegmentQueue::new(options.capacity.max(1)));
        let priority = if options.high_priority { Priority::High } else { Priority::Low };
        let executor = QueueExecutor::new(
            device.clone(),
            preemption.clone(),
            recorder,
            (options.id, priority),
            segments.clone(),
            sink,
        );
        let executor = executor.map_err(|err| device.error(err))?;
        let context = DispatcherContext {
            polling: device.options().polling,
            driver_backoff: preemption.driver_backoff.clone(),
            epoch_counters: preemption.epoch_counters.clone(),
        };
        let added = dispatcher.add(executor, context);
        added.map_err(|err| DeviceError::Faulted {
            device: device.info.name.clone(),
            reason: format!("cannot start the best-effort thread: {err}"),
        })?;
        Ok(BestEffortQueue {
            segments,
            waker: dispatcher.waker(),
            has_partition: recorder.partition.is_some() && priority == Priority::Low,
            driver_backoff: (priority == Priority::High).then(|| preemption.driver_backoff.clone()),
        })
    }
}

impl Queue for BestEffortQueue {
    fn launch(&self, segment: Segment) -> Result<(), Segment> {
        self.segments.push(segment)?;
        if let Some(driver_backoff) = &self.driver_backoff {
            driver_backoff.cancel();
        }
        self.waker.wake();
        Ok(())
    }

    fn preempt(&self) {
        self.segments.preemption.preempt();
    }

    fn progress(&self) -> u64 {
        self.segments.progress.load(Ordering::Relaxed)
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
