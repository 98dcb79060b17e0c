//! The certified planner: column generation over service covers and MIG patterns, with a proof beside every plan.

mod assembly;
pub(crate) mod cover;
mod dual;
mod filling;
pub(crate) mod packing;
mod parts;
mod pool;
mod rounding;
mod search;
mod sharing;

use self::assembly::{Unit, assemble, units_of};
use self::cover::{Prices, cheapest};
use self::dual::{Bound, Groups, ROWS, Rows, Usage, maximise, slice_prices};
use self::filling::Task;
use self::packing::{Packed, Packer};
use self::pool::Pool;
use self::search::{Gap, total};
use self::sharing::Sharer;
use crate::error::PlanError;
use crate::gpu::{Counts, KINDS_MAX};
use crate::plan::Plan;
use crate::problem::{Demand, Problem, Sharing};
use crate::watch::Watch;

/// Plans that are within this share of the bound are not searched further.
const CLOSE_ENOUGH: f64 = 0.0005;
/// With more services than this, prices of shared slices come from a sample of them, and one start is made.
const MANY: usize = 200;
/// One service in so many is in the sample, and so many at least.
const SAMPLED: usize = 50;
const SAMPLE_LEAST: usize = 80;
/// Starts of a plan with shared slices: what a part costs beyond its share, and how much prices follow the balance of
/// slice kinds. The first is for many services.
const STARTS: [(f64, f64); 7] =
    [(1.05, 0.35), (1.0, 0.1), (1.02, 0.6), (1.0, 0.6), (1.02, 0.1), (1.1, 0.0), (1.2, 0.3)];
/// Filling given patterns is not tried where the bound leaves less than this share of the time unused.
const HOPELESS: f64 = 0.95;

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
        Sharing::Time => solver.shared_slices(whole, watch),
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
        prices: slice_prices(&bound.prices),
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

impl Outcome {
    fn gpus(&self) -> usize {
        self.packed.iter().sum::<u32>() as usize
    }
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
        let price = |service: usize, prices: &Rows| whole_usage(&self.demands[service], prices);
        let rows: Vec<usize> = (0..self.kinds).collect();
        maximise(&self.groups, &price, &self.packer, &rows, start_prices(self.problem), watch)
    }

    /// Prices from a sample prove a bound as any do, so one pricing of all services ends it.
    fn shared_bound(&self, sharer: &Sharer<'_>, watch: &mut Watch<'_>) -> Bound {
        let price = |service: usize, prices: &Rows| sharer.least(service, prices);
        let rows: Vec<usize> = (0..ROWS).filter(|row| row % KINDS_MAX < self.kinds).collect();
        let start = start_prices(self.problem);
        if self.demands.len() <= MANY {
            return maximise(&self.groups, &price, &self.packer, &rows, start, watch);
        }
        let sample = Groups::sample(&self.demands, SAMPLE_LEAST.max(self.demands.len() / SAMPLED));
        let bound = maximise(&sample, &price, &self.packer, &rows, start, watch);
        let value = dual::value_at(&self.groups, &price, &bound.prices);
        Bound { value, ..bound }
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
            prices: &slice_prices(&bound.prices),
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
        Outcome {
            bound: bound.value,
            prices: slice_prices(&bound.prices),
            covers,
            packed,
            units: None,
        }
    }

    /// Slices may have several services in turns; never more GPUs than with whole slices.
    fn shared_slices(&self, whole: Outcome, watch: &mut Watch<'_>) -> Outcome {
        let sharer = Sharer::new(self.problem, &self.demands);
        let bound = self.shared_bound(&sharer, watch);
        let (value, prices) = (bound.value, slice_prices(&bound.prices));
        let lower_bound = whole_gpus(value);
        let mut best = Outcome { bound: value, prices, ..whole };
        let starts = if self.demands.len() <= MANY { &STARTS[..] } else { &STARTS[..1] };
        for &(strain, balance) in starts {
            if best.gpus() <= lower_bound || !watch.go_on("sharing", Some(best.gpus()), value) {
                break;
            }
            let pool =
                Pool::new(self.problem, &sharer, &self.demands, &self.packer, &bound, balance);
            let gpus = best.gpus();
            let Some(slices) = pool.slices(strain, || watch.go_on("sharing", Some(gpus), value))
            else {
                break;
            };
            let mut counts = [0; KINDS_MAX];
            slices.iter().for_each(|slice| counts[slice.kind] += 1);
            let packed = self.packer.pack(&counts);
            if (packed.iter().sum::<u32>() as usize) < best.gpus() {
                (best.packed, best.units) = (packed, Some(slices));
            }
        }
        self.fill_patterns(&sharer, &mut best, watch);
        best
    }

    /// With few GPUs, filling given patterns can save another.
    fn fill_patterns(&self, sharer: &Sharer<'_>, best: &mut Outcome, watch: &mut Watch<'_>) {
        let patterns = self.useful_patterns();
        for gpus in (whole_gpus(best.bound)..best.gpus()).rev() {
            let prices = best.prices;
            let task = Task { sharer, demands: &self.demands, gpus, prices: &prices };
            if best.bound > HOPELESS * gpus as f64 {
                break;
            }
            let found = task.fill(&self.packer, &patterns, watch);
            let Some((packed, bins)) = found else { break };
            (best.packed, best.units) = (packed, Some(sharer.units(&bins)));
        }
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
fn start_prices(problem: &Problem) -> Rows {
    let mut prices = [0.0; ROWS];
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
    let mut rows = [0.0; ROWS];
    rows[..KINDS_MAX].copy_from_slice(prices);
    let prices = dual::feasible(&problem.gpu.maximal_patterns(), rows);
    match problem.rules.sharing {
        Sharing::None => {
            let price = |service: usize, prices: &Rows| whole_usage(&demands[service], prices);
            dual::value_at(&groups, &price, &prices)
        }
        Sharing::Time => {
            let sharer = Sharer::new(problem, demands);
            let price = |service: usize, prices: &Rows| sharer.least(service, prices);
            dual::value_at(&groups, &price, &prices)
        }
    }
}

fn whole_usage(demand: &Demand, prices: &Rows) -> Usage {
    let priced = cheapest(demand, &slice_prices(prices));
    let mut rows = [0.0; ROWS];
    rows.iter_mut().zip(priced.cover).for_each(|(row, count)| *row = f64::from(count));
    Usage { bound: priced.bound, rows }
}
