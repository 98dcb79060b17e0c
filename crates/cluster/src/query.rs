//! Queries: pipelines of models under one objective.
//!
//! A user writes one as a [`spec`]. The scheduler gives its stages their budgets by the planner's split ([`stage_demands`]),
//! under the fan-outs that frontends measure; frontends walk the stages and send each over the routes every request takes.
//! What happens between stages is here, without IO.

pub mod picture;
pub mod region;
pub mod rows;
pub mod spec;
pub mod text;

use planner::PlanError;
use planner::query::{Split, Stage, split, split_evenly};
use planner::squishy::Session;

use crate::scheduler::placement::Curve;

/// Pieces an objective is split into.
const PIECES: usize = 200;

/// A model of a query.
#[derive(Clone, Debug, PartialEq)]
pub struct QueryStage {
    /// The model.
    pub model: String,
    /// Requests a second it gets, with what the stages before it yield.
    pub rate: f64,
    /// Milliseconds of each batch size; none for one that takes no time.
    pub curve: Curve,
    /// Stages that take its output.
    pub next: Vec<usize>,
}

/// The budgets of a query's stages in milliseconds: split so that all stages together take the fewest machines, or
/// evenly, as the baseline of Nexus's evaluation does.
pub fn stage_demands(stages: &[QueryStage], slo_ms: f64, evenly: bool) -> Result<Split, PlanError> {
    let stage = |stage: &QueryStage| Stage {
        name: stage.model.clone(),
        rate: stage.rate,
        curve: costs(&stage.curve),
        next: stage.next.clone(),
    };
    let stages: Vec<Stage> = stages.iter().map(stage).collect();
    match evenly {
        true => split_evenly(&stages, slo_ms),
        false => split(&stages, slo_ms, PIECES),
    }
}

/// What a request a second costs at each budget: a budget holds two turns of the batch it allows.
fn costs(curve: &Curve) -> Vec<(f64, f64)> {
    if curve.is_empty() {
        return vec![(0.0, 0.0)];
    }
    let mut costs: Vec<(f64, f64)> = Vec::new();
    for &(_, ms) in curve {
        let slo_ms = 2.0 * ms;
        let session = Session { name: String::new(), rate: 1.0, slo_ms, curve: curve.clone() };
        let Some(throughput) = session.throughput() else { continue };
        if costs.last().is_none_or(|(_, cost)| 1.0 / throughput < *cost) {
            costs.push((slo_ms, 1.0 / throughput));
        }
    }
    costs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_larger_model_gets_the_larger_budget() {
        let stage = |model: &str, base: f64, slope: f64, next: Vec<usize>| QueryStage {
            model: model.to_string(),
            rate: 100.0,
            curve: (1..=32).map(|b| (b, base + slope * f64::from(b))).collect(),
            next,
        };
        let stages =
            [stage("detector", 30.0, 12.0, vec![1]), stage("recogniser", 3.0, 1.0, vec![])];
        let best = stage_demands(&stages, 400.0, false).unwrap();
        let even = stage_demands(&stages, 400.0, true).unwrap();
        assert!(best.budgets_ms[0] > best.budgets_ms[1], "{best:?}");
        assert!(best.cost <= even.cost && best.budgets_ms.iter().sum::<f64>() <= 400.0 + 1e-6);
    }
}
