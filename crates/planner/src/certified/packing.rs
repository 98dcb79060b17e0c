//! Minimum number of GPUs for given numbers of slices: a small integer program over the maximal
//! patterns.

use crate::gpu::{KINDS_MAX, SliceCounts};
use crate::simplex::Simplex;

/// Maximum number of nodes of the exact search for what the relaxation leaves over.
const NODES_MAX: usize = 4000;

/// GPUs by pattern.
pub(crate) type Packed = Vec<u32>;

/// The patterns of a GPU kind, ready for packing.
pub(crate) struct PatternPacker {
    pub(crate) patterns: Vec<SliceCounts>,
    kinds: usize,
}

impl PatternPacker {
    pub(crate) fn new(patterns: Vec<SliceCounts>, kinds: usize) -> PatternPacker {
        PatternPacker { patterns, kinds }
    }

    /// GPUs that hold `demand`: as few as the relaxation proves necessary, or a little more where
    /// the search ends without such a packing.
    pub(crate) fn pack(&self, demand: &SliceCounts) -> Packed {
        let (relaxed, shares) = self.relax(demand);
        let least = (relaxed - 1e-4).ceil().max(0.0) as usize;
        for extra in 0.. {
            if let Some(packed) = self.pack_into(demand, &shares, least + extra) {
                return packed;
            }
        }
        unreachable!("one gpu a slice always packs")
    }

    /// Like [`PatternPacker::pack`], but `None` unless `max` GPUs suffice.
    pub(crate) fn pack_within(&self, demand: &SliceCounts, max: usize) -> Option<Packed> {
        let (relaxed, shares) = self.relax(demand);
        if relaxed > max as f64 + 1e-4 {
            return None;
        }
        self.pack_into(demand, &shares, max)
    }

    /// Marginal cost of one more slice of each kind, from the relaxation.
    pub(crate) fn marginal(&self, demand: &SliceCounts) -> [f64; KINDS_MAX] {
        let simplex = self.relaxation(demand);
        let mut prices = [0.0; KINDS_MAX];
        prices.iter_mut().zip(simplex.duals()).for_each(|(price, dual)| *price = dual.max(0.0));
        prices
    }

    /// Value and pattern shares of the relaxation.
    pub(crate) fn relax(&self, demand: &SliceCounts) -> (f64, Vec<f64>) {
        let simplex = self.relaxation(demand);
        let scale = f64::from(demand.iter().sum::<u32>().max(1));
        let first = self.kinds;
        let mut shares = vec![0.0; self.patterns.len()];
        for (column, value) in simplex.solution() {
            if (first..first + self.patterns.len()).contains(&column) {
                shares[column - first] = value * scale;
            }
        }
        // The perturbed optimum is above the true one by less than the dual values times the noise.
        (simplex.objective() * scale, shares)
    }

    fn relaxation(&self, demand: &SliceCounts) -> Simplex {
        let scale = demand.iter().sum::<u32>().max(1);
        let rhs: Vec<f64> =
            demand[..self.kinds].iter().map(|&d| f64::from(d) / f64::from(scale)).collect();
        let mut simplex = Simplex::new(&rhs);
        for pattern in &self.patterns {
            simplex.add(1.0, pattern[..self.kinds].iter().map(|&count| f64::from(count)).collect());
        }
        for kind in 0..self.kinds {
            let mut surplus = vec![0.0; self.kinds];
            surplus[kind] = -1.0;
            simplex.add(0.0, surplus);
        }
        simplex.solve(1000);
        simplex
    }

    fn pack_into(&self, demand: &SliceCounts, shares: &[f64], max: usize) -> Option<Packed> {
        // The integer part of the relaxation is kept; each retry releases one more GPU of each
        // pattern.
        for give_back in 0..3 {
            let mut packed: Packed = shares
                .iter()
                .map(|share| ((share + 1e-6) as u32).saturating_sub(give_back))
                .collect();
            let used: u32 = packed.iter().sum();
            let Some(available) = max.checked_sub(used as usize) else { continue };
            let mut remaining = *demand;
            for (pattern, &count) in self.patterns.iter().zip(&packed) {
                for kind in 0..KINDS_MAX {
                    remaining[kind] = remaining[kind].saturating_sub(pattern[kind] * count);
                }
            }
            let mut nodes = 0;
            if self.fill(remaining, available, &mut packed, &mut nodes) {
                return Some(packed);
            }
            if packed.iter().all(|&count| count == 0) && nodes < NODES_MAX {
                return None;
            }
        }
        None
    }

    fn fill(
        &self,
        remaining: SliceCounts,
        available: usize,
        packed: &mut Packed,
        nodes: &mut usize,
    ) -> bool {
        let Some(kind) = (0..self.kinds).rev().find(|&kind| remaining[kind] > 0) else {
            return true;
        };
        *nodes += 1;
        if available == 0 || *nodes > NODES_MAX {
            return false;
        }
        let mut order: Vec<usize> =
            (0..self.patterns.len()).filter(|&p| self.patterns[p][kind] > 0).collect();
        let useful = |p: usize| -> u32 {
            (0..self.kinds).map(|k| self.patterns[p][k].min(remaining[k]) * (k as u32 + 1)).sum()
        };
        order.sort_by_key(|&p| std::cmp::Reverse(useful(p)));
        for pattern in order {
            let mut rest = remaining;
            for (rest, count) in rest.iter_mut().zip(&self.patterns[pattern]) {
                *rest = rest.saturating_sub(*count);
            }
            packed[pattern] += 1;
            if self.fill(rest, available - 1, packed, nodes) {
                return true;
            }
            packed[pattern] -= 1;
        }
        false
    }
}
