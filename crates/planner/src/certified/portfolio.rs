//! The published planners as candidates, so that a certified plan never has more GPUs than one of
//! theirs that follows the same rules.

use crate::baseline::{least_fragmentation_like, mig_serving_like, repartitioning_like};
use crate::check::check;
use crate::error::PlanError;
use crate::parvagpu::{self, ParvaGpuVariant};
use crate::plan::Plan;
use crate::problem::{Problem, Sharing};
use crate::search_control::SearchControl;
use crate::squishy;

/// Product of services and GPUs above which there are no candidates. They try every service in
/// every slot: with 10,000 services they would take ten times as long as the plan itself.
const TRIALS_MAX: usize = 4_000_000;

type Candidate = fn(&Problem) -> Result<Plan, PlanError>;

const CANDIDATES: [Candidate; 6] = [
    |problem| parvagpu::plan(problem, ParvaGpuVariant::Full),
    |problem| parvagpu::plan(problem, ParvaGpuVariant::WithoutMps),
    |problem| parvagpu::plan(problem, ParvaGpuVariant::WithoutOptimisation),
    mig_serving_like,
    least_fragmentation_like,
    repartitioning_like,
];

/// Its plans share slices.
const SHARING_CANDIDATE: Candidate = squishy::plan;

/// The best of `plan` and the candidates. A plan that reaches its bound needs none.
pub(crate) fn best_of(
    problem: &Problem,
    plan: Plan,
    lower_bound: usize,
    control: &mut SearchControl<'_>,
) -> Plan {
    let mut best = plan;
    if problem.services.len().saturating_mul(best.gpus.len()) > TRIALS_MAX {
        return best;
    }
    let sharing = (problem.rules.sharing == Sharing::Time).then_some(SHARING_CANDIDATE);
    for candidate in CANDIDATES.into_iter().chain(sharing) {
        let gpus = best.gpus.len();
        if gpus <= lower_bound
            || !control.should_continue("candidates", Some(gpus), lower_bound as f64)
        {
            break;
        }
        // A candidate may be undefined for this GPU, or take a point that is too slow by our rules.
        if let Ok(other) = candidate(problem)
            && other.gpus.len() < gpus
            && check(problem, &other).is_empty()
        {
            best = other;
        }
    }
    best
}
