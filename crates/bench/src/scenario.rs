//! A scenario: clients, a GPU, a policy and faults.

use std::path::Path;

use base::Nanos;
use device::sim::{Fault, FaultKind, ProfileSet, builtin};
use model::config::Class;
use runtime::order::{self, ExecutionOrder};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::arrival::Arrival;
use crate::scenario_check::{BadValue, ValueChecks};

/// Why a scenario cannot run.
#[derive(Debug, Error)]
pub enum ScenarioError {
    /// A file cannot be read.
    #[error("{0}: {1}")]
    Read(String, std::io::Error),
    /// A scenario is not valid.
    #[error("{0}: {1}")]
    Parse(String, toml::de::Error),
    /// A profile or trace is not valid.
    #[error("{0}: {1}")]
    Json(String, serde_json::Error),
    /// A value of a file is out of range.
    #[error("{file}, line {line}: {bad}")]
    Bad {
        /// The file.
        file: String,
        /// The line.
        line: usize,
        /// The value.
        bad: BadValue,
    },
    /// A value of a scenario that is not from a file is out of range.
    #[error("scenario: {0}")]
    Value(BadValue),
    /// A name that does not exist.
    #[error("there is no {kind} '{name}'; known: {known}")]
    Unknown {
        /// What was looked up.
        kind: &'static str,
        /// The name.
        name: String,
        /// The names that exist.
        known: String,
    },
}

/// A client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientSpec {
    /// Its name.
    pub name: String,
    /// The model it requests.
    pub model: String,
    /// `real_time` or `best_effort`.
    pub class: Class,
    /// 1 is the highest.
    #[serde(default = "first")]
    pub priority: u32,
    /// Deadline of a request in milliseconds.
    #[serde(default)]
    pub deadline_ms: Option<f64>,
    /// Whether it skips arrivals while it waits for a reply.
    #[serde(default)]
    pub one_outstanding: bool,
    /// Percent of requests that are cancelled after a random time.
    #[serde(default)]
    pub cancel_percent: u32,
    /// Its arrival process.
    pub arrival: Arrival,
}

fn first() -> u32 {
    1
}

/// A fault at a time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FaultAt {
    /// When, in milliseconds.
    pub at_ms: f64,
    /// Kind of fault.
    #[serde(flatten)]
    pub kind: FaultKind,
}

/// Longest run in seconds.
pub const SECONDS_MAX: f64 = 1e6;

/// A scenario.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Scenario {
    /// Its name.
    pub name: String,
    /// `mi50`, `h200`, or the path of a profile set in JSON.
    pub gpu: String,
    /// The execution policy.
    pub policy: String,
    /// Seconds during which clients send requests.
    pub seconds: f64,
    /// Seed of everything random.
    pub seed: u64,
    /// Best-effort share, in percent.
    pub best_effort_share_percent: u32,
    /// Earliest deadline first instead of first in, first out.
    pub earliest_deadline_first: bool,
    /// Execution order of real time: `edf`, `fifo`, `least_laxity`. Overrides
    /// `earliest_deadline_first`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub execution_order: Option<String>,
    /// Queue capacity of a model.
    pub queue_capacity: usize,
    /// Streams of best effort; 0 for one per best-effort client.
    pub best_effort_streams: usize,
    /// Megabytes for weights; the GPU's own when absent.
    pub memory_mb: Option<u64>,
    /// Preemption level of the device instead of the profile's.
    pub level: Option<u8>,
    /// Clients.
    pub clients: Vec<ClientSpec>,
    /// Faults.
    pub faults: Vec<FaultAt>,
}

impl Default for Scenario {
    fn default() -> Self {
        Scenario {
            name: String::new(),
            gpu: "mi50".to_string(),
            policy: "atoll".to_string(),
            seconds: 1.0,
            seed: 1,
            best_effort_share_percent: 0,
            earliest_deadline_first: true,
            execution_order: None,
            queue_capacity: 256,
            best_effort_streams: 0,
            memory_mb: None,
            level: None,
            clients: Vec::new(),
            faults: Vec::new(),
        }
    }
}

impl Scenario {
    /// Reads a TOML file.
    pub fn read(path: &Path) -> Result<Scenario, ScenarioError> {
        let name = path.display().to_string();
        let text =
            std::fs::read_to_string(path).map_err(|err| ScenarioError::Read(name.clone(), err))?;
        Scenario::from_toml(&name, &text)
    }

    /// Reads the text of a file and checks every value.
    pub fn from_toml(file: &str, text: &str) -> Result<Scenario, ScenarioError> {
        let scenario: Scenario =
            toml::from_str(text).map_err(|err| ScenarioError::Parse(file.to_string(), err))?;
        let checked = scenario.check().and_then(|()| {
            let mut checks = ValueChecks::default();
            checks.holds(!scenario.clients.is_empty(), "clients", "is empty; nothing would run");
            scenario.check_names(&mut checks);
            unknown_fault_keys(text, &mut checks);
            checks.result()
        });
        checked.map_err(|bad| {
            let (file, line) = (file.to_string(), bad.line_in(text));
            ScenarioError::Bad { file, line, bad }
        })?;
        Ok(scenario)
    }

    /// Checks the names of a file, which reports tell clients apart by.
    fn check_names(&self, checks: &mut ValueChecks) {
        if !self.name.is_empty() {
            checks.name("name", &self.name);
        }
        let names = self.clients.iter().map(|client| client.name.as_str());
        checks.names(|index| format!("clients[{index}].name"), names);
        for (index, client) in self.clients.iter().enumerate() {
            checks.name(format_args!("clients[{index}].model"), &client.model);
        }
    }

    /// Checks every value: what passes has an end.
    pub fn check(&self) -> Result<(), BadValue> {
        let mut checks = ValueChecks::default();
        checks.number("seconds", self.seconds, (1e-6, SECONDS_MAX));
        let share = u64::from(self.best_effort_share_percent);
        checks.count("best_effort_share_percent", share, (0, 100));
        checks.count("queue_capacity", self.queue_capacity as u64, (1, 1 << 20));
        checks.count("best_effort_streams", self.best_effort_streams as u64, (0, 64));
        checks.count("memory_mb", self.memory_mb.unwrap_or(1), (1, 1_000_000_000));
        checks.count("level", u64::from(self.level.unwrap_or(0)), (0, 3));
        checks.count("clients", self.clients.len() as u64, (0, 10_000));
        for (index, client) in self.clients.iter().enumerate() {
            let field = |name: &str| format!("clients[{index}].{name}");
            checks.count(field("priority"), u64::from(client.priority), (1, u64::from(u32::MAX)));
            checks.count(field("cancel_percent"), u64::from(client.cancel_percent), (0, 100));
            if let Some(deadline_ms) = client.deadline_ms {
                checks.number(field("deadline_ms"), deadline_ms, (1e-6, 1e9));
            }
            client.arrival.check(&field("arrival"), self.seconds, &mut checks);
        }
        for (index, fault) in self.faults.iter().enumerate() {
            let field = |name: &str| format!("faults[{index}].{name}");
            checks.number(field("at_ms"), fault.at_ms, (0.0, SECONDS_MAX * 1e3));
            match fault.kind {
                FaultKind::SlowKernel { factor } => {
                    checks.number(field("factor"), factor, (1e-3, 1e6));
                }
                FaultKind::CopyStall { span_us } => {
                    checks.count(field("span_us"), span_us, (0, 1_000_000_000));
                }
                FaultKind::LostCompletion | FaultKind::DeviceReset => {}
            }
        }
        checks.result()
    }

    /// The profiles of its GPU.
    pub fn profiles(&self) -> Result<ProfileSet, ScenarioError> {
        let mut set = match builtin::by_name(&self.gpu) {
            Some(set) => set,
            None => read_profiles(&self.gpu)?,
        };
        if let Some(level) = self.level {
            set.gpu.level = level;
        }
        if let Some(mb) = self.memory_mb {
            set.gpu.memory_bytes = mb * 1_000_000;
        }
        Ok(set)
    }

    /// The execution order inside a real-time priority.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn order(&self) -> Result<&'static dyn ExecutionOrder, ScenarioError> {
        let name = match (&self.execution_order, self.earliest_deadline_first) {
            (Some(name), _) => name.as_str(),
            (None, true) => "edf",
            (None, false) => "fifo",
        };
        order::by_name(name).ok_or_else(|| ScenarioError::Unknown {
            kind: "execution order",
            name: name.to_string(),
            known: order::names(),
        })
    }

    /// Its faults, for the device.
    pub fn device_faults(&self) -> Vec<Fault> {
        let of =
            |fault: &FaultAt| Fault { at: Nanos((fault.at_ms * 1e6) as u64), kind: fault.kind };
        self.faults.iter().map(of).collect()
    }

    /// The same without its best-effort clients.
    pub fn real_time_alone(&self) -> Scenario {
        let mut alone = self.clone();
        alone.clients.retain(|client| client.class == Class::RealTime);
        alone.policy = "rt_only".to_string();
        alone
    }
}

/// Faults flatten their kind, so that their reader cannot refuse unknown keys itself.
fn unknown_fault_keys(text: &str, checks: &mut ValueChecks) {
    let table = text.parse::<toml::Table>().unwrap_or_default();
    let faults = table.get("faults").and_then(toml::Value::as_array).into_iter().flatten();
    for (index, fault) in faults.enumerate() {
        let kind = fault.get("kind").and_then(toml::Value::as_str).unwrap_or_default();
        let own = match kind {
            "slow_kernel" => "factor",
            "copy_stall" => "span_us",
            _ => "kind",
        };
        for key in fault.as_table().into_iter().flat_map(toml::Table::keys) {
            let known = ["at_ms", "kind", own].contains(&key.as_str());
            checks.holds(known, format_args!("faults[{index}].{key}"), "is not known");
        }
    }
}

fn read_profiles(path: &str) -> Result<ProfileSet, ScenarioError> {
    let text = std::fs::read_to_string(path).map_err(|err| match err.kind() {
        std::io::ErrorKind::NotFound => ScenarioError::Unknown {
            kind: "GPU or profile file",
            name: path.to_string(),
            known: "mi50, h200".to_string(),
        },
        _ => ScenarioError::Read(path.to_string(), err),
    })?;
    serde_json::from_str(&text).map_err(|err| ScenarioError::Json(path.to_string(), err))
}
