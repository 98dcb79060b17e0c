//! Times typical layers of bytes: `byte_kernels [PATTERN [THREADS]]` runs those whose name contains
//! the pattern. Each is between two convolutions, so that images are in channel blocks.
//!
//! Each line has the shortest time of one run, the rate of its products, and that rate as a share
//! of what all threads together reach on operands in their first-level caches (the first line).

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use base::Random;
use cpu::{CpuDevice, CpuOptions};
use device::{Completion, CompletionSink, Device, Outcome, Queue, QueueOptions, Segment};
use int8::{BLOCK, BlockFinish, BlockRun};
use model::op::{Activation, Binary, Conv, Op, Padding, Pool, PoolKind, Window};
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
    /// Products of bytes a second that the machine reaches.
    limit: f64,
}

/// A plan that grows.
#[derive(Default)]
struct Draft(LaunchPlan);

impl Draft {
    fn value(&mut self, dtype: DataType) -> ValueId {
        let name = format!("v{}", self.0.values.len());
        self.0.values.push(ValueInfo { name, dtype, shape: None });
        ValueId(self.0.values.len() as u32 - 1)
    }

    fn constant(&mut self, tensor: Tensor) -> ValueId {
        let id = self.value(tensor.dtype());
        self.0.constants.push((id, tensor));
        id
    }

    fn step(&mut self, op: Op, inputs: &[ValueId], dtype: DataType) -> ValueId {
        let output = self.value(dtype);
        self.0.steps.push(Step {
            name: format!("s{}", self.0.steps.len()),
            op,
            inputs: inputs.iter().copied().map(Some).collect(),
            outputs: vec![Some(output)],
            last_uses: vec![],
        });
        output
    }

    fn scale(&mut self, scale: f32) -> ValueId {
        self.constant(Tensor::from_vec(vec![], vec![scale]).expect("one element"))
    }

    fn zero(&mut self) -> ValueId {
        self.constant(Tensor::from_vec(vec![], vec![120u8]).expect("one element"))
    }

    fn conv(&mut self, x: ValueId, conv: Conv, weight: &[usize]) -> ValueId {
        let weight: Tensor = {
            let bytes = random(weight).into_iter().map(|byte| byte as i8).collect();
            Tensor::from_vec(weight.to_vec(), bytes).expect("shape and count agree")
        };
        let middle = Tensor::from_vec(vec![], vec![0i8]).expect("one element");
        let inputs = [
            x,
            self.scale(0.01),
            self.zero(),
            self.constant(weight),
            self.scale(0.01),
            self.constant(middle),
            self.scale(0.02),
            self.zero(),
        ];
        self.step(Op::QLinearConv(conv), &inputs, DataType::U8)
    }

    fn numbers(&mut self, x: ValueId) -> ValueId {
        let inputs = [x, self.scale(0.01), self.zero()];
        self.step(Op::DequantizeLinear { axis: 1 }, &inputs, DataType::F32)
    }

    fn bytes(&mut self, x: ValueId) -> ValueId {
        let inputs = [x, self.scale(0.01), self.zero()];
        self.step(Op::QuantizeLinear { axis: 1, dtype: DataType::U8 }, &inputs, DataType::U8)
    }
}

fn random(shape: &[usize]) -> Vec<u8> {
    let mut source = Random::new(1);
    (0..shape.iter().product()).map(|_| source.below(256) as u8).collect()
}

fn window(kernel: usize, stride: usize) -> Window {
    Window {
        kernel: vec![kernel; 2],
        strides: vec![stride; 2],
        dilations: vec![1; 2],
        padding: Padding::Explicit(vec![kernel / 2; 4]),
    }
}

fn pointwise() -> Conv {
    Conv { window: window(1, 1), groups: 1, activation: Activation::None }
}

/// What stands between two pointwise convolutions.
enum Layer {
    Conv { outputs: usize, kernel: usize, stride: usize, groups: usize },
    Largest,
    Sum,
}

impl Bench {
    fn time(&self, layer: &Layer, channels: usize, size: usize) {
        let mut draft = Draft::default();
        let x = draft.value(DataType::U8);
        draft.0.inputs = vec![x];
        let x = draft.conv(x, pointwise(), &[channels, channels, 1, 1]);
        let (name, products, outputs) = match layer {
            Layer::Conv { outputs, kernel, stride, groups } => {
                let conv =
                    Conv { window: window(*kernel, *stride), groups: *groups, ..pointwise() };
                let inputs = channels / groups;
                draft.conv(x, conv, &[*outputs, inputs, *kernel, *kernel]);
                let out = (size + 2 * (kernel / 2) - kernel) / stride + 1;
                let name = format!(
                    "conv {channels}->{outputs} {size}x{size} k{kernel} s{stride} g{groups}"
                );
                (name, outputs * inputs * kernel * kernel * out * out, *outputs)
            }
            Layer::Largest => {
                let pool = Pool { kind: PoolKind::Max, window: window(3, 2), ceil_mode: false };
                draft.step(Op::Pool(pool), &[x], DataType::U8);
                let out = size.div_ceil(2);
                (format!("max pool {channels} {size}x{size}"), 9 * channels * out * out, channels)
            }
            Layer::Sum => {
                let (a, b) = (draft.numbers(x), draft.numbers(x));
                let sum = draft.step(Op::Binary(Binary::Add), &[a, b], DataType::F32);
                draft.bytes(sum);
                (format!("sum {channels} {size}x{size}"), channels * size * size, channels)
            }
        };
        if !name.contains(&self.pattern) {
            return;
        }
        let last = ValueId(draft.0.values.len() as u32 - 1);
        let result = draft.conv(last, pointwise(), &[16, outputs, 1, 1]);
        draft.0.outputs = vec![result];
        draft.0.plan_lifetimes();
        let program = self.device.load(Arc::new(draft.0)).expect("the layer loads");
        let shape = [1, channels, size, size];
        let input = Tensor::from_vec(shape.to_vec(), random(&shape)).expect("they agree");
        let times: Vec<Duration> = shortest(|| {
            let mut task = program.prepare(vec![input.clone()]).expect("the input fits");
            task.record_step_times();
            let count = task.step_count();
            let segment = Segment { token: 0, task, steps: 0..count };
            assert!(self.queue.launch(segment).is_ok());
            let done = self.completions.recv().expect("the queue is open");
            assert_eq!(done.outcome, Outcome::Done);
            let times = done.task.step_times().expect("times are recorded");
            // Those of the layer: all but the first and the last.
            let inner: Duration =
                times[1..count - 1].iter().map(|time| Duration::from(*time)).sum();
            (inner, vec![inner])
        });
        let seconds = times[0].as_secs_f64();
        let rate = products as f64 / seconds;
        println!(
            "{name:42} {:9.3} ms {:7.1} G/s {:5.1} %",
            seconds * 1e3,
            rate / 1e9,
            100.0 * rate / self.limit
        );
    }
}

/// The result of `run` with the shortest time in about a third of a second.
fn shortest<T>(mut run: impl FnMut() -> (Duration, T)) -> T {
    let started = Instant::now();
    let mut best = run();
    while started.elapsed() < Duration::from_millis(300) {
        let other = run();
        if other.0 < best.0 {
            best = other;
        }
    }
    best.1
}

/// Products of bytes a second of one thread whose operands are in its first-level cache.
fn probe() -> f64 {
    const POSITIONS: usize = 8;
    const BLOCKS: usize = 3;
    const OFFSETS: usize = 32;
    const ROUNDS: usize = 200;
    let image = random(&[(OFFSETS + POSITIONS) * BLOCK]);
    let offsets: Vec<usize> = (0..OFFSETS).map(|index| index * BLOCK).collect();
    let weights = vec![0x0102_0304; OFFSETS * 4 * BLOCKS * BLOCK];
    let mut out = [[0; POSITIONS * BLOCK]; BLOCKS];
    let finish = BlockFinish {
        start: &[0; BLOCKS * BLOCK],
        scales: &[0.01; BLOCKS * BLOCK],
        bias: &[0.0; BLOCKS * BLOCK],
        clamp: (-128.0, 127.0),
        zero: 128,
    };
    let time = shortest(|| {
        let started = Instant::now();
        for _ in 0..ROUNDS {
            let mut parts: Vec<&mut [u8]> = out.iter_mut().map(|out| &mut out[..]).collect();
            int8::convolve(BlockRun {
                image: &image,
                offsets: &offsets,
                words: 4,
                step: BLOCK,
                weights: &weights,
                positions: POSITIONS,
                finish,
                out: &mut parts,
            });
        }
        (started.elapsed(), started.elapsed())
    });
    (ROUNDS * OFFSETS * BLOCK * POSITIONS * BLOCKS * BLOCK) as f64 / time.as_secs_f64()
}

fn main() {
    let (sender, completions) = channel();
    let pattern = std::env::args().nth(1).unwrap_or_default();
    let threads = std::env::args().nth(2).and_then(|text| text.parse().ok()).unwrap_or(2);
    let device = CpuDevice::new(CpuOptions { threads, ..CpuOptions::default() });
    let options = QueueOptions { id: 0, capacity: 1, high_priority: false, preemptible: true };
    let queue = device.open_queue(options, Arc::new(Sink(sender))).expect("the queue opens");
    let limit = probe() * threads as f64;
    println!("{:42} {:20.1} G/s", "in first-level caches", limit / 1e9);
    let bench = Bench { device, queue, completions, pattern, limit };
    for (channels, outputs, size, kernel, stride, groups) in [
        (3, 64, 224, 7, 2, 1),
        (64, 64, 56, 1, 1, 1),
        (64, 256, 56, 1, 1, 1),
        (64, 64, 56, 3, 1, 1),
        (256, 64, 56, 1, 1, 1),
        (128, 128, 56, 3, 2, 1),
        (128, 128, 28, 3, 1, 1),
        (512, 128, 28, 1, 1, 1),
        (128, 512, 28, 1, 1, 1),
        (256, 512, 56, 1, 2, 1),
        (256, 256, 14, 3, 1, 1),
        (1024, 256, 14, 1, 1, 1),
        (256, 1024, 14, 1, 1, 1),
        (512, 512, 7, 3, 1, 1),
        (2048, 512, 7, 1, 1, 1),
        (512, 2048, 7, 1, 1, 1),
        (32, 32, 112, 3, 1, 32),
        (128, 128, 56, 3, 1, 128),
        (512, 512, 14, 3, 1, 512),
        (1024, 1024, 7, 3, 1, 1024),
    ] {
        bench.time(&Layer::Conv { outputs, kernel, stride, groups }, channels, size);
    }
    bench.time(&Layer::Largest, 64, 112);
    for (channels, size) in [(256, 56), (512, 28), (1024, 14), (2048, 7)] {
        bench.time(&Layer::Sum, channels, size);
    }
}
