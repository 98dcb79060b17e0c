//! What-if sweeps: the plan at several factors on the rates, the SLOs or the capacity.

use std::fmt::Write;
use std::str::FromStr;

use crate::error::PlanError;
use crate::problem::Problem;

/// What a sweep changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SweepField {
    /// A factor on every rate.
    Rate,
    /// A factor on every SLO.
    Slo,
    /// The headroom of all services without one of their own.
    Headroom,
}

/// A sweep: `rate=0.5..2` or, with a number of steps, `rate=0.5..2:16`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sweep {
    /// What it changes.
    pub field: SweepField,
    /// The first value.
    pub from: f64,
    /// The last value.
    pub to: f64,
    /// Number of values.
    pub steps: usize,
}

const STEPS_DEFAULT: usize = 7;
const STEPS_MAX: usize = 1000;
/// Factors, and headroom, that a sweep may take.
const FACTORS: (f64, f64) = (1e-3, 1e3);
const HEADROOMS: (f64, f64) = (0.0, 10.0);

impl FromStr for Sweep {
    type Err = String;

    fn from_str(text: &str) -> Result<Sweep, String> {
        let form = "use FIELD=FROM..TO or FIELD=FROM..TO:STEPS with rate, slo or headroom";
        let (name, range) = text.split_once('=').ok_or(form)?;
        let (field, limits) = match name.trim() {
            "rate" => (SweepField::Rate, FACTORS),
            "slo" => (SweepField::Slo, FACTORS),
            "headroom" => (SweepField::Headroom, HEADROOMS),
            other => return Err(format!("'{other}' is not rate, slo or headroom")),
        };
        let (range, steps) = match range.split_once(':') {
            Some((range, steps)) => (range, steps.parse::<usize>().map_err(|_| form)?),
            None => (range, STEPS_DEFAULT),
        };
        let (from, to) = range.split_once("..").ok_or(form)?;
        let number = |text: &str| {
            let value = text.trim().parse::<f64>().map_err(|_| format!("'{text}' is no number"))?;
            let (min, max) = limits;
            match (min..=max).contains(&value) {
                true => Ok(value),
                false => Err(format!("{value} is not from {min} to {max}")),
            }
        };
        let (from, to) = (number(from)?, number(to)?);
        if !(2..=STEPS_MAX).contains(&steps) || from >= to {
            return Err(format!("2 to {STEPS_MAX} steps from a smaller to a larger value"));
        }
        Ok(Sweep { field, from, to, steps })
    }
}

impl Sweep {
    /// Its values, evenly spaced.
    pub fn values(&self) -> impl Iterator<Item = f64> + '_ {
        let width = (self.to - self.from) / (self.steps - 1) as f64;
        (0..self.steps).map(move |step| match step + 1 == self.steps {
            true => self.to,
            false => self.from + width * step as f64,
        })
    }

    /// `problem` at one value.
    pub fn problem_at(&self, problem: &Problem, value: f64) -> Problem {
        let mut changed = problem.clone();
        match self.field {
            SweepField::Rate => changed.services.iter_mut().for_each(|s| s.rate *= value),
            SweepField::Slo => changed.services.iter_mut().for_each(|s| s.slo_ms *= value),
            SweepField::Headroom => changed.rules.headroom = value,
        }
        changed
    }

    /// The name of what it changes.
    pub fn name(&self) -> &'static str {
        match self.field {
            SweepField::Rate => "rate",
            SweepField::Slo => "slo",
            SweepField::Headroom => "headroom",
        }
    }
}

/// A row of a sweep.
#[derive(Clone, Debug, PartialEq)]
pub struct SweepRow {
    /// The value.
    pub value: f64,
    /// GPUs and their bound, or why there is no plan.
    pub result: Result<(usize, f64), PlanError>,
}

/// Plans `problem` at every value with `solve`, which returns the GPUs and their bound. A value
/// without a plan, for example below the smallest feasible SLO, has its error.
pub fn sweep(
    problem: &Problem,
    sweep: &Sweep,
    mut solve: impl FnMut(&Problem) -> Result<(usize, f64), PlanError>,
) -> Vec<SweepRow> {
    let row = |value: f64| SweepRow { value, result: solve(&sweep.problem_at(problem, value)) };
    sweep.values().map(row).collect()
}

/// The rows as a table.
pub fn table(sweep: &Sweep, rows: &[SweepRow]) -> String {
    let mut text = format!("{:>10}{:>8}{:>12}\n", sweep.name(), "gpus", "bound");
    for row in rows {
        let _ = match &row.result {
            Ok((gpus, bound)) => writeln!(text, "{:>10.3}{gpus:>8}{bound:>12.3}", row.value),
            Err(error) => writeln!(text, "{:>10.3}       - {error}", row.value),
        };
    }
    text
}

/// The rows as a picture: GPUs and their bound over the value.
pub fn svg(sweep: &Sweep, rows: &[SweepRow]) -> String {
    const WIDTH: f64 = 640.0;
    const HEIGHT: f64 = 360.0;
    const LEFT: f64 = 60.0;
    const TOP: f64 = 20.0;
    let planned: Vec<(f64, usize, f64)> = rows
        .iter()
        .filter_map(|row| row.result.as_ref().ok().map(|(gpus, bound)| (row.value, *gpus, *bound)))
        .collect();
    let most = planned.iter().map(|(_, gpus, _)| *gpus).max().unwrap_or(1).max(1) as f64;
    let x = |value: f64| LEFT + (value - sweep.from) / (sweep.to - sweep.from) * WIDTH;
    let y = |gpus: f64| TOP + HEIGHT * (1.0 - gpus / most);
    let (width, height) = (WIDTH + LEFT + 40.0, HEIGHT + TOP + 50.0);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    let ticks = most.min(8.0) as usize;
    for tick in 0..=ticks {
        let gpus = (most * tick as f64 / ticks as f64).round();
        let _ = writeln!(
            text,
            "<line x1=\"{LEFT}\" y1=\"{0:.1}\" x2=\"{1:.1}\" y2=\"{0:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{2}\" y=\"{3:.1}\" text-anchor=\"end\">{gpus}</text>",
            y(gpus),
            LEFT + WIDTH,
            LEFT - 6.0,
            y(gpus) + 4.0
        );
    }
    for value in sweep.values().step_by(sweep.steps.div_ceil(9)) {
        let _ = writeln!(
            text,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{value:.2}</text>",
            x(value),
            TOP + HEIGHT + 18.0
        );
    }
    let line = |value: &dyn Fn(&(f64, usize, f64)) -> f64| {
        let point = |row: &(f64, usize, f64)| format!("{:.1},{:.1}", x(row.0), y(value(row)));
        planned.iter().map(point).collect::<Vec<_>>().join(" ")
    };
    let _ = writeln!(
        text,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"#888\" stroke-dasharray=\"4 3\"/>\n\
         <polyline points=\"{}\" fill=\"none\" stroke=\"#1f6fb4\" stroke-width=\"2\"/>",
        line(&|row| row.2),
        line(&|row| row.1 as f64)
    );
    for row in &planned {
        let _ = writeln!(
            text,
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"#1f6fb4\"><title>{} {:.3}: {} gpus, \
             bound {:.3}</title></circle>",
            x(row.0),
            y(row.1 as f64),
            sweep.name(),
            row.0,
            row.1,
            row.2
        );
    }
    let _ = writeln!(
        text,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{} (line: gpus of the plan, dashes: \
         bound)</text>\n</svg>",
        LEFT + WIDTH / 2.0,
        TOP + HEIGHT + 38.0,
        match sweep.field {
            SweepField::Rate => "factor on the rates",
            SweepField::Slo => "factor on the SLOs",
            SweepField::Headroom => "headroom",
        }
    );
    text
}

#[cfg(test)]
mod tests {
    use base::ManualClock;

    use super::*;
    use crate::{GpuKind, PlanRules, Profiles, SearchControl, Service, certified};

    #[test]
    fn sweeps_are_parsed_and_bad_ones_named() {
        let sweep: Sweep = "rate=0.5..2".parse().unwrap();
        assert_eq!(sweep.values().collect::<Vec<_>>(), [0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]);
        assert_eq!("slo=1..3:3".parse::<Sweep>().unwrap().values().last(), Some(3.0));
        for bad in [
            "rate",
            "speed=1..2",
            "rate=2..1",
            "rate=nan..2",
            "rate=0..2",
            "rate=1..2:1",
            "rate=1..inf",
            "headroom=0..99",
            "rate=1..2:x",
        ] {
            assert!(bad.parse::<Sweep>().is_err(), "{bad}");
        }
    }

    #[test]
    fn more_load_takes_more_gpus_and_an_impossible_slo_has_its_error() {
        let profiles = "model,mig_gpcs,batch,procs,throughput_total_rps,latency_ms\n\
                        m,1,4,1,100,20\nm,7,4,1,700,3\n";
        let (name, model) = ("a".to_string(), "m".to_string());
        let problem = Problem {
            gpu: GpuKind::find("a100-80gb").unwrap(),
            services: vec![Service { name, model, rate: 1400.0, slo_ms: 13.0 }],
            profiles: Profiles::from_csv(profiles).unwrap(),
            rules: PlanRules::default(),
        };
        let clock = ManualClock::default();
        let mut report = |_| true;
        let mut control = SearchControl::new(&clock, &mut report);
        let mut solve = |problem: &Problem| {
            let solution = certified::plan(problem, &mut control)?;
            Ok((solution.plan.gpus.len(), solution.bound))
        };
        let spec: Sweep = "rate=0.5..2:4".parse().unwrap();
        let rows = sweep(&problem, &spec, &mut solve);
        let gpus: Vec<usize> = rows.iter().map(|row| row.result.as_ref().unwrap().0).collect();
        assert_eq!(gpus, [1, 2, 3, 4]);
        let picture = svg(&spec, &rows);
        assert!(picture.matches("<circle").count() == 4 && picture.ends_with("</svg>\n"));
        let spec: Sweep = "slo=0.5..1:2".parse().unwrap();
        let rows = sweep(&problem, &spec, &mut solve);
        assert!(rows[0].result.is_err() && rows[1].result.is_ok());
        assert!(table(&spec, &rows).contains("smallest feasible slo"));
        assert!(svg(&spec, &rows).contains("<circle"));
    }
}
