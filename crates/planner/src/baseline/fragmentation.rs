//! Placement against fragmentation, after two schedulers of 2025.
//!
//! Both are online schedulers whose jobs ask for a slice. Here a service asks for the slices with
//! the best throughput for the share of a GPU that they take, and for the last of its rate the
//! smallest that suffices. A further GPU is used only if no other has room.

use std::collections::BTreeMap;

use crate::error::PlanError;
use crate::gpu::{GpuKind, KINDS_MAX, SliceCounts, SliceKind};
use crate::plan::{Plan, PlannedGpu, PlannedSlice, ServiceShare};
use crate::problem::{Problem, ServiceDemand};

/// After Zambianco et al., "An Online Fragmentation-Aware GPU Scheduler for Multi-Tenant MIG-based
/// Clouds" (2025): each slice goes where the fragmentation of its GPU grows least.
pub fn least_fragmentation_like(problem: &Problem) -> Result<Plan, PlanError> {
    problem.validate()?;
    let demands = problem.demands();
    let mut known: BTreeMap<Occupancy, i64> = BTreeMap::new();
    let mut fragmentation = |state: Occupancy| -> i64 {
        *known.entry(state).or_insert_with(|| i64::from(state.fragmentation(problem.gpu)))
    };
    // GPUs in the same state are alike, so the choice is between states.
    let mut states: BTreeMap<Occupancy, Vec<usize>> = BTreeMap::new();
    let mut plan = Plan::default();
    for wanted in wanted_slices(problem, &demands) {
        let slice = &problem.gpu.slices[wanted.kind];
        let choices = states.keys().flat_map(|state| {
            let starts = slice.starts.iter().copied();
            starts.filter_map(|start| Some((*state, start, state.with(problem.gpu, slice, start)?)))
        });
        let best =
            choices.min_by_key(|(before, _, after)| fragmentation(*after) - fragmentation(*before));
        let (number, start, after) = match best {
            Some((before, start, after)) => (take(&mut states, before), start, after),
            None => {
                plan.gpus.push(PlannedGpu::default());
                let (empty, starts) = (Occupancy::default(), slice.starts);
                let best = starts
                    .iter()
                    .filter_map(|&start| Some((start, empty.with(problem.gpu, slice, start)?)))
                    .min_by_key(|(_, after)| fragmentation(*after));
                // Every slice of a kind fits its empty GPU.
                let Some((start, after)) = best else { continue };
                (plan.gpus.len() - 1, start, after)
            }
        };
        states.entry(after).or_default().push(number);
        let cut = wanted.planned(problem, &demands, start);
        plan.gpus[number].slices.push(cut);
    }
    plan.gpus.iter_mut().for_each(|gpu| gpu.slices.sort_by_key(|slice| slice.start));
    Ok(plan)
}

/// After Ting et al., "An Online Fragmentation-Aware Scheduler for Managing GPU-Sharing Workloads
/// on Multi-Instance GPUs" (2025): GPUs are partitioned again for what comes, and the services of
/// the least used GPUs migrate until no GPU can be emptied.
pub fn repartitioning_like(problem: &Problem) -> Result<Plan, PlanError> {
    problem.validate()?;
    let demands = problem.demands();
    let mut rooms = Rooms { gpu: problem.gpu, known: BTreeMap::new() };
    let mut gpus: Vec<FilledGpu> = Vec::new();
    // No GPU before these has room for a slice of the kind: it only gets less.
    let mut first = [0; KINDS_MAX];
    for wanted in wanted_slices(problem, &demands) {
        let from = &mut first[wanted.kind];
        while gpus.get(*from).is_some_and(|gpu| !rooms.has(gpu, wanted.kind)) {
            *from += 1;
        }
        if *from == gpus.len() {
            gpus.push(FilledGpu::default());
        }
        gpus[*from].push(problem.gpu, wanted);
    }
    while empty_one(problem.gpu, &mut gpus, &mut rooms) {}
    let mut plan = Plan::default();
    for FilledGpu { counts, slices: mut left, .. } in gpus {
        let mut slices = Vec::new();
        for (kind, start) in problem.gpu.place(&counts, 0).unwrap_or_default() {
            if let Some(at) = left.iter().position(|one| one.kind == kind) {
                slices.push(left.swap_remove(at).planned(problem, &demands, start));
            }
        }
        slices.sort_by_key(|slice| slice.start);
        plan.gpus.push(PlannedGpu { slices });
    }
    Ok(plan)
}

/// A slice that a service asks for.
#[derive(Clone, Copy)]
struct WantedSlice {
    service: usize,
    kind: usize,
    rate: f64,
}

impl WantedSlice {
    fn planned(self, problem: &Problem, demands: &[ServiceDemand], start: u8) -> PlannedSlice {
        let WantedSlice { service, kind, rate } = self;
        let points = problem.profiles.points(&problem.services[service].model);
        let point = &points.unwrap_or_default()[demands[service].point[kind] as usize];
        let share = ServiceShare { service, batch: point.batch, processes: point.processes, rate };
        PlannedSlice { kind, start, cycle_ms: None, shares: vec![share] }
    }
}

/// The slices of all services, in the order of the services.
fn wanted_slices(problem: &Problem, demands: &[ServiceDemand]) -> Vec<WantedSlice> {
    let gpu = problem.gpu;
    let share = |slice: &SliceKind| {
        let compute = f64::from(slice.gpcs) / f64::from(gpu.gpcs);
        compute.max(f64::from(slice.memory_slices) / f64::from(gpu.memory_slices))
    };
    let mut wanted = Vec::new();
    for (service, demand) in demands.iter().enumerate() {
        let usable = || (0..gpu.slices.len()).filter(|&kind| demand.throughput[kind] > 0.0);
        let worth = |kind: usize| demand.throughput[kind] / share(&gpu.slices[kind]);
        let best = usable().max_by(|&a, &b| worth(a).total_cmp(&worth(b)));
        let mut remaining = demand.rate;
        while remaining > demand.rate * 1e-9 {
            let enough = |kind: &usize| demand.throughput[*kind] >= remaining * (1.0 - 1e-9);
            let last = usable()
                .filter(enough)
                .min_by(|&a, &b| share(&gpu.slices[a]).total_cmp(&share(&gpu.slices[b])));
            let Some(kind) = last.or(best) else { break };
            let rate = remaining.min(demand.throughput[kind]);
            wanted.push(WantedSlice { service, kind, rate });
            remaining -= rate;
        }
    }
    wanted
}

/// What is used of a GPU: memory slices, one bit each, and compute slices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Occupancy {
    memory: u16,
    gpcs: u8,
}

impl Occupancy {
    fn with(self, gpu: &GpuKind, slice: &SliceKind, start: u8) -> Option<Occupancy> {
        let fits = self.memory & slice.mask(start) == 0 && self.gpcs + slice.gpcs <= gpu.gpcs;
        fits.then(|| Occupancy {
            memory: self.memory | slice.mask(start),
            gpcs: self.gpcs + slice.gpcs,
        })
    }

    /// Memory slices of the places that the free slices suffice for by number, and where some are
    /// free and some are not.
    fn fragmentation(self, gpu: &GpuKind) -> u32 {
        let free = u32::from(gpu.memory_slices) - self.memory.count_ones();
        let mut lost = 0;
        for slice in gpu.slices {
            if u32::from(slice.memory_slices) > free || self.gpcs + slice.gpcs > gpu.gpcs {
                continue;
            }
            let is_cut = |start: &&u8| {
                let window = slice.mask(**start);
                window & self.memory != 0 && window & !self.memory != 0
            };
            lost +=
                slice.starts.iter().filter(is_cut).count() as u32 * u32::from(slice.memory_slices);
        }
        lost
    }
}

/// Takes a GPU in that state.
fn take(states: &mut BTreeMap<Occupancy, Vec<usize>>, state: Occupancy) -> usize {
    let Some(gpus) = states.get_mut(&state) else { return 0 };
    let number = gpus.pop().unwrap_or(0);
    if gpus.is_empty() {
        states.remove(&state);
    }
    number
}

/// Which slices fit beside each other, in some arrangement.
struct Rooms<'k> {
    gpu: &'k GpuKind,
    known: BTreeMap<SliceCounts, bool>,
}

impl Rooms<'_> {
    fn has(&mut self, gpu: &FilledGpu, kind: usize) -> bool {
        let mut counts = gpu.counts;
        counts[kind] += 1;
        let kinds = self.gpu;
        *self.known.entry(counts).or_insert_with(|| kinds.place(&counts, 0).is_some())
    }
}

/// A GPU whose slices have no starts yet.
#[derive(Clone, Default)]
struct FilledGpu {
    slices: Vec<WantedSlice>,
    counts: SliceCounts,
    /// Memory slices in use.
    used: u32,
}

impl FilledGpu {
    fn push(&mut self, gpu: &GpuKind, slice: WantedSlice) {
        self.counts[slice.kind] += 1;
        self.used += u32::from(gpu.slices[slice.kind].memory_slices);
        self.slices.push(slice);
    }

    /// Takes back the slice that came last.
    fn pop(&mut self, gpu: &GpuKind) {
        if let Some(slice) = self.slices.pop() {
            self.counts[slice.kind] -= 1;
            self.used -= u32::from(gpu.slices[slice.kind].memory_slices);
        }
    }
}

/// Empties the least used GPU, if its slices fit the others: the largest first, each to the fullest
/// GPU that has room.
fn empty_one(gpu: &GpuKind, gpus: &mut Vec<FilledGpu>, rooms: &mut Rooms<'_>) -> bool {
    let Some(emptiest) = (0..gpus.len()).min_by_key(|&number| gpus[number].used) else {
        return false;
    };
    let from = gpus.swap_remove(emptiest);
    let mut moving = from.slices.clone();
    moving.sort_by_key(|one| std::cmp::Reverse(gpu.slices[one.kind].memory_slices));
    let mut moved: Vec<usize> = Vec::new();
    for one in moving {
        let room = (0..gpus.len()).filter(|&number| rooms.has(&gpus[number], one.kind));
        let Some(fullest) = room.max_by_key(|&number| gpus[number].used) else {
            moved.into_iter().rev().for_each(|number| gpus[number].pop(gpu));
            gpus.push(from);
            return false;
        };
        gpus[fullest].push(gpu, one);
        moved.push(fullest);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PlanRules, Profiles, check, scenario};

    #[test]
    fn fragmentation_counts_places_that_are_cut() {
        let gpu = GpuKind::find("a100-80gb").unwrap();
        assert_eq!(Occupancy::default().fragmentation(gpu), 0);
        let one = gpu.slices.iter().find(|slice| slice.name == "1g.10gb").unwrap();
        // At 0 it cuts the first 3g, the 4g and a 2g; at 6 only the last 3g and 2g.
        let at = |start| Occupancy::default().with(gpu, one, start).unwrap().fragmentation(gpu);
        assert!(at(6) < at(0), "{} {}", at(6), at(0));
        let full = Occupancy { memory: 0xff, gpcs: 7 };
        assert_eq!(full.fragmentation(gpu), 0);
    }

    #[test]
    fn plans_follow_the_rules_and_repartitioning_needs_no_more_gpus() {
        let columns = "model,mig_gpcs,batch,procs,throughput_total_rps,latency_ms\n";
        let mut text = columns.to_string();
        let services = scenario::services(5);
        for service in &services {
            for gpcs in [1u32, 2, 3, 4, 7] {
                let rate = f64::from(gpcs).powf(0.9) * 150.0;
                text += &format!("{},{gpcs},4,1,{rate},5\n", service.model);
            }
        }
        let problem = Problem {
            gpu: GpuKind::find("a100-80gb").unwrap(),
            services,
            profiles: Profiles::from_csv(&text).unwrap(),
            rules: PlanRules::default(),
        };
        let (problem, _) = problem.without_faults().unwrap();
        let placed = least_fragmentation_like(&problem).unwrap();
        let moved = repartitioning_like(&problem).unwrap();
        for plan in [&placed, &moved] {
            assert!(check(&problem, plan).is_empty(), "{:?}", check(&problem, plan));
            assert!(plan.gpus.iter().all(|gpu| !gpu.slices.is_empty()));
        }
        assert_eq!(placed.slice_count(), moved.slice_count());
        assert!(moved.gpus.len() <= placed.gpus.len());
    }
}
