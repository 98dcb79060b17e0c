//! The lower bound: the best prices of slices under which no GPU pattern is worth more than one
//! GPU.
//!
//! Under such prices each service costs at least its cheapest cover, whatever the plan, so the sum
//! over services is a lower bound on the number of GPUs. The bound is maximised by column
//! generation: a master program with one row per slice kind and one per group of services, and
//! exact pricing of every service in between.

use std::collections::BTreeMap;

use super::cover::Prices;
use super::packing::PatternPacker;
use super::part_pricing::band_rows;
use crate::gpu::KINDS_MAX;
use crate::problem::ServiceDemand;
use crate::search_control::SearchControl;
use crate::simplex::Simplex;

/// Maximum number of groups of services; more rows converge in fewer rounds that cost more each.
const GROUPS_MAX: usize = 12;
const ROUNDS_MAX: usize = 150;
const PIVOTS_MAX: usize = 2000;
/// Below this many services one thread is used.
const PARALLEL_FROM: usize = 500;
/// Relative error that sums of floating-point numbers stay within.
const ROUNDING: f64 = 1e-9;

/// Cost of one service, and the resources of each kind that this takes. While a bound is maximised,
/// the cost is that of the cheapest parts that a short search finds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    pub(crate) bound: f64,
    pub(crate) rows: Rows,
}

/// Prices or amounts: those of whole slices by kind, then those of all the time and all the memory
/// of a slice, by band of cycles and kind. If slices are not shared, only the first are used.
pub(crate) type Rows = [f64; ROWS];
/// Most bands of cycles.
pub(crate) const BANDS_MAX: usize = 6;
pub(crate) const ROWS: usize = KINDS_MAX * (1 + 2 * BANDS_MAX);

/// Prices of whole slices.
pub(crate) fn slice_prices(prices: &Rows) -> Prices {
    std::array::from_fn(|kind| prices[kind])
}

/// Services in groups, by index.
pub(crate) struct Groups(pub(crate) Vec<Vec<u32>>);

impl Groups {
    /// Services with the same throughputs share a group.
    pub(crate) fn new(demands: &[ServiceDemand]) -> Groups {
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

impl Groups {
    /// At most `max` of the services, evenly spaced.
    pub(crate) fn sample(demands: &[ServiceDemand], max: usize) -> Groups {
        let stride = demands.len().div_ceil(max).max(1);
        let chosen: Vec<usize> = (0..demands.len()).step_by(stride).collect();
        let few: Vec<ServiceDemand> = chosen.iter().map(|&index| demands[index].clone()).collect();
        let mut groups = Groups::new(&few);
        groups.0.iter_mut().flatten().for_each(|at| *at = chosen[*at as usize] as u32);
        groups
    }
}

/// A choice of covers for a group, by the prices that led to it, and its weight in the relaxed
/// optimum.
pub(crate) struct Mixed {
    pub(crate) group: usize,
    pub(crate) prices: Rows,
    pub(crate) weight: f64,
}

/// The outcome.
pub(crate) struct Bound {
    /// The proven lower bound.
    pub(crate) value: f64,
    /// The prices that prove it.
    pub(crate) prices: Rows,
    /// The relaxed optimum as a mixture.
    pub(crate) mixture: Vec<Mixed>,
}

/// Sum over one group.
#[derive(Clone, Copy)]
struct GroupUse {
    bound: f64,
    rows: Rows,
}

/// Minimum cost of a service under given prices.
type Pricing<'a> = &'a (dyn Fn(usize, &Rows) -> Usage + Sync);

struct Master<'a> {
    packer: &'a PatternPacker,
    /// Rows of [`Rows`] that are in use.
    rows: Vec<usize>,
    simplex: Simplex,
    scale: f64,
    /// Group and prices of each column from `first` on.
    columns: Vec<(usize, Rows)>,
    first: usize,
}

/// Maximises the bound from `start`, which must be feasible.
pub(crate) fn maximise(
    groups: &Groups,
    price: Pricing<'_>,
    packer: &PatternPacker,
    rows: &[usize],
    start: Rows,
    control: &mut SearchControl<'_>,
) -> Bound {
    let mut best = Bound { value: 0.0, prices: start, mixture: Vec::new() };
    let first = price_groups(groups, price, &start);
    let scale = first.iter().map(|group| group.bound).sum::<f64>().max(1e-9);
    let mut master = Master::new(packer, rows, groups.0.len(), scale);
    master.add(&first, &start, None);
    best.value = scale;
    for round in 0..ROUNDS_MAX {
        let (prices, upper) = master.solve();
        let done = upper - best.value <= (1e-3f64).max(1e-5 * upper);
        if done || !control.should_continue("bound", None, proven(best.value)) {
            break;
        }
        // Halfway to the best prices so far, because the master alone jumps between extremes.
        let trial: Rows = std::array::from_fn(|k| 0.5 * (prices[k] + best.prices[k]));
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
pub(crate) fn value_at(groups: &Groups, price: Pricing<'_>, prices: &Rows) -> f64 {
    proven(price_groups(groups, price, prices).iter().map(|group| group.bound).sum())
}

/// Subtracts the floating-point error.
fn proven(value: f64) -> f64 {
    value * (1.0 - ROUNDING)
}

fn price_groups(groups: &Groups, price: Pricing<'_>, prices: &Rows) -> Vec<GroupUse> {
    let one = |group: &Vec<u32>| {
        let mut sum = GroupUse { bound: 0.0, rows: [0.0; ROWS] };
        for &service in group {
            let usage = price(service as usize, prices);
            sum.bound += usage.bound;
            sum.rows.iter_mut().zip(usage.rows).for_each(|(sum, row)| *sum += row);
        }
        sum
    };
    let services: usize = groups.0.iter().map(Vec::len).sum();
    if services < PARALLEL_FROM {
        return groups.0.iter().map(one).collect();
    }
    // Whole groups to a thread, so that the sums do not depend on the number of threads.
    let (mut remaining, mut right, mut left_size) = (Vec::new(), Vec::new(), 0);
    for (index, group) in groups.0.iter().enumerate() {
        if left_size * 2 < services {
            left_size += group.len();
            remaining.push(index);
        } else {
            right.push(index);
        }
    }
    let sums = |indices: &[usize]| -> Vec<(usize, GroupUse)> {
        indices.iter().map(|&index| (index, one(&groups.0[index]))).collect()
    };
    let mut all = std::thread::scope(|scope| {
        let other = scope.spawn(|| sums(&right));
        let mut all = sums(&remaining);
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
    fn new(packer: &'a PatternPacker, used: &[usize], groups: usize, scale: f64) -> Master<'a> {
        let mut rhs = vec![0.0; used.len()];
        rhs.resize(used.len() + groups, 1.0);
        let mut simplex = Simplex::new(&rhs);
        for pattern in &packer.patterns {
            let mut entries = vec![0.0; rhs.len()];
            for (entry, &row) in entries.iter_mut().zip(used) {
                if row < KINDS_MAX {
                    *entry = f64::from(pattern[row]);
                }
            }
            simplex.add(1.0, entries);
        }
        // A slice whose cycle is in a band.
        let place = |row: usize| used.iter().position(|&one| one == row);
        let bands = 0..BANDS_MAX as u8;
        for (band, kind) in bands.flat_map(|band| (0..KINDS_MAX).map(move |kind| (band, kind))) {
            let [time, memory] = band_rows(band, kind).map(place);
            if let (Some(whole), Some(time), Some(memory)) = (place(kind), time, memory) {
                simplex.add_sparse(0.0, vec![(whole, -1.0), (time, 1.0), (memory, 1.0)]);
            }
        }
        let mut first = 0;
        for at in 0..used.len() {
            let mut entries = vec![0.0; rhs.len()];
            entries[at] = -1.0;
            first = simplex.add(0.0, entries) + 1;
        }
        Master { packer, rows: used.to_vec(), simplex, scale, columns: Vec::new(), first }
    }

    /// Adds the groups' covers; if the master's own prices are given, only those it does not have
    /// yet. Returns whether any was added.
    fn add(&mut self, usage: &[GroupUse], prices: &Rows, master: Option<&Rows>) -> bool {
        let mut added = false;
        for (group, sum) in usage.iter().enumerate() {
            let row = self.rows.len() + group;
            if let Some(master) = master {
                let cost: f64 = self.rows.iter().map(|&at| sum.rows[at] * master[at]).sum();
                let paid = self.simplex.duals()[row] * self.scale;
                if cost >= paid - 1e-7 * (1.0 + paid.abs()) {
                    continue;
                }
            }
            let mut entries: Vec<f64> =
                self.rows.iter().map(|&at| -sum.rows[at] / self.scale).collect();
            entries.resize(self.simplex.duals().len(), 0.0);
            entries[row] = 1.0;
            self.simplex.add(0.0, entries);
            self.columns.push((group, *prices));
            added = true;
        }
        added
    }

    /// Prices of the kinds, scaled to be strictly feasible, and the master's value.
    fn solve(&mut self) -> (Rows, f64) {
        self.simplex.solve(PIVOTS_MAX);
        let mut prices = [0.0; ROWS];
        let duals = self.simplex.duals();
        self.rows.iter().zip(duals).for_each(|(&row, dual)| prices[row] = dual.max(0.0));
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

/// Scales prices down until no pattern is worth more than one GPU, and makes those of the time and
/// the memory of a slice add up to its own.
pub(crate) fn feasible(patterns: &[[u32; KINDS_MAX]], mut prices: Rows) -> Rows {
    let slices = slice_prices(&prices);
    let worth = |pattern: &[u32; KINDS_MAX]| -> f64 {
        pattern.iter().zip(&slices).map(|(&count, price)| f64::from(count) * price).sum()
    };
    let max = patterns.iter().map(worth).fold(0.0, f64::max);
    if max > 1.0 {
        prices.iter_mut().for_each(|price| *price = *price / max * (1.0 - 1e-12));
    }
    for band in 0..BANDS_MAX as u8 {
        for kind in 0..KINDS_MAX {
            let [time, memory] = band_rows(band, kind);
            prices[memory] = prices[memory].clamp(0.0, prices[kind]);
            prices[time] = prices[kind] - prices[memory];
        }
    }
    prices
}
