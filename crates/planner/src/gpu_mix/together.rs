//! Services that are kept together: all slices of a group on one GPU, in one machine or in a rack.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::layout::{FailureDomain, Layout};
use crate::certified;
use crate::error::PlanError;
use crate::gpu::GpuKind;
use crate::plan::{Plan, PlannedGpu, PlannedSlice};
use crate::problem::Problem;
use crate::search_control::SearchControl;
use crate::service_file::ServiceTerms;

/// Terms in which every service of a group names the narrowest domain that one of them names.
pub(super) fn narrowed(terms: &mut [ServiceTerms]) {
    let mut narrowest: BTreeMap<String, FailureDomain> = BTreeMap::new();
    for one in terms.iter() {
        let domain = narrowest.entry(one.together.clone()).or_insert(one.together_by);
        *domain = (*domain).min(one.together_by);
    }
    for one in terms.iter_mut().filter(|one| !one.together.is_empty()) {
        one.together_by = narrowest.get(&one.together).copied().unwrap_or_default();
    }
}

/// The GPUs of a plan that each group uses, with the size of its domain.
fn gpus_of_groups<'t>(
    terms: &[&'t ServiceTerms],
    layout: Layout,
    plan: &Plan,
) -> BTreeMap<&'t str, (usize, BTreeSet<usize>)> {
    let mut groups: BTreeMap<&str, (usize, BTreeSet<usize>)> = BTreeMap::new();
    for (number, gpu) in plan.gpus.iter().enumerate() {
        for share in gpu.slices.iter().flat_map(|slice| &slice.shares) {
            let ServiceTerms { together, together_by, .. } = terms[share.service];
            if !together.is_empty() {
                let size = layout.gpus(*together_by).unwrap_or(1);
                groups.entry(together).or_insert((size, BTreeSet::new())).1.insert(number);
            }
        }
    }
    groups
}

/// Groups that are in more than one domain.
pub(super) fn scattered<'t>(
    terms: &[&'t ServiceTerms],
    layout: Layout,
    plan: &Plan,
) -> Vec<&'t str> {
    let groups = gpus_of_groups(terms, layout, plan).into_iter();
    let is_scattered = |(size, gpus): &(usize, BTreeSet<usize>)| {
        let domains: BTreeSet<usize> = gpus.iter().map(|gpu| gpu / size).collect();
        domains.len() > 1
    };
    groups.filter(|(_, group)| is_scattered(group)).map(|(name, _)| name).collect()
}

/// Whether there are groups.
pub(super) fn has_groups(terms: &[&ServiceTerms]) -> bool {
    terms.iter().any(|one| !one.together.is_empty())
}

/// A plan that keeps groups together: that of all services, if its GPUs can be ordered so, or one
/// in which each group was planned alone.
pub(super) fn plan(
    problem: &Problem,
    terms: &[&ServiceTerms],
    layout: Layout,
    control: &mut SearchControl<'_>,
) -> Result<Plan, PlanError> {
    let whole = certified::plan(problem, control)?.plan;
    if let Some(whole) = gathered(terms, layout, whole) {
        return Ok(whole);
    }
    let by_groups = planned_by_group(problem, terms, layout, control)?;
    gathered(terms, layout, by_groups).ok_or_else(|| PlanError::Unsupported {
        algorithm: "certified",
        what: "these groups cannot be kept together".to_string(),
    })
}

/// Orders the GPUs so that the GPUs of each group are in one domain. Positions may stay empty.
/// `None` if groups that share GPUs have more of them than a domain.
fn gathered(terms: &[&ServiceTerms], layout: Layout, mut plan: Plan) -> Option<Plan> {
    let groups = gpus_of_groups(terms, layout, &plan);
    // GPUs that belong together, and the size of the smallest domain of their groups.
    let mut blocks: Vec<(usize, BTreeSet<usize>)> = Vec::new();
    for (size, gpus) in groups.into_values().filter(|(_, gpus)| gpus.len() > 1) {
        let (joined, others): (Vec<_>, Vec<_>) =
            blocks.into_iter().partition(|(_, block)| !block.is_disjoint(&gpus));
        let all = joined.iter().flat_map(|(_, block)| block).chain(&gpus).copied();
        let smallest = joined.iter().map(|(size, _)| *size).fold(size, usize::min);
        let block = (smallest, all.collect());
        blocks = others;
        blocks.push(block);
    }
    if blocks.iter().any(|(size, block)| block.len() > *size) {
        return None;
    }
    blocks.sort_by_key(|(size, block)| (*size, Reverse(block.len())));
    let mut positions: Vec<Option<usize>> = Vec::new();
    let mut placed = BTreeSet::new();
    for (size, block) in blocks {
        let free = |domain: usize| {
            let all = domain * size..(domain + 1) * size;
            all.filter(|at| positions.get(*at).is_none_or(Option::is_none)).collect::<Vec<_>>()
        };
        // A domain beyond all others is free, so this ends.
        let places = (0..).map(free).find(|free| free.len() >= block.len())?;
        for (at, gpu) in places.into_iter().zip(block) {
            positions.resize(positions.len().max(at + 1), None);
            positions[at] = Some(gpu);
            placed.insert(gpu);
        }
    }
    let mut others = (0..plan.gpus.len()).filter(|gpu| !placed.contains(gpu));
    for place in positions.iter_mut().filter(|place| place.is_none()) {
        *place = others.next();
    }
    positions.extend(others.map(Some));
    let take = |gpu: Option<usize>| {
        gpu.map_or_else(PlannedGpu::default, |gpu| std::mem::take(&mut plan.gpus[gpu]))
    };
    Some(Plan { gpus: positions.into_iter().map(take).collect() })
}

/// Every group planned alone, the other services as well, and then put onto as few GPUs as whole
/// slices allow.
fn planned_by_group(
    problem: &Problem,
    terms: &[&ServiceTerms],
    layout: Layout,
    control: &mut SearchControl<'_>,
) -> Result<Plan, PlanError> {
    let mut groups: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (service, one) in terms.iter().enumerate() {
        groups.entry(&one.together).or_default().push(service);
    }
    let mut plan = Plan::default();
    for (group, services) in groups {
        let own = services.iter().map(|&service| problem.services[service].clone()).collect();
        let alone = Problem { services: own, ..problem.clone() };
        let mut found = certified::plan(&alone, control)?.plan;
        let domain = terms[services[0]].together_by;
        let most = layout.gpus(domain).unwrap_or(1);
        if !group.is_empty() && found.gpus.len() > most {
            return Err(PlanError::Unsupported {
                algorithm: "certified",
                what: format!(
                    "group '{group}' takes {} gpus of {}, and is together in one {} of {most}",
                    found.gpus.len(),
                    problem.gpu.name,
                    domain.name()
                ),
            });
        }
        for share in
            found.gpus.iter_mut().flat_map(|gpu| &mut gpu.slices).flat_map(|s| &mut s.shares)
        {
            share.service = services[share.service];
        }
        plan.gpus.extend(found.gpus);
    }
    compact(problem.gpu, terms, layout, &mut plan);
    Ok(plan)
}

/// Empties GPUs whose slices fit elsewhere, those with the least work first: slices of no group
/// anywhere, and those of groups that are on this GPU alone onto one other GPU.
fn compact(gpu: &GpuKind, terms: &[&ServiceTerms], layout: Layout, plan: &mut Plan) {
    let mut order: Vec<usize> = (0..plan.gpus.len()).collect();
    let work = |one: &PlannedGpu| -> u32 {
        one.slices.iter().map(|slice| u32::from(gpu.slices[slice.kind].gpcs)).sum()
    };
    order.sort_by_key(|&number| work(&plan.gpus[number]));
    for from in order {
        let groups = gpus_of_groups(terms, layout, plan);
        let mine: Vec<usize> = groups
            .values()
            .filter(|(_, gpus)| gpus.contains(&from))
            .map(|(_, gpus)| gpus.len())
            .collect();
        if mine.iter().any(|gpus| *gpus > 1) {
            continue;
        }
        let slices = plan.gpus[from].slices.clone();
        let mut others: Vec<usize> = (0..plan.gpus.len())
            .filter(|&to| to != from && !plan.gpus[to].slices.is_empty())
            .collect();
        others.sort_by_key(|&to| Reverse(work(&plan.gpus[to])));
        let moved = match mine.is_empty() {
            true => onto(gpu, &plan.gpus, &others, &slices),
            false => others.iter().find_map(|to| onto(gpu, &plan.gpus, &[*to], &slices)),
        };
        if let Some(moved) = moved {
            moved.into_iter().for_each(|(to, one)| plan.gpus[to] = one);
            plan.gpus[from] = PlannedGpu::default();
        }
    }
    plan.gpus.retain(|one| !one.slices.is_empty());
}

/// The GPUs that change when all `slices` are added to some of `others`; `None` if they do not fit.
fn onto(
    gpu: &GpuKind,
    gpus: &[PlannedGpu],
    others: &[usize],
    slices: &[PlannedSlice],
) -> Option<BTreeMap<usize, PlannedGpu>> {
    let mut slices: Vec<&PlannedSlice> = slices.iter().collect();
    slices.sort_by_key(|slice| Reverse(gpu.slices[slice.kind].memory_slices));
    let mut changed: BTreeMap<usize, PlannedGpu> = BTreeMap::new();
    for slice in slices {
        let (to, start) = others.iter().find_map(|to| {
            let now = changed.get(to).unwrap_or(&gpus[*to]);
            Some((*to, free_start(gpu, now, slice.kind)?))
        })?;
        let one = changed.entry(to).or_insert_with(|| gpus[to].clone());
        one.slices.push(PlannedSlice { start, ..slice.clone() });
        one.slices.sort_by_key(|slice| slice.start);
    }
    Some(changed)
}

/// Where another slice of a kind may start.
fn free_start(gpu: &GpuKind, now: &PlannedGpu, kind: usize) -> Option<u8> {
    let wanted = &gpu.slices[kind];
    let used: u32 = now.slices.iter().map(|slice| u32::from(gpu.slices[slice.kind].gpcs)).sum();
    if used + u32::from(wanted.gpcs) > u32::from(gpu.gpcs) {
        return None;
    }
    let is_free = |start: &u8| {
        let end = start + wanted.memory_slices;
        end <= gpu.memory_slices
            && now.slices.iter().all(|slice| {
                slice.start >= end || slice.start + gpu.slices[slice.kind].memory_slices <= *start
            })
    };
    wanted.starts.iter().copied().find(is_free)
}
