//! Minimum cost of a service on shared slices: the cheapest set of parts under given prices of time
//! and memory.
//!
//! A part is the share of one slice that a service uses. With turn `t` for `n` requests and cycle
//! `d` it serves `n / d` requests per second and takes the share `t / d` of the time and some share
//! of the memory. Its cycle is at most `limit - t`, which gives a minimum share; above it the rate
//! is proportional to the share. A part that has the slice to itself takes all time and memory.
//!
//! The parts of a slice never take more than all of its time or of its memory. So if the prices of
//! time and memory add up to the slice's price, the parts of a slice cost at most the slice, and
//! all parts cost at most the GPUs.
//!
//! In a cheapest set all parts but one are at an end of their range: of two that are not, the one
//! that costs more per request could give some of its rate to the other. So the search enumerates
//! multisets of ends, and one part of any size takes the remaining rate.
//!
//! Prices may differ by band of cycles: all the parts of a slice have its cycle, so they pay the
//! prices of one band. A band limits a part's share from both sides.
//!
//! While prices are looked for, a short search gives costs; [`PartPrices::least_cost`] proves them.

mod fronts;

use super::dual::{ROWS, Rows, Usage};
use crate::gpu::KINDS_MAX;

/// Relative slack of comparisons, well below the checker's.
const SLACK: f64 = 1e-9;
/// Steps after which a search ends with the cheapest parts so far.
const STEPS_MAX: u32 = 300;
/// Branches that could save less than this share are pruned.
const CLOSE: f64 = 1e-3;

/// Slices of a service above which only the last ones are searched.
const LARGE: f64 = 24.0;

/// Rows of a slice kind's time and memory in a band of cycles.
pub(crate) fn band_rows(band: u8, kind: usize) -> [usize; 2] {
    let time = KINDS_MAX * (1 + 2 * usize::from(band)) + kind;
    [time, time + KINDS_MAX]
}

/// One option to serve from a slice: a share of its time of at least `min_share` serves
/// `throughput` times the share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PartOption {
    pub(crate) kind: usize,
    pub(crate) throughput: f64,
    pub(crate) min_share: f64,
    /// Largest share, because its cycle is in the band.
    pub(crate) max_share: f64,
    /// Share of the slice's memory.
    pub(crate) memory: f64,
    /// Band of the cycle; `None` for a slice that the part has to itself.
    pub(crate) band: Option<u8>,
}

impl PartOption {
    /// Requests per second with the largest share.
    pub(crate) fn max_rate(&self) -> f64 {
        self.throughput * self.max_share
    }
}

/// A part: its option and its share of the time.
pub(crate) type Part = (PartOption, f64);

/// Prices of time and memory, by kind.
pub(crate) struct PartPrices {
    prices: Rows,
}

/// A part option under prices.
#[derive(Clone, Copy)]
struct Priced {
    part_option: PartOption,
    /// Price of all the time.
    time: f64,
    /// Price of its memory.
    memory: f64,
}

impl Priced {
    fn cost(&self, rate: f64) -> f64 {
        self.time * (rate / self.part_option.throughput).max(self.part_option.min_share)
            + self.memory
    }

    fn gives(&self, rate: f64) -> bool {
        self.part_option.max_rate() * (1.0 + SLACK) >= rate
    }

    /// Whether this costs at most as much as `other` at every rate that `other` can serve. Both
    /// costs are piecewise linear with one bend each, so comparing at ends and bends suffices.
    fn replaces(&self, other: &Priced) -> bool {
        let max_rate = other.part_option.max_rate();
        if self.part_option.max_rate() < max_rate || self.cost(0.0) > other.cost(0.0) {
            return false;
        }
        let bends = [self, other].map(|one| one.part_option.min_share * one.part_option.throughput);
        [bends[0].min(max_rate), bends[1].min(max_rate), max_rate]
            .iter()
            .all(|&rate| self.cost(rate) <= other.cost(rate))
    }
}

impl PartPrices {
    pub(crate) fn new(prices: &Rows) -> PartPrices {
        PartPrices { prices: *prices }
    }

    fn price(&self, part_option: PartOption) -> Priced {
        let kind = part_option.kind;
        let (time, memory) = match part_option.band {
            None => (self.prices[kind], 0.0),
            Some(band) => {
                let [time, memory] = band_rows(band, kind).map(|row| self.prices[row]);
                (time, memory * part_option.memory)
            }
        };
        Priced { part_option, time, memory }
    }

    /// Options that no other option dominates.
    fn useful(&self, part_options: &[PartOption]) -> Vec<Priced> {
        let mut kept: Vec<Priced> = Vec::with_capacity(16);
        for &part_option in part_options {
            let one = self.price(part_option);
            if !kept.iter().any(|other| other.replaces(&one)) {
                kept.retain(|other| !one.replaces(other));
                kept.push(one);
            }
        }
        kept
    }

    /// Minimum cost of a part of `rate` on any slice kind.
    pub(crate) fn worth(&self, part_options: &[PartOption], rate: f64) -> f64 {
        let priced = part_options.iter().map(|&part_option| self.price(part_option));
        priced.filter(|one| one.gives(rate)).map(|one| one.cost(rate)).fold(f64::INFINITY, f64::min)
    }

    /// Parts that serve `rate` and their cost: the cheapest that a short search finds.
    pub(crate) fn cheapest(&self, part_options: &[PartOption], rate: f64) -> (f64, Vec<Part>) {
        search(&self.useful(part_options), rate, 1.0, true)
    }

    /// Splits `rate` into whole slices and at most one part. A part costs `strain` times its share,
    /// to account for slices that cannot be filled completely.
    pub(crate) fn split(&self, part_options: &[PartOption], rate: f64, strain: f64) -> Vec<Part> {
        search(&self.useful(part_options), rate, strain, false).1
    }

    /// A lower bound on the cost of parts that serve `rate`: at most the share `close` below the
    /// least, but for rounding.
    pub(crate) fn least_cost(&self, part_options: &[PartOption], rate: f64, close: f64) -> f64 {
        fronts::least_cost(&self.useful(part_options), rate, close)
    }

    /// Cost of parts that serve a rate, and the resources they take.
    pub(crate) fn usage(&self, part_options: &[PartOption], rate: f64) -> Usage {
        let (bound, parts) = self.cheapest(part_options, rate);
        let mut rows = [0.0; ROWS];
        for (part_option, share) in parts {
            match part_option.band {
                None => rows[part_option.kind] += share,
                Some(band) => {
                    let [time, memory] = band_rows(band, part_option.kind);
                    rows[time] += share;
                    rows[memory] += part_option.memory;
                }
            }
        }
        Usage { bound, rows }
    }
}

/// Ends of all options, without those that cost at least as much as one with a higher rate; sorted
/// by cost above the best ratio.
fn ends(part_options: &[Priced], all: bool, ratio: f64) -> Vec<End> {
    let mut ends = Vec::with_capacity(part_options.len() * 2);
    for (at, one) in part_options.iter().enumerate() {
        let mut end = |share: f64| {
            let share = share.min(1.0);
            let (rate, cost) = (share * one.part_option.throughput, one.time * share + one.memory);
            ends.push(End { at, share, rate, cost, above: (cost - ratio * rate).max(0.0) });
        };
        if all || one.part_option.max_share >= 1.0 {
            end(one.part_option.max_share);
        }
        if all && one.part_option.min_share < one.part_option.max_share {
            end(one.part_option.min_share);
        }
    }
    ends.sort_unstable_by(|a, b| b.rate.total_cmp(&a.rate).then(a.cost.total_cmp(&b.cost)));
    let mut min_cost = f64::INFINITY;
    ends.retain(|end| {
        let cheaper = end.cost < min_cost;
        min_cost = min_cost.min(end.cost);
        cheaper
    });
    ends.sort_unstable_by(|a, b| a.above.total_cmp(&b.above).then(b.rate.total_cmp(&a.rate)));
    ends
}

fn search(part_options: &[Priced], rate: f64, strain: f64, all: bool) -> (f64, Vec<Part>) {
    let ratio = |one: &Priced| one.cost(one.part_option.max_rate()) / one.part_option.max_rate();
    let ratio = part_options.iter().map(ratio).fold(f64::INFINITY, f64::min);
    let ends = ends(part_options, all, ratio);
    let Some(best) = ends.first() else { return (f64::INFINITY, Vec::new()) };
    // Most of a large rate is served by slices at the best ratio.
    let bulk = (rate / best.rate - LARGE).floor().max(0.0);
    let mut search = Search {
        part_options,
        ends: &ends,
        ratio,
        strain,
        chosen: Vec::new(),
        best: Vec::new(),
        best_cost: f64::INFINITY,
        part_min: part_options.iter().map(|one| one.cost(0.0)).fold(f64::INFINITY, f64::min),
        steps: 0,
    };
    search.descend(0, rate - bulk * best.rate, 0.0);
    let bound = search.best_cost + bulk * best.cost;
    let bulk = std::iter::repeat_n((best.at, best.share), bulk as usize);
    let parts =
        bulk.chain(search.best).map(|(at, share)| (part_options[at].part_option, share)).collect();
    (bound, parts)
}

/// An end of the range of a part option.
#[derive(Clone, Copy)]
struct End {
    at: usize,
    share: f64,
    rate: f64,
    cost: f64,
    /// Cost above the best ratio.
    above: f64,
}

struct Search<'a> {
    part_options: &'a [Priced],
    ends: &'a [End],
    ratio: f64,
    strain: f64,
    chosen: Vec<(usize, f64)>,
    best: Vec<(usize, f64)>,
    best_cost: f64,
    /// Minimum cost of any part.
    part_min: f64,
    steps: u32,
}

impl Search<'_> {
    fn descend(&mut self, from: usize, remaining: f64, cost: f64) {
        self.steps += 1;
        // First, because a good solution early prunes most.
        self.finish(remaining, cost);
        for at in from..self.ends.len() {
            let end = self.ends[at];
            let close = self.best_cost * (1.0 - CLOSE);
            let relaxed = cost + self.ratio * remaining + end.above;
            if relaxed >= close {
                break;
            }
            if end.rate >= remaining {
                continue;
            }
            // At least one more part follows.
            let min_cost = relaxed.max(cost + end.cost + self.part_min);
            if min_cost >= close || self.steps >= STEPS_MAX {
                continue;
            }
            self.chosen.push((end.at, end.share));
            self.descend(at, remaining - end.rate, cost + end.cost);
            self.chosen.pop();
        }
    }

    /// One part takes the remaining rate.
    fn finish(&mut self, remaining: f64, cost: f64) {
        if cost + self.ratio * remaining >= self.best_cost {
            return;
        }
        for (at, one) in
            self.part_options.iter().enumerate().filter(|(_, one)| one.gives(remaining))
        {
            let share = (remaining / one.part_option.throughput)
                .clamp(one.part_option.min_share, one.part_option.max_share);
            let part = one.time * (share * self.strain).min(1.0) + one.memory;
            if cost + part < self.best_cost {
                self.best_cost = cost + part;
                self.best.clone_from(&self.chosen);
                self.best.push((at, share));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::Random;

    /// The cheapest parts whose rates are multiples of a small step, by dynamic programming.
    fn on_a_grid(
        part_prices: &PartPrices,
        part_options: &[PartOption],
        rate: f64,
        steps: usize,
    ) -> f64 {
        let part: Vec<f64> = (0..=steps)
            .map(|at| part_prices.worth(part_options, rate * at as f64 / steps as f64))
            .collect();
        let mut min_costs = vec![0.0; steps + 1];
        for at in 1..=steps {
            let costs = (1..=at).map(|one| part[one] + min_costs[at - one]);
            min_costs[at] = costs.fold(f64::INFINITY, f64::min);
        }
        min_costs[steps]
    }

    #[test]
    fn the_bound_is_below_every_set_of_parts_and_close_to_the_best() {
        let mut random = Random::new(5);
        for round in 0..300 {
            let part_option = |kind: usize, random: &mut Random| PartOption {
                kind,
                throughput: 20.0 + 80.0 * random.unit_f64(),
                min_share: (0.05 + random.unit_f64()).min(1.0),
                memory: random.unit_f64(),
                max_share: 1.0,
                band: Some(0),
            };
            let limited = |option: PartOption, random: &mut Random| PartOption {
                max_share: (option.min_share + random.unit_f64()).min(1.0),
                ..option
            };
            let part_options: Vec<PartOption> = (0..9)
                .map(|at| match (part_option(at % 3, &mut random), at < 6) {
                    (option, true) => option,
                    (option, false) => limited(option, &mut random),
                })
                .collect();
            let mut prices = [0.0; ROWS];
            for kind in 0..3 {
                let [time, memory] = band_rows(0, kind);
                prices[time] = 0.2 + random.unit_f64();
                prices[memory] = 0.3 * random.unit_f64();
            }
            let part_prices = PartPrices::new(&prices);
            let rate = 5.0 + 250.0 * random.unit_f64();
            let (known, parts) = part_prices.cheapest(&part_options, rate);
            let bound = part_prices.least_cost(&part_options, rate, 1e-4);
            let grid = on_a_grid(&part_prices, &part_options, rate, 400);
            // Rates on the grid are a little dearer than others.
            assert!(bound <= grid && bound >= grid * 0.985, "round {round}: {bound}, {grid}");
            assert!(bound <= known && known <= grid * 1.02, "round {round}: {known}, {grid}");
            let given: f64 =
                parts.iter().map(|(part_option, share)| part_option.throughput * share).sum();
            assert!(given >= rate * (1.0 - 1e-6), "round {round}: {given} of {rate}");
        }
    }
}
