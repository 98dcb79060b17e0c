//! From the relaxed optimum to whole covers: each service takes a cover so that the sums stay close
//! to the mixture's.
//!
//! A small service takes one of the covers of its mixture. A large service keeps most of the
//! mixture itself, rounded down, and only the rest of its rate gets another cover: one extreme
//! cover for all of it would unbalance the kinds by many GPUs.

use super::cover::{Prices, cheapest, covers_within};
use super::dual::{Bound, Groups, slice_prices};
use crate::gpu::{KINDS_MAX, SliceCounts};
use crate::problem::ServiceDemand;

/// Slices from which a service counts as large.
const LARGE: f64 = 6.0;
/// Price above the cheapest, and number, of the covers tried for the rest of a large service.
const REST_ABOVE: f64 = 0.15;
const RESTS_MAX: usize = 200;
/// Relative error up to which a demand counts as met.
const MET: f64 = 1e-9;

/// Slices of a service in the relaxed optimum.
pub(crate) type Mixture = [f64; KINDS_MAX];

/// A part of a service that is not searched, and the demand that remains.
pub(crate) struct Kept {
    pub(crate) slices: SliceCounts,
    pub(crate) rest: ServiceDemand,
}

/// A cover and a mixture for every service.
pub(crate) struct Rounded {
    pub(crate) covers: Vec<SliceCounts>,
    pub(crate) mixtures: Vec<Mixture>,
}

/// Rounds the relaxed optimum.
pub(crate) fn round(demands: &[ServiceDemand], groups: &Groups, bound: &Bound) -> Rounded {
    let mut covers = vec![[0; KINDS_MAX]; demands.len()];
    let mut mixtures = vec![[0.0; KINDS_MAX]; demands.len()];
    let mut error = [0.0; KINDS_MAX];
    let best = slice_prices(&bound.prices);
    for (index, group) in groups.0.iter().enumerate() {
        let mut mixed: Vec<(Prices, f64)> = bound
            .mixture
            .iter()
            .filter(|mixed| mixed.group == index)
            .map(|mixed| (slice_prices(&mixed.prices), mixed.weight))
            .collect();
        if mixed.is_empty() {
            mixed.push((best, 1.0));
        }
        let total: f64 = mixed.iter().map(|(_, weight)| weight).sum();
        for &service in group {
            let service = service as usize;
            let demand = &demands[service];
            let mut options: Vec<SliceCounts> = Vec::with_capacity(mixed.len());
            let mut mixture = [0.0; KINDS_MAX];
            for (prices, weight) in &mixed {
                let cover = cheapest(demand, prices).cover;
                (0..KINDS_MAX).for_each(|k| mixture[k] += weight / total * f64::from(cover[k]));
                options.push(cover);
            }
            if options.len() > 1 && is_large(&mixture) {
                options = rests(demand, &mixture, &best);
            }
            covers[service] = choose(&options, &mixture, &mut error, &best);
            mixtures[service] = mixture;
        }
    }
    Rounded { covers, mixtures }
}

/// Whether a service is so large that most of its mixture is kept.
pub(crate) fn is_large(mixture: &Mixture) -> bool {
    mixture.iter().sum::<f64>() >= LARGE
}

/// What a service keeps in a search: its mixture rounded down, less `give_back` slices of each
/// kind; nothing if it is small.
pub(crate) fn keep(demand: &ServiceDemand, mixture: &Mixture, give_back: u32) -> Kept {
    let mut slices = [0; KINDS_MAX];
    if is_large(mixture) {
        slices = mixture.map(|count| ((count + 1e-6) as u32).saturating_sub(give_back));
    }
    let served = |slices: &SliceCounts| -> f64 {
        (0..KINDS_MAX).map(|kind| f64::from(slices[kind]) * demand.throughput[kind]).sum()
    };
    // Something remains to be covered.
    while served(&slices) >= demand.rate * (1.0 - MET) {
        match slices.iter_mut().max() {
            Some(count) if *count > 0 => *count -= 1,
            _ => break,
        }
    }
    let rate = demand.rate - served(&slices);
    Kept { slices, rest: ServiceDemand { rate, ..demand.clone() } }
}

/// Covers of a large service: what it keeps, with each of the cheap covers of the rest.
fn rests(demand: &ServiceDemand, mixture: &Mixture, prices: &Prices) -> Vec<SliceCounts> {
    let Kept { slices, rest } = keep(demand, mixture, 1);
    let first = cheapest(&rest, prices);
    let near = covers_within(&rest, prices, first.bound + REST_ABOVE, RESTS_MAX);
    let all = std::iter::once(first.cover).chain(near.into_iter().map(|(cover, _)| cover));
    all.map(|cover| std::array::from_fn(|kind| slices[kind] + cover[kind])).collect()
}

/// The option that keeps the sum of all choices nearest to the sum of all mixtures; `error` is
/// their difference.
fn choose(
    options: &[SliceCounts],
    mixture: &Mixture,
    error: &mut [f64; KINDS_MAX],
    prices: &Prices,
) -> SliceCounts {
    let target: [f64; KINDS_MAX] = std::array::from_fn(|kind| error[kind] - mixture[kind]);
    let distance = |cover: &SliceCounts| -> f64 {
        (0..KINDS_MAX)
            .map(|kind| ((target[kind] + f64::from(cover[kind])) * (prices[kind] + 0.01)).powi(2))
            .sum()
    };
    let Some(best) = options.iter().min_by(|a, b| distance(a).total_cmp(&distance(b))) else {
        return [0; KINDS_MAX];
    };
    (0..KINDS_MAX).for_each(|kind| error[kind] = target[kind] + f64::from(best[kind]));
    *best
}
