//! DISB, the benchmark of REEF (OSDI 2022, Table 2): workloads A to E as scenarios, REAL from a
//! trace file.

use std::path::Path;

use device::sim::builtin;
use model::config::Class;
use serde::Deserialize;

use crate::arrival::Arrival;
use crate::recorded_run::RecordedRun;
use crate::report::SimulationReport;
use crate::scenario::{ClientSpec, Scenario, ScenarioError};
use crate::simulation::{self, SimulationOptions};

/// The five models, in the paper's order.
pub const MODELS: [&str; 5] = ["resnet152", "densenet201", "vgg19", "inceptionv3", "distilbert"];

/// The workloads that need no file.
pub const WORKLOADS: [&str; 5] = ["A", "B", "C", "D", "E"];

/// Options of a workload.
#[derive(Clone, Debug)]
pub struct DisbOptions {
    /// `mi50`, `h200` or a profile file.
    pub gpu: String,
    /// Seconds; 60 in the paper.
    pub seconds: f64,
    /// Seed of the Poisson arrivals.
    pub seed: u64,
    /// Whether rates are scaled so that real time alone uses the same share of this GPU as of the
    /// paper's.
    pub scaled: bool,
}

fn client(class: Class, model: &str, arrival: Arrival) -> ClientSpec {
    ClientSpec {
        name: format!("{model}_{}", class.as_str()),
        model: model.to_string(),
        class,
        priority: 1,
        deadline_ms: None,
        one_outstanding: true,
        cancel_percent: 0,
        arrival,
    }
}

/// Shares of the device, in percent, that real time alone used on the paper's GPU (Table 2).
pub const SHARES_PERCENT: [(&str, f64); 6] =
    [("A", 44.0), ("B", 97.0), ("C", 44.0), ("D", 70.0), ("E", 70.0), ("REAL", 32.0)];

/// Share of the device of the real-time model of a pair.
const PAIR_SHARE_PERCENT: f64 = 50.0;

/// Share of the device, in percent, that real time of workload `name` uses alone at scaled rates.
pub fn share_percent(name: &str) -> Option<f64> {
    let published = SHARES_PERCENT.iter().find(|(other, _)| *other == name);
    published.map(|(_, percent)| *percent).or_else(|| pair(name).map(|_| PAIR_SHARE_PERCENT))
}

/// Workloads of one real-time and one best-effort model each, such as `vgg19+resnet152`.
pub fn pairs() -> Vec<String> {
    let beside = |real_time: &str| MODELS.map(|best_effort| format!("{real_time}+{best_effort}"));
    MODELS.iter().flat_map(|real_time| beside(real_time)).collect()
}

fn pair(name: &str) -> Option<(&str, &str)> {
    let (real_time, best_effort) = name.split_once('+')?;
    let known = MODELS.contains(&real_time) && MODELS.contains(&best_effort);
    known.then_some((real_time, best_effort))
}

/// A bar of a figure: its name, and its published values by workload.
pub type Published = (&'static str, &'static [(&'static str, f64)]);

/// Overall throughput over that of real time alone on the paper's MI50 (Figure 11b and section 7.2;
/// C of REEF is given as close to GPU streams, whose range begins there).
pub const PUBLISHED_GAINS: [Published; 3] = [
    (
        "REEF, published",
        &[("A", 1.60), ("B", 1.14), ("C", 3.9), ("D", 3.00), ("E", 2.96), ("REAL", 7.7)],
    ),
    ("SEQ, published", &[("A", 1.46), ("B", 0.96), ("REAL", 3.6)]),
    ("GPUStreams, published", &[("A", 1.66), ("B", 0.76), ("REAL", 8.3)]),
];

/// Mean real-time latency over that of real time alone on the same GPU (Figure 11a and section 7.2;
/// REEF's from C on are upper bounds).
pub const PUBLISHED_LATENCIES: [Published; 3] = [
    (
        "REEF, published",
        &[("A", 1.005), ("B", 1.01), ("C", 1.015), ("D", 1.015), ("E", 1.015), ("REAL", 1.02)],
    ),
    ("SEQ, published", &[("A", 1.95), ("B", 1.12), ("REAL", 1.35)]),
    ("GPUStreams, published", &[("A", 1.84), ("B", 1.70), ("REAL", 3.35)]),
];

/// The clients of a workload or pair at the published rates, not staggered.
pub fn clients(name: &str) -> Option<Vec<ClientSpec>> {
    let uniform = |rate: f64| Arrival::Uniform { rate, phase_us: 0 };
    let real_time: Vec<ClientSpec> = match name {
        "A" | "C" => vec![client(Class::RealTime, "vgg19", uniform(100.0))],
        "B" => vec![client(Class::RealTime, "vgg19", uniform(220.0))],
        "D" => MODELS.map(|model| client(Class::RealTime, model, uniform(20.0))).into(),
        "E" => {
            let arrival = || Arrival::Poisson { rate: 20.0 };
            MODELS.map(|model| client(Class::RealTime, model, arrival())).into()
        }
        name => vec![client(Class::RealTime, pair(name)?.0, uniform(100.0))],
    };
    let best_effort: &[&str] = match (name, pair(name)) {
        ("A" | "B", _) => &["resnet152"],
        (_, Some((_, best_effort))) => &[best_effort],
        _ => &MODELS,
    };
    let closed =
        |model: &&str| client(Class::BestEffort, model, Arrival::ClosedLoop { think_us: 0 });
    Some(real_time.into_iter().chain(best_effort.iter().map(closed)).collect())
}

/// The scenario of a workload or pair.
pub fn workload(name: &str, options: &DisbOptions) -> Option<Scenario> {
    let mut scenario = scenario(name, clients(name)?, options);
    if options.scaled {
        scale(&mut scenario);
    }
    stagger(&mut scenario);
    Some(scenario)
}

fn scenario(name: &str, clients: Vec<ClientSpec>, options: &DisbOptions) -> Scenario {
    Scenario {
        name: format!("DISB {name}"),
        gpu: options.gpu.clone(),
        seconds: options.seconds,
        seed: options.seed,
        clients,
        ..Scenario::default()
    }
}

/// Scales the real-time rates by how much faster this GPU runs the real-time models than the
/// paper's.
fn scale(scenario: &mut Scenario) {
    let Ok(here) = scenario.profiles() else { return };
    let paper = builtin::mi50();
    let total = |set: &device::sim::ProfileSet| -> f64 {
        let rt = scenario.clients.iter().filter(|client| client.class == Class::RealTime);
        let alone = rt.filter_map(|client| set.model(&client.model)).map(|m| m.alone(&set.gpu).0);
        alone.sum::<u64>() as f64
    };
    let factor = total(&paper) / total(&here).max(1.0);
    speed_up(&mut scenario.clients, factor);
    if scenario.clients.iter().any(|client| matches!(client.arrival, Arrival::Trace { .. })) {
        scenario.seconds /= factor;
    }
}

/// Multiplies the rates of real time by `factor`.
pub fn speed_up(clients: &mut [ClientSpec], factor: f64) {
    for client in clients.iter_mut().filter(|client| client.class == Class::RealTime) {
        match &mut client.arrival {
            Arrival::Uniform { rate, .. } | Arrival::Poisson { rate } => *rate *= factor,
            Arrival::Trace { times_ms } => times_ms.iter_mut().for_each(|ms| *ms /= factor),
            _ => {}
        }
    }
}

/// Repeats traces of `period_s` seconds until `seconds` have passed.
pub fn repeat(clients: &mut [ClientSpec], period_s: f64, seconds: f64) {
    if period_s <= 0.0 {
        return;
    }
    for client in clients {
        let Arrival::Trace { times_ms } = &mut client.arrival else { continue };
        // Arrivals after the end of the workload belong to no repetition.
        let once: Vec<f64> = times_ms.iter().copied().filter(|ms| *ms < period_s * 1e3).collect();
        let rounds = (0..(seconds / period_s).ceil() as u64).map(|round| round as f64 * period_s);
        let later = |start_s: f64| once.iter().map(move |ms| ms + start_s * 1e3);
        *times_ms = rounds.flat_map(later).filter(|ms| *ms < seconds * 1e3).collect();
    }
}

fn stagger(scenario: &mut Scenario) {
    let Ok(set) = scenario.profiles() else { return };
    let alone_us = |model: &str| set.model(model).map_or(0, |m| m.alone(&set.gpu).as_micros());
    stagger_by(&mut scenario.clients, alone_us);
}

/// Delays clients of equal rate, each by the latencies alone of those before it.
pub fn stagger_by(clients: &mut [ClientSpec], alone_us: impl Fn(&str) -> u64) {
    let mut offset = 0;
    for client in clients {
        if let Arrival::Uniform { phase_us, .. } = &mut client.arrival {
            *phase_us = offset;
            offset += alone_us(&client.model);
        }
    }
}

#[derive(Deserialize)]
struct DisbFile {
    time: f64,
    tasks: Vec<DisbTask>,
}

#[derive(Deserialize)]
struct DisbTask {
    id: String,
    load: DisbLoad,
    client: DisbClient,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum DisbLoad {
    Continuous,
    Periodic { frequency: f64 },
    Poisson { frequency: f64 },
    Trace { trace: Vec<f64> },
}

#[derive(Deserialize)]
struct DisbClient {
    model_name: String,
}

/// Reads a workload in DISB's JSON: its clients, and its length in seconds.
pub fn read_clients(path: &Path) -> Result<(Vec<ClientSpec>, f64), ScenarioError> {
    let shown = path.display().to_string();
    let text =
        std::fs::read_to_string(path).map_err(|err| ScenarioError::Read(shown.clone(), err))?;
    let file: DisbFile =
        serde_json::from_str(&text).map_err(|err| ScenarioError::Json(shown, err))?;
    let of = |task: &DisbTask| {
        let class = if task.id.ends_with("_rt") { Class::RealTime } else { Class::BestEffort };
        let arrival = match &task.load {
            DisbLoad::Continuous => Arrival::ClosedLoop { think_us: 0 },
            DisbLoad::Periodic { frequency } => Arrival::Uniform { rate: *frequency, phase_us: 0 },
            DisbLoad::Poisson { frequency } => Arrival::Poisson { rate: *frequency },
            DisbLoad::Trace { trace } => Arrival::Trace { times_ms: trace.clone() },
        };
        client(class, task.client.model_name.trim_end_matches("-imagenet"), arrival)
    };
    Ok((file.tasks.iter().map(of).collect(), file.time))
}

/// Reads a workload in DISB's JSON.
pub fn read(path: &Path, name: &str, options: &DisbOptions) -> Result<Scenario, ScenarioError> {
    let (clients, seconds) = read_clients(path)?;
    let mut scenario = scenario(name, clients, options);
    scenario.seconds = scenario.seconds.min(seconds);
    if options.scaled {
        scale(&mut scenario);
    }
    stagger(&mut scenario);
    Ok(scenario)
}

/// Runs a workload under each policy, and compares with real time alone. Records so many spans of
/// each run.
pub fn compare(
    workload: &str,
    scenario: &Scenario,
    policies: &[String],
    recorded_spans: usize,
) -> Result<Vec<(SimulationReport, Option<RecordedRun>)>, ScenarioError> {
    let options = SimulationOptions::default();
    let alone = simulation::run(&scenario.real_time_alone(), options)?;
    let run = |policy: &String| {
        let mut scenario = scenario.clone();
        scenario.policy.clone_from(policy);
        let options = SimulationOptions { recorded_spans, ..options };
        let mut outcome = simulation::run(&scenario, options)?;
        let recorded = outcome.recorded.take().map(|run| RecordedRun {
            name: format!("{workload} under {policy}, {}", run.name),
            ..run
        });
        Ok((SimulationReport::new(workload, policy, &outcome, &alone), recorded))
    };
    policies.iter().map(run).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_are_repeated() {
        let arrival = Arrival::Trace { times_ms: vec![0.0, 500.0, 1_999.0, 2_500.0] };
        let mut clients = vec![client(Class::RealTime, "vgg19", arrival)];
        repeat(&mut clients, 2.0, 5.0);
        let Arrival::Trace { times_ms } = &clients[0].arrival else { panic!("no trace") };
        let want = [0.0, 500.0, 1_999.0, 2_000.0, 2_500.0, 3_999.0, 4_000.0, 4_500.0];
        assert_eq!(*times_ms, want);
    }

    #[test]
    fn workloads_have_the_published_clients() {
        let options = DisbOptions { gpu: "mi50".into(), seconds: 1.0, seed: 1, scaled: false };
        let counts = WORKLOADS.map(|name| {
            let scenario = workload(name, &options).unwrap();
            let rt = scenario.clients.iter().filter(|c| c.class == Class::RealTime).count();
            (rt, scenario.clients.len() - rt)
        });
        assert_eq!(counts, [(1, 1), (1, 1), (1, 5), (5, 5), (5, 5)]);
        assert!(workload("F", &options).is_none());
        assert!(workload("vgg19+unknown", &options).is_none());
        let names: std::collections::BTreeSet<String> = pairs().into_iter().collect();
        assert_eq!(names.len(), 25);
        for name in names {
            let clients = workload(&name, &options).unwrap().clients;
            assert_eq!(format!("{}+{}", clients[0].model, clients[1].model), name);
            assert_eq!((clients[0].class, clients[1].class), (Class::RealTime, Class::BestEffort));
            assert_eq!(share_percent(&name), Some(50.0));
        }
    }
}
