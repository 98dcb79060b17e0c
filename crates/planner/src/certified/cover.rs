//! Covers: numbers of slices of each kind that serve one service. Finds the cheapest one under
//! given prices, exactly.

use crate::gpu::{KINDS_MAX, SliceCounts};
use crate::problem::ServiceDemand;

/// A price for each kind of slice, in GPUs.
pub(crate) type Prices = [f64; KINDS_MAX];

/// Relative error up to which a demand counts as met.
const MET: f64 = 1e-9;

/// Steps after which a search returns the bound of the relaxation.
const STEPS_MAX: u32 = 20_000;

/// A cheapest cover.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Priced {
    pub(crate) cover: SliceCounts,
    /// Minimum cost of any cover; equals the cost of this one unless the search was cut off.
    pub(crate) bound: f64,
}

struct Item {
    kind: usize,
    throughput: f64,
    price: f64,
    ratio: f64,
}

struct Search<'a> {
    items: &'a [Item],
    met: f64,
    counts: SliceCounts,
    best: SliceCounts,
    best_cost: f64,
    steps: u32,
}

/// The cheapest cover of `demand` under `prices`: depth first over the kinds in order of price per
/// request, with the remaining rate at the best remaining ratio as the bound.
pub(crate) fn cheapest(demand: &ServiceDemand, prices: &Prices) -> Priced {
    let mut buffer: [Item; KINDS_MAX] =
        std::array::from_fn(|_| Item { kind: 0, throughput: 0.0, price: 0.0, ratio: 0.0 });
    let mut used = 0;
    for (kind, (&throughput, &price)) in demand.throughput.iter().zip(prices).enumerate() {
        if throughput > 0.0 {
            buffer[used] = Item { kind, throughput, price, ratio: price / throughput };
            used += 1;
        }
    }
    let items = &mut buffer[..used];
    items.sort_unstable_by(|a, b| a.ratio.total_cmp(&b.ratio));
    let mut search = Search {
        items,
        met: demand.rate * MET,
        counts: [0; KINDS_MAX],
        best: [0; KINDS_MAX],
        best_cost: f64::INFINITY,
        steps: 0,
    };
    search.descend(0, demand.rate, 0.0);
    let relaxed = search.items.first().map_or(f64::INFINITY, |item| item.ratio * demand.rate);
    let complete = search.steps < STEPS_MAX;
    let bound = if complete { search.best_cost } else { relaxed * (1.0 - MET) };
    Priced { cover: search.best, bound }
}

impl Search<'_> {
    fn descend(&mut self, level: usize, remaining: f64, cost: f64) {
        let item = &self.items[level];
        let max = ((remaining - self.met) / item.throughput).ceil().max(1.0) as u32;
        for count in (0..=max).rev() {
            self.steps += 1;
            if self.steps >= STEPS_MAX {
                break;
            }
            let cost = cost + f64::from(count) * item.price;
            if cost >= self.best_cost - 1e-12 && count == 0 {
                break;
            }
            if count == max {
                if cost < self.best_cost - 1e-12 {
                    self.counts[item.kind] = count;
                    self.best = self.counts;
                    self.best_cost = cost;
                }
                continue;
            }
            let Some(next) = self.items.get(level + 1) else { break };
            let remaining = remaining - f64::from(count) * item.throughput;
            // Fewer slices of the better kind only raise this bound, so no smaller count is better.
            if cost + remaining * next.ratio >= self.best_cost - 1e-12 {
                break;
            }
            self.counts[item.kind] = count;
            self.descend(level + 1, remaining, cost);
        }
        self.counts[item.kind] = 0;
    }
}

/// Covers without a superfluous slice that cost at most `limit`, cheapest first, at most
/// `count_max` of them.
pub(crate) fn covers_within(
    demand: &ServiceDemand,
    prices: &Prices,
    limit: f64,
    count_max: usize,
) -> Vec<(SliceCounts, f64)> {
    let kinds: Vec<usize> = (0..KINDS_MAX).filter(|&k| demand.throughput[k] > 0.0).collect();
    let mut ratios = vec![f64::INFINITY; kinds.len() + 1];
    for (at, &kind) in kinds.iter().enumerate().rev() {
        ratios[at] = (prices[kind] / demand.throughput[kind]).min(ratios[at + 1]);
    }
    let mut found = Vec::new();
    let mut steps = 0;
    let mut stack = vec![(0usize, demand.rate, 0.0f64, [0; KINDS_MAX])];
    while let Some((level, remaining, cost, counts)) = stack.pop() {
        steps += 1;
        if steps > STEPS_MAX * 5 {
            break;
        }
        if remaining <= demand.rate * MET {
            if is_minimal(demand, &counts) {
                found.push((counts, cost));
            }
            continue;
        }
        let Some(&kind) = kinds.get(level) else { continue };
        if cost + remaining * ratios[level] > limit {
            continue;
        }
        let throughput = demand.throughput[kind];
        let max = ((remaining - demand.rate * MET) / throughput).ceil().max(1.0) as u32;
        for count in 0..=max {
            let cost = cost + f64::from(count) * prices[kind];
            if cost > limit {
                break;
            }
            let mut counts = counts;
            counts[kind] = count;
            stack.push((level + 1, remaining - f64::from(count) * throughput, cost, counts));
        }
    }
    found.sort_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)));
    found.truncate(count_max);
    found
}

fn is_minimal(demand: &ServiceDemand, counts: &SliceCounts) -> bool {
    let total: f64 = (0..KINDS_MAX).map(|k| f64::from(counts[k]) * demand.throughput[k]).sum();
    (0..KINDS_MAX).all(|kind| {
        counts[kind] == 0 || total - demand.throughput[kind] < demand.rate * (1.0 - MET)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::Random;

    fn cost(cover: &SliceCounts, prices: &Prices) -> f64 {
        cover.iter().zip(prices).map(|(&count, price)| f64::from(count) * price).sum()
    }

    /// Every count vector up to what one kind alone would need.
    fn brute(demand: &ServiceDemand, prices: &Prices) -> f64 {
        fn rest(demand: &ServiceDemand, prices: &Prices, kind: usize, remaining: f64) -> f64 {
            if remaining <= demand.rate * MET {
                return 0.0;
            }
            if kind == KINDS_MAX {
                return f64::INFINITY;
            }
            let throughput = demand.throughput[kind];
            let max = if throughput > 0.0 { (remaining / throughput).ceil() as u32 } else { 0 };
            (0..=max)
                .map(|count| {
                    let count = f64::from(count);
                    count * prices[kind]
                        + rest(demand, prices, kind + 1, remaining - count * throughput)
                })
                .fold(f64::INFINITY, f64::min)
        }
        rest(demand, prices, 0, demand.rate)
    }

    #[test]
    fn the_cheapest_cover_is_the_brute_force_one() {
        let mut random = Random::new(7);
        for _ in 0..2000 {
            let mut throughput = [0.0; KINDS_MAX];
            let mut prices = [0.0; KINDS_MAX];
            for kind in 0..KINDS_MAX {
                if random.below(4) > 0 {
                    throughput[kind] = 10.0 + random.unit_f64() * 90.0;
                }
                prices[kind] = random.unit_f64();
            }
            throughput[0] += 20.0;
            let rate = 5.0 + random.unit_f64() * 250.0;
            let demand = ServiceDemand { rate, limit_ms: 0.0, throughput, point: [0; KINDS_MAX] };
            let found = cheapest(&demand, &prices);
            let expected = brute(&demand, &prices);
            assert!((found.bound - expected).abs() < 1e-9, "{} {expected}", found.bound);
            assert!((cost(&found.cover, &prices) - expected).abs() < 1e-9);
            let listed = covers_within(&demand, &prices, expected + 0.3, 10_000);
            assert!((listed[0].1 - expected).abs() < 1e-9);
        }
    }

    #[test]
    fn absurd_rates_end_with_a_valid_bound() {
        let throughput = [100.0, 0.0, 200.0, 300.0, 400.0, 700.0];
        let prices = [1.0 / 7.0, 1.0, 2.0 / 7.0, 3.0 / 7.0, 4.0 / 7.0, 1.0];
        let demand = ServiceDemand { rate: 1e9, limit_ms: 0.0, throughput, point: [0; KINDS_MAX] };
        let found = cheapest(&demand, &prices);
        let cost = cost(&found.cover, &prices);
        assert!(found.bound <= cost && found.bound > cost * 0.999);
    }
}
