//! Clocks as parameters, so that schedulers run in virtual time under test.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::Nanos;

/// A source of monotonic time.
pub trait Clock: Send + Sync {
    /// Time since the clock's own start.
    fn now(&self) -> Nanos;
}

/// The machine's monotonic clock.
#[derive(Debug)]
pub struct MonotonicClock {
    start: Instant,
}

impl MonotonicClock {
    /// A clock that reads zero now.
    pub fn new() -> MonotonicClock {
        MonotonicClock { start: Instant::now() }
    }
}

impl Default for MonotonicClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for MonotonicClock {
    fn now(&self) -> Nanos {
        self.start.elapsed().into()
    }
}

/// A clock that only [`ManualClock::advance`] moves: virtual time.
#[derive(Debug, Default)]
pub struct ManualClock {
    now: AtomicU64,
}

impl ManualClock {
    /// Moves time forward by `span`.
    pub fn advance(&self, span: Nanos) {
        self.now.fetch_add(span.0, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Nanos {
        Nanos(self.now.load(Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manual_clock_moves_only_when_advanced() {
        let clock = ManualClock::default();
        assert_eq!(clock.now(), Nanos::ZERO);
        clock.advance(Nanos(7));
        assert_eq!(clock.now(), Nanos(7));
    }
}
