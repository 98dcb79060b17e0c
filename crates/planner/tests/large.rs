//! Plans of large services without sharing, against optima that are known.

mod common;

use base::{MonotonicClock, Random};
use planner::certified::{self, Solution};
use planner::gpu::GPU_KINDS;
use planner::{
    Algorithm, GpuKind, OperatingPoint, PlanRules, Problem, Profiles, SearchControl, Service,
    check, run,
};

fn solve(problem: &Problem) -> Solution {
    let clock = MonotonicClock::new();
    let mut report = |_| true;
    let solution = certified::plan(problem, &mut SearchControl::new(&clock, &mut report)).unwrap();
    let violations = check(problem, &solution.plan);
    assert!(violations.is_empty(), "{violations:?}");
    solution
}

fn random_profiles(random: &mut Random) -> Profiles {
    let mut profiles = Profiles::default();
    for model in 0..3 {
        let base = 20.0 + 80.0 * random.unit_f64();
        let bend = 0.7 + 0.5 * random.unit_f64();
        for gpcs in [1u8, 2, 3, 4, 7] {
            for batch in [1u32, 4, 16] {
                if random.below(6) == 0 && gpcs < 7 {
                    continue;
                }
                let gain = f64::from(batch).powf(0.2 + 0.2 * random.unit_f64());
                let throughput = base * f64::from(gpcs).powf(bend) * gain;
                let latency_ms = f64::from(batch) / throughput * 1000.0;
                let (processes, memory_mib) = (1, None);
                let point =
                    OperatingPoint { gpcs, batch, processes, throughput, latency_ms, memory_mib };
                profiles.push(&format!("m{model}"), point).unwrap();
            }
        }
    }
    profiles
}

/// Requests per second of the best GPU for one service: with a single service every GPU runs it, so
/// the optimum is the rate over this.
fn best_gpu(problem: &Problem, service: &Service) -> f64 {
    let points = problem.profiles.points(&service.model).unwrap();
    let best = |kind: usize| {
        let fits = points.iter().filter(|point| problem.fits_alone(service, kind, point));
        fits.map(|point| point.throughput).fold(0.0, f64::max)
    };
    let best: Vec<f64> = (0..problem.gpu.slices.len()).map(best).collect();
    let of = |pattern: &[u32; planner::gpu::KINDS_MAX]| -> f64 {
        pattern.iter().zip(&best).map(|(&count, rate)| f64::from(count) * rate).sum()
    };
    problem.gpu.maximal_patterns().iter().map(of).fold(0.0, f64::max)
}

fn large(profiles: &Profiles, gpu: &'static GpuKind, random: &mut Random) -> Option<Problem> {
    let models: Vec<&str> = profiles.models().collect();
    let model = models[random.below(models.len() as u64) as usize].to_string();
    let slo_ms = 20.0 * 30f64.powf(random.unit_f64());
    let service = Service { name: "large".to_string(), model, rate: 1.0, slo_ms };
    let mut problem = Problem {
        gpu,
        services: vec![service.clone()],
        profiles: profiles.clone(),
        rules: PlanRules::default(),
    };
    problem.validate().ok()?;
    let gpus = 120f64.powf(random.unit_f64());
    problem.services[0].rate = (best_gpu(&problem, &service) * gpus).max(1.0);
    Some(problem)
}

#[test]
fn a_single_service_of_any_size_is_planned_optimally() {
    let mut random = Random::new(42);
    let measured = common::profiles();
    let mut compared = 0;
    for _ in 0..400 {
        let made = random_profiles(&mut random);
        let gpu = &GPU_KINDS[random.below(GPU_KINDS.len() as u64) as usize];
        let a100 = GpuKind::find("a100-80gb").unwrap();
        let (profiles, gpu) = match &measured {
            Some(measured) if random.below(2) == 0 => (measured, a100),
            _ => (&made, gpu),
        };
        let Some(problem) = large(profiles, gpu, &mut random) else { continue };
        let service = &problem.services[0];
        let optimum = (service.rate / best_gpu(&problem, service) * (1.0 - 1e-9)).ceil() as usize;
        let solution = solve(&problem);
        assert_eq!(solution.plan.gpus.len(), optimum.max(1), "{service:?} on {}", gpu.name);
        compared += 1;
    }
    assert!(compared > 200, "{compared}");
}

#[test]
fn a_large_service_beside_small_ones_never_takes_more_than_a_baseline() {
    let mut random = Random::new(7);
    let Some(measured) = common::profiles() else { return };
    let gpu = GpuKind::find("a100-80gb").unwrap();
    let (mut planned, mut bound) = (0, 0);
    for round in 0..60 {
        let Some(mut problem) = large(&measured, gpu, &mut random) else { continue };
        for index in 0..3 + random.below(28) {
            if let Some(mut small) = large(&measured, gpu, &mut random) {
                let service = &mut small.services[0];
                service.name = format!("small-{index}");
                service.rate = (best_gpu(&problem, service) * 0.4 * random.unit_f64()).max(1.0);
                problem.services.append(&mut small.services);
            }
        }
        let solution = solve(&problem);
        let gpus = solution.plan.gpus.len();
        assert!(solution.gap() <= 1, "round {round}: {gpus} gpus, bound {}", solution.bound);
        planned += gpus;
        bound += solution.lower_bound;
        for (name, algorithm) in planner::algorithm::ALGORITHMS {
            let plans = matches!(algorithm, Algorithm::ParvaGpu(_) | Algorithm::MigServingLike);
            let clock = MonotonicClock::new();
            let mut report = |_| true;
            let mut control = SearchControl::new(&clock, &mut report);
            if plans && let Ok(other) = run(&problem, algorithm, &mut control) {
                let legal = check(&problem, &other.solution.plan).is_empty();
                assert!(!legal || gpus <= other.gpus, "round {round}: {name} {}", other.gpus);
            }
        }
    }
    println!("{planned} gpus planned, at least {bound} needed");
}

#[test]
fn latencies_that_were_rounded_down_do_not_make_a_plan() {
    // Twice 2.0 ms is within 4.45 ms, but the throughput says 2.48 ms a batch.
    let profiles = Profiles::from_csv(
        "model,mig_gpcs,batch,procs,throughput_total_rps,latency_ms\n\
         a,1,1,1,403,2.0\n\
         a,7,1,1,1000,1.0\n",
    )
    .unwrap();
    let service =
        Service { name: "a".to_string(), model: "a".to_string(), rate: 300.0, slo_ms: 4.45 / 0.9 };
    let gpu = GpuKind::find("a100-80gb").unwrap();
    let problem = Problem { gpu, services: vec![service], profiles, rules: PlanRules::default() };
    let solution = solve(&problem);
    // The small slice would be too slow.
    assert_eq!(problem.gpu.slices[solution.plan.gpus[0].slices[0].kind].gpcs, 7);
    let mut plan = solution.plan.clone();
    plan.gpus[0].slices[0].kind = 0;
    let violations = check(&problem, &plan);
    assert!(violations.iter().any(|v| v.what.contains("misses its slo")), "{violations:?}");
}
