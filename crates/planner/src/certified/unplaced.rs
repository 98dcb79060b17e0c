//! Parts that are not placed yet, by value and by the cycles at which their batches are full.

use std::collections::BinaryHeap;

use base::Random;

use super::cover::Prices;
use super::sharing::SharingModel;
use crate::gpu::KINDS_MAX;
use crate::problem::ServiceDemand;

/// Up to this many parts are all candidates for a slice.
const ALL_MAX: usize = 128;
/// Parts per slice that match its cycle, and parts of any cycle, whose cuts fill what is left.
const MATCHES_MAX: usize = 72;
const OTHERS: usize = 24;
/// Cycles in one bin differ by at most this factor; so many bins from a cycle on match it.
const BIN_STEP: f64 = 1.02;
const BINS: usize = 4;
/// Number of bins, from a microsecond on.
const BINS_MAX: usize = 1200;
/// Minimum value of a slice full of such parts, relative to its price.
const WORTH_MIN: f64 = 0.8;

/// A part that is not placed yet.
#[derive(Clone, Debug)]
pub(crate) struct UnplacedPart {
    pub(crate) service: usize,
    pub(crate) rate: f64,
    pub(crate) worth: f64,
    /// Value of the smallest part of the service.
    pub(crate) small: f64,
}

/// All parts that are not placed yet.
pub(crate) struct UnplacedParts<'a> {
    sharing: &'a SharingModel<'a>,
    demands: &'a [ServiceDemand],
    prices: Prices,
    parts: Vec<UnplacedPart>,
    placed: Vec<bool>,
    remaining: usize,
    /// By value, as ordered bits.
    by_worth: BinaryHeap<(u64, u32)>,
    /// Parts by kind and bin of the cycle; empty while there are few parts.
    bins: Vec<Vec<u32>>,
    /// The last query in which a part was found.
    found_in: Vec<u32>,
    query: u32,
}

impl<'a> UnplacedParts<'a> {
    pub(crate) fn new(
        sharing: &'a SharingModel<'a>,
        demands: &'a [ServiceDemand],
        prices: Prices,
        parts: Vec<UnplacedPart>,
    ) -> UnplacedParts<'a> {
        let many = parts.len() > ALL_MAX;
        let mut unplaced = UnplacedParts {
            sharing,
            demands,
            prices,
            parts: Vec::with_capacity(parts.len() * 2),
            placed: Vec::with_capacity(parts.len() * 2),
            remaining: 0,
            by_worth: BinaryHeap::with_capacity(parts.len() * 2),
            bins: if many { vec![Vec::new(); BINS_MAX * KINDS_MAX] } else { Vec::new() },
            found_in: Vec::with_capacity(parts.len() * 2),
            query: 0,
        };
        parts.into_iter().for_each(|part| unplaced.push(part));
        unplaced
    }

    pub(crate) fn push(&mut self, part: UnplacedPart) {
        let id = self.parts.len() as u32;
        // Values are not below zero, so their bits are in order.
        self.by_worth.push((part.worth.max(0.0).to_bits(), id));
        if !self.bins.is_empty() {
            self.insert_bins(id, &part);
        }
        self.parts.push(part);
        self.placed.push(false);
        self.found_in.push(0);
        self.remaining += 1;
    }

    fn insert_bins(&mut self, id: u32, part: &UnplacedPart) {
        let limit = self.demands[part.service].limit_ms;
        for kind in 0..KINDS_MAX {
            let mut last = usize::MAX;
            for option in self.sharing.options(part.service, kind) {
                if option.turn_ms * 2.0 > limit {
                    break;
                }
                let cycle = (option.requests / part.rate * 1000.0).min(limit - option.turn_ms);
                let dense = part.worth * cycle >= option.turn_ms * self.prices[kind] * WORTH_MIN;
                let at = bin(cycle);
                if cycle >= option.turn_ms && dense && at != last {
                    self.bins[kind * BINS_MAX + at].push(id);
                    last = at;
                }
            }
        }
    }

    /// The part of the highest value, which counts as placed from now on.
    pub(crate) fn pop(&mut self) -> Option<UnplacedPart> {
        while let Some((_, id)) = self.by_worth.pop() {
            if !self.placed[id as usize] {
                self.place(id);
                return Some(self.parts[id as usize].clone());
            }
        }
        None
    }

    pub(crate) fn place(&mut self, id: u32) {
        self.placed[id as usize] = true;
        self.remaining -= 1;
    }

    pub(crate) fn part(&self, id: u32) -> &UnplacedPart {
        &self.parts[id as usize]
    }

    /// Whether candidates depend on the slice.
    pub(crate) fn are_many(&self) -> bool {
        !self.bins.is_empty() && self.remaining > ALL_MAX
    }

    /// All parts, or some of any cycle if there are many.
    pub(crate) fn any(&self, random: &mut Random) -> Vec<u32> {
        let all = self.parts.len() as u32;
        if !self.are_many() {
            return (0..all).filter(|&id| !self.placed[id as usize]).collect();
        }
        let mut found: Vec<u32> = Vec::with_capacity(OTHERS);
        // Most parts are placed in the end, so this may find fewer.
        for _ in 0..OTHERS * 4 {
            let id = random.below(u64::from(all)) as u32;
            if !self.placed[id as usize] && !found.contains(&id) {
                found.push(id);
            }
            if found.len() == OTHERS {
                break;
            }
        }
        found
    }

    /// Adds parts whose batches are full, or nearly so, in a slice of that kind and cycle.
    pub(crate) fn matching(&mut self, kind: usize, cycle: f64, found: &mut Vec<u32>) {
        self.query += 1;
        found.iter().for_each(|&id| self.found_in[id as usize] = self.query);
        let (first, most) = (bin(cycle), found.len() + MATCHES_MAX);
        for at in first..(first + BINS).min(BINS_MAX) {
            let parts = &mut self.bins[kind * BINS_MAX + at];
            // From the most valuable, which came last.
            let mut place = parts.len();
            while place > 0 && found.len() < most {
                place -= 1;
                let id = parts[place];
                if self.placed[id as usize] {
                    parts.swap_remove(place);
                } else if self.found_in[id as usize] != self.query {
                    self.found_in[id as usize] = self.query;
                    found.push(id);
                }
            }
        }
    }
}

/// The bin of a cycle.
fn bin(cycle_ms: f64) -> usize {
    let at = (cycle_ms.max(1e-3) / 1e-3).ln() / BIN_STEP.ln();
    (at as usize).min(BINS_MAX - 1)
}
