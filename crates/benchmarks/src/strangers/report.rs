//! What `atoll bench strangers` reports.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Serialize;

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
}
