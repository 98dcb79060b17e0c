//! Batching policies in real time: real models on a real device under open load, one policy after
//! another.
//!
//! Requests arrive at random times that do not depend on replies; latency counts from when a
//! request was due. Each request carries one of several inputs, and replies are compared with the
//! output of that input alone.

mod generator;
mod report;

use std::sync::Arc;
use std::time::Duration;

use base::{Clock, MonotonicClock, Nanos};
use device::{Device, Program};
use model::Tensor;
use model::config::{Batching, BatchingPolicy, Class, CopyTime, ModelConfig};
use runtime::{Node, NodeOptions};

use self::generator::{LoadPhase, RequestGenerator};
use self::report::idle_pct;
pub use self::report::{BatchingReport, NetworkReport, PhaseResult, PolicyResult, charts, table};
use crate::live::LiveError;

/// How long requests may take to end after a phase.
const DRAIN: Duration = Duration::from_secs(20);

/// Queue capacity, large enough that no request is refused.
const QUEUE: usize = 60_000;

/// A model on the device, with inputs for its requests.
pub struct LoadModel {
    /// Its name.
    pub name: String,
    /// The loaded model.
    pub program: Arc<dyn Program>,
    /// Inputs of one row, each one tensor per input of the model.
    pub inputs: Vec<Vec<Tensor>>,
}

/// How policies are compared.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Seconds of a phase.
    pub seconds: f64,
    /// Seed of arrivals.
    pub seed: u64,
    /// SLO of 99 of 100 replies; three times a batch of 32 if absent.
    pub slo_ms: Option<f64>,
    /// Number of rates that are tried to find the highest within the SLO.
    pub probes: usize,
    /// Low and high load as shares of the device's throughput.
    pub shares: (f64, f64),
    /// Batches that may run at the same time.
    pub concurrent_batches: usize,
}

/// A batching policy with its settings.
#[derive(Clone, Debug)]
pub struct BatchingSetting {
    /// Name in reports.
    pub name: String,
    /// Its settings.
    pub batching: Batching,
}

/// Policies by the names users give. `window` becomes one setting per wait, because its wait must
/// be tuned.
pub fn settings(name: &str, waits_us: &[u64]) -> Option<Vec<BatchingSetting>> {
    let of = |policy| Batching { policy, ..Batching::default() };
    let one = |batching| vec![BatchingSetting { name: name.to_string(), batching }];
    Some(match name {
        "auto" => one(of(BatchingPolicy::Auto)),
        "elastic" => one(of(BatchingPolicy::Elastic)),
        "adaptive" => one(of(BatchingPolicy::Adaptive)),
        "none" => one(of(BatchingPolicy::None)),
        "auto_late" => one(Batching { copy: CopyTime::Late, ..of(BatchingPolicy::Auto) }),
        "window" => {
            let window = |wait: &u64| BatchingSetting {
                name: format!("window {wait} us"),
                batching: Batching {
                    max_wait_us: *wait,
                    copy: CopyTime::Late,
                    ..of(BatchingPolicy::Window)
                },
            };
            waits_us.iter().map(window).collect()
        }
        _ => return None,
    })
}

/// Names that [`settings`] accepts.
pub const NAMES: [&str; 6] = ["window", "elastic", "adaptive", "auto", "auto_late", "none"];

/// Records when batches begin and end on the device, in microseconds.
pub struct DeviceTimeline {
    /// Starts recording; whether it could.
    pub begin: Box<dyn Fn() -> bool>,
    /// Stops recording.
    pub end: Box<dyn Fn() -> Vec<(f64, f64)>>,
}

/// Compares policies on one device.
pub struct LoadBenchmark {
    device: Arc<dyn Device>,
    options: LoadOptions,
    timeline: Option<DeviceTimeline>,
}

/// A node with one model.
struct TestNode<'a> {
    node: Node,
    generator: RequestGenerator<'a>,
}

impl LoadBenchmark {
    /// `timeline` measures how long the device is idle between batches.
    pub fn new(
        device: Arc<dyn Device>,
        options: LoadOptions,
        timeline: Option<DeviceTimeline>,
    ) -> LoadBenchmark {
        LoadBenchmark { device, options, timeline }
    }

    fn test_node<'a>(
        &self,
        model: &'a LoadModel,
        batching: &Batching,
    ) -> Result<TestNode<'a>, LiveError> {
        let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::new());
        let options = NodeOptions {
            concurrent_rt_batches: self.options.concurrent_batches,
            ..NodeOptions::default()
        };
        let node = Node::start(self.device.clone(), options, clock.clone())?;
        let config = ModelConfig {
            class: Class::RealTime,
            batching: batching.clone(),
            queue_capacity: QUEUE,
            ..ModelConfig::default()
        };
        let key = node.add_model(model.program.clone(), &config);
        let generator = RequestGenerator::new(&node, key, model, clock)?;
        Ok(TestNode { node, generator })
    }

    /// Runs all policies on one model and compares them.
    pub fn run(
        &self,
        model: &LoadModel,
        settings: &[BatchingSetting],
        mut report: impl FnMut(&PolicyResult),
    ) -> Result<NetworkReport, LiveError> {
        let failed = |why| LiveError::Broken { model: model.name.clone(), why };
        // Makes what all policies need before any of them is timed.
        let sizes = [1, 1, 2, 2, 4, 4, 8, 8, 16, 16, 32, 32];
        model.program.prepare_batches(&[], &sizes).map_err(|err| failed(err.into()))?;
        let test_node = self.test_node(model, &Batching::default())?;
        let alone = test_node.generator.alone(&test_node.node, 100)?;
        let full = test_node.generator.batch_time(&*model.program, self.device.as_ref(), 32)?;
        let capacity_rps = test_node.generator.capacity(&test_node.node, self.options.seconds)?;
        drop(test_node);
        let slo_ms = self.options.slo_ms.unwrap_or(full.0 as f64 / 1e6 * 3.0);
        let mut network = NetworkReport {
            model: model.name.clone(),
            alone_us: alone.0 as f64 / 1e3,
            batch_32_us: full.0 as f64 / 1e3,
            slo_ms,
            capacity_rps: capacity_rps.round(),
            low_rps: (capacity_rps * self.options.shares.0).round(),
            high_rps: (capacity_rps * self.options.shares.1).round(),
            ..NetworkReport::default()
        };
        for setting in settings {
            let result = self.result(model, setting, &network)?;
            report(&result);
            network.results.push(result);
        }
        network.compare();
        Ok(network)
    }

    fn result(
        &self,
        model: &LoadModel,
        setting: &BatchingSetting,
        network: &NetworkReport,
    ) -> Result<PolicyResult, LiveError> {
        let test_node = self.test_node(model, &setting.batching)?;
        let mut seed = self.options.seed;
        let mut phase = |rate: f64, seconds: f64| {
            seed = seed.wrapping_add(1);
            test_node.phase(&setting.name, LoadPhase { rate, seconds, seed })
        };
        // A warm-up, in which policies learn from the load.
        phase(network.high_rps, self.options.seconds / 2.0)?;
        let low = phase(network.low_rps, self.options.seconds)?;
        let high = phase(network.high_rps, self.options.seconds)?;
        let watched = self.timeline.as_ref().filter(|timeline| (timeline.begin)());
        let runs = match watched {
            Some(timeline) => {
                test_node.generator.capacity(&test_node.node, self.options.seconds.min(0.3))?;
                (timeline.end)()
            }
            None => Vec::new(),
        };
        let (mut good, mut bad) = (0.0, network.capacity_rps * 1.5);
        let mut best = PhaseResult::default();
        let mut next = network.high_rps;
        for _ in 0..self.options.probes {
            let tried = phase(next, self.options.seconds)?;
            if tried.latency.p99_us <= network.slo_ms * 1e3 && tried.answered_rps >= 0.95 * next {
                (good, best) = (next, tried);
            } else {
                bad = next;
            }
            next = (good + bad) / 2.0;
        }
        Ok(PolicyResult {
            idle_pct: idle_pct(runs.clone()),
            timeline_us: runs.iter().skip(runs.len() / 2).take(48).copied().collect(),
            policy: setting.name.clone(),
            low,
            high,
            best_rps: good,
            best,
            ..PolicyResult::default()
        })
    }
}

impl TestNode<'_> {
    fn phase(&self, policy: &str, phase: LoadPhase) -> Result<PhaseResult, LiveError> {
        let result = self.generator.run(&self.node, phase);
        let until = self.node.clock().now() + Nanos::from(DRAIN);
        while self.generator.outstanding() > 0 {
            if self.node.clock().now() > until {
                return Err(LiveError::Stuck(
                    self.generator.name().to_string(),
                    policy.to_string(),
                ));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(result.finish())
    }
}
