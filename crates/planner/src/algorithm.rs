//! All planners behind one function, so that they can be compared on the same services.

use std::str::FromStr;

use crate::baseline::{gpulet_like, igniter_like, mig_serving_like};
use crate::certified::{self, Solution};
use crate::error::PlanError;
use crate::parvagpu::{self, ParvaGpuVariant};
use crate::plan::{Plan, PlannedGpu, PlannedSlice, ServiceShare};
use crate::problem::Problem;
use crate::search_control::SearchControl;
use crate::squishy::{self, Session};

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
    /// At most two MPS parts per GPU, after gpulet; counts GPUs only.
    GpuletLike,
    /// MPS parts with a reserve, after iGniter; counts GPUs only.
    IgniterLike,
}

/// Names on the command line.
pub const ALGORITHMS: [(&str, Algorithm); 8] = [
    ("certified", Algorithm::Certified),
    ("parvagpu", Algorithm::ParvaGpu(ParvaGpuVariant::Full)),
    ("parvagpu-single", Algorithm::ParvaGpu(ParvaGpuVariant::WithoutMps)),
    ("parvagpu-unoptimized", Algorithm::ParvaGpu(ParvaGpuVariant::WithoutOptimisation)),
    ("squishy", Algorithm::Squishy),
    ("mig-serving-like", Algorithm::MigServingLike),
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
        Algorithm::Squishy => squishy_plan(problem)?,
        Algorithm::MigServingLike => mig_serving_like(problem)?,
        Algorithm::GpuletLike => count_only(gpulet_like(problem)?.len()),
        Algorithm::IgniterLike => count_only(igniter_like(problem)?.len()),
    };
    let seconds = control.seconds();
    let bound = certified::bound(problem, control)?;
    Ok(PlannerOutput { gpus: plan.gpus.len(), solution: Solution { plan, seconds, ..bound } })
}

fn count_only(gpus: usize) -> Plan {
    Plan { gpus: vec![PlannedGpu::default(); gpus] }
}

/// Squishy packing with each GPU as one slice and one process per service.
fn squishy_plan(problem: &Problem) -> Result<Plan, PlanError> {
    problem.validate()?;
    let unsupported = || PlanError::Unsupported {
        algorithm: "squishy",
        what: "the gpu has no slice of its whole size".to_string(),
    };
    let kind = problem.gpu.kind_of_size(problem.gpu.gpcs).ok_or_else(unsupported)?;
    let sessions: Vec<Session> = problem
        .services
        .iter()
        .map(|service| {
            let points = problem.profiles.points(&service.model).unwrap_or_default();
            let whole = points.iter().filter(|p| p.gpcs == problem.gpu.gpcs && p.processes == 1);
            let mut curve: Vec<(u32, f64)> = whole.map(|p| (p.batch, p.turn_ms())).collect();
            curve.sort_by_key(|(batch, _)| *batch);
            Session {
                name: service.name.clone(),
                rate: service.demand(&problem.rules),
                slo_ms: service.limit_ms(&problem.rules),
                curve,
            }
        })
        .collect();
    let node = |node: squishy::Node| {
        let share = |part: &squishy::Part| ServiceShare {
            service: part.session,
            batch: part.batch,
            processes: 1,
            rate: part.rate,
        };
        let shares = node.parts.iter().map(share).collect();
        PlannedGpu {
            slices: vec![PlannedSlice { kind, start: 0, cycle_ms: Some(node.cycle_ms), shares }],
        }
    };
    Ok(Plan { gpus: squishy::pack(&sessions)?.into_iter().map(node).collect() })
}
