//! Executes the segments of one best-effort queue, polled by the dispatcher and never blocking.
//!
//! `segment_queue` holds the segments that wait, `run_state` the states of the segment that runs,
//! `launches` what is enqueued of it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use device::{Completion, CompletionSink, DeviceError, Outcome, Segment, Task};

use super::queue_streams::QueueStreams;
use super::run_state::{RunState, Running, Transition};
use super::segment_queue::SegmentQueue;
use super::{device_task, failed};
use crate::device_context::DeviceContext;
use crate::driver::{Event, PinnedBuffer, Priority};
use crate::error::CudaError;
use crate::preempt::PreemptionServices;
use crate::program::graph_recorder::GraphRecorder;
use crate::program::task::CudaTask;

/// What a run uses of its queue and device.
pub(super) struct QueueResources {
    /// First, because buffers and context must outlive what is enqueued.
    pub(super) streams: QueueStreams,
    /// Where control words are read back to.
    pub(super) readback: PinnedBuffer,
    /// Events before and after a timed launch.
    pub(super) stamps: (Event, Event),
    pub(super) segments: Arc<SegmentQueue>,
    pub(super) preemption: Arc<PreemptionServices>,
    pub(super) device: Arc<DeviceContext>,
}

/// The segment that runs. Its state is kept apart, so that a failed transition cannot lose it.
pub(super) struct Run {
    pub(super) segment: Segment,
    pub(super) sequence: u64,
    pub(super) started: Instant,
    /// One past its last step.
    pub(super) end: usize,
    /// It runs a whole program whose weights are resident, so its time is that of a run. Cleared
    /// when the run is preempted or confined.
    pub(super) measures_program: bool,
}

/// One best-effort queue as the dispatcher sees it.
pub(super) struct QueueExecutor {
    id: u32,
    queue: QueueResources,
    sink: Arc<dyn CompletionSink>,
    run: Option<Run>,
    /// The state of `run`; taken out during a transition.
    state: Option<RunState>,
}

/// The result of one poll.
enum PollResult {
    /// Nothing to do.
    Idle,
    /// Something was done.
    Advanced,
    /// The run has ended.
    Ended(Outcome),
}

impl QueueExecutor {
    pub(super) fn new(
        device: Arc<DeviceContext>,
        preemption: Arc<PreemptionServices>,
        recorder: &GraphRecorder,
        (id, priority): (u32, Priority),
        segments: Arc<SegmentQueue>,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<QueueExecutor, CudaError> {
        let context = device.context();
        let queue = QueueResources {
            streams: QueueStreams::new(&device, recorder, priority)?,
            readback: PinnedBuffer::zeroed(context, 4096)?,
            stamps: (Event::new(context)?, Event::new(context)?),
            segments,
            preemption,
            device,
        };
        Ok(QueueExecutor { id, queue, sink, run: None, state: None })
    }

    /// Whether it runs a segment.
    pub(super) fn is_busy(&self) -> bool {
        self.run.is_some()
    }

    /// Whether it needs the dispatcher.
    pub(super) fn has_work(&self) -> bool {
        self.is_busy() || !self.queue.segments.is_empty() || self.queue.segments.is_closed()
    }

    /// Whether it is closed and has completed every segment.
    pub(super) fn is_finished(&self) -> bool {
        self.queue.segments.is_closed() && !self.is_busy() && self.queue.segments.is_empty()
    }

    /// Does what can be done without waiting; false when that is nothing.
    pub(super) fn poll(&mut self) -> bool {
        // A panic here is a defect, but it must cost one request and not the device's queues.
        let polled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.advance()));
        let outcome = match polled {
            Ok(Ok(PollResult::Idle)) => return false,
            Ok(Ok(PollResult::Advanced)) => {
                self.queue.segments.progress.fetch_add(1, Ordering::Relaxed);
                return true;
            }
            Ok(Ok(PollResult::Ended(outcome))) => outcome,
            Ok(Err(err)) => Outcome::Failed(err),
            Err(_) => Outcome::Failed(DeviceError::BadPlan("the queue panicked".to_string())),
        };
        self.finish(outcome);
        true
    }

    /// Begins the next segment, or takes the run to its next state if it can go there.
    fn advance(&mut self) -> Result<PollResult, DeviceError> {
        let (Some(run), Some(state)) = (&mut self.run, &self.state) else {
            return match self.queue.segments.pop() {
                Some((segment, sequence)) => self.begin(segment, sequence),
                None => Ok(PollResult::Idle),
            };
        };
        if let Some(fence) = state.awaited_fence()? {
            let reached = self.queue.streams.is_reached(fence);
            if !reached.map_err(|err| self.queue.device.error(err))? {
                return Ok(PollResult::Idle);
            }
        }
        let Some(state) = self.state.take() else { return Ok(PollResult::Idle) };
        let transition = state.advance(run, &mut self.queue)?;
        Ok(self.enter(transition))
    }

    fn enter(&mut self, transition: Transition) -> PollResult {
        match transition {
            Transition::To(state) => {
                self.state = Some(state);
                PollResult::Advanced
            }
            Transition::Ended(outcome) => PollResult::Ended(outcome),
        }
    }

    /// Takes up a segment and enqueues its first launches.
    fn begin(&mut self, segment: Segment, sequence: u64) -> Result<PollResult, DeviceError> {
        self.count_run(true);
        let queue = &mut self.queue;
        let run = self.run.insert(Run {
            segment,
            sequence,
            started: Instant::now(),
            end: 0,
            measures_program: false,
        });
        queue.device.check_healthy()?;
        let (task, steps) = device_task(&queue.device, &mut run.segment)?;
        if steps.is_empty() {
            return Ok(PollResult::Ended(Outcome::Done));
        }
        if queue.segments.preemption.is_preempted(sequence) {
            return Ok(PollResult::Ended(Outcome::Preempted));
        }
        task.acquire_memory(Priority::Low)?;
        let counter = task.epoch_counter().map_err(|err| queue.device.error(err))?;
        let first = steps.start;
        let arrival = task.specialization.arrival().map_err(|err| failed(task, first, err))?;
        run.measures_program = arrival.is_none() && steps == (0..task.step_count());
        run.end = steps.end;
        let Some(launch_epoch) = queue.segments.preemption.begin_run(sequence, &counter) else {
            return Ok(PollResult::Ended(Outcome::Preempted));
        };
        let transition = Running::start(counter, launch_epoch, first, run, queue)?;
        Ok(self.enter(transition))
    }

    /// Reports what became of the run's segment.
    fn finish(&mut self, outcome: Outcome) {
        self.queue.segments.preemption.end_run();
        self.state = None;
        let Some(Run { mut segment, started, .. }) = self.run.take() else { return };
        self.count_run(false);
        if matches!(outcome, Outcome::Failed(_)) {
            // What it had enqueued may still run.
            if let Err(err) = self.queue.streams.current().synchronize() {
                tracing::debug!(%err, "stream not drained after a failure");
            }
            if let Some(task) = segment.task.as_any_mut().downcast_mut::<CudaTask>() {
                task.abandon();
            }
        }
        let Segment { token, task, .. } = segment;
        let busy = started.elapsed().into();
        self.sink.complete(Completion { queue: self.id, token, task, outcome, busy });
    }

    /// Counts a run that begins or has ended: of RT in the RT activity, else as best effort.
    fn count_run(&self, begun: bool) {
        let PreemptionServices { rt_activity, best_effort_runs, .. } = &*self.queue.preemption;
        match (self.queue.streams.priority, begun) {
            (Priority::High, true) => rt_activity.segment_started(),
            (Priority::High, false) => rt_activity.segment_ended(),
            (Priority::Low, true) => drop(best_effort_runs.fetch_add(1, Ordering::Relaxed)),
            (Priority::Low, false) => drop(best_effort_runs.fetch_sub(1, Ordering::Relaxed)),
        }
    }
}
