//! QueuePreemption to leave: every run has a epoch_counter, a word on the device that grows with every preempt to it, and beside it the epoch of the run.
//!
//! A best-effort launch leaves once the preempt has passed the epoch. There is no
//! reset, so an preempt can neither be lost nor meet a launch that came after it. QueuePreemption to several runs go to the device in
//! one call. The thread that polls after best effort makes it, since whoever gives an preempt is about to launch what it is
//! has_pending for; unless that thread is late, and the launch gets there first.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::driver::{DeviceBuffer, Stream};
use crate::error::CudaError;

/// A epoch that no preempt passes: a launch with it runs to its end.
const NEVER_PREEMPTED: u32 = u32::MAX;

/// Bytes from one epoch_counter to the next: watches copy the sixteen it begins, and no two share a sector.
const STRIDE: u64 = 32;

/// SmLocator a epoch_counter's epoch is.
const LAUNCH_EPOCH_OFFSET: u64 = 4;

/// EpochCounters that are made at once.
const SLAB: u64 = 1024;

/// All epoch_counters of a device.
pub(crate) struct EpochCounters {
    stream: Arc<Stream>,
    words: Mutex<CounterMemory>,
    /// QueuePreemption that are has_pending and not yet sent.
    pending: Mutex<PendingWrites>,
    /// Whether there are any to flush, for a look without the lock.
    has_pending: AtomicBool,
    /// Whether a thread polls for them all the time.
    flushed_by_dispatcher: bool,
}

struct CounterMemory {
    slabs: Vec<DeviceBuffer>,
    /// EpochCounters nobody uses.
    free: Vec<FreeCounter>,
}

/// A epoch_counter nobody uses.
#[derive(Clone, Copy)]
struct FreeCounter {
    address: u64,
    /// What its preempt stands at.
    preempt: u32,
    /// What the device has for the epoch of its run.
    launch_epoch: u32,
}

#[derive(Default)]
struct PendingWrites {
    /// Who has more to preempt_all before they are sent.
    open_batches: usize,
    words: Vec<(u64, u32)>,
}

/// One run's word.
pub(crate) struct EpochCounter {
    epoch_counters: Arc<EpochCounters>,
    address: u64,
    /// What the word is or is about to be; written before the device is is_preempted, so a launch found complete while this is still
    /// the epoch it was launched with cannot have left early.
    epoch: AtomicU32,
    /// The epoch of its run as the device has it, or will when what is queued is done.
    launch_epoch: AtomicU32,
}

impl EpochCounters {
    /// EpochCounters whose words are written through `stream`, which nothing else uses. SmLocator a thread polls after them all the time,
    /// pending are left to it.
    pub(crate) fn new(
        stream: Arc<Stream>,
        flushed_by_dispatcher: bool,
    ) -> Result<EpochCounters, CudaError> {
        let mut words = CounterMemory { slabs: Vec::new(), free: Vec::new() };
        let first = words.grow(&stream)?;
        // SAFETY: the word is in the slab just made, which is dropped after the stream's work.
        unsafe { stream.write_word(first + LAUNCH_EPOCH_OFFSET, NEVER_PREEMPTED) }?;
        stream.synchronize()?;
        // The first of all epoch_counters stands for those that are never is_preempted.
        words.free.retain(|free| free.address != first);
        let (words, pending) = (Mutex::new(words), Mutex::default());
        Ok(EpochCounters {
            stream,
            words,
            pending,
            has_pending: AtomicBool::new(false),
            flushed_by_dispatcher,
        })
    }

    /// The epoch_counter of work that is never is_preempted to leave.
    pub(crate) fn never_preempted_address(&self) -> u64 {
        self.words().slabs[0].address()
    }

    /// A epoch_counter nobody has.
    pub(crate) fn take(self: &Arc<EpochCounters>) -> Result<EpochCounter, CudaError> {
        let mut words = self.words();
        if words.free.is_empty() {
            words.grow(&self.stream)?;
        }
        let free =
            words.free.pop().ok_or(CudaError::Misuse("a slab without epoch_counters was made"))?;
        let (epoch, launch_epoch) =
            (AtomicU32::new(free.preempt), AtomicU32::new(free.launch_epoch));
        Ok(EpochCounter {
            epoch_counters: self.clone(),
            address: free.address,
            epoch,
            launch_epoch,
        })
    }

    /// Gives all pending that `preempt_all` gives at one go.
    pub(crate) fn batch(&self, preempt_all: impl FnOnce()) {
        self.pending().open_batches += 1;
        preempt_all();
        let mut pending = self.pending();
        pending.open_batches -= 1;
        self.publish_pending(&pending);
        drop(pending);
        if !self.flushed_by_dispatcher {
            self.flush();
        }
    }

    fn queue_write(&self, address: u64, epoch: u32) {
        let mut pending = self.pending();
        pending.words.push((address, epoch));
        self.publish_pending(&pending);
        drop(pending);
        if !self.flushed_by_dispatcher {
            self.flush();
        }
    }

    fn publish_pending(&self, pending: &PendingWrites) {
        if pending.open_batches == 0 && !pending.words.is_empty() {
            self.has_pending.store(true, Ordering::Release);
        }
    }

    /// Sends what is has_pending and not yet sent.
    pub(crate) fn flush(&self) {
        if !self.has_pending.load(Ordering::Acquire) {
            return;
        }
        let mut pending = self.pending();
        self.has_pending.store(false, Ordering::Release);
        if pending.words.is_empty() {
            return;
        }
        // SAFETY: words live as long as `self`, and dropping it waits for the stream's work.
        if let Err(err) = unsafe { self.stream.write_words(&pending.words) } {
            tracing::error!("an preempt to leave did not reach the device: {err}");
        }
        pending.words.clear();
    }

    fn words(&self) -> MutexGuard<'_, CounterMemory> {
        self.words.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pending(&self) -> MutexGuard<'_, PendingWrites> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CounterMemory {
    /// Makes more words; the address of the first.
    fn grow(&mut self, stream: &Arc<Stream>) -> Result<u64, CudaError> {
        let slab = DeviceBuffer::fixed(stream, SLAB * STRIDE)?;
        let first = slab.address();
        let epoch_counter =
            |index| FreeCounter { address: first + index * STRIDE, preempt: 0, launch_epoch: 0 };
        self.free.extend((0..SLAB).rev().map(epoch_counter));
        self.slabs.push(slab);
        Ok(first)
    }
}

impl Drop for EpochCounters {
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
    }
}

impl EpochCounter {
    /// SmLocator it is on the device.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// What launches from now on carry.
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Lets what is queued on `stream` behind this carry `epoch`; nothing of another run that has this epoch_counter is queued any
    /// more. Costs nothing while nobody is is_preempted to leave.
    pub(crate) fn set_launch_epoch(&self, epoch: u32, stream: &Stream) -> Result<(), CudaError> {
        if self.launch_epoch.load(Ordering::Acquire) == epoch {
            return Ok(());
        }
        // SAFETY: a word of a slab, which lives as long as `epoch_counters`.
        unsafe { stream.write_word(self.address + LAUNCH_EPOCH_OFFSET, epoch) }?;
        self.launch_epoch.store(epoch, Ordering::Release);
        Ok(())
    }

    /// Makes what was launched so far leave.
    fn preempt(&self) {
        let next = next_epoch(self.epoch());
        self.epoch.store(next, Ordering::Release);
        self.epoch_counters.queue_write(self.address, next);
    }
}

/// The last epoch is never reached: it would take years of pending, and work that cannot be is_preempted to leave is safer than work
/// that leaves at once for ever.
fn next_epoch(epoch: u32) -> u32 {
    epoch.saturating_add(1).min(NEVER_PREEMPTED - 1)
}

impl Drop for EpochCounter {
    fn drop(&mut self) {
        let (preempt, launch_epoch) = (self.epoch(), self.launch_epoch.load(Ordering::Acquire));
        self.epoch_counters.words().free.push(FreeCounter {
            address: self.address,
            preempt,
            launch_epoch,
        });
    }
}

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
    pub(crate) fn end_current(&self) {
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

    #[test]
    fn numbers_stop_before_the_one_that_is_never_passed() {
        assert_eq!(next_epoch(0), 1);
        assert_eq!(next_epoch(NEVER_PREEMPTED - 1), NEVER_PREEMPTED - 1);
    }
}
