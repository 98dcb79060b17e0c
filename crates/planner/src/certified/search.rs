//! Closes the gap to the bound: selects other covers for several services at once, so that all
//! slices fit on one GPU less.
//!
//! Only covers whose price above the cheapest is within the gap can be in such a plan (reduced-cost
//! fixing); these are few. A large service keeps most of its mixture, and only covers of the rest
//! are searched. The search goes service by service, merges states with equal sums and keeps the
//! cheapest states.

use std::collections::HashMap;

use base::Random;

use super::cover::{Prices, cheapest, covers_within};
use super::packing::{Packed, PatternPacker};
use super::rounding::{Kept, Mixture, is_large, keep};
use crate::gpu::{KINDS_MAX, SliceCounts};
use crate::problem::ServiceDemand;
use crate::search_control::SearchControl;

const STATES_MAX: usize = 3000;
/// Covers of all services of one search together, and of one service at least.
const COVERS_TOTAL_MAX: usize = 3000;
const COVERS_MIN: usize = 60;
const PACKINGS_MAX: usize = 1500;
/// Services that get another cover at once in a large plan, and how many of them are large if there
/// are so many.
const SERVICES_AT_ONCE: usize = 14;
const LARGE_AT_ONCE: usize = 5;
/// Slices of each kind that large services give back, in turn.
const GIVE_BACKS: [u32; 4] = [1, 2, 0, 4];

/// Inputs of the search.
pub(crate) struct Gap<'a> {
    pub(crate) demands: &'a [ServiceDemand],
    pub(crate) mixtures: &'a [Mixture],
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
        let (large, small): (Vec<usize>, Vec<usize>) =
            (0..count).partition(|&service| is_large(&self.mixtures[service]));
        let rounds = match count <= SERVICES_AT_ONCE {
            true if large.is_empty() => 1,
            true => GIVE_BACKS.len(),
            false => self.rounds,
        };
        for round in 0..rounds {
            if !control.should_continue("search", Some(target + 1), 0.0) {
                return None;
            }
            let mut chosen: Vec<usize> = (0..count).collect();
            if count > SERVICES_AT_ONCE {
                let most = LARGE_AT_ONCE.max(SERVICES_AT_ONCE.saturating_sub(small.len()));
                chosen = pick(&large, most, &mut random);
                chosen.extend(pick(&small, SERVICES_AT_ONCE - chosen.len(), &mut random));
            }
            let give_back = GIVE_BACKS[round % GIVE_BACKS.len()];
            if let Some(packed) = self.reselect_covers(covers, &chosen, target, give_back) {
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
        give_back: u32,
    ) -> Option<Packed> {
        let worth = |counts: &SliceCounts| -> f64 {
            (0..KINDS_MAX).map(|kind| f64::from(counts[kind]) * self.prices[kind]).sum()
        };
        let kept: Vec<Kept> = chosen
            .iter()
            .map(|&service| keep(&self.demands[service], &self.mixtures[service], give_back))
            .collect();
        let mut fixed = total(covers);
        for (&service, kept) in chosen.iter().zip(&kept) {
            (0..KINDS_MAX).for_each(|k| fixed[k] = fixed[k] - covers[service][k] + kept.slices[k]);
        }
        let min_cost: Vec<f64> =
            kept.iter().map(|kept| cheapest(&kept.rest, self.prices).bound).collect();
        let slack = target as f64 - worth(&fixed) - min_cost.iter().sum::<f64>() + 1e-9;
        if slack < 0.0 {
            return None;
        }
        let covers_max = COVERS_MIN.max(COVERS_TOTAL_MAX / chosen.len());
        let mut layers =
            vec![vec![State { sum: fixed, above: 0.0, from: 0, cover: [0; KINDS_MAX] }]];
        for (kept, min_cost) in kept.iter().zip(&min_cost) {
            let options = covers_within(&kept.rest, self.prices, min_cost + slack, covers_max);
            let next = extend(layers.last()?, &options, *min_cost, slack);
            layers.push(next);
        }
        let last = layers.last()?;
        for (index, state) in last.iter().enumerate().take(PACKINGS_MAX) {
            if let Some(packed) = self.packer.pack_within(&state.sum, target) {
                let mut at = index;
                for ((layer, &service), kept) in layers[1..].iter().zip(chosen).zip(&kept).rev() {
                    let cover = &layer[at].cover;
                    covers[service] = std::array::from_fn(|k| kept.slices[k] + cover[k]);
                    at = layer[at].from;
                }
                return Some(packed);
            }
        }
        None
    }
}

/// At most `max` of `all`, at random.
fn pick(all: &[usize], max: usize, random: &mut Random) -> Vec<usize> {
    let mut chosen = all.to_vec();
    for at in 0..max.min(chosen.len()) {
        let other = at + random.below((chosen.len() - at) as u64) as usize;
        chosen.swap(at, other);
    }
    chosen.truncate(max);
    chosen
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
