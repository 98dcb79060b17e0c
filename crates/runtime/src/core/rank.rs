//! Real time that makes real time of a lower priority leave.
//!
//! Work that may have to leave runs in the device's form for that, on a queue of its own; the foremost priority never has to
//! and runs in the faster form. Priorities are known from the requests that have come so far.

use base::Nanos;
use model::config::Class;

use super::{Action, Core, Kind, RequestId, Running, Slot};

impl Core {
    /// Whether the device has a queue for real time that leaves.
    fn ranks(&self) -> bool {
        self.options.queues.yielding > 0
    }

    /// Notes that real time of that priority exists.
    pub(super) fn note_rank(&mut self, class: Class, priority: u32) {
        if class == Class::RealTime {
            self.foremost = self.foremost.min(priority);
        }
    }

    /// Whether the next real-time request belongs on a real-time queue like `queue`.
    pub(super) fn suits(&self, queue: usize) -> bool {
        let Some(((priority, ..), _)) = self.real_time.peek() else { return false };
        !self.ranks() || self.queues[queue].yields == (priority > self.foremost)
    }

    /// Real-time work that runs and is not about to leave for other.
    pub(super) fn real_time_running(&self) -> impl Iterator<Item = Running> + Clone + '_ {
        let runs = |slot: &Slot| {
            let running = slot.running.filter(|_| slot.kind == Kind::RealTime)?;
            (!slot.yields || !running.leaving).then_some(running)
        };
        self.queues.iter().filter_map(runs)
    }

    /// Makes real time leave for the request that waits first, where that has a higher priority and is helped by it.
    pub(super) fn outrank(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        let Some(how) = self.rules.preempt.filter(|_| self.ranks()) else { return };
        let Some(((urgent, ..), request)) = self.real_time.peek() else { return };
        for queue in 0..self.queues.len() {
            let slot = &self.queues[queue];
            let running = slot.running.filter(|running| slot.yields && !running.leaving);
            let Some(running) = running else { continue };
            let priority = self.requests.get(running.request).map(|state| state.priority);
            if priority.is_some_and(|priority| urgent < priority)
                && self.is_helped(now, request, running)
            {
                self.preempt(queue, how, actions);
            }
        }
    }

    /// Whether `request` would be late behind `running` and in time without it, as far as is known how long they take. Without
    /// a deadline, sooner is better.
    fn is_helped(&self, now: Nanos, request: RequestId, running: Running) -> bool {
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
