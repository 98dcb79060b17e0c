//! Planners that ParvaGPU's paper compares with, and later ones, as far as the papers define them
//! (hence "like").
//!
//! gpulet and iGniter divide a GPU by MPS shares, not by MIG, so the first two give shares of GPUs
//! and no MIG plan. The measured slice sizes stand in for shares of the same number of compute
//! slices; interference is not modelled.

mod fragmentation;

use crate::error::PlanError;
use crate::gpu::{KINDS_MAX, SliceCounts};
use crate::plan::{Plan, PlannedGpu, PlannedSlice, ServiceShare};
use crate::problem::{Problem, ServiceDemand};

pub use self::fragmentation::{least_fragmentation_like, repartitioning_like};

/// Parts of one GPU: service and compute slices.
pub type MpsGpu = Vec<(usize, u8)>;

/// gpulet-like: at most two services a GPU, the second one takes all that the first does not use.
pub fn gpulet_like(problem: &Problem) -> Result<Vec<MpsGpu>, PlanError> {
    problem.validate()?;
    let demands = problem.demands();
    let mut gpus: Vec<MpsGpu> = Vec::new();
    for (service, demand) in demands.iter().enumerate() {
        let mut remaining = demand.rate;
        while remaining > demand.rate * 1e-9 {
            // A GPU with one service whose remainder suffices; otherwise the smallest sufficient
            // part of a new GPU.
            let rest = |gpu: &MpsGpu| problem.gpu.gpcs - gpu.iter().map(|part| part.1).sum::<u8>();
            let half = gpus.iter_mut().find(|gpu| {
                gpu.len() == 1
                    && within(problem, demand, rest(gpu)) >= remaining.min(best(demand) * 0.25)
            });
            if let Some(gpu) = half {
                let size = rest(gpu);
                remaining -= within(problem, demand, size);
                gpu.push((service, size));
                continue;
            }
            let size = smallest(problem, demand, remaining).unwrap_or(problem.gpu.gpcs);
            remaining -= within(problem, demand, size);
            gpus.push(vec![(service, size)]);
        }
    }
    Ok(gpus)
}

/// iGniter-like: the smallest share that suffices plus one compute slice against interference,
/// first fit; a service that needs more than a GPU cannot be planned.
pub fn igniter_like(problem: &Problem) -> Result<Vec<MpsGpu>, PlanError> {
    problem.validate()?;
    let mut gpus: Vec<MpsGpu> = Vec::new();
    for (service, demand) in problem.demands().iter().enumerate() {
        let size =
            smallest(problem, demand, demand.rate).ok_or_else(|| PlanError::Unsupported {
                algorithm: "igniter-like",
                what: format!("'{}' needs more than a gpu", problem.services[service].name),
            })?;
        let size = (size + 1).min(problem.gpu.gpcs);
        let used = |gpu: &MpsGpu| gpu.iter().map(|part| part.1).sum::<u8>();
        match gpus.iter_mut().find(|gpu| used(gpu) + size <= problem.gpu.gpcs) {
            Some(gpu) => gpu.push((service, size)),
            None => gpus.push(vec![(service, size)]),
        }
    }
    Ok(gpus)
}

/// Throughput within a share: that of the largest measured slice that fits it.
fn within(problem: &Problem, demand: &ServiceDemand, gpcs: u8) -> f64 {
    let fits = |kind: &usize| problem.gpu.slices[*kind].gpcs <= gpcs;
    (0..problem.gpu.slices.len()).filter(fits).map(|k| demand.throughput[k]).fold(0.0, f64::max)
}

fn best(demand: &ServiceDemand) -> f64 {
    demand.throughput.iter().copied().fold(0.0, f64::max)
}

fn smallest(problem: &Problem, demand: &ServiceDemand, rate: f64) -> Option<u8> {
    (1..=problem.gpu.gpcs).find(|&gpcs| within(problem, demand, gpcs) >= rate * (1.0 - 1e-9))
}

/// MIG-serving-like, its fast algorithm: one GPU after the other gets the pattern, and each slot
/// the service, that serves most of the missing rate. One process per slice.
pub fn mig_serving_like(problem: &Problem) -> Result<Plan, PlanError> {
    let mut single = problem.clone();
    single.rules.processes_max = 1;
    single.validate()?;
    let demands = single.demands();
    let patterns = problem.gpu.maximal_patterns();
    let mut remaining: Vec<f64> = demands.iter().map(|demand| demand.rate).collect();
    let mut plan = Plan::default();
    while remaining.iter().zip(&demands).any(|(remaining, demand)| *remaining > demand.rate * 1e-9)
    {
        let fills = patterns.iter().map(|pattern| fill(pattern, &demands, &remaining));
        let best = fills.zip(&patterns).max_by(|a, b| a.0.score.total_cmp(&b.0.score));
        let Some((fill, _)) = best else { break };
        let mut counts: SliceCounts = [0; KINDS_MAX];
        fill.slots.iter().for_each(|(kind, _)| counts[*kind] += 1);
        let Some(places) = problem.gpu.place(&counts, 0) else { break };
        let mut slots = fill.slots;
        let mut slices = Vec::new();
        for (kind, start) in places {
            let Some(at) = slots.iter().position(|slot| slot.0 == kind) else { continue };
            let (_, service) = slots.swap_remove(at);
            let points = problem.profiles.points(&problem.services[service].model);
            let point = &points.unwrap_or_default()[demands[service].point[kind] as usize];
            let rate = remaining[service].min(point.throughput);
            remaining[service] -= rate;
            let share =
                ServiceShare { service, batch: point.batch, processes: point.processes, rate };
            slices.push(PlannedSlice { kind, start, cycle_ms: None, shares: vec![share] });
        }
        slices.sort_by_key(|slice| slice.start);
        plan.gpus.push(PlannedGpu { slices });
    }
    Ok(plan)
}

struct MpsFill {
    score: f64,
    slots: Vec<(usize, usize)>,
}

fn fill(pattern: &SliceCounts, demands: &[ServiceDemand], remaining: &[f64]) -> MpsFill {
    let mut remaining = remaining.to_vec();
    let mut fill = MpsFill { score: 0.0, slots: Vec::new() };
    for kind in (0..KINDS_MAX).rev() {
        for _ in 0..pattern[kind] {
            let gain = |service: usize| {
                remaining[service].min(demands[service].throughput[kind]) / demands[service].rate
            };
            let best = (0..demands.len()).max_by(|&a, &b| gain(a).total_cmp(&gain(b)));
            let Some(service) = best.filter(|&service| gain(service) > 0.0) else { continue };
            fill.score += gain(service);
            remaining[service] -= remaining[service].min(demands[service].throughput[kind]);
            fill.slots.push((kind, service));
        }
    }
    fill
}
