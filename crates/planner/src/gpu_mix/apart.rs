//! Services that are kept apart: no two of a group on one GPU, in one machine or in one rack.

use std::collections::{BTreeMap, BTreeSet};

use super::layout::{FailureDomain, Layout};
use crate::error::PlanError;
use crate::plan::{Plan, PlannedGpu, ServiceShare};
use crate::problem::Problem;
use crate::service_file::ServiceTerms;

/// Domains with two services of one group: which domain, its number and the group.
pub(super) fn together<'t>(
    terms: &[&'t ServiceTerms],
    layout: Layout,
    plan: &Plan,
) -> Vec<(FailureDomain, usize, &'t str)> {
    let mut owners: BTreeMap<(&str, usize), usize> = BTreeMap::new();
    let mut found = BTreeSet::new();
    for (number, gpu) in plan.gpus.iter().enumerate() {
        for share in gpu.slices.iter().flat_map(|slice| &slice.shares) {
            let ServiceTerms { apart, apart_by, .. } = terms[share.service];
            if apart.is_empty() {
                continue;
            }
            let domain = number / layout.gpus(*apart_by).unwrap_or(1);
            if *owners.entry((apart, domain)).or_insert(share.service) != share.service {
                found.insert((*apart_by, domain, apart.as_str()));
            }
        }
    }
    found.into_iter().collect()
}

/// Terms in which every service of a group names the widest domain that one of them names.
pub(super) fn widened(terms: &[ServiceTerms]) -> Vec<ServiceTerms> {
    let mut widest: BTreeMap<&str, FailureDomain> = BTreeMap::new();
    for one in terms {
        let domain = widest.entry(&one.apart).or_default();
        *domain = (*domain).max(one.apart_by);
    }
    let wide = |one: &ServiceTerms| ServiceTerms {
        apart_by: widest.get(one.apart.as_str()).copied().unwrap_or_default(),
        ..one.clone()
    };
    terms.iter().map(wide).collect()
}

/// Orders the GPUs of a plan so that no machine or rack has two services of a group that it keeps
/// apart. Positions may stay empty. Returns whether there are such groups.
pub(super) fn arrange(terms: &[&ServiceTerms], layout: Layout, plan: &mut Plan) -> bool {
    let wide = |share: &ServiceShare| {
        let ServiceTerms { apart, apart_by, .. } = terms[share.service];
        let gpus = layout.gpus(*apart_by).unwrap_or(1);
        (gpus > 1 && !apart.is_empty()).then_some((gpus, apart.as_str(), share.service))
    };
    let rules_of = |gpu: &PlannedGpu| -> BTreeSet<(usize, &str, usize)> {
        gpu.slices.iter().flat_map(|slice| &slice.shares).filter_map(wide).collect()
    };
    let rules: Vec<_> = plan.gpus.iter().map(rules_of).collect();
    if rules.iter().all(BTreeSet::is_empty) {
        return false;
    }
    // Those with most rules choose first.
    let mut order: Vec<usize> = (0..rules.len()).collect();
    order.sort_by_key(|&gpu| std::cmp::Reverse(rules[gpu].len()));
    let mut placed: BTreeMap<usize, usize> = BTreeMap::new();
    let mut owners: BTreeMap<(&str, usize), usize> = BTreeMap::new();
    let mut free_from = 0;
    for gpu in order {
        while placed.contains_key(&free_from) {
            free_from += 1;
        }
        let mut position = free_from;
        // A domain beyond all others is free, so this ends.
        loop {
            let other = rules[gpu].iter().find(|(gpus, group, service)| {
                owners.get(&(*group, position / gpus)).is_some_and(|owner| owner != service)
            });
            match other {
                Some((gpus, _, _)) => position = (position / gpus + 1) * gpus,
                None if placed.contains_key(&position) => position += 1,
                None => break,
            }
        }
        for (gpus, group, service) in &rules[gpu] {
            owners.insert((group, position / gpus), *service);
        }
        placed.insert(position, gpu);
    }
    let last = placed.last_key_value().map_or(0, |(position, _)| position + 1);
    let mut gpus = vec![PlannedGpu::default(); last];
    for (position, gpu) in placed {
        gpus[position] = std::mem::take(&mut plan.gpus[gpu]);
    }
    plan.gpus = gpus;
    true
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
        !together(terms, Layout::default(), &one).is_empty()
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
        let Some(number) = first_conflict(terms, plan) else { return Ok(()) };
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

fn first_conflict(terms: &[&ServiceTerms], plan: &Plan) -> Option<usize> {
    (0..plan.gpus.len()).find(|&number| {
        let gpu = &plan.gpus[number];
        (0..gpu.slices.len()).any(|place| conflicts(terms, gpu, place))
    })
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
