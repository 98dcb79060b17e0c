//! `atoll plan --sweep`, `--traffic` and `--prometheus`: plans for changed rates.

use std::path::Path;

use assembly::{Failure, write_file};
use base::MonotonicClock;
use planner::sweep::{Sweep, SweepRow, sweep};
use planner::traffic::{DAY_S, Traffic, TrafficWindow, WindowPlan, WindowRate, plan_windows};
use planner::{Problem, SearchControl, check};

use super::inputs::{needed, read_input};
use super::{PlanFile, few, prometheus};
use crate::args::PlanArgs;

/// Plans at every value of a sweep, and prints a table; `--svg` draws it.
pub(super) fn run_sweep(args: &PlanArgs, problem: &Problem, spec: &Sweep) -> Result<(), Failure> {
    let clock = MonotonicClock::new();
    let rows = sweep(problem, spec, |problem| {
        let mut report = |_| true;
        let mut control = SearchControl::new(&clock, &mut report);
        let answer = planner::run(problem, args.algorithm, &mut control)?;
        Ok((answer.gpus, answer.solution.bound))
    });
    if let Some(path) = &args.svg {
        write_file(path, &planner::sweep::svg(spec, &rows))?;
    }
    if args.json {
        let row = |row: &SweepRow| match &row.result {
            Ok((gpus, bound)) => {
                serde_json::json!({ "value": row.value, "gpus": gpus, "bound": bound })
            }
            Err(error) => serde_json::json!({ "value": row.value, "error": error.to_string() }),
        };
        let list: Vec<_> = rows.iter().map(row).collect();
        println!("{:#}", serde_json::json!({ "sweep": spec.name(), "rows": list }));
    } else {
        print!("{}", planner::sweep::table(spec, &rows));
    }
    match rows.iter().any(|row| row.result.is_ok()) {
        true => Ok(()),
        false => Err(Failure::failed("no value of the sweep has a plan")),
    }
}

/// Lengths and percentiles that no window has.
fn check_window_flags(args: &PlanArgs) -> Result<(), Failure> {
    let window_s = u64::from(args.window_s);
    if !args.unfolded && (window_s > DAY_S || !DAY_S.is_multiple_of(window_s)) {
        return Err(Failure::usage(format!(
            "--window-s {window_s} is not a whole part of a day, into which days are folded; see \
             --unfolded"
        )));
    }
    match args.percentile.filter(|percent| !(*percent > 0.0 && *percent <= 100.0)) {
        None => Ok(()),
        Some(percent) => {
            Err(Failure::usage(format!("--percentile {percent} is not above 0 and at most 100")))
        }
    }
}

/// A window's services that cannot be planned at its rates.
fn check_windows(
    problem: &Problem,
    traffic: &Traffic,
    windows: &[TrafficWindow],
    source: &str,
) -> Result<(), Failure> {
    for window in windows {
        if let Err(error) = traffic.problem_of(problem, window).validate() {
            let from = clock_time(window.start_s);
            return Err(Failure::usage(format!("{source}: window from {from}: {error}")));
        }
    }
    Ok(())
}

/// Makes the folder of `--plans`, before the search. Plans of an earlier call would look like
/// further windows.
fn make_folder(folder: &Path) -> Result<(), Failure> {
    let named = |error| Failure::usage(format!("{}: {error}", folder.display()));
    std::fs::create_dir_all(folder).map_err(named)?;
    match std::fs::read_dir(folder).map_err(named)?.next() {
        None => Ok(()),
        Some(_) => {
            let folder = folder.display();
            Err(Failure::usage(format!("--plans {folder} is not empty; name another folder")))
        }
    }
}

/// Writes a file for each window, as `--json` writes one for a plan alone. Returns their names.
fn write_plans(
    folder: &Path,
    problem: &Problem,
    traffic: &Traffic,
    windows: &[TrafficWindow],
    plans: &[WindowPlan],
) -> Result<Vec<String>, Failure> {
    let mut files = Vec::with_capacity(plans.len());
    for (number, (plan, window)) in plans.iter().zip(windows).enumerate() {
        let problem = traffic.problem_of(problem, window);
        let file = PlanFile::new(&problem, &plan.solution, &plan.steps);
        let name = format!("window-{number:04}.json");
        let text = serde_json::to_string_pretty(&file).map_err(Failure::failed)?;
        write_file(&folder.join(&name), &text)?;
        files.push(name);
    }
    Ok(files)
}

/// A moment as day and time of day.
fn clock_time(start_s: u64) -> String {
    let (day, time_s) = (start_s / DAY_S, start_s % DAY_S);
    let day = if day == 0 { String::new() } else { format!("+{day}d ") };
    format!("{day}{:02}:{:02}", time_s / 3600, time_s / 60 % 60)
}

/// The recorded traffic, and where it is from.
fn recorded(args: &PlanArgs) -> Result<(Traffic, String), Failure> {
    if let Some(server) = &args.prometheus {
        return Ok((prometheus::read(args, server)?, "the answer of --query".to_string()));
    }
    let path = needed(args.traffic.as_deref(), "--traffic")?;
    let source = path.display().to_string();
    let traffic = Traffic::from_csv(&read_input(path)?);
    let traffic = traffic.map_err(|error| Failure::usage(format!("{source}: {error}")))?;
    Ok((traffic, source))
}

/// Plans the windows of recorded traffic, one from the other, and prints a table.
pub(super) fn run_traffic(args: &PlanArgs, problem: &Problem) -> Result<(), Failure> {
    let (traffic, source) = recorded(args)?;
    let unknown = traffic.unknown(problem);
    if unknown.len() == traffic.services.len() {
        let names: Vec<&str> = problem.services.iter().map(|s| s.name.as_str()).collect();
        return Err(Failure::usage(format!(
            "{source} names {}, and none of these services is planned; there are {}",
            few(&unknown),
            few(&names)
        )));
    }
    if !unknown.is_empty() {
        tracing::warn!("{source} has services that are not planned: {}", few(&unknown));
    }
    check_window_flags(args)?;
    let rate = args.percentile.map_or(WindowRate::Peak, WindowRate::Percentile);
    let fold = !args.unfolded;
    let windows = traffic.windows(u64::from(args.window_s), fold, rate);
    let windows = windows.map_err(|error| Failure::usage(format!("{source}: {error}")))?;
    check_windows(problem, &traffic, &windows, &source)?;
    args.plans.as_deref().map(make_folder).transpose()?;
    let clock = MonotonicClock::new();
    let mut report = |_| true;
    let mut control = SearchControl::new(&clock, &mut report);
    let plans = plan_windows(problem, &traffic, &windows, fold, &mut control);
    let plans = plans.map_err(Failure::failed)?;
    for (plan, window) in plans.iter().zip(&windows) {
        let problem = traffic.problem_of(problem, window);
        if let Some(wrong) = check(&problem, &plan.solution.plan).first() {
            return Err(Failure::failed(format!("the checker rejects a window's plan: {wrong}")));
        }
    }
    let write = |folder| write_plans(folder, problem, &traffic, &windows, &plans);
    let files = args.plans.as_deref().map(write).transpose()?.unwrap_or_default();
    match args.json {
        true => print_json(&plans, &files),
        false => print_table(args, &plans),
    }
    Ok(())
}

fn print_json(plans: &[WindowPlan], files: &[String]) {
    let row = |(number, plan): (usize, &WindowPlan)| {
        serde_json::json!({
            "start_s": plan.start_s,
            "rate": plan.rate,
            "gpus": plan.gpus,
            "bound": plan.solution.bound,
            "created": plan.created,
            "destroyed": plan.destroyed,
            "moved": plan.moved,
            "file": files.get(number),
        })
    };
    let rows: Vec<_> = plans.iter().enumerate().map(row).collect();
    println!("{:#}", serde_json::json!({ "windows": rows }));
}

fn print_table(args: &PlanArgs, plans: &[WindowPlan]) {
    println!(
        "{:>10}{:>14}{:>7}{:>10}{:>9}{:>11}{:>7}",
        "from", "requests/s", "gpus", "bound", "created", "destroyed", "moved"
    );
    for plan in plans {
        let from = clock_time(plan.start_s);
        println!(
            "{from:>10}{:>14.1}{:>7}{:>10.2}{:>9}{:>11}{:>7}",
            plan.rate, plan.gpus, plan.solution.bound, plan.created, plan.destroyed, plan.moved
        );
    }
    let peak = plans.iter().map(|plan| plan.gpus).max().unwrap_or(0);
    let hours = |gpus: usize| gpus as f64 * f64::from(args.window_s) / 3600.0;
    let used: f64 = plans.iter().map(|plan| hours(plan.gpus)).sum();
    let fixed: f64 = plans.iter().map(|_| hours(peak)).sum();
    let created: usize = plans.iter().map(|plan| plan.created).sum();
    println!(
        "{used:.1} gpu hours of {fixed:.1} that {peak} gpus would take all the time; {created} \
         slices created"
    );
    if let Some(folder) = &args.plans {
        println!("{} plans in {}", plans.len(), folder.display());
    }
}
