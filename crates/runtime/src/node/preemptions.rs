//! The record of work that was made to leave: when, for whom, how long that took, and where it goes on.

use std::collections::VecDeque;
use std::ops::Range;

use base::Nanos;
use model::config::Class;

use super::completion::SegmentEnd;
use super::{ModelKey, Shared, State};
use crate::core::{Action, RequestId};

/// Upper bounds of the buckets that stats is counted in, in microseconds.
pub const PREEMPTION_BOUNDS_US: [u64; 14] =
    [5, 10, 20, 40, 80, 160, 320, 640, 1_250, 2_500, 5_000, 10_000, 100_000, 1_000_000];

/// One time that work was told to leave and was gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preemption {
    /// When it was told, by the node's clock.
    pub requested_at: Nanos,
    /// When the device gave it back.
    pub preempted_at: Nanos,
    /// The real-time model it left for; `None` when its own client gave it up or its deadline passed.
    pub caused_by: Option<ModelKey>,
    /// The model that left.
    pub model: ModelKey,
    /// The queue it ran on.
    pub queue: usize,
    /// From the step this launch began with to the step it goes on with.
    pub steps: Range<usize>,
    /// Steps of the whole task.
    pub step_count: usize,
    /// Whether it had done all its work before it could leave.
    pub finished: bool,
    /// Time the device spent on this launch.
    pub busy: Nanos,
}

impl Preemption {
    /// From the request to leave until the device had given the work back.
    pub fn latency(&self) -> Nanos {
        self.preempted_at - self.requested_at
    }
}

/// The latest preemptions of a node, oldest first, and how many there were in all.
#[derive(Clone, Debug, Default)]
pub struct PreemptionLog {
    /// All since the node started.
    pub total: u64,
    /// The latest ones.
    pub recent: Vec<Preemption>,
}

/// How long a model took to leave for real time, counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PreemptionStats {
    /// By the bounds of [`PREEMPTION_BOUNDS_US`], not summed up; the last one is of what is longer than all of them.
    pub counts: [u64; PREEMPTION_BOUNDS_US.len() + 1],
    /// All times together.
    pub sum: Nanos,
    /// Times others left for this model's real-time requests.
    pub caused: u64,
}

impl PreemptionStats {
    fn count(&mut self, taken: Nanos) {
        let bucket = PREEMPTION_BOUNDS_US.partition_point(|&us| Nanos::from_micros(us) < taken);
        self.counts[bucket] += 1;
        self.sum += taken;
    }
}

/// A preemption that was requested and has not ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct PreemptRequest {
    pub(super) at: Nanos,
    pub(super) caused_by: Option<ModelKey>,
}

/// What runs on a queue, as far as preemption goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueueJob {
    pub(super) request: RequestId,
    pub(super) first_step: usize,
    pub(super) preempt_request: Option<PreemptRequest>,
}

/// The queues' work and a bounded ring of what left them.
#[derive(Debug)]
pub(super) struct PreemptionRecord {
    pub(super) queues: Vec<Option<QueueJob>>,
    recent: VecDeque<Preemption>,
    capacity: usize,
    total: u64,
}

impl PreemptionRecord {
    pub(super) fn new(queues: usize, capacity: usize) -> PreemptionRecord {
        PreemptionRecord { queues: vec![None; queues], recent: VecDeque::new(), capacity, total: 0 }
    }

    pub(super) fn add(&mut self, preemption: Preemption, stats: &mut PreemptionStats) {
        if preemption.caused_by.is_some() {
            stats.count(preemption.latency());
        }
        self.total += 1;
        if self.recent.len() >= self.capacity {
            self.recent.pop_front();
        }
        if self.capacity > 0 {
            self.recent.push_back(preemption);
        }
    }

    pub(super) fn snapshot(&self) -> PreemptionLog {
        PreemptionLog { total: self.total, recent: self.recent.iter().cloned().collect() }
    }
}

impl State {
    /// The real-time model for which `actions` make work leave: of the request that starts among them, or else of the one
    /// that waits first.
    pub(super) fn cause(&self, actions: &[Action]) -> Option<ModelKey> {
        let started = actions.iter().find_map(|action| match action {
            Action::Launch { request, .. } => {
                self.job(*request).filter(|job| job.class == Class::RealTime)
            }
            _ => None,
        });
        self.key(started.map(|job| job.model).or_else(|| self.core.next_real_time())?)
    }

    /// Notes that the work on `queue` was told to leave.
    pub(super) fn record_preempt_request(
        &mut self,
        now: Nanos,
        queue: usize,
        cause: Option<ModelKey>,
    ) {
        let Some(Some(on_queue)) = self.record.queues.get_mut(queue) else { return };
        let caused_by = cause.filter(|_| !self.core.is_given_up(on_queue.request));
        on_queue.preempt_request = Some(PreemptRequest { at: now, caused_by });
    }

    /// Books that `queue` is free again; whether its work had been told to leave for real time and did.
    pub(super) fn record_queue_free(&mut self, now: Nanos, queue: usize, end: &SegmentEnd) -> bool {
        let Some(on_queue) = self.record.queues.get_mut(queue).and_then(Option::take) else {
            return false;
        };
        let model = self.job(on_queue.request).map(|job| job.model);
        let (Some(request), Some(model)) = (on_queue.preempt_request, model) else { return false };
        let Some(key) = self.key(model) else { return false };
        let preemption = Preemption {
            requested_at: request.at,
            preempted_at: now,
            caused_by: request.caused_by,
            model: key,
            queue,
            steps: on_queue.first_step..end.next_step,
            step_count: end.step_count,
            finished: end.finished,
            busy: end.busy,
        };
        if let Some(causer) = request.caused_by.and_then(|key| self.model_mut(key)) {
            causer.preemption_stats.caused += 1;
        }
        if let Some(entry) = &mut self.models[model.0 as usize] {
            self.record.add(preemption, &mut entry.preemption_stats);
        }
        request.caused_by.is_some() && !end.finished
    }
}

impl Shared {
    pub(super) fn record_actions(&self, state: &mut State, now: Nanos, actions: &[Action]) {
        if let Some(observer) = &self.observer {
            actions.iter().for_each(|action| observer.action(now, action));
        }
        let mut cause = None;
        for action in actions {
            if let Action::Preempt { queue, .. } = action {
                let cause = *cause.get_or_insert_with(|| state.cause(actions));
                state.record_preempt_request(now, *queue, cause);
            }
        }
    }
}
