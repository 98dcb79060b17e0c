//! Plans services onto several kinds of GPUs with prices and stock.
//!
//! Each service runs on one kind. The prices that prove a kind's bound say what a service costs
//! there; each service goes where that is cheapest, each kind is planned by itself, and services of
//! poorly used GPUs are tried elsewhere. The cheapest costs of all services together are a lower
//! bound on the cost of any plan that runs each service on one kind.

mod apart;
mod chosen;
mod layout;
mod spare;
mod stock;
mod together;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::certified;
use crate::error::PlanError;
use crate::gpu::{GpuKind, KINDS_MAX};
use crate::plan::Plan;
use crate::problem::{PlanRules, Problem, Service, Sharing};
use crate::profile::Profiles;
use crate::search_control::SearchControl;
use crate::service_file::ServiceTerms;

pub use self::layout::{FailureDomain, Layout};
pub use self::spare::check_spare;
pub use self::stock::{GpuOffer, offers_from_toml};

/// What a plan keeps small.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MixObjective {
    /// The price of all GPUs together.
    Cost,
    /// The number of GPUs.
    Gpus,
    /// The power of all GPUs together.
    Energy,
}

/// Which services are served when not all can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServeFirst {
    /// Those of the highest priority; among equals those with the most revenue for what they cost.
    Priority,
    /// Those with the most revenue for what they cost.
    Revenue,
}

/// A kind of GPU with its profiles and offers.
#[derive(Clone, Debug)]
pub struct MixKind {
    /// The kind.
    pub gpu: &'static GpuKind,
    /// Points that were measured on it.
    pub profiles: Profiles,
    /// Offers of this kind.
    pub offers: Vec<GpuOffer>,
}

/// Input of [`plan_mix`].
#[derive(Clone, Debug)]
pub struct MixProblem {
    /// The services.
    pub services: Vec<Service>,
    /// What each is worth.
    pub terms: Vec<ServiceTerms>,
    /// The rules of every plan.
    pub rules: PlanRules,
    /// The kinds of GPUs.
    pub kinds: Vec<MixKind>,
    /// What is kept small.
    pub objective: MixObjective,
    /// Most GPUs of all kinds together.
    pub gpus_max: Option<usize>,
    /// Which services are served when not all can be.
    pub serve_first: ServeFirst,
    /// Where GPUs are.
    pub layout: Layout,
    /// What may fail without a missed SLO: any one of these.
    pub survive: Option<FailureDomain>,
}

/// The plan of one kind.
#[derive(Clone, Debug)]
pub struct KindPlan {
    /// Its services, as indices of the whole problem, in the order of the kind's problem.
    pub services: Vec<usize>,
    /// The kind's problem.
    pub problem: Problem,
    /// Its plan; spare slices are on the last GPUs.
    pub plan: Plan,
    /// Number of GPUs in use.
    pub gpus: usize,
}

/// A plan over several kinds.
#[derive(Clone, Debug)]
pub struct MixSolution {
    /// One for each kind of the problem, in the same order.
    pub kinds: Vec<KindPlan>,
    /// Services that are not served.
    pub unserved: Vec<usize>,
    /// Price, GPUs or watts of the plan, as the objective says.
    pub total: f64,
    /// Lower bound on the same for the services that are served, without spare capacity.
    pub bound: f64,
    /// Prices of the slices of each kind, in GPUs of it, that prove the bound.
    pub prices: Vec<[f64; KINDS_MAX]>,
    /// Duration in seconds.
    pub seconds: f64,
}

impl MixSolution {
    /// GPUs of all kinds.
    pub fn gpus(&self) -> usize {
        self.kinds.iter().map(|kind| kind.gpus).sum()
    }
}

/// Rounds of moving services off poorly used GPUs.
const ROUNDS_MAX: usize = 6;

/// Plans all services, or as many as GPUs allow.
pub fn plan_mix(
    problem: &MixProblem,
    control: &mut SearchControl<'_>,
) -> Result<MixSolution, PlanError> {
    let mixer = Mixer::new(problem, control)?;
    let all: Vec<usize> = (0..problem.services.len()).collect();
    if let Some(solution) = mixer.solve(&all, control)? {
        return Ok(mixer.finished(solution, Vec::new(), control));
    }
    let (solution, served) = mixer.choose(control)?;
    let served: BTreeSet<usize> = served.into_iter().collect();
    let unserved = all.into_iter().filter(|service| !served.contains(service)).collect();
    Ok(mixer.finished(solution, unserved, control))
}

/// Which kind each service runs on, and the plans.
struct Assignment {
    chosen: Vec<(usize, usize)>,
    kinds: Vec<KindPlan>,
    total: f64,
}

/// The cheaper of two.
fn cheaper(one: Option<Assignment>, other: Option<Assignment>) -> Option<Assignment> {
    match (one, other) {
        (Some(one), Some(other)) => Some(if other.total < one.total { other } else { one }),
        (one, other) => one.or(other),
    }
}

/// GPUs with slices.
fn used_gpus(plan: &Plan) -> usize {
    plan.gpus.iter().filter(|gpu| !gpu.slices.is_empty()).count()
}

struct Mixer<'a> {
    problem: &'a MixProblem,
    /// GPUs that a service takes at least, by service and kind; `None` where it cannot run.
    needs: Vec<Vec<Option<f64>>>,
    /// The same with spare capacity, as far as that is known.
    spare_needs: Vec<Vec<Option<f64>>>,
    prices: Vec<[f64; KINDS_MAX]>,
    /// What each service is worth, with the domain of its group.
    terms: Vec<ServiceTerms>,
    /// Services planned so far, each weighted by how long its planning takes.
    work: Cell<u64>,
}

impl<'a> Mixer<'a> {
    fn new(
        problem: &'a MixProblem,
        control: &mut SearchControl<'_>,
    ) -> Result<Mixer<'a>, PlanError> {
        if problem.services.is_empty() || problem.kinds.is_empty() {
            return Err(PlanError::NoServices);
        }
        let terms = problem.checked_terms()?;
        problem.check_watts()?;
        let (able, faults) = problem.able();
        if let Some(error) = faults.into_iter().flatten().next() {
            return Err(error);
        }
        let mut needs = vec![vec![None; problem.kinds.len()]; problem.services.len()];
        let mut spare_needs = needs.clone();
        let mut prices = vec![[0.0; KINDS_MAX]; problem.kinds.len()];
        for (index, able) in able.into_iter().enumerate() {
            if able.is_empty() {
                continue;
            }
            prices[index] = certified::bound(&problem.of_kind(index, &able), control)?.prices;
            for service in able {
                let one = problem.alone(index, service);
                let need = certified::bound_at(&one, &prices[index]);
                needs[service][index] = Some(need);
                spare_needs[service][index] = Some(match problem.plans_together() {
                    true => spare::need(&one, &prices[index]).max(need),
                    false => need,
                });
            }
        }
        let work = Cell::new(0);
        let mixer = Mixer { problem, needs, spare_needs, prices, terms, work };
        mixer.check_kinds_of_groups()?;
        Ok(mixer)
    }

    /// Services in the order in which they are served when not all can be.
    fn order(&self) -> Vec<usize> {
        let worth = |service: usize| {
            let MixProblem { services, terms, .. } = self.problem;
            let hourly = services[service].rate * 3.6 * terms[service].revenue;
            let needs = self.needs[service].iter().flatten().copied();
            hourly / needs.fold(f64::INFINITY, f64::min).max(1e-12)
        };
        let mut order: Vec<usize> = (0..self.needs.len()).collect();
        order.sort_by(|&a, &b| {
            let rank = match self.problem.serve_first {
                ServeFirst::Priority => {
                    self.problem.terms[a].priority.cmp(&self.problem.terms[b].priority)
                }
                ServeFirst::Revenue => std::cmp::Ordering::Equal,
            };
            rank.then(worth(b).total_cmp(&worth(a))).then(a.cmp(&b))
        });
        order
    }

    /// The best plan found for these services; `None` if they do not fit.
    fn solve(
        &self,
        services: &[usize],
        control: &mut SearchControl<'_>,
    ) -> Result<Option<Assignment>, PlanError> {
        let mut best: Option<Assignment> = None;
        // Stock takes effect on whole GPUs, so the room that is assigned shrinks until plans fit.
        for room in [1.0, 0.97, 0.92, 0.85, 0.75] {
            let Some(chosen) = self.assign(services, room) else { continue };
            best = self.plan(chosen, None, control)?;
            if best.is_some() {
                break;
            }
        }
        for kind in 0..self.problem.kinds.len() {
            if services.iter().all(|&service| self.needs[service][kind].is_some()) {
                let chosen = services.iter().map(|&service| (service, kind)).collect();
                let found = self.plan(chosen, None, control)?;
                best = cheaper(best, found);
            }
        }
        let Some(mut best) = best else { return Ok(None) };
        for _ in 0..ROUNDS_MAX {
            let mut improved = false;
            for from in 0..self.problem.kinds.len() {
                for to in (0..self.problem.kinds.len()).filter(|to| *to != from) {
                    if control.is_stopped() {
                        return Ok(Some(best));
                    }
                    let Some(moved) = self.off_emptiest(&best, from, to) else { continue };
                    let found = self.plan(moved, Some((&best, [from, to])), control)?;
                    if let Some(found) = found.filter(|found| found.total < best.total - 1e-9) {
                        (best, improved) = (found, true);
                    }
                }
            }
            if !improved {
                break;
            }
        }
        Ok(Some(best))
    }

    /// The kind of each service: the cheapest, as far as the stock goes. `None` if there is too
    /// little of everything.
    fn assign(&self, services: &[usize], room: f64) -> Option<Vec<(usize, usize)>> {
        let count = self.problem.kinds.len();
        let stock: Vec<f64> =
            (0..count).map(|kind| self.problem.stock(kind) as f64 * room).collect();
        let mut used = vec![0.0; count];
        // Those that lose most by a second choice choose first.
        let mut order: Vec<(f64, usize)> = Vec::with_capacity(services.len());
        for &service in services {
            let mut costs: Vec<f64> = (0..count)
                .filter_map(|k| Some(self.spare_needs[service][k]? * self.problem.weight(k, 0.0)))
                .collect();
            costs.sort_by(f64::total_cmp);
            let regret = costs.get(1).map_or(f64::INFINITY, |second| second - costs[0]);
            order.push((regret, service));
        }
        order.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let mut chosen = Vec::with_capacity(services.len());
        for (_, service) in order {
            let fits = |kind: &usize| {
                self.spare_needs[service][*kind]
                    .is_some_and(|need| used[*kind] + need <= stock[*kind])
            };
            let cost = |kind: usize| {
                let need = self.spare_needs[service][kind].unwrap_or(f64::INFINITY);
                need * self.problem.weight(kind, used[kind])
            };
            let kind = (0..count).filter(fits).min_by(|&a, &b| cost(a).total_cmp(&cost(b)))?;
            used[kind] += self.spare_needs[service][kind].unwrap_or(0.0);
            chosen.push((service, kind));
        }
        self.on_one_kind(&mut chosen).then_some(chosen)
    }

    /// Puts the services of each group that is kept together onto the kind that is cheapest for all
    /// of them. Returns whether there is one.
    fn on_one_kind(&self, chosen: &mut [(usize, usize)]) -> bool {
        let mut groups: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (at, (service, _)) in chosen.iter().enumerate() {
            groups.entry(&self.terms[*service].together).or_default().push(at);
        }
        groups.remove("");
        for places in groups.into_values() {
            let cost = |kind: usize| -> Option<f64> {
                let needs = places.iter().map(|at| self.spare_needs[chosen[*at].0][kind]);
                Some(needs.sum::<Option<f64>>()? * self.problem.weight(kind, 0.0))
            };
            let kinds = (0..self.problem.kinds.len()).filter_map(|kind| Some((kind, cost(kind)?)));
            let Some((kind, _)) = kinds.min_by(|a, b| a.1.total_cmp(&b.1)) else { return false };
            places.into_iter().for_each(|at| chosen[at].1 = kind);
        }
        true
    }

    /// That every group which is kept together has a kind that runs all its services.
    fn check_kinds_of_groups(&self) -> Result<(), PlanError> {
        let mut able: BTreeMap<&str, Vec<bool>> = BTreeMap::new();
        for (needs, terms) in self.needs.iter().zip(&self.terms) {
            let all = able.entry(&terms.together).or_insert_with(|| vec![true; needs.len()]);
            all.iter_mut().zip(needs).for_each(|(all, need)| *all &= need.is_some());
        }
        able.remove("");
        match able.iter().find(|(_, kinds)| !kinds.contains(&true)) {
            None => Ok(()),
            Some((group, _)) => Err(PlanError::Unsupported {
                algorithm: "certified",
                what: format!("group '{group}' is together, and no kind runs all its services"),
            }),
        }
    }

    /// Whether the group of `service`, as far as it is chosen, runs on `kind`.
    fn joins_group(&self, chosen: &[(usize, usize)], service: usize, kind: usize) -> bool {
        let group = &self.terms[service].together;
        group.is_empty()
            || chosen.iter().all(|(other, on)| *on == kind || self.terms[*other].together != *group)
    }

    /// Plans every kind, or only those that changed from another assignment; `None` if the stock or
    /// the limit does not suffice.
    fn plan(
        &self,
        chosen: Vec<(usize, usize)>,
        from: Option<(&Assignment, [usize; 2])>,
        control: &mut SearchControl<'_>,
    ) -> Result<Option<Assignment>, PlanError> {
        let (mut kinds, mut total, mut gpus) = (Vec::new(), 0.0, 0);
        for kind in 0..self.problem.kinds.len() {
            let planned = match from {
                Some((before, changed)) if !changed.contains(&kind) => before.kinds[kind].clone(),
                _ => {
                    let mine = chosen.iter().filter(|(_, k)| *k == kind);
                    let mut services: Vec<usize> = mine.map(|(service, _)| *service).collect();
                    services.sort_unstable();
                    self.plan_kind(kind, services, control)?
                }
            };
            gpus += planned.gpus;
            let Some(price) = self.problem.total(kind, planned.gpus) else { return Ok(None) };
            total += price;
            kinds.push(planned);
        }
        let fits = self.problem.gpus_max.is_none_or(|max| gpus <= max);
        Ok(fits.then_some(Assignment { chosen, kinds, total }))
    }

    fn plan_kind(
        &self,
        kind: usize,
        services: Vec<usize>,
        control: &mut SearchControl<'_>,
    ) -> Result<KindPlan, PlanError> {
        let problem = self.problem.of_kind(kind, &services);
        if services.is_empty() {
            return Ok(KindPlan { services, problem, plan: Plan::default(), gpus: 0 });
        }
        self.count_work(services.len());
        let layout = self.problem.layout;
        let terms: Vec<&ServiceTerms> = services.iter().map(|&s| &self.terms[s]).collect();
        let mut plan = match together::has_groups(&terms) {
            true => together::plan(&problem, &terms, layout, control)?,
            false => certified::plan(&problem, control)?.plan,
        };
        apart::keep_apart(&problem, &terms, &mut plan)?;
        if let Some(group) = together::scattered(&terms, layout, &plan).first() {
            return Err(PlanError::Unsupported {
                algorithm: "certified",
                what: format!("keeping others apart would scatter group '{group}'"),
            });
        }
        apart::arrange(&terms, layout, &mut plan);
        if let Some(domain_gpus) = self.problem.domain_gpus() {
            spare::add(&problem, &terms, layout, domain_gpus, &mut plan, control)?;
            if self.problem.plans_together() {
                let (prices, places) = (&self.prices[kind], (layout, domain_gpus));
                let mut other = spare::plan_together(&problem, prices, &terms, places, control)?;
                spare::add(&problem, &terms, layout, domain_gpus, &mut other, control)?;
                if used_gpus(&other) < used_gpus(&plan) {
                    plan = other;
                }
            }
        }
        let gpus = used_gpus(&plan);
        Ok(KindPlan { services, problem, plan, gpus })
    }

    /// The choice with the services of kind `from`'s least used GPU on kind `to`.
    fn off_emptiest(
        &self,
        now: &Assignment,
        from: usize,
        to: usize,
    ) -> Option<Vec<(usize, usize)>> {
        let planned = &now.kinds[from];
        let load = |gpu: &crate::plan::PlannedGpu| {
            let sizes =
                gpu.slices.iter().map(|s| u32::from(planned.problem.gpu.slices[s.kind].gpcs));
            sizes.sum::<u32>()
        };
        let gpus = planned.plan.gpus.iter().filter(|gpu| !gpu.slices.is_empty());
        let emptiest = gpus.min_by_key(|gpu| load(gpu))?;
        let shares = emptiest.slices.iter().flat_map(|slice| &slice.shares);
        let mut moving: BTreeSet<usize> =
            shares.map(|share| planned.services[share.service]).collect();
        // A group moves as a whole.
        let group = |service: &usize| self.terms[*service].together.as_str();
        let groups: BTreeSet<&str> = moving.iter().map(group).filter(|g| !g.is_empty()).collect();
        moving.extend(planned.services.iter().filter(|one| groups.contains(group(one))));
        let able = moving.iter().all(|&service| self.needs[service][to].is_some());
        let place = |&(service, kind): &(usize, usize)| match moving.contains(&service) {
            true => (service, to),
            false => (service, kind),
        };
        (able && !moving.is_empty()).then(|| now.chosen.iter().map(place).collect())
    }

    fn finished(
        &self,
        solution: Assignment,
        unserved: Vec<usize>,
        control: &mut SearchControl<'_>,
    ) -> MixSolution {
        let cheapest = |service: usize| {
            let of =
                |kind: usize| Some(self.needs[service][kind]? * self.problem.weight(kind, 0.0));
            (0..self.problem.kinds.len()).filter_map(of).fold(f64::INFINITY, f64::min)
        };
        let served = solution.kinds.iter().flat_map(|kind| kind.services.iter().copied());
        MixSolution {
            bound: served.map(cheapest).sum(),
            kinds: solution.kinds,
            unserved,
            total: solution.total,
            prices: self.prices.clone(),
            seconds: control.seconds(),
        }
    }
}

impl MixProblem {
    /// The problem of some services on one kind.
    fn of_kind(&self, kind: usize, services: &[usize]) -> Problem {
        let MixKind { gpu, profiles, .. } = &self.kinds[kind];
        Problem {
            gpu,
            services: services.iter().map(|&service| self.services[service].clone()).collect(),
            profiles: profiles.clone(),
            rules: self.rules.clone(),
        }
    }

    /// The problem of one service on one kind.
    fn alone(&self, kind: usize, service: usize) -> Problem {
        let MixKind { gpu, profiles, .. } = &self.kinds[kind];
        let service = self.services[service].clone();
        let profiles = profiles.of_model(&service.model);
        Problem { gpu, services: vec![service], profiles, rules: self.rules.clone() }
    }

    /// The services that each kind can run, and why one that none of them can run is a fault.
    fn able(&self) -> (Vec<Vec<usize>>, Vec<Option<PlanError>>) {
        let all: Vec<usize> = (0..self.services.len()).collect();
        let mut able = vec![Vec::new(); self.kinds.len()];
        let mut first_error = vec![None; self.services.len()];
        for (index, kind) in self.kinds.iter().enumerate() {
            let mut faults = self.of_kind(index, &all).faults().into_iter().peekable();
            for (service, first) in first_error.iter_mut().enumerate() {
                let fault = faults.next_if(|(at, _)| *at == service).map(|(_, error)| error);
                let allowed = &self.terms[service].gpus;
                let named = |name: &String| name.eq_ignore_ascii_case(kind.gpu.name);
                match fault {
                    _ if !allowed.is_empty() && !allowed.iter().any(named) => {}
                    Some(error) => {
                        first.get_or_insert(error);
                    }
                    None => able[index].push(service),
                }
            }
        }
        let mut somewhere = vec![false; self.services.len()];
        able.iter().flatten().for_each(|&service| somewhere[service] = true);
        let fault = |(service, first): (usize, Option<PlanError>)| {
            let name = self.services[service].name.clone();
            let nowhere = PlanError::NoKind { service: name };
            (!somewhere[service]).then(|| first.unwrap_or(nowhere))
        };
        let faults = first_error.into_iter().enumerate().map(fault).collect();
        (able, faults)
    }

    /// Errors of the services that no kind can run.
    pub fn faults(&self) -> Vec<(usize, PlanError)> {
        let (_, faults) = self.able();
        let named = faults.into_iter().enumerate();
        named.filter_map(|(service, fault)| Some((service, fault?))).collect()
    }

    /// The problem without some services, in ascending order.
    pub fn without(&self, left_out: &[usize]) -> MixProblem {
        let kept = |index: &usize| left_out.binary_search(index).is_err();
        let kept: Vec<usize> = (0..self.services.len()).filter(kept).collect();
        MixProblem {
            services: kept.iter().map(|&index| self.services[index].clone()).collect(),
            terms: kept.iter().map(|&index| self.terms[index].clone()).collect(),
            ..self.clone()
        }
    }

    fn check_watts(&self) -> Result<(), PlanError> {
        let energy = self.objective == MixObjective::Energy;
        for kind in self.kinds.iter().filter(|_| energy) {
            if let Some(offer) = kind.offers.iter().find(|offer| offer.watts <= 0.0) {
                return Err(PlanError::NoWatts { offer: offer.name.clone(), gpu: kind.gpu.name });
            }
        }
        Ok(())
    }

    /// The terms with the domain of each group, if the layout says how large these are.
    fn checked_terms(&self) -> Result<Vec<ServiceTerms>, PlanError> {
        self.layout.check()?;
        if let Some(domain) = self.survive {
            self.layout.require(domain, "spare capacity is")?;
        }
        let mut terms = apart::widened(&self.terms);
        together::narrowed(&mut terms);
        for (service, terms) in self.services.iter().zip(&terms) {
            if !terms.apart.is_empty() {
                self.layout.require(terms.apart_by, &format!("'{}' is apart", service.name))?;
            }
            if !terms.together.is_empty() {
                let who = format!("'{}' is together", service.name);
                self.layout.require(terms.together_by, &who)?;
            }
        }
        self.check_groups(&terms)?;
        Ok(terms)
    }

    /// That groups which are kept together have no rules beside theirs that would move them.
    fn check_groups(&self, terms: &[ServiceTerms]) -> Result<(), PlanError> {
        let grouped = |one: &&ServiceTerms| !one.together.is_empty();
        let Some(first) = terms.iter().find(grouped) else { return Ok(()) };
        let unsupported = |what: &str| {
            let what = format!("group '{}' is together, {what}", first.together);
            Err(PlanError::Unsupported { algorithm: "certified", what })
        };
        if self.survive.is_some() {
            return unsupported("and spare slices would be elsewhere: leave out --survive or it");
        }
        if terms.iter().filter(grouped).any(|one| !one.apart.is_empty()) {
            return unsupported("and a service of it is apart, too: leave out one of them");
        }
        let beyond =
            |one: &ServiceTerms| !one.apart.is_empty() && one.apart_by > FailureDomain::Gpu;
        match terms.iter().any(beyond) {
            true => unsupported("and others are apart by machine or rack: plan them separately"),
            false => Ok(()),
        }
    }

    /// GPUs that may fail together.
    pub fn domain_gpus(&self) -> Option<usize> {
        self.layout.gpus(self.survive?)
    }

    /// Whether spare slices are planned together with the others.
    fn plans_together(&self) -> bool {
        self.survive.is_some() && self.rules.sharing == Sharing::None
    }

    /// Lower bound on the total of the services that a solution serves, with spare capacity. It
    /// is that without where slices are shared.
    pub fn bound_with_spare(&self, solution: &MixSolution) -> f64 {
        if !self.plans_together() {
            return solution.bound;
        }
        let served = solution.kinds.iter().flat_map(|kind| kind.services.iter().copied());
        let cheapest = |service: usize| {
            let of = |kind: usize| {
                let one = self.alone(kind, service);
                let named = |gpu: &String| gpu.eq_ignore_ascii_case(one.gpu.name);
                let allowed = &self.terms[service].gpus;
                let able =
                    one.faults().is_empty() && (allowed.is_empty() || allowed.iter().any(named));
                let cost = || spare::need(&one, &solution.prices[kind]) * self.weight(kind, 0.0);
                able.then(cost)
            };
            (0..self.kinds.len()).filter_map(of).fold(f64::INFINITY, f64::min)
        };
        served.map(cheapest).sum::<f64>().max(solution.bound)
    }

    /// What one GPU of an offer counts in the objective.
    fn weight_of(&self, offer: &GpuOffer) -> f64 {
        match self.objective {
            MixObjective::Cost => offer.price,
            MixObjective::Gpus => 1.0,
            MixObjective::Energy => offer.watts,
        }
    }

    /// The offers of a kind, those that count least first.
    fn offers(&self, kind: usize) -> Vec<&GpuOffer> {
        let mut offers: Vec<&GpuOffer> = self.kinds[kind].offers.iter().collect();
        offers.sort_by(|a, b| self.weight_of(a).total_cmp(&self.weight_of(b)));
        offers
    }

    /// GPUs of a kind that there are.
    fn stock(&self, kind: usize) -> usize {
        let counts = self.kinds[kind].offers.iter().map(|offer| offer.count.unwrap_or(STOCK_MAX));
        counts.fold(0, usize::saturating_add).min(STOCK_MAX)
    }

    /// What the next GPU counts when so many are used.
    fn weight(&self, kind: usize, used: f64) -> f64 {
        let mut left = used;
        let offers = self.offers(kind);
        for offer in &offers {
            let count = offer.count.unwrap_or(STOCK_MAX) as f64;
            if left < count {
                return self.weight_of(offer);
            }
            left -= count;
        }
        offers.last().map_or(f64::INFINITY, |offer| self.weight_of(offer))
    }

    /// What so many GPUs of a kind count; `None` if there are fewer.
    fn total(&self, kind: usize, gpus: usize) -> Option<f64> {
        let (mut left, mut total) = (gpus, 0.0);
        for offer in self.offers(kind) {
            let taken = left.min(offer.count.unwrap_or(STOCK_MAX));
            total += taken as f64 * self.weight_of(offer);
            left -= taken;
        }
        (left == 0).then_some(total)
    }
}

/// GPUs of an offer without a limit.
const STOCK_MAX: usize = 10_000_000;

/// What is wrong with a solution; empty if it is accepted. It uses only the problem and the plans.
pub fn check_mix(problem: &MixProblem, solution: &MixSolution) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut seen = vec![0usize; problem.services.len()];
    let mut total = 0.0;
    let mut terms = apart::widened(&problem.terms);
    together::narrowed(&mut terms);
    let mut kind_of_group: BTreeMap<&str, usize> = BTreeMap::new();
    for (index, kind) in solution.kinds.iter().enumerate() {
        let name = problem.kinds[index].gpu.name;
        let violations = crate::check(&kind.problem, &kind.plan);
        wrong.extend(violations.iter().map(|violation| format!("{name}: {violation}")));
        for (place, &service) in kind.services.iter().enumerate() {
            seen[service] += 1;
            if kind.problem.services[place] != problem.services[service] {
                wrong.push(format!("{name}: service {service} is another one in the plan"));
            }
            let allowed = &problem.terms[service].gpus;
            if !allowed.is_empty() && !allowed.iter().any(|one| one.eq_ignore_ascii_case(name)) {
                wrong.push(format!("'{}' may not run on {name}", problem.services[service].name));
            }
        }
        let used = used_gpus(&kind.plan);
        match problem.total(index, used) {
            Some(price) => total += price,
            None => wrong.push(format!("{name}: {used} gpus are more than there are")),
        }
        if let Some(domain_gpus) = problem.domain_gpus() {
            wrong.extend(check_spare(&kind.problem, domain_gpus, &kind.plan));
        }
        let terms: Vec<&ServiceTerms> = kind.services.iter().map(|&s| &terms[s]).collect();
        for group in together::scattered(&terms, problem.layout, &kind.plan) {
            wrong.push(format!("{name}: group '{group}' is not together"));
        }
        for group in terms.iter().map(|one| one.together.as_str()).filter(|g| !g.is_empty()) {
            if *kind_of_group.entry(group).or_insert(index) != index {
                wrong.push(format!("{name}: a part of group '{group}' is on another kind"));
            }
        }
        for (domain, number, group) in apart::together(&terms, problem.layout, &kind.plan) {
            let domain = domain.name();
            wrong.push(format!("{name}: {domain} {number} has two services of group '{group}'"));
        }
    }
    solution.unserved.iter().for_each(|&service| seen[service] += 1);
    for (service, count) in problem.services.iter().zip(seen) {
        if count != 1 {
            wrong.push(format!("'{}' is served or left out {count} times", service.name));
        }
    }
    if problem.gpus_max.is_some_and(|max| solution.gpus() > max) {
        wrong.push(format!("{} gpus are more than allowed", solution.gpus()));
    }
    if (total - solution.total).abs() > 1e-6 * total.abs().max(1.0) {
        wrong.push(format!("the plan counts {total}, not {}", solution.total));
    }
    wrong
}

#[cfg(test)]
mod tests;
