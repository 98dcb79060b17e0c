//! Verification of plan files: accepts what the planner writes, and nothing that was changed.

use base::{MonotonicClock, Random};
use planner::certified::{self, Solution};
use planner::plan::GpuFile;
use planner::verify::{Certificate, Claims, MemoryPriceFile, Verified, verify};
use planner::{
    GpuKind, OperatingPoint, PlanRules, Problem, Profiles, SearchControl, Service, Sharing,
};

/// A file as the planner writes it.
struct File {
    gpu_kind: String,
    gpus: usize,
    lower_bound: usize,
    bound: f64,
    plan: Vec<GpuFile>,
    certificate: Certificate,
}

impl File {
    fn verify(&self) -> Result<Verified, Vec<String>> {
        let File { gpu_kind, gpus, lower_bound, bound, plan, certificate } = self;
        let (gpus, lower_bound, bound) = (*gpus, *lower_bound, *bound);
        let claims = Claims { gpu_kind, gpus, lower_bound, bound, plan };
        verify(&claims, certificate)
    }
}

fn problem(seed: u64, sharing: Sharing) -> Option<Problem> {
    let mut random = Random::new(seed);
    let mut profiles = Profiles::default();
    for model in 0..3 {
        let base = 20.0 + 80.0 * random.unit_f64();
        for gpcs in [1u8, 2, 3, 4, 7] {
            for batch in [1u32, 2, 4, 8, 16] {
                for processes in 1..=2 {
                    let gain = f64::from(batch * processes).powf(0.4);
                    let throughput = base * f64::from(gpcs).powf(0.9) * gain;
                    // Rounded to a tenth, as in tables.
                    let latency = f64::from(batch * processes) / throughput * 1000.0;
                    let latency_ms = ((latency * 10.0).floor() / 10.0).max(0.1);
                    let point = OperatingPoint {
                        gpcs,
                        batch,
                        processes,
                        throughput,
                        latency_ms,
                        memory_mib: Some(u64::from(processes) * 1500),
                    };
                    profiles.push(&format!("m{model}"), point).unwrap();
                }
            }
        }
    }
    let service = |index: u64| Service {
        name: format!("s{index}"),
        model: format!("m{}", random.below(3)),
        rate: 2.0 * 300f64.powf(random.unit_f64()),
        slo_ms: 40.0 + 400.0 * random.unit_f64(),
    };
    let services = (0..10).map(service).collect();
    let rules = PlanRules { sharing, headroom: 0.1, ..PlanRules::default() };
    let gpu = GpuKind::find("a100-80gb").unwrap();
    let (problem, _) = Problem { gpu, services, profiles, rules }.without_faults().ok()?;
    Some(problem)
}

fn file(problem: &Problem) -> (File, Solution) {
    let clock = MonotonicClock::new();
    let mut report = |_| true;
    let solution = certified::plan(problem, &mut SearchControl::new(&clock, &mut report)).unwrap();
    let file = File {
        gpu_kind: problem.gpu.name.to_string(),
        gpus: solution.plan.gpus.len(),
        lower_bound: solution.lower_bound,
        bound: solution.bound,
        plan: solution.plan.to_file(problem),
        certificate: Certificate::new(problem, &solution),
    };
    (file, solution)
}

#[test]
fn plans_of_the_planner_are_verified_with_their_bound() {
    for sharing in [Sharing::None, Sharing::Time] {
        for seed in 0..40 {
            let Some(problem) = problem(seed, sharing) else { continue };
            let (file, solution) = file(&problem);
            let verified = file.verify().unwrap_or_else(|wrong| panic!("seed {seed}: {wrong:?}"));
            assert!(verified.lower_bound >= solution.lower_bound, "seed {seed}, {sharing:?}");
            // The planner leaves out what could save less than a ten-thousandth.
            let most = if sharing == Sharing::None { 1e-5 } else { 1e-3 };
            let off = verified.bound / solution.bound - 1.0;
            assert!((-1e-5..=most).contains(&off), "seed {seed}, {sharing:?}: {off}");
        }
    }
}

/// A change, and what the message about it contains.
type Change = (&'static str, fn(&mut File), &'static str);

const CHANGES: [Change; 15] = [
    ("more is asked for", |file| file.certificate.services[0].rate *= 1.001, "requests/s"),
    ("the slo is shorter", |file| file.certificate.services[0].slo_ms *= 0.2, ""),
    ("a point is slower", slower, ""),
    ("a higher bound", |file| file.lower_bound += 1, "prove"),
    ("a higher bound before rounding", |file| file.bound *= 1.001, "the file says"),
    ("fewer gpus", |file| file.gpus -= 1, "gpus"),
    (
        "cheaper slices",
        |file| file.certificate.prices.iter_mut().for_each(|p| p.time *= 0.5),
        "prove",
    ),
    ("no prices", |file| file.certificate.prices.clear(), "prove"),
    ("a negative price", |file| file.certificate.prices[0].time = -1.0, "price"),
    ("cycles of prices that fall", falling_cycles, "do not rise"),
    ("cycles of one price alone", one_more_cycle, "cycles of their own"),
    ("a service is not there", |file| first(file).name = "nobody".to_string(), "nobody"),
    ("a batch nobody measured", |file| first(file).batch = 3, "measured"),
    ("a slice that overlaps", overlap, "overlaps"),
    ("more headroom", |file| file.certificate.rules.headroom = 0.5, "requests/s"),
];

fn first(file: &mut File) -> &mut planner::plan::ShareFile {
    &mut file.plan[0].slices[0].services[0]
}

fn slower(file: &mut File) {
    let (name, batch, processes) = {
        let share = first(file);
        (share.name.clone(), share.batch, share.processes)
    };
    let size = file.plan[0].slices[0].size;
    let services = &file.certificate.services;
    let model = services.iter().find(|service| service.name == name).unwrap().model.clone();
    let mut profiles = Profiles::default();
    for known in file.certificate.profiles.models() {
        for point in file.certificate.profiles.points(known).unwrap() {
            let mut point = point.clone();
            if known == model
                && (point.gpcs, point.batch, point.processes) == (size, batch, processes)
            {
                point.latency_ms *= 100.0;
            }
            profiles.push(known, point).unwrap();
        }
    }
    file.certificate.profiles = profiles;
}

fn falling_cycles(file: &mut File) {
    let from = |cycle_ms| MemoryPriceFile { cycle_ms, memory: 0.0 };
    let prices = &mut file.certificate.prices;
    prices.iter_mut().for_each(|price| price.memory_from = vec![from(9.0), from(8.0)]);
}

fn one_more_cycle(file: &mut File) {
    let more = MemoryPriceFile { cycle_ms: 1e9, memory: 0.0 };
    file.certificate.prices[1].memory_from.push(more);
}

fn overlap(file: &mut File) {
    let copy = file.plan[0].slices[0].clone();
    file.plan[0].slices.push(copy);
}

#[test]
fn no_changed_file_is_verified() {
    for sharing in [Sharing::None, Sharing::Time] {
        for seed in 0..8 {
            let Some(problem) = problem(seed, sharing) else { continue };
            for (name, change, message) in CHANGES {
                let (mut file, _) = file(&problem);
                // A bound of one GPU needs no prices, and one GPU has no fewer.
                if file.lower_bound < 2 {
                    continue;
                }
                change(&mut file);
                let wrong = file.verify().expect_err(name).join("; ");
                assert!(wrong.contains(message), "{name}, seed {seed}, {sharing:?}: {wrong}");
            }
        }
    }
}
