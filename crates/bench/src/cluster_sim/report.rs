//! The report of a cluster scenario, as data and as text.

use serde::Serialize;

use crate::outcome::OutcomeCounts;

/// The report of a scenario.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ClusterReport {
    /// The scenario.
    pub name: String,
    /// Requests.
    pub requests: u64,
    /// Requests without reply in time.
    pub bad: u64,
    /// What became of them.
    pub outcomes: OutcomeCounts,
    /// The same in percent.
    pub bad_percent: f64,
    /// GPUs that served, by second.
    pub used: Vec<usize>,
    /// Requests in thousands and bad ones in percent, by second.
    pub seconds: Vec<(f64, f64)>,
    /// Steps by which the load rises.
    pub rises: Vec<LoadRise>,
    /// Seconds from the first of these until a plan with more GPUs was in effect.
    pub larger_plan_s: Option<f64>,
    /// By plan, when it was made: GPUs, and how many its rates need at least.
    pub packing: Vec<(usize, f64)>,
    /// GPUs that the load of all seconds needed at least, in percent of those that served.
    pub needed_percent: f64,
    /// Number of plans.
    pub plans: u64,
    /// Number of model loads.
    pub moves: u64,
    /// Max milliseconds of a decision with a new plan on this machine.
    pub plan_ms_max: f64,
    /// Max milliseconds of applying routes.
    pub table_ms_max: f64,
    /// Bytes of all routes and assignments.
    pub record_bytes: usize,
    /// Violations; empty if there are none.
    pub violations: Vec<String>,
}

/// A step by which the load rises.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LoadRise {
    /// When, in seconds.
    pub at_s: u64,
    /// Seconds until no more answers are bad than the scenario allows; `None` if they stay bad.
    pub reaction_s: Option<f64>,
}

impl ClusterReport {
    /// GPUs that the rates of a plan need at least, in percent of those it uses; of the worst plan.
    pub fn packing_percent(&self) -> Option<f64> {
        let used = self.packing.iter().filter(|(gpus, _)| *gpus > 0);
        used.map(|(gpus, needed)| 100.0 * needed / *gpus as f64).reduce(f64::min)
    }
}

/// Reactions to the rises of load, as text.
fn reactions(report: &ClusterReport) -> String {
    let seconds = |s: Option<f64>| s.map_or("-".to_string(), |s| format!("{s:.2} s"));
    let one = |rise: &LoadRise| match rise.reaction_s {
        Some(_) => format!("{} after {} s", seconds(rise.reaction_s), rise.at_s),
        None => format!("none after {} s", rise.at_s),
    };
    let all: Vec<String> = report.rises.iter().map(one).collect();
    match all.is_empty() {
        true => "-".to_string(),
        false => format!("{}; larger plan after {}", all.join(", "), seconds(report.larger_plan_s)),
    }
}

/// The report as text.
pub fn text(report: &ClusterReport) -> String {
    let used = |f: fn(usize, usize) -> usize| report.used.iter().copied().reduce(f).unwrap_or(0);
    let worst = report.seconds.iter().map(|(_, bad)| *bad).fold(0.0, f64::max);
    let (last, needed) = report.packing.last().copied().unwrap_or_default();
    format!(
        "{}: {} requests, {:.4} % bad (worst second {:.2} %), {} to {} GPUs, reaction {}\n\
         {} good, {} late, {} refused, {} cancelled, {} failed, {} pending\n\
         {} plans, {} loads; longest plan {:.1} ms, table update {:.1} ms, records {:.1} MB\n\
         packing {:.1} % in the worst plan, last plan {last} GPUs for rates that need {needed:.2}; \
         the load needed {:.1} % of the GPUs\n",
        report.name,
        report.requests,
        report.bad_percent,
        worst,
        used(usize::min),
        used(usize::max),
        reactions(report),
        report.outcomes.good,
        report.outcomes.late,
        report.outcomes.refused,
        report.outcomes.cancelled,
        report.outcomes.failed,
        report.outcomes.pending,
        report.plans,
        report.moves,
        report.plan_ms_max,
        report.table_ms_max,
        report.record_bytes as f64 / 1e6,
        report.packing_percent().unwrap_or(100.0),
        report.needed_percent,
    )
}
