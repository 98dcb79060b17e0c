//! Closes the gap to the bound: selects other covers for several services at once, so that all
//! slices fit on one GPU less.
//!
//! Only covers whose price above the cheapest is within the gap can be in such a plan (reduced-cost
//! fixing); these are few. The search goes service by service, merges states with equal sums and
//! keeps the cheapest states. It is exact unless states are dropped.

use std::collections::HashMap;

use base::Random;

use super::cover::{Prices, cheapest, covers_within};
use super::packing::{Packed, PatternPacker};
use crate::gpu::{KINDS_MAX, SliceCounts};
use crate::problem::ServiceDemand;
use crate::search_control::SearchControl;

const STATES_MAX: usize = 3000;
const COVERS_MAX: usize = 60;
const PACKINGS_MAX: usize = 400;
/// Services that get another cover at once in a large plan.
const SERVICES_AT_ONCE: usize = 14;

/// Inputs of the search.
pub(crate) struct Gap<'a> {
    pub(crate) demands: &'a [ServiceDemand],
    pub(crate) packer: &'a PatternPacker,
    pub(crate) prices: &'a Prices,
    pub(crate) rounds: usize,
}

/// Sums of slices over all services.
pub(crate) fn total(covers: &[SliceCounts]) -> SliceCounts {
    let mut sum = [0; KINDS_MAX];
    for cover in covers {
        (0..KINDS_MAX).for_each(|kind| sum[kind] += cover[kind]);
    }
    sum
}

impl Gap<'_> {
    /// Changes `covers` so that they fit on `target` GPUs, if possible.
    pub(crate) fn close(
        &self,
        covers: &mut [SliceCounts],
        target: usize,
        control: &mut SearchControl<'_>,
    ) -> Option<Packed> {
        let mut random = Random::new(target as u64);
        let count = self.demands.len();
        let rounds = if count <= SERVICES_AT_ONCE { 1 } else { self.rounds };
        for _ in 0..rounds {
            if !control.should_continue("search", Some(target + 1), 0.0) {
                return None;
            }
            let mut chosen: Vec<usize> = (0..count).collect();
            if count > SERVICES_AT_ONCE {
                for at in 0..SERVICES_AT_ONCE {
                    chosen.swap(at, at + random.below((count - at) as u64) as usize);
                }
                chosen.truncate(SERVICES_AT_ONCE);
            }
            if let Some(packed) = self.reselect_covers(covers, &chosen, target) {
                return Some(packed);
            }
        }
        None
    }

    fn reselect_covers(
        &self,
        covers: &mut [SliceCounts],
        chosen: &[usize],
        target: usize,
    ) -> Option<Packed> {
        let worth = |counts: &SliceCounts| -> f64 {
            (0..KINDS_MAX).map(|kind| f64::from(counts[kind]) * self.prices[kind]).sum()
        };
        let mut fixed = total(covers);
        for &service in chosen {
            (0..KINDS_MAX).for_each(|kind| fixed[kind] -= covers[service][kind]);
        }
        let min_cost: Vec<f64> =
            chosen.iter().map(|&s| cheapest(&self.demands[s], self.prices).bound).collect();
        let slack = target as f64 - worth(&fixed) - min_cost.iter().sum::<f64>() + 1e-9;
        if slack < 0.0 {
            return None;
        }
        let mut layers =
            vec![vec![State { sum: fixed, above: 0.0, from: 0, cover: [0; KINDS_MAX] }]];
        for (&service, min_cost) in chosen.iter().zip(&min_cost) {
            let options =
                covers_within(&self.demands[service], self.prices, min_cost + slack, COVERS_MAX);
            let next = extend(layers.last()?, &options, *min_cost, slack);
            layers.push(next);
        }
        let last = layers.last()?;
        for (index, state) in last.iter().enumerate().take(PACKINGS_MAX) {
            if let Some(packed) = self.packer.pack_within(&state.sum, target) {
                let mut at = index;
                for (layer, &service) in layers[1..].iter().zip(chosen).rev() {
                    covers[service] = layer[at].cover;
                    at = layer[at].from;
                }
                return Some(packed);
            }
        }
        None
    }
}

struct State {
    sum: SliceCounts,
    /// Price above the cheapest so far.
    above: f64,
    from: usize,
    cover: SliceCounts,
}

fn extend(
    states: &[State],
    options: &[(SliceCounts, f64)],
    min_cost: f64,
    slack: f64,
) -> Vec<State> {
    let mut next: Vec<State> = Vec::new();
    let mut known: HashMap<SliceCounts, usize> = HashMap::new();
    for (from, state) in states.iter().enumerate() {
        for (cover, cost) in options {
            let above = state.above + (cost - min_cost).max(0.0);
            if above > slack {
                break;
            }
            let sum: SliceCounts = std::array::from_fn(|kind| state.sum[kind] + cover[kind]);
            let new = State { sum, above, from, cover: *cover };
            match known.get(&sum) {
                Some(&at) if next[at].above <= above => {}
                Some(&at) => next[at] = new,
                None => {
                    known.insert(sum, next.len());
                    next.push(new);
                }
            }
        }
    }
    next.sort_by(|a, b| a.above.total_cmp(&b.above).then(a.sum.cmp(&b.sum)));
    next.truncate(STATES_MAX);
    next
}
