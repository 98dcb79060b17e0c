//! RT activity: when real time was last on the device, for driver calls that would delay it.
//!
//! Calls that pin, unpin, map or unmap memory, or instantiate a graph, block all other driver
//! calls while they run. The driver admits whichever thread calls next, not the one that waits
//! longest, so a series of such calls blocks another thread for its whole length.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Typical duration of one such call.
const CALL_TIME: Duration = Duration::from_micros(150);

/// Worst duration of a graph instantiation: usually no longer than other calls, but now and then
/// the driver allocates memory.
const RECORDING_TIME: Duration = Duration::from_millis(1);

/// Where gaps are shorter than that, one graph is instantiated per interval, so that few requests
/// meet a slow one.
const RECORDING_EVERY: Duration = Duration::from_millis(20);

/// This soon after real time ended, a call ends before the next segment or cannot be avoided.
const GAP_START: Duration = Duration::from_micros(20);

/// Real time that was not seen for this long is not expected at any moment.
const RECENT: Duration = Duration::from_millis(20);

/// The RT segments of a device.
pub(crate) struct RtActivity {
    origin: Instant,
    /// Segments on the device or about to be.
    segments: AtomicUsize,
    /// When the last segment ended, in nanoseconds since `origin`; 0 when none ever did.
    idle_since: AtomicU64,
    /// How long the device was idle before the latest segment.
    last_gap: AtomicU64,
    /// When a graph was last instantiated in a gap that may be too short, in nanoseconds since
    /// `origin`.
    last_recording: AtomicU64,
}

impl Default for RtActivity {
    fn default() -> RtActivity {
        RtActivity {
            origin: Instant::now(),
            segments: AtomicUsize::new(0),
            idle_since: AtomicU64::new(0),
            last_gap: AtomicU64::new(0),
            last_recording: AtomicU64::new(0),
        }
    }
}

impl RtActivity {
    fn now(&self) -> u64 {
        self.origin.elapsed().as_nanos() as u64
    }

    /// A segment starts.
    pub(crate) fn segment_started(&self) {
        if self.segments.fetch_add(1, Ordering::Relaxed) == 0 {
            let idle_since = self.idle_since.load(Ordering::Relaxed);
            self.last_gap.store(self.now().saturating_sub(idle_since), Ordering::Relaxed);
        }
    }

    /// A segment has ended.
    pub(crate) fn segment_ended(&self) {
        if self.segments.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.idle_since.store(self.now().max(1), Ordering::Relaxed);
        }
    }

    /// How long no segment has been running; `None` while one is, or when none ever ran.
    fn idle_for(&self) -> Option<Duration> {
        let idle_since = self.idle_since.load(Ordering::Relaxed);
        if self.segments.load(Ordering::Relaxed) > 0 || idle_since == 0 {
            return None;
        }
        Some(Duration::from_nanos(self.now().saturating_sub(idle_since)))
    }

    /// Whether real time is running or may return at any moment.
    pub(crate) fn is_recent(&self) -> bool {
        match self.idle_for() {
            Some(idle) => idle < RECENT,
            None => self.segments.load(Ordering::Relaxed) > 0,
        }
    }

    /// Whether a call of `span` ends before the next segment, if this gap is as long as the last.
    fn fits_gap(&self, span: Duration) -> bool {
        let last_gap = Duration::from_nanos(self.last_gap.load(Ordering::Relaxed));
        match self.idle_for() {
            Some(idle) => idle + span < last_gap || idle > RECENT,
            None => self.segments.load(Ordering::Relaxed) == 0,
        }
    }

    /// Whether a slow call may be made now.
    fn is_gap(&self) -> bool {
        self.idle_for().is_some_and(|idle| idle < GAP_START) || self.fits_gap(CALL_TIME)
    }

    /// Whether best effort may instantiate a graph now that it can do without. A caller that gets
    /// `true` instantiates one.
    pub(crate) fn may_record_graph(&self) -> bool {
        if self.fits_gap(RECORDING_TIME) {
            return true;
        }
        let (now, every) = (self.now(), RECORDING_EVERY.as_nanos() as u64);
        let due = now.saturating_sub(self.last_recording.load(Ordering::Relaxed)) >= every;
        let admitted = due && self.is_gap();
        if admitted {
            self.last_recording.store(now, Ordering::Relaxed);
        }
        admitted
    }

    /// Waits until no segment runs, at most for `max`: for a call that real time itself waits for.
    pub(crate) fn wait_until_idle(&self, max: Duration) {
        let since = Instant::now();
        while self.segments.load(Ordering::Relaxed) > 0 && since.elapsed() < max {
            std::hint::spin_loop();
        }
    }

    /// Waits for a gap in which a call ends before the next segment, at most for `max`. Returns
    /// whether there is one. For each of a series of calls.
    pub(crate) fn wait_for_gap(&self, max: Duration) -> bool {
        let since = Instant::now();
        loop {
            let clear = self.is_gap();
            if clear || since.elapsed() >= max {
                return clear;
            }
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Activity `idle` after the last segment ended, the previous gap having been `last_gap`.
    fn after(idle: Duration, last_gap: Duration) -> RtActivity {
        let origin = Instant::now() - Duration::from_secs(3600);
        let rt_activity = RtActivity { origin, ..RtActivity::default() };
        rt_activity.last_gap.store(last_gap.as_nanos() as u64, Ordering::Relaxed);
        rt_activity.idle_since.store(rt_activity.now() - idle.as_nanos() as u64, Ordering::Relaxed);
        rt_activity
    }

    #[test]
    fn device_without_real_time_is_in_a_gap() {
        let rt_activity = RtActivity::default();
        assert!(rt_activity.is_gap() && !rt_activity.is_recent());
        rt_activity.segment_started();
        assert!(!rt_activity.is_gap() && rt_activity.is_recent());
        rt_activity.segment_started();
        rt_activity.segment_ended();
        assert!(!rt_activity.is_gap(), "one of two is idle_since");
        rt_activity.segment_ended();
        assert!(rt_activity.is_recent());
    }

    #[test]
    fn gap_is_expected_to_last_as_long_as_the_previous_one() {
        let (ms, second) = (Duration::from_millis, Duration::from_secs(1));
        assert!(after(ms(5), second).is_gap(), "the last_gap is long");
        assert!(!after(ms(5), ms(4)).is_gap(), "the next segment is due");
        assert!(after(second, ms(4)).is_gap() && !after(second, ms(4)).is_recent(), "none comes");
        let busy = after(ms(5), second);
        busy.segment_started();
        assert!(!busy.is_gap() && busy.is_recent());
        assert!(busy.last_gap.load(Ordering::Relaxed) >= ms(5).as_nanos() as u64, "it was noted");
        assert!(busy.last_gap.load(Ordering::Relaxed) < second.as_nanos() as u64 / 2);
    }

    #[test]
    fn graphs_are_recorded_in_long_gaps_and_rarely_in_short_ones() {
        let (ms, us) = (Duration::from_millis, Duration::from_micros);
        let long = after(us(100), Duration::from_secs(1));
        assert!(long.may_record_graph() && long.may_record_graph());
        let short = after(us(10), us(500));
        assert!(short.may_record_graph(), "the first");
        assert!(!short.may_record_graph(), "the next is not due");
        assert!(!after(ms(5), ms(4)).may_record_graph(), "real time is due");
        let busy = RtActivity::default();
        assert!(busy.may_record_graph());
        busy.segment_started();
        assert!(!busy.may_record_graph());
    }

    #[test]
    fn waits_are_bounded() {
        let rt_activity = RtActivity::default();
        rt_activity.segment_started();
        assert!(!rt_activity.wait_for_gap(Duration::from_millis(1)), "there is no gap");
        rt_activity.wait_until_idle(Duration::from_millis(1));
    }
}
