//! Machines, demands and placements: the data that the steps of planning share.

use std::collections::{BTreeMap, BTreeSet, HashMap};

/// A machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// Its name.
    pub name: String,
    /// Its kind.
    pub device: String,
    /// Memory for models; 0 for no bound.
    pub memory_bytes: u64,
}

/// A model with what is asked of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Demand {
    /// The model.
    pub model: String,
    /// Requests a second.
    pub rate: f64,
    /// Its objective in milliseconds.
    pub slo_ms: f64,
    /// Whether it goes before others where there is too little for all.
    pub real_time: bool,
    /// Memory it takes.
    pub memory_bytes: u64,
    /// Models it begins alike with.
    pub prefix_group: Option<PrefixGroup>,
}

/// The family of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct PrefixGroup {
    /// Its name: that of its first model.
    pub name: String,
    /// Share of the work that its beginning takes.
    pub share: f64,
}

/// A model's part of a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct PlacedPart {
    /// The model.
    pub model: String,
    /// Requests that one turn takes.
    pub batch: u32,
    /// Requests a second that are planned to come; 0 for a standby.
    pub rate: f64,
}

/// What a machine does.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DutyCycle {
    /// Length of the duty cycle in milliseconds; 0 when nothing is served.
    pub cycle_ms: f64,
    /// Its parts, by model.
    pub parts: Vec<PlacedPart>,
}

impl DutyCycle {
    /// What it serves, where that is one model.
    pub fn only(&self) -> Option<&PlacedPart> {
        let mut serves = self.parts.iter().filter(|part| part.rate > 0.0);
        serves.next().filter(|_| serves.next().is_none())
    }
}

/// A placement.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Placement {
    /// By machine; one without work is not in it.
    pub duty_cycles: BTreeMap<String, DutyCycle>,
    /// Fewer machines cannot do.
    pub bound: f64,
    /// Planned rates over those asked for.
    pub scale: f64,
    /// Models whose objective no batch meets.
    pub unattainable: Vec<String>,
}

/// Latency by batch size of a model on a kind of device.
pub type Curve = Vec<(u32, f64)>;

/// The curves that are known, by device kind and model.
pub type Curves = HashMap<(String, String), Curve>;

/// What machines hold now.
pub type LoadedModels = BTreeMap<String, BTreeSet<String>>;

impl Placement {
    /// Machines that serve.
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

    /// The least of planned over asked rates; infinite when nothing is asked.
    pub fn slack(&self, demands: &[Demand]) -> f64 {
        let rates = self.rates();
        let slack = |demand: &Demand| {
            rates.get(demand.model.as_str()).copied().unwrap_or(0.0) / demand.rate.max(1e-9)
        };
        demands.iter().map(slack).fold(f64::INFINITY, f64::min)
    }

    /// Whether it speaks of exactly these machines' and models' names.
    pub fn covers(&self, machines: &[Machine], demands: &[Demand]) -> bool {
        let known: BTreeSet<&str> = machines.iter().map(|machine| machine.name.as_str()).collect();
        let wanted: BTreeSet<&str> = demands.iter().map(|demand| demand.model.as_str()).collect();
        let placed: BTreeSet<&str> = self.rates().into_keys().collect();
        self.duty_cycles.keys().all(|name| known.contains(name.as_str())) && placed == wanted
    }
}

/// Share of an objective that waiting and computing together are planned to take; the rest is for chance.
pub(crate) const SLO_SHARE: f64 = 0.9;
