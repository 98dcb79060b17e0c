//! What cells came to, beside each other.

use std::fmt::Write as _;

use base::{Histogram, Nanos};
use serde::Serialize;

use crate::disb::{PUBLISHED_GAINS, PUBLISHED_LATENCIES, Published};
use crate::plot::Chart;

/// Latencies in microseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Latency {
    /// Answers.
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
    /// Of `samples`, which are sorted by this.
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

    /// Of spans that were only counted.
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

/// What a latency is above that of real time alone, in percent.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Increase {
    /// Of the mean.
    pub mean_pct: f64,
    /// Of the median.
    pub p50_pct: f64,
    /// Of the 99th percentile.
    pub p99_pct: f64,
    /// Of the longest.
    pub max_pct: f64,
}

impl Increase {
    fn of(latency: Latency, alone: Latency) -> Increase {
        let over = |with: f64, without: f64| match without > 0.0 {
            true => round((with / without - 1.0) * 100.0),
            false => 0.0,
        };
        Increase {
            mean_pct: over(latency.mean_us, alone.mean_us),
            p50_pct: over(latency.p50_us, alone.p50_us),
            p99_pct: over(latency.p99_us, alone.p99_us),
            max_pct: over(latency.max_us, alone.max_us),
        }
    }
}

/// Where the time of answers went.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Parts {
    /// Inputs brought to where the device takes them from.
    pub prepare_us: f64,
    /// From then until its turn came: the node's lock, and others that ran.
    pub wait_us: f64,
    /// Telling the device.
    pub launch_us: f64,
    /// The device's work, until its thread saw the end.
    pub device_us: f64,
    /// From then until the client had the answer.
    pub reply_us: f64,
}

impl Parts {
    /// The mean of `answers`, each in the order of the fields.
    pub fn of(answers: &[[Nanos; 5]]) -> Parts {
        let count = answers.len().max(1) as f64;
        Parts::each(|part| {
            answers.iter().map(|answer| answer[part].0 as f64).sum::<f64>() / count / 1e3
        })
    }

    /// The longest of each part, of whichever answer.
    pub fn longest(answers: &[[Nanos; 5]]) -> Parts {
        Parts::each(|part| {
            let longest = answers.iter().map(|answer| answer[part]).max().unwrap_or_default();
            longest.0 as f64 / 1e3
        })
    }

    fn each(micros: impl Fn(usize) -> f64) -> Parts {
        let part = |index| round(micros(index));
        Parts {
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
    /// Requests a second it was to get; what a trace comes to on average.
    pub offered_rps: f64,
    /// From question to answer.
    pub latency: Latency,
    /// Over real time alone.
    pub increase: Increase,
    /// Questions asked late because the answer before them came late.
    pub late: u64,
    /// Periods that had passed and were dropped.
    pub dropped: u64,
}

/// A best-effort model of a cell.
#[derive(Clone, Debug, Serialize)]
pub struct BestEffortModel {
    /// The model.
    pub model: String,
    /// Answers a second.
    pub rps: f64,
    /// From question to answer.
    pub latency: Latency,
    /// Mean time the device spent on an answer, all its launches together.
    pub busy_us: f64,
    /// The same of an undisturbed run of this class.
    pub alone_busy_us: f64,
}

/// How often best effort was made to leave for real time, and what that cost.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Preempted {
    /// Orders to leave for real time.
    pub count: u64,
    /// Of these, work that ended before it could leave.
    pub finished_first: u64,
    /// From the order until the device had given the work back.
    pub leave: Latency,
    /// All of that together, in percent of the time best effort had: what is lost at most besides what is done again.
    pub leaving_pct: f64,
}

/// How much the node's threads waited for each other.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Lock {
    /// Waits a second.
    pub waits_per_second: f64,
    /// Mean of a wait.
    pub mean_us: f64,
    /// Longest.
    pub max_us: f64,
}

/// One policy on one workload.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    /// The workload.
    pub workload: String,
    /// `literal` or `scaled`.
    pub rates: String,
    /// The execution policy.
    pub policy: String,
    /// Seconds that were measured.
    pub seconds: f64,
    /// Share of the device, in percent, that real time alone is to use by its stand-alone latencies.
    pub rt_share_pct: f64,
    /// All real time.
    pub rt: Latency,
    /// Over real time alone.
    pub rt_increase: Increase,
    /// Where its time went, on average.
    pub rt_parts: Parts,
    /// The same of the slowest of a hundred.
    pub rt_slowest: Parts,
    /// The longest of each part, of whichever answer: what held up one answer holds up those behind it only by waiting.
    pub rt_longest: Parts,
    /// Real-time answers a second.
    pub rt_rps: f64,
    /// Real-time questions asked late.
    pub late: u64,
    /// Real-time periods dropped.
    pub dropped: u64,
    /// Real time by model.
    pub rt_models: Vec<RealTimeModel>,
    /// Best-effort answers a second.
    pub be_rps: f64,
    /// Best effort by model.
    pub be_models: Vec<BestEffortModel>,
    /// Answers a second.
    pub throughput_rps: f64,
    /// Over real time alone in the same run.
    pub over_rt_only: f64,
    /// Over free streams in the same run, where they were run.
    pub over_free_streams: Option<f64>,
    /// Best effort that was made to leave.
    pub preempted: Preempted,
    /// Cores the process kept busy, its clients included; 0 where that is not known.
    pub cpu_cores: f64,
    /// Waits for the node's lock, warm-up included.
    pub lock: Lock,
    /// Requests that got no outputs.
    pub errors: u64,
    /// The first one's reason.
    pub first_error: Option<String>,
    /// Answers whose bits differ from those of an undisturbed run.
    pub wrong_outputs: u64,
    /// What the checkers found in the recorded trace.
    pub violations: Vec<String>,
}

/// A model on its own.
#[derive(Clone, Debug, Serialize)]
pub struct Alone {
    /// The model.
    pub model: String,
    /// From question to answer, one after another.
    pub latency: Latency,
}

/// A policy that was asked for and not run.
#[derive(Clone, Debug, Serialize)]
pub struct LeftOut {
    /// Its name.
    pub policy: String,
    /// Why.
    pub why: String,
}

/// A whole run.
#[derive(Clone, Debug, Serialize)]
pub struct LiveReport {
    /// The device in words.
    pub device: String,
    /// Its driver, where known.
    pub driver: Option<String>,
    /// The day, as YYYY-MM-DD.
    pub date: String,
    /// How the run was asked for.
    pub command: String,
    /// Seed of random arrivals.
    pub seed: u64,
    /// Models on their own.
    pub alone: Vec<Alone>,
    /// Policies that were left out, and why.
    pub left_out: Vec<LeftOut>,
    /// Everything else.
    pub cells: Vec<Cell>,
}

/// Two digits after the point: more is noise to a reader.
pub(super) fn round(value: f64) -> f64 {
    // The sum of nothing is a negative zero.
    (value * 100.0).round() / 100.0 + 0.0
}

/// Sets each cell beside real time alone and free streams on the same workload at the same rates.
pub(super) fn compare(cells: &mut [Cell]) {
    let of = |cells: &[Cell], like: &Cell, policy: &str| {
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
        let ratio = |other: &Cell| round(cell.throughput_rps / other.throughput_rps.max(1e-9));
        cell.over_free_streams = free.as_ref().map(ratio);
        let Some(alone) = alone else { continue };
        cell.over_rt_only = ratio(&alone);
        cell.rt_increase = Increase::of(cell.rt, alone.rt);
        for model in &mut cell.rt_models {
            if let Some(before) = alone.rt_models.iter().find(|other| other.model == model.model) {
                model.increase = Increase::of(model.latency, before.latency);
            }
        }
    }
}

/// The cells as a table.
pub fn table(cells: &[Cell]) -> String {
    let mut text = format!(
        "{:<9}{:<9}{:<18}{:>8}{:>10}{:>10}{:>10}{:>9}{:>9}{:>9}{:>9}{:>9}{:>8}{:>8}{:>8}{:>9}{:>9}{:>6}\n",
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
            "{:<9}{:<9}{:<18}{:>8.1}{:>10.1}{:>10.1}{:>10.1}{:>9.2}{:>9.2}{:>9.1}{:>9.1}{:>9.2}{free:>8}{:>8}{:>8}{:>9.1}{:>9.1}{bad:>6}",
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
            c.preempted.leave.p50_us,
            c.preempted.leave.p99_us,
        );
    }
    text
}

/// The paper's figures with these cells, and with what it published beside them where it gives numbers.
pub fn charts(cells: &[Cell]) -> Vec<Chart> {
    let mut rates: Vec<&str> = Vec::new();
    for cell in cells {
        if !rates.contains(&cell.rates.as_str()) {
            rates.push(&cell.rates);
        }
    }
    rates.into_iter().flat_map(|rates| charts_of(cells, rates)).collect()
}

fn charts_of(cells: &[Cell], rates: &str) -> Vec<Chart> {
    let mine: Vec<&Cell> = cells.iter().filter(|cell| cell.rates == rates).collect();
    let distinct = |name: fn(&Cell) -> &String| {
        let mut names: Vec<String> = Vec::new();
        for cell in &mine {
            if !names.contains(name(cell)) {
                names.push(name(cell).clone());
            }
        }
        names
    };
    let (groups, policies) = (distinct(|cell| &cell.workload), distinct(|cell| &cell.policy));
    let chart = |title: String, unit: &str, value: fn(&Cell) -> f64| {
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
            format!("Best effort gone after the order, median, {rates} rates (figure 12a)"),
            "us",
            |c| c.preempted.leave.p50_us,
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
