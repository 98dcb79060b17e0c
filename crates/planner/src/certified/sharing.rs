//! Duty cycles: several services in one slice, in turns.
//!
//! A slice with cycle `d` gives each of its services one turn a cycle. A turn runs one batch in each of the service's
//! processes; a request waits a cycle at most and is then computed, so `d + turn` must stay within the service's
//! limit, and all turns together within `d`.

use std::collections::BTreeMap;

use super::assembly::Unit;
use super::dual::{Rows, Usage};
use super::parts::{Piece, Tariff};
use crate::gpu::KINDS_MAX;
use crate::plan::Share;
use crate::problem::{Demand, Problem};

/// Relative slack of comparisons, well below the checker's.
const SLACK: f64 = 1e-9;
/// A duty cycle has at most this many services; memory ends it earlier.
const ITEMS_MAX: usize = 8;

/// One way to take a turn.
#[derive(Clone, Debug)]
pub(crate) struct Way {
    pub(crate) batch: u32,
    pub(crate) processes: u32,
    pub(crate) requests: f64,
    pub(crate) turn_ms: f64,
    pub(crate) memory_mib: u64,
}

/// How services may share slices.
pub(crate) struct Sharer<'a> {
    problem: &'a Problem,
    demands: &'a [Demand],
    /// Ways of each model on each kind, shortest turn first.
    ways: Vec<[Vec<Way>; KINDS_MAX]>,
    model_of: Vec<u32>,
    pieces: Vec<Vec<Piece>>,
    /// Smallest useful share of each class on each kind.
    least: Vec<[f64; KINDS_MAX]>,
    class_of: Vec<u32>,
}

/// A service's part in a slice: which, and how many requests a second.
pub(crate) type Item = (usize, f64);

/// One slice with its work.
#[derive(Clone, Debug)]
pub(crate) struct Bin {
    pub(crate) kind: usize,
    pub(crate) items: Vec<Item>,
    /// Share of the time in use, at least.
    pub(crate) busy: f64,
    /// Cycles the items can run at, with their time and memory in each.
    cycles: Vec<(f64, f64, u64)>,
}

impl Bin {
    /// A slice without work.
    pub(crate) fn empty(kind: usize) -> Bin {
        Bin { kind, items: Vec::new(), busy: 0.0, cycles: Vec::new() }
    }
}

/// How the items of a slice run.
#[derive(Clone, Debug)]
pub(crate) struct Fit {
    /// Nothing where one service has the slice for itself.
    pub(crate) cycle_ms: Option<f64>,
    /// Batch and processes of each item.
    pub(crate) ways: Vec<(u32, u32)>,
    /// Share of the time in use.
    pub(crate) busy: f64,
}

impl<'a> Sharer<'a> {
    pub(crate) fn new(problem: &'a Problem, demands: &'a [Demand]) -> Sharer<'a> {
        let mut models: BTreeMap<&str, u32> = BTreeMap::new();
        let mut classes: BTreeMap<(u32, u64), u32> = BTreeMap::new();
        let (mut ways, mut pieces) = (Vec::new(), Vec::new());
        let (mut model_of, mut class_of) = (Vec::new(), Vec::new());
        for (service, demand) in problem.services.iter().zip(demands) {
            let model = *models.entry(service.model.as_str()).or_insert_with(|| {
                ways.push(ways_of(problem, &service.model));
                ways.len() as u32 - 1
            });
            let class = *classes.entry((model, demand.limit_ms.to_bits())).or_insert_with(|| {
                pieces.push(pieces_of(problem, &ways[model as usize], demand));
                pieces.len() as u32 - 1
            });
            model_of.push(model);
            class_of.push(class);
        }
        let least = |pieces: &Vec<Piece>| -> [f64; KINDS_MAX] {
            std::array::from_fn(|kind| {
                let of_kind = pieces.iter().filter(|piece| piece.kind == kind);
                of_kind.map(|piece| piece.least).fold(f64::INFINITY, f64::min)
            })
        };
        let least = pieces.iter().map(least).collect();
        Sharer { problem, demands, ways, model_of, pieces, least, class_of }
    }

    /// Ways of a service on slices of `kind`, shortest turn first.
    pub(crate) fn ways(&self, service: usize, kind: usize) -> &[Way] {
        &self.ways[self.model_of[service] as usize][kind]
    }

    /// The uses of slices a service has.
    pub(crate) fn pieces(&self, service: usize) -> &[Piece] {
        &self.pieces[self.class_of[service] as usize]
    }

    /// What the service costs at least when slices can be shared.
    pub(crate) fn least(&self, service: usize, prices: &Rows) -> Usage {
        Tariff::new(prices).usage(self.pieces(service), self.demands[service].rate)
    }

    /// Shares of a slice of `kind` and requests a second they give, for a rate on its own; smallest share.
    pub(crate) fn share_of(&self, service: usize, kind: usize, rate: f64) -> Option<f64> {
        self.pieces[self.class_of[service] as usize]
            .iter()
            .filter(|piece| piece.kind == kind)
            .map(|piece| (rate / piece.throughput).max(piece.least))
            .filter(|share| *share <= 1.0 + SLACK)
            .min_by(f64::total_cmp)
    }

    /// Requests a second of a slice of its own.
    pub(crate) fn alone(&self, service: usize, kind: usize) -> f64 {
        self.demands[service].throughput[kind]
    }

    /// How the items run on a slice of `kind`, with as much time left over as can be.
    pub(crate) fn fit(&self, kind: usize, items: &[Item]) -> Option<Fit> {
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
            if share <= 1.0 + SLACK && best.is_none_or(|(least, _)| share < least) {
                best = Some((share, cycle));
            }
        }
        let (busy, cycle) = best?;
        let ways: Vec<&Way> = items
            .iter()
            .map(|(service, rate)| self.way(kind, *service, *rate, cycle))
            .collect::<Option<_>>()?;
        let ways = ways.iter().map(|way| (way.batch, way.processes)).collect();
        Some(Fit { cycle_ms: Some(cycle), ways, busy })
    }

    /// Slices as units of a plan.
    pub(crate) fn units(&self, bins: &[Bin]) -> Vec<Unit> {
        let unit = |bin: &Bin| {
            let fit = self.fit(bin.kind, &bin.items)?;
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

    fn fit_alone(&self, kind: usize, service: usize, rate: f64) -> Option<Fit> {
        let demand = &self.demands[service];
        let throughput = demand.throughput[kind];
        if throughput <= 0.0 || rate > throughput * (1.0 + SLACK) {
            return None;
        }
        let points = self.problem.profiles.points(&self.problem.services[service].model)?;
        let point = &points[demand.point[kind] as usize];
        let busy = self.share_of(service, kind, rate).unwrap_or(1.0).min(1.0);
        Some(Fit { cycle_ms: None, ways: vec![(point.batch, point.processes)], busy })
    }

    /// A slice with these items, if they fit.
    pub(crate) fn bin(&self, kind: usize, items: Vec<Item>) -> Option<Bin> {
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
        Some(Bin { kind, items, busy, cycles })
    }

    /// The smallest share of a slice of `kind` that is of any use to the service.
    pub(crate) fn least_share(&self, service: usize, kind: usize) -> f64 {
        self.least[self.class_of[service] as usize][kind]
    }

    /// The most of `service`, up to `want` requests a second, that fits beside a slice's items.
    pub(crate) fn most_beside(&self, bin: &Bin, service: usize, want: f64) -> f64 {
        let Bin { kind, items, cycles: known, .. } = bin;
        let kind = *kind;
        if items.len() >= ITEMS_MAX {
            return 0.0;
        }
        let limit = self.demands[service].limit_ms;
        let ways = &self.ways[self.model_of[service] as usize][kind];
        let mut best = 0.0f64;
        let whole = self.problem.gpu.slices[kind].memory_mib();
        let mut try_cycle = |cycle: f64, busy: f64, memory: u64| {
            let room = (cycle - busy).min(limit - cycle);
            for way in ways.iter().take_while(|way| way.turn_ms <= room) {
                if way.memory_mib + memory <= whole {
                    best = best.max((way.requests / cycle * 1000.0).min(want));
                }
            }
            best >= want
        };
        for &(cycle, busy, memory) in known {
            if try_cycle(cycle, busy, memory) {
                return want * (1.0 - SLACK);
            }
        }
        for way in ways.iter().take_while(|way| way.turn_ms * 2.0 <= limit) {
            for cycle in [limit - way.turn_ms, way.requests / want * 1000.0] {
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

    /// Lengths worth trying: between two of them only the cycle grows and no turn changes.
    fn cycles(&self, kind: usize, items: &[Item]) -> Vec<f64> {
        let mut cycles = Vec::with_capacity(items.len() * 24);
        for &(service, rate) in items {
            let limit = self.demands[service].limit_ms;
            for way in &self.ways[self.model_of[service] as usize][kind] {
                if way.turn_ms * 2.0 > limit {
                    break;
                }
                cycles.push(limit - way.turn_ms);
                let gather = way.requests / rate * 1000.0;
                if gather >= way.turn_ms && gather < limit {
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
            let way = self.way(kind, service, rate, cycle)?;
            busy += way.turn_ms;
            memory += way.memory_mib;
            if busy > cycle * (1.0 + SLACK) {
                return None;
            }
        }
        Some((busy, memory))
    }

    /// The shortest turn that serves the rate in such a cycle.
    fn way(&self, kind: usize, service: usize, rate: f64, cycle: f64) -> Option<&Way> {
        let room = (self.demands[service].limit_ms - cycle) * (1.0 + SLACK);
        let needed = rate * cycle / 1000.0 * (1.0 - SLACK);
        let ways = &self.ways[self.model_of[service] as usize][kind];
        ways.iter().take_while(|way| way.turn_ms <= room).find(|way| way.requests >= needed)
    }
}

fn ways_of(problem: &Problem, model: &str) -> [Vec<Way>; KINDS_MAX] {
    let points = problem.profiles.points(model).unwrap_or_default();
    std::array::from_fn(|kind| {
        let Some(slice) = problem.gpu.slices.get(kind) else { return Vec::new() };
        let mut ways: Vec<Way> = points
            .iter()
            .filter(|point| {
                point.gpcs == slice.gpcs && point.processes <= problem.rules.processes_max
            })
            .map(|point| Way {
                batch: point.batch,
                processes: point.processes,
                requests: point.requests(),
                turn_ms: point.turn_ms(),
                memory_mib: problem.profiles.memory_limit_mib(problem.gpu, model, point),
            })
            .filter(|way| way.memory_mib <= slice.memory_mib())
            .collect();
        let all = ways.clone();
        let better = |a: &Way, b: &Way| {
            a.requests >= b.requests && a.turn_ms <= b.turn_ms && a.memory_mib <= b.memory_mib
        };
        ways.retain(|way| !all.iter().any(|other| better(other, way) && !better(way, other)));
        ways.sort_by(|a, b| a.turn_ms.total_cmp(&b.turn_ms));
        ways
    })
}

fn pieces_of(problem: &Problem, ways: &[Vec<Way>; KINDS_MAX], demand: &Demand) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for (kind, slice) in problem.gpu.slices.iter().enumerate() {
        for way in ways[kind].iter().filter(|way| way.turn_ms * 2.0 <= demand.limit_ms) {
            let throughput = way.requests / way.turn_ms * 1000.0;
            let least = way.turn_ms / (demand.limit_ms - way.turn_ms);
            let memory = way.memory_mib as f64 / slice.memory_mib() as f64;
            pieces.push(Piece { kind, throughput, least, memory });
        }
        if demand.throughput[kind] > 0.0 {
            let throughput = demand.throughput[kind];
            pieces.push(Piece { kind, throughput, least: 1.0, memory: 1.0 });
        }
    }
    let all = pieces.clone();
    let better = |a: &Piece, b: &Piece| {
        a.kind == b.kind
            && a.throughput >= b.throughput
            && a.least <= b.least
            && a.memory <= b.memory
    };
    pieces.retain(|piece| !all.iter().any(|other| better(other, piece) && !better(piece, other)));
    pieces
}
