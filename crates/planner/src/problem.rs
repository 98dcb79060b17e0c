//! The planning problem: services, profiles, a GPU kind and the rules a plan must follow.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::error::PlanError;
use crate::gpu::{GpuKind, KINDS_MAX};
use crate::profile::{OperatingPoint, Profiles};

/// A model with a rate and an SLO.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Service {
    /// Unique name.
    pub name: String,
    /// Name of the model in the profiles.
    pub model: String,
    /// Requests per second.
    pub rate: f64,
    /// SLO in milliseconds.
    pub slo_ms: f64,
}

/// Whether services share a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sharing {
    /// A slice runs one service.
    None,
    /// A slice may run several services in a duty cycle.
    Time,
}

/// The rules of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanRules {
    /// Share of the SLO that waiting and computing together may take. ParvaGPU reserves a tenth.
    pub slo_share: f64,
    /// Capacity beyond the rate, for bursts: 0.15 is 15 % more.
    pub headroom: f64,
    /// The headroom of services that have one of their own, by name.
    pub own_headroom: BTreeMap<String, f64>,
    /// Whether services share a slice.
    pub sharing: Sharing,
    /// Maximum number of processes in a slice.
    pub processes_max: u32,
}

impl Default for PlanRules {
    fn default() -> PlanRules {
        PlanRules {
            slo_share: 0.9,
            headroom: 0.0,
            own_headroom: BTreeMap::new(),
            sharing: Sharing::None,
            processes_max: 5,
        }
    }
}

impl PlanRules {
    /// The headroom of a service: its own, or that of all.
    pub fn headroom_of(&self, service: &str) -> f64 {
        self.own_headroom.get(service).copied().unwrap_or(self.headroom)
    }
}

/// Largest headroom: a service with more has a rate that is not its own.
const HEADROOM_MAX: f64 = 10.0;
/// Longest name of a service in bytes.
const NAME_LENGTH_MAX: usize = 256;

/// Slices of one service: more are an error in its rate or in its profile.
const SLICES_MAX: u32 = 1 << 20;

/// Input of a solver.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The GPU kind; the number of GPUs is not limited.
    pub gpu: &'static GpuKind,
    /// The services.
    pub services: Vec<Service>,
    /// The operating points of their models.
    pub profiles: Profiles,
    /// The rules.
    pub rules: PlanRules,
}

impl Service {
    /// Limit for waiting and computing together, in milliseconds.
    pub fn limit_ms(&self, rules: &PlanRules) -> f64 {
        self.slo_ms * rules.slo_share
    }

    /// Requests per second to provide capacity for.
    pub fn demand(&self, rules: &PlanRules) -> f64 {
        self.rate * (1.0 + rules.headroom_of(&self.name))
    }
}

impl Problem {
    /// Whether a point may run alone on a slice of that kind: a request that just missed a batch
    /// waits for one batch and is computed in the next, so twice the turn must stay below the
    /// limit. Latencies in tables are rounded, so a turn is at least what the throughput implies.
    pub fn fits_alone(&self, service: &Service, kind: usize, point: &OperatingPoint) -> bool {
        let slice = &self.gpu.slices[kind];
        point.gpcs == slice.gpcs
            && point.processes <= self.rules.processes_max
            && point.memory_mib.is_none_or(|memory| memory <= slice.memory_mib())
            && point.turn_ms() < service.limit_ms(&self.rules) / 2.0
    }

    /// Errors of the services that cannot be planned.
    pub fn faults(&self) -> Vec<(usize, PlanError)> {
        let mut names = BTreeSet::new();
        let mut faults = Vec::new();
        for (index, service) in self.services.iter().enumerate() {
            if !names.insert(service.name.as_str()) {
                faults.push((index, PlanError::Duplicate { service: service.name.clone() }));
            } else if let Some(error) = self.fault_of(service) {
                faults.push((index, error));
            }
        }
        faults
    }

    fn fault_of(&self, service: &Service) -> Option<PlanError> {
        let name = service.name.clone();
        let printable = !name.is_empty() && !name.chars().any(char::is_control);
        if !printable || name.len() > NAME_LENGTH_MAX {
            return Some(PlanError::BadName { name });
        }
        let headroom = self.rules.headroom_of(&name);
        if !(0.0..=HEADROOM_MAX).contains(&headroom) {
            return Some(PlanError::BadHeadroom { service: name, headroom });
        }
        if !(0.001..=1e9).contains(&service.rate) {
            return Some(PlanError::BadRate { service: name, rate: service.rate });
        }
        if !(0.001..=1e9).contains(&service.slo_ms) {
            return Some(PlanError::BadSlo { service: name, slo_ms: service.slo_ms });
        }
        let Some(points) = self.profiles.points(&service.model) else {
            let (model, known) = (service.model.clone(), self.profiles.names());
            return Some(PlanError::NoProfile { service: name, model, known });
        };
        let kinds = 0..self.gpu.slices.len();
        if kinds.clone().any(|kind| points.iter().any(|p| self.fits_alone(service, kind, p))) {
            let best = self.alone(service).throughput.into_iter().fold(0.0, f64::max);
            let slices = (service.demand(&self.rules) / best).ceil();
            let max = SLICES_MAX;
            return (slices > f64::from(max)).then_some(PlanError::TooManySlices {
                service: name,
                slices,
                max,
            });
        }
        let patient = Service { slo_ms: f64::MAX, ..service.clone() };
        let fastest = points
            .iter()
            .filter(|point| kinds.clone().any(|kind| self.fits_alone(&patient, kind, point)))
            .map(OperatingPoint::turn_ms)
            .fold(f64::INFINITY, f64::min);
        if fastest.is_infinite() {
            let (model, gpu) = (service.model.clone(), self.gpu.name);
            return Some(PlanError::NoPoint { service: name, model, gpu });
        }
        // The limit is strict, so the nearest SLO lies one step of a tenth above the exact
        // quotient.
        let nearest_ms = ((fastest * 2.0 / self.rules.slo_share) * 10.0).floor() / 10.0 + 0.1;
        Some(PlanError::Infeasible { service: name, slo_ms: service.slo_ms, nearest_ms })
    }

    /// The problem without the services that cannot be planned, and their errors; an error if none
    /// remains.
    pub fn without_faults(mut self) -> Result<(Problem, Vec<PlanError>), PlanError> {
        let faults = self.faults();
        let faulty: BTreeSet<usize> = faults.iter().map(|(index, _)| *index).collect();
        let mut index = 0;
        self.services.retain(|_| {
            index += 1;
            !faulty.contains(&(index - 1))
        });
        let mut errors: Vec<PlanError> = faults.into_iter().map(|(_, error)| error).collect();
        if self.services.is_empty() {
            return Err(if errors.is_empty() { PlanError::NoServices } else { errors.remove(0) });
        }
        Ok((self, errors))
    }

    /// The first error of a service, or [`PlanError::NoServices`].
    pub fn validate(&self) -> Result<(), PlanError> {
        match self.faults().into_iter().next() {
            Some((_, error)) => Err(error),
            None if self.services.is_empty() => Err(PlanError::NoServices),
            None => Ok(()),
        }
    }

    /// The services in the form solvers work on.
    pub(crate) fn demands(&self) -> Vec<ServiceDemand> {
        let mut known: BTreeMap<(&str, u64), Alone> = BTreeMap::new();
        let mut demands = Vec::with_capacity(self.services.len());
        for service in &self.services {
            let alone = known
                .entry((service.model.as_str(), service.slo_ms.to_bits()))
                .or_insert_with(|| self.alone(service));
            demands.push(ServiceDemand {
                rate: service.demand(&self.rules),
                limit_ms: service.limit_ms(&self.rules),
                throughput: alone.throughput,
                point: alone.point,
            });
        }
        demands
    }

    /// The best throughput on each kind of slice within the SLO, and its point.
    fn alone(&self, service: &Service) -> Alone {
        let mut best = Alone { throughput: [0.0; KINDS_MAX], point: [0; KINDS_MAX] };
        let points = self.profiles.points(&service.model).unwrap_or_default();
        for (index, point) in points.iter().enumerate() {
            for kind in 0..self.gpu.slices.len() {
                if point.throughput > best.throughput[kind] && self.fits_alone(service, kind, point)
                {
                    best.throughput[kind] = point.throughput;
                    best.point[kind] = index as u32;
                }
            }
        }
        best
    }
}

#[derive(Clone, Copy)]
struct Alone {
    throughput: [f64; KINDS_MAX],
    point: [u32; KINDS_MAX],
}

/// A service in the form solvers work on.
#[derive(Clone, Debug)]
pub(crate) struct ServiceDemand {
    /// Requests per second, including headroom.
    pub(crate) rate: f64,
    /// Milliseconds for waiting and computing.
    pub(crate) limit_ms: f64,
    /// Requests per second of a whole slice of each kind; zero if none meets the SLO.
    pub(crate) throughput: [f64; KINDS_MAX],
    /// Index of the point with this throughput among the model's points.
    pub(crate) point: [u32; KINDS_MAX],
}

/// Services whose models share a prefix, planned as one service: the sum of their rates, the
/// tightest of their SLOs.
///
/// `members` are indices of services; the group takes the name and model given, whose profile is
/// that of the shared prefix with its suffixes.
pub fn merge_prefix_group(
    services: &mut Vec<Service>,
    members: &[usize],
    name: &str,
    model: &str,
) -> Result<(), PlanError> {
    let known = members.iter().all(|&member| member < services.len());
    if members.is_empty() || !known {
        return Err(PlanError::BadQuery {
            what: format!("prefix group '{name}' names services that are not there"),
        });
    }
    let group = Service {
        name: name.to_string(),
        model: model.to_string(),
        rate: members.iter().map(|&member| services[member].rate).sum(),
        slo_ms: members.iter().map(|&m| services[m].slo_ms).fold(f64::INFINITY, f64::min),
    };
    let mut index = 0;
    services.retain(|_| {
        index += 1;
        !members.contains(&(index - 1))
    });
    services.push(group);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(throughput: f64) -> Problem {
        let columns = "model,mig_gpcs,batch,procs,throughput_total_rps,latency_ms";
        let text = format!("{columns}\na,1,1,1,{throughput},1\n");
        let (name, model) = ("s".to_string(), "a".to_string());
        Problem {
            gpu: GpuKind::find("a100-80gb").unwrap(),
            services: vec![Service { name, model, rate: 100.0, slo_ms: 1e9 }],
            profiles: Profiles::from_csv(&text).unwrap(),
            rules: PlanRules::default(),
        }
    }

    #[test]
    fn names_are_printable_and_headroom_is_a_share() {
        let mut bad = problem(10.0);
        // It ended the comment of a command, and the rest ran as one.
        bad.services[0].name = "s\nreboot".to_string();
        assert!(matches!(bad.validate(), Err(PlanError::BadName { .. })));
        bad.services[0].name = "s".to_string();
        bad.rules.own_headroom.insert("s".to_string(), 0.5);
        assert!(bad.validate().is_ok());
        assert_eq!(bad.services[0].demand(&bad.rules), 150.0);
        bad.rules.own_headroom.insert("s".to_string(), f64::NAN);
        assert!(matches!(bad.validate(), Err(PlanError::BadHeadroom { .. })));
    }

    #[test]
    fn services_beyond_all_clusters_are_refused() {
        assert!(problem(0.001).validate().is_ok());
        // It was planned slice by slice until the memory ended.
        let error = problem(1e-5).validate().unwrap_err();
        assert!(matches!(error, PlanError::TooManySlices { .. }), "{error}");
    }
}
