//! Calls of the driver that take long, with the thread that made them: what stalls real time is
//! often a call of another thread that holds the driver's lock.
//!
//! Off unless a limit is set. A call is timed from `Context::enter`, or from the result before, to
//! its own result.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Shorter calls are not reported; 0 when none is timed.
static LIMIT_NANOS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static BEGAN: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Reports calls that take `limit` or longer from now on; zero reports none.
pub(crate) fn report_from(limit: Duration) {
    LIMIT_NANOS.store(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
}

/// A call is about to be made.
#[inline]
pub(super) fn begin() {
    if LIMIT_NANOS.load(Ordering::Relaxed) > 0 {
        BEGAN.set(Some(Instant::now()));
    }
}

/// The call has returned.
#[inline]
pub(super) fn end(call: &'static str) {
    let limit = LIMIT_NANOS.load(Ordering::Relaxed);
    if limit > 0 {
        report(call, limit);
    }
}

#[cold]
fn report(call: &'static str, limit_nanos: u64) {
    let now = Instant::now();
    let Some(began) = BEGAN.replace(Some(now)) else { return };
    let took = now.duration_since(began);
    if took.as_nanos() >= u128::from(limit_nanos) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let thread = std::thread::current();
        tracing::warn!(call, micros, thread = thread.name().unwrap_or("?"), "slow driver call");
    }
}
