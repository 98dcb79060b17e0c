//! What services pay at least where slices are shared, in whole numbers.
//!
//! A part of a slice with cycle `d`, turn `t` and `n` requests takes the share `t / d` of the time
//! and serves `n / d`. Its cycle is at most `limit - t` and within a band, whose prices it pays: so
//! its share has a least and a most, and the rate is proportional to the share. In a cheapest set
//! all parts but one are at an end of their range, because of two that are not, the dearer one
//! could give some of its rate to the other. So the search goes through sums of ends, and one part
//! takes what remains. A sum counts for nothing if another has at least its rate and at most its
//! cost; where many sums remain, two neighbours become one with the higher rate and the lower cost.
//!
//! Costs are rounded down and rates up, so the result stays a lower bound.

use std::collections::BTreeMap;

use super::ratio::Ratio;
use super::{KindPrices, TOLERANCE, demand, limit_ms, may_run_alone, stretched, turn_ms};
use crate::problem::{Problem, Service};

/// Binary digits of a price and of a rate.
const PRICE_BITS: u64 = 48;
const RATE_BITS: u64 = 32;
/// Steps of the search for a cost that limits the sums.
const STEPS_MAX: u32 = 2000;
/// Most sums that are kept for one service.
const SUMS_MAX: usize = 8192;
/// Sums that are looked at for one service; after that the best price per request alone counts.
const LOOKED_AT_MAX: usize = 4_000_000;
/// Slices of a service above which the best price per request alone counts.
const LARGE: u128 = 24;
/// More than the rounding of all parts of one service.
const ROUNDING: u128 = 1 << 12;

/// A turn of a model on a slice kind.
struct Turn {
    turn: Ratio,
    requests: u64,
    memory_mib: u64,
    /// Requests per second, stretched twice: its cycle and its rate may both miss a rule.
    full: Ratio,
}

/// A way to serve a part, in units.
#[derive(Clone, Copy)]
struct Choice {
    /// Requests per second with all the time, and with the smallest and the largest share of it.
    full: u128,
    least: u128,
    most: u128,
    /// Price of all the time, of the smallest share, and of the memory.
    time: u128,
    least_time: u128,
    memory: u128,
}

impl Choice {
    fn cost(&self, rate: u128) -> u128 {
        (self.time * rate / self.full).max(self.least_time) + self.memory
    }

    /// Whether this costs at most as much as `other` at every rate of it. Both costs have one bend.
    fn replaces(&self, other: &Choice) -> bool {
        let rates = [0, self.least.min(other.most), other.least.min(other.most), other.most];
        self.most >= other.most && rates.iter().all(|&rate| self.cost(rate) <= other.cost(rate))
    }
}

/// Ends of parts, or one of them: their rate, their cost, and what that is above the best price per
/// request.
#[derive(Clone, Copy)]
struct End {
    rate: u128,
    cost: u128,
    above: u128,
}

pub(super) fn each(problem: &Problem, kinds: &[KindPrices], bands: &[f64]) -> Vec<Ratio> {
    let bands: Vec<Ratio> = bands.iter().map(|from| Ratio::from_f64(*from)).collect();
    let mut turns: BTreeMap<&str, Vec<Vec<Turn>>> = BTreeMap::new();
    let mut known: BTreeMap<(&str, u64), Vec<Choice>> = BTreeMap::new();
    let mut costs = Vec::with_capacity(problem.services.len());
    for service in &problem.services {
        let of_model = turns
            .entry(service.model.as_str())
            .or_insert_with(|| turns_of(problem, &service.model));
        let choices = known
            .entry((service.model.as_str(), service.slo_ms.to_bits()))
            .or_insert_with(|| choices(problem, service, of_model, kinds, &bands));
        let rate = demand(problem, service)
            .times(&Ratio::fraction(TOLERANCE - 1, TOLERANCE))
            .floor_units(RATE_BITS);
        let units = cheapest(choices, rate).saturating_sub(ROUNDING);
        costs.push(Ratio::of_units(units, PRICE_BITS));
    }
    costs
}

/// The turns of a model by slice kind, without those that another one replaces.
fn turns_of(problem: &Problem, model: &str) -> Vec<Vec<Turn>> {
    let points = problem.profiles.points(model).unwrap_or_default();
    let of_kind = |slice: &crate::gpu::SliceKind| {
        let mut found: Vec<Turn> = Vec::new();
        for point in points.iter().filter(|p| p.gpcs == slice.gpcs) {
            let memory_mib = problem.profiles.memory_limit_mib(problem.gpu, model, point);
            if point.processes > problem.rules.processes_max || memory_mib > slice.memory_mib() {
                continue;
            }
            let requests = u64::from(point.batch) * u64::from(point.processes);
            let turn = turn_ms(point);
            let replaces = |one: (&Ratio, u64, u64), two: (&Ratio, u64, u64)| {
                one.0 <= two.0 && one.1 >= two.1 && one.2 <= two.2
            };
            let this = (&turn, requests, memory_mib);
            let facts = |one: &Turn| (one.requests, one.memory_mib);
            if found.iter().any(|one| replaces((&one.turn, facts(one).0, facts(one).1), this)) {
                continue;
            }
            found.retain(|one| !replaces(this, (&one.turn, facts(one).0, facts(one).1)));
            let full = stretched(&stretched(&Ratio::whole(requests * 1000).over(&turn)));
            found.push(Turn { turn, requests, memory_mib, full });
        }
        found
    };
    problem.gpu.slices.iter().map(of_kind).collect()
}

/// The ways to serve parts of a service that no other way replaces.
fn choices(
    problem: &Problem,
    service: &Service,
    turns: &[Vec<Turn>],
    kinds: &[KindPrices],
    bands: &[Ratio],
) -> Vec<Choice> {
    let points = problem.profiles.points(&service.model).unwrap_or_default();
    let limit = stretched(&limit_ms(problem, service));
    let mut found: Vec<Choice> = Vec::new();
    let mut add = |choice: Choice| {
        if !found.iter().any(|other| other.replaces(&choice)) {
            found.retain(|other| !choice.replaces(other));
            found.push(choice);
        }
    };
    for (kind, slice) in problem.gpu.slices.iter().enumerate() {
        for point in points.iter().filter(|p| may_run_alone(problem, service, kind, p)) {
            let full = stretched(&Ratio::from_f64(point.throughput)).ceil_units(RATE_BITS);
            let time = kinds[kind].slice.floor_units(PRICE_BITS);
            add(Choice { full, least: full, most: full, time, least_time: time, memory: 0 });
        }
        for (band, memory_price) in kinds[kind].memory.iter().enumerate() {
            let Some(time_price) = kinds[kind].slice.minus(memory_price) else { continue };
            let time = time_price.floor_units(PRICE_BITS);
            for one in &turns[kind] {
                let Some(shares) = shares(&one.turn, &limit, &bands[band], bands.get(band + 1))
                else {
                    continue;
                };
                let memory_share = Ratio::fraction(one.memory_mib, slice.memory_mib());
                add(Choice {
                    full: one.full.ceil_units(RATE_BITS),
                    least: one.full.times(&shares.0).ceil_units(RATE_BITS),
                    most: one.full.times(&shares.1).ceil_units(RATE_BITS),
                    time,
                    least_time: time_price.times(&shares.0).floor_units(PRICE_BITS),
                    memory: memory_price.times(&memory_share).floor_units(PRICE_BITS),
                });
            }
        }
    }
    found
}

/// The smallest and the largest share of a slice's time with a cycle from `from` to `until`; `None`
/// if no such cycle is possible. Turns may take more than the cycle, by the tolerance.
fn shares(
    turn: &Ratio,
    limit: &Ratio,
    from: &Ratio,
    until: Option<&Ratio>,
) -> Option<(Ratio, Ratio)> {
    let rest = limit.minus(turn)?;
    let longest = match until {
        Some(until) if *until < rest => until,
        _ => &rest,
    };
    if longest < from || *longest == Ratio::whole(0) {
        return None;
    }
    let least = turn.over(&stretched(longest));
    let most = if from > turn { turn.over(from) } else { Ratio::whole(1) };
    (least <= Ratio::whole(1)).then_some((least, most))
}

/// The least price of parts with that rate together, or a lower bound of it.
fn cheapest(choices: &[Choice], rate: u128) -> u128 {
    let mut ends: Vec<End> = Vec::with_capacity(choices.len() * 2);
    for choice in choices {
        // Rates are rounded up, so that their costs would be too high.
        let most_time = choice.time * choice.most.saturating_sub(1) / choice.full;
        let most = most_time.max(choice.least_time);
        for (rate, time) in
            [(choice.most, most), (choice.least.min(choice.most), choice.least_time)]
        {
            ends.push(End { rate: rate.max(1), cost: time + choice.memory, above: 0 });
        }
    }
    ends.sort_by(|a, b| b.rate.cmp(&a.rate).then(a.cost.cmp(&b.cost)));
    let mut min_cost = u128::MAX;
    ends.retain(|end| {
        let cheaper = end.cost < min_cost;
        min_cost = min_cost.min(end.cost);
        cheaper
    });
    let per_request = |a: &&End, b: &&End| (a.cost * b.rate).cmp(&(b.cost * a.rate));
    let Some(best) = ends.iter().min_by(per_request).copied() else { return 0 };
    let largest = ends.iter().map(|end| end.rate).max().unwrap_or(1);
    let relaxed = rate * best.cost / best.rate;
    if rate / largest > LARGE {
        return relaxed;
    }
    for end in &mut ends {
        end.above = end.cost.saturating_sub((end.rate * best.cost).div_ceil(best.rate));
    }
    ends.sort_by(|a, b| a.above.cmp(&b.above).then(b.rate.cmp(&a.rate)));
    let part_min = choices.iter().map(|choice| choice.cost(0)).min().unwrap_or(0);
    let mut search = Search { choices, ends: &ends, best, least: u128::MAX, part_min, steps: 0 };
    search.descend(0, rate, 0);
    let known = search.least;
    let reach = |sum: &End| sum.cost + ((rate - sum.rate) * best.cost / best.rate).max(part_min);
    let mut least = known;
    let Some(sums) = sums(&ends, |sum| sum.rate < rate && reach(sum) < known) else {
        return relaxed;
    };
    for sum in sums {
        let rest = rate - sum.rate;
        let last = choices.iter().filter(|choice| choice.most >= rest);
        let last = last.map(|choice| sum.cost + choice.cost(rest)).min();
        least = least.min(last.unwrap_or(u128::MAX));
    }
    least.max(relaxed)
}

/// Sums of ends that matter and that no other sum replaces, by falling rate and cost; `None` if
/// there are too many to look at.
fn sums(ends: &[End], matters: impl Fn(&End) -> bool) -> Option<Vec<End>> {
    let nothing = End { rate: 0, cost: 0, above: 0 };
    let mut all = vec![nothing];
    let mut looked_at = 0;
    for end in ends {
        // The sums to which one more of this end is added.
        let mut last = all.clone();
        while !last.is_empty() {
            looked_at += all.len() + last.len();
            if looked_at > LOOKED_AT_MAX {
                return None;
            }
            let more =
                |sum: &End| End { rate: sum.rate + end.rate, cost: sum.cost + end.cost, ..*sum };
            let new = last.iter().map(more).filter(|sum| matters(sum));
            // `above` marks the new ones.
            let mut both: Vec<End> = new.map(|sum| End { above: 1, ..sum }).collect();
            both.extend(all.iter().map(|sum| End { above: 0, ..*sum }));
            both.sort_by(|a, b| {
                b.rate.cmp(&a.rate).then(a.cost.cmp(&b.cost)).then(a.above.cmp(&b.above))
            });
            let mut least = u128::MAX;
            both.retain(|sum| {
                let cheaper = sum.cost < least;
                least = least.min(sum.cost);
                cheaper
            });
            last = both.iter().filter(|sum| sum.above == 1).copied().collect();
            all = both;
            if all.len() > SUMS_MAX {
                // The sum of nothing, or the one of the lowest rate, stays as it is.
                let lowest = all.pop();
                let merged = |pair: &[End]| End { cost: pair[pair.len() - 1].cost, ..pair[0] };
                all = all.chunks(2).map(merged).chain(lowest).collect();
            }
        }
    }
    Some(all)
}

struct Search<'a> {
    choices: &'a [Choice],
    ends: &'a [End],
    best: End,
    least: u128,
    /// The least that any part costs.
    part_min: u128,
    steps: u32,
}

impl Search<'_> {
    fn descend(&mut self, from: usize, remaining: u128, cost: u128) {
        self.steps += 1;
        let last = self.choices.iter().filter(|choice| choice.most >= remaining);
        let last = last.map(|choice| cost + choice.cost(remaining)).min();
        self.least = self.least.min(last.unwrap_or(u128::MAX));
        let relaxed = cost + remaining * self.best.cost / self.best.rate;
        for at in from..self.ends.len() {
            let end = self.ends[at];
            if relaxed + end.above >= self.least {
                break;
            }
            if end.rate >= remaining {
                continue;
            }
            // At least one more part follows.
            let reach = (relaxed + end.above).max(cost + end.cost + self.part_min);
            if reach >= self.least || self.steps >= STEPS_MAX {
                continue;
            }
            self.descend(at, remaining - end.rate, cost + end.cost);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::Random;

    #[test]
    fn the_least_price_is_below_every_set_of_parts_and_close_to_the_best() {
        let mut random = Random::new(5);
        for round in 0..200 {
            let choice = |random: &mut Random| {
                let full = 20_000 + u128::from(random.below(80_000));
                let share = 50 + u128::from(random.below(950));
                let time = 200_000_000 + u128::from(random.below(1_000_000_000));
                let memory = u128::from(random.below(100_000_000));
                let least = (full * share).div_ceil(1000);
                let least_time = time * share / 1000;
                let most = (least + u128::from(random.below(80_000))).min(full);
                Choice { full, least, most, time, least_time, memory }
            };
            let choices: Vec<Choice> = (0..8).map(|_| choice(&mut random)).collect();
            let rate = 5_000 + u128::from(random.below(250_000));
            // The cheapest parts whose rates are multiples of a small step.
            let steps = 3000u128;
            let part = |at: u128| {
                let rate = (rate * at).div_ceil(steps);
                let able = choices.iter().filter(|choice| choice.most >= rate);
                able.map(|choice| choice.cost(rate)).min().unwrap_or(u128::MAX / 2)
            };
            let parts: Vec<u128> = (0..=steps).map(part).collect();
            let mut least = vec![0u128; steps as usize + 1];
            for at in 1..=steps as usize {
                let costs = (1..=at).map(|one| parts[one] + least[at - one]);
                least[at] = costs.min().unwrap_or(u128::MAX);
            }
            let (found, grid) = (cheapest(&choices, rate), least[steps as usize]);
            // Every part of either is rounded down by less than a unit.
            let close = found <= grid + 100 && found * 100 >= grid * 97;
            assert!(close, "round {round}: {found}, {grid}");
        }
    }
}
