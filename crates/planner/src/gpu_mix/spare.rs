//! Spare capacity, and services that are kept apart.
//!
//! Spare capacity is on GPUs, and machines, of its own: as much of each service as the machine that
//! serves most of it. Whatever fails, one of the two sides is whole.

use std::collections::BTreeMap;

use crate::certified;
use crate::error::PlanError;
use crate::plan::{Plan, PlannedGpu, PlannedSlice, ServiceShare};
use crate::problem::{Problem, Service};
use crate::search_control::SearchControl;
use crate::service_file::ServiceTerms;

/// What may fail without a missed SLO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spare {
    /// Nothing.
    None,
    /// Any one machine with this many GPUs; 1 for any one GPU.
    Machine(usize),
}

/// Slack for sums of floating-point numbers.
const TOLERANCE: f64 = 1e-7;

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

/// Capacity of each service on every machine.
fn by_machine(problem: &Problem, plan: &Plan, machine_gpus: usize) -> Vec<Vec<f64>> {
    let machines = plan.gpus.len().div_ceil(machine_gpus);
    let mut capacities = vec![vec![0.0; problem.services.len()]; machines];
    for (number, gpu) in plan.gpus.iter().enumerate() {
        for slice in &gpu.slices {
            for share in &slice.shares {
                capacities[number / machine_gpus][share.service] += capacity(problem, slice, share);
            }
        }
    }
    capacities
}

/// Adds GPUs so that any one machine may fail. Rates count without headroom then.
pub(super) fn add(
    problem: &Problem,
    terms: &[&ServiceTerms],
    spare: Spare,
    plan: &mut Plan,
    control: &mut SearchControl<'_>,
) -> Result<(), PlanError> {
    let Spare::Machine(machine_gpus) = spare else { return Ok(()) };
    let machine_gpus = machine_gpus.max(1);
    let machines = by_machine(problem, plan, machine_gpus);
    let mut missing: Vec<(usize, Service)> = Vec::new();
    for (index, service) in problem.services.iter().enumerate() {
        let all: f64 = machines.iter().map(|machine| machine[index]).sum();
        let most = machines.iter().map(|machine| machine[index]).fold(0.0, f64::max);
        let rate = service.rate - (all - most);
        if rate > service.rate * TOLERANCE {
            // Below the smallest rate of a plan a slice is needed all the same.
            missing.push((index, Service { rate: rate.max(0.001), ..service.clone() }));
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    let mut rules = problem.rules.clone();
    (rules.headroom, rules.own_headroom) = (0.0, BTreeMap::new());
    let services = missing.iter().map(|(_, service)| service.clone()).collect();
    let reserve = Problem { gpu: problem.gpu, services, profiles: problem.profiles.clone(), rules };
    let mut extra = certified::plan(&reserve, control)?.plan;
    let own: Vec<&ServiceTerms> = missing.iter().map(|(index, _)| terms[*index]).collect();
    keep_apart(&reserve, &own, &mut extra)?;
    // The spare GPUs begin on a machine of their own.
    let whole = plan.gpus.len().div_ceil(machine_gpus) * machine_gpus;
    plan.gpus.resize(whole, PlannedGpu::default());
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

/// Services that one failed machine would leave with less than their rate.
pub fn check_spare(problem: &Problem, spare: Spare, plan: &Plan) -> Vec<String> {
    let Spare::Machine(machine_gpus) = spare else { return Vec::new() };
    let machines = by_machine(problem, plan, machine_gpus.max(1));
    let mut wrong = Vec::new();
    for (index, service) in problem.services.iter().enumerate() {
        let all: f64 = machines.iter().map(|machine| machine[index]).sum();
        for (number, machine) in machines.iter().enumerate() {
            let left = all - machine[index];
            if left < service.rate * (1.0 - TOLERANCE) {
                let (name, rate) = (&service.name, service.rate);
                wrong.push(format!("without machine {number} '{name}' has {left} of {rate}/s"));
            }
        }
    }
    wrong
}

/// GPUs with two services of one group.
pub(super) fn together<'t>(
    terms: &'t [&ServiceTerms],
    plan: &'t Plan,
) -> impl Iterator<Item = (usize, &'t str)> {
    plan.gpus.iter().enumerate().filter_map(move |(number, gpu)| {
        let mut owners: BTreeMap<&str, usize> = BTreeMap::new();
        for share in gpu.slices.iter().flat_map(|slice| &slice.shares) {
            let group = terms[share.service].apart.as_str();
            if !group.is_empty() && *owners.entry(group).or_insert(share.service) != share.service {
                return Some((number, group));
            }
        }
        None
    })
}

/// Exchanges slices of one kind between GPUs until no two services of a group are on one, and takes
/// further GPUs where that does not suffice.
pub(super) fn keep_apart(
    problem: &Problem,
    terms: &[&ServiceTerms],
    plan: &mut Plan,
) -> Result<(), PlanError> {
    let mixed = plan.gpus.iter().flat_map(|gpu| &gpu.slices).find(|slice| {
        let one = Plan { gpus: vec![PlannedGpu { slices: vec![(*slice).clone()] }] };
        together(terms, &one).next().is_some()
    });
    if let Some(slice) = mixed {
        let name = &problem.services[slice.shares[0].service].name;
        return Err(PlanError::Unsupported {
            algorithm: "certified",
            what: format!("'{name}' shares a slice with one it is apart from: use --sharing none"),
        });
    }
    // Each round ends one conflict and makes none.
    loop {
        let first = together(terms, plan).next().map(|(number, _)| number);
        let Some(number) = first else { return Ok(()) };
        let place = (0..plan.gpus[number].slices.len())
            .rev()
            .find(|&place| conflicts(terms, &plan.gpus[number], place))
            .unwrap_or(0);
        let other = exchange(terms, plan, number, place);
        match other {
            Some((gpu, slice)) => {
                let mine = std::mem::take(&mut plan.gpus[number].slices[place].shares);
                let theirs = std::mem::replace(&mut plan.gpus[gpu].slices[slice].shares, mine);
                plan.gpus[number].slices[place].shares = theirs;
            }
            None => {
                let mut slice = plan.gpus[number].slices.remove(place);
                slice.start = problem.gpu.slices[slice.kind].starts[0];
                plan.gpus.push(PlannedGpu { slices: vec![slice] });
            }
        }
    }
}

/// Whether a slice has a service of a group that another slice of the GPU has, too.
fn conflicts(terms: &[&ServiceTerms], gpu: &PlannedGpu, place: usize) -> bool {
    let shares = &gpu.slices[place].shares;
    let others = gpu.slices.iter().enumerate().filter(|(other, _)| *other != place);
    others.flat_map(|(_, slice)| &slice.shares).any(|other| {
        let group = &terms[other.service].apart;
        let same =
            |one: &ServiceShare| one.service != other.service && terms[one.service].apart == *group;
        !group.is_empty() && shares.iter().any(same)
    })
}

/// A slice of the same kind elsewhere whose exchange with this one leaves neither GPU in conflict
/// because of them.
fn exchange(
    terms: &[&ServiceTerms],
    plan: &Plan,
    number: usize,
    place: usize,
) -> Option<(usize, usize)> {
    let kind = plan.gpus[number].slices[place].kind;
    for (other, gpu) in plan.gpus.iter().enumerate().filter(|(other, _)| *other != number) {
        for (index, slice) in gpu.slices.iter().enumerate().filter(|(_, s)| s.kind == kind) {
            let (mut mine, mut theirs) = (plan.gpus[number].clone(), gpu.clone());
            mine.slices[place].shares.clone_from(&slice.shares);
            theirs.slices[index].shares.clone_from(&plan.gpus[number].slices[place].shares);
            let before = conflicts(terms, gpu, index);
            if !conflicts(terms, &mine, place) && !conflicts(terms, &theirs, index) && !before {
                return Some((other, index));
            }
        }
    }
    None
}
