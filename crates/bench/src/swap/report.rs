//! What swapping came to.

use std::fmt::Write as _;

use serde::Serialize;

use super::CoLocatedReport;
use crate::live::Latency;

/// One case.
#[derive(Clone, Debug, Serialize)]
pub struct SwapRow {
    /// Models asked for.
    pub models: usize,
    /// Models that have room.
    pub room: usize,
    /// In which order they are asked for.
    pub access: String,
    /// Requests outstanding.
    pub concurrency: usize,
    /// Requests answered.
    pub requests: u64,
    /// Per second.
    pub throughput_rps: f64,
    /// Share of requests that found their weights on the device.
    pub warm_pct: f64,
    /// Latency of these.
    pub warm: Latency,
    /// Latency of the others.
    pub cold: Latency,
    /// What bringing the largest model's weights takes at the measured speed.
    pub transfer_us: f64,
    /// That and a tenth of it, and a warm request's median.
    pub bound_us: f64,
    /// Share of cold requests within that. Meant for one request at a time: more wait for each other too.
    pub cold_within_bound_pct: f64,
    /// Loads.
    pub loads: u64,
    /// Loads the device refused.
    pub refused: u64,
    /// Evictions.
    pub evictions: u64,
    /// From the order to load to all weights being there, median.
    pub load_p50_us: f64,
    /// Weights brought per second.
    pub gigabytes_per_second: f64,
    /// Requests without an answer.
    pub errors: u64,
    /// Answers that differ from those of the same model undisturbed.
    pub wrong: u64,
    /// What the first error said.
    pub first_error: Option<String>,
}

/// Everything of one run.
#[derive(Clone, Debug, Serialize)]
pub struct SwapReport {
    /// The device in words.
    pub device: String,
    /// Its driver.
    pub driver: Option<String>,
    /// When.
    pub date: String,
    /// The command line.
    pub command: String,
    /// What is swapped.
    pub network: String,
    /// Bytes of one model's weights on the device.
    pub model_bytes: u64,
    /// Whether every model has answers of its own, so that a mix-up shows.
    pub distinct_answers: bool,
    /// Measured speed of plain copies from pinned host memory before and after, in bytes per second.
    pub copy_bytes_per_second: [f64; 2],
    /// A request whose model is there.
    pub warm: Latency,
    /// Bytes of the large model's weights on the device, where one is loaded.
    pub big_bytes: Option<u64>,
    /// By case.
    pub rows: Vec<SwapRow>,
    /// A real-time model beside something that loads.
    pub beside: Vec<CoLocatedReport>,
}

pub(super) fn round(value: f64) -> f64 {
    (value * 100.0).round() / 100.0 + 0.0
}

/// For people.
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
            "{:>7}{:>6} {:<11}{:>5}{:>9}{:>8}{:>11}{:>11}{:>11}{:>11}{:>10}{:>8}{:>8}{:>7}",
            "models",
            "room",
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
            "{:>7}{:>6} {:<11}{:>5}{:>9.0}{:>8.1}{:>11}{:>11}{:>11}{:>11}{:>10}{:>8.1}{:>8.1}{:>7}",
            row.models,
            row.room,
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
    for beside in &report.beside {
        let _ = writeln!(
            text,
            "real time at {:.0} % load beside {}: p50 {} us ({:+.2} %), p99 {} us ({:+.2} %), {} times, {} GB/s; without: p50 {} us, p99 {} us",
            beside.load_pct,
            beside.noise,
            beside.noisy.p50_us,
            beside.p50_change_pct,
            beside.noisy.p99_us,
            beside.p99_change_pct,
            beside.events,
            beside.gigabytes_per_second,
            beside.quiet.p50_us,
            beside.quiet.p99_us
        );
    }
    text
}
