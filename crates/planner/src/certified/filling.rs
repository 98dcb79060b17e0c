//! The last GPU of a small plan with shared slices: the slices are given, the question is what goes into them.
//!
//! Choices of patterns for one GPU less are tried for a while, and those that leave the least unserved for longer.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use base::Random;

use super::cover::Prices;
use super::packing::{Packed, Packer};
use super::sharing::{Bin, Sharer};
use crate::gpu::Counts;
use crate::problem::Demand;
use crate::watch::Watch;

/// Plans of more GPUs than this have too many choices of patterns to try them one by one.
pub(crate) const GPUS_MAX: usize = 4;
/// Rounds a choice gets, and how many choices go on to the next stage.
const STAGES: [(usize, usize); 4] = [(4, 12), (40, 4), (300, 2), (3000, 1)];
/// Choices of patterns that are tried, those worth most first.
const CHOICES_MAX: usize = 30;
/// Parts of a service smaller than this share of its demand are not made.
const PART: f64 = 0.02;
/// What may stay unserved, as a share of the demand; well within the checker's tolerance.
const CRUMB: f64 = 1e-8;

struct Filling<'a> {
    sharer: &'a Sharer<'a>,
    demands: &'a [Demand],
    packed: Packed,
    bins: Vec<Bin>,
    left: Vec<f64>,
    /// Share of all demand that is unserved, each service at its own size.
    unserved: f64,
    random: Random,
}

/// What is to be filled.
pub(crate) struct Task<'a> {
    pub(crate) sharer: &'a Sharer<'a>,
    pub(crate) demands: &'a [Demand],
    pub(crate) gpus: usize,
    /// Of slice kinds.
    pub(crate) prices: &'a Prices,
}

impl Task<'_> {
    /// GPUs of the given patterns with work in them, if it finds a way.
    pub(crate) fn fill(
        &self,
        packer: &Packer,
        patterns: &[usize],
        watch: &mut Watch<'_>,
    ) -> Option<(Packed, Vec<Bin>)> {
        if self.gpus >= GPUS_MAX {
            return None;
        }
        let mut choices = Vec::new();
        combine(patterns, self.gpus, &mut vec![0; packer.patterns.len()], &mut choices);
        // Patterns that prices leave no slack for are those of the relaxed optimum.
        let worth = |packed: &Packed| -> f64 {
            let of = |(pattern, &copies): (&Counts, &u32)| -> f64 {
                let price = |(&count, price): (&u32, &f64)| f64::from(count * copies) * price;
                pattern.iter().zip(self.prices).map(price).sum()
            };
            packer.patterns.iter().zip(packed).map(of).sum()
        };
        choices.sort_by(|a, b| worth(b).total_cmp(&worth(a)));
        choices.truncate(CHOICES_MAX);
        let start = |(seed, packed)| Filling::new(self.sharer, self.demands, packer, packed, seed);
        let mut fillings: Vec<Filling<'_>> = (1..).zip(choices).map(start).collect();
        for (rounds, survivors) in STAGES {
            if let Some(done) = improve_all(&mut fillings, rounds, self.gpus, watch)? {
                let bins = done.bins.iter().filter(|bin| !bin.items.is_empty()).cloned();
                return Some((done.packed.clone(), bins.collect()));
            }
            fillings.sort_by(|a, b| a.unserved.total_cmp(&b.unserved));
            fillings.truncate(survivors);
        }
        None
    }
}

/// Improves every filling, on two threads, and gives the first that serves everything; nothing where the caller wishes
/// to stop. Each has its own randomness, so the outcome does not depend on which thread is ahead.
fn improve_all<'f, 'a>(
    fillings: &'f mut [Filling<'a>],
    rounds: usize,
    gpus: usize,
    watch: &mut Watch<'_>,
) -> Option<Option<&'f Filling<'a>>> {
    let (done, stop) = (AtomicUsize::new(usize::MAX), AtomicBool::new(false));
    let work = |lane: Vec<(usize, &mut Filling<'a>)>, go_on: &mut dyn FnMut() -> bool| {
        for (at, filling) in lane {
            if at > done.load(Ordering::Relaxed) || stop.load(Ordering::Relaxed) {
                return;
            }
            if !go_on() {
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
    let mut go_on = || watch.go_on("filling", Some(gpus + 1), 0.0);
    if odd.is_empty() {
        work(even, &mut go_on);
    } else {
        std::thread::scope(|scope| {
            scope.spawn(|| work(odd, &mut || true));
            work(even, &mut go_on);
        });
    }
    if stop.load(Ordering::Relaxed) {
        return None;
    }
    Some(fillings.get(done.load(Ordering::Relaxed)))
}

/// Every multiset of so many of the patterns.
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
        sharer: &'a Sharer<'a>,
        demands: &'a [Demand],
        packer: &Packer,
        packed: Packed,
        seed: u64,
    ) -> Filling<'a> {
        let mut bins = Vec::new();
        for (pattern, &copies) in packer.patterns.iter().zip(&packed) {
            for _ in 0..copies {
                for (kind, &count) in pattern.iter().enumerate() {
                    (0..count).for_each(|_| bins.push(Bin::empty(kind)));
                }
            }
        }
        let left = demands.iter().map(|demand| demand.rate).collect();
        let (unserved, random) = (f64::INFINITY, Random::new(seed));
        Filling { sharer, demands, packed, bins, left, unserved, random }
    }

    /// Whether everything is served in the end.
    fn improve(&mut self, rounds: usize) -> bool {
        for round in 0..rounds {
            let before = (self.bins.clone(), self.left.clone(), self.unserved);
            if before.2.is_finite() {
                self.disturb();
            }
            self.serve();
            self.unserved = (self.left.iter().zip(self.demands))
                .map(|(left, demand)| left / demand.rate * demand_weight(demand))
                .sum();
            if self.left.iter().zip(self.demands).all(|(left, d)| *left <= d.rate * CRUMB) {
                return true;
            }
            let heat = 0.02 * (1.0 - round as f64 / rounds as f64) * self.random.unit_f64();
            if self.unserved > before.2 + heat {
                (self.bins, self.left, self.unserved) = before;
            }
        }
        false
    }

    /// Takes all work out of a few slices, and a few services out of all.
    fn disturb(&mut self) {
        for _ in 0..self.random.below(3) {
            let at = self.random.below(self.bins.len() as u64) as usize;
            let kind = self.bins[at].kind;
            let bin = std::mem::replace(&mut self.bins[at], Bin::empty(kind));
            bin.items.iter().for_each(|(service, rate)| self.left[*service] += rate);
        }
        for _ in 0..1 + self.random.below(2) {
            let service = self.random.below(self.demands.len() as u64) as usize;
            for bin in &mut self.bins {
                let Some(at) = bin.items.iter().position(|item| item.0 == service) else {
                    continue;
                };
                let mut items = bin.items.clone();
                self.left[service] += items.remove(at).1;
                *bin = match items.is_empty() {
                    true => Bin::empty(bin.kind),
                    // Fewer items always fit where more did.
                    false => self.sharer.bin(bin.kind, items).unwrap_or(Bin::empty(bin.kind)),
                };
            }
        }
        // A slice that could not be rebuilt lost its work: count again.
        let mut left: Vec<f64> = self.demands.iter().map(|demand| demand.rate).collect();
        for (service, rate) in self.bins.iter().flat_map(|bin| &bin.items) {
            left[*service] -= rate;
        }
        self.left = left;
    }

    fn serve(&mut self) {
        let mut order: Vec<(f64, usize)> = Vec::new();
        for (service, demand) in self.demands.iter().enumerate() {
            if self.left[service] > demand.rate * CRUMB {
                let size = self.left[service] / demand.rate;
                order.push((size * demand_weight(demand) * self.random.unit_f64(), service));
            }
        }
        order.sort_by(|a, b| b.0.total_cmp(&a.0));
        for (_, service) in order {
            while self.left[service] > self.demands[service].rate * CRUMB && self.serve_one(service)
            {
            }
        }
    }

    /// Puts as much of a service as fits where it suits best; whether any did.
    fn serve_one(&mut self, service: usize) -> bool {
        let want = self.left[service];
        let mut best: Option<(f64, usize, f64)> = None;
        for (index, bin) in self.bins.iter().enumerate() {
            let room = 1.0 - bin.busy;
            if room < self.sharer.least_share(service, bin.kind)
                || bin.items.iter().any(|item| item.0 == service)
            {
                continue;
            }
            let mut most = self.sharer.most_beside(bin, service, want);
            if bin.items.is_empty() {
                most = most.max(self.sharer.alone(service, bin.kind).min(want));
            }
            if most < want * 0.999 && most < self.demands[service].rate * PART {
                continue;
            }
            let score = most / want + 0.3 * bin.busy + 0.3 * self.random.unit_f64();
            if best.is_none_or(|(top, ..)| score > top) {
                best = Some((score, index, most));
            }
        }
        let Some((_, index, most)) = best else { return false };
        let mut items = self.bins[index].items.clone();
        items.push((service, most));
        match self.sharer.bin(self.bins[index].kind, items) {
            Some(bin) => {
                self.bins[index] = bin;
                self.left[service] = (want - most).max(0.0);
                true
            }
            None => false,
        }
    }
}

/// How much a service weighs: its best use of a whole GPU's fastest slice.
fn demand_weight(demand: &Demand) -> f64 {
    let best = demand.throughput.iter().copied().fold(1e-9, f64::max);
    demand.rate / best
}
