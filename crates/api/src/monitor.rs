//! What the console, `atoll top` and traces read from a service.

use std::collections::BTreeMap;

use base::Nanos;
use serde_json::Value;

/// Numbers of one span in [`LiveUpdate::spans`], each a little-endian `f64`.
pub const SPAN_NUMBERS: usize = 14;

/// Where a viewer is in the spans of each device.
#[derive(Clone, Debug, Default)]
pub struct LiveCursor {
    /// By device: the position from which it reads on. Empty before the first update.
    pub positions: Vec<u64>,
    /// Time of its last update, by the clock of the service.
    pub at: Nanos,
    /// By source, for services that keep counts instead of spans: what it has seen of them.
    pub counts: BTreeMap<String, RequestCounts>,
}

/// The bucket of a time; bucket `n` begins at `2^(n/8)` microseconds.
pub fn time_bucket(time: Nanos) -> u32 {
    let micros = time.0 as f64 / 1e3;
    (micros.max(1.0).log2() * 8.0).floor() as u32
}

/// Requests that ended, since some moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestCounts {
    /// Answered ones by bucket of the time that they took, see [`time_bucket`].
    pub latency: BTreeMap<u32, u64>,
    /// Those that were not answered.
    pub failed: u64,
    /// Those that ended after their SLO.
    pub late: u64,
}

impl RequestCounts {
    /// How many were answered.
    pub fn done(&self) -> u64 {
        self.latency.values().sum()
    }

    /// What was counted after `before`.
    pub fn since(&self, before: &RequestCounts) -> RequestCounts {
        let counts = self.latency.iter().map(|(bucket, count)| {
            let seen = before.latency.get(bucket).copied().unwrap_or(0);
            (*bucket, count.saturating_sub(seen))
        });
        RequestCounts {
            latency: counts.filter(|(_, count)| *count > 0).collect(),
            failed: self.failed.saturating_sub(before.failed),
            late: self.late.saturating_sub(before.late),
        }
    }
}

/// What changed since the last update of a viewer.
#[derive(Clone, Debug, Default)]
pub struct LiveUpdate {
    /// Figures of models and devices.
    pub figures: Value,
    /// Spans of [`SPAN_NUMBERS`] numbers each; empty for viewers that do not ask for them.
    pub spans: Vec<u8>,
}

/// A source of figures and spans. Calls may take milliseconds.
pub trait Monitor: Send + Sync {
    /// What changed since the last update. A viewer that was away too long loses spans.
    fn update(&self, cursor: &mut LiveCursor, with_spans: bool) -> LiveUpdate;

    /// The spans of the last `window`, in the trace event format; `None` where none are recorded.
    fn trace(&self, window: Nanos) -> Option<String>;

    /// Why a request took as long as it did; `None` if it is no longer recorded.
    fn explain(&self, device: usize, request: u64) -> Option<Value>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_of_times_grow_by_an_eighth_of_an_octave() {
        let bucket = |micros| time_bucket(Nanos::from_micros(micros));
        assert_eq!([0, 1, 2, 1_024, 1_100].map(bucket), [0, 0, 8, 80, 80]);
    }

    #[test]
    fn counts_are_those_of_the_time_between() {
        let before = RequestCounts { latency: BTreeMap::from([(8, 3)]), failed: 1, late: 0 };
        let latency = BTreeMap::from([(8, 5), (9, 1)]);
        let now = RequestCounts { latency, failed: 1, late: 2 };
        let since = now.since(&before);
        let latency = BTreeMap::from([(8, 2), (9, 1)]);
        assert_eq!(since, RequestCounts { latency, failed: 0, late: 2 });
        assert_eq!((since.done(), now.since(&now).latency.len()), (3, 0));
    }
}
