//! Machines, demands and placements: the data that the steps of planning share.

use std::collections::{BTreeMap, BTreeSet, HashMap};

/// A machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// Its name.
    pub name: String,
    /// Its kind of device.
    pub device: String,
    /// Memory for models; 0 for no limit.
    pub memory_bytes: u64,
}

/// A model with its rate and SLO.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Demand {
    /// The model.
    pub model: String,
    /// Requests per second.
    pub rate: f64,
    /// Its SLO in milliseconds.
    pub slo_ms: f64,
    /// Whether it is served first where capacity is short.
    pub real_time: bool,
    /// Memory it needs.
    pub memory_bytes: u64,
    /// The models it shares a prefix with.
    pub prefix_group: Option<PrefixGroup>,
}

/// Models under prefix batching.
#[derive(Clone, Debug, PartialEq)]
pub struct PrefixGroup {
    /// Its name, which is that of its first model.
    pub name: String,
    /// The prefix's share of the work.
    pub share: f64,
}

/// A model's part of a duty cycle.
#[derive(Clone, Debug, PartialEq)]
pub struct PlacedPart {
    /// The model.
    pub model: String,
    /// Requests per batch.
    pub batch: u32,
    /// Planned requests per second; 0 for a standby.
    pub rate: f64,
}

/// The duty cycle of a machine, and its standby models.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DutyCycle {
    /// Its length in milliseconds; 0 when nothing is served.
    pub cycle_ms: f64,
    /// Its parts, by model.
    pub parts: Vec<PlacedPart>,
}

impl DutyCycle {
    /// The model it serves, where it serves only one.
    pub fn only(&self) -> Option<&PlacedPart> {
        let mut serves = self.parts.iter().filter(|part| part.rate > 0.0);
        serves.next().filter(|_| serves.next().is_none())
    }
}

/// A placement.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Placement {
    /// By machine; idle machines without models are not in it.
    pub duty_cycles: BTreeMap<String, DutyCycle>,
    /// Lower bound on the number of machines.
    pub bound: f64,
    /// Planned rates over demanded ones.
    pub scale: f64,
    /// Models whose SLO no batch meets.
    pub unattainable: Vec<String>,
}

/// Milliseconds by batch size, of a model on a kind of device.
pub type Curve = Vec<(u32, f64)>;

/// Known curves, by device kind and model.
pub type Curves = HashMap<(String, String), Curve>;

/// Models that machines hold now.
pub type LoadedModels = BTreeMap<String, BTreeSet<String>>;

impl Placement {
    /// Number of machines that serve.
    pub fn used(&self) -> usize {
        let serves = |cycle: &&DutyCycle| cycle.parts.iter().any(|part| part.rate > 0.0);
        self.duty_cycles.values().filter(serves).count()
    }

    /// Planned rates by model.
    pub fn rates(&self) -> BTreeMap<&str, f64> {
        let mut rates = BTreeMap::new();
        for part in self.duty_cycles.values().flat_map(|cycle| &cycle.parts) {
            *rates.entry(part.model.as_str()).or_insert(0.0) += part.rate;
        }
        rates
    }

    /// The minimum of planned over demanded rates; infinite without demands.
    pub fn slack(&self, demands: &[Demand]) -> f64 {
        let rates = self.rates();
        let slack = |demand: &Demand| {
            rates.get(demand.model.as_str()).copied().unwrap_or(0.0) / demand.rate.max(1e-9)
        };
        demands.iter().map(slack).fold(f64::INFINITY, f64::min)
    }

    /// Whether it uses only these machines, and places exactly these models.
    pub fn covers(&self, machines: &[Machine], demands: &[Demand]) -> bool {
        let known: BTreeSet<&str> = machines.iter().map(|machine| machine.name.as_str()).collect();
        let wanted: BTreeSet<&str> = demands.iter().map(|demand| demand.model.as_str()).collect();
        let placed: BTreeSet<&str> = self.rates().into_keys().collect();
        self.duty_cycles.keys().all(|name| known.contains(name.as_str())) && placed == wanted
    }
}

/// Share of an SLO that waiting and running together are planned to take; the remainder absorbs
/// variance.
pub(crate) const SLO_SHARE: f64 = 0.9;
