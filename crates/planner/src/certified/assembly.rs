//! Assigns filled slices to GPUs and starts.

use super::packing::{Packed, PatternPacker};
use crate::gpu::{GpuKind, KINDS_MAX, SliceCounts};
use crate::plan::{Plan, PlannedGpu, PlannedSlice, ServiceShare};
use crate::problem::{Problem, ServiceDemand};

/// Contents of a slice that is not on a GPU yet.
#[derive(Clone, Debug)]
pub(crate) struct SliceContents {
    pub(crate) kind: usize,
    pub(crate) cycle_ms: Option<f64>,
    pub(crate) shares: Vec<ServiceShare>,
}

/// The slices of a service's cover, each with its share of the rate.
pub(crate) fn units_of(
    problem: &Problem,
    demand: &ServiceDemand,
    service: usize,
    cover: &SliceCounts,
    rate: f64,
    units: &mut Vec<SliceContents>,
) {
    let points = problem.profiles.points(&problem.services[service].model).unwrap_or_default();
    let capacity: f64 =
        (0..KINDS_MAX).map(|kind| f64::from(cover[kind]) * demand.throughput[kind]).sum();
    let part = (rate / capacity).min(1.0);
    for kind in 0..KINDS_MAX {
        for _ in 0..cover[kind] {
            let point = &points[demand.point[kind] as usize];
            units.push(SliceContents {
                kind,
                cycle_ms: None,
                shares: vec![ServiceShare {
                    service,
                    batch: point.batch,
                    processes: point.processes,
                    rate: point.throughput * part,
                }],
            });
        }
    }
}

/// Puts every slice into a slot of the packed patterns.
pub(crate) fn assemble(
    gpu: &GpuKind,
    packer: &PatternPacker,
    packed: &Packed,
    units: Vec<SliceContents>,
) -> Plan {
    let mut by_kind: [Vec<SliceContents>; KINDS_MAX] = std::array::from_fn(|_| Vec::new());
    for unit in units.into_iter().rev() {
        by_kind[unit.kind].push(unit);
    }
    let mut plan = Plan::default();
    for (pattern, &copies) in packer.patterns.iter().zip(packed) {
        let places =
            if copies > 0 { gpu.place(pattern, 0).unwrap_or_default() } else { Vec::new() };
        for _ in 0..copies {
            let mut slices = Vec::with_capacity(places.len());
            for &(kind, start) in &places {
                if let Some(SliceContents { cycle_ms, shares, .. }) = by_kind[kind].pop() {
                    slices.push(PlannedSlice { kind, start, cycle_ms, shares });
                }
            }
            if !slices.is_empty() {
                slices.sort_by_key(|slice| slice.start);
                plan.gpus.push(PlannedGpu { slices });
            }
        }
    }
    plan
}
