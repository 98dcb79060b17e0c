//! A plan: the slices of each GPU and the services that run in them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::PlanError;
use crate::gpu::{GpuKind, SliceKind};
use crate::problem::Problem;

/// A service's share of a slice.
#[derive(Clone, Debug, PartialEq)]
pub struct ServiceShare {
    /// Index of the service in the problem.
    pub service: usize,
    /// Batch size of a process.
    pub batch: u32,
    /// Number of processes.
    pub processes: u32,
    /// Requests per second routed to it.
    pub rate: f64,
}

/// One slice of a GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedSlice {
    /// Index into the GPU kind's slices.
    pub kind: usize,
    /// First memory slice.
    pub start: u8,
    /// Length of the duty cycle in milliseconds if several services share the slice.
    pub cycle_ms: Option<f64>,
    /// Services that run in it.
    pub shares: Vec<ServiceShare>,
}

/// One GPU.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlannedGpu {
    /// Its slices, by start.
    pub slices: Vec<PlannedSlice>,
}

/// A whole plan.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// The GPUs in use.
    pub gpus: Vec<PlannedGpu>,
}

impl Plan {
    /// Slices that have work, over all GPUs.
    pub fn slice_count(&self) -> usize {
        self.gpus.iter().map(|gpu| gpu.slices.len()).sum()
    }

    /// GPUs that have work.
    pub fn used_gpus(&self) -> usize {
        self.gpus.iter().filter(|gpu| !gpu.slices.is_empty()).count()
    }

    /// The plan with names in place of indices, for files.
    pub fn to_file(&self, problem: &Problem) -> Vec<GpuFile> {
        let share = |share: &ServiceShare| ShareFile {
            name: problem.services[share.service].name.clone(),
            model: problem.services[share.service].model.clone(),
            batch: share.batch,
            processes: share.processes,
            rate: share.rate,
        };
        let slice = |slice: &PlannedSlice| SliceFile {
            start: slice.start,
            size: problem.gpu.slices[slice.kind].gpcs,
            profile: problem.gpu.slices[slice.kind].name.to_string(),
            cycle_ms: slice.cycle_ms,
            services: slice.shares.iter().map(share).collect(),
        };
        self.gpus
            .iter()
            .map(|gpu| GpuFile { slices: gpu.slices.iter().map(slice).collect() })
            .collect()
    }

    /// Reads the plan of a file for `problem`. Shares of unknown services are dropped; an illegal
    /// plan is an error.
    pub fn from_file(problem: &Problem, gpus: &[GpuFile]) -> Result<Plan, PlanError> {
        let index: BTreeMap<&str, usize> =
            problem.services.iter().enumerate().map(|(i, s)| (s.name.as_str(), i)).collect();
        let mut plan = Plan::default();
        for (number, gpu) in gpus.iter().enumerate() {
            let mut occupied = 0u16;
            let mut slices = Vec::new();
            for (place, slice) in gpu.slices.iter().enumerate() {
                let bad = |what: &str| PlanError::BadSlice {
                    gpu: number,
                    place,
                    start: slice.start,
                    what: what.to_string(),
                };
                let kind = slice.kind_of(problem.gpu).ok_or_else(|| {
                    let SliceFile { profile, size, .. } = slice;
                    bad(&format!("this gpu has no profile '{profile}' of size {size}"))
                })?;
                let facts = &problem.gpu.slices[kind];
                if !facts.starts.contains(&slice.start) {
                    return Err(bad("it may not start there"));
                }
                if occupied & facts.mask(slice.start) != 0 {
                    return Err(bad("it overlaps another"));
                }
                occupied |= facts.mask(slice.start);
                for share in &slice.services {
                    let legal = share.rate.is_finite() && share.rate >= 0.0;
                    if !legal || share.batch == 0 || share.processes == 0 {
                        let ShareFile { name, batch, processes, rate, .. } = share;
                        return Err(bad(&format!(
                            "'{name}' cannot run with batch {batch} and {processes} processes at \
                             {rate} requests/s"
                        )));
                    }
                }
                let shares = slice.services.iter().filter_map(|share| {
                    let service = *index.get(share.name.as_str())?;
                    let ShareFile { batch, processes, rate, .. } = *share;
                    Some(ServiceShare { service, batch, processes, rate })
                });
                let shares: Vec<ServiceShare> = shares.collect();
                let (start, cycle_ms) = (slice.start, slice.cycle_ms);
                slices.push(PlannedSlice { kind, start, cycle_ms, shares });
            }
            plan.gpus.push(PlannedGpu { slices });
        }
        Ok(plan)
    }
}

/// A GPU in a plan file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuFile {
    /// Its slices.
    pub slices: Vec<SliceFile>,
}

/// A slice in a plan file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SliceFile {
    /// First memory slice.
    pub start: u8,
    /// Compute slices.
    pub size: u8,
    /// NVIDIA's name of the profile.
    #[serde(default)]
    pub profile: String,
    /// Length of the duty cycle in milliseconds if several services share the slice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cycle_ms: Option<f64>,
    /// Services that run in it.
    pub services: Vec<ShareFile>,
}

impl SliceFile {
    /// Which of a GPU's slices it is: the one of its name, and without a name that of its size.
    fn kind_of(&self, gpu: &GpuKind) -> Option<usize> {
        let named = |kind: &SliceKind| kind.name == self.profile && kind.gpcs == self.size;
        match self.profile.is_empty() {
            true => gpu.kind_of_size(self.size),
            false => gpu.slices.iter().position(named),
        }
    }
}

/// A service's part of a slice in a plan file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShareFile {
    /// Name of the service.
    pub name: String,
    /// Its model; empty in files that do not say.
    #[serde(default)]
    pub model: String,
    /// Batch size of a process.
    pub batch: u32,
    /// Number of processes.
    pub processes: u32,
    /// Requests per second routed to it.
    pub rate: f64,
}
