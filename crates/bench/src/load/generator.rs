//! Sends requests at random times.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use base::{Clock, Nanos, Random};
use device::{
    Completion, CompletionSink, Device, DeviceError, Outcome, Program, QueueOptions, Segment,
};
use model::Tensor;
use model::config::Class;
use runtime::{ModelKey, Node, Rejection, Reply, Request};

use super::LoadModel;
use super::report::PhaseResult;
use crate::live::LiveError;
use crate::live::cpu_seconds;
use crate::live::report::Latency;

/// How long before a request is due a thread stops sleeping and spins.
const SPIN_BEFORE: Duration = Duration::from_micros(120);

/// How far an output may differ from that of the same input alone, relative to its largest value:
/// larger batches use other kernels.
const TOLERANCE: f32 = 0.05;

/// Number of threads that send requests.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(2, |cores| (cores.get() / 2).clamp(1, 8))
}

/// A load of constant mean rate.
#[derive(Clone, Copy, Debug)]
pub(super) struct LoadPhase {
    pub(super) rate: f64,
    pub(super) seconds: f64,
    pub(super) seed: u64,
}

/// Sends requests to one model.
pub(super) struct RequestGenerator<'a> {
    model: &'a LoadModel,
    key: ModelKey,
    clock: Arc<dyn Clock>,
    expected: Arc<Vec<Vec<f32>>>,
    outstanding: Arc<AtomicUsize>,
}

/// Counts replies.
#[derive(Default)]
struct ReplyCounters {
    latencies: Mutex<Vec<Nanos>>,
    rows: AtomicU64,
    batches: AtomicU64,
    in_time: AtomicU64,
    wrong: AtomicU64,
    errors: AtomicU64,
}

/// A phase whose last replies may be outstanding.
pub(super) struct RunningPhase {
    counters: Vec<Arc<ReplyCounters>>,
    phase: LoadPhase,
    sent: u64,
    cpu_cores: f64,
}

impl<'a> RequestGenerator<'a> {
    /// Computes the output of each input alone.
    pub(super) fn new(
        node: &Node,
        key: ModelKey,
        model: &'a LoadModel,
        clock: Arc<dyn Clock>,
    ) -> Result<RequestGenerator<'a>, LiveError> {
        let mut generator = RequestGenerator {
            model,
            key,
            clock,
            expected: Arc::default(),
            outstanding: Arc::default(),
        };
        let mut expected = Vec::new();
        for index in 0..model.inputs.len() {
            expected.push(values(&generator.request_once(node, index)?.0));
        }
        generator.expected = Arc::new(expected);
        Ok(generator)
    }

    pub(super) fn name(&self) -> &str {
        &self.model.name
    }

    pub(super) fn outstanding(&self) -> usize {
        self.outstanding.load(Ordering::Acquire)
    }

    fn request(&self, index: usize) -> Request {
        let inputs = self.model.inputs[index].clone();
        let class = Some(Class::RealTime);
        Request { model: self.key, inputs, class, priority: None, timeout: None }
    }

    fn request_once(&self, node: &Node, index: usize) -> Result<(Vec<Tensor>, Nanos), LiveError> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let sent = self.clock.now();
        let reply = move |reply: Reply| {
            // The receiver waits below.
            let _ = sender.send(reply);
        };
        node.submit(self.request(index), Box::new(reply));
        let broken = |why| LiveError::Broken { model: self.model.name.clone(), why };
        let reply = receiver.recv().map_err(|_| broken(Rejection::ShuttingDown))?;
        Ok((reply.result.map_err(broken)?, self.clock.now() - sent))
    }

    /// Median latency of requests one after another.
    pub(super) fn alone(&self, node: &Node, count: usize) -> Result<Nanos, LiveError> {
        let mut times = Vec::new();
        for round in 0..count {
            times.push(self.request_once(node, round % self.model.inputs.len())?.1);
        }
        times.sort_unstable();
        Ok(times[times.len() / 2])
    }

    /// Time of one batch of `rows`, copies included.
    pub(super) fn batch_time(
        &self,
        program: &dyn Program,
        device: &dyn Device,
        rows: usize,
    ) -> Result<Nanos, LiveError> {
        struct Sink(mpsc::Sender<Completion>);
        impl CompletionSink for Sink {
            fn complete(&self, completion: Completion) {
                // The receiver waits below.
                let _ = self.0.send(completion);
            }
        }
        let failed = |err: DeviceError| LiveError::Broken {
            model: self.model.name.clone(),
            why: err.into(),
        };
        let (sender, receiver) = mpsc::channel();
        let options = QueueOptions { id: 0, capacity: 1, high_priority: true, preemptible: false };
        let queue = device.open_queue(options, Arc::new(Sink(sender))).map_err(failed)?;
        let mut shortest = Nanos::MAX;
        for _ in 0..5 {
            let join = |input: usize| {
                let parts: Vec<&Tensor> = (0..rows)
                    .map(|row| &self.model.inputs[row % self.model.inputs.len()][input])
                    .collect();
                Tensor::of_rows(&parts)
            };
            let inputs = (0..self.model.inputs[0].len()).map(join).collect::<Option<Vec<_>>>();
            let bad = || failed(DeviceError::BadInput("inputs have other sizes".to_string()));
            let task = program.prepare(inputs.ok_or_else(bad)?).map_err(failed)?;
            let steps = 0..task.step_count();
            let began = self.clock.now();
            let full = || failed(DeviceError::BadPlan("an idle queue is full".to_string()));
            queue.launch(Segment { token: 0, task, steps }).map_err(|_| full())?;
            let done = receiver.recv().map_err(|_| full())?;
            if let Outcome::Failed(err) = done.outcome {
                return Err(failed(err));
            }
            shortest = shortest.min(self.clock.now() - began);
        }
        Ok(shortest)
    }

    /// Replies per second when there is always a request waiting.
    pub(super) fn capacity(&self, node: &Node, seconds: f64) -> Result<f64, LiveError> {
        let end = self.clock.now() + Nanos((seconds * 1e9) as u64);
        let began = self.clock.now();
        let replies = AtomicU64::new(0);
        let failed: Mutex<Option<LiveError>> = Mutex::new(None);
        std::thread::scope(|scope| {
            for _ in 0..threads() {
                scope.spawn(|| {
                    if let Err(err) = self.keep_busy(node, end, &replies) {
                        *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(err);
                    }
                });
            }
        });
        if let Some(err) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(err);
        }
        let spent = (self.clock.now() - began).0 as f64 / 1e9;
        Ok(replies.load(Ordering::Relaxed) as f64 / spent)
    }

    /// Keeps a dozen requests in flight until `end`.
    fn keep_busy(&self, node: &Node, end: Nanos, replies: &AtomicU64) -> Result<(), LiveError> {
        let (sender, receiver) = mpsc::channel();
        let send = |index: usize| {
            let sender = sender.clone();
            let reply = move |reply: Reply| {
                let _ = sender.send(reply.result.map(|_| ()));
            };
            node.submit(self.request(index % self.model.inputs.len()), Box::new(reply));
        };
        let (mut index, mut in_flight) = (0, 0);
        while self.clock.now() < end || in_flight > 0 {
            while in_flight < 12 && self.clock.now() < end {
                send(index);
                (index, in_flight) = (index + 1, in_flight + 1);
            }
            let broken = |why| LiveError::Broken { model: self.model.name.clone(), why };
            if let Ok(result) = receiver.recv() {
                result.map_err(broken)?;
                replies.fetch_add(1, Ordering::Relaxed);
                in_flight -= 1;
            }
        }
        Ok(())
    }

    /// Sends requests at random times, `rate` per second on average.
    pub(super) fn run(&self, node: &Node, phase: LoadPhase) -> RunningPhase {
        let (used, began) = (cpu_seconds(), self.clock.now());
        let start = began + Nanos::from_millis(2);
        let end = start + Nanos((phase.seconds * 1e9) as u64);
        let count = threads();
        let mut seeds = Random::new(phase.seed);
        let (mut all_counters, mut sent) = (Vec::new(), 0);
        std::thread::scope(|scope| {
            let mut handles = Vec::new();
            for _ in 0..count {
                let (counters, random) =
                    (Arc::new(ReplyCounters::default()), Random::new(seeds.next_u64()));
                all_counters.push(counters.clone());
                let mean = 1e9 * count as f64 / phase.rate.max(1.0);
                handles.push(
                    scope.spawn(move || {
                        self.send_on_time(node, (start, end), mean, random, &counters)
                    }),
                );
            }
            sent = handles.into_iter().map(|handle| handle.join().unwrap_or(0)).sum();
        });
        let wall = (self.clock.now() - began).0 as f64 / 1e9;
        RunningPhase {
            counters: all_counters,
            phase,
            sent,
            cpu_cores: (cpu_seconds() - used) / wall,
        }
    }

    fn send_on_time(
        &self,
        node: &Node,
        (start, end): (Nanos, Nanos),
        mean_gap_ns: f64,
        mut random: Random,
        counters: &Arc<ReplyCounters>,
    ) -> u64 {
        let (mut at, mut sent) = (start, 0);
        loop {
            at += Nanos(random.exponential(mean_gap_ns) as u64);
            if at >= end {
                return sent;
            }
            wait_until(&*self.clock, at);
            sent += 1;
            let index = random.below(self.model.inputs.len() as u64) as usize;
            let (counters, clock, expected) =
                (counters.clone(), self.clock.clone(), self.expected.clone());
            let outstanding = self.outstanding.clone();
            outstanding.fetch_add(1, Ordering::AcqRel);
            let check = sent.is_multiple_of(16);
            let reply = move |reply: Reply| {
                counters.take(reply, clock.now(), (at, end), check.then_some(&expected[index]));
                outstanding.fetch_sub(1, Ordering::AcqRel);
            };
            node.submit(self.request(index), Box::new(reply));
        }
    }
}

impl ReplyCounters {
    fn take(
        &self,
        reply: Reply,
        now: Nanos,
        (due, end): (Nanos, Nanos),
        expected: Option<&Vec<f32>>,
    ) {
        let outputs = match reply.result {
            Ok(outputs) => outputs,
            Err(_) => {
                self.errors.fetch_add(1, Ordering::Relaxed);
                return;
            }
        };
        if expected.is_some_and(|expected| !is_close(&values(&outputs), expected)) {
            self.wrong.fetch_add(1, Ordering::Relaxed);
        }
        if reply.timing.first {
            self.batches.fetch_add(1, Ordering::Relaxed);
            self.rows.fetch_add(reply.timing.rows.max(1) as u64, Ordering::Relaxed);
        }
        self.in_time.fetch_add(u64::from(now <= end), Ordering::Relaxed);
        self.latencies.lock().unwrap_or_else(PoisonError::into_inner).push(now - due);
    }
}

impl RunningPhase {
    /// The result, when all replies have come.
    pub(super) fn finish(self) -> PhaseResult {
        let mut latencies = Vec::new();
        for counters in &self.counters {
            latencies
                .append(&mut counters.latencies.lock().unwrap_or_else(PoisonError::into_inner));
        }
        let sum = |of: fn(&ReplyCounters) -> &AtomicU64| -> u64 {
            self.counters.iter().map(|counters| of(counters).load(Ordering::Relaxed)).sum()
        };
        let batches = sum(|counters| &counters.batches);
        PhaseResult {
            offered_rps: (self.sent as f64 / self.phase.seconds).round(),
            answered_rps: (sum(|counters| &counters.in_time) as f64 / self.phase.seconds).round(),
            latency: Latency::of(&mut latencies),
            mean_batch: (sum(|counters| &counters.rows) as f64 / batches.max(1) as f64 * 100.0)
                .round()
                / 100.0,
            batches,
            wrong: sum(|counters| &counters.wrong),
            errors: sum(|counters| &counters.errors),
            cpu_cores: (self.cpu_cores * 100.0).round() / 100.0,
        }
    }
}

/// All values of the first output.
fn values(outputs: &[Tensor]) -> Vec<f32> {
    outputs.first().and_then(Tensor::to_vec::<f32>).unwrap_or_default()
}

fn is_close(got: &[f32], want: &[f32]) -> bool {
    let largest = want.iter().fold(0f32, |max, value| max.max(value.abs())).max(1e-3);
    got.len() == want.len()
        && got.iter().zip(want).all(|(got, want)| (got - want).abs() <= TOLERANCE * largest)
}

/// Waits until `at`: sleeps, then spins for the last part.
fn wait_until(clock: &dyn Clock, at: Nanos) {
    loop {
        let in_flight = Duration::from(at - clock.now());
        if in_flight.is_zero() {
            return;
        }
        match in_flight.checked_sub(SPIN_BEFORE) {
            Some(sleep) if !sleep.is_zero() => std::thread::sleep(sleep),
            _ => std::hint::spin_loop(),
        }
    }
}
