//! Which work of a queue is preempted, and where the run may launch.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::epoch_counters::EpochCounter;

/// The preemption state of one queue. Work gets a sequence number when it enters the queue; a
/// preemption covers all numbers given out so far.
#[derive(Default)]
pub(crate) struct QueuePreemption {
    state: Mutex<QueuePreemptionState>,
}

#[derive(Default)]
struct QueuePreemptionState {
    /// The last sequence number given out.
    last_sequence: u64,
    /// Work with a sequence number up to this one is preempted.
    preempted_through: u64,
    /// The epoch counter of the run, with its sequence number.
    running: Option<(u64, Arc<EpochCounter>)>,
    /// The queue is confined to the SM partition.
    confined: bool,
    /// The run launches there.
    in_partition: bool,
}

/// What a run launches with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LaunchEpoch {
    /// The epoch that its launches carry.
    pub(crate) epoch: u32,
    /// Whether they go to the SM partition.
    pub(crate) in_partition: bool,
}

impl QueuePreemption {
    fn lock(&self) -> MutexGuard<'_, QueuePreemptionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sequence number of work that enters the queue.
    pub(crate) fn next_sequence(&self) -> u64 {
        let mut state = self.lock();
        state.last_sequence += 1;
        state.last_sequence
    }

    /// Preempts all work that has entered the queue.
    pub(crate) fn preempt(&self) {
        let mut state = self.lock();
        // A run is preempted once.
        let not_yet =
            state.running.as_ref().is_some_and(|(sequence, _)| *sequence > state.preempted_through);
        state.preempted_through = state.last_sequence;
        if let Some((_, epoch_counter)) = state.running.as_ref().filter(|_| not_yet) {
            epoch_counter.preempt();
        }
    }

    /// Whether work with this sequence number is preempted.
    pub(crate) fn is_preempted(&self, sequence: u64) -> bool {
        sequence <= self.lock().preempted_through
    }

    /// Begins a run, or continues it after it was moved to or from the SM partition; `None` when it
    /// is preempted.
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

    /// The run has ended.
    pub(crate) fn end_run(&self) {
        self.lock().running = None;
    }

    /// Confines the queue to the SM partition, or ends that. A run outside of the partition is
    /// preempted, finds that its sequence number is not, and resumes inside. A run inside leaves
    /// the partition with its next launch, since nothing waits for that.
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

    /// Whether the queue is confined to the SM partition.
    pub(crate) fn is_confined(&self) -> bool {
        self.lock().confined
    }

    /// Nothing of the run is in flight: its next launch goes where the queue is confined to.
    /// Returns whether that is the partition.
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
    fn preempts_only_work_that_has_entered() {
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
