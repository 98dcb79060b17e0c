//! ParvaGPU (SC'24) as published: triplet decision, demand matching, segment relocation, allocation
//! optimisation.
//!
//! The published maps come out of the authors' own program, which differs from the paper's listings
//! in a few places: a segment goes to the GPU on which it leaves the fewest free slots (not the
//! first that fits), SLOs are cut to whole milliseconds, and optimisation places the small segments
//! of one freed segment before it frees the next. This code follows the program, because it must
//! reproduce the maps. It does not follow the slots: the authors' labels overlap, so each GPU's
//! multiset of segments gets legal starts at the end, by the preferences of section III.E.

use crate::error::PlanError;
use crate::gpu::{GpuKind, KINDS_MAX};
use crate::plan::{Plan, PlannedGpu, PlannedSlice, ServiceShare};
use crate::problem::{Problem, Service};
use crate::profile::OperatingPoint;

/// The published algorithm or one of its two variants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParvaGpuVariant {
    /// All stages.
    Full,
    /// ParvaGPU-single: one process per segment.
    WithoutMps,
    /// ParvaGPU-unoptimized: no allocation optimisation.
    WithoutOptimisation,
}

/// The optimisation splits GPUs with at most this many compute slices in use.
const FRAGMENTED: u8 = 4;

/// Instance sizes; a segment's size is an index into these.
const SIZES: [u8; 5] = [1, 2, 3, 4, 7];

/// Result of the configurator for one service.
struct Configured {
    rate: f32,
    /// Best point of each size.
    triplets: [Option<OperatingPoint>; SIZES.len()],
    /// Size with the highest throughput per compute slice.
    optimal: usize,
    optimal_count: usize,
    last: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Segment {
    service: usize,
    size: usize,
}

/// A GPU under allocation; the slot is the authors' label, which decides only the order of visits.
#[derive(Clone, Debug, Default)]
struct GpuSlots {
    used: u8,
    slots: [Option<Segment>; 7],
}

/// Plans with ParvaGPU's algorithm.
pub fn plan(problem: &Problem, variant: ParvaGpuVariant) -> Result<Plan, PlanError> {
    problem.validate()?;
    if problem.gpu.gpcs != 7 {
        return Err(PlanError::Unsupported {
            algorithm: "parvagpu",
            what: "it is defined for gpus of seven compute slices".to_string(),
        });
    }
    let configured = problem
        .services
        .iter()
        .map(|service| configure(problem, service, variant))
        .collect::<Result<Vec<_>, _>>()?;
    let mut gpus = Vec::new();
    relocate(&configured, &mut gpus);
    if variant != ParvaGpuVariant::WithoutOptimisation {
        optimise(&configured, &mut gpus);
    }
    gpus.retain(|gpu| gpu.used > 0);
    deploy(problem, &configured, &gpus)
}

fn configure(
    problem: &Problem,
    service: &Service,
    variant: ParvaGpuVariant,
) -> Result<Configured, PlanError> {
    let triplets = decide_triplets(problem, service, variant);
    let rate = service.demand(&problem.rules) as f32;
    let throughput = |size: usize| triplets[size].as_ref().map_or(0.0, |p| p.throughput as f32);
    let mut optimal = None;
    for size in 0..SIZES.len() {
        let ratio = |size: usize| throughput(size) / f32::from(SIZES[size]);
        if throughput(size) > 0.0 && optimal.is_none_or(|best| ratio(size) > ratio(best)) {
            optimal = Some(size);
        }
    }
    let Some(optimal) = optimal else {
        let what = format!("service '{}' has no triplet", service.name);
        return Err(PlanError::Unsupported { algorithm: "parvagpu", what });
    };
    let mut optimal_count = (rate / throughput(optimal)).floor() as usize;
    if rate % throughput(optimal) == 0.0 {
        optimal_count -= 1;
    }
    let remaining = rate - throughput(optimal) * optimal_count as f32;
    // The optimal size always suffices for the remaining rate.
    let last = (0..SIZES.len()).find(|&size| remaining <= throughput(size)).unwrap_or(optimal);
    Ok(Configured { rate, triplets, optimal, optimal_count, last })
}

fn decide_triplets(
    problem: &Problem,
    service: &Service,
    variant: ParvaGpuVariant,
) -> [Option<OperatingPoint>; SIZES.len()] {
    let limit_ms = (service.slo_ms.floor() as f32 / 2.0) * problem.rules.slo_share as f32;
    let points = problem.profiles.points(&service.model).unwrap_or_default();
    std::array::from_fn(|size| {
        let mut best: Option<&OperatingPoint> = None;
        let usable = |point: &&OperatingPoint| {
            point.gpcs == SIZES[size]
                && (point.latency_ms as f32) < limit_ms
                && point.processes <= problem.rules.processes_max
                && (variant != ParvaGpuVariant::WithoutMps || point.processes == 1)
        };
        for point in points.iter().filter(usable) {
            if best.is_none_or(|best| point.throughput as f32 > best.throughput as f32) {
                best = Some(point);
            }
        }
        best.cloned()
    })
}

impl Configured {
    fn throughput(&self, size: usize) -> f32 {
        self.triplets[size].as_ref().map_or(0.0, |point| point.throughput as f32)
    }
}

fn relocate(configured: &[Configured], gpus: &mut Vec<GpuSlots>) {
    let mut segments = Vec::new();
    for (service, found) in configured.iter().enumerate() {
        let optimal = Segment { service, size: found.optimal };
        segments.extend(std::iter::repeat_n(optimal, found.optimal_count));
        segments.push(Segment { service, size: found.last });
    }
    allocate(segments, gpus);
}

/// Largest first; within a size in the order given.
fn allocate(mut segments: Vec<Segment>, gpus: &mut Vec<GpuSlots>) {
    segments.sort_by_key(|segment| std::cmp::Reverse(SIZES[segment.size]));
    for segment in segments {
        let size = SIZES[segment.size];
        let best = (0..gpus.len())
            .filter(|&index| gpus[index].takes(size))
            .min_by_key(|&index| 7 - gpus[index].used - size);
        let index = best.unwrap_or_else(|| {
            gpus.push(GpuSlots::default());
            gpus.len() - 1
        });
        gpus[index].put(segment);
    }
}

impl GpuSlots {
    /// Whether a segment of `size` compute slices fits here: slots are free, and threes start only
    /// at slot 4.
    fn takes(&self, size: u8) -> bool {
        let three_at_4 = self.slots[4].is_some_and(|segment| SIZES[segment.size] == 3);
        self.used + size <= 7 && self.label(size).is_some() && !(size == 3 && three_at_4)
    }

    /// The first free label in the authors' order.
    fn label(&self, size: u8) -> Option<usize> {
        let order: &[usize] = match size {
            3 => &[4],
            2 => &[0, 4, 2],
            1 => &[0, 6, 4, 1, 2, 3, 5],
            _ => &[0],
        };
        order.iter().copied().find(|&slot| self.slots[slot].is_none())
    }

    fn put(&mut self, segment: Segment) {
        let size = SIZES[segment.size];
        if let Some(slot) = self.label(size) {
            self.slots[slot] = Some(segment);
            self.used += size;
        }
    }
}

/// Splits segments of fragmented GPUs, from the last GPU on, into small ones that fill free slots.
fn optimise(configured: &[Configured], gpus: &mut Vec<GpuSlots>) {
    let mut freed = vec![0f32; configured.len()];
    for index in (0..gpus.len()).rev() {
        if gpus[index].used > FRAGMENTED {
            continue;
        }
        for slot in 0..7 {
            let Some(segment) = gpus[index].slots[slot].take() else { continue };
            let found = &configured[segment.service];
            gpus[index].used -= SIZES[segment.size];
            let is_optimal = segment.size == found.optimal;
            let size = if is_optimal { found.optimal } else { found.last };
            freed[segment.service] += found.throughput(size);
            let small = small_segments(found, segment.service, &mut freed[segment.service]);
            allocate(small, gpus);
        }
    }
}

fn small_segments(found: &Configured, service: usize, freed: &mut f32) -> Vec<Segment> {
    let (one, two) = (found.throughput(0), found.throughput(1));
    let mut segments = Vec::new();
    let mut take = |size: usize, count: f32, freed: &mut f32| {
        for _ in 0..count.max(0.0) as usize {
            segments.push(Segment { service, size });
            *freed -= found.throughput(size);
        }
    };
    match (one > 0.0, two > 0.0) {
        (false, false) => {}
        (true, false) => take(0, (*freed / one).ceil(), freed),
        (false, true) => take(1, (*freed / two).ceil(), freed),
        (true, true) => {
            if two / 2.0 > one {
                take(1, (*freed / two).floor(), freed);
            }
            take(0, (*freed / one).ceil(), freed);
        }
    }
    segments
}

/// Legal starts for every GPU, and rates up to each service's demand.
fn deploy(
    problem: &Problem,
    configured: &[Configured],
    gpus: &[GpuSlots],
) -> Result<Plan, PlanError> {
    let mut remaining: Vec<f64> =
        problem.services.iter().map(|s| s.demand(&problem.rules)).collect();
    let mut plan = Plan::default();
    for gpu in gpus {
        let mut segments: Vec<Segment> = gpu.slots.iter().flatten().copied().collect();
        segments.sort_by_key(|segment| std::cmp::Reverse(segment.size));
        let starts = starts(problem.gpu, &segments).ok_or_else(|| PlanError::Unsupported {
            algorithm: "parvagpu",
            what: "its segments have no legal placement".to_string(),
        })?;
        let mut slices = Vec::new();
        for (segment, (kind, start)) in segments.iter().zip(starts) {
            let Some(point) = &configured[segment.service].triplets[segment.size] else { continue };
            let rate = remaining[segment.service].min(point.throughput);
            remaining[segment.service] -= rate;
            let OperatingPoint { batch, processes, .. } = *point;
            let share = ServiceShare { service: segment.service, batch, processes, rate };
            slices.push(PlannedSlice { kind, start, cycle_ms: None, shares: vec![share] });
        }
        slices.sort_by_key(|slice| slice.start);
        plan.gpus.push(PlannedGpu { slices });
    }
    debug_assert!(configured.iter().all(|found| found.rate > 0.0));
    Ok(plan)
}

/// Starts by section III.E, in the order of `segments`, which is largest first.
fn starts(gpu: &GpuKind, segments: &[Segment]) -> Option<Vec<(usize, u8)>> {
    let mut counts = [0; KINDS_MAX];
    for segment in segments {
        counts[gpu.kind_of_size(SIZES[segment.size])?] += 1;
    }
    gpu.place(&counts, 0)
}
