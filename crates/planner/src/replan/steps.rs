//! An ordered transition from one plan to another in which no service loses capacity it needs.
//!
//! New slices are created on free slots, and old ones are removed once their services do not need
//! them. If these depend on each other, a temporary copy (shadow) of an old slice runs on a spare
//! GPU meanwhile.

use std::collections::BTreeMap;

use crate::gpu::KINDS_MAX;
use crate::plan::{Plan, PlannedGpu, PlannedSlice};
use crate::problem::Problem;

/// One step.
#[derive(Clone, Debug, PartialEq)]
pub enum TransitionStep {
    /// Create a slice and load its services.
    Create {
        /// GPU number; those beyond the plan are spare.
        gpu: usize,
        /// The slice with its services.
        slice: PlannedSlice,
        /// Whether it is a shadow.
        shadow: bool,
    },
    /// Change the rates of a slice's services.
    Route {
        /// GPU number.
        gpu: usize,
        /// The slice with its new rates.
        slice: PlannedSlice,
    },
    /// Drain and destroy a slice.
    Destroy {
        /// GPU number.
        gpu: usize,
        /// The slice as it was.
        slice: PlannedSlice,
    },
}

/// GPU and start of a slice.
type SliceAddress = (usize, u8);

/// Numbers the GPUs of `target` so that as many slices as possible are unchanged.
///
/// Equal GPUs are matched first; the rest by least cost of changes, exactly where few are left.
pub fn align(current: &Plan, target: &Plan) -> Plan {
    let mut remaining: Vec<usize> = (0..current.gpus.len()).collect();
    let mut open: Vec<usize> = (0..target.gpus.len()).collect();
    let mut assigned: BTreeMap<usize, usize> = BTreeMap::new();
    let mut known: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    remaining.iter().rev().for_each(|&gpu| {
        known.entry(signature(&current.gpus[gpu])).or_default().push(gpu);
    });
    open.retain(|&new| {
        let old = known.get_mut(&signature(&target.gpus[new])).and_then(Vec::pop);
        old.map(|old| assigned.insert(old, new)).is_none()
    });
    remaining.retain(|old| !assigned.contains_key(old));
    let cost = |old: usize, new: usize| -stays(&current.gpus[old], &target.gpus[new]);
    if open.len().max(remaining.len()) <= 300 {
        for (row, column) in assign(open.len(), remaining.len(), |n, o| cost(remaining[o], open[n]))
        {
            assigned.insert(remaining[column], open[row]);
        }
    } else {
        for (new, old) in open.iter().zip(&remaining) {
            assigned.insert(*old, *new);
        }
    }
    let mut plan = Plan { gpus: vec![PlannedGpu::default(); current.gpus.len()] };
    let mut placed = vec![false; target.gpus.len()];
    for (old, new) in assigned {
        plan.gpus[old] = target.gpus[new].clone();
        placed[new] = true;
    }
    let rest = target.gpus.iter().zip(placed).filter(|(_, placed)| !placed);
    plan.gpus.extend(rest.map(|(gpu, _)| gpu.clone()));
    plan
}

fn signature(gpu: &PlannedGpu) -> String {
    let slice = |slice: &PlannedSlice| {
        let mut services: Vec<usize> = slice.shares.iter().map(|share| share.service).collect();
        services.sort_unstable();
        format!("{}@{}:{services:?};", slice.kind, slice.start)
    };
    gpu.slices.iter().map(slice).collect()
}

/// Number of unchanged slices; those that only keep their geometry count a little less.
fn stays(old: &PlannedGpu, new: &PlannedGpu) -> f64 {
    let mut sum = 0.0;
    for slice in &new.slices {
        let same = old.slices.iter().find(|o| (o.start, o.kind) == (slice.start, slice.kind));
        if let Some(same) = same {
            sum += if same_work(same, slice) { 1.0 } else { 0.3 };
        }
    }
    sum
}

pub(super) fn same_work(a: &PlannedSlice, b: &PlannedSlice) -> bool {
    let key = |slice: &PlannedSlice| {
        let mut work: Vec<(usize, u32, u32)> =
            slice.shares.iter().map(|s| (s.service, s.batch, s.processes)).collect();
        work.sort_unstable();
        (slice.kind, slice.start, slice.cycle_ms.map(f64::to_bits), work)
    };
    key(a) == key(b)
}

/// Whether no rate differs by more than rounding.
fn same_rates(a: &PlannedSlice, b: &PlannedSlice) -> bool {
    a.shares.len() == b.shares.len()
        && a.shares.iter().zip(&b.shares).all(|(a, b)| {
            a.service == b.service && (a.rate - b.rate).abs() <= 1e-6 * a.rate.max(b.rate)
        })
}

/// Least-cost assignment of rows to columns (Kuhn and Munkres with potentials); with fewer columns
/// than rows, some rows are unassigned.
fn assign(rows: usize, columns: usize, cost: impl Fn(usize, usize) -> f64) -> Vec<(usize, usize)> {
    let size = rows.max(columns);
    let cost = |row: usize, column: usize| {
        if row < rows && column < columns { cost(row, column) } else { 0.0 }
    };
    let (mut u, mut v) = (vec![0.0; size + 1], vec![0.0; size + 1]);
    let (mut of_column, mut predecessor) = (vec![0usize; size + 1], vec![0usize; size + 1]);
    for row in 1..=size {
        of_column[0] = row;
        let mut column = 0;
        let mut least = vec![f64::INFINITY; size + 1];
        let mut used = vec![false; size + 1];
        while of_column[column] != 0 {
            used[column] = true;
            let (at, mut delta, mut next) = (of_column[column], f64::INFINITY, 0);
            for other in 1..=size {
                if used[other] {
                    continue;
                }
                let reduced = cost(at - 1, other - 1) - u[at] - v[other];
                if reduced < least[other] {
                    (least[other], predecessor[other]) = (reduced, column);
                }
                if least[other] < delta {
                    (delta, next) = (least[other], other);
                }
            }
            for other in 0..=size {
                if used[other] {
                    u[of_column[other]] += delta;
                    v[other] -= delta;
                } else {
                    least[other] -= delta;
                }
            }
            column = next;
        }
        while column != 0 {
            of_column[column] = of_column[predecessor[column]];
            column = predecessor[column];
        }
    }
    (1..=size)
        .filter(|&column| of_column[column] <= rows && column <= columns)
        .map(|column| (of_column[column] - 1, column - 1))
        .collect()
}

struct Transition<'a> {
    problem: &'a Problem,
    live: BTreeMap<SliceAddress, PlannedSlice>,
    capacity: Vec<f64>,
    floor: Vec<f64>,
    steps: Vec<TransitionStep>,
}

/// The steps from `current` to `target`, whose GPUs have the same numbers.
pub fn steps(problem: &Problem, current: &Plan, target: &Plan) -> Vec<TransitionStep> {
    let addresses = |plan: &Plan| -> BTreeMap<SliceAddress, PlannedSlice> {
        let of = |(number, gpu): (usize, &PlannedGpu)| {
            gpu.slices.iter().map(move |s| ((number, s.start), s.clone())).collect::<Vec<_>>()
        };
        plan.gpus.iter().enumerate().flat_map(of).collect()
    };
    let (live, wanted) = (addresses(current), addresses(target));
    let mut transition = Transition {
        problem,
        capacity: vec![0.0; problem.services.len()],
        floor: Vec::new(),
        live: BTreeMap::new(),
        steps: Vec::new(),
    };
    for (address, slice) in live {
        transition.insert(address, slice);
    }
    // A service keeps the capacity it needs, or what it has if that is already less.
    transition.floor = (problem.services.iter().zip(&transition.capacity))
        .map(|(service, capacity)| service.demand(&problem.rules).min(*capacity))
        .collect();
    let mut old: Vec<SliceAddress> = Vec::new();
    for (address, slice) in &transition.live {
        if !wanted.get(address).is_some_and(|new| same_work(slice, new)) {
            old.push(*address);
        }
    }
    let mut new: Vec<(SliceAddress, PlannedSlice)> = Vec::new();
    for (address, slice) in wanted.clone() {
        if !transition.live.get(&address).is_some_and(|old| same_work(old, &slice)) {
            new.push((address, slice));
        }
    }
    let shadows =
        transition.exchange(&mut old, &mut new, target.gpus.len().max(current.gpus.len()));
    for (address, slice) in wanted {
        if transition.live.get(&address).is_some_and(|now| !same_rates(now, &slice)) {
            transition.steps.push(TransitionStep::Route { gpu: address.0, slice });
        }
    }
    for address in shadows {
        transition.destroy(address);
    }
    transition.steps
}

impl Transition<'_> {
    fn capacity_of(&self, slice: &PlannedSlice, service: usize) -> f64 {
        let facts = &self.problem.gpu.slices[slice.kind];
        let model = &self.problem.services[service].model;
        let points = self.problem.profiles.points(model).unwrap_or_default();
        let of = |share: &crate::plan::ServiceShare| match slice.cycle_ms {
            Some(_) => share.rate,
            None => points
                .iter()
                .find(|point| {
                    (point.gpcs, point.batch, point.processes)
                        == (facts.gpcs, share.batch, share.processes)
                })
                .map_or(share.rate, |point| point.throughput),
        };
        slice.shares.iter().filter(|share| share.service == service).map(of).sum()
    }

    fn insert(&mut self, address: SliceAddress, slice: PlannedSlice) {
        for share in &slice.shares {
            self.capacity[share.service] += self.capacity_of(&slice, share.service);
        }
        self.live.insert(address, slice);
    }

    fn create(&mut self, address: SliceAddress, slice: PlannedSlice, shadow: bool) {
        self.steps.push(TransitionStep::Create { gpu: address.0, slice: slice.clone(), shadow });
        self.insert(address, slice);
    }

    fn destroy(&mut self, address: SliceAddress) {
        if let Some(slice) = self.live.remove(&address) {
            for share in &slice.shares {
                self.capacity[share.service] -= self.capacity_of(&slice, share.service);
            }
            self.steps.push(TransitionStep::Destroy { gpu: address.0, slice });
        }
    }

    fn has_room(&self, address: SliceAddress, kind: usize) -> bool {
        let mask = |slice: &PlannedSlice| self.problem.gpu.slices[slice.kind].mask(slice.start);
        let mine = self.problem.gpu.slices[kind].mask(address.1);
        let on_gpu = self.live.range((address.0, 0)..=(address.0, u8::MAX));
        on_gpu.map(|(_, slice)| mask(slice)).all(|other| other & mine == 0)
    }

    fn dispensable(&self, address: SliceAddress) -> bool {
        let Some(slice) = self.live.get(&address) else { return true };
        slice.shares.iter().all(|share| {
            let service = share.service;
            let rest = self.capacity[service] - self.capacity_of(slice, service);
            rest >= self.floor[service] * (1.0 - 1e-9)
        })
    }

    /// Creates new slices and removes old ones; returns the addresses of remaining shadows.
    fn exchange(
        &mut self,
        old: &mut Vec<SliceAddress>,
        new: &mut Vec<(SliceAddress, PlannedSlice)>,
        first_spare: usize,
    ) -> Vec<SliceAddress> {
        let mut shadows = Vec::new();
        while !old.is_empty() || !new.is_empty() {
            let before = (old.len(), new.len());
            let mut waiting = Vec::new();
            for (address, slice) in std::mem::take(new) {
                if self.has_room(address, slice.kind) {
                    self.create(address, slice, false);
                } else {
                    waiting.push((address, slice));
                }
            }
            *new = waiting;
            old.retain(|address| {
                let gone = self.dispensable(*address);
                if gone {
                    self.destroy(*address);
                }
                !gone
            });
            if (old.len(), new.len()) == before {
                let Some(address) = old.pop() else { break };
                if let Some(slice) = self.live.get(&address).cloned() {
                    let spare = self.spare(&slice, first_spare);
                    self.create((spare, slice.start), slice, true);
                    shadows.push((spare, address.1));
                }
                self.destroy(address);
            }
        }
        shadows
    }

    fn spare(&self, slice: &PlannedSlice, first: usize) -> usize {
        let mut gpu = first;
        while !self.has_room((gpu, slice.start), slice.kind) {
            gpu += 1;
        }
        gpu
    }
}

/// Replays steps and reports those that are illegal or take capacity a service needs, and whether
/// `target` is reached.
pub fn replay(
    problem: &Problem,
    current: &Plan,
    target: &Plan,
    steps: &[TransitionStep],
) -> Vec<String> {
    let mut transition = Transition {
        problem,
        live: BTreeMap::new(),
        capacity: vec![0.0; problem.services.len()],
        floor: Vec::new(),
        steps: Vec::new(),
    };
    let mut wrong = Vec::new();
    for (number, gpu) in current.gpus.iter().enumerate() {
        gpu.slices.iter().for_each(|slice| transition.insert((number, slice.start), slice.clone()));
    }
    let start = transition.capacity.clone();
    for (index, step) in steps.iter().enumerate() {
        match step {
            TransitionStep::Create { gpu, slice, .. } => {
                if !transition.has_room((*gpu, slice.start), slice.kind) {
                    wrong.push(format!("step {index}: no free slots on gpu {gpu}"));
                }
                transition.create((*gpu, slice.start), slice.clone(), false);
            }
            TransitionStep::Route { gpu, slice } => {
                transition.destroy((*gpu, slice.start));
                transition.insert((*gpu, slice.start), slice.clone());
            }
            TransitionStep::Destroy { gpu, slice } => transition.destroy((*gpu, slice.start)),
        }
        for (service, capacity) in transition.capacity.iter().enumerate() {
            let needed = problem.services[service].demand(&problem.rules).min(start[service]);
            if *capacity < needed * (1.0 - 1e-6) {
                let name = &problem.services[service].name;
                wrong.push(format!("step {index}: '{name}' has {capacity} of {needed}"));
            }
        }
    }
    let reached: usize = target.gpus.iter().map(|gpu| gpu.slices.len()).sum();
    if transition.live.len() != reached {
        wrong.push(format!("{} slices stand, not {reached}", transition.live.len()));
    }
    debug_assert!(KINDS_MAX >= problem.gpu.slices.len());
    wrong
}
