//! Estimates the replicas that the load needs: the fewest, or the cheapest over several replica
//! pools, on which the scheduler's own placement serves all load with its headroom.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::activity::Activity;
use crate::scheduler::placement::{self, PlacementSettings};
use crate::scheduler::plan::{Curve, Curves, Demand, LoadedModels, Machine, Placement};

/// Load and machines, as the leading scheduler knows them.
#[derive(Clone, Debug, Default)]
pub struct ScalingInput {
    /// Backends that have joined.
    pub machines: Vec<Machine>,
    /// Rate and SLO of each model.
    pub demands: Vec<Demand>,
    /// Measured latencies.
    pub curves: Curves,
    /// Settings of placements.
    pub placement: PlacementSettings,
    /// Requests per second that every model is planned for at least.
    pub rate_min: f64,
    /// Whether any frontend reports load.
    pub reported: bool,
    /// Whether there are requests.
    pub activity: Activity,
    /// Use of backends, by name.
    pub usage: BTreeMap<String, BackendUsage>,
}

/// How the plan uses a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BackendUsage {
    /// Whether it holds no model and is assigned none.
    pub empty: bool,
    /// Share of its time that the plan uses.
    pub busy: f64,
}

/// A gain in served rate below this factor does not count.
const GAIN_MIN: f64 = 1.02;
/// Another mixture of pools is chosen only if it costs less than this share of one that keeps what
/// is there: moving between pools is not worth less.
const WORTH_MOVING: f64 = 0.9;
/// Placements that one estimate tries at most, and machines in all of them.
const TRIALS_MAX: usize = 160;
const TRIAL_MACHINES_MAX: usize = 200_000;

/// A pool from which replicas can be had.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PoolOffer {
    /// The existing replicas among the backends.
    pub own: BTreeSet<String>,
    /// A machine as its replicas are, where none of them has joined.
    pub like: Option<Machine>,
    /// The fewest and the most replicas.
    pub bounds: (u32, u32),
    /// Price of a replica.
    pub price: f64,
    /// Replicas requested now.
    pub current: u32,
}

/// The replicas of each of `pools` that serve the demands of `input` at the lowest price, within
/// the bounds. Backends of no pool are used but never scaled. `None` where it cannot be known: no
/// frontend reports load, or it is not known what machines the pools have.
pub fn estimate(input: &ScalingInput, pools: &[PoolOffer]) -> Option<Vec<u32>> {
    if !input.reported {
        return None;
    }
    let is_scaled = |name: &String| pools.iter().any(|pool| pool.own.contains(name));
    let others: Vec<Machine> =
        input.machines.iter().filter(|machine| !is_scaled(&machine.name)).cloned().collect();
    let replica = |pool: &PoolOffer| {
        let mut own = input.machines.iter().filter(|machine| pool.own.contains(&machine.name));
        own.next().cloned().or_else(|| pool.like.clone())
    };
    let replicas: Vec<Option<Machine>> = pools.iter().map(replica).collect();
    let mut counts = match replicas.iter().any(Option::is_some) {
        true => Search::new(input, pools, &replicas, others.clone()).cheapest(),
        // What cannot be planned for can still be woken up.
        false if input.activity.waiting > 0 => pools.iter().map(|pool| pool.bounds.0).collect(),
        false => return None,
    };
    // A version that waits to be checked is no load, and needs a backend.
    let nothing = others.is_empty() && counts.iter().all(|count| *count == 0);
    if nothing && input.activity.waiting > 0 {
        let usable = |&pool: &usize| pools[pool].bounds.1 > 0;
        let price = |&a: &usize, &b: &usize| pools[a].price.total_cmp(&pools[b].price);
        if let Some(pool) = (0..pools.len()).filter(usable).min_by(price) {
            counts[pool] = 1;
        }
    }
    Some(counts)
}

/// The search for the cheapest replicas. Exhaustive search over several pools would be far too
/// slow: each pool is filled first once, in the order of what a request costs on it, and the
/// results are improved by replacing replicas of one pool by those of another.
struct Search<'a> {
    trial: Trial<'a>,
    pools: &'a [PoolOffer],
    lower: Vec<u32>,
    upper: Vec<u32>,
    trials: Cell<usize>,
    trials_max: usize,
}

impl<'a> Search<'a> {
    fn new(
        input: &'a ScalingInput,
        pools: &'a [PoolOffer],
        replicas: &[Option<Machine>],
        others: Vec<Machine>,
    ) -> Search<'a> {
        // A pool of an unknown kind gets what it has to have.
        let bounds = |(pool, replica): (&PoolOffer, &Option<Machine>)| match replica {
            Some(_) => pool.bounds,
            None => (pool.bounds.0, pool.bounds.0),
        };
        let bounds: Vec<(u32, u32)> = pools.iter().zip(replicas).map(bounds).collect();
        let lower: Vec<u32> = bounds.iter().map(|(lower, upper)| *lower.min(upper)).collect();
        let upper: Vec<u32> = bounds.iter().map(|(_, upper)| *upper).collect();
        let machines = others.len() + upper.iter().map(|count| *count as usize).sum::<usize>();
        let trials_max = (TRIAL_MACHINES_MAX / machines.max(1)).clamp(8, TRIALS_MAX);
        let trial = Trial::new(input, replicas, others);
        Search { trial, pools, lower, upper, trials: Cell::new(0), trials_max }
    }

    fn suffices(&self, counts: &[u32]) -> bool {
        self.trials.set(self.trials.get() + 1);
        self.trial.suffices(&self.trial.place(counts))
    }

    fn is_exhausted(&self) -> bool {
        self.trials.get() >= self.trials_max
    }

    fn cost(&self, counts: &[u32]) -> f64 {
        counts.iter().zip(self.pools).map(|(count, pool)| f64::from(*count) * pool.price).sum()
    }

    fn cheapest(&self) -> Vec<u32> {
        if self.trial.demands.is_empty() {
            return self.lower.clone();
        }
        let all = self.trial.place(&self.upper);
        if !self.trial.suffices(&all) {
            // Replicas that would not help are not requested.
            let there = |(pool, upper): (&PoolOffer, &u32)| {
                u32::try_from(self.trial.own(pool)).unwrap_or(u32::MAX).min(*upper)
            };
            let there: Vec<u32> = self.pools.iter().zip(&self.upper).map(there).collect();
            let now = self.trial.place(&there);
            let demands = &self.trial.demands;
            let helps = all.slack(demands) > now.slack(demands) * GAIN_MIN;
            return if helps { self.upper.clone() } else { there };
        }
        if self.pools.len() == 1 {
            return vec![self.fewest_of_one(&all)];
        }
        let mut best: Option<Vec<u32>> = None;
        for order in self.orders() {
            if best.is_some() && self.is_exhausted() {
                break;
            }
            let Some(found) = self.fill(&order) else { continue };
            let found = self.improve(found);
            if best.as_ref().is_none_or(|best| self.cost(&found) < self.cost(best) - 1e-9) {
                best = Some(found);
            }
        }
        let best = best.unwrap_or_else(|| self.upper.clone());
        self.keep_current(best)
    }

    /// The fewest replicas of the only pool, where `all` suffice.
    fn fewest_of_one(&self, all: &Placement) -> u32 {
        let (lower, upper) = (self.lower[0], self.upper[0]);
        let used = all.used().saturating_sub(self.trial.others.len());
        let mut count = u32::try_from(used).unwrap_or(upper).clamp(lower, upper);
        while count < upper && !self.suffices(&[count]) {
            count = count.saturating_add((count / 16).max(1)).min(upper);
        }
        count
    }

    /// Orders in which pools are filled: by what the load costs on each, then with each pool first.
    fn orders(&self) -> Vec<Vec<usize>> {
        let mut sorted: Vec<usize> = (0..self.pools.len()).collect();
        let cost = |pool: usize| self.pools[pool].price * self.trial.machines_needed(pool);
        sorted.sort_by(|&a, &b| cost(a).total_cmp(&cost(b)));
        let first = |&first: &usize| {
            let rest = sorted.iter().copied().filter(move |&pool| pool != first);
            std::iter::once(first).chain(rest).collect::<Vec<usize>>()
        };
        sorted.iter().map(first).collect()
    }

    /// Fills one pool after the other until everything is served.
    fn fill(&self, order: &[usize]) -> Option<Vec<u32>> {
        let mut counts = self.lower.clone();
        for &pool in order {
            if let Some(found) = self.fewest(&counts, pool) {
                counts[pool] = found;
                return Some(counts);
            }
            counts[pool] = self.upper[pool];
        }
        None
    }

    /// The fewest replicas of `pool`, where the others stay.
    fn fewest(&self, counts: &[u32], pool: usize) -> Option<u32> {
        let serves = |count: u32| {
            let mut counts = counts.to_vec();
            counts[pool] = count;
            self.suffices(&counts)
        };
        let (lower, upper) = (counts[pool], self.upper[pool]);
        if serves(lower) {
            return Some(lower);
        }
        let (mut low, mut step) = (lower, 1u32);
        let mut high = loop {
            let next = low.saturating_add(step).min(upper);
            if next == low {
                return None;
            }
            if serves(next) {
                break next;
            }
            (low, step) = (next, step.saturating_mul(2));
        };
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if serves(middle) { high = middle } else { low = middle }
        }
        Some(high)
    }

    /// Removes what is not needed, the most expensive first, and replaces replicas where that
    /// lowers the price.
    fn improve(&self, mut counts: Vec<u32>) -> Vec<u32> {
        let mut expensive: Vec<usize> = (0..counts.len()).collect();
        expensive.sort_by(|&a, &b| self.pools[b].price.total_cmp(&self.pools[a].price));
        for &pool in &expensive {
            while counts[pool] > self.lower[pool] && !self.is_exhausted() {
                counts[pool] -= 1;
                if !self.suffices(&counts) {
                    counts[pool] += 1;
                    break;
                }
            }
        }
        for &from in &expensive {
            for to in (0..counts.len()).filter(|to| *to != from) {
                while counts[from] > self.lower[from] && !self.is_exhausted() {
                    let mut other = counts.clone();
                    other[from] -= 1;
                    let Some(count) = self.fewest(&other, to) else { break };
                    other[to] = count;
                    if self.cost(&other) > self.cost(&counts) - 1e-9 {
                        break;
                    }
                    counts = other;
                }
            }
        }
        counts
    }

    /// What is requested now, adapted, unless `best` is clearly cheaper.
    fn keep_current(&self, best: Vec<u32>) -> Vec<u32> {
        let current = |(index, pool): (usize, &PoolOffer)| {
            pool.current.clamp(self.lower[index], self.upper[index])
        };
        let mut kept: Vec<u32> = self.pools.iter().enumerate().map(current).collect();
        if !self.suffices(&kept) {
            let orders = self.orders();
            let cheapest = orders.first().into_iter().flatten();
            let mut found = false;
            for &pool in cheapest {
                if let Some(count) = self.fewest(&kept, pool) {
                    kept[pool] = count;
                    found = true;
                    break;
                }
                kept[pool] = self.upper[pool];
            }
            if !found {
                return best;
            }
        }
        // It has trials of its own: it must not lose because the search was long.
        self.trials.set(0);
        let kept = self.improve_down(kept);
        if self.cost(&best) < WORTH_MOVING * self.cost(&kept) { best } else { kept }
    }

    /// Removes what is not needed, the most expensive first.
    fn improve_down(&self, mut counts: Vec<u32>) -> Vec<u32> {
        let mut expensive: Vec<usize> = (0..counts.len()).collect();
        expensive.sort_by(|&a, &b| self.pools[b].price.total_cmp(&self.pools[a].price));
        for pool in expensive {
            let mut lower = counts.clone();
            lower[pool] = self.lower[pool];
            if let Some(count) = self.fewest(&lower, pool) {
                counts[pool] = count.min(counts[pool]);
            }
        }
        counts
    }
}

/// Placements on hypothetical machines.
struct Trial<'a> {
    input: &'a ScalingInput,
    demands: Vec<Demand>,
    curves: Curves,
    others: Vec<Machine>,
    /// A machine as every replica of each pool is.
    replicas: Vec<Option<Machine>>,
}

impl<'a> Trial<'a> {
    fn new(
        input: &'a ScalingInput,
        replicas: &[Option<Machine>],
        others: Vec<Machine>,
    ) -> Trial<'a> {
        let devices: BTreeSet<&str> =
            replicas.iter().flatten().map(|machine| machine.device.as_str()).collect();
        let (demands, curves) = known_demands(input, &devices);
        Trial { input, demands, curves, others, replicas: replicas.to_vec() }
    }

    /// Replicas of a pool that have joined.
    fn own(&self, pool: &PoolOffer) -> usize {
        let is_own = |machine: &&Machine| pool.own.contains(&machine.name);
        self.input.machines.iter().filter(is_own).count()
    }

    /// Machines of a pool that the load would keep busy, at the best batch of each model.
    fn machines_needed(&self, pool: usize) -> f64 {
        let Some(replica) = &self.replicas[pool] else { return f64::INFINITY };
        let share = |demand: &Demand| {
            let curve = self.curves.get(&(replica.device.clone(), demand.model.clone()))?;
            let best = curve.iter().map(|(batch, ms)| f64::from(*batch) * 1000.0 / ms);
            Some(demand.rate / best.fold(1e-9, f64::max))
        };
        self.demands.iter().filter_map(share).sum::<f64>().max(1e-9)
    }

    fn place(&self, counts: &[u32]) -> Placement {
        let mut machines = self.others.clone();
        for (pool, (count, replica)) in counts.iter().zip(&self.replicas).enumerate() {
            let Some(replica) = replica else { continue };
            // Names that no backend can have.
            machines.extend((0..*count).map(|number| Machine {
                name: format!("/replica/{pool}/{number:06}"),
                ..replica.clone()
            }));
        }
        let settings = PlacementSettings { spread: false, ..self.input.placement.clone() };
        let held = LoadedModels::new();
        placement::place(&machines, &self.demands, &self.curves, &held, &settings)
    }

    /// Whether everything is served with the headroom, with the required number of copies.
    fn suffices(&self, placement: &Placement) -> bool {
        let settings = &self.input.placement;
        // Duty cycles list standbys too: either every model has its copies, or there are too few
        // machines.
        let mut copies: BTreeMap<&str, usize> = BTreeMap::new();
        for part in placement.duty_cycles.values().flat_map(|cycle| &cycle.parts) {
            *copies.entry(&part.model).or_default() += 1;
        }
        let copied = self.demands.iter().all(|demand| {
            copies.get(demand.model.as_str()).copied().unwrap_or(0) >= settings.copies
        });
        copied && placement.scale >= 1.0 + settings.headroom - 1e-9
    }
}

/// Demands and curves for machines of these kinds. A model that was not measured on one of them
/// counts as fast as on the slowest kind that it was measured on; one that was not measured at all
/// counts only with its minimum rate.
fn known_demands(input: &ScalingInput, devices: &BTreeSet<&str>) -> (Vec<Demand>, Curves) {
    let mut curves = input.curves.clone();
    let mut slowest: HashMap<&str, &Curve> = HashMap::new();
    let best = |curve: &Curve| curve.iter().map(|(b, ms)| f64::from(*b) / ms).fold(0.0, f64::max);
    for ((_, model), curve) in &input.curves {
        let known = slowest.entry(model.as_str()).or_insert(curve);
        if best(curve) < best(known) {
            *known = curve;
        }
    }
    let demand = |demand: &Demand| {
        let Some(curve) = slowest.get(demand.model.as_str()) else {
            return Demand { rate: demand.rate.min(input.rate_min), ..demand.clone() };
        };
        for device in devices {
            let key = (device.to_string(), demand.model.clone());
            curves.entry(key).or_insert_with(|| (*curve).clone());
        }
        demand.clone()
    };
    let demands = input.demands.iter().map(demand).collect();
    (demands, curves)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(own: usize, others: usize, rates: &[f64]) -> ScalingInput {
        let machine = |name: String| Machine { name, device: "gpu".to_string(), memory_bytes: 0 };
        let mut machines: Vec<Machine> = (0..own).map(|n| machine(format!("own-{n}"))).collect();
        machines.extend((0..others).map(|n| machine(format!("other-{n}"))));
        let mut input = ScalingInput {
            machines,
            reported: true,
            rate_min: 1.0,
            placement: PlacementSettings { copies: 1, ..PlacementSettings::default() },
            ..ScalingInput::default()
        };
        for (index, &rate) in rates.iter().enumerate() {
            let name = format!("m{index}");
            let key = ("gpu".to_string(), name.clone());
            input.curves.insert(key, vec![(1, 5.0), (4, 8.0), (16, 20.0)]);
            let demand = Demand { model: name, rate, slo_ms: 100.0, ..Demand::default() };
            input.demands.push(demand);
        }
        input
    }

    fn own(input: &ScalingInput) -> BTreeSet<String> {
        let own = input.machines.iter().filter(|machine| machine.name.starts_with("own"));
        own.map(|machine| machine.name.clone()).collect()
    }

    fn estimate(input: &ScalingInput, max: u32) -> Option<u32> {
        let offer = PoolOffer { own: own(input), bounds: (0, max), price: 1.0, ..offer() };
        super::estimate(input, &[offer]).map(|counts| counts[0])
    }

    fn offer() -> PoolOffer {
        PoolOffer::default()
    }

    #[test]
    fn estimates_the_fewest_replicas_that_serve_the_load() {
        for rates in [&[100.0][..], &[500.0, 300.0], &[5000.0, 10.0, 900.0], &[1.0; 12]] {
            let input = input(2, 0, rates);
            let count = estimate(&input, 64).unwrap() as usize;
            // The scheduler's own placement and its checker agree that this many suffice, and that
            // one fewer does not.
            let serves = |count: usize| {
                let machine =
                    |n: usize| Machine { name: format!("x{n}"), ..input.machines[0].clone() };
                let machines: Vec<Machine> = (0..count).map(machine).collect();
                let settings = PlacementSettings { spread: false, ..input.placement.clone() };
                let placed = placement::place(
                    &machines,
                    &input.demands,
                    &input.curves,
                    &LoadedModels::new(),
                    &settings,
                );
                let errors = placement::check(&machines, &input.demands, &input.curves, &placed);
                errors.is_empty() && placed.slack(&input.demands) >= 1.2 - 1e-6
            };
            assert!(serves(count), "{rates:?} on {count}");
            assert!(count == 0 || !serves(count - 1), "{rates:?} on one fewer than {count}");
        }
    }

    #[test]
    fn more_load_never_needs_fewer_replicas() {
        let mut before = 0;
        for step in 1..40 {
            let now = estimate(&input(1, 0, &[f64::from(step) * 200.0, 50.0]), 64).unwrap();
            assert!(now >= before, "{step}: {now} after {before}");
            before = now;
        }
        assert!(before > 8);
    }

    #[test]
    fn counts_backends_outside_of_the_workload() {
        let alone = estimate(&input(1, 0, &[3000.0]), 64).unwrap();
        let helped = estimate(&input(1, 3, &[3000.0]), 64).unwrap();
        assert_eq!(alone - helped, 3);
        assert_eq!(estimate(&input(1, 64, &[3000.0]), 64), Some(0));
    }

    #[test]
    fn copies_need_as_many_replicas() {
        let mut input = input(1, 0, &[1.0]);
        input.placement.copies = 3;
        assert_eq!(estimate(&input, 64), Some(3));
    }

    #[test]
    fn overload_needs_all_replicas_and_missing_reports_none() {
        assert_eq!(estimate(&input(2, 0, &[1e6]), 16), Some(16));
        // Without load reports.
        let mut silent = input(2, 0, &[100.0]);
        silent.reported = false;
        assert_eq!(estimate(&silent, 16), None);
        assert_eq!(estimate(&input(0, 2, &[100.0]), 16), None);
    }

    #[test]
    fn unmeasured_models_need_no_extra_replicas() {
        let mut input = input(1, 0, &[5000.0]);
        input.curves.clear();
        assert_eq!(estimate(&input, 64), Some(1));
    }

    /// Two pools: `fast` runs everything in half the time of `slow`.
    fn two_kinds(rates: &[f64]) -> ScalingInput {
        let mut input = input(0, 0, rates);
        for index in 0..rates.len() {
            let key = |kind: &str| (kind.to_string(), format!("m{index}"));
            input.curves.remove(&key("gpu"));
            input.curves.insert(key("slow"), vec![(1, 5.0), (4, 8.0), (16, 20.0)]);
            input.curves.insert(key("fast"), vec![(1, 2.5), (4, 4.0), (16, 10.0)]);
        }
        input
    }

    fn kind(device: &str, max: u32, price: f64) -> PoolOffer {
        let like = Machine { name: String::new(), device: device.to_string(), memory_bytes: 0 };
        PoolOffer { like: Some(like), bounds: (0, max), price, ..offer() }
    }

    #[test]
    fn the_price_decides_between_kinds() {
        let input = two_kinds(&[2000.0, 500.0]);
        let both = |slow, fast| {
            super::estimate(&input, &[kind("slow", 20, slow), kind("fast", 20, fast)]).unwrap()
        };
        let cheap_slow = both(1.0, 5.0);
        assert!(cheap_slow[0] > 2 && cheap_slow[1] == 0, "{cheap_slow:?}");
        let cheap_fast = both(1.0, 1.1);
        assert!(cheap_fast[1] > 1 && cheap_fast[0] == 0, "{cheap_fast:?}");
        // Without prices the fewest.
        let fewest = both(1.0, 1.0);
        assert_eq!(fewest[0], 0, "{fewest:?}");
        // What is too small is complemented.
        let small = super::estimate(&input, &[kind("slow", 1, 1.0), kind("fast", 20, 5.0)]);
        assert!(small.as_ref().is_some_and(|c| c[0] <= 1 && c[1] >= 1), "{small:?}");
    }

    #[test]
    fn the_cheapest_of_two_pools_is_near_the_best_of_all() {
        let mut random = base::Random::new(11);
        for _ in 0..25 {
            let count = 1 + random.below(4);
            let rate = |random: &mut base::Random| 40.0 + random.unit_f64() * 900.0;
            let rates: Vec<f64> = (0..count).map(|_| rate(&mut random)).collect();
            let input = two_kinds(&rates);
            let price = 0.5 + random.unit_f64() * 3.0;
            let most = 1 + random.below(6) as u32;
            let offers = [kind("slow", most, 1.0), kind("fast", 7, price)];
            let found = super::estimate(&input, &offers).unwrap();
            let replicas: Vec<Option<Machine>> = offers.iter().map(|o| o.like.clone()).collect();
            let trial = Trial::new(&input, &replicas, Vec::new());
            let cost = |c: &[u32]| f64::from(c[0]) + price * f64::from(c[1]);
            let all = (0..=most).flat_map(|slow| (0..=7).map(move |fast| vec![slow, fast]));
            let feasible = all.filter(|counts| trial.suffices(&trial.place(counts)));
            let Some(best) = feasible.map(|counts| cost(&counts)).reduce(f64::min) else {
                assert_eq!(found, [most, 7], "everything, where that is too little");
                continue;
            };
            assert!(trial.suffices(&trial.place(&found)), "{found:?} for {rates:?}");
            assert!(cost(&found) <= best / WORTH_MOVING + 1e-6, "{found:?} instead of {best}");
        }
    }

    #[test]
    fn what_is_there_stays_unless_another_mixture_is_clearly_cheaper() {
        // One of the fast kind is enough, so that no mixture is cheaper.
        let input = two_kinds(&[900.0]);
        let needed = |slow: u32, fast: u32, price: f64| {
            let offers = [
                PoolOffer { current: slow, ..kind("slow", 20, 1.0) },
                PoolOffer { current: fast, ..kind("fast", 20, price) },
            ];
            super::estimate(&input, &offers).unwrap()
        };
        let slow = needed(0, 0, 100.0)[0];
        let fast = needed(0, 0, 0.01)[1];
        let even = f64::from(slow) / f64::from(fast);
        assert_eq!(needed(slow, 0, even * 0.95), [slow, 0]);
        assert_eq!(needed(0, fast, even * 1.05), [0, fast]);
        assert_eq!(needed(slow, 0, even * 0.5), [0, fast]);
        assert_eq!(needed(slow + 5, 0, even), [slow, 0], "what is not needed goes");
    }

    #[test]
    fn a_kind_that_was_never_measured_counts_as_the_slowest_that_was() {
        let mut input = two_kinds(&[2000.0]);
        let slow = super::estimate(&input, &[kind("slow", 20, 1.0)]).unwrap();
        assert_eq!(super::estimate(&input, &[kind("new", 20, 1.0)]), Some(slow));
        input.curves.clear();
        assert_eq!(super::estimate(&input, &[kind("new", 20, 1.0)]), Some(vec![1]));
    }

    #[test]
    fn waiting_requests_wake_a_pool_of_unknown_kind_and_a_cluster_without_models() {
        let mut input = input(0, 0, &[100.0]);
        let unknown = PoolOffer { bounds: (0, 4), price: 1.0, ..offer() };
        assert_eq!(super::estimate(&input, std::slice::from_ref(&unknown)), None);
        input.activity.waiting = 3;
        assert_eq!(super::estimate(&input, std::slice::from_ref(&unknown)), Some(vec![1]));
        input.demands.clear();
        let pools = [kind("slow", 4, 2.0), kind("fast", 4, 1.0)];
        assert_eq!(super::estimate(&input, &pools), Some(vec![0, 1]));
        input.activity.waiting = 0;
        assert_eq!(super::estimate(&input, &pools), Some(vec![0, 0]));
    }
}
