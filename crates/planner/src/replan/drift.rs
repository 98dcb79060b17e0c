//! Keeps chained re-plans close to a new plan.
//!
//! Changes one after the other leave holes that no single change can close. If a plan has too many
//! GPUs, those with the least work are taken apart and planned again together, few of them first.
//! Such a repair has to save more than its moves cost. The last resort is a new plan.

use std::collections::BTreeSet;

use super::steps::{align, same_work};
use super::{ChangeCosts, MET, Replanner, load_cost};
use crate::certified;
use crate::certified::cover::{Prices, cheapest};
use crate::check::check;
use crate::error::PlanError;
use crate::gpu::KINDS_MAX;
use crate::plan::{Plan, PlannedGpu, PlannedSlice};
use crate::problem::{Problem, Service};
use crate::search_control::SearchControl;

/// Smallest rate of a service in a problem.
const RATE_MIN: f64 = 0.001;

/// A change of plan under repair.
pub(super) struct Drift<'a> {
    pub(super) problem: &'a Problem,
    /// The plan before the change.
    pub(super) current: &'a Plan,
    /// Services that got other slices because their demand changed.
    pub(super) changed: &'a BTreeSet<usize>,
    pub(super) costs: ChangeCosts,
}

impl Drift<'_> {
    /// `plan`, or one with fewer GPUs if `plan` has too many.
    pub(super) fn repair(
        &self,
        plan: Plan,
        bound: f64,
        control: &mut SearchControl<'_>,
    ) -> Result<Plan, PlanError> {
        let lower_bound = (bound - 1e-6).ceil().max(1.0) as usize;
        if gpus_of(&plan) <= self.allowed(lower_bound) {
            return Ok(plan);
        }
        let fresh = certified::plan(self.problem, control)?;
        let allowed = self.allowed(fresh.plan.gpus.len());
        let mut best = plan;
        let mut count = 2;
        while gpus_of(&best) > allowed {
            if !control.should_continue("repair", Some(gpus_of(&best)), bound) {
                return Ok(best);
            }
            let all = gpus_of(&best);
            match self.plan_again(&best, count.min(all), &fresh.prices, control)? {
                Some(better) => best = better,
                None if count >= all => break,
                None => count = count * 3 / 2 + 1,
            }
        }
        if gpus_of(&best) > allowed {
            let whole = align(self.current, &fresh.plan);
            if self.within_budget(&whole) {
                best = whole;
            }
        }
        Ok(best)
    }

    /// GPUs that a plan may have where a new one has `fresh`.
    fn allowed(&self, fresh: usize) -> usize {
        (fresh + 1).max((fresh as f64 * (1.0 + self.costs.drift)) as usize)
    }

    fn within_budget(&self, plan: &Plan) -> bool {
        self.costs.moves_max.is_none_or(|max| self.moved(plan).len() <= max)
    }

    /// The plan with the `count` GPUs with the least work planned again, if that saves more than it
    /// costs.
    fn plan_again(
        &self,
        plan: &Plan,
        count: usize,
        prices: &Prices,
        control: &mut SearchControl<'_>,
    ) -> Result<Option<Plan>, PlanError> {
        let chosen = self.least_work(plan, count, prices);
        let mut rest = plan.clone();
        chosen.iter().for_each(|&gpu| rest.gpus[gpu].slices.clear());
        let (part, services) = self.missing(&rest);
        if part.services.is_empty() {
            return Ok(None);
        }
        let mut found = certified::plan(&part, control)?.plan;
        if found.gpus.len() >= chosen.len() {
            return Ok(None);
        }
        let shares = found.gpus.iter_mut().flat_map(|gpu| &mut gpu.slices);
        shares.flat_map(|slice| &mut slice.shares).for_each(|s| s.service = services[s.service]);
        let before = |&gpu: &usize| self.current.gpus.get(gpu).cloned().unwrap_or_default();
        let before = Plan { gpus: chosen.iter().map(before).collect() };
        for (&gpu, new) in chosen.iter().zip(align(&before, &found).gpus) {
            rest.gpus[gpu] = new;
        }
        let mut planner = Replanner::new(self.problem, &rest, *prices, self.costs);
        planner.balance();
        let better = planner.plan;
        let saved = gpus_of(plan) as f64 - gpus_of(&better) as f64;
        let accepted = self.cost(&better) - self.cost(plan) < saved
            && self.within_budget(&better)
            && check(self.problem, &better).is_empty();
        Ok(accepted.then_some(better))
    }

    /// The used GPUs whose work costs least under the prices.
    fn least_work(&self, plan: &Plan, count: usize, prices: &Prices) -> Vec<usize> {
        let demands = self.problem.demands();
        let per_request: Vec<f64> =
            demands.iter().map(|demand| cheapest(demand, prices).bound / demand.rate).collect();
        let work = |gpu: &PlannedGpu| -> f64 {
            let shares = gpu.slices.iter().flat_map(|slice| &slice.shares);
            shares.map(|share| share.rate * per_request[share.service]).sum()
        };
        let mut used: Vec<(f64, usize)> = (plan.gpus.iter().enumerate())
            .filter(|(_, gpu)| !gpu.slices.is_empty())
            .map(|(number, gpu)| (work(gpu), number))
            .collect();
        used.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        used.truncate(count);
        used.into_iter().map(|(_, number)| number).collect()
    }

    /// What `plan` does not serve, as a problem, and the services it consists of.
    fn missing(&self, plan: &Plan) -> (Problem, Vec<usize>) {
        let demands = self.problem.demands();
        let planner = Replanner::new(self.problem, plan, [0.0; KINDS_MAX], self.costs);
        let mut services = Vec::new();
        let mut indices = Vec::new();
        for (index, demand) in demands.iter().enumerate() {
            let whole: f64 =
                planner.slices[index].iter().map(|(_, _, kind)| demand.throughput[*kind]).sum();
            let missing = demand.rate - planner.shared[index] - whole;
            if missing > demand.rate * MET {
                let service = &self.problem.services[index];
                let rate = (missing / demand.rate * service.rate).max(RATE_MIN);
                services.push(Service { rate, ..service.clone() });
                indices.push(index);
            }
        }
        (Problem { services, ..self.problem.clone() }, indices)
    }

    /// Services that have another slice than before although their demand did not change.
    pub(super) fn moved(&self, plan: &Plan) -> BTreeSet<usize> {
        let shares = self.created(plan).flat_map(|slice| &slice.shares);
        let moved = shares.map(|share| share.service);
        moved.filter(|service| !self.changed.contains(service)).collect()
    }

    /// Slices of `plan` that are not in the plan before the change.
    fn created<'p>(&'p self, plan: &'p Plan) -> impl Iterator<Item = &'p PlannedSlice> {
        differing(self.current, plan)
    }

    /// Cost of all changes that lead to `plan`.
    fn cost(&self, plan: &Plan) -> f64 {
        let destroyed = differing(plan, self.current).count() as f64 * self.costs.geometry;
        let created = self.created(plan).map(|slice| {
            let gpcs = self.problem.gpu.slices[slice.kind].gpcs;
            let load = |share: &crate::plan::ServiceShare| {
                let model = &self.problem.services[share.service].model;
                let points = self.problem.profiles.points(model).unwrap_or_default();
                let wanted = (gpcs, share.batch, share.processes);
                let point = points.iter().find(|p| (p.gpcs, p.batch, p.processes) == wanted);
                point.map_or(self.costs.load, |p| load_cost(self.problem, &self.costs, model, p))
            };
            self.costs.geometry + slice.shares.iter().map(load).sum::<f64>()
        });
        destroyed + created.sum::<f64>()
    }
}

/// GPUs in use.
fn gpus_of(plan: &Plan) -> usize {
    plan.gpus.iter().filter(|gpu| !gpu.slices.is_empty()).count()
}

/// Slices of `plan` that `other` does not have at the same place with the same work.
fn differing<'p>(other: &'p Plan, plan: &'p Plan) -> impl Iterator<Item = &'p PlannedSlice> {
    plan.gpus.iter().enumerate().flat_map(move |(number, gpu)| {
        let there = other.gpus.get(number).map_or(&[][..], |gpu| gpu.slices.as_slice());
        let kept = move |slice: &&PlannedSlice| there.iter().any(|old| same_work(old, slice));
        gpu.slices.iter().filter(move |slice| !kept(slice))
    })
}
