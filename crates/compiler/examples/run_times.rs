//! Times an ONNX file on the CPU device: `run_times model.onnx input.pb [runs] [threads]`.
//!
//! Prints the median of the runs in microseconds, and the first outputs. `scripts/tree_bench.py`
//! compares them with ONNX Runtime's.

use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Instant;

use cpu::{CpuDevice, CpuOptions};
use device::{Completion, CompletionSink, Device, Outcome, QueueOptions, Segment};
use model::op::Op;
use model::{DataType, Tensor};

struct ChannelSink(SyncSender<Completion>);

impl CompletionSink for ChannelSink {
    fn complete(&self, completion: Completion) {
        let _ = self.0.send(completion);
    }
}

struct CpuEvaluator;

impl graph::Evaluator for CpuEvaluator {
    fn evaluate(&self, op: &Op, inputs: &[Option<Tensor>], outputs: usize) -> Option<Vec<Tensor>> {
        cpu::evaluate(op, inputs, outputs)
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, input, rest @ ..] = &arguments[..] else {
        panic!("run_times model.onnx input.pb [runs] [threads]")
    };
    let number = |index: usize, default: usize| {
        rest.get(index).map_or(default, |text| text.parse().expect("a number"))
    };
    let (runs, threads) = (number(0, 200), number(1, 2));
    let model = std::fs::read(model).expect("a model");
    let plan = compiler::compile_onnx(&model, Some(&CpuEvaluator)).expect("a plan");
    let (_, x) =
        graph::parse_tensor_proto(&std::fs::read(input).expect("an input")).expect("a tensor");
    let device = CpuDevice::new(CpuOptions { threads, ..CpuOptions::default() });
    let program = device.load(Arc::new(plan)).expect("a program");
    let (sender, completions) = sync_channel(1);
    let options = QueueOptions { id: 0, capacity: 1, high_priority: true, preemptible: false };
    let queue = device.open_queue(options, Arc::new(ChannelSink(sender))).expect("a queue");
    let mut times = Vec::with_capacity(runs);
    let mut outputs = Vec::new();
    for _ in 0..runs {
        let started = Instant::now();
        let task = program.prepare(vec![x.clone()]).expect("a task");
        let steps = 0..task.step_count();
        assert!(queue.launch(Segment { token: 0, task, steps }).is_ok());
        let completion = completions.recv().expect("a completion");
        assert!(matches!(completion.outcome, Outcome::Done), "the run failed");
        outputs = completion.task.into_outputs().expect("outputs");
        times.push(started.elapsed().as_nanos());
    }
    times.sort_unstable();
    println!("{:.1}", times[times.len() / 2] as f64 / 1e3);
    let first = outputs.iter().find(|tensor| tensor.dtype() == DataType::F32);
    let first = first.and_then(Tensor::to_vec::<f32>).unwrap_or_default();
    let texts: Vec<String> = first.iter().take(8).map(ToString::to_string).collect();
    println!("{}", texts.join(" "));
}
