//! Plans random instances without sharing and prints each, with its plan, as one line of JSON for
//! `scripts/planner_oracle.py`, which compares the plans with an exact solver.
//!
//! `cargo run --release -p planner --example planner_instances -- COUNT [PROFILES.csv [SEED]]`

use std::fmt::Write;

use base::{MonotonicClock, Random};
use planner::gpu::GPU_KINDS;
use planner::{
    Algorithm, GpuKind, OperatingPoint, PlanRules, Problem, Profiles, SearchControl, Service,
    algorithm, check, run,
};

/// Most GPUs of an instance.
const GPUS_MAX: f64 = 60.0;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let usage = "usage: planner_instances COUNT [PROFILES.csv [SEED]]";
    let count: u64 = args.next().ok_or(usage)?.parse()?;
    let measured = match args.next().filter(|path| !path.is_empty()) {
        Some(path) => Some(Profiles::from_csv(&std::fs::read_to_string(path)?)?),
        None => None,
    };
    let first: u64 = args.next().map_or(Ok(1), |seed| seed.parse())?;
    for seed in first..first + count {
        println!("{}", line(seed, measured.as_ref())?);
    }
    Ok(())
}

/// The four shapes of instances, in turn.
const SHAPES: [&str; 4] = ["one large", "one large beside small", "few", "many small"];

fn line(seed: u64, measured: Option<&Profiles>) -> Result<String, Box<dyn std::error::Error>> {
    let shape = (seed % 4) as usize;
    let problem = instance(seed, shape, measured)?;
    let clock = MonotonicClock::new();
    let mut report = |_| true;
    let mut plans = String::new();
    let mut text = format!("{{\"seed\":{seed},\"shape\":\"{}\"", SHAPES[shape]);
    for (name, algorithm) in algorithm::ALGORITHMS {
        if algorithm == Algorithm::Squishy {
            continue;
        }
        let mut control = SearchControl::new(&clock, &mut report);
        let Ok(output) = run(&problem, algorithm, &mut control) else { continue };
        let counts_only = matches!(algorithm, Algorithm::GpuletLike | Algorithm::IgniterLike);
        let legal = counts_only || check(&problem, &output.solution.plan).is_empty();
        if algorithm == Algorithm::Certified {
            let (bound, seconds) = (output.solution.bound, output.solution.seconds);
            let lower = output.solution.lower_bound;
            let gpus = output.gpus;
            write!(
                text,
                ",\"gpus\":{gpus},\"bound\":{bound},\"lower_bound\":{lower},\"legal\":{legal},\
                 \"seconds\":{seconds}"
            )?;
        } else if legal {
            write!(plans, "{}\"{name}\":{}", if plans.is_empty() { "" } else { "," }, output.gpus)?;
        }
    }
    let slices: Vec<String> = problem
        .gpu
        .slices
        .iter()
        .map(|s| format!("[{},{},{:?}]", s.gpcs, s.memory_slices, s.starts))
        .collect();
    let rates: Vec<f64> = problem.services.iter().map(|service| service.rate).collect();
    let throughput: Vec<Vec<f64>> = problem.services.iter().map(|s| best(&problem, s)).collect();
    write!(
        text,
        ",\"baselines\":{{{plans}}},\"gpcs\":{},\"memory_slices\":{},\"slices\":[{}],\
         \"rates\":{rates:?},\"throughput\":{throughput:?}}}",
        problem.gpu.gpcs,
        problem.gpu.memory_slices,
        slices.join(",")
    )?;
    Ok(text)
}

/// Requests per second of a slice of each kind.
fn best(problem: &Problem, service: &Service) -> Vec<f64> {
    let points = problem.profiles.points(&service.model).unwrap_or_default();
    let of = |kind: usize| {
        let usable = points.iter().filter(|point| problem.fits_alone(service, kind, point));
        usable.map(|point| point.throughput).fold(0.0, f64::max)
    };
    (0..problem.gpu.slices.len()).map(of).collect()
}

fn instance(
    seed: u64,
    shape: usize,
    measured: Option<&Profiles>,
) -> Result<Problem, Box<dyn std::error::Error>> {
    let mut random = Random::new(seed);
    let (gpu, profiles) = match measured {
        Some(profiles) if seed % 8 < 4 => (GpuKind::find("a100-80gb")?, profiles.clone()),
        _ => {
            let gpu = &GPU_KINDS[random.below(GPU_KINDS.len() as u64) as usize];
            (gpu, random_profiles(gpu, &mut random)?)
        }
    };
    let models: Vec<String> = profiles.models().map(str::to_string).collect();
    let count = match shape {
        0 => 1,
        1 => 4 + random.below(28),
        2 => 2 + random.below(7),
        _ => 10 + random.below(51),
    };
    let mut problem = Problem { gpu, services: Vec::new(), profiles, rules: PlanRules::default() };
    let gpus = GPUS_MAX.powf(random.unit_f64());
    for index in 0..count {
        // The share of all GPUs that a service gets, about.
        let share = match (shape, index) {
            (0, _) => gpus,
            (1, 0) => gpus * 0.8,
            (1, _) => 0.05 + 0.3 * random.unit_f64(),
            _ => gpus / count as f64 * 2.0 * random.unit_f64(),
        };
        loop {
            let mut service = Service {
                name: format!("s{index}"),
                model: models[random.below(models.len() as u64) as usize].clone(),
                rate: 1.0,
                slo_ms: 10.0 * 100f64.powf(random.unit_f64()),
            };
            // Per GPU: the whole GPU as one slice, or as many slices of the smallest kinds.
            let throughput = best(&problem, &service);
            let of =
                |(kind, rate): (usize, &f64)| rate * f64::from(gpu.gpcs / gpu.slices[kind].gpcs);
            let whole = throughput.iter().enumerate().map(of).fold(0.0, f64::max);
            if whole > 0.0 {
                service.rate = (whole * share).max(1.0);
                problem.services.push(service);
                break;
            }
        }
    }
    Ok(problem)
}

fn random_profiles(gpu: &GpuKind, random: &mut Random) -> Result<Profiles, String> {
    let mut profiles = Profiles::default();
    let mut sizes: Vec<u8> = gpu.slices.iter().map(|slice| slice.gpcs).collect();
    sizes.dedup();
    for model in 0..3 {
        let base = 20.0 + 80.0 * random.unit_f64();
        let bend = 0.7 + 0.5 * random.unit_f64();
        for &gpcs in &sizes {
            for batch in [1u32, 4, 16] {
                for processes in 1..=2u32 {
                    if random.below(6) == 0 && gpcs < gpu.gpcs {
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
                    profiles.push(&format!("m{model}"), point)?;
                }
            }
        }
    }
    Ok(profiles)
}
