//! `atoll plan --sweep`, `--traffic` and `--prometheus`: plans for changed rates.

use assembly::{Failure, read_file, write_file};
use base::MonotonicClock;
use planner::sweep::{Sweep, SweepRow, sweep};
use planner::traffic::{DAY_S, Traffic, WindowPlan, WindowRate, plan_windows};
use planner::{Problem, SearchControl, check};

use super::inputs::needed;
use super::{few, prometheus};
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
        let rows: Vec<_> = rows.iter().map(row).collect();
        println!("{:#}", serde_json::json!({ "sweep": spec.name(), "rows": rows }));
        return Ok(());
    }
    print!("{}", planner::sweep::table(spec, &rows));
    Ok(())
}

/// The recorded traffic, and where it is from.
fn recorded(args: &PlanArgs) -> Result<(Traffic, String), Failure> {
    if let Some(server) = &args.prometheus {
        return Ok((prometheus::read(args, server)?, "the answer of --query".to_string()));
    }
    let path = needed(args.traffic.as_deref(), "--traffic")?;
    let source = path.display().to_string();
    let traffic = Traffic::from_csv(&read_file(path)?);
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
    let rate = args.percentile.map_or(WindowRate::Peak, WindowRate::Percentile);
    let fold = !args.unfolded;
    let windows = traffic.windows(u64::from(args.window_s), fold, rate);
    let windows = windows.map_err(|error| Failure::usage(format!("{source}: {error}")))?;
    let clock = MonotonicClock::new();
    let mut report = |_| true;
    let mut control = SearchControl::new(&clock, &mut report);
    let plans = plan_windows(problem, &traffic, &windows, fold, &mut control);
    let plans = plans.map_err(Failure::failed)?;
    for (plan, window) in plans.iter().zip(&windows) {
        let problem = traffic.problem_of(problem, window);
        if let Some(wrong) = check(&problem, &plan.plan).first() {
            return Err(Failure::failed(format!("the checker rejects a window's plan: {wrong}")));
        }
    }
    match args.json {
        true => print_json(&plans),
        false => print_table(args, &plans),
    }
    Ok(())
}

fn print_json(plans: &[WindowPlan]) {
    let row = |plan: &WindowPlan| {
        serde_json::json!({
            "start_s": plan.start_s,
            "rate": plan.rate,
            "gpus": plan.gpus,
            "bound": plan.bound,
            "created": plan.created,
            "destroyed": plan.destroyed,
            "moved": plan.moved,
        })
    };
    let rows: Vec<_> = plans.iter().map(row).collect();
    println!("{:#}", serde_json::json!({ "windows": rows }));
}

fn print_table(args: &PlanArgs, plans: &[WindowPlan]) {
    println!(
        "{:>10}{:>14}{:>7}{:>10}{:>9}{:>11}{:>7}",
        "from", "requests/s", "gpus", "bound", "created", "destroyed", "moved"
    );
    for plan in plans {
        let (day, time_s) = (plan.start_s / DAY_S, plan.start_s % DAY_S);
        let day = if day == 0 { String::new() } else { format!("+{day}d ") };
        let from = format!("{day}{:02}:{:02}", time_s / 3600, time_s / 60 % 60);
        println!(
            "{from:>10}{:>14.1}{:>7}{:>10.2}{:>9}{:>11}{:>7}",
            plan.rate, plan.gpus, plan.bound, plan.created, plan.destroyed, plan.moved
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
}
