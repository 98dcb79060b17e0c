//! Builds shared slices one after the other from the parts that are not placed yet.
//!
//! The largest unplaced part comes first. For every slice kind and every cycle at which one of its
//! batches is just full, a search finds the parts that fill the remaining time best. The slice
//! whose parts have the highest value relative to its price is built.

use std::sync::atomic::{AtomicBool, Ordering};

use base::Random;

use super::assembly::SliceContents;
use super::cover::Prices;
use super::dual::{Bound, slice_prices};
use super::packing::PatternPacker;
use super::part_pricing::{PartPrices, band_rows};
use super::sharing::{SharingModel, TurnOption};
use super::unplaced::{UnplacedPart, UnplacedParts};
use crate::gpu::{KINDS_MAX, SliceCounts};
use crate::plan::ServiceShare;
use crate::problem::{Problem, ServiceDemand};

/// Steps of the search for parts to co-locate.
const STEPS_MAX: usize = 80;
/// From this many parts on, two threads place half of them each. The number does not depend on the
/// cores, so that plans are reproducible.
const PARALLEL_FROM: usize = 400;
/// Parts in one slice.
const PARTS_MAX: usize = 12;
/// Relative slack of comparisons, well below the checker's.
const SLACK: f64 = 1e-9;
/// Cost of cutting a part in two, because the remainder needs another slice.
const CUT_COST: f64 = 0.003;
/// How often prices are balanced while slices are built.
const BALANCES: usize = 60;
/// Maximum number of gaps filled in one slice, and the minimum size of a gap as a share of the
/// time.
const GAPS: usize = 3;
const GAP_MIN: f64 = 0.02;
/// Minimum value, relative to the price, of a slice full of parts like the first one.
const START_MIN: f64 = 0.8;
/// Maximum relative change of a price by balancing.
const BALANCED_WITHIN: f64 = 0.1;
/// How far the worth of a service follows what its slices cost, and the limits of one such cost
/// relative to the worth.
const LEARNING_RATE: f64 = 0.3;
const LEARNED_WITHIN: (f64, f64) = (0.5, 3.0);
/// A slice that its service uses at least so much is one of its own, not a part.
const OWN_SLICE: f64 = 0.999;

/// Builds slices with duty cycles.
pub(crate) struct SharedSliceBuilder<'a> {
    problem: &'a Problem,
    sharing: &'a SharingModel<'a>,
    demands: &'a [ServiceDemand],
    part_prices: PartPrices,
    prices: Prices,
    kinds: usize,
    packer: &'a PatternPacker,
    /// How far prices follow the balance of slice kinds, from 0 to 1.
    balance: f64,
    /// What the parts of each service are worth, relative to their minimum cost.
    factors: Vec<f64>,
    /// Shares of time and memory in the price of each kind.
    weights: [(f64, f64); KINDS_MAX],
}

/// A slice kind with a cycle, and the parts that could share it; the first one is certain.
#[derive(Clone, Copy)]
struct SliceSetting<'p> {
    parts: &'p [&'p UnplacedPart],
    kind: usize,
    cycle: f64,
}

/// A part in a slice: its index among the parts, its turn option, and its rate, which is less than
/// the part's if it is cut.
type Member<'w> = (usize, &'w TurnOption, f64);

/// A candidate slice.
struct CandidateSlice<'w> {
    kind: usize,
    cycle: f64,
    members: Vec<Member<'w>>,
    /// The parts from the second on.
    ids: Vec<u32>,
    /// Value of the members relative to the slice's price.
    score: f64,
}

/// A part that would fit a slice.
#[derive(Clone, Copy)]
struct CandidatePart<'w> {
    at: usize,
    option: &'w TurnOption,
    worth: f64,
    /// Its worth for the share of the slice that it takes, time and memory by their prices.
    density: f64,
}

/// Search for the parts that fill a slice best.
struct CoLocationSearch<'w, 'f> {
    /// Shares of the slice that a millisecond and a MiB take, by their prices.
    weights: (f64, f64),
    candidates: &'f [CandidatePart<'w>],
    chosen: Vec<usize>,
    best: Vec<usize>,
    best_worth: f64,
    steps: usize,
}

impl<'a> SharedSliceBuilder<'a> {
    pub(crate) fn new(
        problem: &'a Problem,
        sharing: &'a SharingModel<'a>,
        demands: &'a [ServiceDemand],
        packer: &'a PatternPacker,
        bound: &Bound,
        balance: f64,
    ) -> SharedSliceBuilder<'a> {
        let prices = slice_prices(&bound.prices).map(|price| price.max(1e-3));
        let part_prices = PartPrices::new(&bound.prices);
        let weights = std::array::from_fn(|kind| {
            let memory = (bound.prices[band_rows(0, kind)[1]] / prices[kind]).min(1.0);
            (1.0 - memory, memory)
        });
        SharedSliceBuilder {
            problem,
            factors: vec![1.0; demands.len()],
            weights,
            sharing,
            demands,
            part_prices,
            prices,
            kinds: problem.gpu.slices.len(),
            packer,
            balance,
        }
    }

    /// Slices for every service, with parts at `strain` times their share; `None` if the caller
    /// stops.
    pub(crate) fn slices(
        &self,
        strain: f64,
        mut should_continue: impl FnMut() -> bool,
    ) -> Option<Vec<SliceContents>> {
        let (mut filled, mut unplaced) = (Vec::new(), Vec::new());
        for service in 0..self.demands.len() {
            self.split(service, strain, &mut filled, &mut unplaced);
        }
        unplaced.sort_by(|a, b| a.worth.total_cmp(&b.worth));
        let mut counts = [0; KINDS_MAX];
        filled.iter().for_each(|slice| counts[slice.kind] += 1);
        if unplaced.len() < PARALLEL_FROM {
            filled.extend(self.fill(unplaced, counts, &mut should_continue)?);
            return Some(filled);
        }
        // With so many parts, either half has enough to choose from.
        let half = counts.map(|count| count / 2);
        let every_other = |first: usize| unplaced.iter().skip(first).step_by(2).cloned().collect();
        let (one, other): (Vec<UnplacedPart>, Vec<UnplacedPart>) = (every_other(0), every_other(1));
        let stop = AtomicBool::new(false);
        let (one, other) = std::thread::scope(|scope| {
            let other =
                scope.spawn(|| self.fill(other, half, &mut || !stop.load(Ordering::Relaxed)));
            let one = self.fill(one, half, &mut should_continue);
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

    /// Moves the worth of services towards what the slices of an attempt cost: parts that are hard
    /// to co-locate are then placed while there is a choice.
    pub(crate) fn learn(&mut self, slices: &[SliceContents]) {
        let mut sums = vec![(0.0, 0.0); self.demands.len()];
        for slice in slices {
            let worth = |share: &ServiceShare| {
                let part_options = self.sharing.part_options(share.service);
                self.factors[share.service] * self.part_prices.worth(part_options, share.rate)
            };
            let own = |share: &ServiceShare| {
                share.rate >= OWN_SLICE * self.sharing.alone(share.service, slice.kind)
            };
            if slice.cycle_ms.is_none() && slice.shares.iter().all(own) {
                continue;
            }
            let total: f64 = slice.shares.iter().map(worth).sum();
            let cost = (self.prices[slice.kind] / total).clamp(LEARNED_WITHIN.0, LEARNED_WITHIN.1);
            for share in &slice.shares {
                let (sum, weight) = &mut sums[share.service];
                *sum += worth(share) * cost;
                *weight += worth(share);
            }
        }
        for (factor, (sum, weight)) in self.factors.iter_mut().zip(sums) {
            if weight > 0.0 {
                *factor *= (sum / weight).powf(LEARNING_RATE);
            }
        }
    }

    /// Gives a service whole slices and adds the remaining rate to the unplaced parts.
    fn split(
        &self,
        service: usize,
        strain: f64,
        filled: &mut Vec<SliceContents>,
        unplaced: &mut Vec<UnplacedPart>,
    ) {
        let demand = &self.demands[service];
        let part_options = self.sharing.part_options(service);
        let parts = self.part_prices.split(part_options, demand.rate, strain);
        let mut remaining = demand.rate;
        for (part_option, share) in parts {
            let rate = self.sharing.alone(service, part_option.kind).min(remaining);
            if share * strain >= 1.0 - SLACK && rate > 0.0 {
                remaining -= rate;
                filled.push(self.alone(service, part_option.kind, rate));
            }
        }
        if remaining > demand.rate * SLACK {
            unplaced.push(self.unplaced(service, remaining));
        }
    }

    fn unplaced(&self, service: usize, rate: f64) -> UnplacedPart {
        let part_options = self.sharing.part_options(service);
        let (worth, small) =
            (self.part_prices.worth(part_options, rate), self.part_prices.worth(part_options, 0.0));
        let factor = self.factors[service];
        UnplacedPart { service, rate, worth: worth * factor, small: small * factor }
    }

    fn alone(&self, service: usize, kind: usize, rate: f64) -> SliceContents {
        let points = self.problem.profiles.points(&self.problem.services[service].model);
        let point = &points.unwrap_or_default()[self.demands[service].point[kind] as usize];
        let share = ServiceShare { service, batch: point.batch, processes: point.processes, rate };
        SliceContents { kind, cycle_ms: None, shares: vec![share] }
    }

    /// Builds slices in addition to `counts` until all parts are placed; `None` if the caller
    /// stops.
    fn fill(
        &self,
        unplaced: Vec<UnplacedPart>,
        mut counts: SliceCounts,
        should_continue: &mut dyn FnMut() -> bool,
    ) -> Option<Vec<SliceContents>> {
        let mut random = Random::new(1);
        let mut filled: Vec<SliceContents> = Vec::new();
        let every = (unplaced.len() / BALANCES).max(4);
        let mut unplaced = UnplacedParts::new(self.sharing, self.demands, self.prices, unplaced);
        let (mut prices, mut until) = (self.prices, 0);
        while let Some(seed) = unplaced.pop() {
            if filled.len() >= until {
                prices = self.balanced(&counts);
                until = filled.len() + every;
                if !should_continue() {
                    return None;
                }
            }
            let slice = self.serve(seed, &mut unplaced, &prices, &mut random)?;
            counts[slice.kind] += 1;
            filled.push(slice);
        }
        Some(filled)
    }

    /// Prices moved towards the marginal cost of one more slice: kinds that fit into partly used
    /// GPUs get cheaper.
    fn balanced(&self, counts: &SliceCounts) -> Prices {
        let marginal = self.packer.marginal(counts);
        std::array::from_fn(|kind| {
            let price = self.prices[kind];
            let nearer = price + self.balance * (marginal[kind] - price);
            nearer.clamp(price * (1.0 - BALANCED_WITHIN), price * (1.0 + BALANCED_WITHIN))
        })
    }

    /// A slice for `seed`, shared or not; remainders of cut parts stay unplaced.
    fn serve(
        &self,
        seed: UnplacedPart,
        unplaced: &mut UnplacedParts<'_>,
        prices: &Prices,
        random: &mut Random,
    ) -> Option<SliceContents> {
        let (score, kind, rate) = self.best_alone(&seed, prices);
        let mut remainders = Vec::new();
        let slice = match self.best_slice(&seed, unplaced, prices, random) {
            Some(found) if found.score > score + SLACK => {
                let (slice, remaining) = self.make(&seed, unplaced, &found);
                remainders = remaining;
                found.members[1..]
                    .iter()
                    .for_each(|member| unplaced.place(found.ids[member.0 - 1]));
                slice
            }
            _ => {
                if seed.rate - rate > self.demands[seed.service].rate * SLACK {
                    remainders.push(self.unplaced(seed.service, seed.rate - rate));
                }
                self.alone(seed.service, kind?, rate)
            }
        };
        remainders.into_iter().for_each(|rest| unplaced.push(rest));
        Some(slice)
    }

    /// The best slice for `seed` alone: its value relative to the price, its kind, and the rate it
    /// serves.
    fn best_alone(&self, seed: &UnplacedPart, prices: &Prices) -> (f64, Option<usize>, f64) {
        let mut best = (0.0, None, 0.0);
        for (kind, price) in prices.iter().enumerate().take(self.kinds) {
            let alone = self.sharing.alone(seed.service, kind);
            let rate = alone.min(seed.rate);
            let score = seed.worth * rate / seed.rate / price;
            if alone > 0.0 && score > best.0 {
                best = (score, Some(kind), rate);
            }
        }
        best
    }

    fn best_slice<'w>(
        &'w self,
        seed: &UnplacedPart,
        unplaced: &mut UnplacedParts<'_>,
        prices: &Prices,
        random: &mut Random,
    ) -> Option<CandidateSlice<'w>> {
        let limit = self.demands[seed.service].limit_ms;
        let any = unplaced.any(random);
        let mut best: Option<CandidateSlice<'w>> = None;
        for (kind, &price) in prices.iter().enumerate().take(self.kinds) {
            for option in self.sharing.options(seed.service, kind) {
                if option.turn_ms * 2.0 > limit {
                    break;
                }
                let cycle = (option.requests / seed.rate * 1000.0).min(limit - option.turn_ms);
                if cycle < option.turn_ms {
                    continue;
                }
                // A turn that is long relative to the part's value wastes the slice.
                if seed.worth * cycle / option.turn_ms < price * START_MIN {
                    continue;
                }
                let mut ids = any.clone();
                if unplaced.are_many() {
                    unplaced.matching(kind, cycle, &mut ids);
                }
                let parts: Vec<&UnplacedPart> =
                    std::iter::once(seed).chain(ids.iter().map(|&id| unplaced.part(id))).collect();
                let setting = SliceSetting { parts: &parts, kind, cycle };
                let (members, worth) = self.with_co_located(&setting, option);
                let score = worth / price;
                if best.as_ref().is_none_or(|best| score > best.score) {
                    best = Some(CandidateSlice { kind, cycle, members, ids, score });
                }
            }
        }
        best
    }

    /// The first part with the best parts to co-locate, and the value of all.
    fn with_co_located<'w>(
        &'w self,
        setting: &SliceSetting<'_>,
        option: &'w TurnOption,
    ) -> (Vec<Member<'w>>, f64) {
        let SliceSetting { parts, kind, cycle } = *setting;
        let mut memory = self.problem.gpu.slices[kind].memory_mib() - option.memory_mib;
        let mut time = cycle * (1.0 + SLACK) - option.turn_ms;
        let candidates = self.candidates(setting, time, memory);
        let mut co_located = CoLocationSearch {
            weights: self.weights_at(kind, cycle),
            candidates: &candidates,
            chosen: Vec::new(),
            best: Vec::new(),
            best_worth: 0.0,
            steps: 0,
        };
        co_located.search(parts, 0, time, memory, 0.0);
        let mut members = vec![(0, option, parts[0].rate)];
        for &at in &co_located.best {
            let one = &candidates[at];
            members.push((one.at, one.option, parts[one.at].rate));
            time -= one.option.turn_ms;
            memory -= one.option.memory_mib;
        }
        let mut worth = parts[0].worth + co_located.best_worth;
        for _ in 0..GAPS {
            let Some((cut, gained)) = self.cut(setting, &members, time, memory) else { break };
            time -= cut.1.turn_ms;
            memory -= cut.1.memory_mib;
            members.push(cut);
            worth += gained;
        }
        (members, worth)
    }

    /// Shares of a slice's price that a millisecond of its cycle and a MiB take.
    fn weights_at(&self, kind: usize, cycle: f64) -> (f64, f64) {
        let (of_time, of_memory) = self.weights[kind];
        (of_time / cycle, of_memory / self.problem.gpu.slices[kind].memory_mib() as f64)
    }

    /// Parts that fit beside the first one, highest value for what they take first.
    fn candidates(
        &self,
        setting: &SliceSetting<'_>,
        time: f64,
        memory: u64,
    ) -> Vec<CandidatePart<'_>> {
        let SliceSetting { parts, kind, cycle } = *setting;
        let (of_ms, of_mib) = self.weights_at(kind, cycle);
        let mut candidates = Vec::new();
        for (at, part) in parts.iter().enumerate().skip(1) {
            if part.service == parts[0].service {
                continue;
            }
            let needed = part.rate * cycle / 1000.0 * (1.0 - SLACK);
            let available = time.min(self.demands[part.service].limit_ms - cycle);
            let options = self.sharing.options(part.service, kind).iter();
            let found = options
                .take_while(|option| option.turn_ms <= available)
                .find(|option| option.requests >= needed && option.memory_mib <= memory);
            if let Some(option) = found {
                let takes = of_ms * option.turn_ms + of_mib * option.memory_mib as f64;
                let (worth, density) = (part.worth, part.worth / takes);
                candidates.push(CandidatePart { at, option, worth, density });
            }
        }
        candidates.sort_unstable_by(|a, b| b.density.total_cmp(&a.density).then(a.at.cmp(&b.at)));
        candidates
    }

    /// The best cut of a part that fills the remaining time, and its value.
    fn cut<'w>(
        &'w self,
        setting: &SliceSetting<'_>,
        members: &[Member<'w>],
        time: f64,
        memory: u64,
    ) -> Option<(Member<'w>, f64)> {
        let SliceSetting { parts, kind, cycle } = *setting;
        if time < cycle * GAP_MIN || members.len() >= PARTS_MAX {
            return None;
        }
        let mut best: Option<(Member<'w>, f64)> = None;
        for (at, part) in parts.iter().enumerate().skip(1) {
            let most = part.worth - part.small - CUT_COST;
            if most <= best.as_ref().map_or(0.0, |best| best.1)
                || members.iter().any(|member| parts[member.0].service == part.service)
            {
                continue;
            }
            let available = time.min(self.demands[part.service].limit_ms - cycle);
            let options = self.sharing.options(part.service, kind).iter();
            for option in options.take_while(|option| option.turn_ms <= available) {
                let rate = option.requests / cycle * 1000.0 * (1.0 - SLACK);
                // The remainder costs its share, and at least as much as the smallest part.
                let rest = (part.worth * (1.0 - rate / part.rate)).max(part.small);
                let gained = part.worth - rest - CUT_COST;
                if rate < part.rate
                    && option.memory_mib <= memory
                    && gained > best.as_ref().map_or(0.0, |best| best.1)
                {
                    best = Some(((at, option, rate), gained));
                }
            }
        }
        best
    }

    fn make(
        &self,
        seed: &UnplacedPart,
        unplaced: &UnplacedParts<'_>,
        found: &CandidateSlice<'_>,
    ) -> (SliceContents, Vec<UnplacedPart>) {
        let mut remainders = Vec::new();
        let mut shares = Vec::new();
        for &(at, option, rate) in &found.members {
            let part = if at == 0 { seed } else { unplaced.part(found.ids[at - 1]) };
            let share = ServiceShare {
                service: part.service,
                batch: option.batch,
                processes: option.processes,
                rate,
            };
            shares.push(share);
            if rate < part.rate * (1.0 - SLACK) {
                let remaining = part.rate - rate;
                let worth = (part.worth * remaining / part.rate).max(part.small);
                remainders.push(UnplacedPart { rate: remaining, worth, ..part.clone() });
            }
        }
        (SliceContents { kind: found.kind, cycle_ms: Some(found.cycle), shares }, remainders)
    }
}

impl CoLocationSearch<'_, '_> {
    fn search(&mut self, parts: &[&UnplacedPart], from: usize, time: f64, memory: u64, worth: f64) {
        self.steps += 1;
        if worth > self.best_worth {
            self.best_worth = worth;
            self.best.clone_from(&self.chosen);
        }
        if self.chosen.len() + 2 >= PARTS_MAX {
            return;
        }
        let room = time * self.weights.0 + memory as f64 * self.weights.1;
        for at in from..self.candidates.len() {
            let one = &self.candidates[at];
            if self.steps > STEPS_MAX || worth + room * one.density <= self.best_worth {
                return;
            }
            let service = parts[one.at].service;
            if one.option.turn_ms > time
                || one.option.memory_mib > memory
                || self.chosen.iter().any(|&c| parts[self.candidates[c].at].service == service)
            {
                continue;
            }
            let (turn, needs, gain) = (one.option.turn_ms, one.option.memory_mib, one.worth);
            self.chosen.push(at);
            self.search(parts, at + 1, time - turn, memory - needs, worth + gain);
            self.chosen.pop();
        }
    }
}
