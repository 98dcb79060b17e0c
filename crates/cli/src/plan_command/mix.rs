//! `atoll plan --stock`: several kinds of GPUs with prices.

use std::path::Path;

use assembly::Failure;
use base::MonotonicClock;
use planner::gpu_mix::{
    FailureDomain, Layout, MixKind, MixObjective, MixProblem, MixSolution, ServeFirst, check_mix,
    offers_from_toml, plan_mix,
};
use planner::service_file::ServiceLines;
use planner::verify::mix::MixFile;
use planner::{GpuKind, PlanError, SearchControl, render};

use super::inputs::{self, MixInputs, read_input};
use super::verification::unit;
use crate::args::PlanArgs;

/// Plans the services onto the kinds that a file offers.
pub(super) fn run(args: &PlanArgs, path: &Path) -> Result<(), Failure> {
    let problem = feasible(args, problem(args, path)?)?;
    let clock = MonotonicClock::new();
    let mut report = |_| true;
    let mut control = SearchControl::new(&clock, &mut report);
    let solution = plan_mix(&problem, &mut control).map_err(|error| match error {
        PlanError::NoStock => Failure::failed(error),
        _ => Failure::usage(error),
    })?;
    if let Some(wrong) = check_mix(&problem, &solution).first() {
        return Err(Failure::failed(format!("the checker rejects the plan: {wrong}")));
    }
    let singles = single_kinds(&problem, &mut control);
    if args.json {
        return print_json(&problem, &solution, &singles);
    }
    print_text(&problem, &solution, &singles);
    Ok(())
}

/// The problem without services that run on no kind, which `--keep-going` leaves out.
fn feasible(
    args: &PlanArgs,
    (problem, lines): (MixProblem, Vec<ServiceLines>),
) -> Result<MixProblem, Failure> {
    let faults = problem.faults();
    let nothing_left = faults.len() == problem.services.len();
    if nothing_left || (!faults.is_empty() && !args.keep_going) {
        return Err(inputs::infeasible(args, &lines, &faults, nothing_left));
    }
    faults.iter().for_each(|(_, fault)| tracing::warn!(%fault, "service skipped"));
    let left_out: Vec<usize> = faults.into_iter().map(|(service, _)| service).collect();
    Ok(if left_out.is_empty() { problem } else { problem.without(&left_out) })
}

fn objective(args: &PlanArgs) -> MixObjective {
    match args.objective.as_str() {
        "gpus" => MixObjective::Gpus,
        "energy" => MixObjective::Energy,
        _ => MixObjective::Cost,
    }
}

/// The problem, and the lines of its services.
fn problem(args: &PlanArgs, path: &Path) -> Result<(MixProblem, Vec<ServiceLines>), Failure> {
    let MixInputs { list, table, rules, own } = inputs::read_mix(args)?;
    if args.serve_first == "revenue" && list.terms.iter().all(|terms| terms.revenue == 0.0) {
        return Err(Failure::usage(
            "--serve-first revenue needs revenue in the file of services; no service has it",
        ));
    }
    let find = |name: &str| -> Result<&'static GpuKind, PlanError> {
        let known = own.iter().copied().find(|kind| kind.name.eq_ignore_ascii_case(name));
        known.map_or_else(|| GpuKind::find(name), Ok)
    };
    let named = |error: PlanError| Failure::usage(format!("{}: {error}", path.display()));
    let offers = offers_from_toml(&read_input(path)?, objective(args), find).map_err(named)?;
    let mut kinds = Vec::new();
    let path = inputs::needed(args.profiles.as_deref(), "--profiles")?;
    for (gpu, offers) in offers {
        let profiles = inputs::profiles_of(args, path, &table, gpu)?;
        kinds.push(MixKind { gpu, profiles, offers });
    }
    let problem = MixProblem {
        services: list.services,
        terms: list.terms,
        rules,
        kinds,
        objective: objective(args),
        gpus_max: args.max_gpus,
        serve_first: match args.serve_first.as_str() {
            "revenue" => ServeFirst::Revenue,
            _ => ServeFirst::Priority,
        },
        layout: Layout {
            machine_gpus: args.machine_gpus.map(|gpus| gpus as usize),
            rack_gpus: args.rack_gpus.map(|gpus| gpus as usize),
        },
        survive: match args.survive.as_deref() {
            Some("gpu") => Some(FailureDomain::Gpu),
            Some("machine") => Some(FailureDomain::Machine),
            Some("rack") => Some(FailureDomain::Rack),
            _ => None,
        },
    };
    Ok((problem, list.lines))
}

/// The total of each kind alone, where all services that are served fit on it.
fn single_kinds(
    problem: &MixProblem,
    control: &mut SearchControl<'_>,
) -> Vec<(&'static str, Option<f64>)> {
    if problem.kinds.len() < 2 {
        return Vec::new();
    }
    let mut totals = Vec::new();
    for kind in &problem.kinds {
        let alone = MixProblem { kinds: vec![kind.clone()], ..problem.clone() };
        let solution = plan_mix(&alone, control).ok();
        let total = solution.filter(|one| one.unserved.is_empty()).map(|one| one.total);
        totals.push((kind.gpu.name, total));
    }
    totals
}

fn print_text(
    problem: &MixProblem,
    solution: &MixSolution,
    singles: &[(&'static str, Option<f64>)],
) {
    for (kind, planned) in problem.kinds.iter().zip(&solution.kinds) {
        println!("{}: {} gpus, {} services", kind.gpu.name, planned.gpus, planned.services.len());
        print!("{}", render::picture(&planned.problem, &planned.plan, false));
    }
    for &service in &solution.unserved {
        println!("not served: {}", problem.services[service].name);
    }
    for (name, total) in singles {
        match total {
            Some(total) => println!("{name} alone: {total:.2} {}", unit(problem.objective)),
            None => println!("{name} alone: does not serve all"),
        }
    }
    println!(
        "{:.2} {} with {} gpus, at least {:.2} needed, {:.2} without spare capacity, {:.3} s",
        solution.total,
        unit(problem.objective),
        solution.gpus(),
        problem.bound_with_spare(solution),
        solution.bound,
        solution.seconds
    );
}

fn print_json(
    problem: &MixProblem,
    solution: &MixSolution,
    singles: &[(&'static str, Option<f64>)],
) -> Result<(), Failure> {
    let single = |(name, total): &(&str, Option<f64>)| (name.to_string(), *total);
    let file = MixFile {
        single_kinds: singles.iter().map(single).collect(),
        ..MixFile::new(problem, solution)
    };
    println!("{}", serde_json::to_string_pretty(&file).map_err(Failure::failed)?);
    Ok(())
}
