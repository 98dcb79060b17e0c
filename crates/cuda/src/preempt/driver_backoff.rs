//! Driver backoff: best effort makes no driver call while real time is inside the driver.
//!
//! Calls of one context wait for each other inside the driver. The calls of best effort at the
//! moment it is preempted can wait; the RT launch it is preempted for cannot.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long after a preemption the RT launch is expected.
const EXPECTED_WITHIN: Duration = Duration::from_micros(60);

/// Says when best effort must stay out of the driver.
pub(crate) struct DriverBackoff {
    origin: Instant,
    /// How long an expected launch is waited for.
    span: Duration,
    /// RT threads inside the driver.
    rt_callers: AtomicUsize,
    /// A launch is expected until then, in nanoseconds since `origin`; 0 when none is.
    expected_until: AtomicU64,
}

/// An RT thread is inside the driver while this lives.
pub(crate) struct RtDriverCall<'a>(&'a DriverBackoff);

impl Default for DriverBackoff {
    fn default() -> DriverBackoff {
        DriverBackoff {
            origin: Instant::now(),
            span: EXPECTED_WITHIN,
            rt_callers: AtomicUsize::new(0),
            expected_until: AtomicU64::new(0),
        }
    }
}

impl DriverBackoff {
    /// An RT launch follows soon.
    pub(crate) fn expect_launch(&self) {
        let until = (self.origin.elapsed() + self.span).as_nanos() as u64;
        self.expected_until.store(until, Ordering::Release);
    }

    /// The expected launch is made by the thread that backs off, so it must not wait.
    pub(crate) fn cancel(&self) {
        self.expected_until.store(0, Ordering::Release);
    }

    /// Best effort backs off while the result lives.
    pub(crate) fn enter_driver(&self) -> RtDriverCall<'_> {
        self.rt_callers.fetch_add(1, Ordering::AcqRel);
        RtDriverCall(self)
    }

    /// Waits while backoff is active, at most for `max`.
    pub(crate) fn wait(&self, max: Duration) {
        let since = Instant::now();
        while self.is_active() && since.elapsed() < max {
            std::hint::spin_loop();
        }
    }

    /// Whether best effort must stay out of the driver.
    pub(crate) fn is_active(&self) -> bool {
        if self.rt_callers.load(Ordering::Acquire) > 0 {
            return true;
        }
        let until = self.expected_until.load(Ordering::Acquire);
        until > 0 && (self.origin.elapsed().as_nanos() as u64) < until
    }
}

impl Drop for RtDriverCall<'_> {
    fn drop(&mut self) {
        self.0.cancel();
        self.0.rt_callers.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_ends_with_the_launch_or_after_a_timeout() {
        let driver_backoff =
            DriverBackoff { span: Duration::from_secs(3600), ..DriverBackoff::default() };
        assert!(!driver_backoff.is_active());
        driver_backoff.expect_launch();
        assert!(driver_backoff.is_active());
        let enter_driver = driver_backoff.enter_driver();
        assert!(driver_backoff.is_active());
        drop(enter_driver);
        assert!(!driver_backoff.is_active());
        let driver_backoff = DriverBackoff::default();
        driver_backoff.expect_launch();
        std::thread::sleep(EXPECTED_WITHIN * 2);
        assert!(!driver_backoff.is_active());
    }
}
