//! A plan with shared slices under improvement: slices are emptied and their services served anew, over and over.

use base::Random;

use super::assembly::Unit;
use super::cover::Prices;
use super::packing::{Packed, Packer};
use super::sharing::{Bin, Item, Sharer};
use crate::gpu::{Counts, KINDS_MAX};
use crate::plan::Share;
use crate::problem::Demand;
use crate::watch::Watch;

/// Slices looked at for room before a new one is opened.
const LOOKS: usize = 40;
/// Slices passed over in search of those.
const PASSED: usize = 2000;
/// Rates below this share of a service's demand are not worth a part of their own.
const CRUMB: f64 = 1e-8;
/// Worsening in GPUs that is accepted at the start of an improvement; it falls to none.
const HEAT: f64 = 0.03;

/// What room in a new slice may cost, from nothing to almost as much as room in use.
const WASTES: [f64; 6] = [0.0, 0.05, 0.1, 0.2, 0.4, 0.8];

/// The plan under improvement.
#[derive(Clone)]
pub(crate) struct Bins<'a> {
    sharer: &'a Sharer<'a>,
    demands: &'a [Demand],
    prices: Prices,
    kinds: usize,
    bins: Vec<Bin>,
    /// Price of all slices, less a little for room that lies together.
    score: f64,
    counts: Counts,
    /// Requests a second each service has by now.
    served: Vec<f64>,
    journal: Vec<Change>,
    /// Price of room left in a new slice, as a part of the slice's: with none, large slices are opened as readily as
    /// small ones.
    waste: f64,
}

/// One change, with what it takes to undo it.
#[derive(Clone, Debug)]
enum Change {
    Opened,
    Emptied(usize, Bin),
    Altered(usize, Bin),
}

impl<'a> Bins<'a> {
    pub(crate) fn new(
        sharer: &'a Sharer<'a>,
        demands: &'a [Demand],
        prices: Prices,
        kinds: usize,
    ) -> Bins<'a> {
        Bins {
            sharer,
            demands,
            prices,
            kinds,
            bins: Vec::new(),
            score: 0.0,
            counts: [0; KINDS_MAX],
            served: vec![0.0; demands.len()],
            journal: Vec::new(),
            waste: 0.0,
        }
    }

    /// From whole slices, a service each.
    pub(crate) fn fill_with_covers(&mut self, covers: &[Counts]) {
        for (service, cover) in covers.iter().enumerate() {
            let mut left = self.demands[service].rate;
            for kind in (0..KINDS_MAX).rev() {
                for _ in 0..cover[kind] {
                    let rate = left.min(self.sharer.alone(service, kind));
                    left -= rate;
                    if rate > 0.0 {
                        self.open(kind, service, rate);
                    }
                }
            }
        }
    }

    /// From nothing: large services first, each at its best ratio, with the rest beside others.
    pub(crate) fn fill_greedily(&mut self, waste: f64, random: &mut Random) {
        self.waste = waste;
        let mut order: Vec<usize> = (0..self.demands.len()).collect();
        let cost = |service: usize| self.sharer.least(service, &self.prices).bound;
        let costs: Vec<f64> = order.iter().map(|&service| cost(service)).collect();
        order.sort_by(|&a, &b| costs[b].total_cmp(&costs[a]));
        // Whole slices first, so that what is left of every service meets all the room there will be.
        let mut rests = Vec::new();
        for service in order {
            let mut left = self.demands[service].rate;
            let kind = self.best_whole(service);
            let throughput = self.sharer.alone(service, kind);
            while throughput > 0.0 && left >= throughput && self.open(kind, service, throughput) {
                left -= throughput;
            }
            rests.push((service, left));
        }
        for (service, left) in rests {
            self.serve(service, left, random);
        }
    }

    fn best_whole(&self, service: usize) -> usize {
        let ratio = |kind: usize| self.prices[kind] / self.sharer.alone(service, kind).max(1e-9);
        (0..self.kinds).min_by(|&a, &b| ratio(a).total_cmp(&ratio(b))).unwrap_or(0)
    }

    fn open(&mut self, kind: usize, service: usize, rate: f64) -> bool {
        let Some(bin) = self.sharer.bin(kind, vec![(service, rate)]) else { return false };
        self.served[service] += rate;
        self.score += self.worth(&bin);
        self.counts[kind] += 1;
        self.bins.push(bin);
        self.journal.push(Change::Opened);
        true
    }

    fn empty(&mut self, at: usize) -> Vec<Item> {
        let bin = self.bins.swap_remove(at);
        self.score -= self.worth(&bin);
        self.counts[bin.kind] -= 1;
        let items = bin.items.clone();
        items.iter().for_each(|(service, rate)| self.served[*service] -= rate);
        self.journal.push(Change::Emptied(at, bin));
        items
    }

    fn undo(&mut self) {
        while let Some(change) = self.journal.pop() {
            match change {
                Change::Opened => {
                    if let Some(bin) = self.bins.pop() {
                        self.counts[bin.kind] -= 1;
                        bin.items.iter().for_each(|item| self.served[item.0] -= item.1);
                    }
                }
                Change::Emptied(at, bin) => {
                    self.counts[bin.kind] += 1;
                    bin.items.iter().for_each(|item| self.served[item.0] += item.1);
                    self.bins.push(bin);
                    let last = self.bins.len() - 1;
                    self.bins.swap(at, last);
                }
                Change::Altered(at, bin) => {
                    let new = std::mem::replace(&mut self.bins[at], bin);
                    new.items.iter().for_each(|item| self.served[item.0] -= item.1);
                    let old = &self.bins[at].items;
                    old.iter().for_each(|item| self.served[item.0] += item.1);
                }
            }
        }
    }

    /// Gives `service` another `left` requests a second: beside others where there is room, else in new slices.
    fn serve(&mut self, service: usize, mut left: f64, random: &mut Random) {
        let crumb = self.demands[service].rate * CRUMB;
        left = self.serve_beside(service, left, crumb, random);
        while left > crumb {
            let mut best: Option<(f64, usize, f64)> = None;
            for kind in 0..self.kinds {
                let alone = self.sharer.alone(service, kind);
                let (rate, share) = match self.sharer.share_of(service, kind, left) {
                    Some(share) => (left, share.min(1.0)),
                    None if alone > 0.0 => (left.min(alone), 1.0),
                    None => continue,
                };
                let whole = self.prices[kind].max(1e-3);
                let waste = (1.0 - share) * self.waste * (0.5 + random.unit_f64());
                let cost = whole * (share + waste) / rate;
                if best.is_none_or(|(least, ..)| cost < least) {
                    best = Some((cost, kind, rate));
                }
            }
            let Some((_, kind, rate)) = best else { return };
            if !self.open(kind, service, rate)
                && !self.open(self.best_whole(service), service, rate)
            {
                return;
            }
            left -= rate;
        }
    }

    fn serve_beside(
        &mut self,
        service: usize,
        mut left: f64,
        crumb: f64,
        random: &mut Random,
    ) -> f64 {
        let count = self.bins.len();
        if count == 0 {
            return left;
        }
        let offset = random.below(count as u64) as usize;
        let mut looks = 0;
        let mut best: Option<(f64, f64, usize)> = None;
        for at in 0..count.min(PASSED) {
            let index = (at + offset) % count;
            let bin = &self.bins[index];
            let room = 1.0 - bin.busy;
            if room < 0.02
                || room < self.sharer.least_share(service, bin.kind)
                || bin.items.iter().any(|item| item.0 == service)
            {
                continue;
            }
            looks += 1;
            if looks > LOOKS {
                break;
            }
            let most = self.sharer.most_beside(bin, service, left);
            if most < left * 0.999 && most < 0.15 * self.sharer.alone(service, bin.kind).min(left) {
                continue;
            }
            // All of it if possible, and then where the least room stays.
            let score = most / left + 0.1 * bin.busy + 0.05 * random.unit_f64();
            if best.is_none_or(|(top, ..)| score > top) {
                best = Some((score, most, index));
            }
        }
        let Some((_, most, index)) = best else { return left };
        let mut items = self.bins[index].items.clone();
        items.push((service, most));
        let Some(new) = self.sharer.bin(self.bins[index].kind, items) else { return left };
        let old = self.bins[index].clone();
        self.served[service] += most;
        self.score += self.worth(&new) - self.worth(&old);
        self.bins[index] = new;
        self.journal.push(Change::Altered(index, old));
        left -= most;
        if left > crumb { self.serve_beside(service, left, crumb, random) } else { left }
    }

    fn worth(&self, bin: &Bin) -> f64 {
        self.prices[bin.kind] * (1.0 - 0.25 * (1.0 - bin.busy).powi(2))
    }

    /// Empties a few slices and serves their services anew, `rounds` times, keeping what is no worse; ends early at
    /// `lower_bound` GPUs.
    pub(crate) fn improve(
        &mut self,
        packer: &Packer,
        rounds: usize,
        lower_bound: usize,
        random: &mut Random,
        watch: &mut Watch<'_>,
    ) -> Packed {
        let mut packed = packer.pack(&self.counts);
        let mut best = self.bins.clone();
        let mut gpus = packed.iter().sum::<u32>() as usize;
        for round in 0..rounds {
            if gpus <= lower_bound {
                break;
            }
            if round % 64 == 0 && !watch.go_on("sharing", Some(gpus), lower_bound as f64) {
                break;
            }
            self.journal.clear();
            let before = self.score;
            self.disturb(random);
            let heat = HEAT * (1.0 - round as f64 / rounds as f64);
            if self.score > before + heat * random.unit_f64() {
                self.undo();
                self.score = before;
                continue;
            }
            let counts = self.counts;
            let price: f64 =
                (0..KINDS_MAX).map(|kind| f64::from(counts[kind]) * self.prices[kind]).sum();
            if price <= gpus as f64 - 1.0 + 1e-6
                && let Some(better) = packer.pack_within(&counts, gpus - 1)
            {
                packed = better;
                gpus = packed.iter().sum::<u32>() as usize;
                best = self.bins.clone();
            }
        }
        self.bins = best;
        packed
    }

    fn disturb(&mut self, random: &mut Random) {
        let count = match random.below(12) {
            0 => 1 + random.below(14) as usize,
            _ => 1 + random.below(4) as usize,
        };
        self.waste = WASTES[random.below(WASTES.len() as u64) as usize];
        let mut freed: Vec<Item> = Vec::new();
        for _ in 0..count.min(self.bins.len()) {
            // The emptier of two: full slices have little to gain.
            let one = random.below(self.bins.len() as u64) as usize;
            let other = random.below(self.bins.len() as u64) as usize;
            let at = if self.bins[one].busy <= self.bins[other].busy { one } else { other };
            freed.extend(self.empty(at));
        }
        let mut freed: Vec<usize> = freed.into_iter().map(|(service, _)| service).collect();
        freed.sort_unstable();
        freed.dedup();
        for at in (1..freed.len()).rev() {
            freed.swap(at, random.below(at as u64 + 1) as usize);
        }
        for service in freed {
            let left = self.demands[service].rate - self.served[service];
            self.serve(service, left, random);
        }
    }

    /// The slices.
    pub(crate) fn into_bins(self) -> Vec<Bin> {
        self.bins
    }
}

/// Slices as units of a plan.
pub(crate) fn units(sharer: &Sharer<'_>, bins: &[Bin]) -> Vec<Unit> {
    let unit = |bin: &Bin| {
        let fit = sharer.fit(bin.kind, &bin.items)?;
        let share = |(&(service, rate), &(batch, processes)): (&Item, &(u32, u32))| Share {
            service,
            batch,
            processes,
            rate,
        };
        let shares = bin.items.iter().zip(&fit.ways).map(share).collect();
        Some(Unit { kind: bin.kind, cycle_ms: fit.cycle_ms, shares })
    };
    bins.iter().filter_map(unit).collect()
}
