//! Plans with shared slices and their bound, against the fewest GPUs found by trying everything.

use base::{MonotonicClock, Random};
use planner::certified::{self, Solution};
use planner::gpu::SliceKind;
use planner::{
    GpuKind, OperatingPoint, PlanRules, Problem, Profiles, SearchControl, Service, Sharing, check,
};

/// A GPU with a single slice.
static WHOLE: GpuKind = GpuKind {
    name: "whole",
    words: &[],
    division: planner::gpu::Division::Mig,
    gpcs: 1,
    memory_slices: 1,
    slices: &[SliceKind {
        name: "whole",
        profile_id: 0,
        gpcs: 1,
        memory_mib: 1 << 30,
        memory_slices: 1,
        starts: &[0],
    }],
};

/// Copies of an instance whose bound is compared with as many times the best plan of one.
const COPIES: usize = 16;

fn solve(problem: &Problem) -> Solution {
    let clock = MonotonicClock::new();
    let mut report = |_| true;
    certified::plan(problem, &mut SearchControl::new(&clock, &mut report)).unwrap()
}

/// The bound of so many copies of every service, without a plan.
fn bound_of_copies(problem: &Problem, copies: usize) -> usize {
    let copy = |copy: usize| {
        let of = move |service: &Service| {
            let name = format!("{}-{copy}", service.name);
            Service { name, ..service.clone() }
        };
        problem.services.iter().map(of)
    };
    let services = (0..copies).flat_map(copy).collect();
    let problem = Problem { services, ..problem.clone() };
    let clock = MonotonicClock::new();
    let mut report = |_| true;
    certified::bound(&problem, &mut SearchControl::new(&clock, &mut report)).unwrap().lower_bound
}

/// Services of random problems.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// SLOs of a few batches; memory for any number of them.
    Alike,
    /// SLOs over more than a decade; two or three of them fill the smallest slice's memory.
    Diverse,
}

/// Services that need a part of a GPU each.
fn random_problem(seed: u64, gpu: &'static GpuKind, count: usize, kind: Kind) -> Problem {
    let mut random = Random::new(seed);
    let smallest = f64::from(gpu.slices[0].memory_mib);
    let mut profiles = Profiles::default();
    let mut services = Vec::new();
    for index in 0..count {
        let name = format!("s{index}");
        let (alpha, beta) = (1.0 + 4.0 * random.unit_f64(), 4.0 + 16.0 * random.unit_f64());
        let mut slo_ms = (2.0 + 6.0 * random.unit_f64()) * (4.0 * alpha + beta) * 2.0;
        let mut memory_mib = 1;
        if kind == Kind::Diverse {
            slo_ms *= 12f64.powf(random.unit_f64());
            memory_mib = (smallest * (0.2 + 0.4 * random.unit_f64())) as u64;
        }
        let mut best = 0.0f64;
        let mut sizes: Vec<u8> = gpu.slices.iter().map(|slice| slice.gpcs).collect();
        sizes.dedup();
        for gpcs in sizes {
            for batch in [1u32, 2, 4, 8] {
                let speed = f64::from(gpcs) / f64::from(gpu.gpcs);
                let latency_ms = alpha * f64::from(batch) / speed + beta;
                let throughput = f64::from(batch) / latency_ms * 1000.0;
                let point = OperatingPoint {
                    gpcs,
                    batch,
                    processes: 1,
                    throughput,
                    latency_ms,
                    memory_mib: Some(memory_mib),
                };
                profiles.push(&name, point).unwrap();
                if latency_ms < slo_ms / 2.0 {
                    best = best.max(throughput);
                }
            }
        }
        let share = match kind {
            Kind::Alike => 0.05 + 0.5 * random.unit_f64(),
            Kind::Diverse => 0.01 * 60f64.powf(random.unit_f64()),
        };
        let rate = best * share;
        services.push(Service { name: name.clone(), model: name, rate, slo_ms });
    }
    let rules = PlanRules { slo_share: 1.0, sharing: Sharing::Time, ..PlanRules::default() };
    Problem { gpu, services, profiles, rules }
}

/// Whether one slice of `kind` serves these services completely: alone, or in some duty cycle.
fn fits(problem: &Problem, group: &[usize], kind: usize) -> bool {
    let gpcs = problem.gpu.slices[kind].gpcs;
    let points = |service: usize| {
        let model = &problem.services[service].model;
        let all = problem.profiles.points(model).unwrap_or_default();
        all.iter().filter(|point| point.gpcs == gpcs).collect::<Vec<_>>()
    };
    if let [only] = group {
        let service = &problem.services[*only];
        let alone = |p: &&OperatingPoint| {
            problem.fits_alone(service, kind, p) && p.throughput >= service.rate
        };
        if points(*only).into_iter().any(|point| alone(&point)) {
            return true;
        }
    }
    // The memory of a service is the same at every point.
    let needs = |service: &usize| points(*service).first().and_then(|point| point.memory_mib);
    let memory_mib: u64 = group.iter().filter_map(needs).sum();
    if memory_mib > u64::from(problem.gpu.slices[kind].memory_mib) {
        return false;
    }
    fn turns(
        problem: &Problem,
        rest: &[(usize, Vec<&OperatingPoint>)],
        cycle_ms: f64,
        busy_ms: f64,
    ) -> bool {
        if busy_ms > cycle_ms * (1.0 + 1e-9) {
            return false;
        }
        let Some(((service, points), rest)) = rest.split_first() else { return true };
        let service = &problem.services[*service];
        points.iter().any(|point| {
            let gathers_ms = f64::from(point.batch) / service.rate * 1000.0;
            let waits_ms = service.slo_ms - point.latency_ms;
            let cycle_ms = cycle_ms.min(gathers_ms).min(waits_ms);
            turns(problem, rest, cycle_ms, busy_ms + point.latency_ms)
        })
    }
    let all: Vec<(usize, Vec<&OperatingPoint>)> = group.iter().map(|&s| (s, points(s))).collect();
    turns(problem, &all, f64::INFINITY, 0.0)
}

/// Fewest GPUs over all combinations of whole services; `None` above `max`.
fn brute_force(problem: &Problem, max: usize) -> Option<usize> {
    let kinds = problem.gpu.slices.len();
    let count = problem.services.len();
    // Kinds that serve a set of services, by its bits.
    let mut serving: Vec<Vec<usize>> = vec![Vec::new(); 1 << count];
    for (set, kinds_of) in serving.iter_mut().enumerate().skip(1) {
        let group: Vec<usize> = (0..count).filter(|service| set >> service & 1 == 1).collect();
        *kinds_of = (0..kinds).filter(|&kind| fits(problem, &group, kind)).collect();
    }
    (1..=max).find(|&gpus| divide(problem, &serving, (1 << count) - 1, &mut Vec::new(), gpus))
}

/// Every partition of the remaining services into sets, each with every kind that serves it.
fn divide(
    problem: &Problem,
    serving: &[Vec<usize>],
    remaining: usize,
    slices: &mut Vec<usize>,
    gpus: usize,
) -> bool {
    let gpcs: usize = slices.iter().map(|&k| usize::from(problem.gpu.slices[k].gpcs)).sum();
    if gpcs > gpus * usize::from(problem.gpu.gpcs) {
        return false;
    }
    if remaining == 0 {
        let mut order = slices.clone();
        order.sort_by_key(|&kind| std::cmp::Reverse(problem.gpu.slices[kind].memory_slices));
        return place(problem, &order, &mut vec![0u16; gpus]);
    }
    // The first remaining service is in one of the sets.
    let first = remaining & remaining.wrapping_neg();
    let others = remaining ^ first;
    let mut more = others;
    loop {
        for &kind in &serving[first | more] {
            slices.push(kind);
            if divide(problem, serving, others & !more, slices, gpus) {
                return true;
            }
            slices.pop();
        }
        if more == 0 {
            return false;
        }
        more = (more - 1) & others;
    }
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

/// Plans and bounds compared with brute force: instances, plans with more GPUs, with fewer (these
/// divide services), bounds one GPU below the best known plan, and GPUs of all.
#[derive(Debug, Default)]
struct Standing {
    instances: usize,
    above: usize,
    below: usize,
    bound_less: usize,
    planned: usize,
    best: usize,
    bound: f64,
}

fn compare(
    gpu: &'static GpuKind,
    count: usize,
    seeds: std::ops::Range<u64>,
    kind: Kind,
) -> Standing {
    let mut standing = Standing::default();
    for seed in seeds {
        let problem = random_problem(seed, gpu, count, kind);
        let solution = solve(&problem);
        let violations = check(&problem, &solution.plan);
        assert!(violations.is_empty(), "seed {seed}: {violations:?}");
        let planned = solution.plan.gpus.len();
        let Some(best) = brute_force(&problem, count) else { panic!("seed {seed}: nothing fits") };
        let least = planned.min(best);
        assert!(solution.lower_bound <= least, "seed {seed}: {} {least}", solution.bound);
        // Copies of a plan serve copies of the services: this reveals what rounding to whole GPUs
        // hides.
        let of_copies = bound_of_copies(&problem, COPIES);
        assert!(of_copies <= COPIES * least, "seed {seed}: {of_copies}, {COPIES} times {least}");
        standing.instances += 1;
        standing.above += usize::from(planned > best);
        standing.below += usize::from(planned < best);
        standing.bound_less += usize::from(solution.lower_bound < least);
        standing.planned += planned;
        standing.best += least;
        standing.bound += solution.bound;
    }
    println!("{} with {count} services: {standing:?}", gpu.name);
    standing
}

#[test]
fn sharing_whole_gpus_matches_brute_force() {
    let few = compare(&WHOLE, 4, 0..200, Kind::Alike);
    let more = compare(&WHOLE, 7, 200..300, Kind::Alike);
    assert!(few.above == 0, "{few:?}");
    assert!(more.above * 20 <= more.instances, "{more:?}");
}

#[test]
fn sharing_slices_matches_brute_force() {
    let gpu = GpuKind::find("a30-24gb").unwrap();
    let few = compare(gpu, 3, 0..150, Kind::Alike);
    let more = compare(gpu, 5, 150..220, Kind::Alike);
    assert!(few.above * 20 <= few.instances, "{few:?}");
    assert!(more.above * 10 <= more.instances, "{more:?}");
}

#[test]
fn bounds_hold_where_cycles_and_memory_matter() {
    let gpu = GpuKind::find("a30-24gb").unwrap();
    for (gpu, count, seeds) in [(&WHOLE, 4, 0..120), (gpu, 4, 120..220), (gpu, 6, 220..250)] {
        let standing = compare(gpu, count, seeds, Kind::Diverse);
        assert!(standing.above * 5 <= standing.instances, "{standing:?}");
    }
}
