//! Plans a services file with nothing but this crate: `plan SERVICES.toml PROFILES.csv GPU
//! [ALGORITHM]`.

use base::MonotonicClock;
use planner::{
    Algorithm, GpuKind, PlanRules, Problem, Profiles, SearchControl, Service, check, render, run,
};

#[derive(serde::Deserialize)]
struct ServicesFile {
    service: Vec<Service>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [services, profiles, gpu, rest @ ..] = args.as_slice() else {
        return Err("usage: plan SERVICES.toml PROFILES.csv GPU [ALGORITHM]".into());
    };
    let file: ServicesFile = toml::from_str(&std::fs::read_to_string(services)?)?;
    let problem = Problem {
        gpu: GpuKind::find(gpu)?,
        services: file.service,
        profiles: Profiles::from_csv(&std::fs::read_to_string(profiles)?)?,
        rules: PlanRules::default(),
    };
    let algorithm: Algorithm = rest.first().map_or("certified", String::as_str).parse()?;
    let clock = MonotonicClock::new();
    let mut report = |_| true;
    let output = run(&problem, algorithm, &mut SearchControl::new(&clock, &mut report))?;
    print!("{}", render::picture(&problem, &output.solution.plan, false));
    println!("{} gpus, bound {:.3}", output.gpus, output.solution.bound);
    check(&problem, &output.solution.plan).iter().for_each(|wrong| println!("rejected: {wrong}"));
    Ok(())
}
