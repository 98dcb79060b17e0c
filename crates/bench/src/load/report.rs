//! Reports of batching policies, and comparisons between them.

use std::fmt::Write as _;

use serde::Serialize;

use crate::live::Latency;
use crate::plot::Chart;

/// One load under one policy.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PhaseResult {
    /// Requests per second.
    pub offered_rps: f64,
    /// Replies per second before the end of the load.
    pub answered_rps: f64,
    /// From when a request was due to its reply.
    pub latency: Latency,
    /// Batches run.
    pub batches: u64,
    /// Mean rows of a batch.
    pub mean_batch: f64,
    /// Checked replies that were wrong.
    pub wrong: u64,
    /// Requests without reply.
    pub errors: u64,
    /// Busy cores, including the threads that send.
    pub cpu_cores: f64,
}

/// One policy on one model.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PolicyResult {
    /// The policy.
    pub policy: String,
    /// At low load.
    pub low: PhaseResult,
    /// At high load.
    pub high: PhaseResult,
    /// The highest rate tried with 99 of 100 replies within the SLO.
    pub best_rps: f64,
    /// At that rate.
    pub best: PhaseResult,
    /// Share of the time at full load in which no batch ran on the device, in percent.
    pub idle_pct: Option<f64>,
    /// Start and end of some consecutive batches at full load, by the device's clock.
    pub timeline_us: Vec<(f64, f64)>,
    /// Mean latency at low load against the tuned window's, in percent; less is better.
    pub low_pct: Option<f64>,
    /// The same at high load.
    pub high_pct: Option<f64>,
    /// The highest rate against the tuned window's, in percent; more is better.
    pub best_pct: Option<f64>,
}

/// All policies on one model.
#[derive(Clone, Debug, Default, Serialize)]
pub struct NetworkReport {
    /// The model.
    pub model: String,
    /// Median latency of requests one after another.
    pub alone_us: f64,
    /// A batch of 32 with its copies.
    pub batch_32_us: f64,
    /// The SLO.
    pub slo_ms: f64,
    /// Replies per second when there is always a request waiting.
    pub capacity_rps: f64,
    /// Low load.
    pub low_rps: f64,
    /// High load.
    pub high_rps: f64,
    /// Device memory with one worker of 32, in bytes.
    pub memory_one: u64,
    /// Device memory with workers of 1, 1, 2, 4, 8 and 16.
    pub memory_six: u64,
    /// The setting of `window` that others are compared with: the one with the highest rate within
    /// the SLO that waits.
    pub tuned: Option<String>,
    /// By policy.
    #[serde(rename = "contenders")]
    pub results: Vec<PolicyResult>,
}

/// All models on one device.
#[derive(Clone, Debug, Default, Serialize)]
pub struct BatchingReport {
    /// The device.
    pub device: String,
    /// Its driver.
    pub driver: Option<String>,
    /// The day.
    pub date: String,
    /// The command line.
    pub command: String,
    /// Seed of arrivals.
    pub seed: u64,
    /// Batches that may run at the same time.
    #[serde(rename = "lanes")]
    pub concurrent_batches: usize,
    /// By model.
    pub networks: Vec<NetworkReport>,
}

impl NetworkReport {
    /// Compares policies with the tuned window.
    pub fn compare(&mut self) {
        // TensorFlow Serving's guide tunes the wait for throughput; no wait is another policy.
        let waits = |c: &&PolicyResult| c.policy.starts_with("window") && c.policy != "window 0 us";
        let better = |a: &&PolicyResult, b: &&PolicyResult| {
            let key = |c: &PolicyResult| (c.best_rps, -c.high.latency.mean_us);
            key(a).partial_cmp(&key(b)).unwrap_or(std::cmp::Ordering::Equal)
        };
        let Some(tuned) = self.results.iter().filter(waits).max_by(better).cloned() else {
            return;
        };
        let percent =
            |new: f64, old: f64| (old > 0.0).then(|| ((new / old - 1.0) * 1e3).round() / 10.0);
        for result in &mut self.results {
            result.low_pct = percent(result.low.latency.mean_us, tuned.low.latency.mean_us);
            result.high_pct = percent(result.high.latency.mean_us, tuned.high.latency.mean_us);
            result.best_pct = percent(result.best_rps, tuned.best_rps);
        }
        self.tuned = Some(tuned.policy);
    }
}

/// Share of the time from the first start to the last end in which no batch runs, in percent.
pub(super) fn idle_pct(mut runs: Vec<(f64, f64)>) -> Option<f64> {
    runs.sort_by(|one, other| one.0.total_cmp(&other.0));
    let (first, mut covered) = (runs.first()?.0, runs.first()?.0);
    let mut idle = 0.0;
    for (begin, end) in runs {
        idle += (begin - covered).max(0.0);
        covered = covered.max(end);
    }
    Some((idle / (covered - first).max(1e-9) * 1e4).round() / 100.0)
}

/// The report as text.
pub fn table(networks: &[NetworkReport]) -> String {
    let mut text = String::new();
    for network in networks {
        let memory = network.memory_six as f64 / network.memory_one.max(1) as f64 * 100.0 - 100.0;
        let _ = writeln!(
            text,
            "{}: alone {:.0} us, batch of 32 {:.0} us, saturated {:.0}/s, SLO {:.1} ms, low \
             {:.0}/s, high {:.0}/s, \
             memory of six workers {memory:+.1} %",
            network.model,
            network.alone_us,
            network.batch_32_us,
            network.capacity_rps,
            network.slo_ms,
            network.low_rps,
            network.high_rps,
        );
        let _ = writeln!(
            text,
            "{:<16}{:>10}{:>8}{:>11}{:>8}{:>10}{:>7}{:>11}{:>8}{:>8}{:>7}",
            "policy",
            "low us",
            "%",
            "high us",
            "%",
            "p99 us",
            "batch",
            "max/s",
            "%",
            "idle %",
            "wrong"
        );
        for c in &network.results {
            let name = if network.tuned.as_ref() == Some(&c.policy) {
                format!("{}*", c.policy)
            } else {
                c.policy.clone()
            };
            let pct =
                |value: Option<f64>| value.map_or(String::new(), |value| format!("{value:+.1}"));
            let wrong = c.low.wrong + c.high.wrong + c.best.wrong + c.low.errors + c.high.errors;
            let _ = writeln!(
                text,
                "{name:<16}{:>10.0}{:>8}{:>11.0}{:>8}{:>10.0}{:>7.1}{:>11.0}{:>8}{:>8}{wrong:>7}",
                c.low.latency.mean_us,
                pct(c.low_pct),
                c.high.latency.mean_us,
                pct(c.high_pct),
                c.high.latency.p99_us,
                c.high.mean_batch,
                c.best_rps,
                pct(c.best_pct),
                c.idle_pct.map_or(String::new(), |idle| format!("{idle:.2}")),
            );
        }
    }
    text
}

/// Figures 8 and 9 of Ebird: mean latency at both loads, and the highest rate within the SLO.
pub fn charts(networks: &[NetworkReport]) -> Vec<Chart> {
    let shown = |network: &NetworkReport, c: &PolicyResult| {
        !c.policy.starts_with("window") || network.tuned.as_ref() == Some(&c.policy)
    };
    let name = |c: &PolicyResult| c.policy.split(' ').next().unwrap_or_default().to_string();
    let mut policies: Vec<String> = Vec::new();
    for network in networks {
        for c in network.results.iter().filter(|c| shown(network, c)) {
            if !policies.contains(&name(c)) {
                policies.push(name(c));
            }
        }
    }
    let chart = |title: &str, unit: &str, value: fn(&PolicyResult) -> f64| {
        let of = |policy: &String| {
            let one = |network: &NetworkReport| {
                let mut mine = network.results.iter().filter(|c| shown(network, c));
                mine.find(|c| name(c) == *policy).map_or(0.0, value)
            };
            (policy.clone(), networks.iter().map(one).collect())
        };
        Chart {
            title: title.to_string(),
            unit: unit.to_string(),
            groups: networks.iter().map(|network| network.model.clone()).collect(),
            bars: policies.iter().map(of).collect(),
        }
    };
    vec![
        chart("Mean latency at low load", "ms", |c| c.low.latency.mean_us / 1e3),
        chart("Mean latency at high load", "ms", |c| c.high.latency.mean_us / 1e3),
        chart("Highest rate within the SLO", "requests/s", |c| c.best_rps),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_is_time_without_batches() {
        assert_eq!(idle_pct(vec![]), None);
        assert_eq!(idle_pct(vec![(0.0, 10.0), (10.0, 20.0)]), Some(0.0));
        // One inside another, one that overlaps, and a gap of 5 in 25.
        let runs = vec![(20.0, 25.0), (0.0, 10.0), (2.0, 4.0), (8.0, 15.0)];
        assert_eq!(idle_pct(runs), Some(20.0));
    }

    #[test]
    fn policies_are_compared_with_the_tuned_window() {
        let result = |policy: &str, low_us: f64, best_rps: f64| {
            let mut result =
                PolicyResult { policy: policy.to_string(), best_rps, ..PolicyResult::default() };
            result.low.latency.mean_us = low_us;
            result
        };
        let mut network = NetworkReport {
            results: vec![
                result("window 0 us", 300.0, 9_000.0),
                result("window 1000 us", 1_200.0, 5_000.0),
                result("window 2000 us", 2_000.0, 8_000.0),
                result("auto", 500.0, 10_000.0),
            ],
            ..NetworkReport::default()
        };
        network.compare();
        assert_eq!(network.tuned.as_deref(), Some("window 2000 us"));
        let auto = &network.results[3];
        assert_eq!((auto.low_pct, auto.best_pct), (Some(-75.0), Some(25.0)));
    }
}
