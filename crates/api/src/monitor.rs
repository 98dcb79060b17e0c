//! What the console, `atoll top` and traces read from a service.

use std::collections::BTreeMap;

use base::Nanos;
use serde_json::Value;

/// Numbers of one span in [`LiveUpdate::spans`], each a little-endian `f64`.
pub const SPAN_NUMBERS: usize = 14;

/// Where a viewer is in the spans of each device.
#[derive(Clone, Debug, Default)]
pub struct LiveCursor {
    /// By device: the position from which it reads spans. Empty before it got some.
    pub positions: Vec<u64>,
    /// Time of its last update, by the clock of the service; zero before the first.
    pub at: Nanos,
    /// By source: what it has seen of its counts.
    pub counts: BTreeMap<String, RequestCounts>,
    /// By device: the same.
    pub devices: Vec<DeviceCounts>,
}

/// Counts of times by bucket of [`base::histogram::time_bucket`], or of batches by their rows.
pub type Counts = BTreeMap<u32, u64>;

/// What was counted after `before`.
pub fn counts_since(now: &Counts, before: &Counts) -> Counts {
    let counts = now.iter().map(|(bucket, count)| {
        let seen = before.get(bucket).copied().unwrap_or(0);
        (*bucket, count.saturating_sub(seen))
    });
    counts.filter(|(_, count)| *count > 0).collect()
}

/// Requests that ended, since some moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestCounts {
    /// Answered ones by bucket of the time that they took.
    pub latency: Counts,
    /// Answered ones by bucket of the time until they started, where it is known.
    pub wait: Counts,
    /// Answered ones by rows of their batch, where they are known.
    pub rows: Counts,
    /// Those that were not answered.
    pub failed: u64,
    /// Those with a deadline or an SLO that were answered in time.
    pub kept: u64,
    /// Those with a deadline or an SLO that were answered late, or not at all.
    pub missed: u64,
}

impl RequestCounts {
    /// Adds what was counted elsewhere.
    pub fn add(&mut self, other: &RequestCounts) {
        let mine = [&mut self.latency, &mut self.wait, &mut self.rows];
        for (mine, others) in mine.into_iter().zip([&other.latency, &other.wait, &other.rows]) {
            others.iter().for_each(|(bucket, count)| *mine.entry(*bucket).or_default() += count);
        }
        self.failed += other.failed;
        self.kept += other.kept;
        self.missed += other.missed;
    }

    /// How many were answered.
    pub fn done(&self) -> u64 {
        self.latency.values().sum()
    }

    /// What was counted after `before`.
    pub fn since(&self, before: &RequestCounts) -> RequestCounts {
        RequestCounts {
            latency: counts_since(&self.latency, &before.latency),
            wait: counts_since(&self.wait, &before.wait),
            rows: counts_since(&self.rows, &before.rows),
            failed: self.failed.saturating_sub(before.failed),
            kept: self.kept.saturating_sub(before.kept),
            missed: self.missed.saturating_sub(before.missed),
        }
    }
}

/// What a device did, since some moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceCounts {
    /// Time of runs of real time and of best effort.
    pub busy: [Nanos; 2],
    /// Preemptions of best effort for real time.
    pub preemptions: u64,
    /// Preemptions by bucket of the time that leaving took.
    pub leaving: Counts,
}

impl DeviceCounts {
    /// What was counted after `before`.
    pub fn since(&self, before: &DeviceCounts) -> DeviceCounts {
        DeviceCounts {
            busy: [0, 1].map(|class| self.busy[class].since(before.busy[class])),
            preemptions: self.preemptions.saturating_sub(before.preemptions),
            leaving: counts_since(&self.leaving, &before.leaving),
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
    /// Where a viewer begins that was at `position`, the text in its last figures: it gets the
    /// spans since then. Any other text is as good as none.
    fn cursor(&self, _position: &str) -> LiveCursor {
        LiveCursor::default()
    }

    /// What changed since the last update. A viewer that was away too long loses spans; its figures
    /// cover all that happened.
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
    fn counts_are_those_of_the_time_between() {
        let counts = |latency: &[(u32, u64)], failed, missed| RequestCounts {
            latency: latency.iter().copied().collect(),
            failed,
            kept: latency.iter().map(|(_, count)| count).sum(),
            missed,
            ..RequestCounts::default()
        };
        let before = counts(&[(8, 3)], 1, 0);
        let now = counts(&[(8, 5), (9, 1)], 1, 2);
        let since = now.since(&before);
        assert_eq!(since, counts(&[(8, 2), (9, 1)], 0, 2));
        assert_eq!((since.done(), now.since(&now).latency.len()), (3, 0));
    }
}
