//! Recovery from a lost or unresponsive device.

use base::Nanos;

use super::{Action, Core, End, Phase, ResumePoint};

/// A request that lost the device this often fails.
const LOSSES_MAX: u32 = 3;

impl Core {
    /// When the watchdog expires for a segment.
    pub(super) fn watchdog_due(&self) -> Option<Nanos> {
        let limit = self.options.watchdog?;
        if self.lost {
            return None;
        }
        let watched = self.queues.iter().filter(|slot| !slot.padded);
        watched.filter_map(|slot| slot.running).map(|running| running.since + limit).min()
    }

    /// Everything on the device is lost: running requests start again once it is back.
    pub(super) fn device_lost(&mut self, actions: &mut Vec<Action>) {
        self.lost = true;
        self.slice_until = None;
        for queue in 0..self.queues.len() {
            let slot = &mut self.queues[queue];
            slot.forget_budget();
            if let Some(running) = self.release_queue(queue, Nanos::ZERO)
                && let Some(state) = self.requests.get_mut(running.request)
            {
                state.losses += 1;
                let end = match state.phase {
                    Phase::Abandoned(end) => Some(end),
                    _ => (state.losses >= LOSSES_MAX).then_some(End::Failed),
                };
                state.phase = Phase::Preparing;
                match end {
                    Some(end) => self.end(running.request, end, actions),
                    None => self.count_waiting(running.model, 1),
                }
            }
        }
        for state in self.models.iter_mut().flatten() {
            state.weights.lose();
        }
        self.load_requests.clear();
    }

    /// The device makes progress after all: the watchdog starts again.
    pub(super) fn device_alive(&mut self, now: Nanos) {
        self.lost = false;
        for running in self.queues.iter_mut().filter_map(|slot| slot.running.as_mut()) {
            running.since = now;
        }
    }

    /// The device is back and empty: all pending requests are prepared again, oldest first.
    pub(super) fn device_ready(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        self.lost = false;
        self.request_pinned_loads(now);
        for request in self.requests.ids() {
            if self.requests.get(request).is_some_and(|state| state.phase == Phase::Waiting) {
                self.dequeue(request);
            }
            if let Some(state) = self.requests.get_mut(request) {
                state.phase = Phase::Preparing;
                state.progress = ResumePoint::default();
                self.prepare(now, request, actions);
            }
        }
    }
}
