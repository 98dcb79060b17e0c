//! The record of work that was made to leave: when, for whom, how long that took, and where it goes on.

use std::collections::VecDeque;
use std::ops::Range;

use base::Nanos;
use model::config::Class;

use super::completion::SegmentEnd;
use super::{ModelKey, Shared, State};
use crate::core::{Action, RequestId};

/// Upper bounds of the buckets that leaving is counted in, in microseconds.
pub const LEAVE_BOUNDS_US: [u64; 14] =
    [5, 10, 20, 40, 80, 160, 320, 640, 1_250, 2_500, 5_000, 10_000, 100_000, 1_000_000];

/// One time that work was told to leave and was gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preemption {
    /// When it was told, by the node's clock.
    pub ordered: Nanos,
    /// When the device gave it back.
    pub left: Nanos,
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
    /// From the order to leave until the device had given the work back.
    pub fn taken(&self) -> Nanos {
        self.left - self.ordered
    }
}

/// The latest preemptions of a node, oldest first, and how many there were in all.
#[derive(Clone, Debug, Default)]
pub struct Preemptions {
    /// All since the node started.
    pub total: u64,
    /// The latest ones.
    pub recent: Vec<Preemption>,
}

/// How long a model took to leave for real time, counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leaving {
    /// By the bounds of [`LEAVE_BOUNDS_US`], not summed up; the last one is of what is longer than all of them.
    pub counts: [u64; LEAVE_BOUNDS_US.len() + 1],
    /// All times together.
    pub sum: Nanos,
    /// Times others left for this model's real-time requests.
    pub caused: u64,
}

impl Leaving {
    fn count(&mut self, taken: Nanos) {
        let bucket = LEAVE_BOUNDS_US.partition_point(|&us| Nanos::from_micros(us) < taken);
        self.counts[bucket] += 1;
        self.sum += taken;
    }
}

/// An order that is on its way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order {
    pub(super) at: Nanos,
    pub(super) caused_by: Option<ModelKey>,
}

/// What runs on a queue, as far as preemption goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct OnQueue {
    pub(super) request: RequestId,
    pub(super) first_step: usize,
    pub(super) order: Option<Order>,
}

/// The queues' work and a bounded ring of what left them.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) queues: Vec<Option<OnQueue>>,
    recent: VecDeque<Preemption>,
    most: usize,
    total: u64,
}

impl Record {
    pub(super) fn new(queues: usize, most: usize) -> Record {
        Record { queues: vec![None; queues], recent: VecDeque::new(), most, total: 0 }
    }

    pub(super) fn add(&mut self, preemption: Preemption, leaving: &mut Leaving) {
        if preemption.caused_by.is_some() {
            leaving.count(preemption.taken());
        }
        self.total += 1;
        if self.recent.len() >= self.most {
            self.recent.pop_front();
        }
        if self.most > 0 {
            self.recent.push_back(preemption);
        }
    }

    pub(super) fn snapshot(&self) -> Preemptions {
        Preemptions { total: self.total, recent: self.recent.iter().cloned().collect() }
    }
}

impl State {
    /// The real-time model for which `actions` make work leave: of the request that starts among them, or else of the one
    /// that waits first.
    pub(super) fn cause(&self, actions: &[Action]) -> Option<ModelKey> {
        let started = actions.iter().find_map(|action| match action {
            Action::Launch { request, .. } => {
                self.live(*request).filter(|live| live.class == Class::RealTime)
            }
            _ => None,
        });
        self.key(started.map(|live| live.model).or_else(|| self.core.next_real_time())?)
    }

    /// Notes that the work on `queue` was told to leave.
    pub(super) fn note_order(&mut self, now: Nanos, queue: usize, cause: Option<ModelKey>) {
        let Some(Some(on_queue)) = self.record.queues.get_mut(queue) else { return };
        let caused_by = cause.filter(|_| !self.core.is_given_up(on_queue.request));
        on_queue.order = Some(Order { at: now, caused_by });
    }

    /// Books that `queue` is free again; whether its work had been told to leave for real time and did.
    pub(super) fn note_left(&mut self, now: Nanos, queue: usize, end: &SegmentEnd) -> bool {
        let Some(on_queue) = self.record.queues.get_mut(queue).and_then(Option::take) else {
            return false;
        };
        let model = self.live(on_queue.request).map(|live| live.model);
        let (Some(order), Some(model)) = (on_queue.order, model) else { return false };
        let Some(key) = self.key(model) else { return false };
        let preemption = Preemption {
            ordered: order.at,
            left: now,
            caused_by: order.caused_by,
            model: key,
            queue,
            steps: on_queue.first_step..end.next_step,
            step_count: end.step_count,
            finished: end.finished,
            busy: end.busy,
        };
        if let Some(causer) = order.caused_by.and_then(|key| self.model_mut(key)) {
            causer.leaving.caused += 1;
        }
        if let Some(entry) = &mut self.models[model.0 as usize] {
            self.record.add(preemption, &mut entry.leaving);
        }
        order.caused_by.is_some() && !end.finished
    }
}

impl Shared {
    pub(super) fn note_orders(&self, state: &mut State, now: Nanos, actions: &[Action]) {
        if let Some(observer) = &self.observer {
            actions.iter().for_each(|action| observer.action(now, action));
        }
        let mut cause = None;
        for action in actions {
            if let Action::Preempt { queue, .. } = action {
                let cause = *cause.get_or_insert_with(|| state.cause(actions));
                state.note_order(now, *queue, cause);
            }
        }
    }
}
