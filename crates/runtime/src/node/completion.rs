//! Completions of segments, and the replies that follow.

use std::sync::Weak;

use base::Nanos;
use device::{Completion, CompletionSink, DeviceError, Outcome, thread_watch};

use super::{DueReply, Job, Rejection, Reply, ReplyTarget, Shared, State};
use crate::core::{End, Event, ModelId};
use crate::policy::PreemptionPoint;
use crate::spans::CopyKind;

/// How a segment ended.
pub(super) struct SegmentEnd {
    pub(super) next_step: usize,
    pub(super) step_count: usize,
    pub(super) finished: bool,
    pub(super) failed: bool,
    pub(super) busy: Nanos,
}

impl Shared {
    /// Processes the completion of a segment.
    pub(super) fn complete(&self, completion: Completion) {
        let _turn = thread_watch::turn();
        thread_watch::call("complete");
        let Completion { queue, token, task, outcome, busy } = completion;
        let queue = queue as usize;
        let next_step = task.next_step();
        let end = SegmentEnd {
            next_step,
            step_count: task.step_count(),
            finished: outcome == Outcome::Done,
            failed: matches!(outcome, Outcome::Failed(_)),
            busy,
        };
        let began = self.clock.now();
        let (event, task, outputs, failure) = match outcome {
            Outcome::Preempted => {
                let point = PreemptionPoint::before(next_step);
                (Event::SegmentPreempted { queue, point, busy }, Some(task), None, None)
            }
            Outcome::Failed(err) => (Event::SegmentFailed { queue, busy }, None, None, Some(err)),
            // Outputs are created on the device's thread, without the lock.
            Outcome::Done => match task.into_outputs() {
                Ok(outputs) => (Event::SegmentDone { queue, busy }, None, Some(outputs), None),
                Err(err) => (Event::SegmentFailed { queue, busy }, None, None, Some(err)),
            },
        };
        let copied = outputs.as_deref().and_then(|outputs| self.timed_outputs(began, outputs));
        let mut state = self.lock();
        let preempted = state.record_queue_free(self.clock.now(), queue, &end);
        if let Some(job) = state.jobs.get_mut(token as usize).and_then(Option::as_mut) {
            job.task = task;
            job.outputs = outputs;
            job.failure = failure;
            job.timing.busy += busy;
            job.timing.preemptions += u32::from(preempted);
            let (number, model, class) = (job.number, job.model, job.class);
            if let Some(entry) = &mut state.models[model.0 as usize] {
                entry.stats.preemptions += u64::from(preempted);
            }
            if let (Some((copy, ended)), Some(key)) = (copied, state.key(model)) {
                state.record_copy(CopyKind::Outputs, (number, key, class), copy, ended);
            }
        }
        self.step(state, event);
    }

    /// Creates the reply of a request that ended, and counts it.
    pub(super) fn finish(
        &self,
        state: &mut State,
        now: Nanos,
        job: Job,
        end: End,
    ) -> Option<DueReply> {
        state.record_request(now, &job, end);
        let Job { model, outputs, failure, reply_to, mut timing, .. } = job;
        let ReplyTarget::Request(reply) = reply_to else { return None };
        timing.finished = now;
        let failure = self.failure(state, model, end, failure);
        let entry = state.models[model.0 as usize].as_mut();
        let capacity = entry.as_ref().map_or(0, |entry| entry.queue_capacity);
        let result = match (end, outputs) {
            (End::Done, Some(outputs)) => Ok(outputs),
            (end, _) => Err(rejected(end, failure, capacity)),
        };
        if let Some(entry) = entry {
            entry.stats.executions += u64::from(end == End::Done);
            entry.stats.count(&result, &timing);
        }
        Some((reply, Reply { result, timing }))
    }

    /// The reason of a failure; without one from the device, the weights did not fit.
    pub(super) fn failure(
        &self,
        state: &State,
        model: ModelId,
        end: End,
        reported: Option<DeviceError>,
    ) -> Option<DeviceError> {
        let no_room = || state.memory_failure(model, &self.device.info().name, self.budget);
        reported.or_else(|| (end == End::Failed).then(no_room))
    }
}

/// The rejection for an end without outputs.
pub(super) fn rejected(end: End, failure: Option<DeviceError>, capacity: usize) -> Rejection {
    let unknown = |why: &str| DeviceError::BadPlan(why.to_string());
    match end {
        End::Done => Rejection::Device(unknown("done without outputs")),
        End::Failed => {
            Rejection::Device(failure.unwrap_or_else(|| unknown("failed without a reason")))
        }
        End::DeadlineExceeded => Rejection::DeadlineExceeded,
        End::Cancelled => Rejection::Cancelled,
        End::QueueFull => Rejection::QueueFull { capacity },
        End::NoSuchModel => Rejection::NoSuchModel,
        End::ShuttingDown => Rejection::ShuttingDown,
    }
}

/// Passes completions to the node while it exists.
pub(super) struct Sink(pub(super) Weak<Shared>);

impl CompletionSink for Sink {
    fn complete(&self, completion: Completion) {
        if let Some(shared) = self.0.upgrade() {
            shared.complete(completion);
        }
    }
}
