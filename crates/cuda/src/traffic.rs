//! Real time on its way over the device, for those whose calls to the driver would hold it up.
//!
//! Calls that pin, unpin, map and unmap memory, or make a graph ready, keep all others out of the driver while they last. And the
//! driver lets in who asks next, not who waits longest: a row of such calls keeps a thread out for as long as the row is.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long one of those calls takes, about.
const CALL: Duration = Duration::from_micros(150);

/// How long making a graph ready takes at worst, about: mostly it is no longer than others, but now and then the driver fetches memory.
const RECORDING: Duration = Duration::from_millis(1);

/// Where gaps are shorter than that, one graph is made in so much time, so that few requests ever meet one that takes long.
const RECORDING_EVERY: Duration = Duration::from_millis(20);

/// So soon after real time has left, a call is over before the next comes, or nothing would help.
const JUST_LEFT: Duration = Duration::from_micros(20);

/// What was not seen for so long is not expected to come back at any moment.
const NEAR: Duration = Duration::from_millis(20);

/// The real-time segments of a device.
pub(crate) struct Traffic {
    origin: Instant,
    /// On the device or about to be.
    segments: AtomicUsize,
    /// When the last of them left it empty, in nanoseconds since `origin`; zero when none ever did.
    left: AtomicU64,
    /// How long it was empty before the last ones came.
    gap: AtomicU64,
    /// When a graph was last made in a gap that may have been too short, in nanoseconds since `origin`.
    recorded: AtomicU64,
}

impl Default for Traffic {
    fn default() -> Traffic {
        Traffic {
            origin: Instant::now(),
            segments: AtomicUsize::new(0),
            left: AtomicU64::new(0),
            gap: AtomicU64::new(0),
            recorded: AtomicU64::new(0),
        }
    }
}

impl Traffic {
    fn now(&self) -> u64 {
        self.origin.elapsed().as_nanos() as u64
    }

    /// A segment comes.
    pub(crate) fn enter(&self) {
        if self.segments.fetch_add(1, Ordering::Relaxed) == 0 {
            let left = self.left.load(Ordering::Relaxed);
            self.gap.store(self.now().saturating_sub(left), Ordering::Relaxed);
        }
    }

    /// One that came is gone.
    pub(crate) fn leave(&self) {
        if self.segments.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.left.store(self.now().max(1), Ordering::Relaxed);
        }
    }

    /// How long none is there; `None` while one is, or when none ever was.
    fn empty_for(&self) -> Option<Duration> {
        let left = self.left.load(Ordering::Relaxed);
        if self.segments.load(Ordering::Relaxed) > 0 || left == 0 {
            return None;
        }
        Some(Duration::from_nanos(self.now().saturating_sub(left)))
    }

    /// Whether some is there or may come back at any moment.
    pub(crate) fn is_near(&self) -> bool {
        match self.empty_for() {
            Some(empty) => empty < NEAR,
            None => self.segments.load(Ordering::Relaxed) > 0,
        }
    }

    /// Whether what takes `span` would be over before the next segment comes, if the gap is as long as the last.
    fn has_room_for(&self, span: Duration) -> bool {
        let gap = Duration::from_nanos(self.gap.load(Ordering::Relaxed));
        match self.empty_for() {
            Some(empty) => empty + span < gap || empty > NEAR,
            None => self.segments.load(Ordering::Relaxed) == 0,
        }
    }

    /// Whether now is the time for a call.
    fn is_clear(&self) -> bool {
        self.empty_for().is_some_and(|empty| empty < JUST_LEFT) || self.has_room_for(CALL)
    }

    /// Whether a graph may be made ready now that best effort can do without; who hears so makes one.
    pub(crate) fn admits_recording(&self) -> bool {
        if self.has_room_for(RECORDING) {
            return true;
        }
        let (now, every) = (self.now(), RECORDING_EVERY.as_nanos() as u64);
        let due = now.saturating_sub(self.recorded.load(Ordering::Relaxed)) >= every;
        let admitted = due && self.is_clear();
        if admitted {
            self.recorded.store(now, Ordering::Relaxed);
        }
        admitted
    }

    /// Waits until none is there, or for `most`: for a call that somebody waits for.
    pub(crate) fn let_pass(&self, most: Duration) {
        let since = Instant::now();
        while self.segments.load(Ordering::Relaxed) > 0 && since.elapsed() < most {
            std::hint::spin_loop();
        }
    }

    /// Waits for a gap in which a call is over before the next segment comes, or for `most`: for one of a row of calls. Whether
    /// there is one.
    pub(crate) fn wait_for_gap(&self, most: Duration) -> bool {
        let since = Instant::now();
        loop {
            let clear = self.is_clear();
            if clear || since.elapsed() >= most {
                return clear;
            }
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Traffic as it is `empty` after the last segment left, the gap before it having been `gap`.
    fn after(empty: Duration, gap: Duration) -> Traffic {
        let origin = Instant::now() - Duration::from_secs(3600);
        let traffic = Traffic { origin, ..Traffic::default() };
        traffic.gap.store(gap.as_nanos() as u64, Ordering::Relaxed);
        traffic.left.store(traffic.now() - empty.as_nanos() as u64, Ordering::Relaxed);
        traffic
    }

    #[test]
    fn a_device_that_never_saw_real_time_is_clear() {
        let traffic = Traffic::default();
        assert!(traffic.is_clear() && !traffic.is_near());
        traffic.enter();
        assert!(!traffic.is_clear() && traffic.is_near());
        traffic.enter();
        traffic.leave();
        assert!(!traffic.is_clear(), "one of two is left");
        traffic.leave();
        assert!(traffic.is_near());
    }

    #[test]
    fn a_gap_is_used_as_long_as_the_last_one_lasted() {
        let (ms, second) = (Duration::from_millis, Duration::from_secs(1));
        assert!(after(ms(5), second).is_clear(), "the gap is long");
        assert!(!after(ms(5), ms(4)).is_clear(), "the next segment is due");
        assert!(after(second, ms(4)).is_clear() && !after(second, ms(4)).is_near(), "none comes");
        let busy = after(ms(5), second);
        busy.enter();
        assert!(!busy.is_clear() && busy.is_near());
        assert!(busy.gap.load(Ordering::Relaxed) >= ms(5).as_nanos() as u64, "it was noted");
        assert!(busy.gap.load(Ordering::Relaxed) < second.as_nanos() as u64 / 2);
    }

    #[test]
    fn graphs_are_made_in_long_gaps_and_now_and_then_in_short_ones() {
        let (ms, us) = (Duration::from_millis, Duration::from_micros);
        let long = after(us(100), Duration::from_secs(1));
        assert!(long.admits_recording() && long.admits_recording());
        let short = after(us(10), us(500));
        assert!(short.admits_recording(), "the first");
        assert!(!short.admits_recording(), "the next is not due");
        assert!(!after(ms(5), ms(4)).admits_recording(), "real time is due");
        let busy = Traffic::default();
        assert!(busy.admits_recording());
        busy.enter();
        assert!(!busy.admits_recording());
    }

    #[test]
    fn nobody_waits_for_ever() {
        let traffic = Traffic::default();
        traffic.enter();
        assert!(!traffic.wait_for_gap(Duration::from_millis(1)), "there is none");
        traffic.let_pass(Duration::from_millis(1));
    }
}
