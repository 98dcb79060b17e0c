//! The report of the swap benchmark.

use std::fmt::Write as _;

use serde::Serialize;

use super::CoLocatedReport;
use crate::live::Latency;

/// One case.
#[derive(Clone, Debug, Serialize)]
pub struct SwapRow {
    /// Models requested.
    pub models: usize,
    /// Models that fit into memory.
    #[serde(rename = "room")]
    pub resident: usize,
    /// The order of requests.
    pub access: String,
    /// Requests outstanding.
    pub concurrency: usize,
    /// Requests with reply.
    pub requests: u64,
    /// Per second.
    pub throughput_rps: f64,
    /// Share of requests whose model was resident.
    pub warm_pct: f64,
    /// Latency of these.
    pub warm: Latency,
    /// Latency of the others.
    pub cold: Latency,
    /// Time to load the largest model at the measured speed.
    pub transfer_us: f64,
    /// Bound for a cold request: 1.1 times the transfer, and the median of a warm request.
    pub bound_us: f64,
    /// Share of cold requests within the bound. It holds for one request at a time: several also
    /// wait for each other.
    pub cold_within_bound_pct: f64,
    /// Loads.
    pub loads: u64,
    /// Loads that the device refused.
    pub refused: u64,
    /// Evictions.
    pub evictions: u64,
    /// Median time of a load, from request to all weights on the device.
    pub load_p50_us: f64,
    /// Weights loaded per second.
    pub gigabytes_per_second: f64,
    /// Requests without reply.
    pub errors: u64,
    /// Replies that differ from those of the same model undisturbed.
    pub wrong: u64,
    /// Message of the first error.
    pub first_error: Option<String>,
}

/// A whole run.
#[derive(Clone, Debug, Serialize)]
pub struct SwapReport {
    /// Description of the device.
    pub device: String,
    /// Its driver.
    pub driver: Option<String>,
    /// The day.
    pub date: String,
    /// The command line.
    pub command: String,
    /// The networks.
    pub network: String,
    /// Bytes of one model's weights on the device.
    pub model_bytes: u64,
    /// Whether the replies of all models differ, so that a mix-up is detected.
    pub distinct_answers: bool,
    /// Speed of plain copies from pinned host memory before and after, in bytes per second.
    pub copy_bytes_per_second: [f64; 2],
    /// Latency of a request to a resident model.
    pub warm: Latency,
    /// Bytes of the large model's weights on the device, if one is loaded.
    #[serde(rename = "big_bytes")]
    pub large_model_bytes: Option<u64>,
    /// By case.
    pub rows: Vec<SwapRow>,
    /// Real time beside a background load.
    #[serde(rename = "beside")]
    pub co_located: Vec<CoLocatedReport>,
}

pub(super) fn round(value: f64) -> f64 {
    (value * 100.0).round() / 100.0 + 0.0
}

/// The report as text.
pub fn table(report: &SwapReport) -> String {
    let mut text = String::new();
    let gigabytes = |speed: f64| speed / 1e9;
    let _ = writeln!(
        text,
        "{}: {:.1} MB of weights, copies at {:.1} GB/s, warm p50 {} us, p99 {} us",
        report.network,
        report.model_bytes as f64 / 1e6,
        gigabytes(report.copy_bytes_per_second[0]),
        report.warm.p50_us,
        report.warm.p99_us
    );
    if !report.rows.is_empty() {
        let _ = writeln!(
            text,
            "{:>7}{:>9} {:<11}{:>5}{:>9}{:>8}{:>11}{:>11}{:>11}{:>11}{:>10}{:>8}{:>8}{:>7}",
            "models",
            "resident",
            "access",
            "conc",
            "req/s",
            "warm %",
            "warm p50",
            "warm p99",
            "cold p50",
            "cold p99",
            "bound",
            "within%",
            "GB/s",
            "errors"
        );
    }
    for row in &report.rows {
        let _ = writeln!(
            text,
            "{:>7}{:>9} {:<11}{:>5}{:>9.0}{:>8.1}{:>11}{:>11}{:>11}{:>11}{:>10}{:>8.1}{:>8.1}{:>7}",
            row.models,
            row.resident,
            row.access,
            row.concurrency,
            row.throughput_rps,
            row.warm_pct,
            row.warm.p50_us,
            row.warm.p99_us,
            row.cold.p50_us,
            row.cold.p99_us,
            row.bound_us,
            row.cold_within_bound_pct,
            row.gigabytes_per_second,
            row.errors + row.wrong
        );
    }
    for row in &report.co_located {
        let _ = writeln!(
            text,
            "real time at {:.0} % load beside {}: p50 {} us ({:+.2} %), p99 {} us ({:+.2} %), {} \
             times, {} GB/s; without: p50 {} us, p99 {} us",
            row.load_pct,
            row.background,
            row.with_background.p50_us,
            row.p50_change_pct,
            row.with_background.p99_us,
            row.p99_change_pct,
            row.events,
            row.gigabytes_per_second,
            row.without_background.p50_us,
            row.without_background.p99_us
        );
    }
    text
}
