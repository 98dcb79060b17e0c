//! DISB in real time: real models on a real device, under one policy after another.
//!
//! Every cell is a node of its own with clients as threads. They warm the device up in a closed loop, then keep to the
//! benchmark's rules: one request outstanding, a period that has passed is dropped, real-time clients of equal rate are
//! staggered, best effort asks again as soon as it is answered.

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

use self::client::{Answer, CurrentKey, Ledger, LiveClient, Tally, Target, Waiting, Window};
use self::observer::Recorder;
use self::report::round;
pub use self::report::{
    Alone, BestEffortModel, Cell, Increase, Latency, LeftOut, LiveReport, Lock, Parts, Preempted,
    RealTimeModel, charts, table,
};
pub use self::soak::{Growth, SoakOptions, SoakReport};
use crate::arrival::{Arrival, Clockwork};
use crate::disb;
use crate::scenario::Client;

/// Cores from which on real-time clients look for their answers instead of sleeping.
const CORES_TO_SPIN: usize = 8;

/// How long requests may take to end after a cell.
const DRAIN: Duration = Duration::from_secs(60);

/// Preemptions a cell keeps.
const PREEMPTIONS_KEPT: usize = 1 << 20;

/// A model on the device, with inputs to ask with.
pub struct LiveModel {
    /// The benchmark's name of it.
    pub name: String,
    /// It.
    pub program: Arc<dyn Program>,
    /// One tensor per input.
    pub inputs: Vec<Tensor>,
}

/// How often real time asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rates {
    /// As published.
    Literal,
    /// So often that real time alone uses the share of this device that it used of the paper's.
    Scaled,
}

impl Rates {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Rates::Literal => "literal",
            Rates::Scaled => "scaled",
        }
    }
}

/// A workload and how long it lasts at most.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Its name.
    pub name: String,
    /// Who asks, at published rates.
    pub clients: Vec<Client>,
    /// Seconds its trace takes; `None` where it goes on for ever.
    pub seconds: Option<f64>,
}

/// How cells are run.
#[derive(Clone, Copy, Debug)]
pub struct LiveOptions {
    /// Seconds of a cell.
    pub seconds: f64,
    /// Seconds of load before one.
    pub warm_seconds: f64,
    /// Seed of random arrivals.
    pub seed: u64,
    /// How much longer real time may take beside best effort, in percent, where a policy goes by it.
    pub max_rt_slowdown_percent: f64,
}

/// Why a cell cannot run.
#[derive(Debug, Error)]
pub enum LiveError {
    /// The node does not start.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// A model a workload needs is not there.
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
    #[error("requests of workload {0} under {1} were still under way a minute after its end")]
    Stuck(String, String),
}

/// Runs cells on one device.
pub struct Live {
    device: Arc<dyn Device>,
    models: Vec<KeptModel>,
    options: LiveOptions,
    alone: Vec<Alone>,
}

/// A model between cells.
struct KeptModel {
    name: String,
    inputs: Vec<Tensor>,
    plan: Arc<LaunchPlan>,
    /// Gone where a node alone shall hold it.
    program: Mutex<Option<Arc<dyn Program>>>,
}

impl From<LiveModel> for KeptModel {
    fn from(model: LiveModel) -> KeptModel {
        let LiveModel { name, program, inputs } = model;
        let plan = program.plan().clone();
        KeptModel { name, inputs, plan, program: Mutex::new(Some(program)) }
    }
}

impl KeptModel {
    fn program(&self) -> Option<Arc<dyn Program>> {
        self.program.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Leaves the program to those who have it.
    fn let_go(&self) {
        let program = self.program.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(program);
    }
}

/// A node with the models of a workload.
struct Stage<'a> {
    node: Node,
    clock: Arc<dyn Clock>,
    models: Vec<(&'a KeptModel, CurrentKey)>,
    recorder: Arc<Recorder>,
}

/// What a node of the benchmark is to be like.
#[derive(Clone, Copy)]
struct StageOptions {
    real_time_queues: usize,
    best_effort_queues: usize,
    /// Preemptions that are remembered one by one.
    preemptions_kept: usize,
}

impl StageOptions {
    /// As a policy that runs everything side by side needs them for `clients`.
    fn of(clients: &[Client], preemptions_kept: usize) -> StageOptions {
        let count = |class| clients.iter().filter(|client| client.class == class).count();
        let (real_time, best_effort) = (count(Class::RealTime), count(Class::BestEffort));
        StageOptions {
            real_time_queues: real_time,
            best_effort_queues: best_effort,
            preemptions_kept,
        }
    }
}

/// A workload's clients at some rates.
struct Asking {
    clients: Vec<Client>,
    /// Seconds its trace takes at these rates.
    trace_seconds: Option<f64>,
    /// Share of the device that real time uses on its own.
    share: f64,
}

impl Live {
    /// Measures each model on its own.
    pub fn new(
        device: Arc<dyn Device>,
        models: Vec<LiveModel>,
        options: LiveOptions,
    ) -> Result<Live, LiveError> {
        let models = models.into_iter().map(KeptModel::from).collect();
        let mut live = Live { device, models, options, alone: Vec::new() };
        live.alone = live.measure_alone()?;
        Ok(live)
    }

    /// Each model on its own.
    pub fn alone(&self) -> &[Alone] {
        &self.alone
    }

    fn measure_alone(&self) -> Result<Vec<Alone>, LiveError> {
        let names: Vec<&str> = self.models.iter().map(|model| model.name.as_str()).collect();
        let options = StageOptions::of(&[], PREEMPTIONS_KEPT);
        let options = StageOptions { real_time_queues: 1, best_effort_queues: 1, ..options };
        let stage = self.stage("rt_only", &names, options)?;
        let span = Nanos((self.options.warm_seconds * 1e9) as u64);
        let mut alone = Vec::new();
        for (model, key) in &stage.models {
            let run = |until: Nanos, samples: &mut Vec<Nanos>| {
                while stage.clock.now() < until || samples.is_empty() {
                    let asked = stage.clock.now();
                    stage.once(model, *key.hold(), Class::RealTime)?;
                    samples.push(stage.clock.now() - asked);
                }
                Ok::<(), LiveError>(())
            };
            let mut samples = Vec::new();
            run(stage.clock.now() + span, &mut samples)?;
            samples.clear();
            run(stage.clock.now() + span, &mut samples)?;
            let latency = Latency::of(&mut samples);
            alone.push(Alone { model: model.name.clone(), latency });
        }
        Ok(alone)
    }

    fn alone_us(&self, model: &str) -> f64 {
        self.alone.iter().find(|alone| alone.model == model).map_or(0.0, |a| a.latency.mean_us)
    }

    fn stage(
        &self,
        policy: &str,
        models: &[&str],
        asked: StageOptions,
    ) -> Result<Stage<'_>, LiveError> {
        let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::new());
        let recorder = Arc::new(Recorder::default());
        let options = NodeOptions {
            policy: policy.to_string(),
            real_time_queues: asked.real_time_queues,
            best_effort_queues: asked.best_effort_queues,
            preemptions_kept: asked.preemptions_kept,
            max_rt_slowdown_percent: self.options.max_rt_slowdown_percent,
            observer: Some(recorder.clone()),
            ..NodeOptions::default()
        };
        let node = Node::start(self.device.clone(), options, clock.clone())?;
        let used = self.models.iter().filter(|model| models.contains(&model.name.as_str()));
        let config = config();
        let add = |program| CurrentKey::new(node.add_model(program, &config));
        let models = used.filter_map(|m| Some((m, add(m.program()?)))).collect();
        Ok(Stage { node, clock, models, recorder })
    }

    /// The clients of `workload` at these rates.
    fn clients(&self, workload: &Workload, rates: Rates) -> Asking {
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
        Asking { clients, trace_seconds, share }
    }

    /// Share of the device that real time uses when nobody else does.
    fn share(&self, clients: &[Client], seconds: Option<f64>) -> f64 {
        let rt = clients.iter().filter(|client| client.class == Class::RealTime);
        rt.map(|client| self.alone_us(&client.model) / 1e6 * rate_of(client, seconds)).sum()
    }

    /// Runs one policy on one workload. Comparisons are left to [`Live::finish`].
    pub fn run(&self, workload: &Workload, rates: Rates, policy: &str) -> Result<Cell, LiveError> {
        let Asking { mut clients, trace_seconds, share } = self.clients(workload, rates);
        let longest = self.options.seconds;
        let seconds = trace_seconds.map_or(longest, |seconds| seconds.min(longest));
        let offered: Vec<f64> = clients.iter().map(|c| rate_of(c, Some(seconds))).collect();
        if policy == "rt_only" {
            clients.retain(|client| client.class == Class::RealTime);
        }
        let names: Vec<&str> = clients.iter().map(|client| client.model.as_str()).collect();
        let stage = self.stage(policy, &names, StageOptions::of(&clients, PREEMPTIONS_KEPT))?;
        let targets = stage.targets(&workload.name, &clients)?;
        let alone_busy: Vec<Nanos> = targets.iter().map(|(_, busy)| *busy).collect();
        let window = self.window(&stage, clients.len(), seconds);
        let (tallies, cpu_cores) = self.drive(&stage, &clients, targets, &window, &|_| {});
        if !stage.node.drain(DRAIN) {
            return Err(LiveError::Stuck(workload.name.clone(), policy.to_string()));
        }
        let start = Nanos(window.start.load(Ordering::Acquire));
        let outcome = Outcome { clients: &clients, offered, alone_busy, tallies, start, seconds };
        let mut cell = outcome.cell(&stage);
        (cell.workload, cell.rates) = (workload.name.clone(), rates.name().to_string());
        (cell.policy, cell.rt_share_pct) = (policy.to_string(), round(share * 100.0));
        cell.cpu_cores = round(cpu_cores);
        cell.violations = stage.recorder.check(stage.models.len());
        Ok(cell)
    }

    /// When a cell of so many clients begins and ends.
    fn window(&self, stage: &Stage<'_>, clients: usize, seconds: f64) -> Window {
        Window {
            warm: Barrier::new(clients + 1),
            set: Barrier::new(clients + 1),
            start: AtomicU64::new(0),
            warm_until: stage.clock.now() + Nanos((self.options.warm_seconds * 1e9) as u64),
            length: Nanos((seconds * 1e9) as u64),
        }
    }

    /// Lets the clients run, and says how many cores that kept busy. `meanwhile` is called when they begin, with that time.
    fn drive<L: Ledger + Send>(
        &self,
        stage: &Stage<'_>,
        clients: &[Client],
        targets: Vec<(Target, Nanos)>,
        window: &Window,
        meanwhile: &dyn Fn(Nanos),
    ) -> (Vec<L>, f64) {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mut seeds = Random::new(self.options.seed);
        std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for (client, (target, _)) in clients.iter().zip(targets) {
                let live = LiveClient {
                    node: &stage.node,
                    clock: stage.clock.clone(),
                    waiting: match (cores >= CORES_TO_SPIN, target.class) {
                        (true, Class::RealTime) => Waiting::Spin,
                        _ => Waiting::Park,
                    },
                    target,
                    clockwork: Clockwork::new(client.arrival.clone(), seeds.next_u64()),
                };
                threads.push(scope.spawn(move || live.run(window)));
            }
            window.warm.wait();
            let start = stage.clock.now() + Nanos::from_millis(5);
            window.start.store(start.0, Ordering::Release);
            let (used, began) = (cpu_seconds(), stage.clock.now());
            window.set.wait();
            meanwhile(start);
            let tally = |thread: std::thread::ScopedJoinHandle<'_, L>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            let tallies = threads.into_iter().map(tally).collect();
            let wall = (stage.clock.now() - began).0 as f64 / 1e9;
            (tallies, (cpu_seconds() - used) / wall)
        })
    }

    /// Sets cells beside each other.
    pub fn finish(&self, cells: &mut [Cell]) {
        report::compare(cells);
    }
}

/// Seconds of processor time this process has used; 0 where the system does not tell in a way we know.
pub(crate) fn cpu_seconds() -> f64 {
    // The kernel counts in hundredths of a second for every architecture it tells user space about.
    let Ok(text) = std::fs::read_to_string("/proc/self/stat") else { return 0.0 };
    let after_name = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    let field = |index: usize| after_name.split_whitespace().nth(index)?.parse::<f64>().ok();
    (field(11).unwrap_or(0.0) + field(12).unwrap_or(0.0)) / 100.0
}

/// Requests a second of a client, averaged over `seconds` for a trace; 0 for a closed loop.
fn rate_of(client: &Client, seconds: Option<f64>) -> f64 {
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

impl Stage<'_> {
    /// One request, from question to answer.
    fn once(&self, model: &KeptModel, key: ModelKey, class: Class) -> Result<Answered, LiveError> {
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
        Ok(Answered { outputs: reply.result.map_err(broken)?, busy })
    }

    /// What each client asks for, and how long the device is busy with it when nothing disturbs it.
    fn targets(
        &self,
        workload: &str,
        clients: &[Client],
    ) -> Result<Vec<(Target, Nanos)>, LiveError> {
        let target = |client: &Client| {
            let found = self.models.iter().find(|(model, _)| model.name == client.model);
            let (model, key) = found.ok_or_else(|| LiveError::NoModel {
                workload: workload.to_string(),
                model: client.model.clone(),
            })?;
            let mut busy = Nanos::MAX;
            let mut expected = Vec::new();
            // The first run prepares what later ones find.
            for _ in 0..5 {
                let answered = self.once(model, *key.hold(), client.class)?;
                busy = busy.min(answered.busy);
                expected = answered.outputs;
            }
            let inputs = model.inputs.clone();
            let expected = Arc::new(expected);
            let key = key.clone();
            Ok((Target { key, class: client.class, inputs, expected }, busy))
        };
        clients.iter().map(target).collect()
    }
}

struct Answered {
    outputs: Vec<Tensor>,
    busy: Nanos,
}

/// What a cell's clients brought home.
struct Outcome<'a> {
    clients: &'a [Client],
    offered: Vec<f64>,
    alone_busy: Vec<Nanos>,
    tallies: Vec<Tally>,
    start: Nanos,
    seconds: f64,
}

impl Outcome<'_> {
    /// Answers a second that came inside the window.
    fn rps(&self, tally: &Tally) -> f64 {
        let end = self.start + Nanos((self.seconds * 1e9) as u64);
        let inside = tally.answers.iter().filter(|a| a.asked + a.latency <= end).count();
        inside as f64 / self.seconds
    }

    fn of(&self, class: Class) -> impl Iterator<Item = (usize, &Client, &Tally)> {
        let pairs = self.clients.iter().zip(&self.tallies).enumerate();
        pairs.filter(move |(_, (client, _))| client.class == class).map(|(i, (c, t))| (i, c, t))
    }

    fn cell(&self, stage: &Stage<'_>) -> Cell {
        let latencies = |tally: &Tally| tally.answers.iter().map(|a| a.latency).collect::<Vec<_>>();
        let rt_model = |(index, client, tally): (usize, &Client, &Tally)| RealTimeModel {
            model: client.model.clone(),
            offered_rps: round(self.offered[index]),
            latency: Latency::of(&mut latencies(tally)),
            increase: Increase::default(),
            late: tally.late,
            dropped: tally.dropped,
        };
        let be_model = |(index, client, tally): (usize, &Client, &Tally)| {
            let busy: u64 = tally.answers.iter().map(|answer| answer.timing.busy.0).sum();
            BestEffortModel {
                model: client.model.clone(),
                rps: round(self.rps(tally)),
                latency: Latency::of(&mut latencies(tally)),
                busy_us: round(busy as f64 / tally.answers.len().max(1) as f64 / 1e3),
                alone_busy_us: round(self.alone_busy[index].0 as f64 / 1e3),
            }
        };
        let sum = |class| self.of(class).map(|(_, _, tally)| self.rps(tally)).sum::<f64>();
        let (rt_rps, be_rps) = (sum(Class::RealTime), sum(Class::BestEffort));
        let mut all: Vec<Nanos> =
            self.of(Class::RealTime).flat_map(|(_, _, tally)| latencies(tally)).collect();
        let rt_models: Vec<RealTimeModel> = self.of(Class::RealTime).map(rt_model).collect();
        let parts = self.parts();
        Cell {
            workload: String::new(),
            rates: String::new(),
            policy: String::new(),
            seconds: round(self.seconds),
            rt_share_pct: 0.0,
            rt: Latency::of(&mut all),
            rt_increase: Increase::default(),
            rt_parts: Parts::of(&parts),
            rt_slowest: Parts::of(&parts[..parts.len().div_ceil(100)]),
            rt_longest: Parts::longest(&parts),
            rt_rps: round(rt_rps),
            late: rt_models.iter().map(|model| model.late).sum(),
            dropped: rt_models.iter().map(|model| model.dropped).sum(),
            rt_models,
            be_rps: round(be_rps),
            be_models: self.of(Class::BestEffort).map(be_model).collect(),
            throughput_rps: round(rt_rps + be_rps),
            over_rt_only: 0.0,
            over_free_streams: None,
            preempted: self.preempted(stage),
            cpu_cores: 0.0,
            lock: self.lock(stage),
            errors: self.tallies.iter().map(|tally| tally.errors).sum(),
            first_error: self.tallies.iter().find_map(|tally| tally.first_error.clone()),
            wrong_outputs: self.tallies.iter().map(|tally| tally.wrong).sum(),
            violations: Vec::new(),
        }
    }

    /// Parts of real-time answers, the slowest first.
    fn parts(&self) -> Vec<[Nanos; 5]> {
        let answers = self.of(Class::RealTime).flat_map(|(_, _, tally)| &tally.answers);
        let mut answers: Vec<&Answer> = answers.collect();
        answers.sort_unstable_by_key(|answer| std::cmp::Reverse(answer.latency));
        answers.into_iter().map(Answer::parts).collect()
    }

    fn lock(&self, stage: &Stage<'_>) -> Lock {
        let contention = stage.node.contention();
        let waits = contention.waits as f64;
        Lock {
            waits_per_second: round(waits / (stage.clock.now().0 as f64 / 1e9)),
            mean_us: round(contention.waited.0 as f64 / waits.max(1.0) / 1e3),
            max_us: round(contention.longest.0 as f64 / 1e3),
        }
    }

    fn preempted(&self, stage: &Stage<'_>) -> Preempted {
        let recent = stage.node.preemptions().recent;
        let counted =
            recent.iter().filter(|p| p.requested_at >= self.start && p.caused_by.is_some());
        let counted: Vec<_> = counted.collect();
        let mut taken: Vec<Nanos> = counted.iter().map(|p| p.latency()).collect();
        let best_effort = self.of(Class::BestEffort).flat_map(|(_, _, tally)| &tally.answers);
        let busy: u64 = best_effort.map(|answer| answer.timing.busy.0).sum();
        let leaving: u64 = taken.iter().map(|span| span.0).sum();
        Preempted {
            count: counted.len() as u64,
            finished_first: counted.iter().filter(|p| p.finished).count() as u64,
            leave: Latency::of(&mut taken),
            leaving_pct: round(leaving as f64 / busy.max(1) as f64 * 100.0),
        }
    }
}
