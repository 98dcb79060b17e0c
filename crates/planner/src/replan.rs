//! Plans changed services with few moves from the current plan.
//!
//! Services whose slices still suffice, none of them superfluous, are not changed. The others
//! either extend their present slices or get a new cover, with a price on every change. New slices
//! go onto free slots first, and then onto further GPUs. If the plan then has too many GPUs, the
//! GPUs with the least work are planned again together (`replan/drift.rs`).

mod drift;
pub mod steps;

use std::collections::BTreeSet;

use crate::certified::cover::{Prices, cheapest};
use crate::certified::packing::PatternPacker;
use crate::certified::{self, SearchEnd, Solution};
use crate::error::PlanError;
use crate::gpu::{KINDS_MAX, SliceCounts};
use crate::plan::{Plan, PlannedGpu, PlannedSlice, ServiceShare};
use crate::problem::{Problem, ServiceDemand};
use crate::profile::OperatingPoint;
use crate::search_control::SearchControl;

/// Costs of changes, in GPUs: a change that saves a GPU may cost up to one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChangeCosts {
    /// Creating or destroying a slice: the time of a MIG reconfiguration.
    pub geometry: f64,
    /// Loading a model into a slice: the cold start of its processes.
    pub load: f64,
    /// Loading one GiB of a model.
    pub load_gib: f64,
    /// Spreading a service's rate over one more slice.
    pub split: f64,
    /// Maximum number of services that are moved although their demand did not change; without it
    /// only the costs limit the moves.
    pub moves_max: Option<usize>,
    /// GPUs above a new plan from which services are moved, as a share of it. One GPU is always
    /// allowed, so that a plan does not change back and forth.
    pub drift: f64,
}

impl Default for ChangeCosts {
    fn default() -> ChangeCosts {
        ChangeCosts {
            geometry: 0.01,
            load: 0.004,
            load_gib: 0.0002,
            split: 0.001,
            moves_max: None,
            drift: 0.02,
        }
    }
}

/// Relative error up to which a rate counts as met, because rates in shared slices are rounded
/// down. Well within the checker's tolerance.
const MET: f64 = 5e-8;
/// Relative difference of routed and needed rates up to which a service is as planned: above the
/// solvers', and well below any change that matters.
const ROUTED: f64 = 9e-8;
/// Relative slack of comparisons: above the solvers', whose cycles and rates are sums of rounded
/// numbers, and within the checker's.
const SLACK: f64 = 1e-8;

/// A plan derived from another one.
#[derive(Clone, Debug)]
pub struct Replanned {
    /// The plan; GPU numbers are those of the previous plan.
    pub plan: Plan,
    /// Proven lower bound for the changed services.
    pub bound: f64,
    /// Services that were moved although their demand did not change.
    pub moved: BTreeSet<usize>,
    /// Services that got other slices because their demand changed.
    pub changed: BTreeSet<usize>,
    /// Duration in seconds.
    pub seconds: f64,
}

impl Replanned {
    /// GPUs in use.
    pub fn gpus(&self) -> usize {
        self.plan.gpus.iter().filter(|gpu| !gpu.slices.is_empty()).count()
    }
}

struct Replanner<'a> {
    problem: &'a Problem,
    demands: Vec<ServiceDemand>,
    prices: Prices,
    costs: ChangeCosts,
    plan: Plan,
    /// GPU and start of every unshared slice, by service.
    slices: Vec<Vec<(usize, u8, usize)>>,
    /// Requests per second from shared slices.
    shared: Vec<f64>,
    /// Services that run exactly as planned: what is routed to them is what they need.
    settled: Vec<bool>,
}

/// Plans `problem` starting from `current`; `prices` are those of the last certified plan.
pub fn replan(
    problem: &Problem,
    current: &Plan,
    prices: &[f64; KINDS_MAX],
    costs: ChangeCosts,
    control: &mut SearchControl<'_>,
) -> Result<Replanned, PlanError> {
    problem.validate()?;
    let mut planner = Replanner::new(problem, current, *prices, costs);
    let bound = certified::bound_of(problem, &planner.demands, prices);
    control.should_continue("replan", Some(current.gpus.len()), bound);
    planner.find_settled();
    let (missing, changed) = planner.settle();
    planner.place(missing);
    planner.balance();
    let drift = drift::Drift { problem, current, changed: &changed, costs };
    let plan = drift.repair(planner.plan, bound, control)?;
    let moved = drift.moved(&plan);
    Ok(Replanned { plan, bound, moved, changed, seconds: control.seconds() })
}

/// The plan changed, with the bound and the prices of a new one.
pub fn replanned(
    problem: &Problem,
    current: &Plan,
    costs: ChangeCosts,
    control: &mut SearchControl<'_>,
) -> Result<Solution, PlanError> {
    let bound = certified::bound(problem, control)?;
    let next = replan(problem, current, &bound.prices, costs, control)?;
    let end = match (next.gpus() <= bound.lower_bound, control.is_stopped()) {
        (true, _) => SearchEnd::BoundReached,
        (false, true) => SearchEnd::Stopped,
        (false, false) => SearchEnd::NothingBetter,
    };
    let stopped = control.is_stopped();
    Ok(Solution { plan: next.plan, seconds: control.seconds(), end, stopped, ..bound })
}

/// Whether the turns of a shared slice still meet all SLOs.
fn still_in_time(problem: &Problem, slice: &PlannedSlice) -> bool {
    let Some(cycle_ms) = slice.cycle_ms else { return true };
    let gpcs = problem.gpu.slices[slice.kind].gpcs;
    slice.shares.iter().all(|share| {
        let service = &problem.services[share.service];
        let points = problem.profiles.points(&service.model).unwrap_or_default();
        let point = points
            .iter()
            .find(|p| (p.gpcs, p.batch, p.processes) == (gpcs, share.batch, share.processes));
        point.is_some_and(|point| {
            cycle_ms + point.turn_ms() <= service.limit_ms(&problem.rules) * (1.0 + SLACK)
                && share.rate * cycle_ms / 1000.0 <= point.requests() * (1.0 + SLACK)
        })
    })
}

/// Cost of loading a model's processes at an operating point.
fn load_cost(problem: &Problem, costs: &ChangeCosts, model: &str, point: &OperatingPoint) -> f64 {
    let mib = problem.profiles.memory_limit_mib(problem.gpu, model, point);
    costs.load + costs.load_gib * mib as f64 / 1024.0
}

impl<'a> Replanner<'a> {
    fn new(
        problem: &'a Problem,
        current: &Plan,
        prices: Prices,
        costs: ChangeCosts,
    ) -> Replanner<'a> {
        let mut planner = Replanner {
            problem,
            demands: problem.demands(),
            prices,
            costs,
            plan: current.clone(),
            slices: vec![Vec::new(); problem.services.len()],
            shared: vec![0.0; problem.services.len()],
            settled: vec![false; problem.services.len()],
        };
        for (number, gpu) in planner.plan.gpus.iter_mut().enumerate() {
            gpu.slices.retain(|slice| !slice.shares.is_empty() && still_in_time(problem, slice));
            for slice in &mut gpu.slices {
                if slice.cycle_ms.is_some() {
                    slice
                        .shares
                        .iter()
                        .for_each(|share| planner.shared[share.service] += share.rate);
                    continue;
                }
                let service = slice.shares[0].service;
                planner.slices[service].push((number, slice.start, slice.kind));
            }
        }
        planner
    }

    /// Marks the services that run exactly as planned.
    fn find_settled(&mut self) {
        let mut routed = vec![0.0; self.demands.len()];
        let mut as_planned = vec![true; self.demands.len()];
        for slice in self.plan.gpus.iter().flat_map(|gpu| &gpu.slices) {
            for share in &slice.shares {
                routed[share.service] += share.rate;
                if slice.cycle_ms.is_none() {
                    let demand = &self.demands[share.service];
                    let model = &self.problem.services[share.service].model;
                    let points = self.problem.profiles.points(model).unwrap_or_default();
                    let point = points.get(demand.point[slice.kind] as usize);
                    as_planned[share.service] &= demand.throughput[slice.kind] > 0.0
                        && point.is_some_and(|point| {
                            (point.batch, point.processes) == (share.batch, share.processes)
                                && share.rate <= point.throughput * (1.0 + SLACK)
                        });
                }
            }
        }
        let exact = |service: usize| {
            let needed = self.demands[service].rate;
            as_planned[service] && (routed[service] - needed).abs() <= needed * ROUTED
        };
        self.settled = (0..self.demands.len()).map(exact).collect();
    }

    fn capacity(&self, service: usize, cover: &SliceCounts) -> f64 {
        let throughput = &self.demands[service].throughput;
        (0..KINDS_MAX).map(|kind| f64::from(cover[kind]) * throughput[kind]).sum()
    }

    fn price(&self, cover: &SliceCounts) -> f64 {
        (0..KINDS_MAX).map(|kind| f64::from(cover[kind]) * self.prices[kind]).sum()
    }

    /// Frees superfluous and unfit slices. Returns the missing slices of each service, and the
    /// changed services.
    fn settle(&mut self) -> (Vec<(usize, usize)>, BTreeSet<usize>) {
        let (mut missing, mut changed) = (Vec::new(), BTreeSet::new());
        for service in 0..self.demands.len() {
            if self.settled[service] {
                continue;
            }
            let mut now: SliceCounts = [0; KINDS_MAX];
            self.slices[service].iter().for_each(|(_, _, kind)| now[*kind] += 1);
            let needed = self.demands[service].rate - self.shared[service];
            if needed <= self.demands[service].rate * MET && now == [0; KINDS_MAX] {
                continue;
            }
            let wanted = self.choose(service, &now, needed);
            if wanted == now {
                continue;
            }
            changed.insert(service);
            for kind in 0..KINDS_MAX {
                for _ in wanted[kind]..now[kind] {
                    self.free_one(service, kind);
                }
                for _ in now[kind]..wanted[kind] {
                    missing.push((service, kind));
                }
            }
        }
        (missing, changed)
    }

    /// The present slices extended, or a new cover if that saves more than the changes cost.
    fn choose(&self, service: usize, now: &SliceCounts, needed: f64) -> SliceCounts {
        let demand = &self.demands[service];
        let met = |cover: &SliceCounts| self.capacity(service, cover) >= needed - demand.rate * MET;
        let usable = (0..KINDS_MAX).all(|kind| now[kind] == 0 || demand.throughput[kind] > 0.0);
        let minimal = |cover: &SliceCounts| {
            (0..KINDS_MAX).all(|kind| {
                let mut less = *cover;
                less[kind] = less[kind].saturating_sub(1);
                less == *cover || !met(&less)
            })
        };
        if usable && met(now) && minimal(now) {
            return *now;
        }
        let new_cover =
            cheapest(&ServiceDemand { rate: needed.max(1e-9), ..demand.clone() }, &self.prices)
                .cover;
        let extended = self.extend_cover(service, now, needed);
        let cost = |cover: &SliceCounts| {
            let made: u32 = (0..KINDS_MAX).map(|k| cover[k].saturating_sub(now[k])).sum();
            let gone: u32 = (0..KINDS_MAX).map(|k| now[k].saturating_sub(cover[k])).sum();
            let split = cover.iter().sum::<u32>().saturating_sub(now.iter().sum());
            let loads =
                |k: usize| f64::from(cover[k].saturating_sub(now[k])) * self.load(service, k);
            self.price(cover)
                + f64::from(made + gone) * self.costs.geometry
                + (0..KINDS_MAX).map(loads).sum::<f64>()
                + f64::from(split) * self.costs.split
        };
        if cost(&extended) <= cost(&new_cover) { extended } else { new_cover }
    }

    /// Cost of loading a service into a slice of `kind`.
    fn load(&self, service: usize, kind: usize) -> f64 {
        let model = &self.problem.services[service].model;
        let points = self.problem.profiles.points(model).unwrap_or_default();
        match points.get(self.demands[service].point[kind] as usize) {
            Some(point) => load_cost(self.problem, &self.costs, model, point),
            None => self.costs.load,
        }
    }

    fn extend_cover(&self, service: usize, now: &SliceCounts, needed: f64) -> SliceCounts {
        let demand = &self.demands[service];
        let mut cover: SliceCounts =
            std::array::from_fn(|k| if demand.throughput[k] > 0.0 { now[k] } else { 0 });
        let lacking = needed - self.capacity(service, &cover);
        if lacking > 0.0 {
            let more =
                cheapest(&ServiceDemand { rate: lacking, ..demand.clone() }, &self.prices).cover;
            return std::array::from_fn(|kind| cover[kind] + more[kind]);
        }
        let mut kinds: Vec<usize> = (0..KINDS_MAX).collect();
        kinds.sort_by(|&a, &b| self.prices[b].total_cmp(&self.prices[a]));
        for kind in kinds {
            while cover[kind] > 0
                && self.capacity(service, &cover) - demand.throughput[kind] >= needed
            {
                cover[kind] -= 1;
            }
        }
        cover
    }

    fn free_one(&mut self, service: usize, kind: usize) {
        // From the emptiest GPU, so that whole GPUs become free.
        let used = |gpu: usize| self.plan.gpus[gpu].slices.len();
        let at = (0..self.slices[service].len())
            .filter(|&at| self.slices[service][at].2 == kind)
            .min_by_key(|&at| used(self.slices[service][at].0));
        let Some(at) = at else { return };
        let (gpu, start, _) = self.slices[service].swap_remove(at);
        self.plan.gpus[gpu].slices.retain(|slice| slice.start != start);
    }

    fn occupied(&self, gpu: usize) -> u16 {
        let slices = &self.plan.gpus[gpu].slices;
        slices.iter().map(|s| self.problem.gpu.slices[s.kind].mask(s.start)).fold(0, |a, b| a | b)
    }

    fn gpcs(&self, gpu: usize) -> u8 {
        let slices = &self.plan.gpus[gpu].slices;
        slices.iter().map(|slice| self.problem.gpu.slices[slice.kind].gpcs).sum()
    }

    /// A legal start for a slice on a GPU, the highest for large slices.
    fn start(&self, gpu: usize, kind: usize) -> Option<u8> {
        let facts = &self.problem.gpu.slices[kind];
        if self.gpcs(gpu) + facts.gpcs > self.problem.gpu.gpcs {
            return None;
        }
        let occupied = self.occupied(gpu);
        let free = |start: &&u8| occupied & facts.mask(**start) == 0;
        match facts.memory_slices >= 4 {
            true => facts.starts.iter().rev().find(free).copied(),
            false => facts.starts.iter().find(free).copied(),
        }
    }

    fn put(&mut self, gpu: usize, start: u8, kind: usize, service: usize) {
        let points = self.problem.profiles.points(&self.problem.services[service].model);
        let point = &points.unwrap_or_default()[self.demands[service].point[kind] as usize];
        let share = ServiceShare {
            service,
            batch: point.batch,
            processes: point.processes,
            rate: point.throughput,
        };
        let slices = &mut self.plan.gpus[gpu].slices;
        slices.push(PlannedSlice { kind, start, cycle_ms: None, shares: vec![share] });
        slices.sort_by_key(|slice| slice.start);
        self.slices[service].push((gpu, start, kind));
    }

    /// Places slices, largest first, each where it leaves the fewest free slots. Those that do not
    /// fit are packed onto further GPUs.
    fn place(&mut self, mut missing: Vec<(usize, usize)>) {
        let size = |kind: usize| self.problem.gpu.slices[kind].memory_slices;
        missing.sort_by_key(|(service, kind)| (std::cmp::Reverse(size(*kind)), *service));
        let mut open: Vec<usize> = (0..self.plan.gpus.len())
            .filter(|&gpu| self.gpcs(gpu) < self.problem.gpu.gpcs)
            .collect();
        let mut homeless: Vec<(usize, usize)> = Vec::new();
        for (service, kind) in missing {
            let best = open
                .iter()
                .filter(|&&gpu| !self.plan.gpus[gpu].slices.is_empty())
                .filter_map(|&gpu| Some((self.gpcs(gpu), gpu, self.start(gpu, kind)?)))
                .max_by_key(|(gpcs, gpu, _)| (*gpcs, std::cmp::Reverse(*gpu)));
            match best {
                Some((_, gpu, start)) => {
                    self.put(gpu, start, kind, service);
                    if self.gpcs(gpu) >= self.problem.gpu.gpcs {
                        open.retain(|other| *other != gpu);
                    }
                }
                None => homeless.push((service, kind)),
            }
        }
        self.open_gpus(homeless);
    }

    fn open_gpus(&mut self, mut homeless: Vec<(usize, usize)>) {
        if homeless.is_empty() {
            return;
        }
        let mut counts: SliceCounts = [0; KINDS_MAX];
        homeless.iter().for_each(|(_, kind)| counts[*kind] += 1);
        let packer =
            PatternPacker::new(self.problem.gpu.maximal_patterns(), self.problem.gpu.slices.len());
        let packed = packer.pack(&counts);
        let mut empty: Vec<usize> = (0..self.plan.gpus.len())
            .filter(|&gpu| self.plan.gpus[gpu].slices.is_empty())
            .rev()
            .collect();
        for (pattern, copies) in packer.patterns.iter().zip(packed) {
            for _ in 0..copies {
                let gpu = empty.pop().unwrap_or_else(|| {
                    self.plan.gpus.push(PlannedGpu::default());
                    self.plan.gpus.len() - 1
                });
                for (kind, start) in self.problem.gpu.place(pattern, 0).unwrap_or_default() {
                    if let Some(at) = homeless.iter().position(|(_, wanted)| *wanted == kind) {
                        let (service, _) = homeless.swap_remove(at);
                        self.put(gpu, start, kind, service);
                    }
                }
            }
        }
    }

    /// Distributes each service's rate over its slices in proportion to their throughput.
    fn balance(&mut self) {
        let mut capacity = vec![0.0; self.demands.len()];
        for (service, slices) in self.slices.iter().enumerate() {
            let throughput = &self.demands[service].throughput;
            capacity[service] = slices.iter().map(|(_, _, kind)| throughput[*kind]).sum();
        }
        for slice in self.plan.gpus.iter_mut().flat_map(|gpu| &mut gpu.slices) {
            if slice.cycle_ms.is_some() || self.settled[slice.shares[0].service] {
                continue;
            }
            let share = &mut slice.shares[0];
            let demand = &self.demands[share.service];
            let points = self.problem.profiles.points(&self.problem.services[share.service].model);
            let point = &points.unwrap_or_default()[demand.point[slice.kind] as usize];
            (share.batch, share.processes) = (point.batch, point.processes);
            let needed = (demand.rate - self.shared[share.service]).max(0.0);
            share.rate = point.throughput * (needed / capacity[share.service]).min(1.0);
        }
    }
}
