//! Notices replicas that were requested and do not come: a quota, no free node, a broken image.

use base::Nanos;

/// First pause before a pool that stalled is asked again, and the longest.
const PAUSE_MIN: Nanos = Nanos::from_millis(600_000);
const PAUSE_MAX: Nanos = Nanos::from_millis(3_600_000);

/// Whether the requested replicas of one pool come.
#[derive(Clone, Debug)]
pub struct Growth {
    /// Time without a new replica after which the pool counts as stalled.
    limit: Nanos,
    requested: u32,
    joined: u32,
    /// Since when nothing has changed while replicas are missing.
    since: Option<Nanos>,
    /// The pool is not asked for more before this time.
    until: Option<Nanos>,
    joined_at_stall: u32,
    pause: Nanos,
}

impl Growth {
    /// A pool that stalls when none of its missing replicas has joined for `limit`.
    pub fn new(limit: Nanos) -> Growth {
        Growth {
            limit,
            requested: 0,
            joined: 0,
            since: None,
            until: None,
            joined_at_stall: 0,
            pause: PAUSE_MIN,
        }
    }

    /// Records what is there. Returns whether the pool has just stalled.
    pub fn update(&mut self, now: Nanos, requested: u32, joined: u32) -> bool {
        let progress = joined > self.joined || requested > self.requested;
        (self.requested, self.joined) = (requested, joined);
        if self.until.is_some() && joined > self.joined_at_stall {
            // They came after all.
            (self.until, self.pause) = (None, PAUSE_MIN);
        }
        if joined >= requested {
            self.since = None;
            return false;
        }
        let since = match self.since {
            Some(since) if !progress => since,
            _ => now,
        };
        self.since = Some(since);
        if self.is_stalled(now) || now - since < self.limit {
            return false;
        }
        let until = now + self.pause;
        self.pause = Nanos(self.pause.0.saturating_mul(2)).min(PAUSE_MAX);
        self.joined_at_stall = joined;
        // After the pause it gets the whole limit again.
        (self.until, self.since) = (Some(until), Some(until));
        true
    }

    /// Whether the pool is not to be asked for more.
    pub fn is_stalled(&self, now: Nanos) -> bool {
        self.until.is_some_and(|until| now < until)
    }

    /// Whether replicas are missing that may still come.
    pub fn is_waiting(&self, now: Nanos) -> bool {
        self.joined < self.requested && !self.is_stalled(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(count: u64) -> Nanos {
        Nanos::from_millis(1000 * count)
    }

    #[test]
    fn a_pool_stalls_after_the_limit_and_is_asked_again_after_growing_pauses() {
        let mut growth = Growth::new(seconds(100));
        assert!(!growth.update(seconds(0), 3, 1));
        assert!(growth.is_waiting(seconds(0)));
        assert!(!growth.update(seconds(99), 3, 1));
        assert!(growth.update(seconds(100), 3, 1));
        assert!(growth.is_stalled(seconds(101)) && !growth.is_waiting(seconds(101)));
        // The request is taken back: that does not end the pause.
        assert!(!growth.update(seconds(200), 1, 1));
        assert!(growth.is_stalled(seconds(699)));
        assert!(!growth.is_stalled(seconds(700)));
        // It is asked again and does not come again: the pause doubles.
        assert!(!growth.update(seconds(701), 3, 1));
        assert!(growth.is_waiting(seconds(750)));
        assert!(!growth.update(seconds(800), 3, 1));
        assert!(growth.update(seconds(801), 3, 1));
        assert!(growth.is_stalled(seconds(801 + 1199)) && !growth.is_stalled(seconds(801 + 1200)));
    }

    #[test]
    fn replicas_that_come_one_by_one_are_no_stall() {
        let mut growth = Growth::new(seconds(100));
        for joined in 0..10 {
            assert!(!growth.update(seconds(90 * u64::from(joined)), 10, joined));
        }
        assert!(growth.update(seconds(90 * 9 + 100), 10, 9));
        assert!(!growth.update(seconds(1000), 10, 10), "the last one came late");
        assert!(!growth.is_stalled(seconds(1000)));
        // A further request has the whole limit.
        assert!(!growth.update(seconds(1001), 11, 10));
        assert!(!growth.update(seconds(1100), 11, 10));
        assert!(growth.update(seconds(1101), 11, 10));
    }
}
