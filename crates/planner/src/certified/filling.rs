//! Saves the last GPU of a small plan with shared slices: the patterns are given, and a search
//! fills their slices.
//!
//! Every choice of patterns with one GPU less is tried for a few rounds; those with the least
//! unserved rate get more rounds.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use base::Random;

use super::cover::Prices;
use super::packing::{Packed, PatternPacker};
use super::sharing::{SharingModel, SliceBin};
use crate::gpu::SliceCounts;
use crate::problem::ServiceDemand;
use crate::search_control::SearchControl;

/// Plans with this many GPUs or more have too many choices of patterns.
pub(crate) const GPUS_MAX: usize = 4;
/// Rounds per choice, and how many choices reach the next stage.
const STAGES: [(usize, usize); 4] = [(4, 12), (40, 4), (300, 2), (3000, 1)];
/// Maximum number of choices tried, highest value first.
const CHOICES_MAX: usize = 30;
/// Minimum size of a part, as a share of the service's demand.
const PART_MIN: f64 = 0.02;
/// Maximum unserved share of a demand; well within the checker's tolerance.
const UNSERVED_MAX: f64 = 1e-8;

struct Filling<'a> {
    sharing: &'a SharingModel<'a>,
    demands: &'a [ServiceDemand],
    packed: Packed,
    bins: Vec<SliceBin>,
    remaining: Vec<f64>,
    /// Share of all demand that is unserved, each service at its own size.
    unserved: f64,
    random: Random,
}

/// Inputs of the search.
pub(crate) struct FillTask<'a> {
    pub(crate) sharing: &'a SharingModel<'a>,
    pub(crate) demands: &'a [ServiceDemand],
    pub(crate) gpus: usize,
    /// Of slice kinds.
    pub(crate) prices: &'a Prices,
}

impl FillTask<'_> {
    /// Filled GPUs of the given patterns, if the search succeeds.
    pub(crate) fn fill(
        &self,
        packer: &PatternPacker,
        patterns: &[usize],
        control: &mut SearchControl<'_>,
    ) -> Option<(Packed, Vec<SliceBin>)> {
        if self.gpus >= GPUS_MAX {
            return None;
        }
        let mut choices = Vec::new();
        combine(patterns, self.gpus, &mut vec![0; packer.patterns.len()], &mut choices);
        // Patterns without slack under the prices are those of the relaxed optimum.
        let worth = |packed: &Packed| -> f64 {
            let of = |(pattern, &copies): (&SliceCounts, &u32)| -> f64 {
                let price = |(&count, price): (&u32, &f64)| f64::from(count * copies) * price;
                pattern.iter().zip(self.prices).map(price).sum()
            };
            packer.patterns.iter().zip(packed).map(of).sum()
        };
        choices.sort_by(|a, b| worth(b).total_cmp(&worth(a)));
        choices.truncate(CHOICES_MAX);
        let start = |(seed, packed)| Filling::new(self.sharing, self.demands, packer, packed, seed);
        let mut fillings: Vec<Filling<'_>> = (1..).zip(choices).map(start).collect();
        for (rounds, survivors) in STAGES {
            if let Some(done) = improve_all(&mut fillings, rounds, self.gpus, control)? {
                let bins = done.bins.iter().filter(|bin| !bin.items.is_empty()).cloned();
                return Some((done.packed.clone(), bins.collect()));
            }
            fillings.sort_by(|a, b| a.unserved.total_cmp(&b.unserved));
            fillings.truncate(survivors);
        }
        None
    }
}

/// Improves every filling, on two threads, and returns the first one that serves everything; `None`
/// if the caller stops. Each filling has its own random numbers, so the result does not depend on
/// the timing of the threads.
fn improve_all<'f, 'a>(
    fillings: &'f mut [Filling<'a>],
    rounds: usize,
    gpus: usize,
    control: &mut SearchControl<'_>,
) -> Option<Option<&'f Filling<'a>>> {
    let (done, stop) = (AtomicUsize::new(usize::MAX), AtomicBool::new(false));
    let work = |share: Vec<(usize, &mut Filling<'a>)>,
                should_continue: &mut dyn FnMut() -> bool| {
        for (at, filling) in share {
            if at > done.load(Ordering::Relaxed) || stop.load(Ordering::Relaxed) {
                return;
            }
            if !should_continue() {
                stop.store(true, Ordering::Relaxed);
                return;
            }
            if filling.improve(rounds) {
                done.fetch_min(at, Ordering::Relaxed);
                return;
            }
        }
    };
    let (even, odd): (Vec<_>, Vec<_>) =
        fillings.iter_mut().enumerate().partition(|(at, _)| at % 2 == 0);
    let mut should_continue = || control.should_continue("filling", Some(gpus + 1), 0.0);
    if odd.is_empty() {
        work(even, &mut should_continue);
    } else {
        std::thread::scope(|scope| {
            scope.spawn(|| work(odd, &mut || true));
            work(even, &mut should_continue);
        });
    }
    if stop.load(Ordering::Relaxed) {
        return None;
    }
    Some(fillings.get(done.load(Ordering::Relaxed)))
}

/// Every multiset of `gpus` patterns.
fn combine(patterns: &[usize], gpus: usize, now: &mut Packed, all: &mut Vec<Packed>) {
    if gpus == 0 {
        all.push(now.clone());
        return;
    }
    for (at, &pattern) in patterns.iter().enumerate() {
        now[pattern] += 1;
        combine(&patterns[at..], gpus - 1, now, all);
        now[pattern] -= 1;
    }
}

impl<'a> Filling<'a> {
    fn new(
        sharing: &'a SharingModel<'a>,
        demands: &'a [ServiceDemand],
        packer: &PatternPacker,
        packed: Packed,
        seed: u64,
    ) -> Filling<'a> {
        let mut bins = Vec::new();
        for (pattern, &copies) in packer.patterns.iter().zip(&packed) {
            for _ in 0..copies {
                for (kind, &count) in pattern.iter().enumerate() {
                    (0..count).for_each(|_| bins.push(SliceBin::empty(kind)));
                }
            }
        }
        let remaining = demands.iter().map(|demand| demand.rate).collect();
        let (unserved, random) = (f64::INFINITY, Random::new(seed));
        Filling { sharing, demands, packed, bins, remaining, unserved, random }
    }

    /// Returns whether everything is served.
    fn improve(&mut self, rounds: usize) -> bool {
        for round in 0..rounds {
            let before = (self.bins.clone(), self.remaining.clone(), self.unserved);
            if before.2.is_finite() {
                self.disturb();
            }
            self.serve();
            self.unserved = (self.remaining.iter().zip(self.demands))
                .map(|(remaining, demand)| remaining / demand.rate * demand_weight(demand))
                .sum();
            if self
                .remaining
                .iter()
                .zip(self.demands)
                .all(|(remaining, d)| *remaining <= d.rate * UNSERVED_MAX)
            {
                return true;
            }
            let heat = 0.02 * (1.0 - round as f64 / rounds as f64) * self.random.unit_f64();
            if self.unserved > before.2 + heat {
                (self.bins, self.remaining, self.unserved) = before;
            }
        }
        false
    }

    /// Empties a few slices, and removes a few services from all slices.
    fn disturb(&mut self) {
        for _ in 0..self.random.below(3) {
            let at = self.random.below(self.bins.len() as u64) as usize;
            let kind = self.bins[at].kind;
            let bin = std::mem::replace(&mut self.bins[at], SliceBin::empty(kind));
            bin.items.iter().for_each(|(service, rate)| self.remaining[*service] += rate);
        }
        for _ in 0..1 + self.random.below(2) {
            let service = self.random.below(self.demands.len() as u64) as usize;
            for bin in &mut self.bins {
                let Some(at) = bin.items.iter().position(|item| item.0 == service) else {
                    continue;
                };
                let mut items = bin.items.clone();
                self.remaining[service] += items.remove(at).1;
                *bin = match items.is_empty() {
                    true => SliceBin::empty(bin.kind),
                    // A subset of items that fit always fits.
                    false => self.sharing.bin(bin.kind, items).unwrap_or(SliceBin::empty(bin.kind)),
                };
            }
        }
        // A slice that could not be rebuilt is empty now: recompute the unserved rates.
        let mut remaining: Vec<f64> = self.demands.iter().map(|demand| demand.rate).collect();
        for (service, rate) in self.bins.iter().flat_map(|bin| &bin.items) {
            remaining[*service] -= rate;
        }
        self.remaining = remaining;
    }

    fn serve(&mut self) {
        let mut order: Vec<(f64, usize)> = Vec::new();
        for (service, demand) in self.demands.iter().enumerate() {
            if self.remaining[service] > demand.rate * UNSERVED_MAX {
                let size = self.remaining[service] / demand.rate;
                order.push((size * demand_weight(demand) * self.random.unit_f64(), service));
            }
        }
        order.sort_by(|a, b| b.0.total_cmp(&a.0));
        for (_, service) in order {
            while self.remaining[service] > self.demands[service].rate * UNSERVED_MAX
                && self.serve_one(service)
            {}
        }
    }

    /// Adds as much of a service as possible to the best slice; returns whether any fitted.
    fn serve_one(&mut self, service: usize) -> bool {
        let want = self.remaining[service];
        let mut best: Option<(f64, usize, f64)> = None;
        for (index, bin) in self.bins.iter().enumerate() {
            let available = 1.0 - bin.busy;
            if available < self.sharing.min_share_of(service, bin.kind)
                || bin.items.iter().any(|item| item.0 == service)
            {
                continue;
            }
            let mut max_rate = self.sharing.max_beside(bin, service, want);
            if bin.items.is_empty() {
                max_rate = max_rate.max(self.sharing.alone(service, bin.kind).min(want));
            }
            if max_rate < want * 0.999 && max_rate < self.demands[service].rate * PART_MIN {
                continue;
            }
            let score = max_rate / want + 0.3 * bin.busy + 0.3 * self.random.unit_f64();
            if best.is_none_or(|(top, ..)| score > top) {
                best = Some((score, index, max_rate));
            }
        }
        let Some((_, index, max_rate)) = best else { return false };
        let mut items = self.bins[index].items.clone();
        items.push((service, max_rate));
        match self.sharing.bin(self.bins[index].kind, items) {
            Some(bin) => {
                self.bins[index] = bin;
                self.remaining[service] = (want - max_rate).max(0.0);
                true
            }
            None => false,
        }
    }
}

/// Weight of a service: its rate in units of its fastest slice.
fn demand_weight(demand: &ServiceDemand) -> f64 {
    let best = demand.throughput.iter().copied().fold(1e-9, f64::max);
    demand.rate / best
}
