//! `atoll plan --stock`: several kinds of GPUs with prices.

use std::path::Path;

use assembly::{Failure, read_file};
use base::MonotonicClock;
use planner::gpu_mix::{
    FailureDomain, Layout, MixKind, MixObjective, MixProblem, MixSolution, ServeFirst, check_mix,
    offers_from_toml, plan_mix,
};
use planner::verify::mix::MixFile;
use planner::{GpuKind, PlanError, SearchControl, render};

use super::inputs::{self, MixInputs};
use super::verification::unit;
use crate::args::PlanArgs;

/// Plans the services onto the kinds that a file offers.
pub(super) fn run(args: &PlanArgs, path: &Path) -> Result<(), Failure> {
    let problem = problem(args, path)?;
    let clock = MonotonicClock::new();
    let mut report = |_| true;
    let mut control = SearchControl::new(&clock, &mut report);
    let solution = plan_mix(&problem, &mut control).map_err(|error| match error {
        PlanError::BadLayout { .. } => Failure::usage(error),
        _ => Failure::failed(error),
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

fn problem(args: &PlanArgs, path: &Path) -> Result<MixProblem, Failure> {
    let MixInputs { list, table, rules, own } = inputs::read_mix(args)?;
    let find = |name: &str| -> Result<&'static GpuKind, PlanError> {
        let known = own.iter().copied().find(|kind| kind.name.eq_ignore_ascii_case(name));
        known.map_or_else(|| GpuKind::find(name), Ok)
    };
    let named = |error: PlanError| Failure::usage(format!("{}: {error}", path.display()));
    let offers = offers_from_toml(&read_file(path)?, find).map_err(named)?;
    let mut kinds = Vec::new();
    let path = inputs::needed(args.profiles.as_deref(), "--profiles")?;
    for (gpu, offers) in offers {
        let profiles = table
            .of_kind(gpu, args.foreign_profiles)
            .map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?;
        kinds.push(MixKind { gpu, profiles, offers });
    }
    Ok(MixProblem {
        services: list.services,
        terms: list.terms,
        rules,
        kinds,
        objective: match args.objective.as_str() {
            "gpus" => MixObjective::Gpus,
            "energy" => MixObjective::Energy,
            _ => MixObjective::Cost,
        },
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
    })
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
