//! Models with steps that have no GPU kernel: with the CPU in place of a GPU, and on a GPU where
//! there is one.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use base::Random;
use compiler::gpu::GpuCompiler;
use cpu::{CpuDevice, CpuOptions};
use cuda::{CudaDevice, CudaOptions, OpenError};
use device::hybrid::HybridDevice;
use device::hybrid::section::Side;
use device::residency::LoadProgress;
use device::{
    Completion, CompletionSink, Device, Outcome, Program, Queue, QueueOptions, Segment, Task,
};
use graph::SymDim;
use model::gpu::Precision;
use model::op::{Compare, MatMul, Op, Reduce, ReduceKind, Rnn, RnnCell, RnnDirection, Unary};
use model::{LaunchPlan, Tensor, ValueId};

use super::lowering_device::LoweringDevice;
use super::shapes::{Builder, CpuEvaluator};

pub fn numbers(random: &mut Random, shape: &[usize]) -> Tensor {
    let count = shape.iter().product();
    let data: Vec<f32> = (0..count).map(|_| random.symmetric_f32()).collect();
    Tensor::from_vec(shape.to_vec(), data).unwrap()
}

pub fn weight(b: &mut Builder, random: &mut Random, shape: &[usize]) -> ValueId {
    b.graph.add_constant("weight", numbers(random, shape))
}

fn product(b: &mut Builder, x: ValueId, weight: ValueId) -> ValueId {
    b.node(Op::MatMul(MatMul::default()), &[x, weight])
}

/// Products around a recurrent layer of two directions; length and batch are symbolic.
pub fn recurrent() -> LaunchPlan {
    let (mut b, mut random) = (Builder::default(), Random::new(1));
    let x = b.input(&[SymDim::symbol("t"), SymDim::symbol("n"), 16.into()]);
    let first = weight(&mut b, &mut random, &[16, 24]);
    let y = product(&mut b, x, first);
    let y = b.node(Op::Unary(Unary::Tanh), &[y]);
    let gates = [[2, 32, 24], [2, 32, 8]].map(|shape| weight(&mut b, &mut random, &shape));
    let cell = Op::Rnn(Rnn {
        cell: RnnCell::Lstm { input_forget: false },
        direction: RnnDirection::Bidirectional,
        hidden_size: 8,
        batch_first: false,
        clip: None,
        activations: vec![],
    });
    let y = b.node(cell, &[y, gates[0], gates[1]]);
    let y = b.node(Op::Transpose { perm: Some(vec![0, 2, 1, 3]) }, &[y]);
    let target = b.ints(&[0, 0, -1]);
    let y = b.reshape(y, target);
    let last = weight(&mut b, &mut random, &[16, 10]);
    let y = product(&mut b, y, last);
    b.finish(&[y])
}

/// Rows whose sum is positive, between two products: their number depends on the data.
pub fn chosen_rows() -> LaunchPlan {
    let (mut b, mut random) = (Builder::default(), Random::new(2));
    let x = b.input(&[SymDim::symbol("n"), 16.into()]);
    let first = weight(&mut b, &mut random, &[16, 16]);
    let y = product(&mut b, x, first);
    let axes = b.ints(&[1]);
    let sum = Reduce { kind: ReduceKind::Sum, keep_dims: false, noop_with_empty_axes: false };
    let sums = b.node(Op::Reduce(sum), &[y, axes]);
    let zero = b.number(0.0);
    let mask = b.node(Op::Compare(Compare::Greater), &[sums, zero]);
    let rows = b.node(Op::Compress { axis: Some(0) }, &[y, mask]);
    let last = weight(&mut b, &mut random, &[16, 10]);
    let z = product(&mut b, rows, last);
    let z = b.node(Op::Unary(Unary::Tanh), &[z]);
    b.finish(&[z, y])
}

/// A name, a plan and shapes of its input.
type Case = (&'static str, Arc<LaunchPlan>, Vec<Vec<usize>>);

fn cases() -> Vec<Case> {
    let lengths = [[1, 1, 16], [7, 2, 16], [30, 5, 16], [2, 33, 16]].map(Vec::from).to_vec();
    let rows = [[1, 16], [9, 16], [200, 16], [64, 16]].map(Vec::from).to_vec();
    vec![
        ("recurrent", Arc::new(recurrent()), lengths),
        ("chosen rows", Arc::new(chosen_rows()), rows),
    ]
}

struct Completions(Sender<Completion>);

impl CompletionSink for Completions {
    fn complete(&self, completion: Completion) {
        let _ = self.0.send(completion);
    }
}

pub struct TestQueue {
    queue: Box<dyn Queue>,
    completions: Receiver<Completion>,
}

impl TestQueue {
    pub fn open(device: &dyn Device, preemptible: bool) -> TestQueue {
        let (sender, completions) = channel();
        let options = QueueOptions { id: 1, capacity: 2, high_priority: !preemptible, preemptible };
        let queue = device.open_queue(options, Arc::new(Completions(sender))).unwrap();
        TestQueue { queue, completions }
    }

    fn launch(&self, task: Box<dyn Task>) {
        let steps = task.next_step()..task.step_count();
        assert!(self.queue.launch(Segment { token: 1, task, steps }).is_ok(), "the queue is full");
    }

    fn wait(&self) -> Completion {
        self.completions.recv_timeout(Duration::from_secs(60)).unwrap()
    }

    pub fn run(&self, program: &dyn Program, input: &Tensor) -> Vec<Tensor> {
        self.launch(program.prepare(vec![input.clone()]).unwrap());
        outputs(self.wait())
    }
}

fn outputs(completion: Completion) -> Vec<Tensor> {
    assert_eq!(completion.outcome, Outcome::Done);
    completion.task.into_outputs().unwrap()
}

pub fn host() -> Arc<CpuDevice> {
    Arc::new(CpuDevice::new(CpuOptions { threads: 2, queues: 2, ..CpuOptions::default() }))
}

#[test]
fn only_what_has_no_kernel_runs_on_the_host() {
    let host = host();
    let hybrid = HybridDevice::new(LoweringDevice::open(host.clone()), host.clone());
    let (queue, alone) = (TestQueue::open(&hybrid, true), TestQueue::open(&*host, true));
    for (name, plan, shapes) in cases() {
        let sections = hybrid.sections(&plan).unwrap();
        // A recurrent layer has a kernel; its sizes are known, and it runs there as a whole.
        assert_eq!(sections.is_none(), name == "recurrent", "{name}");
        let Some(sections) = sections else { continue };
        let sides: Vec<Side> = sections.iter().map(|section| section.side).collect();
        assert_eq!(sides, [Side::Accelerator, Side::Host, Side::Accelerator], "{name}");
        let host_ops: Vec<String> =
            sections[1].plan.steps.iter().map(|step| step.op.name()).collect();
        assert!(host_ops.len() <= 3, "{name}: {host_ops:?}");
        let (program, reference) =
            (hybrid.load(plan.clone()).unwrap(), host.load(plan.clone()).unwrap());
        for (seed, shape) in shapes.iter().enumerate() {
            let input = numbers(&mut Random::new(seed as u64), shape);
            let want = alone.run(&*reference, &input);
            assert_eq!(queue.run(&*program, &input), want, "{name} {shape:?}");
        }
    }
}

fn open_gpu(weights_on_demand: bool) -> Option<HybridDevice> {
    open_gpu_with(weights_on_demand, Precision::F32)
}

/// The GPU, or `None` with the reason printed.
pub fn open_gpu_with(weights_on_demand: bool, precision: Precision) -> Option<HybridDevice> {
    let cache_dir = std::env::var_os("ATOLL_TEST_CACHE").map(PathBuf::from);
    let options = CudaOptions { precision, cache_dir, weights_on_demand, ..CudaOptions::default() };
    let compiler = Arc::new(GpuCompiler::new(Some(Arc::new(CpuEvaluator))));
    match CudaDevice::open(0, options, compiler) {
        Ok(gpu) => Some(HybridDevice::new(Arc::new(gpu), host())),
        Err(err @ (OpenError::NoDriver(_) | OpenError::NoSuchDevice { .. })) => {
            println!("skipped: {err}");
            None
        }
        Err(err) => panic!("there is a GPU, but: {err}"),
    }
}

fn check_close(got: &[Tensor], want: &[Tensor], what: &str) {
    for (got, want) in got.iter().zip(want) {
        assert_eq!(got.shape(), want.shape(), "{what}");
        let pairs = got.to_vec::<f32>().unwrap().into_iter().zip(want.to_vec::<f32>().unwrap());
        let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 1e-4, "{what}: an error of {worst}");
    }
}

#[test]
fn a_gpu_and_its_host_compute_what_the_cpu_computes() {
    let Some(hybrid) = open_gpu(false) else { return };
    let host = host();
    let alone = TestQueue::open(&*host, true);
    for preemptible in [true, false] {
        let queue = TestQueue::open(&hybrid, preemptible);
        for (name, plan, shapes) in cases() {
            let (program, reference) =
                (hybrid.load(plan.clone()).unwrap(), host.load(plan.clone()).unwrap());
            for (seed, shape) in shapes.iter().enumerate() {
                let input = numbers(&mut Random::new(seed as u64), shape);
                let want = alone.run(&*reference, &input);
                let what = format!("{name} {shape:?}");
                check_close(&queue.run(&*program, &input), &want, &what);
            }
        }
    }
}

#[test]
fn preempted_sections_of_a_gpu_resume_with_the_same_bits() {
    let Some(hybrid) = open_gpu(false) else { return };
    let queue = TestQueue::open(&hybrid, true);
    let mut random = Random::new(3);
    for (name, plan, shapes) in cases() {
        let program = hybrid.load(plan).unwrap();
        let input = numbers(&mut random, &shapes[2]);
        let want = queue.run(&*program, &input);
        let mut preempted = 0;
        for _ in 0..40 {
            let mut task = program.prepare(vec![input.clone()]).unwrap();
            loop {
                queue.launch(task);
                std::thread::sleep(Duration::from_micros(random.below(400)));
                queue.queue.preempt();
                let completion = queue.wait();
                if completion.outcome != Outcome::Preempted {
                    assert_eq!(outputs(completion), want, "{name}");
                    break;
                }
                preempted += 1;
                task = completion.task;
            }
        }
        println!("{name}: preempted {preempted} times");
    }
}

#[test]
fn weights_of_sections_are_loaded_and_evicted() {
    let Some(hybrid) = open_gpu(true) else { return };
    let queue = TestQueue::open(&hybrid, false);
    for (name, plan, shapes) in cases() {
        let program = hybrid.load(plan).unwrap();
        let weights = program.residency().expect("weights on demand");
        assert!(weights.bytes().0 > 0, "{name}");
        let input = |seed: usize| numbers(&mut Random::new(seed as u64), &shapes[seed]);
        // As a node does: sizes are prepared before the load that brings their weights.
        for seed in 0..shapes.len() {
            drop(program.prepare(vec![input(seed)]).unwrap());
        }
        let mut results = Vec::new();
        for round in 0..3 {
            let (sender, progress) = channel();
            weights.load(true, Box::new(move |one| drop(sender.send(one))));
            let ended = |one: &LoadProgress| *one != LoadProgress::Runnable;
            assert_eq!(progress.iter().find(ended), Some(LoadProgress::Loaded), "{name}");
            // Sizes that depend on data and were not seen before run too, on either side.
            for seed in 0..shapes.len() {
                let got = queue.run(&*program, &input(seed));
                match round {
                    0 => results.push(got),
                    _ => check_close(&got, &results[seed], name),
                }
            }
            weights.evict();
        }
    }
}
