//! Segments that wait on the host for the dispatcher.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use device::Segment;

use crate::preempt::queue_preemption::QueuePreemption;

/// The waiting segments of one queue, shared by its owner and the dispatcher.
pub(super) struct SegmentQueue {
    /// Segments with their sequence numbers.
    waiting: Mutex<VecDeque<(Segment, u64)>>,
    /// Length of `waiting`, readable without the lock.
    count: AtomicUsize,
    capacity: usize,
    closed: AtomicBool,
    /// Changes whenever a run gets further.
    pub(super) progress: AtomicU64,
    pub(super) preemption: QueuePreemption,
}

impl SegmentQueue {
    pub(super) fn new(capacity: usize) -> SegmentQueue {
        SegmentQueue {
            waiting: Mutex::default(),
            count: AtomicUsize::new(0),
            capacity,
            closed: AtomicBool::new(false),
            progress: AtomicU64::new(0),
            preemption: QueuePreemption::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(Segment, u64)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends `segment`; returns it when the queue is full.
    pub(super) fn push(&self, segment: Segment) -> Result<(), Segment> {
        let mut waiting = self.lock();
        if waiting.len() >= self.capacity {
            return Err(segment);
        }
        waiting.push_back((segment, self.preemption.next_sequence()));
        self.count.store(waiting.len(), Ordering::SeqCst);
        Ok(())
    }

    /// The oldest segment with its sequence number.
    pub(super) fn pop(&self) -> Option<(Segment, u64)> {
        if self.is_empty() {
            return None;
        }
        let mut waiting = self.lock();
        let first = waiting.pop_front();
        self.count.store(waiting.len(), Ordering::SeqCst);
        first
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count.load(Ordering::SeqCst) == 0
    }

    /// No segment is pushed after this.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }
}
