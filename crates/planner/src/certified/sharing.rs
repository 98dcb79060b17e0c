//! Duty cycles: several services run one after the other on one slice.
//!
//! A slice with cycle `d` gives each of its services one turn per cycle. A turn runs one batch in
//! each of the service's processes. A request waits at most one cycle and is then computed, so `d +
//! turn` must be within the service's limit, and all turns together within `d`.

use std::collections::BTreeMap;

use super::assembly::SliceContents;
use super::dual::{BANDS_MAX, ROWS, Rows, Usage};
use super::part_pricing::{PartOption, PartPrices};
use crate::gpu::KINDS_MAX;
use crate::plan::ServiceShare;
use crate::problem::{Problem, ServiceDemand};

/// Relative slack of comparisons, well below the checker's.
const SLACK: f64 = 1e-9;
/// The bands of cycles: the shortest of them from this share of the tightest limit, and the longest
/// below this share of the loosest.
const CYCLE_LEAST: f64 = 0.4;
const CYCLE_MOST: f64 = 0.9;
/// A duty cycle has at most this many services; memory ends it earlier.
const ITEMS_MAX: usize = 8;

/// One operating point for a turn.
#[derive(Clone, Debug)]
pub(crate) struct TurnOption {
    pub(crate) batch: u32,
    pub(crate) processes: u32,
    pub(crate) requests: f64,
    pub(crate) turn_ms: f64,
    pub(crate) memory_mib: u64,
}

/// The options of services to share slices.
pub(crate) struct SharingModel<'a> {
    problem: &'a Problem,
    demands: &'a [ServiceDemand],
    /// Turn Turn options of each model on each kind, shortest turn first.
    options: Vec<[Vec<TurnOption>; KINDS_MAX]>,
    model_of: Vec<u32>,
    part_options: Vec<Vec<PartOption>>,
    /// Smallest useful share of each class on each kind.
    min_share: Vec<[f64; KINDS_MAX]>,
    class_of: Vec<u32>,
}

/// A service's part in a slice: service and requests per second.
pub(crate) type Item = (usize, f64);

/// One slice with its items.
#[derive(Clone, Debug)]
pub(crate) struct SliceBin {
    pub(crate) kind: usize,
    pub(crate) items: Vec<Item>,
    /// Minimum share of the time in use.
    pub(crate) busy: f64,
    /// Cycles the items can run at, with their time and memory in each.
    cycles: Vec<(f64, f64, u64)>,
}

impl SliceBin {
    /// A slice without items.
    pub(crate) fn empty(kind: usize) -> SliceBin {
        SliceBin { kind, items: Vec::new(), busy: 0.0, cycles: Vec::new() }
    }
}

/// Operating points of the items of a slice.
#[derive(Clone, Debug)]
pub(crate) struct SliceFit {
    /// `None` if one service has the slice to itself.
    pub(crate) cycle_ms: Option<f64>,
    /// Batch and processes of each item.
    pub(crate) options: Vec<(u32, u32)>,
    /// Share of the time in use.
    pub(crate) busy: f64,
}

impl<'a> SharingModel<'a> {
    /// The model with the same prices at every cycle.
    pub(crate) fn new(problem: &'a Problem, demands: &'a [ServiceDemand]) -> SharingModel<'a> {
        SharingModel::with_bands(problem, demands, &[0.0])
    }

    /// The model with prices that differ by band of cycles; `bands` says where each begins.
    pub(crate) fn with_bands(
        problem: &'a Problem,
        demands: &'a [ServiceDemand],
        bands: &[f64],
    ) -> SharingModel<'a> {
        let mut models: BTreeMap<&str, u32> = BTreeMap::new();
        let mut classes: BTreeMap<(u32, u64), u32> = BTreeMap::new();
        let (mut options, mut part_options) = (Vec::new(), Vec::new());
        let (mut model_of, mut class_of) = (Vec::new(), Vec::new());
        for (service, demand) in problem.services.iter().zip(demands) {
            let model = *models.entry(service.model.as_str()).or_insert_with(|| {
                options.push(turn_options_of(problem, &service.model));
                options.len() as u32 - 1
            });
            let class = *classes.entry((model, demand.limit_ms.to_bits())).or_insert_with(|| {
                let options = &options[model as usize];
                part_options.push(part_options_of(problem, options, demand, bands));
                part_options.len() as u32 - 1
            });
            model_of.push(model);
            class_of.push(class);
        }
        let min_share = |part_options: &Vec<PartOption>| -> [f64; KINDS_MAX] {
            std::array::from_fn(|kind| {
                let of_kind = part_options.iter().filter(|part_option| part_option.kind == kind);
                of_kind.map(|part_option| part_option.min_share).fold(f64::INFINITY, f64::min)
            })
        };
        let min_share = part_options.iter().map(min_share).collect();
        SharingModel { problem, demands, options, model_of, part_options, min_share, class_of }
    }

    /// Turn options of a service on slices of `kind`, shortest turn first.
    pub(crate) fn options(&self, service: usize, kind: usize) -> &[TurnOption] {
        &self.options[self.model_of[service] as usize][kind]
    }

    /// Part options of a service.
    pub(crate) fn part_options(&self, service: usize) -> &[PartOption] {
        &self.part_options[self.class_of[service] as usize]
    }

    /// Cost of parts of the service that a short search finds.
    pub(crate) fn known_cost(&self, service: usize, prices: &Rows) -> Usage {
        PartPrices::new(prices).usage(self.part_options(service), self.demands[service].rate)
    }

    /// A lower bound on the cost of the service, next to the least.
    pub(crate) fn least_cost(&self, service: usize, prices: &Rows, close: f64) -> Usage {
        let rate = self.demands[service].rate;
        let part_prices = PartPrices::new(prices);
        let bound = part_prices.least_cost(self.part_options(service), rate, close);
        Usage { bound, rows: [0.0; ROWS] }
    }

    /// Smallest share of a slice of `kind` that serves `rate`.
    pub(crate) fn share_of(&self, service: usize, kind: usize, rate: f64) -> Option<f64> {
        self.part_options[self.class_of[service] as usize]
            .iter()
            .filter(|part_option| part_option.kind == kind)
            .map(|part_option| (rate / part_option.throughput).max(part_option.min_share))
            .filter(|share| *share <= 1.0 + SLACK)
            .min_by(f64::total_cmp)
    }

    /// Requests per second of a slice that the service has to itself.
    pub(crate) fn alone(&self, service: usize, kind: usize) -> f64 {
        self.demands[service].throughput[kind]
    }

    /// Operating points of the items on a slice of `kind` that use the least time.
    pub(crate) fn fit(&self, kind: usize, items: &[Item]) -> Option<SliceFit> {
        if let [(service, rate)] = items
            && let Some(fit) = self.fit_alone(kind, *service, *rate)
        {
            return Some(fit);
        }
        if items.len() > ITEMS_MAX {
            return None;
        }
        let mut best: Option<(f64, f64)> = None;
        for cycle in self.cycles(kind, items) {
            let Some(busy) = self.busy_ms(kind, items, cycle) else { continue };
            let share = busy / cycle;
            if share <= 1.0 + SLACK && best.is_none_or(|(min_share, _)| share < min_share) {
                best = Some((share, cycle));
            }
        }
        let (busy, cycle) = best?;
        let options: Vec<&TurnOption> = items
            .iter()
            .map(|(service, rate)| self.option(kind, *service, *rate, cycle))
            .collect::<Option<_>>()?;
        let options = options.iter().map(|option| (option.batch, option.processes)).collect();
        Some(SliceFit { cycle_ms: Some(cycle), options, busy })
    }

    /// Filled slices as contents of a plan.
    pub(crate) fn units(&self, bins: &[SliceBin]) -> Vec<SliceContents> {
        let unit = |bin: &SliceBin| {
            let fit = self.fit(bin.kind, &bin.items)?;
            let share = |(&(service, rate), &(batch, processes)): (&Item, &(u32, u32))| {
                ServiceShare { service, batch, processes, rate }
            };
            let shares = bin.items.iter().zip(&fit.options).map(share).collect();
            Some(SliceContents { kind: bin.kind, cycle_ms: fit.cycle_ms, shares })
        };
        bins.iter().filter_map(unit).collect()
    }

    fn fit_alone(&self, kind: usize, service: usize, rate: f64) -> Option<SliceFit> {
        let demand = &self.demands[service];
        let throughput = demand.throughput[kind];
        if throughput <= 0.0 || rate > throughput * (1.0 + SLACK) {
            return None;
        }
        let points = self.problem.profiles.points(&self.problem.services[service].model)?;
        let point = &points[demand.point[kind] as usize];
        let busy = self.share_of(service, kind, rate).unwrap_or(1.0).min(1.0);
        Some(SliceFit { cycle_ms: None, options: vec![(point.batch, point.processes)], busy })
    }

    /// A slice with these items, if they fit.
    pub(crate) fn bin(&self, kind: usize, items: Vec<Item>) -> Option<SliceBin> {
        if items.len() > ITEMS_MAX {
            return None;
        }
        let whole = self.problem.gpu.slices[kind].memory_mib();
        let mut busy = f64::INFINITY;
        let mut cycles = Vec::new();
        for cycle in self.cycles(kind, &items) {
            let Some((time, memory)) = self.busy_and_memory(kind, &items, cycle) else { continue };
            if memory <= whole {
                busy = busy.min(time / cycle);
                if time < cycle * 0.99 {
                    cycles.push((cycle, time, memory));
                }
            }
        }
        if let [(service, rate)] = items[..]
            && let Some(fit) = self.fit_alone(kind, service, rate)
        {
            busy = fit.busy;
        }
        if busy.is_infinite() {
            return None;
        }
        Some(SliceBin { kind, items, busy, cycles })
    }

    /// The smallest useful share of a slice of `kind` for the service.
    pub(crate) fn min_share_of(&self, service: usize, kind: usize) -> f64 {
        self.min_share[self.class_of[service] as usize][kind]
    }

    /// Maximum rate of `service`, up to `want`, that fits beside a slice's items.
    pub(crate) fn max_beside(&self, bin: &SliceBin, service: usize, want: f64) -> f64 {
        let SliceBin { kind, items, cycles: known, .. } = bin;
        let kind = *kind;
        if items.len() >= ITEMS_MAX {
            return 0.0;
        }
        let limit = self.demands[service].limit_ms;
        let options = &self.options[self.model_of[service] as usize][kind];
        let mut best = 0.0f64;
        let whole = self.problem.gpu.slices[kind].memory_mib();
        let mut try_cycle = |cycle: f64, busy: f64, memory: u64| {
            let available = (cycle - busy).min(limit - cycle);
            for option in options.iter().take_while(|option| option.turn_ms <= available) {
                if option.memory_mib + memory <= whole {
                    best = best.max((option.requests / cycle * 1000.0).min(want));
                }
            }
            best >= want
        };
        for &(cycle, busy, memory) in known {
            if try_cycle(cycle, busy, memory) {
                return want * (1.0 - SLACK);
            }
        }
        for option in options.iter().take_while(|option| option.turn_ms * 2.0 <= limit) {
            for cycle in [limit - option.turn_ms, option.requests / want * 1000.0] {
                if cycle < limit
                    && let Some((busy, memory)) = self.busy_and_memory(kind, items, cycle)
                    && try_cycle(cycle, busy, memory)
                {
                    return want * (1.0 - SLACK);
                }
            }
        }
        best * (1.0 - SLACK)
    }

    /// Cycle lengths to try: between two of them only the cycle grows and no turn changes.
    fn cycles(&self, kind: usize, items: &[Item]) -> Vec<f64> {
        let mut cycles = Vec::with_capacity(items.len() * 24);
        for &(service, rate) in items {
            let limit = self.demands[service].limit_ms;
            for option in &self.options[self.model_of[service] as usize][kind] {
                if option.turn_ms * 2.0 > limit {
                    break;
                }
                cycles.push(limit - option.turn_ms);
                let gather = option.requests / rate * 1000.0;
                if gather >= option.turn_ms && gather < limit {
                    cycles.push(gather);
                }
            }
        }
        cycles
    }

    fn busy_ms(&self, kind: usize, items: &[Item], cycle: f64) -> Option<f64> {
        let (busy, memory) = self.busy_and_memory(kind, items, cycle)?;
        (memory <= self.problem.gpu.slices[kind].memory_mib()).then_some(busy)
    }

    fn busy_and_memory(&self, kind: usize, items: &[Item], cycle: f64) -> Option<(f64, u64)> {
        let (mut busy, mut memory) = (0.0, 0);
        for &(service, rate) in items {
            let option = self.option(kind, service, rate, cycle)?;
            busy += option.turn_ms;
            memory += option.memory_mib;
            if busy > cycle * (1.0 + SLACK) {
                return None;
            }
        }
        Some((busy, memory))
    }

    /// The shortest turn that serves the rate in such a cycle.
    fn option(&self, kind: usize, service: usize, rate: f64, cycle: f64) -> Option<&TurnOption> {
        let available = (self.demands[service].limit_ms - cycle) * (1.0 + SLACK);
        let needed = rate * cycle / 1000.0 * (1.0 - SLACK);
        let options = &self.options[self.model_of[service] as usize][kind];
        options
            .iter()
            .take_while(|option| option.turn_ms <= available)
            .find(|option| option.requests >= needed)
    }
}

fn turn_options_of(problem: &Problem, model: &str) -> [Vec<TurnOption>; KINDS_MAX] {
    let points = problem.profiles.points(model).unwrap_or_default();
    std::array::from_fn(|kind| {
        let Some(slice) = problem.gpu.slices.get(kind) else { return Vec::new() };
        let mut options: Vec<TurnOption> = points
            .iter()
            .filter(|point| {
                point.gpcs == slice.gpcs && point.processes <= problem.rules.processes_max
            })
            .map(|point| TurnOption {
                batch: point.batch,
                processes: point.processes,
                requests: point.requests(),
                turn_ms: point.turn_ms(),
                memory_mib: problem.profiles.memory_limit_mib(problem.gpu, model, point),
            })
            .filter(|option| option.memory_mib <= slice.memory_mib())
            .collect();
        let all = options.clone();
        let better = |a: &TurnOption, b: &TurnOption| {
            a.requests >= b.requests && a.turn_ms <= b.turn_ms && a.memory_mib <= b.memory_mib
        };
        options.retain(|option| {
            !all.iter().any(|other| better(other, option) && !better(option, other))
        });
        options.sort_by(|a, b| a.turn_ms.total_cmp(&b.turn_ms));
        options
    })
}

/// From where on the bands of cycles are: evenly over the logarithm of the services' limits.
pub(crate) fn bands_of(demands: &[ServiceDemand]) -> Vec<f64> {
    let limits = demands.iter().map(|demand| demand.limit_ms);
    let (least, most) = limits.fold((f64::INFINITY, 0.0f64), |(a, b), l| (a.min(l), b.max(l)));
    let (least, most) = (least * CYCLE_LEAST, most * CYCLE_MOST);
    let from = |band: usize| match band {
        0 => 0.0,
        _ => least * (most / least).powf(band as f64 / BANDS_MAX as f64),
    };
    (0..BANDS_MAX).map(from).collect()
}

fn part_options_of(
    problem: &Problem,
    options: &[Vec<TurnOption>; KINDS_MAX],
    demand: &ServiceDemand,
    bands: &[f64],
) -> Vec<PartOption> {
    let mut all = Vec::new();
    for (kind, slice) in problem.gpu.slices.iter().enumerate() {
        for (band, &from) in bands.iter().enumerate() {
            let until = bands.get(band + 1).copied().unwrap_or(f64::INFINITY);
            let mut of_band: Vec<PartOption> = Vec::new();
            for option in &options[kind] {
                let longest = (demand.limit_ms - option.turn_ms).min(until);
                let shortest = option.turn_ms.max(from);
                if longest < shortest {
                    continue;
                }
                let throughput = option.requests / option.turn_ms * 1000.0;
                let min_share = option.turn_ms / longest;
                let max_share = option.turn_ms / shortest;
                let memory = option.memory_mib as f64 / slice.memory_mib() as f64;
                let band = Some(band as u8);
                of_band.push(PartOption { kind, throughput, min_share, max_share, memory, band });
            }
            let better = |a: &PartOption, b: &PartOption| {
                a.throughput >= b.throughput
                    && a.max_rate() >= b.max_rate()
                    && a.min_share <= b.min_share
                    && a.memory <= b.memory
            };
            let useless = |one: &PartOption| {
                of_band.iter().any(|other| better(other, one) && !better(one, other))
            };
            all.extend(of_band.iter().filter(|one| !useless(one)));
        }
        if demand.throughput[kind] > 0.0 {
            let throughput = demand.throughput[kind];
            let (min_share, max_share, memory, band) = (1.0, 1.0, 1.0, None);
            all.push(PartOption { kind, throughput, min_share, max_share, memory, band });
        }
    }
    all
}
