//! Runs a model and says where the time goes.
//!
//! `network FILE [--threads N] [--runs N] [--dim NAME=SIZE]... [--dump FOLDER]`; with `--dump` inputs
//! and outputs are written as raw elements, to be compared with what another runtime computes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use base::Random;
use cpu::{CpuDevice, CpuOptions};
use device::{
    Completion, CompletionSink, Device, Outcome, Program, Queue, QueueOptions, Segment, Task,
};
use graph::Limits;
use model::op::Op;
use model::{DataType, Dim, LaunchPlan, Tensor, ValueInfo};

struct Sink(Sender<Completion>);

impl CompletionSink for Sink {
    fn complete(&self, completion: Completion) {
        let _ = self.0.send(completion);
    }
}

/// Folds constants with the device's own kernels.
struct Folding;

impl graph::Evaluator for Folding {
    fn evaluate(&self, op: &Op, inputs: &[Option<Tensor>], outputs: usize) -> Option<Vec<Tensor>> {
        cpu::evaluate(op, inputs, outputs)
    }
}

struct Options {
    model: PathBuf,
    threads: usize,
    runs: usize,
    dims: BTreeMap<String, usize>,
    dump: Option<PathBuf>,
}

fn options() -> Options {
    let mut arguments = std::env::args().skip(1);
    let mut options =
        Options { model: PathBuf::new(), threads: 2, runs: 20, dims: BTreeMap::new(), dump: None };
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().expect("the option has a value");
        match argument.as_str() {
            "--threads" => options.threads = value().parse().expect("a number of threads"),
            "--runs" => options.runs = value().parse().expect("a number of runs"),
            "--dump" => options.dump = Some(value().into()),
            "--dim" => {
                let pair = value();
                let (name, size) = pair.split_once('=').expect("NAME=SIZE");
                options.dims.insert(name.to_string(), size.parse().expect("a size"));
            }
            model => options.model = model.into(),
        }
    }
    options
}

/// Random elements; small whole numbers for what is probably an index, ones for masks.
fn input(info: &ValueInfo, dims: &BTreeMap<String, usize>) -> Tensor {
    let size = |dim: &Dim| match dim {
        Dim::Fixed(size) => *size,
        Dim::Symbol(name) => dims.get(name).copied().unwrap_or(1),
        Dim::Unknown => 1,
    };
    let shape: Vec<usize> = info.shape.iter().flatten().map(size).collect();
    let count = shape.iter().product();
    let mut source = Random::new(7);
    if info.dtype == DataType::I64 {
        let mask = info.name.contains("mask");
        let types = info.name.contains("type");
        let one = |source: &mut Random| match (mask, types) {
            (true, _) => 1,
            (_, true) => 0,
            _ => source.below(1000) as i64,
        };
        let values: Vec<i64> = (0..count).map(|_| one(&mut source)).collect();
        return Tensor::from_vec(shape, values).expect("shape and count agree");
    }
    let values: Vec<f32> = (0..count).map(|_| source.symmetric_f32()).collect();
    Tensor::from_vec(shape, values).expect("shape and count agree")
}

struct Runner {
    program: Arc<dyn Program>,
    queue: Box<dyn Queue>,
    completions: Receiver<Completion>,
}

impl Runner {
    fn run(&self, inputs: &[Tensor], record: bool) -> (Duration, Box<dyn Task>) {
        let started = Instant::now();
        let mut task = self.program.prepare(inputs.to_vec()).expect("the inputs fit");
        if record {
            task.record_step_times();
        }
        let steps = 0..task.step_count();
        assert!(self.queue.launch(Segment { token: 0, task, steps }).is_ok());
        let done = self.completions.recv().expect("the queue lives");
        assert_eq!(done.outcome, Outcome::Done);
        (started.elapsed(), done.task)
    }
}

/// The least time of each step over some runs, and what takes most of it.
fn profile(runner: &Runner, plan: &LaunchPlan, inputs: &[Tensor], runs: usize) {
    let mut best: Vec<Duration> = vec![Duration::MAX; plan.steps.len()];
    for _ in 0..runs {
        let (_, task) = runner.run(inputs, true);
        for (best, time) in best.iter_mut().zip(task.step_times().expect("times were asked for")) {
            *best = (*best).min(Duration::from(*time));
        }
    }
    let mut families: BTreeMap<String, (usize, Duration)> = BTreeMap::new();
    for (step, time) in plan.steps.iter().zip(&best) {
        let family = families.entry(step.op.name()).or_default();
        *family = (family.0 + 1, family.1 + *time);
    }
    let mut families: Vec<_> = families.into_iter().collect();
    families.sort_by_key(|(_, (_, time))| std::cmp::Reverse(*time));
    for (name, (count, time)) in families.iter().take(14) {
        println!("  {name:24} {count:5} steps {:9.3} ms", time.as_secs_f64() * 1e3);
    }
    let mut slowest: Vec<usize> = (0..best.len()).collect();
    slowest.sort_by_key(|&index| std::cmp::Reverse(best[index]));
    for &index in slowest.iter().take(12) {
        let step = &plan.steps[index];
        let shapes: Vec<String> =
            step.inputs.iter().flatten().take(2).map(|id| shape_text(plan.value(*id))).collect();
        let time = best[index].as_secs_f64() * 1e3;
        println!("    {time:8.3} ms {:16} {:40} {}", step.op.name(), shapes.join(" "), step.name);
    }
}

fn shape_text(info: &ValueInfo) -> String {
    let Some(dims) = &info.shape else { return "?".to_string() };
    dims.iter().map(ToString::to_string).collect::<Vec<_>>().join("x")
}

fn dump(folder: &Path, kind: &str, tensors: &[Tensor]) {
    std::fs::create_dir_all(folder).expect("the folder can be made");
    for (index, tensor) in tensors.iter().enumerate() {
        let raw = tensor.raw().expect("numbers");
        std::fs::write(folder.join(format!("{kind}_{index}.bin")), raw)
            .expect("the file is written");
        println!("  {kind} {index}: {} {:?}", tensor.dtype(), tensor.shape());
    }
}

fn main() {
    let options = options();
    let limits = Limits::default();
    let plan = compiler::compile_onnx_file(&options.model, &limits, Some(&Folding))
        .expect("the model compiles");
    let plan = Arc::new(plan);
    let device = CpuDevice::new(CpuOptions { threads: options.threads, ..CpuOptions::default() });
    let started = Instant::now();
    let program = device.load(plan.clone()).expect("the plan loads");
    println!("loaded in {:?}, resident {}", started.elapsed(), program.resident());
    let (sender, completions) = channel();
    let queue_options = QueueOptions { id: 0, capacity: 1, high_priority: false };
    let queue = device.open_queue(queue_options, Arc::new(Sink(sender))).expect("the queue opens");
    let runner = Runner { program, queue, completions };
    let inputs: Vec<Tensor> =
        plan.inputs.iter().map(|id| input(plan.value(*id), &options.dims)).collect();
    let mut times: Vec<Duration> =
        (0..options.runs).map(|_| runner.run(&inputs, false).0).collect();
    times.sort();
    let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
    println!(
        "{}: {} steps, least {:.2} ms, median {:.2} ms",
        options.model.display(),
        plan.steps.len(),
        milliseconds(times[0]),
        milliseconds(times[times.len() / 2])
    );
    profile(&runner, &plan, &inputs, options.runs);
    if let Some(folder) = &options.dump {
        let (_, task) = runner.run(&inputs, false);
        dump(folder, "input", &inputs);
        dump(folder, "output", &task.into_outputs().expect("the run is done"));
    }
}
