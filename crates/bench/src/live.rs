//! DISB in real time: real models on a real device, under one policy after another.
//!
//! Every cell has a node of its own and one thread per client. Clients warm up in a closed loop,
//! then follow the benchmark's rules: one request outstanding; a period that has passed is dropped;
//! real-time clients of equal rate are staggered; best effort sends its next request with the reply
//! to the last.

mod client;
mod observer;
pub(crate) mod report;
mod soak;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, PoisonError, mpsc};
use std::time::Duration;

use base::{Clock, MonotonicClock, Nanos, Random};
use device::{Device, Program};
use model::config::{Batching, BatchingPolicy, Class, ModelConfig};
use model::{LaunchPlan, Tensor};
use runtime::{ModelKey, Node, NodeError, NodeOptions, Rejection, Reply, Request};
use thiserror::Error;

use self::client::{
    CellWindow, ClientLog, CurrentKey, FullLog, LiveClient, RequestSpec, TimedReply, WaitMode,
};
use self::observer::Recorder;
use self::report::round;
pub use self::report::{
    AloneLatency, BestEffortModel, CellReport, Latency, LatencyIncrease, LatencyParts, LiveReport,
    LockWaits, PreemptionStats, RealTimeModel, SkippedPolicy, charts, table,
};
pub use self::soak::{ResourceGrowth, SoakOptions, SoakReport};
use crate::arrival::{Arrival, ArrivalTimes};
use crate::disb;
use crate::recorded_run::RecordedRun;
use crate::scenario::ClientSpec;

/// Number of cores from which real-time clients spin for their replies instead of sleeping.
const CORES_TO_SPIN: usize = 8;

/// How long requests may take to end after a cell.
const DRAIN: Duration = Duration::from_secs(60);

/// Preemptions recorded per cell.
const PREEMPTIONS_KEPT: usize = 1 << 20;

/// A model on the device, with inputs for its requests.
pub struct LiveModel {
    /// DISB's name of the model.
    pub name: String,
    /// The loaded model.
    pub program: Arc<dyn Program>,
    /// One tensor per input.
    pub inputs: Vec<Tensor>,
}

/// The rates of real-time clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rates {
    /// As published.
    Literal,
    /// Rates at which real time alone uses the same share of this device as of the paper's.
    Scaled,
}

impl Rates {
    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Rates::Literal => "literal",
            Rates::Scaled => "scaled",
        }
    }
}

/// A workload and its max length.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Its name.
    pub name: String,
    /// Clients, at published rates.
    pub clients: Vec<ClientSpec>,
    /// Seconds of its trace; `None` if it has no end.
    pub seconds: Option<f64>,
}

/// How cells are run.
#[derive(Clone, Copy, Debug)]
pub struct LiveOptions {
    /// Seconds of a cell.
    pub seconds: f64,
    /// Seconds of warm-up before a cell.
    pub warm_seconds: f64,
    /// Seed of random arrivals.
    pub seed: u64,
    /// Max slowdown of real time beside best effort, in percent, for policies that use it.
    pub max_rt_slowdown_percent: f64,
    /// Maximum number of requests and runs of a cell that are recorded, the latest; 0 for none.
    pub recorded_spans: usize,
}

/// Why a cell cannot run.
#[derive(Debug, Error)]
pub enum LiveError {
    /// The node does not start.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// A workload needs a model that is not loaded.
    #[error("workload {workload} needs model '{model}', which was not loaded")]
    NoModel {
        /// The workload.
        workload: String,
        /// The model.
        model: String,
    },
    /// A model does not run.
    #[error("model '{model}' does not run: {why}")]
    Broken {
        /// The model.
        model: String,
        /// Why.
        why: Rejection,
    },
    /// Requests did not end.
    #[error("requests of workload {0} under {1} were still in flight a minute after its end")]
    Stuck(String, String),
}

/// Runs cells on one device.
pub struct LiveBenchmark {
    device: Arc<dyn Device>,
    models: Vec<CellModel>,
    options: LiveOptions,
    alone: Vec<AloneLatency>,
}

/// A model between cells.
struct CellModel {
    name: String,
    inputs: Vec<Tensor>,
    plan: Arc<LaunchPlan>,
    /// Empty when only a node holds the program.
    program: Mutex<Option<Arc<dyn Program>>>,
}

impl From<LiveModel> for CellModel {
    fn from(model: LiveModel) -> CellModel {
        let LiveModel { name, program, inputs } = model;
        let plan = program.plan().clone();
        CellModel { name, inputs, plan, program: Mutex::new(Some(program)) }
    }
}

impl CellModel {
    fn program(&self) -> Option<Arc<dyn Program>> {
        self.program.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Drops the program, so that only nodes hold it.
    fn release_program(&self) {
        let program = self.program.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(program);
    }
}

/// A node with the models of a workload.
struct TestNode<'a> {
    node: Node,
    clock: Arc<dyn Clock>,
    models: Vec<(&'a CellModel, CurrentKey)>,
    recorder: Arc<Recorder>,
}

/// Options of the benchmark's nodes.
#[derive(Clone, Copy)]
struct TestNodeOptions {
    real_time_queues: usize,
    best_effort_queues: usize,
    /// Preemptions that the node records.
    preemptions_kept: usize,
}

impl TestNodeOptions {
    /// Enough queues for a policy that runs all clients in parallel.
    fn of(clients: &[ClientSpec], preemptions_kept: usize) -> TestNodeOptions {
        let count = |class| clients.iter().filter(|client| client.class == class).count();
        let (real_time, best_effort) = (count(Class::RealTime), count(Class::BestEffort));
        TestNodeOptions {
            real_time_queues: real_time,
            best_effort_queues: best_effort,
            preemptions_kept,
        }
    }
}

/// A workload's clients at literal or scaled rates.
struct RatedClients {
    clients: Vec<ClientSpec>,
    /// Seconds of the trace at these rates.
    trace_seconds: Option<f64>,
    /// Share of the device that real time uses alone.
    share: f64,
}

impl LiveBenchmark {
    /// Measures each model alone.
    pub fn new(
        device: Arc<dyn Device>,
        models: Vec<LiveModel>,
        options: LiveOptions,
    ) -> Result<LiveBenchmark, LiveError> {
        let models = models.into_iter().map(CellModel::from).collect();
        let mut live = LiveBenchmark { device, models, options, alone: Vec::new() };
        live.alone = live.measure_alone()?;
        Ok(live)
    }

    /// Latency of each model alone.
    pub fn alone(&self) -> &[AloneLatency] {
        &self.alone
    }

    fn measure_alone(&self) -> Result<Vec<AloneLatency>, LiveError> {
        let names: Vec<&str> = self.models.iter().map(|model| model.name.as_str()).collect();
        let options = TestNodeOptions::of(&[], PREEMPTIONS_KEPT);
        let options = TestNodeOptions { real_time_queues: 1, best_effort_queues: 1, ..options };
        let test_node = self.test_node("rt_only", &names, options)?;
        let span = Nanos((self.options.warm_seconds * 1e9) as u64);
        let mut alone = Vec::new();
        for (model, key) in &test_node.models {
            let run = |until: Nanos, samples: &mut Vec<Nanos>| {
                while test_node.clock.now() < until || samples.is_empty() {
                    let sent = test_node.clock.now();
                    test_node.request_once(model, *key.read(), Class::RealTime)?;
                    samples.push(test_node.clock.now() - sent);
                }
                Ok::<(), LiveError>(())
            };
            let mut samples = Vec::new();
            run(test_node.clock.now() + span, &mut samples)?;
            samples.clear();
            run(test_node.clock.now() + span, &mut samples)?;
            let latency = Latency::of(&mut samples);
            alone.push(AloneLatency { model: model.name.clone(), latency });
        }
        Ok(alone)
    }

    fn alone_us(&self, model: &str) -> f64 {
        self.alone.iter().find(|alone| alone.model == model).map_or(0.0, |a| a.latency.mean_us)
    }

    fn test_node(
        &self,
        policy: &str,
        models: &[&str],
        node_options: TestNodeOptions,
    ) -> Result<TestNode<'_>, LiveError> {
        let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::new());
        let recorder = Arc::new(Recorder::default());
        let defaults = NodeOptions::default();
        let options = NodeOptions {
            policy: policy.to_string(),
            // What is not asked for is recorded as by a server.
            spans_kept: defaults.spans_kept.max(self.options.recorded_spans),
            real_time_queues: node_options.real_time_queues,
            best_effort_queues: node_options.best_effort_queues,
            preemptions_kept: node_options.preemptions_kept,
            max_rt_slowdown_percent: self.options.max_rt_slowdown_percent,
            observer: Some(recorder.clone()),
            ..defaults
        };
        let node = Node::start(self.device.clone(), options, clock.clone())?;
        let used = self.models.iter().filter(|model| models.contains(&model.name.as_str()));
        let config = config();
        let add = |program| CurrentKey::new(node.add_model(program, &config));
        let models = used.filter_map(|m| Some((m, add(m.program()?)))).collect();
        Ok(TestNode { node, clock, models, recorder })
    }

    /// The clients of `workload` at these rates.
    fn clients(&self, workload: &Workload, rates: Rates) -> RatedClients {
        let mut clients = workload.clients.clone();
        let mut trace_seconds = workload.seconds;
        let mut share = self.share(&clients, trace_seconds);
        if let (Rates::Scaled, Some(percent)) = (rates, disb::share_percent(&workload.name))
            && share > 0.0
        {
            let factor = percent / 100.0 / share;
            disb::speed_up(&mut clients, factor);
            trace_seconds = trace_seconds.map(|seconds| seconds / factor);
            share = percent / 100.0;
        }
        disb::stagger_by(&mut clients, |model| self.alone_us(model) as u64);
        RatedClients { clients, trace_seconds, share }
    }

    /// Share of the device that real time uses alone.
    fn share(&self, clients: &[ClientSpec], seconds: Option<f64>) -> f64 {
        let rt = clients.iter().filter(|client| client.class == Class::RealTime);
        rt.map(|client| self.alone_us(&client.model) / 1e6 * rate_of(client, seconds)).sum()
    }

    /// Runs one policy on one workload. [`LiveBenchmark::finish`] adds the comparisons.
    pub fn run(
        &self,
        workload: &Workload,
        rates: Rates,
        policy: &str,
    ) -> Result<(CellReport, Option<RecordedRun>), LiveError> {
        let RatedClients { mut clients, trace_seconds, share } = self.clients(workload, rates);
        let longest = self.options.seconds;
        let seconds = trace_seconds.map_or(longest, |seconds| seconds.min(longest));
        let offered: Vec<f64> = clients.iter().map(|c| rate_of(c, Some(seconds))).collect();
        if policy == "rt_only" {
            clients.retain(|client| client.class == Class::RealTime);
        }
        let names: Vec<&str> = clients.iter().map(|client| client.model.as_str()).collect();
        let test_node =
            self.test_node(policy, &names, TestNodeOptions::of(&clients, PREEMPTIONS_KEPT))?;
        let targets = test_node.targets(&workload.name, &clients)?;
        let alone_busy: Vec<Nanos> = targets.iter().map(|(_, busy)| *busy).collect();
        let window = self.window(&test_node, clients.len(), seconds);
        let (logs, cpu_cores) = self.drive(&test_node, &clients, targets, &window, &|_| {});
        if !test_node.node.drain(DRAIN) {
            return Err(LiveError::Stuck(workload.name.clone(), policy.to_string()));
        }
        let start = Nanos(window.start.load(Ordering::Acquire));
        let outcome = CellOutcome { clients: &clients, offered, alone_busy, logs, start, seconds };
        let mut cell = outcome.cell(&test_node);
        (cell.workload, cell.rates) = (workload.name.clone(), rates.name().to_string());
        (cell.policy, cell.rt_share_pct) = (policy.to_string(), round(share * 100.0));
        cell.cpu_cores = round(cpu_cores);
        cell.violations = test_node.recorder.check(test_node.models.len());
        let name =
            format!("{} under {policy}, {}, {}", cell.workload, cell.rates, self.device_name());
        let limit = self.options.recorded_spans;
        let recorded =
            (limit > 0).then(|| RecordedRun { name, ..test_node.recorded(start, limit) });
        Ok((cell, recorded))
    }

    fn device_name(&self) -> &str {
        &self.device.info().name
    }

    /// Start and end of a cell with `clients` clients.
    fn window(&self, test_node: &TestNode<'_>, clients: usize, seconds: f64) -> CellWindow {
        CellWindow {
            warm: Barrier::new(clients + 1),
            set: Barrier::new(clients + 1),
            start: AtomicU64::new(0),
            warm_until: test_node.clock.now() + Nanos((self.options.warm_seconds * 1e9) as u64),
            length: Nanos((seconds * 1e9) as u64),
        }
    }

    /// Runs the clients; returns their logs and the number of busy cores. `meanwhile` is called
    /// with the start time.
    fn drive<L: ClientLog + Send>(
        &self,
        test_node: &TestNode<'_>,
        clients: &[ClientSpec],
        targets: Vec<(RequestSpec, Nanos)>,
        window: &CellWindow,
        meanwhile: &dyn Fn(Nanos),
    ) -> (Vec<L>, f64) {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mut seeds = Random::new(self.options.seed);
        std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for (client, (target, _)) in clients.iter().zip(targets) {
                let live = LiveClient {
                    node: &test_node.node,
                    clock: test_node.clock.clone(),
                    waiting: match (cores >= CORES_TO_SPIN, target.class) {
                        (true, Class::RealTime) => WaitMode::Spin,
                        _ => WaitMode::Park,
                    },
                    target,
                    arrivals: ArrivalTimes::new(client.arrival.clone(), seeds.next_u64()),
                };
                threads.push(scope.spawn(move || live.run(window)));
            }
            window.warm.wait();
            let start = test_node.clock.now() + Nanos::from_millis(5);
            window.start.store(start.0, Ordering::Release);
            let (used, began) = (cpu_seconds(), test_node.clock.now());
            window.set.wait();
            meanwhile(start);
            let log = |thread: std::thread::ScopedJoinHandle<'_, L>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            let logs = threads.into_iter().map(log).collect();
            let wall = (test_node.clock.now() - began).0 as f64 / 1e9;
            (logs, (cpu_seconds() - used) / wall)
        })
    }

    /// Compares cells with each other.
    pub fn finish(&self, cells: &mut [CellReport]) {
        report::compare(cells);
    }
}

/// Seconds of processor time that this process has used; 0 if the system does not report it.
pub(crate) fn cpu_seconds() -> f64 {
    // Linux reports hundredths of a second to user space on every architecture.
    let Ok(text) = std::fs::read_to_string("/proc/self/stat") else { return 0.0 };
    let after_name = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    let field = |index: usize| after_name.split_whitespace().nth(index)?.parse::<f64>().ok();
    (field(11).unwrap_or(0.0) + field(12).unwrap_or(0.0)) / 100.0
}

/// Requests per second of a client, averaged over `seconds` for a trace; 0 for a closed loop.
fn rate_of(client: &ClientSpec, seconds: Option<f64>) -> f64 {
    match &client.arrival {
        Arrival::Uniform { rate, .. } | Arrival::Poisson { rate } => *rate,
        Arrival::Trace { times_ms } => {
            let seconds = seconds.unwrap_or(1.0);
            times_ms.iter().filter(|ms| **ms < seconds * 1e3).count() as f64 / seconds
        }
        _ => 0.0,
    }
}

/// The benchmark's requests are batches of one.
fn config() -> ModelConfig {
    let batching = Batching { policy: BatchingPolicy::None, ..Batching::default() };
    ModelConfig { batching, ..ModelConfig::default() }
}

impl TestNode<'_> {
    /// One request, until its reply.
    fn request_once(
        &self,
        model: &CellModel,
        key: ModelKey,
        class: Class,
    ) -> Result<SingleReply, LiveError> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let request = Request {
            model: key,
            inputs: model.inputs.clone(),
            class: Some(class),
            priority: None,
            timeout: None,
        };
        let reply = move |reply: Reply| {
            // The receiver waits below.
            let _ = sender.send(reply);
        };
        self.node.submit(request, Box::new(reply));
        let broken = |why| LiveError::Broken { model: model.name.clone(), why };
        let reply = receiver.recv().map_err(|_| broken(Rejection::ShuttingDown))?;
        let busy = reply.timing.busy;
        Ok(SingleReply { outputs: reply.result.map_err(broken)?, busy })
    }

    /// The latest spans, at most `limit`, that ended after `start`.
    fn recorded(&self, start: Nanos, limit: usize) -> RecordedRun {
        let mut spans = Vec::new();
        let first = self.node.spans_end().saturating_sub(limit as u64);
        let lost = first + self.node.spans_since(first, limit, &mut spans).lost;
        // What is no longer there matters only if it could be of this time.
        let complete = spans.first().is_some_and(|span| span.ended() < start);
        spans.retain(|span| span.ended() >= start);
        let named = |(model, key): &(&CellModel, CurrentKey)| (*key.read(), model.name.clone());
        RecordedRun {
            name: String::new(),
            models: self.models.iter().map(named).collect(),
            spans,
            lost: if complete { 0 } else { lost },
        }
    }

    /// The request of each client, and the device time that it takes undisturbed.
    fn targets(
        &self,
        workload: &str,
        clients: &[ClientSpec],
    ) -> Result<Vec<(RequestSpec, Nanos)>, LiveError> {
        let target = |client: &ClientSpec| {
            let found = self.models.iter().find(|(model, _)| model.name == client.model);
            let (model, key) = found.ok_or_else(|| LiveError::NoModel {
                workload: workload.to_string(),
                model: client.model.clone(),
            })?;
            let mut busy = Nanos::MAX;
            let mut expected = Vec::new();
            // The first run makes what later ones reuse.
            for _ in 0..5 {
                let reply = self.request_once(model, *key.read(), client.class)?;
                busy = busy.min(reply.busy);
                expected = reply.outputs;
            }
            let inputs = model.inputs.clone();
            let expected = Arc::new(expected);
            let key = key.clone();
            Ok((RequestSpec { key, class: client.class, inputs, expected }, busy))
        };
        clients.iter().map(target).collect()
    }
}

struct SingleReply {
    outputs: Vec<Tensor>,
    busy: Nanos,
}

/// Logs of a cell's clients.
struct CellOutcome<'a> {
    clients: &'a [ClientSpec],
    offered: Vec<f64>,
    alone_busy: Vec<Nanos>,
    logs: Vec<FullLog>,
    start: Nanos,
    seconds: f64,
}

impl CellOutcome<'_> {
    /// Replies per second inside the window.
    fn rps(&self, log: &FullLog) -> f64 {
        let end = self.start + Nanos((self.seconds * 1e9) as u64);
        let inside = log.replies.iter().filter(|a| a.sent + a.latency <= end).count();
        inside as f64 / self.seconds
    }

    fn of(&self, class: Class) -> impl Iterator<Item = (usize, &ClientSpec, &FullLog)> {
        let pairs = self.clients.iter().zip(&self.logs).enumerate();
        pairs.filter(move |(_, (client, _))| client.class == class).map(|(i, (c, t))| (i, c, t))
    }

    fn cell(&self, test_node: &TestNode<'_>) -> CellReport {
        let latencies = |log: &FullLog| log.replies.iter().map(|a| a.latency).collect::<Vec<_>>();
        let rt_model = |(index, client, log): (usize, &ClientSpec, &FullLog)| RealTimeModel {
            model: client.model.clone(),
            offered_rps: round(self.offered[index]),
            latency: Latency::of(&mut latencies(log)),
            increase: LatencyIncrease::default(),
            late: log.late,
            dropped: log.dropped,
        };
        let be_model = |(index, client, log): (usize, &ClientSpec, &FullLog)| {
            let busy: u64 = log.replies.iter().map(|reply| reply.timing.busy.0).sum();
            BestEffortModel {
                model: client.model.clone(),
                rps: round(self.rps(log)),
                latency: Latency::of(&mut latencies(log)),
                busy_us: round(busy as f64 / log.replies.len().max(1) as f64 / 1e3),
                alone_busy_us: round(self.alone_busy[index].0 as f64 / 1e3),
            }
        };
        let sum = |class| self.of(class).map(|(_, _, log)| self.rps(log)).sum::<f64>();
        let (rt_rps, be_rps) = (sum(Class::RealTime), sum(Class::BestEffort));
        let mut all: Vec<Nanos> =
            self.of(Class::RealTime).flat_map(|(_, _, log)| latencies(log)).collect();
        let rt_models: Vec<RealTimeModel> = self.of(Class::RealTime).map(rt_model).collect();
        let parts = self.parts();
        CellReport {
            workload: String::new(),
            rates: String::new(),
            policy: String::new(),
            seconds: round(self.seconds),
            rt_share_pct: 0.0,
            rt: Latency::of(&mut all),
            rt_increase: LatencyIncrease::default(),
            rt_parts: LatencyParts::of(&parts),
            rt_slowest: LatencyParts::of(&parts[..parts.len().div_ceil(100)]),
            rt_longest: LatencyParts::longest(&parts),
            rt_rps: round(rt_rps),
            late: rt_models.iter().map(|model| model.late).sum(),
            dropped: rt_models.iter().map(|model| model.dropped).sum(),
            rt_models,
            be_rps: round(be_rps),
            be_models: self.of(Class::BestEffort).map(be_model).collect(),
            throughput_rps: round(rt_rps + be_rps),
            over_rt_only: 0.0,
            over_free_streams: None,
            preempted: self.preempted(test_node),
            cpu_cores: 0.0,
            lock: self.lock(test_node),
            errors: self.logs.iter().map(|log| log.errors).sum(),
            first_error: self.logs.iter().find_map(|log| log.first_error.clone()),
            wrong_outputs: self.logs.iter().map(|log| log.wrong).sum(),
            violations: Vec::new(),
        }
    }

    /// Latency parts of real-time replies, the slowest first.
    fn parts(&self) -> Vec<[Nanos; 5]> {
        let replies = self.of(Class::RealTime).flat_map(|(_, _, log)| &log.replies);
        let mut replies: Vec<&TimedReply> = replies.collect();
        replies.sort_unstable_by_key(|reply| std::cmp::Reverse(reply.latency));
        replies.into_iter().map(TimedReply::parts).collect()
    }

    fn lock(&self, test_node: &TestNode<'_>) -> LockWaits {
        let contention = test_node.node.contention();
        let waits = contention.waits as f64;
        LockWaits {
            waits_per_second: round(waits / (test_node.clock.now().0 as f64 / 1e9)),
            mean_us: round(contention.waited.0 as f64 / waits.max(1.0) / 1e3),
            max_us: round(contention.longest.0 as f64 / 1e3),
        }
    }

    fn preempted(&self, test_node: &TestNode<'_>) -> PreemptionStats {
        let recent = test_node.node.preemptions().recent;
        let counted =
            recent.iter().filter(|p| p.requested_at >= self.start && p.caused_by.is_some());
        let counted: Vec<_> = counted.collect();
        let mut taken: Vec<Nanos> = counted.iter().map(|p| p.latency()).collect();
        let best_effort = self.of(Class::BestEffort).flat_map(|(_, _, log)| &log.replies);
        let busy: u64 = best_effort.map(|reply| reply.timing.busy.0).sum();
        let latency_sum: u64 = taken.iter().map(|span| span.0).sum();
        PreemptionStats {
            count: counted.len() as u64,
            finished_first: counted.iter().filter(|p| p.finished).count() as u64,
            latency: Latency::of(&mut taken),
            latency_pct: round(latency_sum as f64 / busy.max(1) as f64 * 100.0),
        }
    }
}
