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

/// Where a epoch_counter's epoch is.
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
    /// EpochCounters whose words are written through `stream`, which nothing else uses. Where a thread polls after them all the time,
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
    /// Where it is on the device.
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
    pub(super) fn preempt(&self) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_stop_before_the_value_that_is_never_passed() {
        assert_eq!(next_epoch(0), 1);
        assert_eq!(next_epoch(NEVER_PREEMPTED - 1), NEVER_PREEMPTED - 1);
    }
}
