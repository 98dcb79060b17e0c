//! More models than memory, in real time: what loading and evicting weights costs the requests that
//! wait for it, and those that do not.
//!
//! Models are copies of a few networks. Each has weights of its own, so that a reply computed with
//! another copy's weights is detected. A request is cold if its model is not fully resident when it
//! is sent.

mod co_located;
mod report;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use base::{Bytes, Clock, MonotonicClock, Nanos, Random};
use device::{Device, DeviceError, Program};
use model::config::{Batching, BatchingPolicy, Class, ModelConfig};
use model::{DataType, LaunchPlan, Tensor};
use runtime::{ModelKey, Node, NodeError, NodeOptions, Rejection, Reply, Request};
use thiserror::Error;

use crate::live::Latency;

pub use self::co_located::{BackgroundLoad, CoLocatedReport};
pub use self::report::{SwapReport, SwapRow, table};

/// How long requests may take to end after a case.
const DRAIN: Duration = Duration::from_secs(60);

/// How long memory may take to be released.
const SETTLE: Duration = Duration::from_secs(10);

/// Runs of each model before the measurement, and runs that are timed.
const WARM_RUNS: usize = 5;
const TIMED_RUNS: usize = 60;

/// A model of the benchmark.
pub struct SwapModel {
    /// Its name.
    pub name: String,
    /// The loaded model.
    pub program: Arc<dyn Program>,
    /// One tensor per input.
    pub inputs: Vec<Tensor>,
}

/// The order in which models are requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessPattern {
    /// Round robin.
    Sequential,
    /// Any model, equally likely.
    Uniform,
    /// The n-th model with a probability proportional to n^-1.1.
    Zipf,
}

impl AccessPattern {
    /// All patterns.
    pub const ALL: [AccessPattern; 3] =
        [AccessPattern::Sequential, AccessPattern::Uniform, AccessPattern::Zipf];

    /// Name in reports and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            AccessPattern::Sequential => "sequential",
            AccessPattern::Uniform => "uniform",
            AccessPattern::Zipf => "zipf",
        }
    }

    /// The pattern with this name.
    pub fn parse(name: &str) -> Option<AccessPattern> {
        AccessPattern::ALL.into_iter().find(|access| access.name() == name)
    }
}

/// One case of the benchmark.
#[derive(Clone, Copy, Debug)]
pub struct SwapCase {
    /// How many models are requested.
    pub count: usize,
    /// How many of them fit into memory.
    pub resident: usize,
    /// The order of requests.
    pub access: AccessPattern,
    /// Requests outstanding.
    pub concurrency: usize,
}

/// Options of all cases.
#[derive(Clone, Copy, Debug)]
pub struct SwapOptions {
    /// Seconds of a case.
    pub seconds: f64,
    /// Class of requests.
    pub class: Class,
    /// Seed of random access.
    pub seed: u64,
    /// Speed of loading weights, measured separately.
    pub bytes_per_second: f64,
}

/// Why a case cannot run.
#[derive(Debug, Error)]
pub enum SwapError {
    /// The node does not start.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// The device refuses.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A model does not run.
    #[error("model '{model}' does not run: {why}")]
    Broken {
        /// The model.
        model: String,
        /// Why.
        why: Rejection,
    },
    /// The device never evicts weights.
    #[error("the weights of model '{0}' are never evicted on this device")]
    Fixed(String),
    /// A case needs more models than there are.
    #[error("{0} models are needed, there are {1}")]
    TooFew(usize, usize),
    /// Requests did not end.
    #[error("requests were still in flight a minute after the end")]
    Stuck,
    /// Memory was not released.
    #[error("{0} of weights were still on the device after all were evicted")]
    Leak(Bytes),
}

/// Runs cases on one device.
pub struct SwapBenchmark {
    device: Arc<dyn Device>,
    models: Vec<SwapModel>,
    options: SwapOptions,
    expected: Vec<Vec<Tensor>>,
    /// Latency of a request to a resident model.
    warm: Latency,
    bytes: u64,
    distinct: bool,
}

/// Copy number `copy` of `plan`, with one vector of weights changed so that its replies differ from
/// those of other copies.
pub fn with_distinct_weights(plan: &LaunchPlan, copy: usize) -> LaunchPlan {
    let mut varied = plan.clone();
    let vectors = |tensor: &Tensor| tensor.dtype() == DataType::F32 && tensor.shape().len() == 1;
    let read_by =
        |id: &model::ValueId| plan.steps.iter().rposition(|step| step.inputs.contains(&Some(*id)));
    let last = (0..plan.constants.len())
        .filter(|at| vectors(&plan.constants[*at].1))
        .max_by_key(|at| read_by(&plan.constants[*at].0));
    if let Some(at) = last
        && let Some(numbers) = plan.constants[at].1.to_vec::<f32>()
    {
        let shape = plan.constants[at].1.shape().to_vec();
        let moved = numbers.into_iter().enumerate();
        let moved = moved.map(|(index, x)| x + ((copy * 7 + index) % 31) as f32 / 64.0).collect();
        if let Ok(tensor) = Tensor::from_vec::<f32>(shape, moved) {
            varied.constants[at].1 = tensor;
        }
    }
    varied
}

/// A node with some of the models.
struct TestNode<'a> {
    node: Arc<Node>,
    clock: Arc<dyn Clock>,
    keys: Vec<ModelKey>,
    swap: &'a SwapBenchmark,
}

impl SwapBenchmark {
    /// Runs each model alone, for its outputs and its latency.
    pub fn new(
        device: Arc<dyn Device>,
        models: Vec<SwapModel>,
        options: SwapOptions,
    ) -> Result<SwapBenchmark, SwapError> {
        let mut swap = SwapBenchmark {
            device,
            models,
            options,
            expected: Vec::new(),
            warm: Latency::default(),
            bytes: 0,
            distinct: true,
        };
        for model in &swap.models {
            let weights = model.program.residency();
            let weights = weights.ok_or_else(|| SwapError::Fixed(model.name.clone()))?;
            swap.bytes = swap.bytes.max(weights.bytes().0);
        }
        let (expected, warm) = swap.measure_warm()?;
        (swap.expected, swap.warm) = (expected, warm);
        let same = |i: usize| (0..i).any(|j| swap.expected[i] == swap.expected[j]);
        swap.distinct = !(1..swap.expected.len()).any(same);
        Ok(swap)
    }

    /// Latency of a request to a resident model.
    pub fn warm(&self) -> Latency {
        self.warm
    }

    /// Bytes of the largest model.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.bytes)
    }

    /// Whether the replies of all models differ.
    pub fn distinct(&self) -> bool {
        self.distinct
    }

    fn measure_warm(&self) -> Result<(Vec<Vec<Tensor>>, Latency), SwapError> {
        let test_node =
            self.test_node(self.models.len(), self.memory_for(self.models.len()), None)?;
        let (mut expected, mut samples) = (Vec::new(), Vec::new());
        for (index, model) in self.models.iter().enumerate() {
            let broken = |why| SwapError::Broken { model: model.name.clone(), why };
            let mut outputs = Vec::new();
            for _ in 0..WARM_RUNS {
                outputs = test_node
                    .send_request(index, self.options.class, true)
                    .map_err(broken)?
                    .outputs;
            }
            // A few models are timed in full; the others are copies.
            let runs = if index < 4 { TIMED_RUNS } else { 1 };
            for _ in 0..runs {
                samples.push(
                    test_node
                        .send_request(index, self.options.class, true)
                        .map_err(broken)?
                        .latency,
                );
            }
            expected.push(outputs);
        }
        test_node.end()?;
        Ok((expected, Latency::of(&mut samples)))
    }

    /// Memory that `models` models need.
    fn memory_for(&self, models: usize) -> Bytes {
        Bytes(self.bytes * models as u64)
    }

    fn test_node(
        &self,
        count: usize,
        memory: Bytes,
        pinned: Option<usize>,
    ) -> Result<TestNode<'_>, SwapError> {
        if count > self.models.len() {
            return Err(SwapError::TooFew(count, self.models.len()));
        }
        let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::new());
        let options = NodeOptions { memory: Some(memory), ..NodeOptions::default() };
        let node = Arc::new(Node::start(self.device.clone(), options, clock.clone())?);
        let keys = self.models[..count].iter().enumerate().map(|(index, model)| {
            // No batches: replies are compared bit by bit, and a batch rounds differently.
            let batching = Batching { policy: BatchingPolicy::None, ..Batching::default() };
            let pinned = pinned == Some(index);
            let config = ModelConfig { pinned, batching, ..ModelConfig::default() };
            node.add_model(model.program.clone(), &config)
        });
        let keys = keys.collect();
        Ok(TestNode { node, clock, keys, swap: self })
    }

    /// Runs one case.
    pub fn run(&self, case: SwapCase) -> Result<SwapRow, SwapError> {
        let test_node = self.test_node(case.count, self.memory_for(case.resident), None)?;
        let plan = AccessSequence::new(case, self.options.seed);
        let end = test_node.clock.now() + Nanos((self.options.seconds * 1e9) as u64);
        let began = Instant::now();
        let clients_samples = std::thread::scope(|scope| {
            let clients: Vec<_> = (0..case.concurrency)
                .map(|client| {
                    let (test_node, plan) = (&test_node, &plan);
                    scope.spawn(move || test_node.client(plan, client, end))
                })
                .collect();
            clients.into_iter().map(|client| client.join().unwrap_or_default()).collect::<Vec<_>>()
        });
        let seconds = began.elapsed().as_secs_f64();
        let memory = test_node.node.memory();
        test_node.end()?;
        Ok(self.row(case, seconds, clients_samples, &memory))
    }

    fn row(
        &self,
        case: SwapCase,
        seconds: f64,
        clients_samples: Vec<ClientSamples>,
        memory: &runtime::NodeMemory,
    ) -> SwapRow {
        let mut all = ClientSamples::default();
        for samples in clients_samples {
            all.warm.extend(samples.warm);
            all.cold.extend(samples.cold);
            all.errors += samples.errors;
            all.wrong += samples.wrong;
            all.first_error = all.first_error.or(samples.first_error);
        }
        let replies = all.warm.len() + all.cold.len();
        let transfer_us = self.bytes as f64 / self.options.bytes_per_second * 1e6;
        let bound_us = transfer_us * 1.1 + self.warm.p50_us;
        let within = all.cold.iter().filter(|cold| cold.0 as f64 / 1e3 <= bound_us).count();
        let percent = |part: usize, of: usize| part as f64 / of.max(1) as f64 * 100.0;
        SwapRow {
            models: case.count,
            resident: case.resident,
            access: case.access.name().to_string(),
            concurrency: case.concurrency,
            requests: replies as u64,
            throughput_rps: report::round(replies as f64 / seconds),
            warm_pct: report::round(percent(all.warm.len(), replies)),
            cold_within_bound_pct: report::round(percent(within, all.cold.len())),
            warm: Latency::of(&mut all.warm),
            cold: Latency::of(&mut all.cold),
            transfer_us: report::round(transfer_us),
            bound_us: report::round(bound_us),
            loads: memory.swaps.loads,
            refused: memory.swaps.refused,
            evictions: memory.swaps.evictions,
            load_p50_us: report::round(memory.swaps.load_times.quantile(0.5).0 as f64 / 1e3),
            gigabytes_per_second: report::round(memory.swaps.loaded.0 as f64 / seconds / 1e9),
            errors: all.errors,
            wrong: all.wrong,
            first_error: all.first_error,
        }
    }
}

/// The sequence of models to request.
struct AccessSequence {
    case: SwapCase,
    seed: u64,
    turn: AtomicU64,
    /// Cumulative probability by rank.
    ends: Vec<f64>,
}

impl AccessSequence {
    fn new(case: SwapCase, seed: u64) -> AccessSequence {
        let weight = |rank: usize| match case.access {
            AccessPattern::Zipf => (rank as f64 + 1.0).powf(-1.1),
            _ => 1.0,
        };
        let total: f64 = (0..case.count).map(weight).sum();
        let mut sum = 0.0;
        let ends = (0..case.count).map(|rank| {
            sum += weight(rank) / total;
            sum
        });
        AccessSequence { case, seed, turn: AtomicU64::new(0), ends: ends.collect() }
    }

    fn next(&self, random: &mut Random) -> usize {
        if self.case.access == AccessPattern::Sequential {
            return (self.turn.fetch_add(1, Ordering::Relaxed) % self.case.count as u64) as usize;
        }
        let at = random.unit_f64();
        self.ends.partition_point(|end| *end < at).min(self.case.count - 1)
    }
}

/// What a client measured.
#[derive(Default)]
struct ClientSamples {
    warm: Vec<Nanos>,
    cold: Vec<Nanos>,
    errors: u64,
    wrong: u64,
    first_error: Option<String>,
}

struct TimedReply {
    latency: Nanos,
    cold: bool,
    outputs: Vec<Tensor>,
}

impl TestNode<'_> {
    /// Sends one request and waits for the reply; polls without pause if `spin`.
    fn send_request(
        &self,
        model: usize,
        class: Class,
        spin: bool,
    ) -> Result<TimedReply, Rejection> {
        let key = self.keys[model];
        let cold = !self.node.is_resident(key);
        let request = Request {
            model: key,
            inputs: self.swap.models[model].inputs.clone(),
            class: Some(class),
            priority: None,
            timeout: None,
        };
        let sent = self.clock.now();
        let reply = submit(&self.node, request, spin);
        let latency = self.clock.now() - sent;
        reply.result.map(|outputs| TimedReply { latency, cold, outputs })
    }

    fn client(&self, plan: &AccessSequence, client: usize, end: Nanos) -> ClientSamples {
        let mut random = Random::new(plan.seed ^ ((client as u64 + 1) << 32));
        let mut samples = ClientSamples::default();
        while self.clock.now() < end {
            let model = plan.next(&mut random);
            match self.send_request(model, self.swap.options.class, plan.case.concurrency <= 2) {
                Ok(reply) => {
                    samples.wrong += u64::from(reply.outputs != self.swap.expected[model]);
                    let kind = if reply.cold { &mut samples.cold } else { &mut samples.warm };
                    kind.push(reply.latency);
                }
                Err(why) => {
                    samples.errors += 1;
                    samples.first_error.get_or_insert_with(|| why.to_string());
                }
            }
        }
        samples
    }

    /// Waits for all requests and evicts everything.
    fn end(self) -> Result<(), SwapError> {
        if !self.node.drain(DRAIN) {
            return Err(SwapError::Stuck);
        }
        // A load in flight that no request waits for may end later; eviction follows it.
        let since = Instant::now();
        for model in &self.swap.models[..self.keys.len()] {
            if let Some(weights) = model.program.residency() {
                weights.evict();
            }
        }
        let held = || self.swap.device.memory_use().map_or(Bytes(0), |used| used.weights);
        while held() > Bytes(0) {
            if since.elapsed() > SETTLE {
                return Err(SwapError::Leak(held()));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

/// Sends one request and waits for its reply.
fn submit(node: &Node, request: Request, spin: bool) -> Reply {
    if !spin {
        let (sender, receiver) = mpsc::sync_channel(1);
        let reply = move |reply| {
            let _ = sender.send(reply);
        };
        node.submit(request, Box::new(reply));
        return receiver.recv().unwrap_or_else(|_| lost());
    }
    let place: Arc<(AtomicBool, Mutex<Option<Reply>>)> = Arc::default();
    let theirs = place.clone();
    let reply = move |reply| {
        *theirs.1.lock().unwrap_or_else(PoisonError::into_inner) = Some(reply);
        theirs.0.store(true, Ordering::Release);
    };
    node.submit(request, Box::new(reply));
    while !place.0.load(Ordering::Acquire) {
        std::hint::spin_loop();
    }
    place.1.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_else(lost)
}

/// A reply that never came counts as an error.
fn lost() -> Reply {
    Reply { result: Err(Rejection::Cancelled), timing: runtime::Timing::default() }
}
