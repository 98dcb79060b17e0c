//! Log and statistics of preemptions: when, for which model, how long, and where the task resumes.

use std::collections::VecDeque;
use std::ops::Range;

use base::Nanos;
use model::config::Class;

use super::completion::SegmentEnd;
use super::{ModelKey, Shared, State};
use crate::core::{Action, RequestId};

/// Upper bounds of the histogram of preemption times, in microseconds.
pub const PREEMPTION_BOUNDS_US: [u64; 14] =
    [5, 10, 20, 40, 80, 160, 320, 640, 1_250, 2_500, 5_000, 10_000, 100_000, 1_000_000];

/// One preemption.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preemption {
    /// When it was requested, by the node's clock.
    pub requested_at: Nanos,
    /// When the device returned the task.
    pub preempted_at: Nanos,
    /// The real-time model it was preempted for; `None` after a cancellation or a passed deadline.
    pub caused_by: Option<ModelKey>,
    /// The preempted model.
    pub model: ModelKey,
    /// The queue it ran on.
    pub queue: usize,
    /// From the first step of this segment to the step at which it resumes.
    pub steps: Range<usize>,
    /// Number of steps of the task.
    pub step_count: usize,
    /// Whether it finished before it could be preempted.
    pub finished: bool,
    /// Device time of this segment.
    pub busy: Nanos,
}

impl Preemption {
    /// From the request until the device returned the task.
    pub fn latency(&self) -> Nanos {
        self.preempted_at - self.requested_at
    }
}

/// The latest preemptions of a node, oldest first, and their total.
#[derive(Clone, Debug, Default)]
pub struct PreemptionLog {
    /// Preemptions since the node started.
    pub total: u64,
    /// The latest ones.
    pub recent: Vec<Preemption>,
}

/// Preemption times of a model, and how many it caused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PreemptionStats {
    /// Counts by [`PREEMPTION_BOUNDS_US`], not cumulative; the last is for longer times.
    pub counts: [u64; PREEMPTION_BOUNDS_US.len() + 1],
    /// Sum of all times.
    pub sum: Nanos,
    /// Preemptions that this model's real-time requests caused.
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

/// The job on a queue, for the log.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueueJob {
    pub(super) request: RequestId,
    pub(super) first_step: usize,
    pub(super) began: Nanos,
    pub(super) preempt_request: Option<PreemptRequest>,
}

/// Running jobs by queue, and a ring of the latest preemptions.
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
    /// The real-time model for which `actions` preempt: of the request that starts among them, or
    /// else of the first waiting one.
    pub(super) fn cause(&self, actions: &[Action]) -> Option<ModelKey> {
        let started = actions.iter().find_map(|action| match action {
            Action::Launch { request, .. } => {
                self.job(*request).filter(|job| job.class == Class::RealTime)
            }
            _ => None,
        });
        self.key(started.map(|job| job.model).or_else(|| self.core.next_real_time())?)
    }

    /// Records that the job on `queue` is preempted.
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

    /// Records that `queue` is free; returns whether its job was preempted for real time.
    pub(super) fn record_queue_free(&mut self, now: Nanos, queue: usize, end: &SegmentEnd) -> bool {
        let Some(on_queue) = self.record.queues.get_mut(queue).and_then(Option::take) else {
            return false;
        };
        self.record_run(now, queue, &on_queue, end);
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
