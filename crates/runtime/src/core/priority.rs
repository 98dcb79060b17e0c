//! Preemption of real time by real time of a higher priority.
//!
//! Work that may be preempted runs on a preemptible queue. The highest priority is never preempted
//! and uses the faster kernels. Priorities are known from the requests so far.

use base::Nanos;
use model::config::Class;

use super::{Action, Core, QueueKind, QueueState, RequestId, Running};

impl Core {
    /// Whether there is a preemptible real-time queue.
    fn preempts_real_time(&self) -> bool {
        self.options.queues.yielding > 0
    }

    /// Records that real time of this priority exists.
    pub(super) fn note_priority(&mut self, class: Class, priority: u32) {
        if class == Class::RealTime {
            self.highest_priority = self.highest_priority.min(priority);
        }
    }

    /// Whether the next real-time request may run on a real-time queue like `queue`.
    pub(super) fn fits_queue(&self, queue: usize) -> bool {
        let Some(((priority, ..), _)) = self.real_time.peek() else { return false };
        !self.preempts_real_time()
            || self.queues[queue].yields == (priority > self.highest_priority)
    }

    /// Running real-time work that does not yield to another request.
    pub(super) fn real_time_running(&self) -> impl Iterator<Item = Running> + Clone + '_ {
        let runs = |slot: &QueueState| {
            let running = slot.running.filter(|_| slot.kind == QueueKind::RealTime)?;
            (!slot.yields || !running.preempting).then_some(running)
        };
        self.queues.iter().filter_map(runs)
    }

    /// Preempts real time of a lower priority for the first waiting request, where that saves its
    /// deadline.
    pub(super) fn preempt_lower_priority(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        let Some(how) = self.rules.preempt.filter(|_| self.preempts_real_time()) else { return };
        let Some(((urgent, ..), request)) = self.real_time.peek() else { return };
        for queue in 0..self.queues.len() {
            let slot = &self.queues[queue];
            let running = slot.running.filter(|running| slot.yields && !running.preempting);
            let Some(running) = running else { continue };
            let priority = self.requests.get(running.request).map(|state| state.priority);
            if priority.is_some_and(|priority| urgent < priority)
                && self.saves_deadline(now, request, running)
            {
                self.preempt(queue, how, actions);
            }
        }
    }

    /// Whether `request` would be late behind `running` and in time without it, if their run times
    /// are known. Without a deadline, earlier is better.
    fn saves_deadline(&self, now: Nanos, request: RequestId, running: Running) -> bool {
        let Some(state) = self.requests.get(request) else { return false };
        let usable = self.model(state.model).is_some_and(|model| model.weights.usable());
        if !usable || state.deadline == Nanos::MAX {
            return usable;
        }
        let (own, other) = (self.co_run.alone(state.model), self.co_run.alone(running.model));
        let (Some(own), Some(other)) = (own, other) else { return true };
        let rest = Nanos(other.0.saturating_sub((now - running.since).0));
        now + own <= state.deadline && now + rest + own > state.deadline
    }
}
