//! Tasks that were preempted inside a step.

use std::sync::Arc;

use crate::worker_pool::{RunningSegment, WorkerPool};

/// A task's claim on the worker pool whose threads are parked inside its step. Dropping it unwinds
/// these threads.
pub(crate) struct SuspendedTask {
    workers: Arc<WorkerPool>,
    resumed: bool,
}

impl SuspendedTask {
    /// The claim on `workers`, all of whose threads are parked.
    pub(crate) fn new(workers: Arc<WorkerPool>) -> SuspendedTask {
        workers.state().add_suspended_task();
        SuspendedTask { workers, resumed: false }
    }

    /// Lets the threads continue, now for `segment`.
    pub(crate) fn resume(mut self, segment: RunningSegment) -> Arc<WorkerPool> {
        self.resumed = true;
        self.workers.resume(segment);
        self.workers.clone()
    }
}

impl Drop for SuspendedTask {
    fn drop(&mut self) {
        self.workers.state().remove_suspended_task();
        if !self.resumed {
            self.workers.drop_suspended();
        }
    }
}
