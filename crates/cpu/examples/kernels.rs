//! Times typical layers: `kernels [PATTERN [THREADS]]` runs those whose name contains the pattern.
//!
//! Each line has the shortest time of one run and the rate of its arithmetic.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use base::Random;
use cpu::{CpuDevice, CpuOptions};
use device::{Completion, CompletionSink, Device, Outcome, Queue, QueueOptions, Segment};
use model::op::{
    Activation, Binary, Cast, Compare, Conv, MatMul, Op, Padding, Softmax, SoftmaxKind, Unary,
    Variadic, Window,
};
use model::{DataType, LaunchPlan, Step, Tensor, ValueId, ValueInfo};

struct Sink(Sender<Completion>);

impl CompletionSink for Sink {
    fn complete(&self, completion: Completion) {
        let _ = self.0.send(completion);
    }
}

struct Bench {
    device: CpuDevice,
    queue: Box<dyn Queue>,
    completions: Receiver<Completion>,
    pattern: String,
}

/// A layer to time: an operator, its input's shape, and its constants' shapes.
struct Layer {
    name: String,
    op: Op,
    input: Vec<usize>,
    constants: Vec<Vec<usize>>,
    flops: f64,
    /// The input is needed later, so that the step cannot overwrite it.
    keeps_input: bool,
    /// Between two convolutions, so that images are in channel blocks.
    between_convolutions: bool,
}

fn random(shape: &[usize]) -> Tensor {
    let mut source = Random::new(1);
    let count = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|_| source.symmetric_f32()).collect();
    Tensor::from_vec(shape.to_vec(), values).expect("shape and count agree")
}

fn plan(layer: &Layer) -> LaunchPlan {
    let mut plan = LaunchPlan::default();
    let count = layer.constants.len() + 2;
    for index in 0..count {
        let name = format!("v{index}");
        plan.values.push(ValueInfo { name, dtype: DataType::F32, shape: None });
    }
    plan.inputs = vec![ValueId(0)];
    for (index, shape) in layer.constants.iter().enumerate() {
        plan.constants.push((ValueId(index as u32 + 1), random(shape)));
    }
    let output = ValueId(count as u32 - 1);
    plan.outputs = vec![output];
    if layer.keeps_input {
        plan.outputs.push(ValueId(0));
    }
    plan.steps.push(Step {
        name: layer.name.clone(),
        op: layer.op.clone(),
        inputs: (0..count as u32 - 1).map(|id| Some(ValueId(id))).collect(),
        outputs: vec![Some(output)],
        last_uses: vec![],
    });
    if layer.between_convolutions {
        enclose(&mut plan, layer);
    }
    plan.plan_lifetimes();
    plan
}

/// Adds a pointwise convolution before the only step of `plan`, and one after it.
fn enclose(plan: &mut LaunchPlan, layer: &Layer) {
    let add = |plan: &mut LaunchPlan, x: ValueId, inputs: usize, outputs: usize| {
        let weight = ValueId(plan.values.len() as u32);
        for name in ["weight", "result"] {
            let name = format!("{name}{}", weight.0);
            plan.values.push(ValueInfo { name, dtype: DataType::F32, shape: None });
        }
        plan.constants.push((weight, random(&[outputs, inputs, 1, 1])));
        let window = Window {
            kernel: vec![1; 2],
            strides: vec![],
            dilations: vec![],
            padding: Padding::Explicit(vec![]),
        };
        let op = Op::Conv(Conv { window, groups: 1, activation: Activation::None });
        let output = ValueId(weight.0 + 1);
        let step = Step {
            name: "beside".to_string(),
            op,
            inputs: vec![Some(x), Some(weight)],
            outputs: vec![Some(output)],
            last_uses: vec![],
        };
        (step, output)
    };
    let channels = layer.input[1];
    let (before, between) = add(plan, ValueId(0), channels, channels);
    plan.steps[0].inputs[0] = Some(between);
    let outputs = layer.constants[0][0];
    let (after, result) = add(plan, plan.outputs[0], outputs, 16);
    plan.steps.insert(0, before);
    plan.steps.push(after);
    plan.outputs = vec![result];
}

/// The shortest time that `run` returns in about a third of a second.
fn shortest(mut run: impl FnMut() -> Duration) -> Duration {
    let started = Instant::now();
    let mut best = run();
    while started.elapsed() < Duration::from_millis(300) {
        best = best.min(run());
    }
    best
}

impl Bench {
    fn time(&self, layer: &Layer) {
        if !layer.name.contains(&self.pattern) {
            return;
        }
        let program = self.device.load(Arc::new(plan(layer))).expect("the layer loads");
        let input = random(&layer.input);
        let time = shortest(|| {
            let mut task = program.prepare(vec![input.clone()]).expect("the input fits");
            task.record_step_times();
            let count = task.step_count();
            let segment = Segment { token: 0, task, steps: 0..count };
            assert!(self.queue.launch(segment).is_ok());
            let done = self.completions.recv().expect("the queue is open");
            assert_eq!(done.outcome, Outcome::Done);
            let times = done.task.step_times().expect("times are recorded");
            Duration::from(times[usize::from(layer.between_convolutions)])
        });
        let rate = layer.flops / time.as_secs_f64() / 1e9;
        println!("{:46} {:9.3} ms {rate:7.1} GFLOP/s", layer.name, time.as_secs_f64() * 1e3);
    }
}

fn conv(
    channels: usize,
    outputs: usize,
    size: usize,
    kernel: usize,
    stride: usize,
    groups: usize,
) -> Layer {
    let pad = kernel / 2;
    let window = Window {
        kernel: vec![kernel; 2],
        strides: vec![stride; 2],
        dilations: vec![1; 2],
        padding: Padding::Explicit(vec![pad; 4]),
    };
    let out = (size + 2 * pad - kernel) / stride + 1;
    let taps = channels / groups * kernel * kernel;
    Layer {
        name: format!("conv {channels}->{outputs} {size}x{size} k{kernel} s{stride} g{groups}"),
        op: Op::Conv(Conv { window, groups, activation: Activation::Relu }),
        input: vec![1, channels, size, size],
        constants: vec![vec![outputs, channels / groups, kernel, kernel], vec![outputs]],
        flops: 2.0 * (outputs * taps * out * out) as f64,
        keeps_input: true,
        between_convolutions: false,
    }
}

fn matmul(rows: usize, depth: usize, columns: usize) -> Layer {
    Layer {
        name: format!("matmul {rows}x{depth}x{columns}"),
        op: Op::MatMul(MatMul::default()),
        input: vec![1, rows, depth],
        constants: vec![vec![depth, columns], vec![columns]],
        flops: 2.0 * (rows * depth * columns) as f64,
        keeps_input: true,
        between_convolutions: false,
    }
}

/// An operator on `shape`, with one operation per element; constants follow the input.
fn elementwise(name: &str, op: Op, shape: &[usize], constants: &[&[usize]]) -> [Layer; 2] {
    [true, false].map(|keeps_input| Layer {
        name: format!("{name} {shape:?}{}", if keeps_input { "" } else { " in place" }),
        op: op.clone(),
        input: shape.to_vec(),
        constants: constants.iter().map(|shape| shape.to_vec()).collect(),
        flops: shape.iter().product::<usize>() as f64,
        keeps_input,
        between_convolutions: false,
    })
}

/// Operators that memory bounds.
fn elementwise_layers() -> Vec<Layer> {
    let image: &[usize] = &[1, 64, 112, 112];
    let softmax = Softmax { kind: SoftmaxKind::Softmax, axis: -1, flatten: false };
    [
        elementwise("add", Op::Binary(Binary::Add), image, &[image]),
        elementwise("add channels", Op::Binary(Binary::Add), image, &[&[64, 1, 1]]),
        elementwise("subtract scalar", Op::Binary(Binary::Sub), image, &[&[]]),
        elementwise("add row", Op::Binary(Binary::Add), &[4096, 96], &[&[96]]),
        elementwise("remainder", Op::Binary(Binary::Fmod), image, &[&[]]),
        elementwise("less", Op::Compare(Compare::Less), image, &[&[64, 1, 1]]),
        elementwise("maximum", Op::Variadic(Variadic::Max), image, &[image]),
        elementwise("relu", Op::Unary(Unary::Relu), image, &[]),
        elementwise("sqrt", Op::Unary(Unary::Sqrt), image, &[]),
        elementwise("sin", Op::Unary(Unary::Sin), image, &[]),
        elementwise("erf", Op::Unary(Unary::Erf), image, &[]),
        elementwise("softmax", Op::Softmax(softmax), &[12, 128, 128], &[]),
        elementwise("transpose", Op::Transpose { perm: Some(vec![0, 2, 3, 1]) }, image, &[]),
        elementwise(
            "layer norm",
            Op::LayerNorm { axis: -1, epsilon: 1e-5 },
            &[128, 768],
            &[&[768], &[768]],
        ),
        elementwise("cast", Op::Cast(Cast { to: DataType::I64 }), image, &[]),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn main() {
    let (sender, completions) = channel();
    let pattern = std::env::args().nth(1).unwrap_or_default();
    let threads = std::env::args().nth(2).and_then(|text| text.parse().ok()).unwrap_or(2);
    let device = CpuDevice::new(CpuOptions { threads, ..CpuOptions::default() });
    let options = QueueOptions { id: 0, capacity: 1, high_priority: false, preemptible: true };
    let queue = device.open_queue(options, Arc::new(Sink(sender))).expect("the queue opens");
    let bench = Bench { device, queue, completions, pattern };
    for layer in [
        conv(3, 64, 224, 7, 2, 1),
        conv(64, 64, 56, 1, 1, 1),
        conv(64, 256, 56, 1, 1, 1),
        conv(64, 64, 56, 3, 1, 1),
        conv(256, 64, 56, 1, 1, 1),
        conv(128, 128, 56, 3, 2, 1),
        conv(128, 128, 28, 3, 1, 1),
        conv(512, 128, 28, 1, 1, 1),
        conv(128, 512, 28, 1, 1, 1),
        conv(256, 512, 56, 1, 2, 1),
        conv(256, 256, 14, 3, 1, 1),
        conv(1024, 256, 14, 1, 1, 1),
        conv(256, 1024, 14, 1, 1, 1),
        conv(512, 512, 7, 3, 1, 1),
        conv(2048, 512, 7, 1, 1, 1),
        conv(512, 2048, 7, 1, 1, 1),
        conv(64, 64, 224, 3, 1, 1),
        conv(512, 512, 28, 3, 1, 1),
        conv(128, 32, 28, 3, 1, 1),
        conv(128, 32, 14, 3, 1, 1),
        conv(96, 96, 112, 3, 2, 96),
        conv(144, 144, 56, 3, 1, 144),
        conv(384, 384, 14, 3, 1, 384),
        conv(960, 960, 7, 3, 1, 960),
        conv(240, 240, 28, 5, 2, 240),
        conv(672, 672, 14, 5, 1, 672),
        matmul(128, 768, 768),
        matmul(128, 768, 3072),
        matmul(128, 3072, 768),
        matmul(128, 1024, 4096),
        matmul(11, 384, 1536),
        matmul(1, 2048, 1000),
        matmul(1, 25088, 4096),
    ] {
        bench.time(&layer);
        if matches!(layer.op, Op::Conv(_)) && layer.input[1] >= 16 {
            let name = format!("{} in blocks", layer.name);
            bench.time(&Layer { name, between_convolutions: true, ..layer });
        }
    }
    for layer in elementwise_layers() {
        bench.time(&layer);
    }
}
