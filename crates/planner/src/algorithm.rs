//! All planners behind one function, so that they can be compared on the same services.

use std::str::FromStr;

use crate::baseline::{
    gpulet_like, igniter_like, least_fragmentation_like, mig_serving_like, repartitioning_like,
};
use crate::certified::{self, SearchEnd, Solution};
use crate::error::PlanError;
use crate::parvagpu::{self, ParvaGpuVariant};
use crate::plan::{Plan, PlannedGpu};
use crate::problem::Problem;
use crate::search_control::SearchControl;
use crate::squishy;

/// A planning algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// The certified planner.
    Certified,
    /// ParvaGPU as published, or a variant.
    ParvaGpu(ParvaGpuVariant),
    /// Nexus's squishy bin packing on whole GPUs.
    Squishy,
    /// Greedy over MIG patterns, after MIG-serving's fast algorithm.
    MigServingLike,
    /// Each slice where fragmentation grows least, after a scheduler of 2025.
    LeastFragmentationLike,
    /// GPUs partitioned again and emptied by migration, after a scheduler of 2025.
    RepartitioningLike,
    /// At most two MPS parts per GPU, after gpulet; counts GPUs only.
    GpuletLike,
    /// MPS parts with a reserve, after iGniter; counts GPUs only.
    IgniterLike,
}

/// Names on the command line.
pub const ALGORITHMS: [(&str, Algorithm); 10] = [
    ("certified", Algorithm::Certified),
    ("parvagpu", Algorithm::ParvaGpu(ParvaGpuVariant::Full)),
    ("parvagpu-single", Algorithm::ParvaGpu(ParvaGpuVariant::WithoutMps)),
    ("parvagpu-unoptimized", Algorithm::ParvaGpu(ParvaGpuVariant::WithoutOptimisation)),
    ("squishy", Algorithm::Squishy),
    ("mig-serving-like", Algorithm::MigServingLike),
    ("least-fragmentation-like", Algorithm::LeastFragmentationLike),
    ("repartitioning-like", Algorithm::RepartitioningLike),
    ("gpulet-like", Algorithm::GpuletLike),
    ("igniter-like", Algorithm::IgniterLike),
];

impl FromStr for Algorithm {
    type Err = String;

    fn from_str(name: &str) -> Result<Algorithm, String> {
        let names = || ALGORITHMS.map(|(name, _)| name).join(", ");
        let found = ALGORITHMS.iter().find(|(known, _)| *known == name);
        found.map(|(_, algorithm)| *algorithm).ok_or_else(|| format!("one of {}", names()))
    }
}

/// Output of a planner.
#[derive(Clone, Debug)]
pub struct PlannerOutput {
    /// The plan with its bound; without slices if the algorithm does not use MIG.
    pub solution: Solution,
    /// Number of GPUs.
    pub gpus: usize,
}

/// Plans `problem` with `algorithm`. The bound always comes from the certified planner's prices.
pub fn run(
    problem: &Problem,
    algorithm: Algorithm,
    control: &mut SearchControl<'_>,
) -> Result<PlannerOutput, PlanError> {
    let plan = match algorithm {
        Algorithm::Certified => {
            let solution = certified::plan(problem, control)?;
            return Ok(PlannerOutput { gpus: solution.plan.gpus.len(), solution });
        }
        Algorithm::ParvaGpu(variant) => parvagpu::plan(problem, variant)?,
        Algorithm::Squishy => squishy::plan(problem)?,
        Algorithm::MigServingLike => mig_serving_like(problem)?,
        Algorithm::LeastFragmentationLike => least_fragmentation_like(problem)?,
        Algorithm::RepartitioningLike => repartitioning_like(problem)?,
        Algorithm::GpuletLike => count_only(gpulet_like(problem)?.len()),
        Algorithm::IgniterLike => count_only(igniter_like(problem)?.len()),
    };
    let seconds = control.seconds();
    let bound = certified::bound(problem, control)?;
    let gpus = plan.gpus.len();
    let end = match gpus <= bound.lower_bound {
        true => SearchEnd::BoundReached,
        false => SearchEnd::OtherAlgorithm,
    };
    Ok(PlannerOutput { gpus, solution: Solution { plan, seconds, end, ..bound } })
}

fn count_only(gpus: usize) -> Plan {
    Plan { gpus: vec![PlannedGpu::default(); gpus] }
}
