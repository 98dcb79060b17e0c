//! Plans the published scenarios and growing numbers of services; prints GPUs, bounds and times,
//! and plots the growth.
//!
//! `cargo run --release -p planner --example planner_bench -- PROFILES.csv [GROWTH.svg]`

use std::fmt::Write;

use base::{MonotonicClock, Random};
use planner::replan::{ChangeCosts, replan};
use planner::squishy::{self, Session};
use planner::{
    Algorithm, GpuKind, PlanRules, Problem, Profiles, SearchControl, Service, Sharing, algorithm,
    check, run, scenario,
};

/// Maximum seconds for a number of services.
const TARGETS: [(usize, f64); 4] = [(11, 0.05), (1000, 0.2), (10_000, 2.0), (100_000, 30.0)];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: planner_bench PROFILES.csv [GROWTH.svg]")?;
    let profiles = Profiles::from_csv(&std::fs::read_to_string(path)?)?;
    println!("{:<9} {:<25} {:>8} {:>9}  gpus  (bound)", "load", "algorithm", "headroom", "seconds");
    for number in 1..=6 {
        compare(&format!("S{number}"), &profiles, &scenario::services(number))?;
    }
    compare("S5 x 10", &profiles, &scenario::services_times(5, 10))?;
    compare("1000", &profiles, &random_services(1000, 1))?;
    let (whole, shared) = grow(&profiles)?;
    if let Some(path) = std::env::args().nth(2) {
        std::fs::write(
            path,
            plot(&[("whole slices", "teal", &whole), ("shared", "darkorange", &shared)]),
        )?;
    }
    change_one_percent(&profiles)?;
    sessions()?;
    Ok(())
}

fn problem(profiles: &Profiles, services: &[Service], rules: PlanRules) -> Result<Problem, String> {
    let gpu = GpuKind::find("a100-80gb").map_err(|error| error.to_string())?;
    Ok(Problem { gpu, services: services.to_vec(), profiles: profiles.clone(), rules })
}

/// Seconds and GPUs of one plan, printed as a row.
fn row(name: &str, label: &str, problem: &Problem, algorithm: Algorithm) -> (f64, usize) {
    let clock = MonotonicClock::new();
    let mut report = |_| true;
    let headroom = problem.rules.headroom * 100.0;
    match run(problem, algorithm, &mut SearchControl::new(&clock, &mut report)) {
        Ok(output) => {
            let counts_only = matches!(algorithm, Algorithm::GpuletLike | Algorithm::IgniterLike);
            let accepted = counts_only || check(problem, &output.solution.plan).is_empty();
            println!(
                "{name:<9} {label:<25} {headroom:>6.0} % {:>9.4}  {} ({:.3}){}",
                output.solution.seconds,
                output.gpus,
                output.solution.bound,
                if accepted { "" } else { "  REJECTED" }
            );
            (output.solution.seconds, output.gpus)
        }
        Err(error) => {
            println!("{name:<9} {label:<25} {headroom:>6.0} %         -  {error}");
            (0.0, 0)
        }
    }
}

fn compare(name: &str, profiles: &Profiles, services: &[Service]) -> Result<(), String> {
    for headroom in [0.0, 0.15] {
        for (label, algorithm) in algorithm::ALGORITHMS {
            let squishy = algorithm == Algorithm::Squishy;
            let sharing = if squishy { Sharing::Time } else { Sharing::None };
            let rules = PlanRules { sharing, headroom, ..PlanRules::default() };
            row(name, label, &problem(profiles, services, rules)?, algorithm);
        }
        let rules = PlanRules { sharing: Sharing::Time, headroom, ..PlanRules::default() };
        let problem = problem(profiles, services, rules)?;
        row(name, "certified, shared", &problem, Algorithm::Certified);
    }
    Ok(())
}

/// Number of services and seconds.
type Growth = Vec<(usize, f64)>;

/// Without and with shared slices.
fn grow(profiles: &Profiles) -> Result<(Growth, Growth), String> {
    let (mut growth, mut shared) = (Vec::new(), Vec::new());
    for count in [11, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000] {
        let services = random_services(count, 1);
        let problem = problem(profiles, &services, PlanRules::default())?;
        let (seconds, _) = row(&count.to_string(), "certified", &problem, Algorithm::Certified);
        growth.push((count, seconds));
        verdict(count, seconds);
    }
    for count in [11, 100, 1000, 10_000, 100_000] {
        for headroom in [0.0, 0.15] {
            let rules = PlanRules { sharing: Sharing::Time, headroom, ..PlanRules::default() };
            let problem = problem(profiles, &random_services(count, 1), rules)?;
            let name = count.to_string();
            let (seconds, _) = row(&name, "certified, shared", &problem, Algorithm::Certified);
            verdict(count, seconds);
            if headroom == 0.0 {
                shared.push((count, seconds));
            }
        }
    }
    for (count, seconds) in &growth {
        let length = ((seconds * 1e4).max(1.0).log10() * 12.0) as usize;
        println!("{count:>8} {} {seconds:.4} s", "#".repeat(length));
    }
    Ok((growth, shared))
}

fn verdict(count: usize, seconds: f64) {
    if let Some((_, target)) = TARGETS.iter().find(|(size, _)| *size == count) {
        let verdict = if seconds <= *target { "within" } else { "ABOVE" };
        println!("{verdict:>12} the target of {target} s");
    }
}

/// Curves of services against seconds, both logarithmic, with the targets as dots.
fn plot(curves: &[(&str, &str, &Growth)]) -> String {
    let x = |count: f64| 60.0 + (count.log10() - 1.0) * 130.0;
    let y = |seconds: f64| 260.0 - (seconds.max(1e-4).log10() + 4.0) * 42.0;
    let mut text = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"680\" height=\"300\" \
         font-family=\"sans-serif\" font-size=\"11\">\
         <rect width=\"680\" height=\"300\" fill=\"white\"/>\n",
    );
    for power in 1..=5 {
        let at = x(10f64.powi(power));
        let _ = writeln!(text, "<text x=\"{at}\" y=\"285\">10^{power} services</text>");
    }
    for power in -4..=1 {
        let at = y(10f64.powi(power));
        let _ = writeln!(
            text,
            "<text x=\"4\" y=\"{at}\">1e{power} s</text>\
             <line x1=\"50\" x2=\"610\" y1=\"{at}\" y2=\"{at}\" stroke=\"#ddd\"/>"
        );
    }
    let point = |(count, seconds): &(usize, f64)| format!("{},{}", x(*count as f64), y(*seconds));
    for (at, (name, colour, growth)) in curves.iter().enumerate() {
        let points: Vec<String> = growth.iter().map(point).collect();
        let _ = writeln!(
            text,
            "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" points=\"{}\"/>\
             <text x=\"70\" y=\"{}\" fill=\"{colour}\">{name}</text>",
            points.join(" "),
            20 + 14 * at
        );
    }
    for (size, target) in TARGETS {
        let (cx, cy) = (x(size as f64), y(target));
        let _ = writeln!(text, "<circle cx=\"{cx}\" cy=\"{cy}\" r=\"4\" fill=\"crimson\"/>");
    }
    text.push_str("</svg>\n");
    text
}

fn change_one_percent(profiles: &Profiles) -> Result<(), Box<dyn std::error::Error>> {
    let mut problem = problem(profiles, &random_services(10_000, 1), PlanRules::default())?;
    let clock = MonotonicClock::new();
    let mut report = |_| true;
    let first =
        run(&problem, Algorithm::Certified, &mut SearchControl::new(&clock, &mut report))?.solution;
    let mut random = Random::new(2);
    for _ in 0..100 {
        let at = random.below(10_000) as usize;
        problem.services[at].rate *= 0.5 + random.unit_f64();
    }
    let mut control = SearchControl::new(&clock, &mut report);
    let next = replan(&problem, &first.plan, &first.prices, ChangeCosts::default(), &mut control)?;
    let fresh = run(&problem, Algorithm::Certified, &mut SearchControl::new(&clock, &mut report))?;
    println!(
        "re-plan of 1 % of 10,000: {:.4} s, {} gpus (fresh {}), {} untouched services moved",
        next.seconds,
        next.gpus(),
        fresh.gpus,
        next.moved.len()
    );
    Ok(())
}

fn sessions() -> Result<(), Box<dyn std::error::Error>> {
    let mut random = Random::new(1);
    let session = |index: usize| {
        let (fixed, slope) = (3.0 + 12.0 * random.unit_f64(), 0.3 + 2.0 * random.unit_f64());
        let curve = (1..=64).map(|batch| (batch, fixed + slope * f64::from(batch))).collect();
        let slo_ms = 60.0 + 200.0 * random.unit_f64();
        let mut session = Session { name: format!("s{index}"), rate: 1.0, slo_ms, curve };
        let most = session.throughput().unwrap_or(1.0);
        session.rate = most * (0.05 + 0.45 * random.unit_f64());
        session
    };
    let sessions: Vec<Session> = (0..25).map(session).collect();
    let clock = MonotonicClock::new();
    let mut report = |_| true;
    let control = SearchControl::new(&clock, &mut report);
    let greedy = squishy::pack(&sessions)?.len();
    let optimum = squishy::exact::solve(&sessions)?;
    println!(
        "25 sessions: greedy {greedy} gpus, optimum {} (proven at least {}), {:.4} s",
        optimum.nodes.len(),
        optimum.lower_bound,
        control.seconds()
    );
    Ok(())
}

fn random_services(count: usize, seed: u64) -> Vec<Service> {
    scenario::random_services(count, &mut Random::new(seed))
}
