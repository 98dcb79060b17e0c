//! The report of a simulation.

use std::fmt::Write as _;

use serde::Serialize;

use crate::outcome::OutcomeCounts;
use crate::simulation::SimulationOutcome;

/// Figures of a policy on a workload. Latencies are microseconds.
#[derive(Clone, Debug, Serialize)]
pub struct SimulationReport {
    /// The workload.
    pub workload: String,
    /// The execution policy.
    pub policy: String,
    /// Mean latency of real time without best effort.
    pub rt_alone_mean_us: f64,
    /// Mean latency of real time.
    pub rt_mean_us: f64,
    /// Its median.
    pub rt_p50_us: f64,
    /// Its 99th percentile.
    pub rt_p99_us: f64,
    /// Increase of the mean over that without best effort, in percent.
    pub rt_increase_pct: f64,
    /// Replies per second, of both classes.
    pub throughput_rps: f64,
    /// Best-effort replies per second.
    pub be_rps: f64,
    /// Number of preemptions.
    pub preemptions: u64,
    /// Median preemption latency.
    pub preempt_p50_us: f64,
    /// Its 99th percentile.
    pub preempt_p99_us: f64,
    /// Best-effort work that was repeated or discarded, in percent.
    pub be_redone_pct: f64,
    /// Requests without reply, and arrivals skipped because one was outstanding.
    pub dropped: u64,
    /// What became of real-time requests.
    pub rt: OutcomeCounts,
    /// What became of best-effort requests.
    pub be: OutcomeCounts,
    /// Arrivals skipped because one was outstanding; they were never sent.
    pub skipped: u64,
}

impl SimulationReport {
    /// The report of `outcome`, compared with a run of real time alone.
    pub fn new(
        workload: &str,
        policy: &str,
        outcome: &SimulationOutcome,
        alone: &SimulationOutcome,
    ) -> SimulationReport {
        let mean = |outcome: &SimulationOutcome| {
            outcome.rt_latency_sum as f64 / outcome.rt_done.max(1) as f64 / 1e3
        };
        let us = |quantile: base::Nanos| quantile.0 as f64 / 1e3;
        let preempt = |fraction| match outcome.preempt_latency.count() {
            0 => 0.0,
            _ => us(outcome.preempt_latency.quantile(fraction)),
        };
        let (used, redone) = outcome.be_work;
        let (rt_mean_us, rt_alone_mean_us) = (mean(outcome), mean(alone));
        let increase = (rt_mean_us / rt_alone_mean_us.max(1e-9) - 1.0) * 100.0;
        SimulationReport {
            workload: workload.to_string(),
            policy: policy.to_string(),
            rt_alone_mean_us: round(rt_alone_mean_us),
            rt_mean_us: round(rt_mean_us),
            rt_p50_us: round(us(outcome.rt_latency.quantile(0.5))),
            rt_p99_us: round(us(outcome.rt_latency.quantile(0.99))),
            rt_increase_pct: round(if alone.rt_done == 0 { 0.0 } else { increase }),
            throughput_rps: round(
                (outcome.rt_in_time + outcome.be_in_time) as f64 / outcome.seconds,
            ),
            be_rps: round(outcome.be_in_time as f64 / outcome.seconds),
            preemptions: outcome.preemptions,
            preempt_p50_us: round(preempt(0.5)),
            preempt_p99_us: round(preempt(0.99)),
            be_redone_pct: round(if used > 0.0 { redone / used * 100.0 } else { 0.0 }),
            dropped: outcome.dropped,
            rt: outcome.rt,
            be: outcome.be,
            skipped: outcome.skipped,
        }
    }
}

/// Rounds to two digits.
fn round(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// The reports as a table.
pub fn table(reports: &[SimulationReport]) -> String {
    let mut text = format!(
        "{:<14} {:<18}{:>10}{:>10}{:>10}{:>9}{:>10}{:>9}{:>9}{:>9}{:>9}{:>8}{:>8}\n",
        "workload",
        "policy",
        "alone us",
        "mean us",
        "p99 us",
        "RT +%",
        "total/s",
        "BE/s",
        "preempt",
        "p50 us",
        "p99 us",
        "redone%",
        "dropped"
    );
    for r in reports {
        let _ = writeln!(
            text,
            "{:<14} {:<18}{:>10.0}{:>10.0}{:>10.0}{:>9.2}{:>10.1}{:>9.1}{:>9}{:>9.1}{:>9.1}{:>8.2}\
             {:>8}",
            r.workload,
            r.policy,
            r.rt_alone_mean_us,
            r.rt_mean_us,
            r.rt_p99_us,
            r.rt_increase_pct,
            r.throughput_rps,
            r.be_rps,
            r.preemptions,
            r.preempt_p50_us,
            r.preempt_p99_us,
            r.be_redone_pct,
            r.dropped
        );
    }
    text
}

/// What became of the requests of each report, as a table: one row for each class.
pub fn outcome_table(reports: &[SimulationReport]) -> String {
    let mut text = format!(
        "{:<14} {:<18} {:<6}{:>10}{:>10}{:>9}{:>9}{:>10}{:>8}{:>9}\n",
        "workload",
        "policy",
        "class",
        "arrivals",
        "good",
        "late",
        "refused",
        "cancelled",
        "failed",
        "pending"
    );
    for report in reports {
        for (class, counts) in [("rt", &report.rt), ("be", &report.be)] {
            let OutcomeCounts { arrivals, good, late, refused, cancelled, failed, pending } =
                counts;
            let _ = writeln!(
                text,
                "{:<14} {:<18} {class:<6}{arrivals:>10}{good:>10}{late:>9}{refused:>9}\
                 {cancelled:>10}{failed:>8}{pending:>9}",
                report.workload, report.policy
            );
        }
    }
    text
}
