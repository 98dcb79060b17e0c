//! The certified planner: column generation over covers and MIG patterns. Every plan comes with a
//! proven lower bound on the number of GPUs.

mod assembly;
pub(crate) mod cover;
mod dual;
mod filling;
pub(crate) mod packing;
mod part_pricing;
mod portfolio;
mod rounding;
mod search;
mod shared_slices;
mod sharing;
mod unplaced;

use serde::{Deserialize, Serialize};

use self::assembly::{SliceContents, assemble, units_of};
use self::cover::{Prices, cheapest};
use self::dual::{BANDS_MAX, Bound, Groups, ROWS, Rows, Usage, maximise, slice_prices};
use self::filling::FillTask;
use self::packing::{Packed, PatternPacker};
use self::part_pricing::band_rows;
use self::rounding::Rounded;
use self::search::{Gap, total};
use self::shared_slices::SharedSliceBuilder;
use self::sharing::{SharingModel, bands_of};
use crate::error::PlanError;
use crate::gpu::{KINDS_MAX, SliceCounts};
use crate::plan::Plan;
use crate::problem::{Problem, ServiceDemand, Sharing};
use crate::search_control::SearchControl;

/// Relative gap to the bound at which the search ends.
const CLOSE_ENOUGH: f64 = 0.0005;
/// With more services than this, prices of shared slices come from a sample of the services.
const MANY_SERVICES: usize = 200;
/// With more services than this, only the first entry of `STARTS` is tried.
const MANY_TO_START: usize = 2000;
/// The sample has one service in `SAMPLE_DIVISOR`, and at least `SAMPLE_MIN`.
const SAMPLE_DIVISOR: usize = 50;
const SAMPLE_MIN: usize = 80;
/// The sample for prices that differ by band of cycles: it has more prices to learn.
const SAMPLE_OF_BANDS: usize = 300;
/// A bound at given prices may miss the best one by this share, and with more than
/// `MANY_TO_PROVE` services by the second, because each is priced exactly.
const CLOSE_PROOF: (f64, f64) = (1e-4, 1e-3);
const MANY_TO_PROVE: usize = 4000;
/// Parameters of the attempts to build shared slices: the factor on the cost of a part's share, and
/// how far prices follow the balance of slice kinds. The first one is for many services.
const STARTS: [(f64, f64); 7] =
    [(1.05, 0.35), (1.0, 0.1), (1.02, 0.6), (1.0, 0.6), (1.02, 0.1), (1.1, 0.0), (1.2, 0.3)];
/// Attempts that learn from the one before: so many services in all are placed in them, at most so
/// often, and they end when so many in a row are no better.
const LEARNING_SERVICES: usize = 12_000;
const LEARNING_ROUNDS_MAX: usize = 12;
const LEARNING_FAILURES_MAX: usize = 3;
/// Patterns are filled only if the bound is at most this share of the GPUs.
const FILL_BOUND_MAX: f64 = 0.95;

/// A plan with its proven bound.
#[derive(Clone, Debug)]
pub struct Solution {
    /// The plan.
    pub plan: Plan,
    /// Lower bound on the number of GPUs, from the relaxation.
    pub bound: f64,
    /// The bound as whole GPUs.
    pub lower_bound: usize,
    /// Prices of the slice kinds, in GPUs. With those of memory they are the certificate, which
    /// proves the bound.
    pub prices: [f64; KINDS_MAX],
    /// Prices of all the memory of a slice, by band of cycles, where slices are shared. The rest of
    /// a slice's price is that of all its time.
    pub memory_prices: Vec<MemoryPrices>,
    /// Whether the caller stopped the search.
    pub stopped: bool,
    /// Why the search ended.
    pub end: SearchEnd,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Prices of all the memory of the slices whose cycles are in one band.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryPrices {
    /// The shortest of its cycles; the first one is 0, and a band ends where the next begins.
    pub from_ms: f64,
    /// By slice kind.
    pub prices: [f64; KINDS_MAX],
}

/// Why a search ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SearchEnd {
    /// The plan has as few GPUs as the bound allows.
    BoundReached,
    /// The search found nothing better; the plan is above its bound.
    NothingBetter,
    /// The caller stopped it.
    Stopped,
    /// Another algorithm made the plan, which was not improved.
    OtherAlgorithm,
}

impl Solution {
    /// A plan with its bound.
    fn new(plan: Plan, proof: &Proof, control: &SearchControl<'_>) -> Solution {
        let (bound, rows) = (proof.bound, &proof.rows);
        let lower_bound = whole_gpus(bound);
        let stopped = control.is_stopped();
        let end = match stopped {
            _ if plan.gpus.len() <= lower_bound => SearchEnd::BoundReached,
            true => SearchEnd::Stopped,
            false => SearchEnd::NothingBetter,
        };
        let band = |(band, &from_ms): (usize, &f64)| MemoryPrices {
            from_ms,
            prices: std::array::from_fn(|kind| rows[band_rows(band as u8, kind)[1]]),
        };
        Solution {
            plan,
            bound,
            lower_bound,
            prices: slice_prices(rows),
            memory_prices: proof.bands.iter().enumerate().map(band).collect(),
            stopped,
            end,
            seconds: control.seconds(),
        }
    }

    /// GPUs above the bound.
    pub fn gap(&self) -> usize {
        self.plan.gpus.len().saturating_sub(self.lower_bound)
    }
}

/// Plans `problem` on few GPUs and proves a lower bound.
pub fn plan(problem: &Problem, control: &mut SearchControl<'_>) -> Result<Solution, PlanError> {
    let solver = Solver::new(problem)?;
    let whole = solver.whole_slices(control);
    let outcome = match problem.rules.sharing {
        Sharing::None => whole,
        Sharing::Time => solver.shared_slices(whole, control),
    };
    let units = match outcome.units {
        Some(units) => units,
        None => solver.units(&outcome.covers),
    };
    let plan = assemble(problem.gpu, &solver.packer, &outcome.packed, units);
    let plan = portfolio::best_of(problem, plan, whole_gpus(outcome.proof.bound), control);
    Ok(Solution::new(plan, &outcome.proof, control))
}

/// Computes the bound only; the plan is empty.
pub fn bound(problem: &Problem, control: &mut SearchControl<'_>) -> Result<Solution, PlanError> {
    let solver = Solver::new(problem)?;
    let proof = match problem.rules.sharing {
        Sharing::None => Proof::of_whole(&solver.whole_bound(control)),
        Sharing::Time => {
            solver.shared_bound(&SharingModel::new(problem, &solver.demands), control).1
        }
    };
    Ok(Solution::new(Plan::default(), &proof, control))
}

struct Solver<'a> {
    problem: &'a Problem,
    demands: Vec<ServiceDemand>,
    kinds: usize,
    packer: PatternPacker,
    groups: Groups,
}

/// A lower bound and what proves it.
#[derive(Clone)]
struct Proof {
    bound: f64,
    rows: Rows,
    /// Where bands of cycles begin, if slices are shared.
    bands: Vec<f64>,
}

impl Proof {
    fn of_whole(bound: &Bound) -> Proof {
        Proof { bound: bound.value, rows: bound.prices, bands: Vec::new() }
    }
}

struct CertifiedOutcome {
    proof: Proof,
    covers: Vec<SliceCounts>,
    packed: Packed,
    /// Contents of the slices if services share slices; otherwise they follow from `covers`.
    units: Option<Vec<SliceContents>>,
}

impl CertifiedOutcome {
    fn gpus(&self) -> usize {
        self.packed.iter().sum::<u32>() as usize
    }
}

impl<'a> Solver<'a> {
    fn new(problem: &'a Problem) -> Result<Solver<'a>, PlanError> {
        problem.validate()?;
        let demands = problem.demands();
        let kinds = problem.gpu.slices.len();
        let packer = PatternPacker::new(problem.gpu.maximal_patterns(), kinds);
        Ok(Solver { problem, packer, groups: Groups::new(&demands), demands, kinds })
    }

    fn whole_bound(&self, control: &mut SearchControl<'_>) -> Bound {
        let price = |service: usize, prices: &Rows| whole_usage(&self.demands[service], prices);
        let rows: Vec<usize> = (0..self.kinds).collect();
        maximise(&self.groups, &price, &self.packer, &rows, start_prices(self.problem), control)
    }

    /// Any feasible prices prove a bound, so prices are learned from a sample, with a short search
    /// for each service, and then all services are priced exactly. Prices are the same at every
    /// cycle first; from these on they differ by band of cycles. The plan is made with the former.
    fn shared_bound(
        &self,
        sharing: &SharingModel<'_>,
        control: &mut SearchControl<'_>,
    ) -> (Bound, Proof) {
        let bound = self.learned(sharing, SAMPLE_MIN, 1, start_prices(self.problem), control);
        let mut start = bound.prices;
        for (band, kind) in (1..BANDS_MAX as u8).flat_map(|b| (0..self.kinds).map(move |k| (b, k)))
        {
            let rows = band_rows(band, kind).into_iter().zip(band_rows(0, kind));
            rows.for_each(|(row, first)| start[row] = bound.prices[first]);
        }
        let bands = bands_of(&self.demands);
        let banded = SharingModel::with_bands(self.problem, &self.demands, &bands);
        let by_band = self.learned(&banded, SAMPLE_OF_BANDS, BANDS_MAX, start, control);
        let value = least_sum(&banded, &self.groups, &by_band.prices);
        let bound = Bound { value, ..bound };
        (bound, Proof { bound: value, rows: by_band.prices, bands })
    }

    /// Prices under which a sample of at least so many services costs most.
    fn learned(
        &self,
        sharing: &SharingModel<'_>,
        least: usize,
        bands: usize,
        start: Rows,
        control: &mut SearchControl<'_>,
    ) -> Bound {
        let price = |service: usize, prices: &Rows| sharing.known_cost(service, prices);
        let used = KINDS_MAX * (1 + 2 * bands);
        let rows: Vec<usize> = (0..used).filter(|row| row % KINDS_MAX < self.kinds).collect();
        if self.demands.len() <= MANY_SERVICES {
            return maximise(&self.groups, &price, &self.packer, &rows, start, control);
        }
        let size = least.max(self.demands.len() / SAMPLE_DIVISOR);
        let sample = Groups::sample(&self.demands, size);
        maximise(&sample, &price, &self.packer, &rows, start, control)
    }

    /// Solves the problem with one service per slice.
    fn whole_slices(&self, control: &mut SearchControl<'_>) -> CertifiedOutcome {
        let demands = &self.demands;
        let bound = self.whole_bound(control);
        let lower_bound = whole_gpus(bound.value);
        let Rounded { mut covers, mixtures } = rounding::round(demands, &self.groups, &bound);
        let mut packed = self.packer.pack(&total(&covers));
        let gap = Gap {
            demands,
            mixtures: &mixtures,
            packer: &self.packer,
            prices: &slice_prices(&bound.prices),
            rounds: if demands.len() <= 5000 { 40 } else { 10 },
        };
        loop {
            let gpus = packed.iter().sum::<u32>() as usize;
            let near = (lower_bound as f64 * CLOSE_ENOUGH) as usize;
            if gpus <= lower_bound + near
                || !control.should_continue("search", Some(gpus), bound.value)
            {
                break;
            }
            match gap.close(&mut covers, gpus - 1, control) {
                Some(better) => packed = better,
                None => break,
            }
        }
        CertifiedOutcome { proof: Proof::of_whole(&bound), covers, packed, units: None }
    }

    /// Solves the problem with duty cycles; never takes more GPUs than `whole`.
    fn shared_slices(
        &self,
        whole: CertifiedOutcome,
        control: &mut SearchControl<'_>,
    ) -> CertifiedOutcome {
        let sharing = SharingModel::new(self.problem, &self.demands);
        let (bound, proof) = self.shared_bound(&sharing, control);
        let value = proof.bound;
        let lower_bound = whole_gpus(value);
        let mut best = CertifiedOutcome { proof, ..whole };
        let starts = if self.demands.len() <= MANY_TO_START { &STARTS[..] } else { &STARTS[..1] };
        for &(strain, balance) in starts {
            if best.gpus() <= lower_bound
                || !control.should_continue("sharing", Some(best.gpus()), value)
            {
                break;
            }
            let mut builder = SharedSliceBuilder::new(
                self.problem,
                &sharing,
                &self.demands,
                &self.packer,
                &bound,
                balance,
            );
            if !self.attempts(&mut builder, strain, &mut best, control) {
                break;
            }
        }
        self.fill_patterns(&sharing, &mut best, control);
        best
    }

    /// Builds shared slices several times, each time with what the last attempt taught, and keeps
    /// the best plan; `false` if the caller stops.
    fn attempts(
        &self,
        builder: &mut SharedSliceBuilder<'_>,
        strain: f64,
        best: &mut CertifiedOutcome,
        control: &mut SearchControl<'_>,
    ) -> bool {
        let rounds = (LEARNING_SERVICES / self.demands.len()).min(LEARNING_ROUNDS_MAX);
        let (mut least, mut failures) = (f64::INFINITY, 0);
        for round in 0..=rounds {
            let (gpus, bound) = (best.gpus(), best.proof.bound);
            let should_continue = || control.should_continue("sharing", Some(gpus), bound);
            let Some(slices) = builder.slices(strain, should_continue) else { return false };
            let mut counts = [0; KINDS_MAX];
            slices.iter().for_each(|slice| counts[slice.kind] += 1);
            let packed = self.packer.pack(&counts);
            let (relaxed, _) = self.packer.relax(&counts);
            failures = if relaxed < least { 0 } else { failures + 1 };
            least = least.min(relaxed);
            if round < rounds {
                builder.learn(&slices);
            }
            if (packed.iter().sum::<u32>() as usize) < gpus {
                (best.packed, best.units) = (packed, Some(slices));
            }
            if best.gpus() <= whole_gpus(bound) || failures >= LEARNING_FAILURES_MAX {
                break;
            }
        }
        true
    }

    /// With few GPUs, filling given patterns can save one more.
    fn fill_patterns(
        &self,
        sharing: &SharingModel<'_>,
        best: &mut CertifiedOutcome,
        control: &mut SearchControl<'_>,
    ) {
        let patterns = self.useful_patterns();
        for gpus in (whole_gpus(best.proof.bound)..best.gpus()).rev() {
            let prices = slice_prices(&best.proof.rows);
            let task = FillTask { sharing, demands: &self.demands, gpus, prices: &prices };
            if best.proof.bound > FILL_BOUND_MAX * gpus as f64 {
                break;
            }
            let found = task.fill(&self.packer, &patterns, control);
            let Some((packed, bins)) = found else { break };
            (best.packed, best.units) = (packed, Some(sharing.units(&bins)));
        }
    }

    /// Patterns without slice kinds that have only more memory than a smaller kind and no service
    /// is faster on.
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

    fn units(&self, covers: &[SliceCounts]) -> Vec<SliceContents> {
        let mut units = Vec::new();
        for (service, cover) in covers.iter().enumerate() {
            let demand = &self.demands[service];
            units_of(self.problem, demand, service, cover, demand.rate, &mut units);
        }
        units
    }
}

/// The bound as whole GPUs, minus the floating-point error and the tolerance of verification.
fn whole_gpus(bound: f64) -> usize {
    (bound * (1.0 - 5e-7) - 1e-6).ceil().max(1.0) as usize
}

/// The same price for each compute slice: feasible on every GPU kind.
fn start_prices(problem: &Problem) -> Rows {
    let mut prices = [0.0; ROWS];
    for (kind, slice) in problem.gpu.slices.iter().enumerate() {
        prices[kind] = f64::from(slice.gpcs) / f64::from(problem.gpu.gpcs);
    }
    dual::feasible(&problem.gpu.maximal_patterns(), prices)
}

/// The bound that `prices` prove, without a plan: verifies a certificate with one pricing of every
/// service.
pub fn bound_at(problem: &Problem, prices: &[f64; KINDS_MAX]) -> f64 {
    bound_of(problem, &problem.demands(), prices)
}

/// Like [`bound_at`], for demands that are already computed.
pub(crate) fn bound_of(problem: &Problem, demands: &[ServiceDemand], prices: &Prices) -> f64 {
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
            let sharing = SharingModel::new(problem, demands);
            least_sum(&sharing, &groups, &prices)
        }
    }
}

/// What all services cost at least under these prices.
fn least_sum(sharing: &SharingModel<'_>, groups: &Groups, prices: &Rows) -> f64 {
    let services: usize = groups.0.iter().map(Vec::len).sum();
    let close = if services > MANY_TO_PROVE { CLOSE_PROOF.1 } else { CLOSE_PROOF.0 };
    let price = |service: usize, prices: &Rows| sharing.least_cost(service, prices, close);
    dual::value_at(groups, &price, prices)
}

fn whole_usage(demand: &ServiceDemand, prices: &Rows) -> Usage {
    let priced = cheapest(demand, &slice_prices(prices));
    let mut rows = [0.0; ROWS];
    rows.iter_mut().zip(priced.cover).for_each(|(row, count)| *row = f64::from(count));
    Usage { bound: priced.bound, rows }
}
