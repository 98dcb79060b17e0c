//! What a service costs at least when slices are shared: a cheapest set of parts, under prices of what parts take.
//!
//! A part is a service's place in one slice. With turn `t` for `n` requests and cycle `d` it gives `n / d` requests a
//! second and takes the share `t / d` of the time and some share of the memory. Its cycle is at most what the latency
//! limit leaves, `limit - t`, which gives a least share; from there on the rate is proportional to the share. A slice
//! of one's own takes all of both.
//!
//! The parts of a slice never take more than all of its time or of its memory. So where prices of time and memory add up
//! to the slice's price, the parts of a slice cost no more than the slice, and all parts no more than the GPUs.
//!
//! In a cheapest set all parts but one are at an end of their range: of two that are not, the one that costs more a
//! request could give some of its rate to the other. So the search runs over multisets of ends, and one part of any
//! size takes the rest.

use super::dual::{Rows, Usage};
use crate::gpu::KINDS_MAX;

/// Relative slack of comparisons, well below the checker's.
const SLACK: f64 = 1e-9;
/// Steps after which a search answers with the relaxation's bound.
const STEPS_MAX: u32 = 300;
/// Branches that could save less than this share are left, and the bound lowered to what they could have reached.
const CLOSE: f64 = 1e-3;

/// Slices a service can have before its last ones are no longer searched together with the others.
const LARGE: f64 = 24.0;

/// Resources of a slice: time and memory.
pub(crate) const RESOURCES: usize = 2;

/// A use of a slice: shares of its time from `least` on give `throughput` times the share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) kind: usize,
    pub(crate) throughput: f64,
    pub(crate) least: f64,
    /// Share of the slice's memory.
    pub(crate) memory: f64,
}

/// A part: which piece and which share of the time.
pub(crate) type Part = (Piece, f64);

/// Prices of time and memory, by kind.
pub(crate) struct Tariff {
    prices: Rows,
}

/// A piece under prices.
#[derive(Clone, Copy)]
struct Priced {
    piece: Piece,
    /// Price of all the time.
    time: f64,
    /// Price of its memory.
    memory: f64,
}

impl Priced {
    fn cost(&self, rate: f64) -> f64 {
        self.time * (rate / self.piece.throughput).max(self.piece.least) + self.memory
    }

    fn gives(&self, rate: f64) -> bool {
        self.piece.throughput * (1.0 + SLACK) >= rate
    }

    /// Whether this is no dearer than `other` at any rate that can give. Both costs are straight but for one bend
    /// each, so the ends and the bends decide.
    fn replaces(&self, other: &Priced) -> bool {
        let most = other.piece.throughput;
        if self.piece.throughput < most || self.cost(0.0) > other.cost(0.0) {
            return false;
        }
        let bends = [self, other].map(|one| one.piece.least * one.piece.throughput);
        [bends[0].min(most), bends[1].min(most), most]
            .iter()
            .all(|&rate| self.cost(rate) <= other.cost(rate))
    }
}

impl Tariff {
    pub(crate) fn new(prices: &Rows) -> Tariff {
        Tariff { prices: *prices }
    }

    fn price(&self, piece: Piece) -> Priced {
        let memory = self.prices[KINDS_MAX + piece.kind] * piece.memory;
        Priced { piece, time: self.prices[piece.kind], memory }
    }

    /// Pieces without those that another replaces.
    fn useful(&self, pieces: &[Piece]) -> Vec<Priced> {
        let mut kept: Vec<Priced> = Vec::with_capacity(16);
        for &piece in pieces {
            let one = self.price(piece);
            if !kept.iter().any(|other| other.replaces(&one)) {
                kept.retain(|other| !one.replaces(other));
                kept.push(one);
            }
        }
        kept
    }

    /// What a part of `rate` costs at least, wherever it is.
    pub(crate) fn worth(&self, pieces: &[Piece], rate: f64) -> f64 {
        let priced = pieces.iter().map(|&piece| self.price(piece));
        priced.filter(|one| one.gives(rate)).map(|one| one.cost(rate)).fold(f64::INFINITY, f64::min)
    }

    /// What parts that give `rate` cost at least, and the cheapest of them.
    pub(crate) fn cheapest(&self, pieces: &[Piece], rate: f64) -> (f64, Vec<Part>) {
        search(&self.useful(pieces), rate, 1.0, true)
    }

    /// Slices of one's own and one part at most, where a part costs `strain` times its share: about what it costs once
    /// slices have been filled as well as they can be.
    pub(crate) fn split(&self, pieces: &[Piece], rate: f64, strain: f64) -> Vec<Part> {
        search(&self.useful(pieces), rate, strain, false).1
    }

    /// The least cost of a rate, and the resources it takes.
    pub(crate) fn usage(&self, pieces: &[Piece], rate: f64) -> Usage {
        let (bound, parts) = self.cheapest(pieces, rate);
        let mut rows = [0.0; RESOURCES * KINDS_MAX];
        for (piece, share) in parts {
            rows[piece.kind] += share;
            rows[KINDS_MAX + piece.kind] += piece.memory;
        }
        Usage { bound, rows }
    }
}

/// Ends of all pieces, without those that cost no less than one with a higher rate; cheapest above the best ratio
/// first.
fn ends(pieces: &[Priced], all: bool, ratio: f64) -> Vec<End> {
    let mut ends = Vec::with_capacity(pieces.len() * 2);
    for (at, one) in pieces.iter().enumerate() {
        let mut end = |share: f64| {
            let (rate, cost) = (share * one.piece.throughput, one.time * share + one.memory);
            ends.push(End { at, share, rate, cost, above: (cost - ratio * rate).max(0.0) });
        };
        end(1.0);
        if all && one.piece.least < 1.0 {
            end(one.piece.least);
        }
    }
    ends.sort_unstable_by(|a, b| b.rate.total_cmp(&a.rate).then(a.cost.total_cmp(&b.cost)));
    let mut least = f64::INFINITY;
    ends.retain(|end| {
        let cheaper = end.cost < least;
        least = least.min(end.cost);
        cheaper
    });
    ends.sort_unstable_by(|a, b| a.above.total_cmp(&b.above).then(b.rate.total_cmp(&a.rate)));
    ends
}

fn search(pieces: &[Priced], rate: f64, strain: f64, all: bool) -> (f64, Vec<Part>) {
    let ratio = |one: &Priced| (one.time + one.memory) / one.piece.throughput;
    let ratio = pieces.iter().map(ratio).fold(f64::INFINITY, f64::min);
    let ends = ends(pieces, all, ratio);
    let Some(best) = ends.first() else { return (f64::INFINITY, Vec::new()) };
    // Of a large rate most is served by slices at the best ratio; the bound then leaves out the rounding of the last.
    let bulk = (rate / best.rate - LARGE).floor().max(0.0);
    let mut search = Search {
        pieces,
        ends: &ends,
        ratio,
        strain,
        chosen: Vec::new(),
        best: Vec::new(),
        best_cost: f64::INFINITY,
        left_out: f64::INFINITY,
        steps: 0,
    };
    search.descend(0, rate - bulk * best.rate, 0.0);
    let exact = search.best_cost.min(search.left_out);
    let bound = if bulk > 0.0 { ratio * rate } else { exact };
    let bulk = std::iter::repeat_n((best.at, best.share), bulk as usize);
    let parts = bulk.chain(search.best).map(|(at, share)| (pieces[at].piece, share)).collect();
    (bound * (1.0 - SLACK), parts)
}

/// An end of a piece's range.
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
    pieces: &'a [Priced],
    ends: &'a [End],
    ratio: f64,
    strain: f64,
    chosen: Vec<(usize, f64)>,
    best: Vec<(usize, f64)>,
    best_cost: f64,
    /// The least that any branch left unsearched could have cost.
    left_out: f64,
    steps: u32,
}

impl Search<'_> {
    fn descend(&mut self, from: usize, left: f64, cost: f64) {
        self.steps += 1;
        // Most of the best end first: a good answer early cuts the most.
        for at in from..self.ends.len() {
            let end = self.ends[at];
            let least = cost + self.ratio * left + end.above;
            if least >= self.best_cost * (1.0 - CLOSE) || self.steps >= STEPS_MAX {
                self.left_out = self.left_out.min(least);
                break;
            }
            if end.rate < left {
                self.chosen.push((end.at, end.share));
                self.descend(at, left - end.rate, cost + end.cost);
                self.chosen.pop();
            }
        }
        self.finish(left, cost);
    }

    /// One part takes what is left.
    fn finish(&mut self, left: f64, cost: f64) {
        if cost + self.ratio * left >= self.best_cost {
            return;
        }
        for (at, one) in self.pieces.iter().enumerate().filter(|(_, one)| one.gives(left)) {
            let share = (left / one.piece.throughput).clamp(one.piece.least, 1.0);
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
    fn on_a_grid(tariff: &Tariff, pieces: &[Piece], rate: f64, steps: usize) -> f64 {
        let part: Vec<f64> =
            (0..=steps).map(|at| tariff.worth(pieces, rate * at as f64 / steps as f64)).collect();
        let mut least = vec![0.0; steps + 1];
        for at in 1..=steps {
            let costs = (1..=at).map(|one| part[one] + least[at - one]);
            least[at] = costs.fold(f64::INFINITY, f64::min);
        }
        least[steps]
    }

    #[test]
    fn the_bound_is_below_every_set_of_parts_and_close_to_the_best() {
        let mut random = Random::new(5);
        for round in 0..300 {
            let piece = |kind: usize, random: &mut Random| Piece {
                kind,
                throughput: 20.0 + 80.0 * random.unit_f64(),
                least: (0.05 + random.unit_f64()).min(1.0),
                memory: random.unit_f64(),
            };
            let pieces: Vec<Piece> = (0..6).map(|at| piece(at % 3, &mut random)).collect();
            let mut prices = [0.0; RESOURCES * KINDS_MAX];
            for kind in 0..3 {
                prices[kind] = 0.2 + random.unit_f64();
                prices[KINDS_MAX + kind] = 0.3 * random.unit_f64();
            }
            let tariff = Tariff::new(&prices);
            let rate = 5.0 + 250.0 * random.unit_f64();
            let (bound, parts) = tariff.cheapest(&pieces, rate);
            let grid = on_a_grid(&tariff, &pieces, rate, 400);
            assert!(bound <= grid && bound >= grid * 0.98, "round {round}: {bound}, {grid}");
            let given: f64 = parts.iter().map(|(piece, share)| piece.throughput * share).sum();
            assert!(given >= rate * (1.0 - 1e-6), "round {round}: {given} of {rate}");
        }
    }
}
