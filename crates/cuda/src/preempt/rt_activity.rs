//! Real time on its way over the device, for those whose calls to the driver would hold it up.
//!
//! Calls that pin, unpin, map and unmap memory, or make a graph ready, keep all others out of the driver while they last. And the
//! driver lets in who asks next, not who waits longest: a row of such calls keeps a thread out for as long as the row is.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long one of those calls takes, about.
const CALL_TIME: Duration = Duration::from_micros(150);

/// How long making a graph ready takes at worst, about: mostly it is no longer than others, but now and then the driver fetches memory.
const RECORDING_TIME: Duration = Duration::from_millis(1);

/// Where gaps are shorter than that, one graph is made in so much time, so that few requests ever meet one that takes long.
const RECORDING_EVERY: Duration = Duration::from_millis(20);

/// So soon after real time has idle_since, a call is over before the next comes, or nothing would help.
const GAP_START: Duration = Duration::from_micros(20);

/// What was not seen for so long is not expected to come back at any moment.
const RECENT: Duration = Duration::from_millis(20);

/// The real-time segments of a device.
pub(crate) struct RtActivity {
    origin: Instant,
    /// On the device or about to be.
    segments: AtomicUsize,
    /// When the last of them idle_since it idle, in nanoseconds since `origin`; zero when none ever did.
    idle_since: AtomicU64,
    /// How long it was idle before the last ones came.
    last_gap: AtomicU64,
    /// When a graph was last made in a last_gap that may have been too short, in nanoseconds since `origin`.
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

    /// A segment comes.
    pub(crate) fn segment_started(&self) {
        if self.segments.fetch_add(1, Ordering::Relaxed) == 0 {
            let idle_since = self.idle_since.load(Ordering::Relaxed);
            self.last_gap.store(self.now().saturating_sub(idle_since), Ordering::Relaxed);
        }
    }

    /// One that came is gone.
    pub(crate) fn segment_ended(&self) {
        if self.segments.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.idle_since.store(self.now().max(1), Ordering::Relaxed);
        }
    }

    /// How long none is there; `None` while one is, or when none ever was.
    fn idle_for(&self) -> Option<Duration> {
        let idle_since = self.idle_since.load(Ordering::Relaxed);
        if self.segments.load(Ordering::Relaxed) > 0 || idle_since == 0 {
            return None;
        }
        Some(Duration::from_nanos(self.now().saturating_sub(idle_since)))
    }

    /// Whether some is there or may come back at any moment.
    pub(crate) fn is_recent(&self) -> bool {
        match self.idle_for() {
            Some(idle) => idle < RECENT,
            None => self.segments.load(Ordering::Relaxed) > 0,
        }
    }

    /// Whether what takes `span` would be over before the next segment comes, if the last_gap is as long as the last.
    fn fits_gap(&self, span: Duration) -> bool {
        let last_gap = Duration::from_nanos(self.last_gap.load(Ordering::Relaxed));
        match self.idle_for() {
            Some(idle) => idle + span < last_gap || idle > RECENT,
            None => self.segments.load(Ordering::Relaxed) == 0,
        }
    }

    /// Whether now is the time for a call.
    fn is_gap(&self) -> bool {
        self.idle_for().is_some_and(|idle| idle < GAP_START) || self.fits_gap(CALL_TIME)
    }

    /// Whether a graph may be made ready now that best effort can do without; who hears so makes one.
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

    /// Waits until none is there, or for `max`: for a call that somebody waits for.
    pub(crate) fn wait_until_idle(&self, max: Duration) {
        let since = Instant::now();
        while self.segments.load(Ordering::Relaxed) > 0 && since.elapsed() < max {
            std::hint::spin_loop();
        }
    }

    /// Waits for a last_gap in which a call is over before the next segment comes, or for `max`: for one of a row of calls. Whether
    /// there is one.
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

    /// RtActivity as it is `idle` after the last segment idle_since, the last_gap before it having been `last_gap`.
    fn after(idle: Duration, last_gap: Duration) -> RtActivity {
        let origin = Instant::now() - Duration::from_secs(3600);
        let rt_activity = RtActivity { origin, ..RtActivity::default() };
        rt_activity.last_gap.store(last_gap.as_nanos() as u64, Ordering::Relaxed);
        rt_activity.idle_since.store(rt_activity.now() - idle.as_nanos() as u64, Ordering::Relaxed);
        rt_activity
    }

    #[test]
    fn a_device_that_never_saw_real_time_is_clear() {
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
    fn a_gap_is_used_as_long_as_the_last_one_lasted() {
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
    fn graphs_are_made_in_long_gaps_and_now_and_then_in_short_ones() {
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
    fn nobody_waits_for_ever() {
        let rt_activity = RtActivity::default();
        rt_activity.segment_started();
        assert!(!rt_activity.wait_for_gap(Duration::from_millis(1)), "there is none");
        rt_activity.wait_until_idle(Duration::from_millis(1));
    }
}
