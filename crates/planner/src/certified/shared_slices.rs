//! Shared slices, one after the other, from a pool of parts.
//!
//! The largest part left is given company: for every slice kind and every cycle at which one of its batches is just
//! gathered, the parts that fill the rest of the time best are sought. The slice whose parts are worth most of its
//! price is made.

use std::sync::atomic::{AtomicBool, Ordering};

use base::Random;

use super::assembly::Unit;
use super::cover::Prices;
use super::dual::{Bound, slice_prices};
use super::packing::Packer;
use super::parts::Tariff;
use super::sharing::{Sharer, Way};
use crate::gpu::{Counts, KINDS_MAX};
use crate::plan::Share;
use crate::problem::{Demand, Problem};

/// Parts looked at as company.
const COMPANY: usize = 128;
/// Steps of the search for the best company.
const STEPS_MAX: usize = 80;
/// With so many parts or more, two threads fill slices with half of them each, whatever the number of cores.
const PARALLEL_FROM: usize = 400;
/// Parts in one slice.
const PARTS_MAX: usize = 12;
/// Relative slack of comparisons, well below the checker's.
const SLACK: f64 = 1e-9;
/// What cutting a part in two costs, for the rest must find another place.
const CUT_COST: f64 = 0.003;
/// Times that prices are balanced in one filling.
const BALANCES: usize = 60;
/// Gaps filled in one slice, and the share of the time from which on one is worth it.
const GAPS: usize = 3;
const GAP_LEAST: f64 = 0.02;
/// Share of its price that a slice full of parts like the first would be worth at least.
const START_LEAST: f64 = 0.8;
/// How far balanced prices may be from the others.
const BALANCED_WITHIN: f64 = 0.1;

/// A part that has no slice yet.
#[derive(Clone, Debug)]
struct Waiting {
    service: usize,
    rate: f64,
    worth: f64,
    /// What the smallest part of the service is worth.
    small: f64,
}

/// Makes slices.
pub(crate) struct Pool<'a> {
    problem: &'a Problem,
    sharer: &'a Sharer<'a>,
    demands: &'a [Demand],
    tariff: Tariff,
    prices: Prices,
    kinds: usize,
    packer: &'a Packer,
    /// How far prices follow the balance of kinds, from not at all to all the way.
    balance: f64,
}

/// A slice kind with a cycle, and those who could share it; the first is the one that seeks company.
#[derive(Clone, Copy)]
struct Setting<'p> {
    parts: &'p [&'p Waiting],
    kind: usize,
    cycle: f64,
}

/// A part in a slice: its place among the parts, its way, and its rate, which is less than the part's where it is cut.
type Member<'w> = (usize, &'w Way, f64);

/// A slice under consideration.
struct Candidate<'w> {
    kind: usize,
    cycle: f64,
    members: Vec<Member<'w>>,
    /// Worth of the members as a part of the slice's price.
    score: f64,
}

/// A part that would fit a slice.
#[derive(Clone, Copy)]
struct Fitting<'w> {
    at: usize,
    way: &'w Way,
    worth: f64,
}

/// The search for those that fill a slice best.
struct Company<'w, 'f> {
    fitting: &'f [Fitting<'w>],
    chosen: Vec<usize>,
    best: Vec<usize>,
    best_worth: f64,
    steps: usize,
}

impl<'a> Pool<'a> {
    pub(crate) fn new(
        problem: &'a Problem,
        sharer: &'a Sharer<'a>,
        demands: &'a [Demand],
        packer: &'a Packer,
        bound: &Bound,
        balance: f64,
    ) -> Pool<'a> {
        let prices = slice_prices(&bound.prices).map(|price| price.max(1e-3));
        let tariff = Tariff::new(&bound.prices);
        Pool {
            problem,
            sharer,
            demands,
            tariff,
            prices,
            kinds: problem.gpu.slices.len(),
            packer,
            balance,
        }
    }

    /// Slices for every service, parts at `strain` times their share; nothing where the caller wishes to stop.
    pub(crate) fn slices(&self, strain: f64, mut go_on: impl FnMut() -> bool) -> Option<Vec<Unit>> {
        let (mut filled, mut waiting) = (Vec::new(), Vec::new());
        for service in 0..self.demands.len() {
            self.split(service, strain, &mut filled, &mut waiting);
        }
        // Smallest first, so that the largest is taken off the end.
        waiting.sort_by(|a, b| a.worth.total_cmp(&b.worth));
        let mut counts = [0; KINDS_MAX];
        filled.iter().for_each(|slice| counts[slice.kind] += 1);
        if waiting.len() < PARALLEL_FROM {
            filled.extend(self.fill(waiting, counts, &mut go_on)?);
            return Some(filled);
        }
        // So many find company in either half.
        let half = counts.map(|count| count / 2);
        let every_other = |first: usize| waiting.iter().skip(first).step_by(2).cloned().collect();
        let (one, other): (Vec<Waiting>, Vec<Waiting>) = (every_other(0), every_other(1));
        let stop = AtomicBool::new(false);
        let (one, other) = std::thread::scope(|scope| {
            let other =
                scope.spawn(|| self.fill(other, half, &mut || !stop.load(Ordering::Relaxed)));
            let one = self.fill(one, half, &mut go_on);
            stop.store(one.is_none(), Ordering::Relaxed);
            match other.join() {
                Ok(other) => (one, other),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        });
        filled.extend(one?);
        filled.extend(other?);
        Some(filled)
    }

    /// Whole slices of a service, and what is left of it for the pool.
    fn split(
        &self,
        service: usize,
        strain: f64,
        filled: &mut Vec<Unit>,
        waiting: &mut Vec<Waiting>,
    ) {
        let demand = &self.demands[service];
        let pieces = self.sharer.pieces(service);
        let parts = self.tariff.split(pieces, demand.rate, strain);
        let mut left = demand.rate;
        for (piece, share) in parts {
            let rate = self.sharer.alone(service, piece.kind).min(left);
            if share * strain >= 1.0 - SLACK && rate > 0.0 {
                left -= rate;
                filled.push(self.alone(service, piece.kind, rate));
            }
        }
        if left > demand.rate * SLACK {
            waiting.push(self.waiting(service, left));
        }
    }

    fn waiting(&self, service: usize, rate: f64) -> Waiting {
        let pieces = self.sharer.pieces(service);
        let (worth, small) = (self.tariff.worth(pieces, rate), self.tariff.worth(pieces, 0.0));
        Waiting { service, rate, worth, small }
    }

    fn alone(&self, service: usize, kind: usize, rate: f64) -> Unit {
        let points = self.problem.profiles.points(&self.problem.services[service].model);
        let point = &points.unwrap_or_default()[self.demands[service].point[kind] as usize];
        let share = Share { service, batch: point.batch, processes: point.processes, rate };
        Unit { kind, cycle_ms: None, shares: vec![share] }
    }

    /// Makes slices beside those of `counts` until nobody waits; nothing where it is to stop.
    fn fill(
        &self,
        mut waiting: Vec<Waiting>,
        mut counts: Counts,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Option<Vec<Unit>> {
        let mut random = Random::new(1);
        let mut filled: Vec<Unit> = Vec::new();
        let every = (waiting.len() / BALANCES).max(4);
        let (mut prices, mut until) = (self.prices, 0);
        while let Some(seed) = waiting.pop() {
            if filled.len() >= until {
                prices = self.balanced(&counts);
                until = filled.len() + every;
                if !go_on() {
                    return None;
                }
            }
            let slice = self.serve(seed, &mut waiting, &prices, &mut random)?;
            counts[slice.kind] += 1;
            filled.push(slice);
        }
        Some(filled)
    }

    /// Prices nearer to what one slice more costs beside those there are: kinds that GPUs have room for get cheaper.
    fn balanced(&self, counts: &Counts) -> Prices {
        let marginal = self.packer.marginal(counts);
        std::array::from_fn(|kind| {
            let price = self.prices[kind];
            let nearer = price + self.balance * (marginal[kind] - price);
            nearer.clamp(price * (1.0 - BALANCED_WITHIN), price * (1.0 + BALANCED_WITHIN))
        })
    }

    /// A slice for `seed`, with company or without; what is cut off waits on.
    fn serve(
        &self,
        seed: Waiting,
        waiting: &mut Vec<Waiting>,
        prices: &Prices,
        random: &mut Random,
    ) -> Option<Unit> {
        let company = sample(waiting.len(), COMPANY, random);
        let parts: Vec<&Waiting> =
            std::iter::once(&seed).chain(company.iter().map(|&at| &waiting[at])).collect();
        let (score, kind, rate) = self.best_alone(&seed, prices);
        let mut rests = Vec::new();
        let slice = match self.best_slice(&parts, prices) {
            Some(found) if found.score > score + SLACK => {
                let (slice, left) = self.make(&parts, &found);
                rests = left;
                let mut gone: Vec<usize> =
                    found.members[1..].iter().map(|member| company[member.0 - 1]).collect();
                gone.sort_unstable();
                for &at in gone.iter().rev() {
                    waiting.remove(at);
                }
                slice
            }
            _ => {
                if seed.rate - rate > self.demands[seed.service].rate * SLACK {
                    rests.push(self.waiting(seed.service, seed.rate - rate));
                }
                self.alone(seed.service, kind?, rate)
            }
        };
        for rest in rests {
            let at = waiting.partition_point(|other| other.worth < rest.worth);
            waiting.insert(at, rest);
        }
        Some(slice)
    }

    /// The best slice of its own: what part of the price it is worth, its kind, and how much of the rate it takes.
    fn best_alone(&self, seed: &Waiting, prices: &Prices) -> (f64, Option<usize>, f64) {
        let mut best = (0.0, None, 0.0);
        for (kind, price) in prices.iter().enumerate().take(self.kinds) {
            let alone = self.sharer.alone(seed.service, kind);
            let rate = alone.min(seed.rate);
            let score = seed.worth * rate / seed.rate / price;
            if alone > 0.0 && score > best.0 {
                best = (score, Some(kind), rate);
            }
        }
        best
    }

    fn best_slice<'w>(&'w self, parts: &[&Waiting], prices: &Prices) -> Option<Candidate<'w>> {
        let seed = parts[0];
        let limit = self.demands[seed.service].limit_ms;
        let mut best: Option<Candidate<'w>> = None;
        for (kind, &price) in prices.iter().enumerate().take(self.kinds) {
            for way in self.sharer.ways(seed.service, kind) {
                if way.turn_ms * 2.0 > limit {
                    break;
                }
                let cycle = (way.requests / seed.rate * 1000.0).min(limit - way.turn_ms);
                if cycle < way.turn_ms {
                    continue;
                }
                // Turns much longer than the part's worth are a bad start.
                if seed.worth * cycle / way.turn_ms < price * START_LEAST {
                    continue;
                }
                let setting = Setting { parts, kind, cycle };
                let (members, worth) = self.with_company(&setting, way);
                let score = worth / price;
                if best.as_ref().is_none_or(|best| score > best.score) {
                    best = Some(Candidate { kind, cycle, members, score });
                }
            }
        }
        best
    }

    /// The first part and the best company it finds, with what all are worth.
    fn with_company<'w>(&'w self, setting: &Setting<'_>, way: &'w Way) -> (Vec<Member<'w>>, f64) {
        let Setting { parts, kind, cycle } = *setting;
        let mut memory = self.problem.gpu.slices[kind].memory_mib() - way.memory_mib;
        let mut time = cycle * (1.0 + SLACK) - way.turn_ms;
        let fitting = self.fitting(setting, time, memory);
        let mut company = Company {
            fitting: &fitting,
            chosen: Vec::new(),
            best: Vec::new(),
            best_worth: 0.0,
            steps: 0,
        };
        company.seek(parts, 0, time, memory, 0.0);
        let mut members = vec![(0, way, parts[0].rate)];
        for &at in &company.best {
            let one = &fitting[at];
            members.push((one.at, one.way, parts[one.at].rate));
            time -= one.way.turn_ms;
            memory -= one.way.memory_mib;
        }
        let mut worth = parts[0].worth + company.best_worth;
        for _ in 0..GAPS {
            let Some((cut, gained)) = self.cut(setting, &members, time, memory) else { break };
            time -= cut.1.turn_ms;
            memory -= cut.1.memory_mib;
            members.push(cut);
            worth += gained;
        }
        (members, worth)
    }

    /// Parts that fit beside the first, worth most a millisecond first.
    fn fitting(&self, setting: &Setting<'_>, time: f64, memory: u64) -> Vec<Fitting<'_>> {
        let Setting { parts, kind, cycle } = *setting;
        let mut fitting = Vec::new();
        for (at, part) in parts.iter().enumerate().skip(1) {
            if part.service == parts[0].service {
                continue;
            }
            let needed = part.rate * cycle / 1000.0 * (1.0 - SLACK);
            let room = time.min(self.demands[part.service].limit_ms - cycle);
            let ways = self.sharer.ways(part.service, kind).iter();
            let found = ways
                .take_while(|way| way.turn_ms <= room)
                .find(|way| way.requests >= needed && way.memory_mib <= memory);
            if let Some(way) = found {
                fitting.push(Fitting { at, way, worth: part.worth });
            }
        }
        let density = |one: &Fitting<'_>| one.worth / one.way.turn_ms;
        fitting.sort_by(|a, b| density(b).total_cmp(&density(a)));
        fitting
    }

    /// The best piece of a part that fills time left over, and what it is worth.
    fn cut<'w>(
        &'w self,
        setting: &Setting<'_>,
        members: &[Member<'w>],
        time: f64,
        memory: u64,
    ) -> Option<(Member<'w>, f64)> {
        let Setting { parts, kind, cycle } = *setting;
        if time < cycle * GAP_LEAST || members.len() >= PARTS_MAX {
            return None;
        }
        let mut best: Option<(Member<'w>, f64)> = None;
        for (at, part) in parts.iter().enumerate().skip(1) {
            if members.iter().any(|member| parts[member.0].service == part.service) {
                continue;
            }
            let room = time.min(self.demands[part.service].limit_ms - cycle);
            let ways = self.sharer.ways(part.service, kind).iter();
            for way in ways.take_while(|way| way.turn_ms <= room) {
                let rate = way.requests / cycle * 1000.0 * (1.0 - SLACK);
                // What is left of the part costs its share, and no less than the smallest part.
                let rest = (part.worth * (1.0 - rate / part.rate)).max(part.small);
                let gained = part.worth - rest - CUT_COST;
                if rate < part.rate
                    && way.memory_mib <= memory
                    && gained > best.as_ref().map_or(0.0, |best| best.1)
                {
                    best = Some(((at, way, rate), gained));
                }
            }
        }
        best
    }

    fn make(&self, parts: &[&Waiting], found: &Candidate<'_>) -> (Unit, Vec<Waiting>) {
        let mut rests = Vec::new();
        let mut shares = Vec::new();
        for &(at, way, rate) in &found.members {
            let part = parts[at];
            let share =
                Share { service: part.service, batch: way.batch, processes: way.processes, rate };
            shares.push(share);
            if rate < part.rate * (1.0 - SLACK) {
                let left = part.rate - rate;
                let worth = (part.worth * left / part.rate).max(part.small);
                rests.push(Waiting { rate: left, worth, ..part.clone() });
            }
        }
        (Unit { kind: found.kind, cycle_ms: Some(found.cycle), shares }, rests)
    }
}

/// `count` places of `all`, spread evenly; all where there are no more.
fn sample(all: usize, count: usize, random: &mut Random) -> Vec<usize> {
    if all <= count {
        return (0..all).collect();
    }
    let stride = all as f64 / count as f64;
    let place = |at: usize| (((at as f64 + random.unit_f64()) * stride) as usize).min(all - 1);
    let mut places: Vec<usize> = (0..count).map(place).collect();
    places.dedup();
    places
}

impl Company<'_, '_> {
    fn seek(&mut self, parts: &[&Waiting], from: usize, time: f64, memory: u64, worth: f64) {
        self.steps += 1;
        if worth > self.best_worth {
            self.best_worth = worth;
            self.best.clone_from(&self.chosen);
        }
        if self.chosen.len() + 2 >= PARTS_MAX {
            return;
        }
        for at in from..self.fitting.len() {
            let one = &self.fitting[at];
            if self.steps > STEPS_MAX
                || worth + time * one.worth / one.way.turn_ms <= self.best_worth
            {
                return;
            }
            let service = parts[one.at].service;
            if one.way.turn_ms > time
                || one.way.memory_mib > memory
                || self.chosen.iter().any(|&c| parts[self.fitting[c].at].service == service)
            {
                continue;
            }
            let (turn, needs, gain) = (one.way.turn_ms, one.way.memory_mib, one.worth);
            self.chosen.push(at);
            self.seek(parts, at + 1, time - turn, memory - needs, worth + gain);
            self.chosen.pop();
        }
    }
}
