//! The lower bound: the best prices of slices under which no GPU pattern is worth more than one GPU.
//!
//! Under such prices each service must be paid for at least at its cheapest cover, whatever the plan, so the sum over
//! services is a lower bound of the number of GPUs. The bound is maximised by column generation: a master program with
//! one row a kind of slice and one a group of services, and exact pricing of every service in between.

use std::collections::BTreeMap;

use super::cover::Prices;
use super::packing::Packer;
use crate::gpu::KINDS_MAX;
use crate::problem::Demand;
use crate::simplex::Simplex;
use crate::watch::Watch;

/// Groups of services with a row of their own; more rows converge in fewer rounds but cost more each.
const GROUPS_MAX: usize = 12;
const ROUNDS_MAX: usize = 150;
const PIVOTS_MAX: usize = 2000;
/// Below this many services one thread does it.
const PARALLEL_FROM: usize = 4000;
/// Sums of this many floating-point numbers stay within this relative error.
const ROUNDING: f64 = 1e-9;

/// What serving one service costs at least, and what it takes of each kind to cost that.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    pub(crate) bound: f64,
    pub(crate) slices: [f64; KINDS_MAX],
}

/// Services in groups, by index.
pub(crate) struct Groups(pub(crate) Vec<Vec<u32>>);

impl Groups {
    /// Services with the same throughputs share a group.
    pub(crate) fn new(demands: &[Demand]) -> Groups {
        if demands.len() <= GROUPS_MAX {
            return Groups((0..demands.len() as u32).map(|index| vec![index]).collect());
        }
        let mut classes: BTreeMap<[u64; KINDS_MAX], usize> = BTreeMap::new();
        let mut groups = vec![Vec::new(); GROUPS_MAX];
        for (index, demand) in demands.iter().enumerate() {
            let next = classes.len();
            let class = *classes.entry(demand.throughput.map(f64::to_bits)).or_insert(next);
            groups[class % GROUPS_MAX].push(index as u32);
        }
        groups.retain(|group| !group.is_empty());
        Groups(groups)
    }
}

/// A choice of covers for a group, by the prices that led to it, and its weight in the relaxed optimum.
pub(crate) struct Mixed {
    pub(crate) group: usize,
    pub(crate) prices: Prices,
    pub(crate) weight: f64,
}

/// The outcome.
pub(crate) struct Bound {
    /// The proven lower bound.
    pub(crate) value: f64,
    /// The prices that prove it.
    pub(crate) prices: Prices,
    /// The relaxed optimum as a mixture.
    pub(crate) mixture: Vec<Mixed>,
}

/// Sum over one group.
#[derive(Clone, Copy)]
struct GroupUse {
    bound: f64,
    slices: [f64; KINDS_MAX],
}

/// Prices services under given prices, one group after the other.
type Pricing<'a> = &'a (dyn Fn(usize, &Prices) -> Usage + Sync);

struct Master<'a> {
    packer: &'a Packer,
    kinds: usize,
    simplex: Simplex,
    scale: f64,
    /// Group and prices of each column from `first` on.
    columns: Vec<(usize, Prices)>,
    first: usize,
}

/// Maximises the bound from `start`, which must be feasible.
pub(crate) fn maximise(
    groups: &Groups,
    price: Pricing<'_>,
    packer: &Packer,
    kinds: usize,
    start: Prices,
    watch: &mut Watch<'_>,
) -> Bound {
    let mut best = Bound { value: 0.0, prices: start, mixture: Vec::new() };
    let first = price_groups(groups, price, &start);
    let scale = first.iter().map(|group| group.bound).sum::<f64>().max(1e-9);
    let mut master = Master::new(packer, kinds, groups.0.len(), scale);
    master.add(&first, &start, None);
    best.value = scale;
    for round in 0..ROUNDS_MAX {
        let (prices, upper) = master.solve();
        let done = upper - best.value <= (1e-3f64).max(1e-5 * upper);
        if done || !watch.go_on("bound", None, proven(best.value)) {
            break;
        }
        // Halfway to the best prices so far: the master alone jumps between extremes.
        let trial: Prices = std::array::from_fn(|k| 0.5 * (prices[k] + best.prices[k]));
        let mut improved = false;
        for candidate in if round == 0 { vec![prices] } else { vec![trial, prices] } {
            let usage = price_groups(groups, price, &candidate);
            let value = usage.iter().map(|group| group.bound).sum::<f64>();
            if value > best.value {
                (best.value, best.prices) = (value, candidate);
            }
            improved = master.add(&usage, &candidate, Some(&prices));
            if improved {
                break;
            }
        }
        if !improved {
            break;
        }
    }
    best.mixture = master.mixture();
    best.value = proven(best.value);
    best
}

/// The bound at given prices, without improving them.
pub(crate) fn value_at(groups: &Groups, price: Pricing<'_>, prices: &Prices) -> f64 {
    proven(price_groups(groups, price, prices).iter().map(|group| group.bound).sum())
}

/// Less what floating-point sums may have added.
fn proven(value: f64) -> f64 {
    value * (1.0 - ROUNDING)
}

fn price_groups(groups: &Groups, price: Pricing<'_>, prices: &Prices) -> Vec<GroupUse> {
    let one = |group: &Vec<u32>| {
        let mut sum = GroupUse { bound: 0.0, slices: [0.0; KINDS_MAX] };
        for &service in group {
            let usage = price(service as usize, prices);
            sum.bound += usage.bound;
            sum.slices.iter_mut().zip(usage.slices).for_each(|(sum, slices)| *sum += slices);
        }
        sum
    };
    let services: usize = groups.0.iter().map(Vec::len).sum();
    if services < PARALLEL_FROM {
        return groups.0.iter().map(one).collect();
    }
    // Whole groups to a thread, so that the sums do not depend on the number of threads.
    let (mut left, mut right, mut left_size) = (Vec::new(), Vec::new(), 0);
    for (index, group) in groups.0.iter().enumerate() {
        if left_size * 2 < services {
            left_size += group.len();
            left.push(index);
        } else {
            right.push(index);
        }
    }
    let sums = |indices: &[usize]| -> Vec<(usize, GroupUse)> {
        indices.iter().map(|&index| (index, one(&groups.0[index]))).collect()
    };
    let mut all = std::thread::scope(|scope| {
        let other = scope.spawn(|| sums(&right));
        let mut all = sums(&left);
        match other.join() {
            Ok(sums) => all.extend(sums),
            Err(panic) => std::panic::resume_unwind(panic),
        }
        all
    });
    all.sort_by_key(|(index, _)| *index);
    all.into_iter().map(|(_, sum)| sum).collect()
}

impl<'a> Master<'a> {
    fn new(packer: &'a Packer, kinds: usize, groups: usize, scale: f64) -> Master<'a> {
        let mut rhs = vec![0.0; kinds];
        rhs.resize(kinds + groups, 1.0);
        let mut simplex = Simplex::new(&rhs);
        let rows = rhs.len();
        for pattern in &packer.patterns {
            let mut entries = vec![0.0; rows];
            (0..kinds).for_each(|kind| entries[kind] = f64::from(pattern[kind]));
            simplex.add(1.0, entries);
        }
        let mut first = 0;
        for kind in 0..kinds {
            let mut entries = vec![0.0; rows];
            entries[kind] = -1.0;
            first = simplex.add(0.0, entries) + 1;
        }
        Master { packer, kinds, simplex, scale, columns: Vec::new(), first }
    }

    /// Adds the groups' covers; with the master's own prices given, only those that it does not have yet. Says whether
    /// any was added.
    fn add(&mut self, usage: &[GroupUse], prices: &Prices, master: Option<&Prices>) -> bool {
        let mut added = false;
        for (group, sum) in usage.iter().enumerate() {
            let row = self.kinds + group;
            if let Some(master) = master {
                let cost: f64 = (0..self.kinds).map(|k| sum.slices[k] * master[k]).sum();
                let paid = self.simplex.duals()[row] * self.scale;
                if cost >= paid - 1e-7 * (1.0 + paid.abs()) {
                    continue;
                }
            }
            let mut entries = vec![0.0; self.kinds];
            (0..self.kinds).for_each(|kind| entries[kind] = -sum.slices[kind] / self.scale);
            entries.resize(self.simplex.duals().len(), 0.0);
            entries[row] = 1.0;
            self.simplex.add(0.0, entries);
            self.columns.push((group, *prices));
            added = true;
        }
        added
    }

    /// Prices of the kinds, made feasible beyond doubt, and the master's value.
    fn solve(&mut self) -> (Prices, f64) {
        self.simplex.solve(PIVOTS_MAX);
        let mut prices = [0.0; KINDS_MAX];
        let duals = self.simplex.duals();
        (0..self.kinds).for_each(|kind| prices[kind] = duals[kind].max(0.0));
        (feasible(&self.packer.patterns, prices), self.simplex.objective() * self.scale)
    }

    fn mixture(&self) -> Vec<Mixed> {
        let columns = self.simplex.solution().filter_map(|(column, weight)| {
            let (group, prices) = *self.columns.get(column.checked_sub(self.first)?)?;
            (weight > 1e-6).then_some(Mixed { group, prices, weight })
        });
        columns.collect()
    }
}

/// Scales prices down until no pattern is worth more than one GPU.
pub(crate) fn feasible(patterns: &[[u32; KINDS_MAX]], mut prices: Prices) -> Prices {
    let worth = |pattern: &[u32; KINDS_MAX]| -> f64 {
        pattern.iter().zip(&prices).map(|(&count, price)| f64::from(count) * price).sum()
    };
    let most = patterns.iter().map(worth).fold(0.0, f64::max);
    if most > 1.0 {
        prices.iter_mut().for_each(|price| *price = *price / most * (1.0 - 1e-12));
    }
    prices
}
