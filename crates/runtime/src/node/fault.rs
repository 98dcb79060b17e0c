//! What a node does once its device is faulted: it answers everything and stops.

use std::sync::atomic::Ordering;

use base::Nanos;
use device::DeviceError;

use super::{DueReply, ModelId, ModelStats, Node, ReplyTarget, Shared, State};
use crate::core::End;

impl Node {
    /// Why the device no longer runs anything, if so.
    pub fn fault(&self) -> Option<DeviceError> {
        let fault = self.shared.lock().fault.clone();
        fault.or_else(|| self.shared.device.fault())
    }

    /// Gives the device up: every pending request is answered with `fault` now, whatever the device
    /// does with it, and later ones are refused. The node can only be dropped after this.
    pub fn abandon(&self, fault: &DeviceError) {
        let shared = &self.shared;
        let due = {
            let mut state = shared.lock();
            state.fault.get_or_insert_with(|| fault.clone());
            state.draining = true;
            match std::mem::replace(&mut state.abandoned, true) {
                true => Vec::new(),
                false => shared.refuse_pending(&mut state, fault),
            }
        };
        // Threads that wait for the device end their waits.
        shared.device.give_up(&fault.to_string());
        for (send, reply) in due {
            shared.send(send, reply);
        }
    }

    /// Goes on counting where another node stopped.
    pub(crate) fn restore_stats(&self, model: super::ModelKey, stats: ModelStats) {
        if let Some(entry) = self.shared.lock().model_mut(model) {
            entry.stats = stats;
        }
    }
}

impl Shared {
    /// Whether every run has got further since the watchdog looked last, or is seen for the first
    /// time.
    pub(super) fn makes_progress(&self, state: &mut State, now: Nanos) -> bool {
        let queues = self.queues.get().map(Vec::as_slice).unwrap_or_default();
        let mut progress = true;
        for (index, queue) in queues.iter().enumerate() {
            let running = state.record.queues.get(index).copied().flatten();
            // What began after the last look is not late.
            let seen = running.filter(|job| job.began < now);
            let seen = seen.map(|job| (job.request, job.began, queue.progress()));
            progress &= seen.is_none() || seen != state.watched[index];
            state.watched[index] = seen;
        }
        progress
    }

    /// The replies of all pending requests, counted as unsent.
    fn refuse_pending(&self, state: &mut State, fault: &DeviceError) -> Vec<DueReply> {
        let now = self.clock.now();
        let mut due = Vec::new();
        for slot in 0..state.jobs.len() {
            let Some(mut job) = state.jobs[slot].take() else { continue };
            // Members are answered below; they may wait for several jobs.
            if matches!(job.reply_to, ReplyTarget::Request(_)) {
                job.failure = Some(fault.clone());
                due.extend(self.finish(state, now, job, End::Failed));
            }
        }
        for model in 0..state.models.len() {
            due.extend(state.refuse_members(now, ModelId(model as u32), fault));
        }
        self.unsent.fetch_add(due.len(), Ordering::SeqCst);
        due
    }
}
