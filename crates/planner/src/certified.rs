//! The certified planner: column generation over service covers and MIG patterns, with a proof beside every plan.

mod assembly;
mod bins;
pub(crate) mod cover;
mod dual;
mod filling;
pub(crate) mod packing;
mod rounding;
mod search;
mod sharing;

use base::Random;

use self::assembly::{Unit, assemble, units_of};
use self::bins::{Bins, units};
use self::cover::{Prices, cheapest};
use self::dual::{Bound, Groups, Usage, maximise};
use self::filling::Task;
use self::packing::{Packed, Packer};
use self::search::{Gap, total};
use self::sharing::Sharer;
use crate::error::PlanError;
use crate::gpu::{Counts, KINDS_MAX};
use crate::plan::Plan;
use crate::problem::{Demand, Problem, Sharing};
use crate::watch::Watch;

/// Plans that are within this share of the bound are not searched further.
const CLOSE_ENOUGH: f64 = 0.0005;
/// Rounds of improvement of a plan with shared slices, divided by its number of services.
const ROUNDS: usize = 400_000;
/// Rounds of improvement from one start.
const ROUNDS_MAX: usize = 3000;
/// The same where filling given patterns follows, which finds more.
const ROUNDS_FEW: usize = 300;
/// With more services than this, only two starts are made.
const MANY: usize = 2000;
/// Starts of a plan with shared slices: whole slices, or greedily with room in a new slice at such a price.
const STARTS: [Option<f64>; 8] =
    [None, Some(0.0), Some(0.1), Some(0.4), Some(0.0), Some(0.05), Some(0.2), Some(0.8)];

/// A plan and what is proven about it.
#[derive(Clone, Debug)]
pub struct Solution {
    /// The plan.
    pub plan: Plan,
    /// No plan has fewer GPUs than this, as the relaxation has it.
    pub bound: f64,
    /// The bound as whole GPUs.
    pub lower_bound: usize,
    /// Prices of the slice kinds, in GPUs, that prove the bound.
    pub prices: [f64; KINDS_MAX],
    /// Whether the caller's wish to stop cut it short.
    pub stopped: bool,
    /// Seconds it took.
    pub seconds: f64,
}

impl Solution {
    /// GPUs above the bound.
    pub fn gap(&self) -> usize {
        self.plan.gpus.len().saturating_sub(self.lower_bound)
    }
}

/// Plans with as few GPUs as it can, and proves how few there must be.
pub fn plan(problem: &Problem, watch: &mut Watch<'_>) -> Result<Solution, PlanError> {
    let solver = Solver::new(problem)?;
    let whole = solver.whole_slices(watch);
    let outcome = match problem.rules.sharing {
        Sharing::None => whole,
        Sharing::Time => solver.shared_slices(&whole, watch),
    };
    let units = match outcome.units {
        Some(units) => units,
        None => solver.units(&outcome.covers),
    };
    Ok(Solution {
        plan: assemble(problem.gpu, &solver.packer, &outcome.packed, units),
        lower_bound: whole_gpus(outcome.bound),
        bound: outcome.bound,
        prices: outcome.prices,
        stopped: watch.is_stopped(),
        seconds: watch.seconds(),
    })
}

/// The bound alone, with an empty plan.
pub fn bound(problem: &Problem, watch: &mut Watch<'_>) -> Result<Solution, PlanError> {
    let solver = Solver::new(problem)?;
    let bound = match problem.rules.sharing {
        Sharing::None => solver.whole_bound(watch),
        Sharing::Time => solver.shared_bound(&Sharer::new(problem, &solver.demands), watch),
    };
    Ok(Solution {
        plan: Plan::default(),
        lower_bound: whole_gpus(bound.value),
        bound: bound.value,
        prices: bound.prices,
        stopped: watch.is_stopped(),
        seconds: watch.seconds(),
    })
}

struct Solver<'a> {
    problem: &'a Problem,
    demands: Vec<Demand>,
    kinds: usize,
    packer: Packer,
    groups: Groups,
}

struct Outcome {
    bound: f64,
    prices: Prices,
    covers: Vec<Counts>,
    packed: Packed,
    /// Slices with their work, where they are not whole covers.
    units: Option<Vec<Unit>>,
}

impl<'a> Solver<'a> {
    fn new(problem: &'a Problem) -> Result<Solver<'a>, PlanError> {
        problem.validate()?;
        let demands = problem.demands();
        let kinds = problem.gpu.slices.len();
        let packer = Packer::new(problem.gpu.maximal_patterns(), kinds);
        Ok(Solver { problem, packer, groups: Groups::new(&demands), demands, kinds })
    }

    fn whole_bound(&self, watch: &mut Watch<'_>) -> Bound {
        let price = |service: usize, prices: &Prices| whole_usage(&self.demands[service], prices);
        let start = start_prices(self.problem);
        maximise(&self.groups, &price, &self.packer, self.kinds, start, watch)
    }

    fn shared_bound(&self, sharer: &Sharer<'_>, watch: &mut Watch<'_>) -> Bound {
        let price = |service: usize, prices: &Prices| sharer.least(service, prices);
        let start = start_prices(self.problem);
        maximise(&self.groups, &price, &self.packer, self.kinds, start, watch)
    }

    /// Every slice has one service.
    fn whole_slices(&self, watch: &mut Watch<'_>) -> Outcome {
        let demands = &self.demands;
        let bound = self.whole_bound(watch);
        let lower_bound = whole_gpus(bound.value);
        let mut covers = rounding::round(demands, &self.groups, &bound);
        let mut packed = self.packer.pack(&total(&covers));
        let gap = Gap {
            demands,
            packer: &self.packer,
            prices: &bound.prices,
            rounds: if demands.len() <= 5000 { 40 } else { 10 },
        };
        loop {
            let gpus = packed.iter().sum::<u32>() as usize;
            let near = (lower_bound as f64 * CLOSE_ENOUGH) as usize;
            if gpus <= lower_bound + near || !watch.go_on("search", Some(gpus), bound.value) {
                break;
            }
            match gap.close(&mut covers, gpus - 1, watch) {
                Some(better) => packed = better,
                None => break,
            }
        }
        Outcome { bound: bound.value, prices: bound.prices, covers, packed, units: None }
    }

    /// Slices may have several services in turns; never more GPUs than with whole slices.
    fn shared_slices(&self, whole: &Outcome, watch: &mut Watch<'_>) -> Outcome {
        let sharer = Sharer::new(self.problem, &self.demands);
        let start = start_prices(self.problem);
        let bound = self.shared_bound(&sharer, watch);
        let lower_bound = whole_gpus(bound.value);
        let mut random = Random::new(1);
        let scores: Prices = std::array::from_fn(|k| 0.9 * bound.prices[k] + 0.1 * start[k]);
        let bins = Bins::new(&sharer, &self.demands, scores, self.kinds);
        let mut best: Option<(usize, Packed, Bins<'_>)> = None;
        let starts: &[Option<f64>] = match self.demands.len() <= MANY {
            true => &STARTS,
            false => &[None, Some(0.1)],
        };
        for &waste in starts {
            let mut bins = bins.clone();
            match waste {
                None => bins.fill_with_covers(&whole.covers),
                Some(waste) => bins.fill_greedily(waste, &mut random),
            }
            let few = whole.packed.iter().sum::<u32>() as usize <= filling::GPUS_MAX;
            let rounds = if few { ROUNDS_FEW } else { ROUNDS / self.demands.len().max(1) };
            let packed =
                bins.improve(&self.packer, rounds.min(ROUNDS_MAX), lower_bound, &mut random, watch);
            let gpus = packed.iter().sum::<u32>() as usize;
            if best.as_ref().is_none_or(|(least, ..)| gpus < *least) {
                best = Some((gpus, packed, bins));
            }
            // With few GPUs, filling given patterns finds more than further starts.
            if gpus <= lower_bound || gpus <= filling::GPUS_MAX || watch.is_stopped() {
                break;
            }
        }
        let (packed, units) = match best {
            Some((gpus, mut packed, bins)) => {
                let mut bins = bins.into_bins();
                for fewer in (lower_bound..gpus).rev() {
                    let task = Task { sharer: &sharer, demands: &self.demands, gpus: fewer };
                    let patterns = self.useful_patterns();
                    let found = task.fill(&self.packer, &patterns, &mut random, watch);
                    let Some(better) = found else { break };
                    (packed, bins) = better;
                }
                (packed, units(&sharer, &bins))
            }
            None => (whole.packed.clone(), self.units(&whole.covers)),
        };
        let covers = Vec::new();
        Outcome { bound: bound.value, prices: bound.prices, covers, packed, units: Some(units) }
    }

    /// Patterns without slices that differ from smaller ones only in memory nobody is faster with.
    fn useful_patterns(&self) -> Vec<usize> {
        let slices = self.problem.gpu.slices;
        let useless = |kind: usize| {
            let plain = (0..kind).find(|&other| slices[other].gpcs == slices[kind].gpcs);
            plain.is_some_and(|plain| {
                self.demands.iter().all(|d| d.throughput[kind] <= d.throughput[plain])
            })
        };
        let skip: Vec<usize> = (0..self.kinds).filter(|&kind| useless(kind)).collect();
        (0..self.packer.patterns.len())
            .filter(|&pattern| skip.iter().all(|&kind| self.packer.patterns[pattern][kind] == 0))
            .collect()
    }

    fn units(&self, covers: &[Counts]) -> Vec<Unit> {
        let mut units = Vec::new();
        for (service, cover) in covers.iter().enumerate() {
            let demand = &self.demands[service];
            units_of(self.problem, demand, service, cover, demand.rate, &mut units);
        }
        units
    }
}

/// The bound as whole GPUs, less what floating-point numbers may have added.
fn whole_gpus(bound: f64) -> usize {
    (bound - 1e-6).ceil().max(1.0) as usize
}

/// Each compute slice at the same price: feasible on every GPU.
fn start_prices(problem: &Problem) -> Prices {
    let mut prices = [0.0; KINDS_MAX];
    for (kind, slice) in problem.gpu.slices.iter().enumerate() {
        prices[kind] = f64::from(slice.gpcs) / f64::from(problem.gpu.gpcs);
    }
    prices
}

/// The bound that given prices prove, without a plan: one pricing of every service.
pub fn bound_at(problem: &Problem, prices: &[f64; KINDS_MAX]) -> f64 {
    bound_of(problem, &problem.demands(), prices)
}

/// The same for demands that are known already.
pub(crate) fn bound_of(problem: &Problem, demands: &[Demand], prices: &Prices) -> f64 {
    let groups = Groups::new(demands);
    let prices = dual::feasible(&problem.gpu.maximal_patterns(), *prices);
    match problem.rules.sharing {
        Sharing::None => {
            let price = |service: usize, prices: &Prices| whole_usage(&demands[service], prices);
            dual::value_at(&groups, &price, &prices)
        }
        Sharing::Time => {
            let sharer = Sharer::new(problem, demands);
            let price = |service: usize, prices: &Prices| sharer.least(service, prices);
            dual::value_at(&groups, &price, &prices)
        }
    }
}

fn whole_usage(demand: &Demand, prices: &Prices) -> Usage {
    let priced = cheapest(demand, prices);
    Usage { bound: priced.bound, slices: priced.cover.map(f64::from) }
}
