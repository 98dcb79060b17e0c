//! Epoch counters: one word in device memory per run, which a preemption of the run increments.
//! Next to it is the launch epoch, the value that the run's launches carry.
//!
//! A best-effort kernel exits once the counter has passed its launch epoch. Counters are never
//! reset, so a preemption is never lost and never hits a launch that came after it. Preemptions of
//! several runs are written to the device in one call. The dispatcher makes that call, because the
//! thread that preempts is about to launch real time; when the dispatcher is late, the launching
//! thread makes it.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::driver::{DeviceBuffer, Stream};
use crate::error::CudaError;

/// An epoch that no counter passes: a launch with it runs to its end.
const NEVER_PREEMPTED: u32 = u32::MAX;

/// Bytes between two counters: kernels copy the first sixteen, and no two share a sector.
const STRIDE: u64 = 32;

/// Offset of the launch epoch.
const LAUNCH_EPOCH_OFFSET: u64 = 4;

/// Counters per allocation.
const SLAB: u64 = 1024;

/// All epoch counters of a device.
pub(crate) struct EpochCounters {
    stream: Arc<Stream>,
    words: Mutex<CounterMemory>,
    /// Counter values that are not written to the device yet.
    pending: Mutex<PendingWrites>,
    /// Whether there are any, readable without the lock.
    has_pending: AtomicBool,
    /// Whether the dispatcher flushes all the time.
    flushed_by_dispatcher: bool,
}

struct CounterMemory {
    slabs: Vec<DeviceBuffer>,
    /// Counters that no run uses.
    free: Vec<FreeCounter>,
}

/// A counter that no run uses.
#[derive(Clone, Copy)]
struct FreeCounter {
    address: u64,
    /// Value of the counter.
    epoch: u32,
    /// Launch epoch on the device.
    launch_epoch: u32,
}

#[derive(Default)]
struct PendingWrites {
    /// Callers of `batch` that have more to add before the next flush.
    open_batches: usize,
    words: Vec<(u64, u32)>,
}

/// The epoch counter of one run.
pub(crate) struct EpochCounter {
    epoch_counters: Arc<EpochCounters>,
    address: u64,
    /// The value the counter has or will have on the device. It is stored before the device write,
    /// so a launch found complete while this is still its launch epoch was not preempted.
    epoch: AtomicU32,
    /// The launch epoch on the device once everything enqueued is done.
    launch_epoch: AtomicU32,
}

impl EpochCounters {
    /// Counters that are written through `stream`, which nothing else uses. Where a dispatcher
    /// flushes all the time, preemptions wait for it.
    pub(crate) fn new(
        stream: Arc<Stream>,
        flushed_by_dispatcher: bool,
    ) -> Result<EpochCounters, CudaError> {
        let mut words = CounterMemory { slabs: Vec::new(), free: Vec::new() };
        let first = words.grow(&stream)?;
        // SAFETY: the word is in the slab just allocated, which is freed after the stream's work.
        unsafe { stream.write_word(first + LAUNCH_EPOCH_OFFSET, NEVER_PREEMPTED) }?;
        stream.synchronize()?;
        // The first counter is shared by all work that is never preempted.
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

    /// Address of the counter of work that is never preempted.
    pub(crate) fn never_preempted_address(&self) -> u64 {
        self.words().slabs[0].address()
    }

    /// A counter for a run.
    pub(crate) fn take(self: &Arc<EpochCounters>) -> Result<EpochCounter, CudaError> {
        let mut words = self.words();
        if words.free.is_empty() {
            words.grow(&self.stream)?;
        }
        let free =
            words.free.pop().ok_or(CudaError::Misuse("an allocation without epoch counters"))?;
        let (epoch, launch_epoch) = (AtomicU32::new(free.epoch), AtomicU32::new(free.launch_epoch));
        Ok(EpochCounter {
            epoch_counters: self.clone(),
            address: free.address,
            epoch,
            launch_epoch,
        })
    }

    /// Writes all preemptions that `preempt_all` makes with one call.
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

    fn add_pending(&self, address: u64, epoch: u32) {
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

    /// Writes pending counter values to the device. Kernels of the runs exit once they read them.
    pub(crate) fn flush(&self) {
        if !self.has_pending.load(Ordering::Acquire) {
            return;
        }
        let mut pending = self.pending();
        self.has_pending.store(false, Ordering::Release);
        if pending.words.is_empty() {
            return;
        }
        // SAFETY: the words live as long as `self`, and dropping it waits for the stream's work.
        if let Err(err) = unsafe { self.stream.write_words(&pending.words) } {
            tracing::error!(%err, "preemption not written to the device");
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
    /// Allocates more counters; returns the address of the first.
    fn grow(&mut self, stream: &Arc<Stream>) -> Result<u64, CudaError> {
        let slab = DeviceBuffer::fixed(stream, SLAB * STRIDE)?;
        let first = slab.address();
        let counter =
            |index| FreeCounter { address: first + index * STRIDE, epoch: 0, launch_epoch: 0 };
        self.free.extend((0..SLAB).rev().map(counter));
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
    /// Address on the device.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// The epoch that launches carry from now on.
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Launches enqueued on `stream` behind this carry `epoch`. Nothing of an earlier run with this
    /// counter is enqueued any more. Makes no call unless the run was preempted.
    pub(crate) fn set_launch_epoch(&self, epoch: u32, stream: &Stream) -> Result<(), CudaError> {
        if self.launch_epoch.load(Ordering::Acquire) == epoch {
            return Ok(());
        }
        // SAFETY: a word of a slab, which lives as long as `epoch_counters`.
        unsafe { stream.write_word(self.address + LAUNCH_EPOCH_OFFSET, epoch) }?;
        self.launch_epoch.store(epoch, Ordering::Release);
        Ok(())
    }

    /// Preempts everything launched so far: the counter passes the epoch that it carries.
    pub(super) fn preempt(&self) {
        let next = next_epoch(self.epoch());
        self.epoch.store(next, Ordering::Release);
        self.epoch_counters.add_pending(self.address, next);
    }
}

/// The last value is never reached: it would take years of preemptions, and work that cannot be
/// preempted is better than work that is always preempted.
fn next_epoch(epoch: u32) -> u32 {
    epoch.saturating_add(1).min(NEVER_PREEMPTED - 1)
}

impl Drop for EpochCounter {
    fn drop(&mut self) {
        let (epoch, launch_epoch) = (self.epoch(), self.launch_epoch.load(Ordering::Acquire));
        self.epoch_counters.words().free.push(FreeCounter {
            address: self.address,
            epoch,
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
