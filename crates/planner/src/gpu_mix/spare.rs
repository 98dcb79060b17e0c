//! Spare capacity: any one GPU, machine or rack may fail, and the others still serve every rate.
//!
//! Where slices are not shared, every service gets slices that serve its rate and one more that is
//! at least as large as the largest of them. All these slices are planned together and spread over
//! the failure domains, so that a failure costs a service one slice. What is still missing, and all
//! of it where slices are shared, is on domains of its own: as much of each service as the domain
//! that serves most of it.

use std::collections::BTreeMap;

use super::apart::{arrange, keep_apart};
use super::layout::Layout;
use crate::certified;
use crate::certified::cover::{Prices, cheapest};
use crate::error::PlanError;
use crate::gpu::KINDS_MAX;
use crate::plan::{Plan, PlannedGpu, PlannedSlice, ServiceShare};
use crate::problem::{Problem, Service, ServiceDemand};
use crate::profile::Profiles;
use crate::search_control::SearchControl;
use crate::service_file::ServiceTerms;

/// Slack for sums of floating-point numbers.
const TOLERANCE: f64 = 1e-7;
/// Slack for the comparison of throughputs.
const EQUAL: f64 = 1e-9;
/// Rate of a service that stands for one slice.
const ONE_SLICE_RATE: f64 = 0.001;

/// Requests per second that a share can take.
fn capacity(problem: &Problem, slice: &PlannedSlice, share: &ServiceShare) -> f64 {
    if let Some(cycle_ms) = slice.cycle_ms {
        return f64::from(share.batch) * f64::from(share.processes) / cycle_ms * 1000.0;
    }
    let gpcs = problem.gpu.slices[slice.kind].gpcs;
    let points = problem.profiles.points(&problem.services[share.service].model);
    let point = points.unwrap_or_default().iter().find(|point| {
        (point.gpcs, point.batch, point.processes) == (gpcs, share.batch, share.processes)
    });
    point.map_or(0.0, |point| point.throughput)
}

/// Capacity of each service: in all, and of the domain that has most of it.
fn by_domain(problem: &Problem, plan: &Plan, domain_gpus: usize) -> Vec<(f64, f64)> {
    let mut capacities: BTreeMap<(usize, usize), f64> = BTreeMap::new();
    for (number, gpu) in plan.gpus.iter().enumerate() {
        for slice in &gpu.slices {
            for share in &slice.shares {
                let key = (share.service, number / domain_gpus);
                *capacities.entry(key).or_default() += capacity(problem, slice, share);
            }
        }
    }
    let mut sums = vec![(0.0, 0.0f64); problem.services.len()];
    for ((service, _), capacity) in capacities {
        let (all, most) = &mut sums[service];
        *all += capacity;
        *most = most.max(capacity);
    }
    sums
}

/// Adds GPUs so that any one domain may fail. Rates count without headroom then.
pub(super) fn add(
    problem: &Problem,
    terms: &[&ServiceTerms],
    layout: Layout,
    domain_gpus: usize,
    plan: &mut Plan,
    control: &mut SearchControl<'_>,
) -> Result<(), PlanError> {
    let mut missing: Vec<(usize, Service)> = Vec::new();
    let sums = by_domain(problem, plan, domain_gpus);
    for (index, (service, (all, most))) in problem.services.iter().zip(sums).enumerate() {
        let rate = service.rate - (all - most);
        if rate > service.rate * TOLERANCE {
            // Below the smallest rate of a plan a slice is needed all the same.
            missing.push((index, Service { rate: rate.max(ONE_SLICE_RATE), ..service.clone() }));
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    let services = missing.iter().map(|(_, service)| service.clone()).collect();
    let reserve = Problem { services, ..without_headroom(problem) };
    let mut extra = certified::plan(&reserve, control)?.plan;
    let own: Vec<&ServiceTerms> = missing.iter().map(|(index, _)| terms[*index]).collect();
    keep_apart(&reserve, &own, &mut extra)?;
    arrange(&own, layout, &mut extra);
    // The spare GPUs begin in a domain of their own.
    let whole = domain_gpus.max(layout.whole());
    plan.gpus.resize(plan.gpus.len().next_multiple_of(whole), PlannedGpu::default());
    for mut gpu in extra.gpus {
        for share in gpu.slices.iter_mut().flat_map(|slice| &mut slice.shares) {
            share.service = missing[share.service].0;
            // Requests come here only after a failure.
            share.rate = 0.0;
        }
        plan.gpus.push(gpu);
    }
    Ok(())
}

/// The problem with rates as they are.
fn without_headroom(problem: &Problem) -> Problem {
    let mut rules = problem.rules.clone();
    (rules.headroom, rules.own_headroom) = (0.0, BTreeMap::new());
    Problem { rules, ..problem.clone() }
}

/// How a service survives the loss of a slice: slices for `rate`, none larger than the spare one.
struct SpareSlice {
    /// Requests per second of the spare slice.
    throughput: f64,
    /// Rate that the other slices serve.
    rate: f64,
    /// GPUs that both take at least, by the prices.
    cost: f64,
}

/// The cheapest way for a service: after any loss the others serve `rate`, and together all serve
/// the demand with its headroom.
fn spare_slice(demand: &ServiceDemand, rate: f64, prices: &Prices) -> SpareSlice {
    let mut best = SpareSlice { throughput: 0.0, rate, cost: f64::INFINITY };
    for kind in (0..KINDS_MAX).filter(|&kind| demand.throughput[kind] > 0.0) {
        let throughput = demand.throughput[kind];
        let mut others = demand.clone();
        others.rate = rate.max(demand.rate - throughput);
        for other in others.throughput.iter_mut().filter(|t| **t > throughput * (1.0 + EQUAL)) {
            *other = 0.0;
        }
        let cost = prices[kind] + cheapest(&others, prices).bound;
        if cost < best.cost {
            best = SpareSlice { throughput, rate: others.rate, cost };
        }
    }
    best
}

/// GPUs that a service takes at least where any one GPU may fail and slices are not shared, at
/// prices that are feasible: its slices without the largest one still serve its rate.
pub(super) fn need(problem: &Problem, prices: &Prices) -> f64 {
    let demands = problem.demands();
    let costs = problem.services.iter().zip(&demands);
    costs.map(|(service, demand)| spare_slice(demand, service.rate, prices).cost).sum()
}

/// A plan with a spare slice for every service, spread over domains. It may still lack some.
pub(super) fn plan_together(
    problem: &Problem,
    prices: &Prices,
    terms: &[&ServiceTerms],
    (layout, domain_gpus): (Layout, usize),
    control: &mut SearchControl<'_>,
) -> Result<Plan, PlanError> {
    let whole = with_spare_slices(problem, prices);
    let mut plan = certified::plan(&whole, control)?.plan;
    let shares = plan.gpus.iter_mut().flat_map(|gpu| &mut gpu.slices);
    for share in shares.flat_map(|slice| &mut slice.shares) {
        share.service /= 2;
    }
    keep_apart(problem, terms, &mut plan)?;
    if !arrange(terms, layout, &mut plan) {
        divide_evenly(domain_gpus, &mut plan);
    }
    spread(problem, terms, domain_gpus, &mut plan);
    share_rates(problem, &mut plan);
    Ok(plan)
}

/// Two services for each one: what serves its rate, and its spare slice.
fn with_spare_slices(problem: &Problem, prices: &Prices) -> Problem {
    let mut profiles = Profiles::default();
    let mut models: BTreeMap<(&str, u64, bool), String> = BTreeMap::new();
    let mut services = Vec::with_capacity(problem.services.len() * 2);
    let demands = problem.demands();
    for (index, (service, demand)) in problem.services.iter().zip(&demands).enumerate() {
        let spare = spare_slice(demand, service.rate, prices);
        for is_spare in [false, true] {
            let next = models.len();
            let key = (service.model.as_str(), spare.throughput.to_bits(), is_spare);
            let model = models.entry(key).or_insert_with(|| {
                let model = next.to_string();
                for point in problem.profiles.points(&service.model).unwrap_or_default() {
                    let fits = match is_spare {
                        true => point.throughput >= spare.throughput * (1.0 - EQUAL),
                        false => point.throughput <= spare.throughput * (1.0 + EQUAL),
                    };
                    if fits {
                        // A point of a problem was accepted when it was read.
                        let _ = profiles.push(&model, point.clone());
                    }
                }
                model
            });
            services.push(Service {
                name: format!("{index}{}", if is_spare { "+" } else { "" }),
                model: model.clone(),
                rate: if is_spare { ONE_SLICE_RATE } else { spare.rate },
                slo_ms: service.slo_ms,
            });
        }
    }
    Problem { services, profiles, ..without_headroom(problem) }
}

/// Gives all domains nearly as many GPUs, and takes two where one would do: slices of a service
/// can then be in different ones.
fn divide_evenly(domain_gpus: usize, plan: &mut Plan) {
    let domains = plan.gpus.len().div_ceil(domain_gpus).max(2);
    let mut gpus = vec![PlannedGpu::default(); domains * domain_gpus];
    for (number, gpu) in plan.gpus.drain(..).enumerate() {
        gpus[number % domains * domain_gpus + number / domains] = gpu;
    }
    let used = gpus.iter().rposition(|gpu| !gpu.slices.is_empty()).map_or(0, |last| last + 1);
    gpus.truncate(used);
    plan.gpus = gpus;
}

/// Exchanges slices of one kind so that every domain has as little of each service as possible.
/// Services that are kept apart from others stay where they are.
fn spread(problem: &Problem, terms: &[&ServiceTerms], domain_gpus: usize, plan: &mut Plan) {
    let domains = plan.gpus.len().div_ceil(domain_gpus);
    // By kind and domain: slices whose contents may change.
    let mut free: BTreeMap<(usize, usize), Vec<(usize, usize)>> = BTreeMap::new();
    let mut contents: Vec<(usize, f64, usize, ServiceShare)> = Vec::new();
    let mut used: BTreeMap<(usize, usize), f64> = BTreeMap::new();
    for (number, gpu) in plan.gpus.iter().enumerate() {
        for (place, slice) in gpu.slices.iter().enumerate() {
            let [share] = slice.shares.as_slice() else { continue };
            let requests = capacity(problem, slice, share);
            if terms[share.service].apart.is_empty() {
                let key = (slice.kind, number / domain_gpus);
                free.entry(key).or_default().push((number, place));
                contents.push((share.service, requests, slice.kind, share.clone()));
            } else {
                *used.entry((share.service, number / domain_gpus)).or_default() += requests;
            }
        }
    }
    let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
    contents.iter().for_each(|(service, ..)| *counts.entry(*service).or_default() += 1);
    // Services with many slices have the fewest choices; of a service, large slices.
    contents.sort_by(|a, b| {
        let order = counts[&b.0].cmp(&counts[&a.0]).then(a.0.cmp(&b.0));
        order.then(b.1.total_cmp(&a.1))
    });
    for (service, requests, kind, share) in contents {
        let choices = (0..domains).filter(|domain| free.contains_key(&(kind, *domain)));
        let rank = |domain: usize| {
            let own = used.get(&(service, domain)).copied().unwrap_or(0.0);
            (own, std::cmp::Reverse(free.get(&(kind, domain)).map_or(0, Vec::len)))
        };
        let best = choices.min_by(|&a, &b| {
            let ((own_a, free_a), (own_b, free_b)) = (rank(a), rank(b));
            own_a.total_cmp(&own_b).then(free_a.cmp(&free_b))
        });
        // There are as many slices of a kind as there are contents for them.
        let Some(domain) = best else { continue };
        let Some(places) = free.get_mut(&(kind, domain)) else { continue };
        if let Some((number, place)) = places.pop() {
            plan.gpus[number].slices[place].shares = vec![share];
            *used.entry((service, domain)).or_default() += requests;
        }
        if places.is_empty() {
            free.remove(&(kind, domain));
        }
    }
}

/// Sends every slice of a service the same part of its capacity.
fn share_rates(problem: &Problem, plan: &mut Plan) {
    let sums = by_domain(problem, plan, 1);
    for slice in plan.gpus.iter_mut().flat_map(|gpu| &mut gpu.slices) {
        for place in 0..slice.shares.len() {
            let share = &slice.shares[place];
            let (all, _) = sums[share.service];
            let demand = problem.services[share.service].demand(&problem.rules);
            let rate = demand * capacity(problem, slice, share) / all.max(f64::MIN_POSITIVE);
            slice.shares[place].rate = rate;
        }
    }
}

/// Services that one failed domain would leave with less than their rate.
pub fn check_spare(problem: &Problem, domain_gpus: usize, plan: &Plan) -> Vec<String> {
    let mut capacities: BTreeMap<(usize, usize), f64> = BTreeMap::new();
    let mut all = vec![0.0; problem.services.len()];
    for (number, gpu) in plan.gpus.iter().enumerate() {
        for slice in &gpu.slices {
            for share in &slice.shares {
                let requests = capacity(problem, slice, share);
                *capacities.entry((share.service, number / domain_gpus)).or_default() += requests;
                all[share.service] += requests;
            }
        }
    }
    let mut wrong = Vec::new();
    for ((index, domain), requests) in capacities {
        let Service { name, rate, .. } = &problem.services[index];
        let left: f64 = all[index] - requests;
        if left < rate * (1.0 - TOLERANCE) {
            wrong.push(format!("without domain {domain} '{name}' has {left} of {rate}/s"));
        }
    }
    wrong
}
