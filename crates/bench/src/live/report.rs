//! Reports of cells, and comparisons between them.

use std::fmt::Write as _;

use base::{Histogram, Nanos};
use serde::Serialize;

use crate::disb::{PUBLISHED_GAINS, PUBLISHED_LATENCIES, Published};
use crate::plot::Chart;

/// Latencies in microseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Latency {
    /// Number of replies.
    pub count: u64,
    /// Mean.
    pub mean_us: f64,
    /// Median.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// Longest.
    pub max_us: f64,
}

impl Latency {
    /// Summarises `samples`, and sorts them.
    pub fn of(samples: &mut [Nanos]) -> Latency {
        samples.sort_unstable();
        let Some(longest) = samples.last() else { return Latency::default() };
        let us = |nanos: Nanos| round(nanos.0 as f64 / 1e3);
        let rank = |fraction: f64| {
            let rank = (samples.len() as f64 * fraction).ceil() as usize;
            us(samples[rank.clamp(1, samples.len()) - 1])
        };
        let sum: u64 = samples.iter().map(|sample| sample.0).sum();
        Latency {
            count: samples.len() as u64,
            mean_us: round(sum as f64 / samples.len() as f64 / 1e3),
            p50_us: rank(0.5),
            p99_us: rank(0.99),
            max_us: us(*longest),
        }
    }

    /// Summarises a histogram.
    pub(crate) fn counted(histogram: &Histogram) -> Latency {
        if histogram.count() == 0 {
            return Latency::default();
        }
        let us = |nanos: Nanos| round(nanos.0 as f64 / 1e3);
        Latency {
            count: histogram.count(),
            mean_us: us(histogram.mean()),
            p50_us: us(histogram.quantile(0.5)),
            p99_us: us(histogram.quantile(0.99)),
            max_us: us(histogram.max()),
        }
    }
}

/// Increase of a latency over that of real time alone, in percent.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct LatencyIncrease {
    /// Of the mean.
    pub mean_pct: f64,
    /// Of the median.
    pub p50_pct: f64,
    /// Of the 99th percentile.
    pub p99_pct: f64,
    /// Of the longest.
    pub max_pct: f64,
}

impl LatencyIncrease {
    fn of(latency: Latency, alone: Latency) -> LatencyIncrease {
        let over = |with: f64, without: f64| match without > 0.0 {
            true => round((with / without - 1.0) * 100.0),
            false => 0.0,
        };
        LatencyIncrease {
            mean_pct: over(latency.mean_us, alone.mean_us),
            p50_pct: over(latency.p50_us, alone.p50_us),
            p99_pct: over(latency.p99_us, alone.p99_us),
            max_pct: over(latency.max_us, alone.max_us),
        }
    }
}

/// Latency divided by stage.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct LatencyParts {
    /// Copying the inputs to where the device reads them.
    pub prepare_us: f64,
    /// Waiting for the node's lock and for other requests.
    pub wait_us: f64,
    /// Enqueueing on the device.
    pub launch_us: f64,
    /// Running on the device, until its thread noticed the end.
    pub device_us: f64,
    /// From then until the client had the reply.
    pub reply_us: f64,
}

impl LatencyParts {
    /// The mean over `replies`; each has the order of the fields.
    pub fn of(replies: &[[Nanos; 5]]) -> LatencyParts {
        let count = replies.len().max(1) as f64;
        LatencyParts::each(|part| {
            replies.iter().map(|reply| reply[part].0 as f64).sum::<f64>() / count / 1e3
        })
    }

    /// The maximum of each part over `replies`.
    pub fn longest(replies: &[[Nanos; 5]]) -> LatencyParts {
        LatencyParts::each(|part| {
            let longest = replies.iter().map(|reply| reply[part]).max().unwrap_or_default();
            longest.0 as f64 / 1e3
        })
    }

    fn each(micros: impl Fn(usize) -> f64) -> LatencyParts {
        let part = |index| round(micros(index));
        LatencyParts {
            prepare_us: part(0),
            wait_us: part(1),
            launch_us: part(2),
            device_us: part(3),
            reply_us: part(4),
        }
    }
}

/// A real-time model of a cell.
#[derive(Clone, Debug, Serialize)]
pub struct RealTimeModel {
    /// The model.
    pub model: String,
    /// Requests per second that it should get; the average for a trace.
    pub offered_rps: f64,
    /// From request to reply.
    pub latency: Latency,
    /// Over real time alone.
    pub increase: LatencyIncrease,
    /// Requests sent late, because the reply before them came late.
    pub late: u64,
    /// Periods dropped.
    pub dropped: u64,
}

/// A best-effort model of a cell.
#[derive(Clone, Debug, Serialize)]
pub struct BestEffortModel {
    /// The model.
    pub model: String,
    /// Replies per second.
    pub rps: f64,
    /// From request to reply.
    pub latency: Latency,
    /// Mean device time of a reply, all its launches together.
    pub busy_us: f64,
    /// The same for an undisturbed run of this class.
    pub alone_busy_us: f64,
}

/// Preemptions of best effort for real time.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct PreemptionStats {
    /// Number of preemptions.
    pub count: u64,
    /// Preemptions of work that ended before it noticed.
    pub finished_first: u64,
    /// From the preemption until the device returned the task.
    #[serde(rename = "leave")]
    pub latency: Latency,
    /// Sum of these latencies, in percent of best effort's device time: an upper limit of what
    /// preemption costs besides repeated work.
    #[serde(rename = "leaving_pct")]
    pub latency_pct: f64,
}

/// Waits for the node's lock.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct LockWaits {
    /// Waits per second.
    pub waits_per_second: f64,
    /// Mean wait.
    pub mean_us: f64,
    /// Longest wait.
    pub max_us: f64,
}

/// One policy on one workload.
#[derive(Clone, Debug, Serialize)]
pub struct CellReport {
    /// The workload.
    pub workload: String,
    /// `literal` or `scaled`.
    pub rates: String,
    /// The execution policy.
    pub policy: String,
    /// Seconds that were measured.
    pub seconds: f64,
    /// Share of the device, in percent, that real time alone should use by its latencies alone.
    pub rt_share_pct: f64,
    /// All real time.
    pub rt: Latency,
    /// Over real time alone.
    pub rt_increase: LatencyIncrease,
    /// Mean latency by stage.
    pub rt_parts: LatencyParts,
    /// The same for the slowest of a hundred replies.
    pub rt_slowest: LatencyParts,
    /// Maximum of each stage over all replies: what delays one reply delays those behind it only by
    /// waiting.
    pub rt_longest: LatencyParts,
    /// Real-time replies per second.
    pub rt_rps: f64,
    /// Real-time requests sent late.
    pub late: u64,
    /// Real-time periods dropped.
    pub dropped: u64,
    /// Real time by model.
    pub rt_models: Vec<RealTimeModel>,
    /// Best-effort replies per second.
    pub be_rps: f64,
    /// Best effort by model.
    pub be_models: Vec<BestEffortModel>,
    /// Replies per second.
    pub throughput_rps: f64,
    /// Throughput over that of real time alone in the same run.
    pub over_rt_only: f64,
    /// Throughput over that of free streams in the same run, if they were run.
    pub over_free_streams: Option<f64>,
    /// Preemptions.
    pub preempted: PreemptionStats,
    /// Cores that the process kept busy, clients included; 0 if unknown.
    pub cpu_cores: f64,
    /// Waits for the node's lock, warm-up included.
    pub lock: LockWaits,
    /// Requests without outputs.
    pub errors: u64,
    /// Reason of the first error.
    pub first_error: Option<String>,
    /// Replies whose bits differ from those of an undisturbed run.
    pub wrong_outputs: u64,
    /// Violations in the recorded trace.
    pub violations: Vec<String>,
}

/// Latency of a model alone.
#[derive(Clone, Debug, Serialize)]
pub struct AloneLatency {
    /// The model.
    pub model: String,
    /// From request to reply, one after another.
    pub latency: Latency,
}

/// A policy that was requested but cannot run.
#[derive(Clone, Debug, Serialize)]
pub struct SkippedPolicy {
    /// Its name.
    pub policy: String,
    /// Why.
    pub why: String,
}

/// A whole run.
#[derive(Clone, Debug, Serialize)]
pub struct LiveReport {
    /// Description of the device.
    pub device: String,
    /// Version of its driver, if known.
    pub driver: Option<String>,
    /// The day, as YYYY-MM-DD.
    pub date: String,
    /// The command line.
    pub command: String,
    /// Seed of random arrivals.
    pub seed: u64,
    /// Models alone.
    pub alone: Vec<AloneLatency>,
    /// Policies that cannot run.
    #[serde(rename = "left_out")]
    pub skipped: Vec<SkippedPolicy>,
    /// One report per workload and policy.
    pub cells: Vec<CellReport>,
}

/// Rounds to two digits.
pub(super) fn round(value: f64) -> f64 {
    // Avoids a negative zero.
    (value * 100.0).round() / 100.0 + 0.0
}

/// Compares each cell with real time alone and with free streams, on the same workload at the same
/// rates.
pub(super) fn compare(cells: &mut [CellReport]) {
    let of = |cells: &[CellReport], like: &CellReport, policy: &str| {
        cells
            .iter()
            .find(|cell| {
                cell.policy == policy && cell.workload == like.workload && cell.rates == like.rates
            })
            .cloned()
    };
    for index in 0..cells.len() {
        let alone = of(cells, &cells[index], "rt_only");
        let free = of(cells, &cells[index], "free_streams");
        let cell = &mut cells[index];
        let ratio =
            |other: &CellReport| round(cell.throughput_rps / other.throughput_rps.max(1e-9));
        cell.over_free_streams = free.as_ref().map(ratio);
        let Some(alone) = alone else { continue };
        cell.over_rt_only = ratio(&alone);
        cell.rt_increase = LatencyIncrease::of(cell.rt, alone.rt);
        for model in &mut cell.rt_models {
            if let Some(before) = alone.rt_models.iter().find(|other| other.model == model.model) {
                model.increase = LatencyIncrease::of(model.latency, before.latency);
            }
        }
    }
}

/// The cells as a table.
pub fn table(cells: &[CellReport]) -> String {
    let mut text = format!(
        "{:<9}{:<9}{:<18}{:>8}{:>10}{:>10}{:>10}{:>9}{:>9}{:>9}{:>9}{:>9}{:>8}{:>8}{:>8}{:>9}{:>9}\
         {:>6}\n",
        "workload",
        "rates",
        "policy",
        "RT/s",
        "mean us",
        "p99 us",
        "max us",
        "mean +%",
        "p99 +%",
        "BE/s",
        "total/s",
        "/rt_only",
        "/free",
        "dropped",
        "preempt",
        "leave50",
        "leave99",
        "bad"
    );
    for c in cells {
        let free = c.over_free_streams.map_or("-".to_string(), |ratio| format!("{ratio:.2}"));
        let bad = c.errors + c.wrong_outputs + c.violations.len() as u64;
        let _ = writeln!(
            text,
            "{:<9}{:<9}{:<18}{:>8.1}{:>10.1}{:>10.1}{:>10.1}{:>9.2}{:>9.2}{:>9.1}{:>9.1}{:>9.2}\
             {free:>8}{:>8}{:>8}{:>9.1}{:>9.1}{bad:>6}",
            c.workload,
            c.rates,
            c.policy,
            c.rt_rps,
            c.rt.mean_us,
            c.rt.p99_us,
            c.rt.max_us,
            c.rt_increase.mean_pct,
            c.rt_increase.p99_pct,
            c.be_rps,
            c.throughput_rps,
            c.over_rt_only,
            c.dropped,
            c.preempted.count,
            c.preempted.latency.p50_us,
            c.preempted.latency.p99_us,
        );
    }
    text
}

/// The paper's figures with these cells, beside its published numbers.
pub fn charts(cells: &[CellReport]) -> Vec<Chart> {
    let mut rates: Vec<&str> = Vec::new();
    for cell in cells {
        if !rates.contains(&cell.rates.as_str()) {
            rates.push(&cell.rates);
        }
    }
    rates.into_iter().flat_map(|rates| charts_of(cells, rates)).collect()
}

fn charts_of(cells: &[CellReport], rates: &str) -> Vec<Chart> {
    let mine: Vec<&CellReport> = cells.iter().filter(|cell| cell.rates == rates).collect();
    let distinct = |name: fn(&CellReport) -> &String| {
        let mut names: Vec<String> = Vec::new();
        for cell in &mine {
            if !names.contains(name(cell)) {
                names.push(name(cell).clone());
            }
        }
        names
    };
    let (groups, policies) = (distinct(|cell| &cell.workload), distinct(|cell| &cell.policy));
    let chart = |title: String, unit: &str, value: fn(&CellReport) -> f64| {
        let at = |policy: &String, group: &String| {
            let found = mine.iter().find(|c| c.policy == *policy && c.workload == *group);
            found.map_or(0.0, |cell| value(cell))
        };
        let bar = |policy: &String| {
            (policy.clone(), groups.iter().map(|group| at(policy, group)).collect())
        };
        let (unit, bars) = (unit.to_string(), policies.iter().map(bar).collect());
        Chart { title, unit, groups: groups.clone(), bars }
    };
    let published = |mut chart: Chart, bars: &[Published]| {
        for (name, values) in bars {
            let value = |group: &String| values.iter().find(|(of, _)| of == group);
            let values = groups.iter().map(|group| value(group).map_or(0.0, |(_, value)| *value));
            chart.bars.push(((*name).to_string(), values.collect()));
        }
        chart
    };
    let slower = chart(
        format!("Mean real-time latency over real time alone, {rates} rates (figure 11a)"),
        "x",
        |c| 1.0 + c.rt_increase.mean_pct / 100.0,
    );
    let gains = chart(
        format!("Overall throughput over real time alone, {rates} rates (figure 11b)"),
        "x",
        |c| c.over_rt_only,
    );
    vec![
        chart(format!("Mean real-time latency, {rates} rates (figure 11a)"), "ms", |c| {
            c.rt.mean_us / 1e3
        }),
        chart(format!("99th percentile of real-time latency, {rates} rates"), "ms", |c| {
            c.rt.p99_us / 1e3
        }),
        published(slower, &PUBLISHED_LATENCIES),
        chart(format!("Overall throughput, {rates} rates (figure 11b)"), "requests/s", |c| {
            c.throughput_rps
        }),
        published(gains, &PUBLISHED_GAINS),
        chart(
            format!("Best effort preempted, median latency, {rates} rates (figure 12a)"),
            "us",
            |c| c.preempted.latency.p50_us,
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples() {
        let mut samples: Vec<Nanos> = (1..=200).rev().map(Nanos::from_micros).collect();
        let latency = Latency::of(&mut samples);
        assert_eq!((latency.count, latency.p50_us, latency.p99_us), (200, 100.0, 198.0));
        assert_eq!((latency.mean_us, latency.max_us), (100.5, 200.0));
        assert_eq!(Latency::of(&mut []).count, 0);
    }
}
