//! Where the real time that is on the device ends, so that best effort can be queued behind it.
//!
//! A stream waits for what an event stood for when the wait was queued. So each real-time queue has one event, recorded anew
//! behind every segment, and nobody waits for a segment that was given to a queue and is not on the device yet: until it
//! is, no stream is held.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use crate::driver::{Event, Stream};
use crate::error::CudaError;

/// The ends of all real-time queues of a device.
#[derive(Default)]
pub(crate) struct EndPoints {
    events: Mutex<Vec<Weak<Event>>>,
    /// Segments that were given to a queue and are not on the device yet.
    unplaced: AtomicUsize,
    /// When one was last seen to be passed.
    passed: Mutex<Option<Instant>>,
}

/// A segment that is not on the device yet; one that is dropped is, or never will be.
pub(crate) struct Unplaced(Arc<EndPoints>);

impl Drop for Unplaced {
    fn drop(&mut self) {
        self.0.unplaced.fetch_sub(1, Ordering::SeqCst);
    }
}

impl EndPoints {
    /// Adds the end of a queue, which is there as long as the queue.
    pub(crate) fn add(&self, event: &Arc<Event>) {
        let mut events = self.events();
        events.retain(|event| event.strong_count() > 0);
        events.push(Arc::downgrade(event));
    }

    /// A segment was given to a real-time queue.
    pub(crate) fn give(self: &Arc<Self>) -> Unplaced {
        self.unplaced.fetch_add(1, Ordering::SeqCst);
        Unplaced(self.clone())
    }

    /// Whether the ends of all segments that were given are recorded.
    pub(crate) fn are_known(&self) -> bool {
        self.unplaced.load(Ordering::SeqCst) == 0
    }

    /// What is queued on `stream` from now on begins once everything is done of which the end is recorded.
    pub(crate) fn hold(&self, stream: &Stream) -> Result<(), CudaError> {
        self.events().iter().filter_map(Weak::upgrade).try_for_each(|event| event.hold(stream))
    }

    /// An end was passed.
    pub(crate) fn pass(&self) {
        *self.passed.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// When work began that waited from `since` on; `None` while no end was passed.
    pub(crate) fn begun_since(&self, since: Instant) -> Option<Instant> {
        self.passed.lock().unwrap_or_else(PoisonError::into_inner).filter(|passed| *passed > since)
    }

    fn events(&self) -> MutexGuard<'_, Vec<Weak<Event>>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_known_once_every_segment_is_placed_or_gone() {
        let ends = Arc::new(EndPoints::default());
        assert!(ends.are_known());
        let (first, second) = (ends.give(), ends.give());
        drop(first);
        assert!(!ends.are_known(), "one is not on the device yet");
        drop(second);
        assert!(ends.are_known());
    }

    #[test]
    fn work_begins_when_an_end_is_passed_while_it_waits() {
        let ends = EndPoints::default();
        let before = Instant::now();
        assert_eq!(ends.begun_since(before), None);
        ends.pass();
        let passed = ends.begun_since(before);
        assert!(passed.is_some());
        assert_eq!(ends.begun_since(Instant::now()), None, "that one was passed earlier");
    }
}
