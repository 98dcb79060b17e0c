//! Verifies a plan over several kinds of GPUs from its file alone.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::ratio::Ratio;
use super::{
    CAPACITY_BITS, GPUS_MAX, PlanVerifier, PriceFile, RulesFile, SERVICES_MAX, costs, few,
    foreign_shares, gpu_of, prices_of, profiles_of, stretched,
};
use crate::error::PlanError;
use crate::gpu::GpuKind;
use crate::gpu_mix::{FailureDomain, GpuOffer, Layout, MixObjective, MixProblem, MixSolution};
use crate::plan::{GpuFile, Plan};
use crate::problem::{PlanRules, Problem, Service};
use crate::profile::Profiles;
use crate::service_file::ServiceTerms;

/// Most kinds of a file and offers of a kind.
const FILE_KINDS_MAX: usize = 64;
const OFFERS_MAX: usize = 1024;
/// How much a file claims less than the planner found: the verifier's rules are stretched.
const BOUND_MARGIN: f64 = 1e-6;
/// Largest price of a GPU.
const WEIGHT_MAX: f64 = 1e9;

/// A plan over several kinds, with what its verification needs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MixFile {
    /// What the plan keeps small.
    pub objective: MixObjective,
    /// Price of an hour, GPUs or watts, as the objective says.
    pub total: f64,
    /// Lower bound on the same for the services that are served, without spare capacity, where
    /// each service runs on one kind.
    pub bound: f64,
    /// GPUs of all kinds.
    pub gpus: usize,
    /// Duration in seconds.
    pub seconds: f64,
    /// Most GPUs that were allowed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpus_max: Option<usize>,
    /// GPUs of a machine, if that matters. Machines take the GPUs of a kind's plan in order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine_gpus: Option<usize>,
    /// GPUs of a rack, if that matters. Racks take the GPUs of a kind's plan in order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rack_gpus: Option<usize>,
    /// What may fail without a missed SLO: any one of these.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub survives: Option<FailureDomain>,
    /// Services that are not served.
    #[serde(default)]
    pub unserved: Vec<String>,
    /// The total of each kind alone; none where it does not serve all.
    #[serde(default)]
    pub single_kinds: BTreeMap<String, Option<f64>>,
    /// The rules of the plan.
    pub rules: RulesFile,
    /// The services, with the rates and SLOs that were planned.
    pub services: Vec<Service>,
    /// Where each may run and with whom, in the same order.
    pub terms: Vec<ServiceTerms>,
    /// The kinds and their plans.
    pub kinds: Vec<KindFile>,
}

/// One kind of a plan over several.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KindFile {
    /// Its name.
    pub gpu_kind: String,
    /// Its table, if it is one of the user's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_table: Option<String>,
    /// GPUs in use.
    pub gpus: usize,
    /// Its offers.
    pub offers: Vec<GpuOffer>,
    /// Its plan.
    pub plan: Vec<GpuFile>,
    /// Prices of its slices, in GPUs of it, that prove the bound.
    pub prices: Vec<PriceFile>,
    /// The operating points that were measured on it.
    pub profiles: Profiles,
}

impl KindFile {
    /// The kind of its name: a known one, or that of the file's own table.
    pub fn gpu(&self) -> Result<&'static GpuKind, PlanError> {
        gpu_of(&self.gpu_kind, self.gpu_table.as_deref())
    }
}

/// What was verified.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MixVerified {
    /// GPUs of all kinds.
    pub gpus: usize,
    /// Price of an hour, GPUs or watts.
    pub total: f64,
    /// The bound that the prices prove.
    pub bound: f64,
    /// Services that are not served.
    pub unserved: usize,
    /// What may fail, and how many GPUs it has.
    pub survives: Option<(FailureDomain, usize)>,
}

impl MixFile {
    /// The file of a solution.
    pub fn new(problem: &MixProblem, solution: &MixSolution) -> MixFile {
        let kinds = problem.kinds.iter().zip(&solution.kinds).zip(&solution.prices);
        let kind = |((kind, planned), prices): ((&crate::gpu_mix::MixKind, _), _)| {
            let planned: &crate::gpu_mix::KindPlan = planned;
            KindFile {
                gpu_kind: kind.gpu.name.to_string(),
                gpu_table: kind.gpu.own_table(),
                gpus: planned.gpus,
                offers: kind.offers.clone(),
                plan: planned.plan.to_file(&planned.problem),
                prices: prices_of(kind.gpu, prices, &[]),
                profiles: profiles_of(&kind.profiles, &problem.services),
            }
        };
        MixFile {
            objective: problem.objective,
            total: solution.total,
            bound: solution.bound * (1.0 - BOUND_MARGIN),
            gpus: solution.gpus(),
            seconds: solution.seconds,
            gpus_max: problem.gpus_max,
            machine_gpus: problem.layout.machine_gpus,
            rack_gpus: problem.layout.rack_gpus,
            survives: problem.survive,
            unserved: (solution.unserved.iter())
                .map(|&service| problem.services[service].name.clone())
                .collect(),
            single_kinds: BTreeMap::new(),
            rules: RulesFile::from(&problem.rules),
            services: problem.services.clone(),
            terms: problem.terms.clone(),
            kinds: kinds.map(kind).collect(),
        }
    }

    /// Verifies the file; the errors name what does not hold.
    pub fn verify(&self) -> Result<MixVerified, Vec<String>> {
        let rules = self.checked_rules().map_err(|what| vec![what])?;
        let mut wrong = Vec::new();
        let mut facts: Vec<KindFacts<'_>> = Vec::new();
        for kind in &self.kinds {
            let named = |what: String| format!("{}: {what}", kind.gpu_kind);
            let found = KindFacts::new(self, kind, &rules).map_err(|what| vec![named(what)])?;
            wrong.extend(found.wrong.iter().cloned().map(named));
            facts.push(found);
        }
        wrong.extend(self.service_faults(&facts));
        let gpus: usize = facts.iter().map(|kind| kind.gpus).sum();
        let total = facts.iter().fold(Ratio::whole(0), |sum, kind| sum.plus(&kind.paid));
        let bound = self.bound(&facts);
        wrong.extend(self.false_claims(gpus, &total, &bound));
        if !wrong.is_empty() {
            return Err(few(wrong));
        }
        Ok(MixVerified {
            gpus,
            total: total.to_f64(),
            bound: bound.to_f64(),
            unserved: self.unserved.len(),
            survives: self.survives.zip(self.domain_gpus()),
        })
    }

    /// Where GPUs are.
    pub fn layout(&self) -> Layout {
        Layout { machine_gpus: self.machine_gpus, rack_gpus: self.rack_gpus }
    }

    /// GPUs that may fail together.
    fn domain_gpus(&self) -> Option<usize> {
        self.layout().gpus(self.survives?)
    }

    /// The rules, if the file is not larger than any plan.
    fn checked_rules(&self) -> Result<PlanRules, String> {
        let gpus: usize = self.kinds.iter().map(|kind| kind.plan.len()).sum();
        if self.services.len() > SERVICES_MAX || gpus > GPUS_MAX {
            return Err("too many services or gpus".to_string());
        }
        if self.terms.len() != self.services.len() {
            return Err(format!("{} terms of {} services", self.terms.len(), self.services.len()));
        }
        if self.kinds.len() > FILE_KINDS_MAX
            || self.kinds.iter().any(|kind| kind.offers.len() > OFFERS_MAX)
        {
            return Err("too many kinds or offers".to_string());
        }
        self.layout().check().map_err(|error| error.to_string())?;
        let apart = self.terms.iter().filter(|terms| !terms.apart.is_empty());
        let together = self.terms.iter().filter(|terms| !terms.together.is_empty());
        let named = apart.map(|terms| terms.apart_by).chain(self.survives);
        let named = named.chain(together.map(|terms| terms.together_by));
        if let Some(domain) = named.into_iter().find(|one| self.layout().gpus(*one).is_none()) {
            return Err(format!("it does not say how many gpus a {} has", domain.name()));
        }
        let mut names = BTreeSet::new();
        if let Some(twice) = self.services.iter().find(|one| !names.insert(one.name.as_str())) {
            return Err(format!("service '{}' is given twice", twice.name));
        }
        let mut kinds = BTreeSet::new();
        let lower = |kind: &KindFile| kind.gpu_kind.to_ascii_lowercase();
        if let Some(twice) = self.kinds.iter().find(|kind| !kinds.insert(lower(kind))) {
            return Err(format!("gpu kind '{}' is given twice", twice.gpu_kind));
        }
        self.rules.rules().map_err(|error| error.to_string())
    }

    /// Services that are served by several kinds, by none and not named as such, or by one that
    /// they may not run on.
    fn service_faults(&self, facts: &[KindFacts<'_>]) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut unserved: BTreeSet<&str> = BTreeSet::new();
        let known: BTreeSet<&str> = self.services.iter().map(|one| one.name.as_str()).collect();
        for name in &self.unserved {
            if !known.contains(name.as_str()) || !unserved.insert(name) {
                wrong.push(format!("'{name}' is left out, and is not there or left out twice"));
            }
        }
        let mut homes_of_groups: BTreeMap<&str, &str> = BTreeMap::new();
        for (service, terms) in self.services.iter().zip(&self.terms) {
            let name = service.name.as_str();
            let homes =
                facts.iter().zip(&self.kinds).filter(|(kind, _)| kind.served.contains(name));
            let homes: Vec<&str> = homes.map(|(_, kind)| kind.gpu_kind.as_str()).collect();
            if homes.len() + usize::from(unserved.contains(name)) != 1 {
                wrong.push(format!("'{name}' is served by {} kinds", homes.len()));
            }
            let allowed = |home: &&str| terms.gpus.iter().any(|gpu| gpu.eq_ignore_ascii_case(home));
            if let Some(home) = homes.iter().find(|home| !allowed(home))
                && !terms.gpus.is_empty()
            {
                wrong.push(format!("'{name}' may not run on {home}"));
            }
            if let (false, Some(home)) = (terms.together.is_empty(), homes.first())
                && *homes_of_groups.entry(&terms.together).or_insert(home) != *home
            {
                let group = &terms.together;
                wrong.push(format!("group '{group}' is not together: it is on several kinds"));
            }
        }
        wrong
    }

    /// What the services that are served count together at least.
    fn bound(&self, facts: &[KindFacts<'_>]) -> Ratio {
        let unserved: BTreeSet<&str> = self.unserved.iter().map(String::as_str).collect();
        let mut bound = Ratio::whole(0);
        for (index, service) in self.services.iter().enumerate() {
            if unserved.contains(service.name.as_str()) {
                continue;
            }
            let choices = facts.iter().filter_map(|kind| kind.least[index].as_ref());
            if let Some(least) = choices.min() {
                bound = bound.plus(least);
            }
        }
        bound
    }

    fn false_claims(&self, gpus: usize, total: &Ratio, bound: &Ratio) -> Vec<String> {
        let mut wrong = Vec::new();
        let claimed = Ratio::from_f64(self.total);
        if stretched(&claimed) < *total || stretched(total) < claimed {
            let total = total.to_f64();
            wrong.push(format!("the plan counts {total}, the file says {}", self.total));
        }
        if stretched(bound) < Ratio::from_f64(self.bound) {
            let bound = bound.to_f64();
            wrong.push(format!("the prices prove {bound}, the file says {}", self.bound));
        }
        if *bound > stretched(total) {
            wrong.push(format!("the plan is below the bound of {}", bound.to_f64()));
        }
        if gpus != self.gpus {
            wrong.push(format!("the plan has {gpus} gpus, the file says {}", self.gpus));
        }
        if self.gpus_max.is_some_and(|max| gpus > max) {
            wrong.push(format!("{gpus} gpus are more than allowed"));
        }
        wrong
    }
}

/// What was found out about one kind.
struct KindFacts<'a> {
    gpus: usize,
    /// What its GPUs count.
    paid: Ratio,
    /// Services with a share.
    served: BTreeSet<&'a str>,
    /// What each service of the file counts here at least; `None` where it cannot run.
    least: Vec<Option<Ratio>>,
    wrong: Vec<String>,
}

impl<'a> KindFacts<'a> {
    fn new(file: &'a MixFile, kind: &'a KindFile, rules: &PlanRules) -> Result<Self, String> {
        let gpu = kind.gpu().map_err(|error| error.to_string())?;
        let shares = kind.plan.iter().flat_map(|gpu| &gpu.slices).flat_map(|s| &s.services);
        let served: BTreeSet<&str> = shares.map(|share| share.name.as_str()).collect();
        let problem = |chosen: &dyn Fn(&Service) -> bool| Problem {
            gpu,
            services: file.services.iter().filter(|one| chosen(one)).cloned().collect(),
            profiles: kind.profiles.clone(),
            rules: rules.clone(),
        };
        let mut wrong = foreign_shares(&file.services, &kind.plan);
        let mine = problem(&|service| served.contains(service.name.as_str()));
        let mut gpus = 0;
        if !mine.services.is_empty() {
            mine.validate().map_err(|error| error.to_string())?;
            let plan = Plan::from_file(&mine, &kind.plan).map_err(|error| error.to_string())?;
            gpus = plan.gpus.iter().filter(|gpu| !gpu.slices.is_empty()).count();
            wrong.extend(plan_faults(file, &mine, &plan));
        }
        if gpus != kind.gpus {
            wrong.push(format!("{gpus} gpus, the file says {}", kind.gpus));
        }
        let least = least_of(file, kind, &problem(&|_| true))?;
        Ok(KindFacts { gpus, paid: paid(file, kind, gpus)?, served, least, wrong })
    }
}

/// What is wrong with the plan of one kind: its rules, groups that are together, and what a failed
/// machine would leave.
fn plan_faults(file: &MixFile, problem: &Problem, plan: &Plan) -> Vec<String> {
    let mut verifier = PlanVerifier::new(problem);
    verifier.verify(plan);
    let PlanVerifier { capacities, mut wrong, .. } = verifier;
    wrong.extend(group_faults(file, problem, plan));
    let (Some(domain), Some(domain_gpus)) = (file.survives, file.domain_gpus()) else {
        return wrong;
    };
    let mut all = vec![0u128; problem.services.len()];
    let mut by_domain: BTreeMap<(usize, usize), u128> = BTreeMap::new();
    for (gpu, service, units) in capacities {
        all[service] = all[service].saturating_add(units);
        let one = by_domain.entry((gpu / domain_gpus, service)).or_default();
        *one = one.saturating_add(units);
    }
    for ((number, service), units) in by_domain {
        let left = Ratio::of_units(all[service].saturating_sub(units), CAPACITY_BITS);
        let Service { name, rate, .. } = &problem.services[service];
        if stretched(&left) < Ratio::from_f64(*rate) {
            let (left, domain) = (left.to_f64(), domain.name());
            wrong.push(format!("without {domain} {number} '{name}' has {left} of {rate}/s"));
        }
    }
    wrong
}

/// Services of a group on one GPU, in one machine or in one rack, as far as the widest domain that
/// one of the group names.
fn group_faults(file: &MixFile, problem: &Problem, plan: &Plan) -> Vec<String> {
    let mut widest: BTreeMap<&str, FailureDomain> = BTreeMap::new();
    let mut groups: BTreeMap<&str, &str> = BTreeMap::new();
    for (service, terms) in file.services.iter().zip(&file.terms) {
        if !terms.apart.is_empty() {
            groups.insert(&service.name, &terms.apart);
            let domain = widest.entry(&terms.apart).or_insert(terms.apart_by);
            *domain = terms.apart_by.max(*domain);
        }
    }
    let mut wrong = scattered_groups(file, problem, plan);
    let mut owners: BTreeMap<(&str, usize), usize> = BTreeMap::new();
    for (gpu, slice) in
        plan.gpus.iter().enumerate().flat_map(|(gpu, one)| one.slices.iter().map(move |s| (gpu, s)))
    {
        for share in &slice.shares {
            let name = problem.services[share.service].name.as_str();
            let Some(group) = groups.get(name) else { continue };
            let domain = widest.get(group).copied().unwrap_or_default();
            let number = gpu / file.layout().gpus(domain).unwrap_or(1);
            if *owners.entry((group, number)).or_insert(share.service) != share.service {
                let domain = domain.name();
                wrong.push(format!("{domain} {number} has two services of group '{group}'"));
            }
        }
    }
    wrong
}

/// Groups that are kept together and are in two domains of a kind, as far as the narrowest domain
/// that one of the group names.
fn scattered_groups(file: &MixFile, problem: &Problem, plan: &Plan) -> Vec<String> {
    let mut terms: BTreeMap<&str, &str> = BTreeMap::new();
    let mut narrowest: BTreeMap<&str, FailureDomain> = BTreeMap::new();
    for (service, one) in file.services.iter().zip(&file.terms) {
        if !one.together.is_empty() {
            terms.insert(&service.name, &one.together);
            let domain = narrowest.entry(&one.together).or_insert(one.together_by);
            *domain = one.together_by.min(*domain);
        }
    }
    let mut at: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
    for (gpu, one) in plan.gpus.iter().enumerate() {
        for share in one.slices.iter().flat_map(|slice| &slice.shares) {
            let name = problem.services[share.service].name.as_str();
            let Some(group) = terms.get(name) else { continue };
            let gpus = narrowest.get(group).and_then(|domain| file.layout().gpus(*domain));
            at.entry(group).or_default().insert(gpu / gpus.unwrap_or(1));
        }
    }
    let scattered = at.into_iter().filter(|(_, domains)| domains.len() > 1);
    scattered.map(|(group, _)| format!("group '{group}' is not together")).collect()
}

/// What a GPU of an offer counts.
fn weight(file: &MixFile, offer: &GpuOffer) -> Result<Ratio, String> {
    let weight = match file.objective {
        MixObjective::Cost => offer.price,
        MixObjective::Gpus => 1.0,
        MixObjective::Energy => offer.watts,
    };
    if file.objective == MixObjective::Energy && weight == 0.0 {
        return Err(format!("offer '{}' has no watts", offer.name));
    }
    match (0.0..=WEIGHT_MAX).contains(&weight) {
        true => Ok(Ratio::from_f64(weight)),
        false => Err(format!("offer '{}' counts {weight}", offer.name)),
    }
}

/// What so many GPUs count, the cheapest offers first.
fn paid(file: &MixFile, kind: &KindFile, gpus: usize) -> Result<Ratio, String> {
    let mut offers: Vec<(Ratio, Option<usize>)> = Vec::new();
    for offer in &kind.offers {
        offers.push((weight(file, offer)?, offer.count));
    }
    offers.sort_by(|a, b| a.0.cmp(&b.0));
    let (mut left, mut total) = (gpus, Ratio::whole(0));
    for (weight, count) in offers {
        let taken = count.map_or(left, |count| count.min(left));
        total = total.plus(&weight.times(&Ratio::whole(taken as u64)));
        left -= taken;
    }
    match left {
        0 => Ok(total),
        _ => Err(format!("{gpus} gpus are more than there are")),
    }
}

/// What each service counts on this kind at least: its GPUs by the prices, times the cheapest
/// offer.
fn least_of(
    file: &MixFile,
    kind: &KindFile,
    whole: &Problem,
) -> Result<Vec<Option<Ratio>>, String> {
    let mut cheapest: Option<Ratio> = None;
    for offer in &kind.offers {
        let one = weight(file, offer)?;
        cheapest = Some(cheapest.map_or_else(|| one.clone(), |best| best.min(one.clone())));
    }
    let Some(cheapest) = cheapest else { return Ok(vec![None; file.services.len()]) };
    let faulty: BTreeSet<usize> = whole.faults().into_iter().map(|(index, _)| index).collect();
    let may_run = |index: &usize| {
        let allowed = &file.terms[*index].gpus;
        let named = |gpu: &String| gpu.eq_ignore_ascii_case(&kind.gpu_kind);
        !faulty.contains(index) && (allowed.is_empty() || allowed.iter().any(named))
    };
    let able: Vec<usize> = (0..file.services.len()).filter(may_run).collect();
    let services = able.iter().map(|&index| file.services[index].clone()).collect();
    let (costs, dearest) = costs(&Problem { services, ..whole.clone() }, &kind.prices)?;
    let mut least = vec![None; file.services.len()];
    for (index, cost) in able.into_iter().zip(costs) {
        least[index] = Some(cost.over(&dearest).times(&cheapest));
    }
    Ok(least)
}
