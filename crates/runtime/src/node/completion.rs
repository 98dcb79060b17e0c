//! The way back: what a device gives back, and the replies it comes to.

use std::sync::Weak;

use base::Nanos;
use device::{Completion, CompletionSink, DeviceError, Outcome};

use super::{DueReply, Job, Rejection, Reply, ReplyTarget, Shared, State};
use crate::core::{End, Event, ModelId};
use crate::policy::PreemptionPoint;

/// How a segment came back.
pub(super) struct SegmentEnd {
    pub(super) next_step: usize,
    pub(super) step_count: usize,
    pub(super) finished: bool,
    pub(super) busy: Nanos,
}

impl Shared {
    /// Takes a segment back from the device.
    pub(super) fn complete(&self, completion: Completion) {
        let Completion { queue, token, task, outcome, busy } = completion;
        let queue = queue as usize;
        let next_step = task.next_step();
        let end = SegmentEnd {
            next_step,
            step_count: task.step_count(),
            finished: outcome == Outcome::Done,
            busy,
        };
        let (event, task, outputs, failure) = match outcome {
            Outcome::Preempted => {
                let left = PreemptionPoint::before(next_step);
                (Event::SegmentPreempted { queue, left, busy }, Some(task), None, None)
            }
            Outcome::Failed(err) => (Event::SegmentFailed { queue, busy }, None, None, Some(err)),
            // Outputs are made on the device's thread, outside the lock.
            Outcome::Done => match task.into_outputs() {
                Ok(outputs) => (Event::SegmentDone { queue, busy }, None, Some(outputs), None),
                Err(err) => (Event::SegmentFailed { queue, busy }, None, None, Some(err)),
            },
        };
        let mut state = self.lock();
        let left = state.record_queue_free(self.clock.now(), queue, &end);
        if let Some(job) = state.job.get_mut(token as usize).and_then(Option::as_mut) {
            job.task = task;
            job.outputs = outputs;
            job.failure = failure;
            job.timing.busy += busy;
            job.timing.preemptions += u32::from(left);
            let model = job.model;
            if let Some(entry) = &mut state.models[model.0 as usize] {
                entry.stats.preemptions += u64::from(left);
            }
        }
        self.step(state, event);
    }

    /// Turns the end of a request into its reply and counts it.
    pub(super) fn finish(
        &self,
        state: &mut State,
        now: Nanos,
        job: Job,
        end: End,
    ) -> Option<DueReply> {
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

    /// What went wrong; a request that failed without a word of the device found no room for its weights.
    pub(super) fn failure(
        &self,
        state: &State,
        model: ModelId,
        end: End,
        told: Option<DeviceError>,
    ) -> Option<DeviceError> {
        let no_room = || state.memory_failure(model, &self.device.info().name, self.budget);
        told.or_else(|| (end == End::Failed).then(no_room))
    }
}

/// Why a request that ended so has no outputs.
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

/// Hands completions to the node as long as it is there.
pub(super) struct Sink(pub(super) Weak<Shared>);

impl CompletionSink for Sink {
    fn complete(&self, completion: Completion) {
        if let Some(shared) = self.0.upgrade() {
            shared.complete(completion);
        }
    }
}
