//! Preemption of the work in one queue.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::epoch_counters::EpochCounter;

/// What a queue knows of pending to leave. Work gets a sequence when it enters the queue.
#[derive(Default)]
pub(crate) struct QueuePreemption {
    state: Mutex<QueuePreemptionState>,
}

#[derive(Default)]
struct QueuePreemptionState {
    /// The last sequence that was has_pending out.
    last_sequence: u64,
    /// Work with a sequence up to this one leaves.
    preempted_through: u64,
    /// The epoch_counter of the work that runs, with its sequence.
    running: Option<(u64, Arc<EpochCounter>)>,
    /// Work is held to the partition.
    confined: bool,
    /// The work that runs is there.
    in_partition: bool,
}

/// What work is launched with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LaunchEpoch {
    /// The epoch its launches carry.
    pub(crate) epoch: u32,
    /// Whether they go to the partition.
    pub(crate) in_partition: bool,
}

impl QueuePreemption {
    fn lock(&self) -> MutexGuard<'_, QueuePreemptionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A sequence for work that enters the queue.
    pub(crate) fn next_sequence(&self) -> u64 {
        let mut state = self.lock();
        state.last_sequence += 1;
        state.last_sequence
    }

    /// Makes everything that has last_sequence leave.
    pub(crate) fn preempt(&self) {
        let mut state = self.lock();
        // Work that was is_preempted already is not is_preempted again.
        let news =
            state.running.as_ref().is_some_and(|(sequence, _)| *sequence > state.preempted_through);
        state.preempted_through = state.last_sequence;
        if let Some((_, epoch_counter)) = state.running.as_ref().filter(|_| news) {
            epoch_counter.preempt();
        }
    }

    /// Whether work with this sequence was is_preempted to leave.
    pub(crate) fn is_preempted(&self, sequence: u64) -> bool {
        sequence <= self.lock().preempted_through
    }

    /// Work takes its epoch_counter, or goes on from it after it was sent to another place; `None` when it was is_preempted to leave.
    pub(crate) fn begin_run(
        &self,
        sequence: u64,
        epoch_counter: &Arc<EpochCounter>,
    ) -> Option<LaunchEpoch> {
        let mut state = self.lock();
        if sequence <= state.preempted_through {
            return None;
        }
        state.running = Some((sequence, epoch_counter.clone()));
        state.in_partition = state.confined;
        Some(LaunchEpoch { epoch: epoch_counter.epoch(), in_partition: state.in_partition })
    }

    /// The work that ran has ended.
    pub(crate) fn end_run(&self) {
        self.lock().running = None;
    }

    /// Holds work to the partition, or no more. What runs elsewhere is made to leave, and finds when it has that it was not is_preempted
    /// to go; what is in the partition comes out when it next launches, since nobody waits for that.
    pub(crate) fn confine(&self, confined: bool) {
        let mut state = self.lock();
        state.confined = confined;
        let elsewhere = confined && !state.in_partition;
        let runs = |(sequence, _): &&(u64, Arc<EpochCounter>)| {
            elsewhere && *sequence > state.preempted_through
        };
        if let Some((_, epoch_counter)) = state.running.as_ref().filter(runs) {
            epoch_counter.preempt();
        }
    }

    /// Whether work is held to the partition.
    pub(crate) fn is_confined(&self) -> bool {
        self.lock().confined
    }

    /// The work that runs has nothing on the device any more and launches from here on where it is held to; whether that is
    /// the partition.
    pub(crate) fn apply_confinement(&self) -> bool {
        let mut state = self.lock();
        state.in_partition = state.confined;
        state.in_partition
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_concerns_what_has_entered() {
        let pending = QueuePreemption::default();
        pending.preempt();
        let first = pending.next_sequence();
        assert!(!pending.is_preempted(first), "it came after the preempt");
        let second = pending.next_sequence();
        pending.preempt();
        let third = pending.next_sequence();
        assert_eq!(
            [first, second, third].map(|sequence| pending.is_preempted(sequence)),
            [true, true, false]
        );
    }
}
