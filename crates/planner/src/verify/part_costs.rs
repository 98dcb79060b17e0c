//! What services pay at least where slices are shared, in whole numbers.
//!
//! A part of a slice with cycle `d`, turn `t` and `n` requests takes the share `t / d` of the time
//! and serves `n / d`. Its cycle is at most `limit - t`, so its share has a minimum; above it the
//! rate is proportional to the share. In a cheapest set all parts but one are at an end of their
//! range, because of two that are not, the dearer one could give some of its rate to the other. So
//! the search goes through multisets of ends, and one part takes what remains.
//!
//! Costs are rounded down and rates up, so the sum stays a lower bound.

use std::collections::BTreeMap;

use super::ratio::Ratio;
use super::{TOLERANCE, demand, limit_ms, may_run_alone, stretched, turn_ms};
use crate::gpu::KINDS_MAX;
use crate::problem::{Problem, Service};

/// Binary digits of a price and of a rate.
const PRICE_BITS: u64 = 48;
const RATE_BITS: u64 = 32;
/// Steps after which a search returns the least that the branches left could reach.
const STEPS_MAX: u32 = 2000;
/// Branches that could save less than this part are left out in the same way.
const CLOSE: u128 = 4096;
/// Slices of a service above which the best price per request alone counts.
const LARGE: u128 = 24;
/// More than the rounding of all parts of one service.
const ROUNDING: u128 = 1 << 12;

/// A way to serve a part, in units.
#[derive(Clone, Copy)]
struct Choice {
    /// Requests per second with all the time, and with the smallest share of it.
    full: u128,
    least: u128,
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
        let rates = [0, self.least.min(other.full), other.least, other.full];
        self.full >= other.full && rates.iter().all(|&rate| self.cost(rate) <= other.cost(rate))
    }
}

#[derive(Clone, Copy)]
struct End {
    rate: u128,
    cost: u128,
    above: u128,
}

pub(super) fn each(
    problem: &Problem,
    time: &[f64; KINDS_MAX],
    memory: &[f64; KINDS_MAX],
) -> Vec<Ratio> {
    let mut known: BTreeMap<(&str, u64), Vec<Choice>> = BTreeMap::new();
    let mut costs = Vec::with_capacity(problem.services.len());
    for service in &problem.services {
        let choices = known
            .entry((service.model.as_str(), service.slo_ms.to_bits()))
            .or_insert_with(|| choices(problem, service, time, memory));
        let rate = demand(problem, service)
            .times(&Ratio::fraction(TOLERANCE - 1, TOLERANCE))
            .floor_units(RATE_BITS);
        let units = cheapest(choices, rate).saturating_sub(ROUNDING);
        costs.push(Ratio::of_units(units, PRICE_BITS));
    }
    costs
}

fn choices(
    problem: &Problem,
    service: &Service,
    time: &[f64; KINDS_MAX],
    memory: &[f64; KINDS_MAX],
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
        let time_price = Ratio::from_f64(time[kind]);
        let memory_price = Ratio::from_f64(memory[kind]);
        let usable = |p: &&crate::profile::OperatingPoint| {
            p.gpcs == slice.gpcs && p.processes <= problem.rules.processes_max
        };
        for point in points.iter().filter(usable) {
            if may_run_alone(problem, service, kind, point) {
                let full = stretched(&Ratio::from_f64(point.throughput)).ceil_units(RATE_BITS);
                let time = time_price.floor_units(PRICE_BITS);
                let memory = memory_price.floor_units(PRICE_BITS);
                add(Choice { full, least: full, time, least_time: time, memory });
            }
            let mib = problem.profiles.memory_limit_mib(problem.gpu, &service.model, point);
            let turn = turn_ms(point);
            // The stretched limit less the turn, as a product: `turn < limit` comes first.
            if mib > slice.memory_mib() || turn >= limit {
                continue;
            }
            // `share = turn / (limit - turn) / stretch`; it is at most 1 if it is possible.
            let Some(least_share) = least_share(&turn, &limit) else { continue };
            let requests = u64::from(point.batch) * u64::from(point.processes);
            let full = stretched(&stretched(&Ratio::whole(requests * 1000).over(&turn)));
            let memory_share = Ratio::fraction(mib, slice.memory_mib());
            add(Choice {
                full: full.ceil_units(RATE_BITS),
                least: full.times(&least_share).ceil_units(RATE_BITS),
                time: time_price.floor_units(PRICE_BITS),
                least_time: time_price.times(&least_share).floor_units(PRICE_BITS),
                memory: memory_price.times(&memory_share).floor_units(PRICE_BITS),
            });
        }
    }
    found
}

/// The smallest share of a slice's time; `None` if more than all of it.
fn least_share(turn: &Ratio, limit: &Ratio) -> Option<Ratio> {
    let rest = limit.minus(turn)?;
    let share = turn.over(&stretched(&rest));
    (share <= Ratio::whole(1)).then_some(share)
}

/// The least price of parts with that rate together, or a lower bound of it.
fn cheapest(choices: &[Choice], rate: u128) -> u128 {
    let mut ends: Vec<End> = Vec::with_capacity(choices.len() * 2);
    for choice in choices {
        let full = End { rate: choice.full, cost: choice.time + choice.memory, above: 0 };
        let least = End { rate: choice.least, cost: choice.least_time + choice.memory, above: 0 };
        ends.extend([full, least]);
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
    let relaxed = rate * best.cost / best.rate;
    if rate / best.rate > LARGE {
        return relaxed;
    }
    for end in &mut ends {
        end.above = end.cost.saturating_sub((end.rate * best.cost).div_ceil(best.rate));
    }
    ends.sort_by(|a, b| a.above.cmp(&b.above).then(b.rate.cmp(&a.rate)));
    let part_min = choices.iter().map(|choice| choice.cost(0)).min().unwrap_or(0);
    let (least, left_out) = (u128::MAX, u128::MAX);
    let mut search = Search { choices, ends: &ends, best, least, part_min, left_out, steps: 0 };
    search.descend(0, rate, 0);
    search.least.min(search.left_out).max(relaxed)
}

struct Search<'a> {
    choices: &'a [Choice],
    ends: &'a [End],
    best: End,
    least: u128,
    /// The least that any part costs.
    part_min: u128,
    /// The least that a branch that was left out could reach.
    left_out: u128,
    steps: u32,
}

impl Search<'_> {
    fn descend(&mut self, from: usize, remaining: u128, cost: u128) {
        self.steps += 1;
        let last = self.choices.iter().filter(|choice| choice.full >= remaining);
        let last = last.map(|choice| cost + choice.cost(remaining)).min();
        self.least = self.least.min(last.unwrap_or(u128::MAX));
        let relaxed = cost + remaining * self.best.cost / self.best.rate;
        for at in from..self.ends.len() {
            let end = self.ends[at];
            let close = self.least - self.least / CLOSE;
            if relaxed + end.above >= close {
                self.left_out = self.left_out.min(relaxed + end.above);
                break;
            }
            if end.rate >= remaining {
                continue;
            }
            // At least one more part follows.
            let reach = (relaxed + end.above).max(cost + end.cost + self.part_min);
            if reach >= close || self.steps >= STEPS_MAX {
                self.left_out = self.left_out.min(reach);
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
                Choice { full, least, time, least_time, memory }
            };
            let choices: Vec<Choice> = (0..6).map(|_| choice(&mut random)).collect();
            let rate = 5_000 + u128::from(random.below(250_000));
            // The cheapest parts whose rates are multiples of a small step.
            let steps = 400u128;
            let part = |at: u128| {
                let rate = (rate * at).div_ceil(steps);
                let able = choices.iter().filter(|choice| choice.full >= rate);
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
