//! The certified planner: column generation over service covers and MIG patterns, with a proof beside every plan.

mod assembly;
mod cover;
mod dual;
mod packing;
mod rounding;
mod search;

use self::assembly::{Unit, assemble, units_of};
use self::cover::{Prices, cheapest};
use self::dual::{Groups, Usage, maximise};
use self::packing::Packer;
use self::search::{Gap, total};
use crate::error::PlanError;
use crate::gpu::KINDS_MAX;
use crate::plan::Plan;
use crate::problem::{Demand, Problem};
use crate::watch::Watch;

/// Plans that are within this share of the bound are not searched further.
const CLOSE_ENOUGH: f64 = 0.0005;

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
    problem.validate()?;
    let demands = problem.demands();
    let kinds = problem.gpu.slices.len();
    let packer = Packer::new(problem.gpu.maximal_patterns(), kinds);
    let groups = Groups::new(&demands);
    let price = |service: usize, prices: &Prices| whole_slices(&demands[service], prices);
    let bound = maximise(&groups, &price, &packer, kinds, start_prices(problem), watch);
    let lower_bound = whole(bound.value);

    let mut covers = rounding::round(&demands, &groups, &bound);
    let mut packed = packer.pack(&total(&covers));
    let gap = Gap {
        demands: &demands,
        packer: &packer,
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
    let mut units: Vec<Unit> = Vec::new();
    for (service, cover) in covers.iter().enumerate() {
        let rate = demands[service].rate;
        units_of(problem, &demands[service], service, cover, rate, &mut units);
    }
    Ok(Solution {
        plan: assemble(problem.gpu, &packer, &packed, units),
        bound: bound.value,
        lower_bound,
        prices: bound.prices,
        stopped: watch.is_stopped(),
        seconds: watch.seconds(),
    })
}

/// The bound as whole GPUs, less what floating-point numbers may have added.
fn whole(bound: f64) -> usize {
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

fn whole_slices(demand: &Demand, prices: &Prices) -> Usage {
    let priced = cheapest(demand, prices);
    Usage { bound: priced.bound, slices: priced.cover.map(f64::from) }
}
