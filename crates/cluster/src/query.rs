//! Queries: pipelines of models under one SLO.
//!
//! A user writes a query as a [`spec`]. The scheduler gives its stages their budgets by the
//! planner's split ([`stage_demands`]), under the fan-outs that frontends measure. Frontends
//! execute the stages and send each over the routes that every request takes. This module has what
//! happens between stages, without IO.

pub mod model_fit;
pub mod picture;
pub mod region;
pub mod rows;
pub mod spec;
pub mod text;

use planner::PlanError;
use planner::query::{LatencySplit, SplitStage, split, split_evenly};

use crate::scheduler::plan::{Curve, SLO_SHARE};
use crate::scheduler::pooling;

/// Number of pieces that an SLO is split into.
const PIECES: usize = 200;

/// A model of a query.
#[derive(Clone, Debug, PartialEq)]
pub struct QueryStage {
    /// The model.
    pub model: String,
    /// Requests per second, including those that earlier stages produce.
    pub rate: f64,
    /// Milliseconds by batch size; empty for a stage that takes no time.
    pub curve: Curve,
    /// Stages that read its output.
    pub next: Vec<usize>,
}

/// The budgets of a query's stages in milliseconds: split so that all stages together need the
/// fewest machines, or evenly, as the baseline of Nexus's evaluation does. With `pooled`, rates are
/// those of all machines together, and a stage that fills several machines needs less time for a
/// batch.
pub fn stage_demands(
    stages: &[QueryStage],
    slo_ms: f64,
    evenly: bool,
    pooled: bool,
) -> Result<LatencySplit, PlanError> {
    let stage = |stage: &QueryStage| SplitStage {
        name: stage.model.clone(),
        rate: stage.rate,
        curve: costs(&stage.curve, if pooled { stage.rate } else { 0.0 }),
        next: stage.next.clone(),
    };
    let stages: Vec<SplitStage> = stages.iter().map(stage).collect();
    match evenly {
        true => split_evenly(&stages, slo_ms),
        false => split(&stages, slo_ms, PIECES),
    }
}

/// What one request per second costs at each budget. A budget holds one run of the batch it allows
/// and the wait for it, which is as long again where the rate fills no backend pool.
fn costs(curve: &Curve, rate: f64) -> Vec<(f64, f64)> {
    if curve.is_empty() {
        return vec![(0.0, 0.0)];
    }
    let mut costs: Vec<(f64, f64)> = Vec::new();
    for &(batch, ms) in curve {
        let cost = ms / f64::from(batch) / 1000.0;
        if costs.last().is_none_or(|(_, cheapest)| cost < *cheapest) {
            costs.push((pooling::budget_ms(rate, batch, ms) / SLO_SHARE, cost));
        }
    }
    costs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn larger_model_gets_the_larger_budget() {
        let stage = |model: &str, base: f64, slope: f64, next: Vec<usize>| QueryStage {
            model: model.to_string(),
            rate: 100.0,
            curve: (1..=32).map(|b| (b, base + slope * f64::from(b))).collect(),
            next,
        };
        let stages =
            [stage("detector", 30.0, 12.0, vec![1]), stage("recogniser", 3.0, 1.0, vec![])];
        let best = stage_demands(&stages, 400.0, false, false).unwrap();
        let even = stage_demands(&stages, 400.0, true, false).unwrap();
        assert!(best.budgets_ms[0] > best.budgets_ms[1], "{best:?}");
        assert!(best.cost <= even.cost && best.budgets_ms.iter().sum::<f64>() <= 400.0 + 1e-6);
    }
}
