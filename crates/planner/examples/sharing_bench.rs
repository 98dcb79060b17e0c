//! Plans with shared slices against their bound, for two kinds of random services: those of
//! `planner_bench`, and rates and SLOs spread evenly over their logarithms.
//!
//! `cargo run --release -p planner --example sharing_bench -- PROFILES.csv [COUNT[@SEED]...]`
//!
//! `SEED` is the first seed, 1 by default; counts up to 1,000 have three instances.

use base::{MonotonicClock, Random};
use planner::{
    Algorithm, GpuKind, PlanRules, Problem, Profiles, SearchControl, Service, Sharing, check, run,
    scenario,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let path = args.next().ok_or("usage: sharing_bench PROFILES.csv [COUNT[@SEED]...]")?;
    let profiles = Profiles::from_csv(&std::fs::read_to_string(path)?)?;
    let mut wanted: Vec<String> = args.collect();
    if wanted.is_empty() {
        wanted = ["100", "1000", "10000"].map(str::to_string).to_vec();
    }
    for one in wanted {
        let (count, first) = one.split_once('@').unwrap_or((&one, "1"));
        let (count, first): (usize, u64) = (count.parse()?, first.parse()?);
        for seed in first..first + if count <= 1000 { 3 } else { 1 } {
            row(
                "scenario",
                seed,
                &profiles,
                scenario::random_services(count, &mut Random::new(seed)),
            )?;
            row("logarithmic", seed, &profiles, logarithmic(&profiles, count, seed)?)?;
        }
    }
    Ok(())
}

fn row(
    name: &str,
    seed: u64,
    profiles: &Profiles,
    services: Vec<Service>,
) -> Result<(), Box<dyn std::error::Error>> {
    let gpu = GpuKind::find("a100-80gb")?;
    let rules = PlanRules { sharing: Sharing::Time, ..PlanRules::default() };
    let count = services.len();
    let problem = Problem { gpu, services, profiles: profiles.clone(), rules };
    let clock = MonotonicClock::new();
    let mut report = |_| true;
    let mut control = SearchControl::new(&clock, &mut report);
    let solution = run(&problem, Algorithm::Certified, &mut control)?.solution;
    let gpus = solution.plan.gpus.len();
    let legal = check(&problem, &solution.plan).is_empty();
    println!(
        "{count:>6} {name:<12} seed {seed}: {gpus} gpus, bound {:.3}, {} gpus or {:.2} % above, \
         {:.2} s{}",
        solution.bound,
        gpus - solution.lower_bound.min(gpus),
        (gpus as f64 / solution.bound - 1.0) * 100.0,
        solution.seconds,
        if legal { "" } else { "  REJECTED" }
    );
    Ok(())
}

/// Rates from 2 to 1,000 requests per second, SLOs from 40 ms over one and a half decades.
fn logarithmic(
    profiles: &Profiles,
    count: usize,
    seed: u64,
) -> Result<Vec<Service>, Box<dyn std::error::Error>> {
    let mut random = Random::new(seed);
    let models: Vec<String> = profiles.models().map(str::to_string).collect();
    let mut problem = Problem {
        gpu: GpuKind::find("a100-80gb")?,
        services: Vec::new(),
        profiles: profiles.clone(),
        rules: PlanRules::default(),
    };
    let mut services = Vec::new();
    while services.len() < count {
        let service = Service {
            name: format!("s{}", services.len()),
            model: models[random.below(models.len() as u64) as usize].clone(),
            rate: 2.0 * 500f64.powf(random.unit_f64()),
            slo_ms: 40.0 * 10f64.powf(1.5 * random.unit_f64()),
        };
        problem.services = vec![service];
        if problem.validate().is_ok() {
            services.append(&mut problem.services);
        }
    }
    Ok(services)
}
