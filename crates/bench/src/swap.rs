//! More models than memory, in real time: what swapping costs those who wait for it, and those who do not.
//!
//! Models are copies of a few networks, each with weights of its own, so that an answer computed with another copy's weights is
//! noticed. A request is cold when its model's weights are not all on the device as it is asked.

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

/// How long memory may take to come back.
const SETTLE: Duration = Duration::from_secs(10);

/// Runs of each model before anything is measured, and runs that tell how long one takes.
const WARM_RUNS: usize = 5;
const TIMED_RUNS: usize = 60;

/// A model to swap.
pub struct SwapModel {
    /// Its name.
    pub name: String,
    /// It.
    pub program: Arc<dyn Program>,
    /// One tensor per input.
    pub inputs: Vec<Tensor>,
}

/// In which order models are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessPattern {
    /// One after another, round and round.
    Sequential,
    /// Any, each as likely.
    Uniform,
    /// The n-th with probability in proportion to n^-1.1.
    Zipf,
}

impl AccessPattern {
    /// All of them.
    pub const ALL: [AccessPattern; 3] =
        [AccessPattern::Sequential, AccessPattern::Uniform, AccessPattern::Zipf];

    /// Its name in reports and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            AccessPattern::Sequential => "sequential",
            AccessPattern::Uniform => "uniform",
            AccessPattern::Zipf => "zipf",
        }
    }

    /// The one of this name.
    pub fn parse(name: &str) -> Option<AccessPattern> {
        AccessPattern::ALL.into_iter().find(|access| access.name() == name)
    }
}

/// One experiment.
#[derive(Clone, Copy, Debug)]
pub struct SwapCase {
    /// How many models are asked for.
    pub count: usize,
    /// How many of them have room.
    pub room: usize,
    /// In which order.
    pub access: AccessPattern,
    /// Requests outstanding.
    pub concurrency: usize,
}

/// How cases are run.
#[derive(Clone, Copy, Debug)]
pub struct SwapOptions {
    /// Seconds of a case.
    pub seconds: f64,
    /// Class of requests.
    pub class: Class,
    /// Seed of random orders.
    pub seed: u64,
    /// How fast weights can be brought, as measured apart from all this.
    pub bytes_per_second: f64,
}

/// Why it does not run.
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
    /// The device keeps all weights.
    #[error("the weights of model '{0}' do not come and go on this device")]
    Fixed(String),
    /// A case asks for more models than there are.
    #[error("{0} models are asked for, {1} are there")]
    TooFew(usize, usize),
    /// Requests did not end.
    #[error("requests were still under way a minute after the end")]
    Stuck,
    /// Memory did not come back.
    #[error("{0} of weights were still on the device after all were evicted")]
    Leak(Bytes),
}

/// Runs cases on one device.
pub struct Swap {
    device: Arc<dyn Device>,
    models: Vec<SwapModel>,
    options: SwapOptions,
    expected: Vec<Vec<Tensor>>,
    /// A run of each model whose weights are there.
    warm: Latency,
    bytes: u64,
    distinct: bool,
}

/// Copy number `copy` of `plan`: the same but for one vector of weights, so that its answers are its own.
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
    swap: &'a Swap,
}

impl Swap {
    /// Runs each model alone, for its answers and its time.
    pub fn new(
        device: Arc<dyn Device>,
        models: Vec<SwapModel>,
        options: SwapOptions,
    ) -> Result<Swap, SwapError> {
        let mut swap = Swap {
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

    /// Latency of a request whose model is on the device.
    pub fn warm(&self) -> Latency {
        self.warm
    }

    /// Bytes of the largest model.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.bytes)
    }

    /// Whether every model has answers of its own.
    pub fn distinct(&self) -> bool {
        self.distinct
    }

    fn measure_warm(&self) -> Result<(Vec<Vec<Tensor>>, Latency), SwapError> {
        let stage = self.stage(self.models.len(), self.memory_for(self.models.len()), None)?;
        let (mut expected, mut samples) = (Vec::new(), Vec::new());
        for (index, model) in self.models.iter().enumerate() {
            let broken = |why| SwapError::Broken { model: model.name.clone(), why };
            let mut outputs = Vec::new();
            for _ in 0..WARM_RUNS {
                outputs = stage.ask(index, self.options.class, true).map_err(broken)?.outputs;
            }
            // One model is timed in full; the others are of its kind.
            let runs = if index < 4 { TIMED_RUNS } else { 1 };
            for _ in 0..runs {
                samples.push(stage.ask(index, self.options.class, true).map_err(broken)?.latency);
            }
            expected.push(outputs);
        }
        stage.end()?;
        Ok((expected, Latency::of(&mut samples)))
    }

    /// Memory that so many models need.
    fn memory_for(&self, models: usize) -> Bytes {
        Bytes(self.bytes * models as u64)
    }

    fn stage(
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
            // Each on its own: answers are compared to the bit, and a batch rounds differently.
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
        let stage = self.stage(case.count, self.memory_for(case.room), None)?;
        let plan = AccessSequence::new(case, self.options.seed);
        let end = stage.clock.now() + Nanos((self.options.seconds * 1e9) as u64);
        let began = Instant::now();
        let clients_samples = std::thread::scope(|scope| {
            let clients: Vec<_> = (0..case.concurrency)
                .map(|client| {
                    let (stage, plan) = (&stage, &plan);
                    scope.spawn(move || stage.client(plan, client, end))
                })
                .collect();
            clients.into_iter().map(|client| client.join().unwrap_or_default()).collect::<Vec<_>>()
        });
        let seconds = began.elapsed().as_secs_f64();
        let memory = stage.node.memory();
        stage.end()?;
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
        let answered = all.warm.len() + all.cold.len();
        let transfer_us = self.bytes as f64 / self.options.bytes_per_second * 1e6;
        let bound_us = transfer_us * 1.1 + self.warm.p50_us;
        let within = all.cold.iter().filter(|cold| cold.0 as f64 / 1e3 <= bound_us).count();
        let percent = |part: usize, of: usize| part as f64 / of.max(1) as f64 * 100.0;
        SwapRow {
            models: case.count,
            room: case.room,
            access: case.access.name().to_string(),
            concurrency: case.concurrency,
            requests: answered as u64,
            throughput_rps: report::round(answered as f64 / seconds),
            warm_pct: report::round(percent(all.warm.len(), answered)),
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

/// Which model is asked for next.
struct AccessSequence {
    case: SwapCase,
    seed: u64,
    turn: AtomicU64,
    /// Ends of the models' shares of one, by rank.
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

/// What a client saw.
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
    /// Asks `model` once and waits; looks without pause when `spin`.
    fn ask(&self, model: usize, class: Class, spin: bool) -> Result<TimedReply, Rejection> {
        let key = self.keys[model];
        let cold = !self.node.is_resident(key);
        let request = Request {
            model: key,
            inputs: self.swap.models[model].inputs.clone(),
            class: Some(class),
            priority: None,
            timeout: None,
        };
        let asked = self.clock.now();
        let reply = submit(&self.node, request, spin);
        let latency = self.clock.now() - asked;
        reply.result.map(|outputs| TimedReply { latency, cold, outputs })
    }

    fn client(&self, plan: &AccessSequence, client: usize, end: Nanos) -> ClientSamples {
        let mut random = Random::new(plan.seed ^ ((client as u64 + 1) << 32));
        let mut samples = ClientSamples::default();
        while self.clock.now() < end {
            let model = plan.next(&mut random);
            match self.ask(model, self.swap.options.class, plan.case.concurrency <= 2) {
                Ok(answer) => {
                    samples.wrong += u64::from(answer.outputs != self.swap.expected[model]);
                    let kind = if answer.cold { &mut samples.cold } else { &mut samples.warm };
                    kind.push(answer.latency);
                }
                Err(why) => {
                    samples.errors += 1;
                    samples.first_error.get_or_insert_with(|| why.to_string());
                }
            }
        }
        samples
    }

    /// Waits for everything and leaves the device as it was found.
    fn end(self) -> Result<(), SwapError> {
        if !self.node.drain(DRAIN) {
            return Err(SwapError::Stuck);
        }
        // A load that nobody waits for any more may still be under way; behind it everything is evicted.
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

/// Sends one request and waits for its answer.
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
