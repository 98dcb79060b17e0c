//! What `atoll bench strangers` reports.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Serialize;

use super::stalls::{Stall, ThreadShare};
use crate::server::child::SlowDriverCall;

/// Stalls that the text shows; the JSON has more.
const STALLS_SHOWN: usize = 8;

/// Latency in milliseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Latency {
    pub(super) count: usize,
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
    pub(super) p999_ms: f64,
    pub(super) max_ms: f64,
}

impl Latency {
    pub(super) fn of(values: &[f64]) -> Latency {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let index = ((sorted.len() as f64 * share) as usize).min(sorted.len().max(1) - 1);
            (sorted.get(index).copied().unwrap_or(0.0) * 1e3).round() / 1e3
        };
        Latency {
            count: sorted.len(),
            p50_ms: at(0.5),
            p99_ms: at(0.99),
            p999_ms: at(0.999),
            max_ms: at(1.0),
        }
    }
}

/// Slow calls of the driver with one name, by threads of one name.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct SlowCalls {
    pub(super) call: String,
    pub(super) thread: String,
    pub(super) count: usize,
    pub(super) median_ms: f64,
    pub(super) max_ms: f64,
}

impl SlowCalls {
    /// The calls by name and thread, the longest first.
    pub(super) fn of(calls: &[SlowDriverCall]) -> Vec<SlowCalls> {
        let mut by_name: BTreeMap<(&str, &str), Vec<f64>> = BTreeMap::new();
        for SlowDriverCall { call, thread, ms } in calls {
            by_name.entry((call, thread)).or_default().push(*ms);
        }
        let row = |((call, thread), times): ((&str, &str), Vec<f64>)| {
            let Latency { count, p50_ms, max_ms, .. } = Latency::of(&times);
            let (call, thread) = (call.to_string(), thread.to_string());
            SlowCalls { call, thread, count, median_ms: p50_ms, max_ms }
        };
        let mut rows: Vec<SlowCalls> = by_name.into_iter().map(row).collect();
        rows.sort_by(|a, b| b.max_ms.total_cmp(&a.max_ms));
        rows
    }
}

/// The result.
#[derive(Debug, Serialize)]
pub(super) struct StrangersReport {
    pub(super) device: String,
    pub(super) driver: Option<String>,
    pub(super) date: String,
    pub(super) command: String,
    pub(super) cores: usize,
    pub(super) seed: u64,
    /// Both phases without strangers.
    pub(super) alone: Latency,
    pub(super) alone_before: Latency,
    pub(super) beside: Latency,
    pub(super) alone_after: Latency,
    pub(super) real_time_failed: u64,
    pub(super) strangers_failed: u64,
    pub(super) failures: Vec<String>,
    /// What strangers did.
    pub(super) actions: BTreeMap<&'static str, u64>,
    /// Slow real-time requests beside strangers, in the order they happened.
    pub(super) stalls: Vec<Stall>,
    /// Calls of the GPU's driver that took a millisecond or longer beside strangers.
    pub(super) slow_calls: Vec<SlowCalls>,
    /// Resident memory of the server before and after the strangers.
    pub(super) server_bytes: [Option<u64>; 2],
}

/// The report for people.
pub(super) fn table(report: &StrangersReport) -> String {
    let mut text =
        String::from("real time, ms        requests       p50       p99     p99.9       max\n");
    let rows = [
        ("alone before", &report.alone_before),
        ("beside strangers", &report.beside),
        ("alone after", &report.alone_after),
    ];
    for (name, row) in rows {
        let Latency { count, p50_ms, p99_ms, p999_ms, max_ms } = row;
        let _ = writeln!(
            text,
            "{name:18} {count:10} {p50_ms:9.3} {p99_ms:9.3} {p999_ms:9.3} {max_ms:9.3}"
        );
    }
    let (alone, beside) = (&report.alone, &report.beside);
    let ratio = |beside: f64, alone: f64| if alone > 0.0 { beside / alone } else { 0.0 };
    let _ = writeln!(
        text,
        "{:29} {:9.2} {:9.2} {:9.2} {:+9.2} ms",
        "beside over alone",
        ratio(beside.p50_ms, alone.p50_ms),
        ratio(beside.p99_ms, alone.p99_ms),
        ratio(beside.p999_ms, alone.p999_ms),
        beside.max_ms - alone.max_ms
    );
    let actions: Vec<String> =
        report.actions.iter().map(|(name, count)| format!("{count} {name}")).collect();
    let _ = writeln!(text, "strangers: {}", actions.join(", ").replace('_', " "));
    let mib = |bytes: Option<u64>| bytes.map_or("?".to_string(), |bytes| (bytes >> 20).to_string());
    let [before, after] = report.server_bytes;
    let _ = writeln!(text, "server: {} MiB before, {} MiB after", mib(before), mib(after));
    let _ = writeln!(
        text,
        "failed: {} of real time, {} of strangers",
        report.real_time_failed, report.strangers_failed
    );
    for SlowCalls { call, thread, count, median_ms, max_ms } in &report.slow_calls {
        let _ = writeln!(
            text,
            "slow driver call: {call} by {thread}, {count} times, median {median_ms} ms, \
             maximum {max_ms} ms"
        );
    }
    text.push_str(&stall_table(&report.stalls));
    text
}

/// The longest stalls, with what the server says about them.
fn stall_table(stalls: &[Stall]) -> String {
    let mut longest: Vec<&Stall> = stalls.iter().collect();
    longest.sort_by(|a, b| b.latency_ms.total_cmp(&a.latency_ms));
    let mut text = String::new();
    for stall in longest.iter().take(STALLS_SHOWN) {
        let inside = stall.server_ms.map_or("?".to_string(), |ms| format!("{ms:.2}"));
        let why = stall.why.as_deref().unwrap_or("not recorded any more");
        let _ = writeln!(
            text,
            "stall of {:.2} ms at {:.1} s, {inside} ms of it in the node: {why}",
            stall.latency_ms, stall.at_s
        );
        let thread = |share: &ThreadShare| {
            let ThreadShare { name, ran_ms, waited_ms } = share;
            format!("{name} ran {ran_ms:.1} ms, waited {waited_ms:.1} ms")
        };
        let threads: Vec<String> = stall.threads.iter().map(thread).collect();
        if !threads.is_empty() {
            let _ = writeln!(text, "  meanwhile {}", threads.join("; "));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_sorted_values() {
        let values: Vec<f64> = (1..=1000).rev().map(f64::from).collect();
        let latency = Latency::of(&values);
        assert_eq!((latency.count, latency.p50_ms, latency.p99_ms), (1000, 501.0, 991.0));
        assert_eq!((latency.p999_ms, latency.max_ms), (1000.0, 1000.0));
        assert_eq!(Latency::of(&[]).max_ms, 0.0);
    }

    #[test]
    fn slow_calls_are_grouped_by_call_and_thread() {
        let call = |call: &str, thread: &str, ms: f64| SlowDriverCall {
            call: call.to_string(),
            thread: thread.to_string(),
            ms,
        };
        let calls = [call("a", "x", 1.0), call("b", "x", 9.0), call("a", "x", 3.0)];
        let rows = SlowCalls::of(&calls);
        assert_eq!((rows[0].call.as_str(), rows[0].count), ("b", 1));
        assert_eq!((rows[1].count, rows[1].max_ms), (2, 3.0));
    }
}
