//! The certified planner: published scenarios, random instances, brute force.

mod common;

use base::{MonotonicClock, Random};
use planner::certified::{self, Solution};
use planner::{
    Algorithm, GpuKind, OperatingPoint, PlanError, PlanRules, Problem, Profiles, SearchControl,
    Service, Sharing, check, run, scenario,
};

fn solve(problem: &Problem) -> Solution {
    let clock = MonotonicClock::new();
    let mut report = |_| true;
    certified::plan(problem, &mut SearchControl::new(&clock, &mut report)).unwrap()
}

/// Plans, checks and prints one row of the table.
fn gpus(name: &str, services: Vec<Service>, sharing: Sharing, headroom: f64) -> Option<usize> {
    let problem =
        common::problem(services, PlanRules { sharing, headroom, ..PlanRules::default() })?;
    let solution = solve(&problem);
    let violations = check(&problem, &solution.plan);
    assert!(violations.is_empty(), "{name}: {violations:?}");
    let gpus = solution.plan.gpus.len();
    assert!(gpus >= solution.lower_bound, "{name}");
    println!(
        "{name:<8} {sharing:?} {:>3.0} %: {gpus} gpus, bound {:.3}, {:.3} s",
        headroom * 100.0,
        solution.bound,
        solution.seconds
    );
    Some(gpus)
}

#[test]
fn whole_slices_reach_the_bound_of_every_scenario() {
    for (number, max) in (1..=6).zip([2, 3, 5, 7, 12, 15]) {
        let name = format!("S{number}");
        let Some(count) = gpus(&name, scenario::services(number), Sharing::None, 0.0) else {
            return;
        };
        assert!(count <= max, "{name}: {count}");
        gpus(&name, scenario::services(number), Sharing::None, 0.15);
    }
    let count = gpus("S5 x 10", scenario::services_times(5, 10), Sharing::None, 0.0).unwrap();
    assert!(count <= 118, "{count}");
    gpus("S5 x 10", scenario::services_times(5, 10), Sharing::None, 0.15);
}

#[test]
fn duty_cycles_save_gpus() {
    for (number, max) in (1..=6).zip([1, 2, 4, 6, 12, 15]) {
        let name = format!("S{number}");
        let Some(count) = gpus(&name, scenario::services(number), Sharing::Time, 0.0) else {
            return;
        };
        assert!(count <= max, "{name}: {count}");
        gpus(&name, scenario::services(number), Sharing::Time, 0.15);
    }
    let count = gpus("S5 x 10", scenario::services_times(5, 10), Sharing::Time, 0.0).unwrap();
    assert!(count <= 115, "{count}");
    gpus("S5 x 10", scenario::services_times(5, 10), Sharing::Time, 0.15);
}

#[test]
fn mig_plans_of_every_algorithm_pass_the_checker() {
    for number in 1..=6 {
        for (name, algorithm) in planner::algorithm::ALGORITHMS {
            let sharing = match algorithm {
                Algorithm::Squishy => Sharing::Time,
                _ => Sharing::None,
            };
            let rules = PlanRules { sharing, ..PlanRules::default() };
            let Some(problem) = common::problem(scenario::services(number), rules) else { return };
            let clock = MonotonicClock::new();
            let mut report = |_| true;
            let output =
                match run(&problem, algorithm, &mut SearchControl::new(&clock, &mut report)) {
                    Ok(output) => output,
                    Err(PlanError::Unsupported { what, .. }) => {
                        println!("S{number} {name}: {what}");
                        continue;
                    }
                    Err(error) => panic!("S{number} {name}: {error}"),
                };
            let bound = output.solution.lower_bound;
            println!("S{number} {name}: {} gpus, bound {bound}", output.gpus);
            let counts_only = matches!(algorithm, Algorithm::GpuletLike | Algorithm::IgniterLike);
            let violations = check(&problem, &output.solution.plan);
            assert!(counts_only || violations.is_empty(), "S{number} {name}: {violations:?}");
            assert!(counts_only || output.gpus >= bound);
        }
    }
}

fn random_profiles(random: &mut Random) -> Profiles {
    let mut profiles = Profiles::default();
    for model in 0..3 {
        let base = 20.0 + 80.0 * random.unit_f64();
        let bend = 0.7 + 0.5 * random.unit_f64();
        for gpcs in [1u8, 2, 3, 4, 7] {
            for batch in [1u32, 4, 16] {
                for processes in 1..=2u32 {
                    if random.below(6) == 0 && gpcs < 7 {
                        continue;
                    }
                    let gain = f64::from(batch * processes).powf(0.2 + 0.2 * random.unit_f64());
                    let throughput = base * f64::from(gpcs).powf(bend) * gain;
                    let latency_ms = f64::from(batch * processes) / throughput * 1000.0;
                    let point = OperatingPoint {
                        gpcs,
                        batch,
                        processes,
                        throughput,
                        latency_ms,
                        memory_mib: None,
                    };
                    profiles.push(&format!("m{model}"), point).unwrap();
                }
            }
        }
    }
    profiles
}

fn random_problem(seed: u64, services: u64, rate: f64) -> Problem {
    let mut random = Random::new(seed);
    let profiles = random_profiles(&mut random);
    let count = 1 + random.below(services);
    let service = |index: u64| Service {
        name: format!("s{index}"),
        model: format!("m{}", random.below(3)),
        rate: 5.0 + rate * random.unit_f64(),
        slo_ms: 40.0 + 400.0 * random.unit_f64(),
    };
    let services = (0..count).map(service).collect();
    let gpus = planner::gpu::GPU_KINDS;
    let gpu = &gpus[if seed.is_multiple_of(5) { 0 } else { 2 }];
    Problem { gpu, services, profiles, rules: PlanRules::default() }
}

/// Fewest GPUs by trying every minimal cover of every service and every placement; nothing above
/// `max`.
fn brute_force(problem: &Problem, max: usize) -> Option<usize> {
    let kinds = problem.gpu.slices.len();
    let mut choices: Vec<Vec<Vec<usize>>> = Vec::new();
    for service in &problem.services {
        let points = problem.profiles.points(&service.model).unwrap();
        let best: Vec<f64> = (0..kinds)
            .map(|kind| {
                let fits = points.iter().filter(|p| problem.fits_alone(service, kind, p));
                fits.map(|p| p.throughput).fold(0.0, f64::max)
            })
            .collect();
        let mut covers = Vec::new();
        grow(&best, service.rate, 0, &mut Vec::new(), &mut covers, max * 7);
        choices.push(covers);
    }
    (1..=max).find(|&gpus| choose(problem, &choices, &mut Vec::new(), gpus))
}

fn grow(
    best: &[f64],
    remaining: f64,
    from: usize,
    cover: &mut Vec<usize>,
    covers: &mut Vec<Vec<usize>>,
    max: usize,
) {
    if remaining <= 1e-9 {
        covers.push(cover.clone());
        return;
    }
    if cover.len() == max {
        return;
    }
    for kind in (from..best.len()).filter(|&kind| best[kind] > 0.0) {
        cover.push(kind);
        grow(best, remaining - best[kind], kind, cover, covers, max);
        cover.pop();
    }
}

fn choose(
    problem: &Problem,
    choices: &[Vec<Vec<usize>>],
    slices: &mut Vec<usize>,
    gpus: usize,
) -> bool {
    let gpcs: usize = slices.iter().map(|&k| usize::from(problem.gpu.slices[k].gpcs)).sum();
    if gpcs > gpus * usize::from(problem.gpu.gpcs) {
        return false;
    }
    let Some((first, rest)) = choices.split_first() else {
        let mut order = slices.clone();
        order.sort_by_key(|&kind| std::cmp::Reverse(problem.gpu.slices[kind].memory_slices));
        return place(problem, &order, &mut vec![0u16; gpus]);
    };
    for cover in first {
        let length = slices.len();
        slices.extend(cover);
        if choose(problem, rest, slices, gpus) {
            return true;
        }
        slices.truncate(length);
    }
    false
}

fn place(problem: &Problem, slices: &[usize], gpus: &mut Vec<u16>) -> bool {
    let Some((&kind, rest)) = slices.split_first() else { return true };
    let facts = &problem.gpu.slices[kind];
    for gpu in 0..gpus.len() {
        if gpu > 0 && gpus[gpu] == gpus[gpu - 1] {
            continue;
        }
        for &start in facts.starts {
            let mask = facts.mask(start);
            if gpus[gpu] & mask == 0 {
                gpus[gpu] |= mask;
                if place(problem, rest, gpus) {
                    return true;
                }
                gpus[gpu] &= !mask;
            }
        }
    }
    false
}

#[test]
fn ten_thousand_random_instances_pass_the_checker() {
    let (mut optimal, mut planned) = (0, 0);
    for seed in 0..10_000 {
        let problem = random_problem(seed, 12, 600.0);
        let Ok((problem, _)) = problem.without_faults() else { continue };
        let solution = solve(&problem);
        let violations = check(&problem, &solution.plan);
        assert!(violations.is_empty(), "seed {seed}: {violations:?}");
        let gap = solution.gap();
        assert!(gap <= 1, "seed {seed}: {} over {}", solution.plan.gpus.len(), solution.bound);
        planned += 1;
        optimal += usize::from(gap == 0);
    }
    println!("{planned} planned, {optimal} proven optimal");
}

#[test]
fn small_instances_equal_brute_force() {
    let mut compared = 0;
    for seed in 0..3000 {
        let problem = random_problem(seed, 3, 250.0);
        let Ok((problem, _)) = problem.without_faults() else { continue };
        let solution = solve(&problem);
        let found = solution.plan.gpus.len();
        if found > 2 {
            continue;
        }
        assert_eq!(brute_force(&problem, 2), Some(found), "seed {seed}, {}", solution.bound);
        compared += 1;
    }
    println!("{compared} compared");
    assert!(compared > 1000);
}

#[test]
fn random_instances_with_shared_slices_pass_the_checker_and_can_be_stopped() {
    for seed in 0..300 {
        let mut problem = random_problem(seed, 8, 300.0);
        problem.rules.sharing = Sharing::Time;
        problem.rules.headroom = 0.15;
        let Ok((problem, _)) = problem.without_faults() else { continue };
        let clock = MonotonicClock::new();
        let mut calls = 0;
        let mut report = |_| {
            calls += 1;
            calls < 30
        };
        let mut control = SearchControl::new(&clock, &mut report);
        let solution = certified::plan(&problem, &mut control).unwrap();
        let violations = check(&problem, &solution.plan);
        assert!(violations.is_empty(), "seed {seed}: {violations:?}");
        let alone = PlanRules { sharing: Sharing::None, ..problem.rules.clone() };
        let alone = solve(&Problem { rules: alone, ..problem.clone() });
        assert!(solution.plan.gpus.len() <= alone.plan.gpus.len(), "seed {seed}");
        assert!(solution.lower_bound <= solution.plan.gpus.len(), "seed {seed}");
    }
}

#[test]
fn invalid_services_are_reported_and_the_others_planned() {
    let mut problem = random_problem(1, 1, 100.0);
    let base = problem.services[0].clone();
    let service = |name: &str, rate: f64, slo_ms: f64, model: &str| Service {
        name: name.to_string(),
        model: model.to_string(),
        rate,
        slo_ms,
    };
    problem.services.push(service("zero", 0.0, 100.0, "m0"));
    problem.services.push(service("huge", 1e12, 100.0, "m0"));
    problem.services.push(service("nan", f64::NAN, 100.0, "m0"));
    problem.services.push(service("tight", 10.0, 0.01, "m0"));
    problem.services.push(service("unknown", 10.0, 100.0, "nothing"));
    problem.services.push(base);
    let (rest, errors) = problem.without_faults().unwrap();
    assert_eq!((rest.services.len(), errors.len()), (1, 6));
    let tight = errors.iter().find_map(|error| match error {
        PlanError::Infeasible { nearest_ms, .. } => Some(*nearest_ms),
        _ => None,
    });
    let mut again = rest.clone();
    again.services.push(service("tight", 10.0, tight.unwrap(), "m0"));
    assert!(again.validate().is_ok());
    assert!(check(&rest, &solve(&rest).plan).is_empty());
}

#[test]
fn absurd_but_legal_rates_are_planned_quickly() {
    let mut problem = random_problem(2, 1, 100.0);
    problem.gpu = GpuKind::find("a100-80gb").unwrap();
    problem.services[0].rate = 2e6;
    let solution = solve(&problem);
    assert!(check(&problem, &solution.plan).is_empty());
    assert!(solution.plan.gpus.len() as f64 <= solution.bound * 1.001 + 1.0);
    problem.rules.sharing = Sharing::Time;
    let shared = solve(&problem);
    assert!(check(&problem, &shared.plan).is_empty());
    assert!(shared.plan.gpus.len() <= solution.plan.gpus.len());
    assert!(shared.plan.gpus.len() as f64 <= shared.bound * 1.01 + 1.0);
}
