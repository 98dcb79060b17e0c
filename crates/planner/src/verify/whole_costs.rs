//! What services pay at least where slices are not shared, in whole numbers.
//!
//! Prices are rounded down, throughputs up and demands down to units of a power of two. That makes
//! covers cheaper at most, so the sum stays a lower bound; all further arithmetic is exact.

use std::collections::BTreeMap;

use super::ratio::Ratio;
use super::{KindPrices, TOLERANCE, demand, may_run_alone, stretched};
use crate::gpu::KINDS_MAX;
use crate::problem::{Problem, Service};

/// Binary digits of a price and of a rate.
const PRICE_BITS: u64 = 48;
const RATE_BITS: u64 = 32;
/// Steps after which a search returns what the best price per request gives.
const STEPS_MAX: u32 = 50_000;

/// A slice kind for one service.
struct Item {
    throughput: u128,
    price: u128,
}

pub(super) fn each(problem: &Problem, prices: &[KindPrices]) -> Vec<Ratio> {
    let prices: Vec<u128> =
        prices.iter().map(|price| price.slice.floor_units(PRICE_BITS)).collect();
    let mut throughputs: BTreeMap<(&str, u64), [u128; KINDS_MAX]> = BTreeMap::new();
    let mut costs = Vec::with_capacity(problem.services.len());
    for service in &problem.services {
        let throughput = throughputs
            .entry((service.model.as_str(), service.slo_ms.to_bits()))
            .or_insert_with(|| best(problem, service));
        let mut items: Vec<Item> = (throughput.iter().zip(&prices))
            .filter(|(throughput, _)| **throughput > 0)
            .map(|(&throughput, &price)| Item { throughput, price })
            .collect();
        // Cheapest per request first, by cross products.
        items.sort_by(|a, b| (a.price * b.throughput).cmp(&(b.price * a.throughput)));
        let rate = demand(problem, service)
            .times(&Ratio::fraction(TOLERANCE - 1, TOLERANCE))
            .floor_units(RATE_BITS);
        costs.push(Ratio::of_units(cheapest(&items, rate), PRICE_BITS));
    }
    costs
}

/// Requests per second of one slice of each kind, in units, rounded up.
fn best(problem: &Problem, service: &Service) -> [u128; KINDS_MAX] {
    let points = problem.profiles.points(&service.model).unwrap_or_default();
    std::array::from_fn(|kind| {
        if kind >= problem.gpu.slices.len() {
            return 0;
        }
        let usable = points.iter().filter(|p| may_run_alone(problem, service, kind, p));
        let rates = usable.map(|p| stretched(&Ratio::from_f64(p.throughput)).ceil_units(RATE_BITS));
        rates.max().unwrap_or(0)
    })
}

/// The least price of slices with that rate together, or a lower bound of it.
fn cheapest(items: &[Item], rate: u128) -> u128 {
    let Some(first) = items.first() else { return 0 };
    let relaxed = rate * first.price / first.throughput;
    let mut search = Search { items, best: u128::MAX, steps: 0 };
    search.descend(0, rate, 0);
    if search.steps >= STEPS_MAX { relaxed } else { search.best.max(relaxed) }
}

struct Search<'a> {
    items: &'a [Item],
    best: u128,
    steps: u32,
}

impl Search<'_> {
    /// Covers `remaining` with kinds from `level` on.
    fn descend(&mut self, level: usize, remaining: u128, cost: u128) {
        let Some(item) = self.items.get(level) else { return };
        let most = remaining.div_ceil(item.throughput);
        let mut count = most;
        loop {
            self.steps += 1;
            if self.steps >= STEPS_MAX {
                return;
            }
            let cost = cost + count * item.price;
            if count == most {
                self.best = self.best.min(cost);
            } else {
                let rest = remaining - count * item.throughput;
                let Some(next) = self.items.get(level + 1) else { return };
                // A smaller count only raises this.
                if cost + rest * next.price / next.throughput >= self.best {
                    return;
                }
                self.descend(level + 1, rest, cost);
            }
            if count == 0 {
                return;
            }
            count -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::Random;

    /// The least price by dynamic programming over every rate.
    fn by_table(items: &[Item], rate: u128) -> u128 {
        let mut least = vec![0u128; rate as usize + 1];
        for at in 1..=rate as usize {
            let price =
                |item: &Item| least[at.saturating_sub(item.throughput as usize)] + item.price;
            least[at] = items.iter().map(price).min().unwrap_or(u128::MAX);
        }
        least[rate as usize]
    }

    #[test]
    fn the_least_price_is_that_of_the_table() {
        let mut random = Random::new(9);
        for _ in 0..500 {
            let kinds = 1 + random.below(5) as usize;
            let item = |_| Item {
                throughput: u128::from(1 + random.below(60)),
                price: u128::from(random.below(100)),
            };
            let mut items: Vec<Item> = (0..kinds).map(item).collect();
            items.sort_by(|a, b| (a.price * b.throughput).cmp(&(b.price * a.throughput)));
            let rate = u128::from(1 + random.below(400));
            assert_eq!(cheapest(&items, rate), by_table(&items, rate));
        }
    }
}
