//! Plans many services onto three kinds of GPUs with prices and compares with each kind alone:
//! `gpu_mix PROFILES.csv [SERVICES] [MACHINE_GPUS] [PLAN.json]`. The profiles are those of an A100;
//! H100 and A30 get the same points at another speed, so the figures show the method, not the GPUs.

use base::{Clock, MonotonicClock, Random};
use planner::gpu_mix::{
    FailureDomain, GpuOffer, Layout, MixKind, MixObjective, MixProblem, ServeFirst, check_mix,
    plan_mix,
};
use planner::verify::mix::MixFile;
use planner::{
    GpuKind, OperatingPoint, PlanRules, Profiles, SearchControl, Service, ServiceTerms, scenario,
};

/// Name, speed of a compute slice against an A100's, price for an hour.
const KINDS: [(&str, f64, f64); 3] =
    [("a30-24gb", 0.9, 0.9), ("a100-80gb", 1.0, 1.8), ("h100-80gb", 1.9, 3.2)];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let usage = "usage: gpu_mix PROFILES.csv [SERVICES] [MACHINE_GPUS] [PLAN.json]";
    let profiles = args.first().ok_or(usage)?;
    let measured = Profiles::from_csv(&std::fs::read_to_string(profiles)?)?;
    let count: usize = args.get(1).map_or(Ok(500), |text| text.parse())?;
    let machine_gpus: usize = args.get(2).map_or(Ok(1), |text| text.parse())?;
    let mut random = Random::new(5);
    let base = scenario::services(2);
    let service = |index: usize| {
        let like = &base[index % base.len()];
        Service {
            name: format!("{}-{index}", like.name),
            rate: like.rate * (0.1 + 2.0 * random.unit_f64() * random.unit_f64()),
            ..like.clone()
        }
    };
    let services: Vec<Service> = (0..count).map(service).collect();
    let kinds = KINDS.iter().map(|&(name, speed, price)| kind(&measured, name, speed, price));
    let problem = MixProblem {
        terms: vec![ServiceTerms::default(); services.len()],
        services,
        rules: PlanRules::default(),
        kinds: kinds.collect::<Result<_, _>>()?,
        objective: MixObjective::Cost,
        gpus_max: None,
        serve_first: ServeFirst::Priority,
        layout: Layout { machine_gpus: Some(machine_gpus.max(1)), rack_gpus: None },
        survive: (machine_gpus > 0).then_some(FailureDomain::Machine),
    };
    println!(
        "{count} services, {}",
        match machine_gpus {
            0 => "nothing may fail".to_string(),
            gpus => format!("any one machine of {gpus} gpus may fail"),
        }
    );
    let file = report("all three", &problem)?;
    for kind in &problem.kinds {
        let alone = MixProblem { kinds: vec![kind.clone()], ..problem.clone() };
        if let Err(error) = report(kind.gpu.name, &alone) {
            println!("{:<12} {error}", kind.gpu.name);
        }
    }
    if let Some(path) = args.get(3) {
        std::fs::write(path, serde_json::to_string_pretty(&file)?)?;
    }
    Ok(())
}

fn kind(
    measured: &Profiles,
    name: &str,
    speed: f64,
    price: f64,
) -> Result<MixKind, Box<dyn std::error::Error>> {
    let gpu = GpuKind::find(name)?;
    let mut profiles = Profiles::default();
    for model in measured.models() {
        for point in measured.points(model).unwrap_or_default() {
            let scaled = OperatingPoint {
                throughput: point.throughput * speed,
                latency_ms: point.latency_ms / speed,
                ..point.clone()
            };
            profiles.push(model, scaled)?;
        }
    }
    let offers = vec![GpuOffer { name: name.to_string(), price, watts: 300.0, count: None }];
    Ok(MixKind { gpu, profiles, offers })
}

fn report(name: &str, problem: &MixProblem) -> Result<MixFile, Box<dyn std::error::Error>> {
    let clock = MonotonicClock::new();
    let mut report = |_| true;
    let solution = plan_mix(problem, &mut SearchControl::new(&clock, &mut report))?;
    if let Some(wrong) = check_mix(problem, &solution).first() {
        return Err(format!("the checker rejects the plan: {wrong}").into());
    }
    let gpus: Vec<String> = solution
        .kinds
        .iter()
        .map(|kind| format!("{} {}", kind.gpus, kind.problem.gpu.name))
        .collect();
    let file: MixFile =
        serde_json::from_str(&serde_json::to_string(&MixFile::new(problem, &solution))?)?;
    let planned_s = solution.seconds;
    let begin = clock.now();
    let verified = file.verify().map_err(|wrong| wrong.join("; "))?;
    println!(
        "{name:<12} {:>9.2} an hour, bound {:>9.2}, without spare {:>9.2}, {}; planned in \
         {planned_s:.2} s, verified in {:.2} s",
        verified.total,
        problem.bound_with_spare(&solution),
        verified.bound,
        gpus.join(" + "),
        (clock.now().0 - begin.0) as f64 / 1e9,
    );
    Ok(file)
}
