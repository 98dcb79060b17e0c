//! Quiet for real time: while it tells the driver what to do, best effort tells it nothing.
//!
//! Calls of one context wait for each other inside the driver. What best effort has to say at the moment it is made to leave
//! can wait, the launch for which it leaves cannot.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long after an order to leave the launch it was given for is waited for.
const LAUNCH_FOLLOWS: Duration = Duration::from_micros(60);

/// Who wants quiet.
pub(crate) struct Quiet {
    origin: Instant,
    /// How long an expected launch is waited for.
    span: Duration,
    /// Real-time threads inside the driver.
    callers: AtomicUsize,
    /// Until then a launch is expected, in nanoseconds since `origin`; zero when none is.
    expected_until: AtomicU64,
}

/// Somebody is inside the driver on behalf of real time.
pub(crate) struct Call<'a>(&'a Quiet);

impl Default for Quiet {
    fn default() -> Quiet {
        Quiet {
            origin: Instant::now(),
            span: LAUNCH_FOLLOWS,
            callers: AtomicUsize::new(0),
            expected_until: AtomicU64::new(0),
        }
    }
}

impl Quiet {
    /// A launch follows soon.
    pub(crate) fn expect_launch(&self) {
        let until = (self.origin.elapsed() + self.span).as_nanos() as u64;
        self.expected_until.store(until, Ordering::Release);
    }

    /// The launch that was expected is left to the one who keeps quiet.
    pub(crate) fn end(&self) {
        self.expected_until.store(0, Ordering::Release);
    }

    /// The launch is made as long as the answer lives.
    pub(crate) fn call(&self) -> Call<'_> {
        self.callers.fetch_add(1, Ordering::AcqRel);
        Call(self)
    }

    /// Waits while it is wanted, for `most`.
    pub(crate) fn keep(&self, most: Duration) {
        let since = Instant::now();
        while self.is_wanted() && since.elapsed() < most {
            std::hint::spin_loop();
        }
    }

    /// Whether best effort shall keep quiet.
    pub(crate) fn is_wanted(&self) -> bool {
        if self.callers.load(Ordering::Acquire) > 0 {
            return true;
        }
        let until = self.expected_until.load(Ordering::Acquire);
        until > 0 && (self.origin.elapsed().as_nanos() as u64) < until
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.0.end();
        self.0.callers.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quiet_ends_with_the_launch_or_when_none_comes() {
        let quiet = Quiet { span: Duration::from_secs(3600), ..Quiet::default() };
        assert!(!quiet.is_wanted());
        quiet.expect_launch();
        assert!(quiet.is_wanted());
        let call = quiet.call();
        assert!(quiet.is_wanted());
        drop(call);
        assert!(!quiet.is_wanted());
        let quiet = Quiet::default();
        quiet.expect_launch();
        std::thread::sleep(LAUNCH_FOLLOWS * 2);
        assert!(!quiet.is_wanted());
    }
}
