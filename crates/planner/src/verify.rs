//! Verifies a plan file from the file alone, in exact arithmetic: legality, capacity, latency, and
//! the certificate of the lower bound.
//!
//! It shares no code with the solvers. Numbers of the file are taken as the binary fractions they
//! are, and every comparison is one of whole numbers. What a rule allows is stretched by
//! [`TOLERANCE`], because a solver's sums are rounded; the certificate is verified for the rules
//! stretched by the same share, so no plan that this module accepts has fewer GPUs than the
//! verified bound.

pub mod mix;
mod part_costs;
mod ratio;
mod whole_costs;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use self::ratio::Ratio;
use crate::certified::{MemoryPrices, SearchEnd, Solution};
use crate::error::PlanError;
use crate::gpu::{GpuKind, KINDS_MAX};
use crate::plan::{GpuFile, Plan, PlannedSlice};
use crate::problem::{PlanRules, Problem, Service, Sharing};
use crate::profile::{OperatingPoint, Profiles};

/// By how much a rate, a capacity or a time may miss a rule, as one part in this many.
pub const TOLERANCE: u64 = 10_000_000;
/// By how much a claimed bound may be above the proven one, as one part in this many.
const BOUND_SLACK: u64 = 1_000_000;
/// Most services, GPUs, slices of a GPU and services of a slice in a file.
const SERVICES_MAX: usize = 1_000_000;
const GPUS_MAX: usize = 1_000_000;
const SHARES_MAX: usize = 64;
/// Most lengths of a cycle from which on memory has another price.
const BANDS_MAX: usize = 64;
/// Violations that are listed.
const LISTED_MAX: usize = 20;

/// What a plan file carries beside the plan, so that its claims can be verified.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Certificate {
    /// The rules of the plan.
    pub rules: RulesFile,
    /// The services, with the rates and SLOs that were planned.
    pub services: Vec<Service>,
    /// The operating points of their models.
    pub profiles: Profiles,
    /// Prices of the slices, in GPUs, that prove the bound.
    pub prices: Vec<PriceFile>,
    /// Why the search ended.
    pub search_end: SearchEnd,
    /// The GPU kind in TOML, if it is one of the user's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_table: Option<String>,
}

/// The rules of a plan in a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RulesFile {
    /// Share of the SLO for waiting and computing together.
    pub slo_share: f64,
    /// Capacity beyond the rates.
    pub headroom: f64,
    /// The same of services that have one of their own, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub own_headroom: BTreeMap<String, f64>,
    /// Whether services share a slice.
    pub sharing: Sharing,
    /// Maximum number of processes in a slice.
    pub processes_max: u32,
}

/// The price of a slice in a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PriceFile {
    /// NVIDIA's name of the profile.
    pub profile: String,
    /// Price of all its time; of the whole slice if services do not share slices.
    pub time: f64,
    /// Price of all its memory.
    pub memory: f64,
    /// Other prices of its memory, for slices with longer cycles. The price of the slice is the
    /// same at every cycle, so its time costs what its memory does not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory_from: Vec<MemoryPriceFile>,
}

/// The price of a slice's memory from a length of its cycle on, in a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemoryPriceFile {
    /// The shortest cycle with this price, in milliseconds.
    pub cycle_ms: f64,
    /// Price of all its memory.
    pub memory: f64,
}

/// The claims of a file.
#[derive(Clone, Copy, Debug)]
pub struct Claims<'a> {
    /// Name of the GPU kind.
    pub gpu_kind: &'a str,
    /// Number of GPUs.
    pub gpus: usize,
    /// Lower bound on the number of GPUs.
    pub lower_bound: usize,
    /// The same before it is rounded up; 0 in files that do not say.
    pub bound: f64,
    /// The plan.
    pub plan: &'a [GpuFile],
}

/// What was verified.
#[derive(Clone, Debug, PartialEq)]
pub struct Verified {
    /// GPUs of the plan.
    pub gpus: usize,
    /// The bound that the prices prove.
    pub bound: f64,
    /// The bound as whole GPUs.
    pub lower_bound: usize,
}

impl Certificate {
    /// The certificate of a solution.
    pub fn new(problem: &Problem, solution: &Solution) -> Certificate {
        Certificate {
            rules: RulesFile::from(&problem.rules),
            services: problem.services.clone(),
            profiles: profiles_of(&problem.profiles, &problem.services),
            prices: prices_of(problem.gpu, &solution.prices, &solution.memory_prices),
            search_end: solution.end,
            gpu_table: problem.gpu.own_table(),
        }
    }

    fn problem(&self, gpu_kind: &str) -> Result<Problem, PlanError> {
        if self.services.len() > SERVICES_MAX {
            return Err(PlanError::BadPlan { what: "too many services".to_string() });
        }
        let problem = Problem {
            gpu: gpu_of(gpu_kind, self.gpu_table.as_deref())?,
            services: self.services.clone(),
            profiles: self.profiles.clone(),
            rules: self.rules.rules()?,
        };
        problem.validate()?;
        Ok(problem)
    }
}

impl From<&PlanRules> for RulesFile {
    fn from(rules: &PlanRules) -> RulesFile {
        let PlanRules { slo_share, headroom, own_headroom, sharing, processes_max } = rules.clone();
        RulesFile { slo_share, headroom, own_headroom, sharing, processes_max }
    }
}

impl RulesFile {
    fn rules(&self) -> Result<PlanRules, PlanError> {
        let RulesFile { slo_share, headroom, own_headroom, sharing, processes_max } = self.clone();
        let bad = |what: &str| PlanError::BadPlan { what: what.to_string() };
        if !(slo_share > 0.0 && slo_share <= 1.0) {
            return Err(bad("slo_share is above 0 and at most 1"));
        }
        if !(0.0..=10.0).contains(&headroom) {
            return Err(bad("headroom is from 0 to 10"));
        }
        Ok(PlanRules { slo_share, headroom, own_headroom, sharing, processes_max })
    }
}

/// The kind of that name: a known one, or that of the file's own table.
fn gpu_of(name: &str, table: Option<&str>) -> Result<&'static GpuKind, PlanError> {
    let own = table.map(crate::gpu::file::from_toml).transpose()?.unwrap_or_default();
    let found = own.into_iter().find(|kind| kind.name.eq_ignore_ascii_case(name));
    found.map_or_else(|| GpuKind::find(name), Ok)
}

/// The profiles of the services' models alone.
fn profiles_of(profiles: &Profiles, services: &[Service]) -> Profiles {
    let mut some = Profiles::default();
    let models: BTreeSet<&str> = services.iter().map(|service| service.model.as_str()).collect();
    for model in models {
        for point in profiles.points(model).unwrap_or_default() {
            // A point of a problem was accepted when it was read.
            let _ = some.push(model, point.clone());
        }
    }
    some
}

fn prices_of(
    gpu: &GpuKind,
    prices: &[f64; KINDS_MAX],
    memory_prices: &[MemoryPrices],
) -> Vec<PriceFile> {
    let price = |(kind, slice): (usize, &crate::gpu::SliceKind)| {
        let memory = memory_prices.first().map_or(0.0, |band| band.prices[kind]);
        let from = |band: &MemoryPrices| MemoryPriceFile {
            cycle_ms: band.from_ms,
            memory: band.prices[kind],
        };
        PriceFile {
            profile: slice.name.to_string(),
            time: prices[kind] - memory,
            memory,
            memory_from: memory_prices.iter().skip(1).map(from).collect(),
        }
    };
    gpu.slices.iter().enumerate().map(price).collect()
}

/// Verifies the claims of a plan file; the errors name what does not hold.
pub fn verify(claims: &Claims<'_>, certificate: &Certificate) -> Result<Verified, Vec<String>> {
    let one = |error: PlanError| vec![error.to_string()];
    let problem = certificate.problem(claims.gpu_kind).map_err(one)?;
    if claims.plan.len() > GPUS_MAX {
        return Err(vec!["too many gpus".to_string()]);
    }
    let mut wrong = foreign_shares(&problem.services, claims.plan);
    let plan = Plan::from_file(&problem, claims.plan).map_err(one)?;
    wrong.extend(PlanVerifier::new(&problem).violations(&plan));
    let gpus = plan.gpus.iter().filter(|gpu| !gpu.slices.is_empty()).count();
    if gpus != claims.gpus {
        wrong.push(format!("the plan has {gpus} gpus, the file says {}", claims.gpus));
    }
    match bound(&problem, &certificate.prices) {
        Ok(bound) => {
            let lower_bound = bound.ceil_usize().max(1);
            if lower_bound < claims.lower_bound {
                wrong.push(format!(
                    "the prices prove {lower_bound} gpus, the file says {}",
                    claims.lower_bound
                ));
            }
            if !is_proven(claims.bound, &bound) {
                let (proven, claimed) = (bound.to_f64(), claims.bound);
                wrong.push(format!("the prices prove {proven} gpus, the file says {claimed}"));
            }
            if lower_bound > gpus {
                wrong.push(format!("{gpus} gpus are below the bound of {lower_bound}"));
            }
            if wrong.is_empty() {
                return Ok(Verified { gpus, bound: bound.to_f64(), lower_bound });
            }
        }
        Err(what) => wrong.push(what),
    }
    Err(few(wrong))
}

/// Whether a claimed bound is at most the proven one, which is for rules that are stretched.
fn is_proven(claimed: f64, proven: &Ratio) -> bool {
    let slack = Ratio::fraction(BOUND_SLACK + 1, BOUND_SLACK);
    claimed <= 0.0 || (claimed.is_finite() && Ratio::from_f64(claimed) <= proven.times(&slack))
}

/// Shares of services that are not there, or with another model.
fn foreign_shares(services: &[Service], plan: &[GpuFile]) -> Vec<String> {
    let known: BTreeMap<&str, &Service> =
        services.iter().map(|service| (service.name.as_str(), service)).collect();
    let shares = plan.iter().flat_map(|gpu| &gpu.slices).flat_map(|slice| &slice.services);
    let mut wrong = Vec::new();
    for share in shares {
        match known.get(share.name.as_str()) {
            None => wrong.push(format!("there is no service '{}'", share.name)),
            Some(service) if !share.model.is_empty() && share.model != service.model => {
                wrong.push(format!("'{}' runs {}, not {}", share.name, share.model, service.model));
            }
            Some(_) => {}
        }
    }
    wrong
}

/// The first messages, and how many more there are.
fn few(mut wrong: Vec<String>) -> Vec<String> {
    let more = wrong.len().saturating_sub(LISTED_MAX);
    wrong.truncate(LISTED_MAX);
    if more > 0 {
        wrong.push(format!("and {more} more"));
    }
    wrong
}

/// `1 + TOLERANCE`, as a factor.
fn stretched(value: &Ratio) -> Ratio {
    value.times(&Ratio::fraction(TOLERANCE + 1, TOLERANCE))
}

/// A turn: the time after which every process has finished a batch.
fn turn_ms(point: &OperatingPoint) -> Ratio {
    let requests = u64::from(point.batch) * u64::from(point.processes);
    let implied = Ratio::whole(requests * 1000).over(&Ratio::from_f64(point.throughput));
    implied.max(Ratio::from_f64(point.latency_ms))
}

/// Whether a point may run alone in a slice of `kind`, with the tolerance.
fn may_run_alone(problem: &Problem, service: &Service, kind: usize, p: &OperatingPoint) -> bool {
    let slice = &problem.gpu.slices[kind];
    p.gpcs == slice.gpcs
        && p.processes <= problem.rules.processes_max
        && p.memory_mib.is_none_or(|memory| memory <= slice.memory_mib())
        && turn_ms(p).times(&Ratio::whole(2)) < stretched(&limit_ms(problem, service))
}

fn limit_ms(problem: &Problem, service: &Service) -> Ratio {
    Ratio::from_f64(service.slo_ms).times(&Ratio::from_f64(problem.rules.slo_share))
}

fn demand(problem: &Problem, service: &Service) -> Ratio {
    let factor = Ratio::whole(1).plus(&Ratio::from_f64(problem.rules.headroom_of(&service.name)));
    Ratio::from_f64(service.rate).times(&factor)
}

struct PlanVerifier<'a> {
    problem: &'a Problem,
    served: Vec<Ratio>,
    /// GPU, service and the rate that a share can take, in units.
    capacities: Vec<(usize, usize, u128)>,
    wrong: Vec<String>,
}

/// Binary digits of a capacity.
const CAPACITY_BITS: u64 = 32;

impl<'a> PlanVerifier<'a> {
    fn new(problem: &'a Problem) -> PlanVerifier<'a> {
        let served = vec![Ratio::whole(0); problem.services.len()];
        PlanVerifier { problem, served, capacities: Vec::new(), wrong: Vec::new() }
    }

    fn violations(mut self, plan: &Plan) -> Vec<String> {
        self.verify(plan);
        self.wrong
    }

    fn verify(&mut self, plan: &Plan) {
        for (number, gpu) in plan.gpus.iter().enumerate() {
            // `Plan::from_file` has verified starts and overlaps.
            let sizes = gpu.slices.iter().map(|slice| self.problem.gpu.slices[slice.kind].gpcs);
            let gpcs: u32 = sizes.map(u32::from).sum();
            if gpcs > u32::from(self.problem.gpu.gpcs) {
                self.wrong.push(format!("gpu {number}: {gpcs} compute slices"));
            }
            for slice in &gpu.slices {
                self.slice(number, slice);
            }
        }
        for (service, served) in self.problem.services.iter().zip(&self.served) {
            if stretched(served) < demand(self.problem, service) {
                self.wrong.push(format!(
                    "'{}' gets {} of {} requests/s",
                    service.name,
                    served.to_f64(),
                    demand(self.problem, service).to_f64()
                ));
            }
        }
    }

    fn slice(&mut self, gpu: usize, slice: &PlannedSlice) {
        let kind = &self.problem.gpu.slices[slice.kind];
        let place = format!("gpu {gpu}, {} at {}", kind.name, slice.start);
        let cycle = slice.cycle_ms.map(|cycle| (cycle.is_finite() && cycle > 0.0, cycle));
        if cycle.is_some_and(|(legal, _)| !legal) || slice.shares.len() > SHARES_MAX {
            self.wrong.push(format!("{place}: the cycle or its length is not possible"));
            return;
        }
        let cycle = cycle.map(|(_, cycle)| Ratio::from_f64(cycle));
        let shared = slice.shares.len() > 1;
        if shared && (cycle.is_none() || self.problem.rules.sharing == Sharing::None) {
            self.wrong.push(format!("{place}: shared without a duty cycle"));
        }
        let (mut busy, mut memory) = (Ratio::whole(0), 0u64);
        for share in &slice.shares {
            let service = &self.problem.services[share.service];
            let points = self.problem.profiles.points(&service.model).unwrap_or_default();
            let wanted = (kind.gpcs, share.batch, share.processes);
            let point = points.iter().find(|p| (p.gpcs, p.batch, p.processes) == wanted);
            let Some(point) = point.filter(|p| p.processes <= self.problem.rules.processes_max)
            else {
                self.wrong.push(format!("{place}: '{}' was not measured so", service.name));
                continue;
            };
            let turn = turn_ms(point);
            let limit = stretched(&limit_ms(self.problem, service));
            let requests = u64::from(point.batch) * u64::from(point.processes);
            let (latency, capacity) = match &cycle {
                None => (turn.times(&Ratio::whole(2)), Ratio::from_f64(point.throughput)),
                Some(cycle) => (cycle.plus(&turn), Ratio::whole(requests * 1000).over(cycle)),
            };
            self.capacities.push((gpu, share.service, capacity.floor_units(CAPACITY_BITS)));
            if latency > limit {
                self.wrong.push(format!("{place}: '{}' misses its slo", service.name));
            }
            let rate = Ratio::from_f64(share.rate);
            if rate > stretched(&capacity) {
                self.wrong.push(format!(
                    "{place}: '{}' is sent {} of {} requests/s",
                    service.name,
                    share.rate,
                    capacity.to_f64()
                ));
            }
            busy = busy.plus(&turn);
            memory = memory.saturating_add(self.problem.profiles.memory_limit_mib(
                self.problem.gpu,
                &service.model,
                point,
            ));
            self.served[share.service] = self.served[share.service].plus(&rate);
        }
        if cycle.is_some_and(|cycle| busy > stretched(&cycle)) {
            self.wrong.push(format!("{place}: the turns exceed the cycle"));
        }
        if memory > kind.memory_mib() {
            self.wrong.push(format!("{place}: {memory} MiB"));
        }
    }
}

/// The bound that prices prove: what all services pay at least, over what the dearest GPU pattern
/// is worth.
fn bound(problem: &Problem, prices: &[PriceFile]) -> Result<Ratio, String> {
    let (costs, dearest) = costs(problem, prices)?;
    Ok(costs.iter().fold(Ratio::whole(0), |sum, cost| sum.plus(cost)).over(&dearest))
}

/// The prices of a slice kind, as exact numbers.
struct KindPrices {
    /// Of the whole slice.
    slice: Ratio,
    /// Of its memory, by band of cycles; none if only whole slices have prices.
    memory: Vec<Ratio>,
}

/// The prices of a file by slice kind, and where the bands of cycles begin.
fn kind_prices(
    problem: &Problem,
    prices: &[PriceFile],
) -> Result<(Vec<KindPrices>, Vec<f64>), String> {
    let borders = |price: &PriceFile| -> Vec<f64> {
        std::iter::once(0.0).chain(price.memory_from.iter().map(|from| from.cycle_ms)).collect()
    };
    let bands = prices.first().map_or_else(|| vec![0.0], borders);
    if bands.len() > BANDS_MAX || !bands.is_sorted_by(|a, b| a < b) {
        return Err("the cycles of prices do not rise, or are too many".to_string());
    }
    let none = || KindPrices { slice: Ratio::whole(0), memory: vec![Ratio::whole(0); bands.len()] };
    let mut kinds: Vec<KindPrices> = problem.gpu.slices.iter().map(|_| none()).collect();
    for price in prices {
        let kind = problem.gpu.slices.iter().position(|slice| slice.name == price.profile);
        let kind =
            kind.ok_or_else(|| format!("a price for '{}', which is not there", price.profile))?;
        if borders(price) != bands {
            return Err(format!("the prices of '{}' have cycles of their own", price.profile));
        }
        let memory: Vec<f64> = std::iter::once(price.memory)
            .chain(price.memory_from.iter().map(|from| from.memory))
            .collect();
        for value in memory.iter().chain([&price.time]) {
            if !(0.0..=16.0).contains(value) {
                return Err(format!("the price of '{}' is {value}", price.profile));
            }
        }
        let slice = Ratio::from_f64(price.time).plus(&Ratio::from_f64(price.memory));
        // Memory never costs more than the slice; less proves no more.
        let memory = memory.iter().map(|value| Ratio::from_f64(*value).min(slice.clone()));
        kinds[kind] = KindPrices { memory: memory.collect(), slice };
    }
    Ok((kinds, bands))
}

/// What each service pays at least, and what the dearest GPU pattern is worth.
fn costs(problem: &Problem, prices: &[PriceFile]) -> Result<(Vec<Ratio>, Ratio), String> {
    let (kinds, bands) = kind_prices(problem, prices)?;
    let worth = |pattern: &[u32; KINDS_MAX]| {
        kinds.iter().zip(pattern).fold(Ratio::whole(0), |sum, (kind, &count)| {
            sum.plus(&kind.slice.times(&Ratio::whole(u64::from(count))))
        })
    };
    let dearest =
        problem.gpu.maximal_patterns().iter().map(worth).fold(Ratio::whole(1), Ratio::max);
    let costs = match problem.rules.sharing {
        Sharing::None => whole_costs::each(problem, &kinds),
        Sharing::Time => part_costs::each(problem, &kinds, &bands),
    };
    Ok((costs, dearest))
}
