//! Whether anybody uses the cluster: the input of scaling to zero and from zero.

use base::Nanos;

use crate::snapshot::ClusterSnapshot;

/// What frontends report of their requests, as the leader sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Activity {
    /// For how long no frontend had a request; `None` while one has, or while one is unknown.
    pub idle_for: Option<Nanos>,
    /// Some frontend has, or just had, a request.
    pub active: bool,
    /// Requests, and versions to be checked, that wait for a backend.
    pub waiting: u64,
}

/// Since when the cluster is idle. A new leader starts to observe when it acquires leadership.
#[derive(Clone, Copy, Debug, Default)]
pub struct IdleClock {
    since: Option<Nanos>,
}

impl IdleClock {
    /// The activity at `now`.
    pub fn update(&mut self, now: Nanos, snapshot: &ClusterSnapshot) -> Activity {
        let waiting = snapshot.loads.values().flat_map(|report| report.waiting.values());
        let waiting = waiting.fold(snapshot.candidates as u64, |sum, count| {
            // At least one each, whatever was written.
            sum.saturating_add((*count).max(1))
        });
        let all_known = snapshot.frontends.keys().all(|name| snapshot.loads.contains_key(name));
        let all_idle = snapshot.loads.values().all(|report| report.idle);
        let idle = waiting == 0 && all_known && all_idle && !snapshot.loads.is_empty();
        self.since = idle.then(|| self.since.unwrap_or(now));
        let idle_for = self.since.map(|since| now - since);
        Activity { idle_for, active: waiting > 0 || !all_idle, waiting }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::LoadReport;

    fn seconds(count: u64) -> Nanos {
        Nanos::from_millis(1000 * count)
    }

    #[test]
    fn idle_time_counts_while_all_frontends_are_idle() {
        let (mut clock, mut snapshot) = (IdleClock::default(), ClusterSnapshot::default());
        let mut at = |second: u64, snapshot: &ClusterSnapshot| {
            let activity = clock.update(seconds(second), snapshot);
            assert!(activity.idle_for.is_none() || !activity.active, "{activity:?}");
            activity.idle_for
        };
        assert_eq!(at(0, &snapshot), None, "nobody reports");
        let idle = LoadReport { idle: true, ..LoadReport::default() };
        snapshot.loads.insert("f".to_string(), idle.clone());
        snapshot.loads.insert("g".to_string(), LoadReport::default());
        assert_eq!(at(1, &snapshot), None, "one is not idle");
        snapshot.loads.insert("g".to_string(), idle.clone());
        assert_eq!(at(2, &snapshot), Some(seconds(0)));
        assert_eq!(at(9, &snapshot), Some(seconds(7)));
        snapshot.frontends.insert("h".to_string(), crate::record::FrontendRecord::default());
        assert_eq!(at(10, &snapshot), None, "a frontend has not reported yet");
        let unknown = IdleClock::default().update(seconds(10), &snapshot);
        assert!(!unknown.active, "which is no request: {unknown:?}");
        snapshot.loads.insert("h".to_string(), idle);
        assert_eq!(at(11, &snapshot), Some(seconds(0)));
        snapshot.candidates = 1;
        assert_eq!(at(12, &snapshot), None, "a version waits to be checked");
    }

    #[test]
    fn waiting_requests_count_over_all_frontends() {
        let mut snapshot = ClusterSnapshot::default();
        for (name, count) in [("f", 3), ("g", 0), ("h", u64::MAX)] {
            let waiting = [("m".to_string(), count)].into();
            let report = LoadReport { waiting, idle: true, ..LoadReport::default() };
            snapshot.loads.insert(name.to_string(), report);
        }
        let activity = IdleClock::default().update(seconds(1), &snapshot);
        assert_eq!((activity.idle_for, activity.waiting), (None, u64::MAX));
        snapshot.loads.remove("h");
        assert_eq!(IdleClock::default().update(seconds(1), &snapshot).waiting, 4);
    }
}
