//! Plans the published scenarios and synthetic loads of growing size, and prints GPUs, bounds and times.

use base::{MonotonicClock, Random};
use planner::{GpuKind, Problem, Profiles, Rules, Service, Sharing, Watch, certified, check, scenario};

fn main() {
    let path = std::env::args().nth(1).expect("usage: plan_scenarios PROFILES.csv");
    let text = std::fs::read_to_string(path).expect("profiles");
    let profiles = Profiles::from_csv(&text).expect("profiles");
    for sharing in [Sharing::None, Sharing::Time] {
        let rules = Rules { sharing, ..Rules::default() };
        for number in 1..=6 {
            show(&format!("S{number}"), &profiles, scenario::services(number), &rules);
        }
        show("S5 x 10", &profiles, scenario::services_times(5, 10), &rules);
        for count in [11, 1000, 10_000, 100_000] {
            if sharing == Sharing::None || count < 10_000 {
                show(&format!("{count}"), &profiles, random_services(count, 1), &rules);
            }
        }
    }
}

fn show(name: &str, profiles: &Profiles, services: Vec<Service>, rules: &Rules) {
    let gpu = GpuKind::find("a100-80gb").expect("a100");
    let problem = Problem { gpu, services, profiles: profiles.clone(), rules: rules.clone() };
    let clock = MonotonicClock::new();
    let mut report = |_| true;
    let mut watch = Watch::new(&clock, &mut report);
    let solution = certified::plan(&problem, &mut watch).expect("plan");
    let violations = check(&problem, &solution.plan).len();
    println!(
        "{name:>8}: {:>6} gpus, bound {:>10.3}, {:.3} s, {violations} violations",
        solution.plan.gpus.len(),
        solution.bound,
        solution.seconds
    );
}

fn random_services(count: usize, seed: u64) -> Vec<Service> {
    let mut random = Random::new(seed);
    (0..count)
        .map(|index| {
            let base = &scenario::services(5)[random.below(11) as usize];
            Service {
                name: format!("{}-{index}", base.model),
                model: base.model.clone(),
                rate: base.rate * (0.2 + 1.1 * random.unit_f64()),
                slo_ms: base.slo_ms * (1.0 + 2.0 * random.unit_f64()),
            }
        })
        .collect()
}
