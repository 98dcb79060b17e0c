//! From the relaxed optimum to whole covers: each service takes one of its group's covers so that
//! the sums stay close to the mixture's.

use super::cover::{Prices, cheapest};
use super::dual::{Bound, Groups, slice_prices};
use crate::gpu::{KINDS_MAX, SliceCounts};
use crate::problem::ServiceDemand;

/// A cover for every service.
pub(crate) fn round(demands: &[ServiceDemand], groups: &Groups, bound: &Bound) -> Vec<SliceCounts> {
    let mut covers = vec![[0; KINDS_MAX]; demands.len()];
    let mut error = [0.0; KINDS_MAX];
    let best = slice_prices(&bound.prices);
    for (index, group) in groups.0.iter().enumerate() {
        let mixed: Vec<(Prices, f64)> = bound
            .mixture
            .iter()
            .filter(|mixed| mixed.group == index)
            .map(|mixed| (slice_prices(&mixed.prices), mixed.weight))
            .collect();
        let total: f64 = mixed.iter().map(|(_, weight)| weight).sum();
        for &service in group {
            let service = service as usize;
            covers[service] = match mixed.as_slice() {
                [] => cheapest(&demands[service], &best).cover,
                [(prices, _)] => cheapest(&demands[service], prices).cover,
                several => {
                    let options: Vec<(SliceCounts, f64)> = several
                        .iter()
                        .map(|(prices, weight)| {
                            (cheapest(&demands[service], prices).cover, weight / total)
                        })
                        .collect();
                    choose(&options, &mut error, &best)
                }
            };
        }
    }
    covers
}

/// The option that keeps the sum of all choices nearest to the sum of all mixtures; `error` is
/// their difference.
fn choose(
    options: &[(SliceCounts, f64)],
    error: &mut [f64; KINDS_MAX],
    prices: &Prices,
) -> SliceCounts {
    let mut target = *error;
    for (cover, weight) in options {
        (0..KINDS_MAX).for_each(|kind| target[kind] -= weight * f64::from(cover[kind]));
    }
    let distance = |cover: &SliceCounts| -> f64 {
        (0..KINDS_MAX)
            .map(|kind| ((target[kind] + f64::from(cover[kind])) * (prices[kind] + 0.01)).powi(2))
            .sum()
    };
    let Some((best, _)) = options.iter().min_by(|a, b| distance(&a.0).total_cmp(&distance(&b.0)))
    else {
        return [0; KINDS_MAX];
    };
    (0..KINDS_MAX).for_each(|kind| error[kind] = target[kind] + f64::from(best[kind]));
    *best
}
