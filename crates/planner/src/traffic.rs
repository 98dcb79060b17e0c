//! Recorded traffic: rates of services over days, as windows that are planned one after another.
//!
//! A window's rate is the peak or a percentile of the samples in it. Samples of several days may be
//! folded, so that a window is a time of day. Samples come from a file or from Prometheus.

pub mod prometheus;
mod time;

use std::collections::{BTreeMap, BTreeSet};

use crate::certified::{self, Solution};
use crate::error::PlanError;
use crate::json_file::without_mark;
use crate::plan::Plan;
use crate::problem::Problem;
use crate::replan::steps::{TransitionStep, steps};
use crate::replan::{ChangeCosts, replanned};
use crate::search_control::SearchControl;
use crate::toml_file::is_name;

pub use self::time::seconds_of;

/// Rate of a service without traffic in a window: it stays deployed.
pub const RATE_MIN: f64 = 0.001;
const RATE_MAX: f64 = 1e9;
/// Latest time in seconds since 1970.
const TIME_S_MAX: f64 = 1e12;
/// Most samples, and most windows.
const SAMPLES_MAX: usize = 20_000_000;
const WINDOWS_MAX: usize = 10_000;
/// Most services of all windows together.
const WINDOW_RATES_MAX: usize = 20_000_000;
/// Seconds of a day.
pub const DAY_S: u64 = 86_400;

/// What a window's rate is, of its samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WindowRate {
    /// The largest.
    Peak,
    /// This percentile, above 0 and at most 100.
    Percentile(f64),
}

impl WindowRate {
    /// The rate of a window with these samples.
    fn of(self, samples: &mut [f64]) -> f64 {
        samples.sort_by(f64::total_cmp);
        let last = samples.len().saturating_sub(1);
        let index = match self {
            WindowRate::Peak => last,
            // The nearest rank: at least this share of the samples is not above it.
            WindowRate::Percentile(percent) => {
                let rank = (percent / 100.0 * samples.len() as f64).ceil() as usize;
                rank.saturating_sub(1).min(last)
            }
        };
        samples.get(index).copied().unwrap_or(0.0)
    }
}

/// Samples of rates.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Names of the services, in the order of the file.
    pub services: Vec<String>,
    /// Seconds, index of the service, requests per second.
    samples: Vec<(u64, usize, f64)>,
}

/// Rates in a window.
#[derive(Clone, Debug, PartialEq)]
pub struct TrafficWindow {
    /// Its start in seconds: of the day if days are folded, or else since the first sample.
    pub start_s: u64,
    /// Requests per second by service; 0 without a sample.
    pub rates: Vec<f64>,
}

impl Traffic {
    /// Reads comma-separated text: `time,service,rate` with a line for each sample, or `time` and a
    /// column for each service. Times are those of [`seconds_of`].
    pub fn from_csv(text: &str) -> Result<Traffic, PlanError> {
        let bad = |line: usize, what: String| PlanError::BadFile { line, what };
        let lines = without_mark(text).lines().enumerate();
        let mut lines = lines.filter(|(_, line)| !line.trim().is_empty());
        let (first, header) =
            lines.next().ok_or_else(|| bad(1, "the file is empty".to_string()))?;
        let names = cells(header);
        if !names[0].eq_ignore_ascii_case("time") || names.len() < 2 {
            let what = "the first column is not 'time', or it is the only one".to_string();
            return Err(bad(first + 1, what));
        }
        let long = names.len() == 3 && names[1] == "service" && names[2] == "rate";
        let mut traffic = Traffic::default();
        let mut index: BTreeMap<String, usize> = BTreeMap::new();
        if !long {
            for name in &names[1..] {
                let next = traffic.services.len();
                if !is_name(name) {
                    return Err(bad(first + 1, no_name("column", name)));
                }
                if index.insert(name.to_string(), next).is_some() {
                    return Err(bad(first + 1, format!("column '{name}' is there twice")));
                }
                traffic.services.push(name.to_string());
            }
        }
        for (at, line) in lines {
            let line_number = at + 1;
            let cells = cells(line);
            if cells.len() != names.len() {
                let what = format!("{} cells, not {}", cells.len(), names.len());
                return Err(bad(line_number, what));
            }
            let time_s = seconds_of(cells[0]).ok_or_else(|| bad(line_number, no_time(cells[0])))?;
            let rate = |text: &str| {
                let rate = text.parse::<f64>().ok().filter(|r| (0.0..=RATE_MAX).contains(r));
                rate.ok_or_else(|| {
                    bad(line_number, format!("rate '{text}' is not from 0 to {RATE_MAX:e}"))
                })
            };
            if long {
                if !is_name(cells[1]) {
                    return Err(bad(line_number, no_name("service", cells[1])));
                }
                let services = &mut traffic.services;
                let service = *index.entry(cells[1].to_string()).or_insert_with(|| {
                    services.push(cells[1].to_string());
                    services.len() - 1
                });
                traffic.samples.push((time_s, service, rate(cells[2])?));
            } else {
                // A gap in the recording is an empty cell.
                for (service, cell) in cells[1..].iter().enumerate().filter(|(_, c)| !c.is_empty())
                {
                    traffic.samples.push((time_s, service, rate(cell)?));
                }
            }
            if traffic.samples.len() > SAMPLES_MAX {
                return Err(bad(line_number, format!("more than {SAMPLES_MAX} samples")));
            }
        }
        if traffic.samples.is_empty() {
            return Err(bad(1, "there are no samples".to_string()));
        }
        Ok(traffic)
    }

    /// The windows in order. With `fold`, a window has the samples of its time of day on all days;
    /// otherwise it is one stretch of the recording, and stretches without samples are left out.
    pub fn windows(
        &self,
        window_s: u64,
        fold: bool,
        rate: WindowRate,
    ) -> Result<Vec<TrafficWindow>, PlanError> {
        let unfit = |what: &str| PlanError::BadFile { line: 1, what: what.to_string() };
        if window_s == 0 || (fold && (window_s > DAY_S || !DAY_S.is_multiple_of(window_s))) {
            return Err(unfit("a window is at least 1 s, and of folded days a whole part of one"));
        }
        if matches!(rate, WindowRate::Percentile(percent) if !(percent > 0.0 && percent <= 100.0)) {
            return Err(unfit("a percentile is above 0 and at most 100"));
        }
        let first = self.samples.iter().map(|(time_s, _, _)| *time_s).min().unwrap_or(0);
        let start_of = |time_s: u64| {
            let time_s = if fold { time_s % DAY_S } else { time_s - first };
            time_s / window_s * window_s
        };
        let starts: BTreeSet<u64> = self.samples.iter().map(|sample| start_of(sample.0)).collect();
        if starts.len() > WINDOWS_MAX {
            return Err(unfit("more than 10000 windows; take longer ones"));
        }
        if starts.len().saturating_mul(self.services.len()) > WINDOW_RATES_MAX {
            return Err(unfit("more than 20 million rates of all windows; take longer windows"));
        }
        let mut samples: BTreeMap<u64, Vec<Vec<f64>>> = BTreeMap::new();
        for (time_s, service, value) in &self.samples {
            let window = samples.entry(start_of(*time_s));
            window.or_insert_with(|| vec![Vec::new(); self.services.len()])[*service].push(*value);
        }
        let window = |(start_s, mut by_service): (u64, Vec<Vec<f64>>)| TrafficWindow {
            start_s,
            rates: by_service.iter_mut().map(|samples| rate.of(samples)).collect(),
        };
        Ok(samples.into_iter().map(window).collect())
    }

    /// `problem` with the rates of a window. Services that the traffic does not name keep theirs.
    pub fn problem_of(&self, problem: &Problem, window: &TrafficWindow) -> Problem {
        let rates: BTreeMap<&str, f64> =
            self.services.iter().map(String::as_str).zip(window.rates.iter().copied()).collect();
        let mut changed = problem.clone();
        for service in &mut changed.services {
            if let Some(rate) = rates.get(service.name.as_str()) {
                service.rate = rate.max(RATE_MIN);
            }
        }
        changed
    }

    /// Services that `problem` does not have.
    pub fn unknown<'t>(&'t self, problem: &Problem) -> Vec<&'t str> {
        let known: BTreeSet<&str> = problem.services.iter().map(|s| s.name.as_str()).collect();
        self.services.iter().map(String::as_str).filter(|name| !known.contains(name)).collect()
    }
}

/// Characters of a cell that a message shows.
const SHOWN_MAX: usize = 64;

fn no_time(text: &str) -> String {
    let shown: String = text.chars().take(SHOWN_MAX).collect();
    format!(
        "time {shown:?} is not seconds since 1970 or a moment such as 2026-01-31T18:00:00+02:00"
    )
}

fn no_name(what: &str, name: &str) -> String {
    let shown: String = name.chars().take(SHOWN_MAX).collect();
    format!("{what} {shown:?} is not a printable name of at most 256 bytes")
}

/// The cells of a line without the quotes that spreadsheets write.
fn cells(line: &str) -> Vec<&str> {
    line.split(',').map(|cell| cell.trim().trim_matches('"').trim()).collect()
}

/// The plan of a window, and the way to it from the one before.
#[derive(Clone, Debug)]
pub struct WindowPlan {
    /// Start of the window in seconds.
    pub start_s: u64,
    /// Requests per second of all services.
    pub rate: f64,
    /// GPUs in use.
    pub gpus: usize,
    /// Slices that are created on the way; 0 for the first window.
    pub created: usize,
    /// Slices that are destroyed.
    pub destroyed: usize,
    /// Services with other slices than before.
    pub moved: usize,
    /// The plan, with its proven lower bound for this window alone.
    pub solution: Solution,
    /// The steps from the plan before; none for the first window.
    pub steps: Vec<TransitionStep>,
}

/// Plans each window from the plan before it. The first is planned afresh; where days are folded,
/// the way from the last back to the first is counted with the first.
pub fn plan_windows(
    problem: &Problem,
    traffic: &Traffic,
    windows: &[TrafficWindow],
    folded: bool,
    control: &mut SearchControl<'_>,
) -> Result<Vec<WindowPlan>, PlanError> {
    let mut plans: Vec<WindowPlan> = Vec::with_capacity(windows.len());
    for window in windows {
        let problem = traffic.problem_of(problem, window);
        let solution = match plans.last() {
            None => certified::plan(&problem, control)?,
            Some(before) => {
                replanned(&problem, &before.solution.plan, ChangeCosts::default(), control)?
            }
        };
        let mut planned = WindowPlan {
            start_s: window.start_s,
            rate: problem.services.iter().map(|service| service.rate).sum(),
            gpus: solution.plan.used_gpus(),
            created: 0,
            destroyed: 0,
            moved: 0,
            solution,
            steps: Vec::new(),
        };
        if let Some(before) = plans.last() {
            planned.steps = count_changes(&problem, &before.solution.plan, &mut planned);
        }
        plans.push(planned);
    }
    if folded && plans.len() > 1 {
        let (last, first) = (plans[plans.len() - 1].solution.plan.clone(), &windows[0]);
        let problem = traffic.problem_of(problem, first);
        count_changes(&problem, &last, &mut plans[0]);
    }
    Ok(plans)
}

fn count_changes(
    problem: &Problem,
    before: &Plan,
    planned: &mut WindowPlan,
) -> Vec<TransitionStep> {
    let mut moved = BTreeSet::new();
    let steps = steps(problem, before, &planned.solution.plan);
    for step in &steps {
        match step {
            // A shadow serves while another slice is made, and goes again.
            TransitionStep::Create { shadow: true, .. } | TransitionStep::Route { .. } => {}
            TransitionStep::Create { slice, .. } => {
                planned.created += 1;
                moved.extend(slice.shares.iter().map(|share| share.service));
            }
            TransitionStep::Destroy { .. } => planned.destroyed += 1,
        }
    }
    planned.moved = moved.len();
    steps
}

#[cfg(test)]
mod tests {
    use base::ManualClock;

    use super::*;
    use crate::{GpuKind, PlanRules, Profiles, Service, check};

    #[test]
    fn windows_take_peaks_and_percentiles_and_fold_days() {
        let mut text = "time,a,b\n".to_string();
        for hour in 0..48 {
            // The second day has twice the rate.
            let rate = (1 + hour / 24) * (10 + hour % 24);
            text += &format!("2026-03-0{}T{:02}:30:00Z,{rate},\n", 1 + hour / 24, hour % 24);
        }
        let traffic = Traffic::from_csv(&text).unwrap();
        let windows = traffic.windows(6 * 3600, true, WindowRate::Peak).unwrap();
        let peaks: Vec<f64> = windows.iter().map(|window| window.rates[0]).collect();
        assert_eq!(peaks, [30.0, 42.0, 54.0, 66.0]);
        assert!(windows.iter().all(|window| window.rates[1] == 0.0));
        let median = traffic.windows(DAY_S, true, WindowRate::Percentile(50.0)).unwrap();
        // 48 samples: 19 of the first day and 5 of the second are at most 28.
        assert_eq!(median[0].rates[0], 28.0);
        let days = traffic.windows(DAY_S, false, WindowRate::Peak).unwrap();
        assert_eq!(days.iter().map(|day| day.rates[0]).collect::<Vec<_>>(), [33.0, 66.0]);
        assert!(traffic.windows(7 * 3600, true, WindowRate::Peak).is_err());
        assert!(traffic.windows(60, true, WindowRate::Percentile(f64::NAN)).is_err());
        // Both forms and both kinds of times say the same.
        let long = Traffic::from_csv("time,service,rate\n1772323200,a,5\n").unwrap();
        let wide = Traffic::from_csv("\"Time\",\"a\"\n2026-03-01 00:00:00,5\n").unwrap();
        assert_eq!(long, wide);
        // A mark at the start and an offset are as common.
        let marked = "\u{feff}time,a\n2026-03-01T02:00:00+02:00,5\n";
        assert_eq!(Traffic::from_csv(marked).unwrap(), long);
    }

    #[test]
    fn bad_traffic_is_named_with_its_line() {
        for (text, line, what) in [
            ("", 1, "empty"),
            ("when,a\n1,2\n", 1, "'time'"),
            ("time,a,a\n1,2,3\n", 1, "'a'"),
            ("time,a\n\n1,2\nyesterday,2\n", 4, "yesterday"),
            ("time,a\n1,-2\n", 2, "rate '-2'"),
            ("time,a\n1,nan\n", 2, "rate 'nan'"),
            ("time,a\n1,2,3\n", 2, "3 cells"),
            ("time,a\n2026-13-01T00:00:00,2\n", 2, "2026-13"),
            ("time,a\n", 1, "no samples"),
            // It was taken for the third of March.
            ("time,a\n1,2\n2026-02-31T00:00:00,2\n", 3, "2026-02-31"),
            ("time,a\n2026-02-01T00:00:00+2,2\n", 2, "+2\""),
            ("\n\ntime,a,\n1,2,3\n", 3, "column \"\""),
            ("time,service,rate\n1,,3\n", 2, "service \"\""),
            ("time,service,rate\n1,a\u{1b}[2J,3\n", 2, "service \"a\\u{1b}"),
        ] {
            let error = Traffic::from_csv(text).unwrap_err().to_string();
            assert!(error.contains(&format!("line {line}:")) && error.contains(what), "{error}");
        }
    }

    #[test]
    fn every_window_is_served_and_the_changes_are_counted() {
        let profiles = "model,mig_gpcs,batch,procs,throughput_total_rps,latency_ms\n\
                        m,1,4,1,100,20\nm,2,4,1,220,10\nm,7,4,1,900,3\n";
        let service = |name: &str| Service {
            name: name.to_string(),
            model: "m".to_string(),
            rate: 50.0,
            slo_ms: 200.0,
        };
        let problem = Problem {
            gpu: GpuKind::find("a100-80gb").unwrap(),
            services: vec![service("a"), service("b")],
            profiles: Profiles::from_csv(profiles).unwrap(),
            rules: PlanRules::default(),
        };
        let text = "time,a\n0,50\n3600,50\n7200,3000\n10800,50\n";
        let traffic = Traffic::from_csv(text).unwrap();
        let windows = traffic.windows(3600, true, WindowRate::Peak).unwrap();
        let clock = ManualClock::default();
        let mut report = |_| true;
        let mut control = SearchControl::new(&clock, &mut report);
        let plans = plan_windows(&problem, &traffic, &windows, true, &mut control).unwrap();
        for (plan, window) in plans.iter().zip(&windows) {
            let problem = traffic.problem_of(&problem, window);
            assert!(check(&problem, &plan.solution.plan).is_empty());
            assert!(plan.gpus as f64 >= plan.solution.bound);
        }
        let gpus: Vec<usize> = plans.iter().map(|plan| plan.gpus).collect();
        assert!(gpus[2] > gpus[1] && gpus[0] == gpus[1], "{gpus:?}");
        assert_eq!((plans[1].created, plans[1].moved), (0, 0));
        assert!(plans[2].created > 0 && plans[3].destroyed > 0);
        assert_eq!(traffic.unknown(&problem), Vec::<&str>::new());
    }
}
