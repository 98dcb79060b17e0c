//! Random networks in channel blocks against the same networks plain.

mod bytes;

use std::sync::Arc;

use base::Random;
use device::Program;
use model::ValueInfo;
use model::op::{Binary, Padding, PoolKind, Softmax, SoftmaxKind, Variadic, Window};

use super::*;
use crate::buffer_pool::BufferPool;
use crate::program::{CpuProgram, CpuTask};

/// Channels of pictures and sounds: too few for a block.
const FEW: usize = 5;

/// A network that grows, with the true shape of every value.
struct Draft {
    plan: LaunchPlan,
    shapes: Vec<Vec<usize>>,
    random: Random,
    rank: usize,
}

fn between(random: &mut Random, low: usize, high: usize) -> usize {
    low + random.below((high - low + 1) as u64) as usize
}

fn numbers(random: &mut Random, shape: &[usize]) -> Tensor {
    let count = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|_| random.symmetric_f32()).collect();
    Tensor::from_vec(shape.to_vec(), values).unwrap()
}

impl Draft {
    fn new(seed: u64) -> Draft {
        let mut random = Random::new(seed);
        let rank = 2 + [1, 2, 2, 2, 3][random.below(5) as usize];
        Draft { plan: LaunchPlan::default(), shapes: Vec::new(), random, rank }
    }

    fn value(&mut self, shape: Vec<usize>) -> ValueId {
        // Extents are known only by the request, channels by the model.
        let dim = |(axis, size): (usize, &usize)| match axis {
            1 => Dim::Fixed(*size),
            0 => Dim::symbol("N"),
            _ => Dim::Unknown,
        };
        let dims = shape.iter().enumerate().map(dim).collect();
        let info = ValueInfo { name: String::new(), dtype: DataType::F32, shape: Some(dims) };
        self.plan.values.push(info);
        self.shapes.push(shape);
        ValueId(self.plan.values.len() as u32 - 1)
    }

    fn constant(&mut self, shape: &[usize]) -> ValueId {
        let tensor = numbers(&mut self.random, shape);
        let id = self.value(shape.to_vec());
        self.plan.constants.push((id, tensor));
        id
    }

    fn step(&mut self, op: Op, inputs: &[Option<ValueId>], shape: Vec<usize>) -> ValueId {
        let output = self.value(shape);
        self.plan.steps.push(Step {
            name: format!("s{}", self.plan.steps.len()),
            op,
            inputs: inputs.to_vec(),
            outputs: vec![Some(output)],
            last_uses: vec![],
        });
        output
    }

    fn shape(&self, id: ValueId) -> Vec<usize> {
        self.shapes[id.index()].clone()
    }

    fn window(&mut self, id: ValueId, most: usize) -> (Window, Vec<usize>) {
        let spatial = self.shape(id)[2..].to_vec();
        let few = self.shape(id)[1] <= FEW;
        let random = &mut self.random;
        let kernel: Vec<usize> = spatial.iter().map(|n| between(random, 1, most.min(*n))).collect();
        let stride = if few { 4 } else { 2 };
        let strides: Vec<usize> = spatial.iter().map(|_| between(random, 1, stride)).collect();
        let dilation = |(k, n): (&usize, &usize)| if (k - 1) * 2 < *n { 2 } else { 1 };
        let dilations: Vec<usize> = match random.below(4) {
            0 => kernel.iter().zip(&spatial).map(dilation).collect(),
            _ => vec![1; kernel.len()],
        };
        let extent = |axis: usize| (kernel[axis] - 1) * dilations[axis] + 1;
        let pads: Vec<usize> = (0..2 * kernel.len())
            .map(|at| between(random, 0, kernel[at % kernel.len()] - 1))
            .collect();
        let rank = kernel.len();
        let extents = (0..rank)
            .map(|at| (spatial[at] + pads[at] + pads[at + rank] - extent(at)) / strides[at] + 1)
            .collect();
        (Window { kernel, strides, dilations, padding: Padding::Explicit(pads) }, extents)
    }

    fn activation(&mut self) -> Activation {
        match self.random.below(6) {
            0 => Activation::Relu,
            1 => Activation::Clip { low: 0.0, high: 0.7 },
            2 => Activation::Silu,
            3 => Activation::Sigmoid,
            _ => Activation::None,
        }
    }

    /// A value of `shape` that is there already.
    fn like(&mut self, shape: &[usize]) -> Option<ValueId> {
        let fits = |id: &ValueId| self.shapes[id.index()] == shape;
        let there = self.plan.steps.iter().flat_map(|step| step.outputs.iter().flatten());
        let fitting: Vec<ValueId> = there.copied().filter(fits).collect();
        let at = self.random.below(fitting.len().max(1) as u64) as usize;
        fitting.get(at).copied()
    }

    /// Mostly as many as fill blocks.
    fn channels(&mut self) -> usize {
        match self.random.below(3) {
            0 => between(&mut self.random, 1, 70),
            _ => 8 * between(&mut self.random, 2, 8),
        }
    }

    fn convolution(&mut self, x: ValueId) -> ValueId {
        let shape = self.shape(x);
        let most = if shape[1] <= FEW { 7 } else { 3 };
        let (window, extents) = self.window(x, most);
        let depthwise = self.random.below(3) == 0;
        let outputs = if depthwise { shape[1] } else { self.channels() };
        let groups = if depthwise { shape[1] } else { 1 };
        let mut weight = vec![outputs, shape[1] / groups];
        weight.extend(&window.kernel);
        let spread = 1.0 / (weight[1..].iter().product::<usize>() as f32).sqrt();
        let weight = self.constant(&weight);
        let scaled = self.plan.constants.last_mut().unwrap();
        let numbers: Vec<f32> = scaled.1.to_vec::<f32>().unwrap();
        let numbers = numbers.into_iter().map(|x| 2.0 * spread * x).collect();
        scaled.1 = Tensor::from_vec(scaled.1.shape().to_vec(), numbers).unwrap();
        let bias = (self.random.below(2) == 0).then(|| self.constant(&[outputs]));
        let mut out = vec![shape[0], outputs];
        out.extend(extents);
        let residual = match self.random.below(3) {
            0 => self.like(&out),
            1 if self.random.below(4) == 0 => {
                let mut one = vec![outputs];
                one.resize(self.rank - 1, 1);
                Some(self.constant(&one))
            }
            _ => None,
        };
        let activation = self.activation();
        let op = Op::Conv(Conv { window, groups, activation });
        self.step(op, &[Some(x), Some(weight), bias, residual], out)
    }

    fn pooled(&mut self, x: ValueId) -> ValueId {
        let shape = self.shape(x);
        if self.random.below(5) == 0 {
            let kind = [GlobalPool::Average, GlobalPool::Max][self.random.below(2) as usize];
            let mut out = shape[..2].to_vec();
            out.resize(self.rank, 1);
            return self.step(Op::GlobalPool(kind), &[Some(x)], out);
        }
        let (window, extents) = self.window(x, 3);
        let kind = match self.random.below(3) {
            0 => PoolKind::Max,
            1 => PoolKind::Average { count_include_pad: true },
            _ => PoolKind::Average { count_include_pad: false },
        };
        let mut out = shape[..2].to_vec();
        out.extend(extents);
        let op = Op::Pool(Pool { kind, window, ceil_mode: false });
        self.step(op, &[Some(x)], out)
    }

    fn combined(&mut self, x: ValueId) -> ValueId {
        let shape = self.shape(x);
        let mut per_channel = vec![shape[1]];
        per_channel.resize(self.rank - 1, 1);
        let mut gate = vec![shape[0], shape[1]];
        gate.resize(self.rank, 1);
        let other = match self.random.below(5) {
            0 => Some(self.constant(&[])),
            1 => Some(self.constant(&per_channel)),
            2 => Some(self.constant(&shape[2..])),
            3 => self.like(&gate),
            _ => self.like(&shape),
        };
        let other = other.unwrap_or(x);
        let op = match self.random.below(4) {
            0 => Op::Binary(Binary::Add),
            1 => Op::Binary(Binary::Mul),
            2 => Op::Variadic(Variadic::Max),
            _ => Op::Binary(Binary::Sub),
        };
        let (a, b) = if self.random.below(2) == 0 { (x, other) } else { (other, x) };
        self.step(op, &[Some(a), Some(b)], shape)
    }

    fn concatenated(&mut self, x: ValueId) -> ValueId {
        let shape = self.shape(x);
        let fits = |id: &ValueId| {
            let other = &self.shapes[id.index()];
            other.len() == shape.len() && other[0] == shape[0] && other[2..] == shape[2..]
        };
        let there = self.plan.steps.iter().flat_map(|step| step.outputs.iter().flatten());
        let mut all: Vec<ValueId> = there.copied().filter(fits).collect();
        all.truncate(3);
        all.push(x);
        let mut out = shape.clone();
        out[1] = all.iter().map(|id| self.shapes[id.index()][1]).sum();
        let axis = if self.random.below(2) == 0 { 1 } else { 1 - self.rank as i64 };
        let all: Vec<Option<ValueId>> = all.into_iter().map(Some).collect();
        self.step(Op::Concat { axis }, &all, out)
    }

    fn grow(&mut self, x: ValueId) -> ValueId {
        let shape = self.shape(x);
        match self.random.below(12) {
            0 => self.pooled(x),
            1 | 2 => self.combined(x),
            3 => self.concatenated(x),
            4 => {
                let (scale, shift) = (self.constant(&[shape[1]]), self.constant(&[shape[1]]));
                let op = Op::ScaleShift { activation: self.activation() };
                self.step(op, &[Some(x), Some(scale), Some(shift)], shape)
            }
            5 => self.step(Op::Unary(Unary::Tanh), &[Some(x)], shape),
            6 => {
                let softmax = Softmax { axis: -1, kind: SoftmaxKind::Softmax, flatten: false };
                self.step(Op::Softmax(softmax), &[Some(x)], shape)
            }
            7 => {
                let mut slope = vec![shape[1]];
                slope.resize(self.rank - 1, 1);
                let slope = self.constant(&slope);
                self.step(Op::PRelu, &[Some(x), Some(slope)], shape)
            }
            _ => self.convolution(x),
        }
    }

    /// A network of some steps, and its input.
    fn network(mut self) -> (LaunchPlan, Tensor) {
        let channels = match self.random.below(3) {
            0 => between(&mut self.random, 1, FEW),
            _ => self.channels(),
        };
        let mut shape = vec![between(&mut self.random, 1, 3), channels];
        let most = if self.rank == 5 { 6 } else { 21 };
        shape.extend((2..self.rank).map(|_| between(&mut self.random, 1, most)));
        let given = numbers(&mut self.random, &shape);
        let mut at = self.value(shape);
        self.plan.inputs = vec![at];
        for _ in 0..between(&mut self.random, 3, 12) {
            at = self.grow(at);
            if self.random.below(6) == 0 {
                self.plan.outputs.push(at);
            }
        }
        if !self.plan.outputs.contains(&at) {
            self.plan.outputs.push(at);
        }
        self.plan.plan_lifetimes();
        (self.plan, given)
    }
}

type Find = fn(&LaunchPlan, &ByteSteps) -> ChannelBlocks;

fn run(plan: &Arc<LaunchPlan>, given: &Tensor, find: Find) -> Result<Vec<Tensor>, String> {
    run_with(plan, vec![given.clone()], find)
}

fn run_with(plan: &Arc<LaunchPlan>, given: Vec<Tensor>, find: Find) -> Result<Vec<Tensor>, String> {
    let memory = crate::buffer::memory();
    let program = CpuProgram::load_with(plan.clone(), memory, find).map_err(|e| e.to_string())?;
    let mut task = program.prepare(given).map_err(|e| e.to_string())?;
    let (pool, steps) = (BufferPool::new(), task.step_count());
    let own = task.as_any_mut().downcast_mut::<CpuTask>().unwrap();
    for _ in 0..steps {
        own.run_step(&pool).map_err(|e| e.to_string())?;
    }
    task.into_outputs().map_err(|e| e.to_string())
}

#[test]
fn random_networks_in_blocks_equal_plain_ones() {
    if blocks::channels_per_block().is_none() {
        println!("SKIPPED: vectors are too short for channel blocks");
        return;
    }
    let mut in_blocks = 0;
    for seed in 0..300 {
        let (plan, given) = Draft::new(seed).network();
        in_blocks += ChannelBlocks::find(&plan, &ByteSteps::new()).count();
        let plan = Arc::new(plan);
        let plain = run(&plan, &given, |_, _| ChannelBlocks::default()).unwrap();
        let blocked = run(&plan, &given, ChannelBlocks::find).unwrap();
        for (plain, blocked) in plain.iter().zip(&blocked) {
            assert_eq!(plain.shape(), blocked.shape(), "seed {seed}");
            let (a, b) = (plain.to_vec::<f32>().unwrap(), blocked.to_vec::<f32>().unwrap());
            let scale = a.iter().fold(1e-3f32, |most, x| most.max(x.abs()));
            for (a, b) in a.iter().zip(&b) {
                assert!((a - b).abs() <= 2e-4 * scale, "seed {seed}: {a} and {b} of {scale}");
            }
        }
    }
    assert!(in_blocks > 500, "{in_blocks} steps in blocks");
}

#[test]
fn the_first_convolution_of_a_picture_writes_blocks() {
    if blocks::channels_per_block().is_none() {
        println!("SKIPPED: vectors are too short for channel blocks");
        return;
    }
    for (channels, kernel, stride) in [(3, 7, 2), (1, 3, 1), (4, 4, 4), (2, 5, 3)] {
        let mut draft = Draft::new(11);
        let side = 9 * stride + kernel - stride;
        let x = draft.value(vec![1, channels, side, side]);
        draft.plan.inputs = vec![x];
        let given = numbers(&mut draft.random, &[1, channels, side, side]);
        let conv = |kernel: usize, stride: usize| {
            let window = Window {
                kernel: vec![kernel; 2],
                strides: vec![stride; 2],
                dilations: vec![],
                padding: Padding::Explicit(vec![]),
            };
            Op::Conv(Conv { window, groups: 1, activation: Activation::Relu })
        };
        let first = draft.constant(&[64, channels, kernel, kernel]);
        let second = draft.constant(&[32, 64, 1, 1]);
        let image = draft.step(conv(kernel, stride), &[Some(x), Some(first)], vec![1, 64, 9, 9]);
        let last = draft.step(conv(1, 1), &[Some(image), Some(second)], vec![1, 32, 9, 9]);
        draft.plan.outputs = vec![last];
        draft.plan.plan_lifetimes();
        assert_eq!(ChannelBlocks::find(&draft.plan, &ByteSteps::new()).count(), 2);
        let plan = Arc::new(draft.plan);
        let plain = run(&plan, &given, |_, _| ChannelBlocks::default()).unwrap();
        let blocked = run(&plan, &given, ChannelBlocks::find).unwrap();
        let (a, b) = (plain[0].to_vec::<f32>().unwrap(), blocked[0].to_vec::<f32>().unwrap());
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= 1e-3 * a.abs().max(1.0)));
    }
}

#[test]
fn images_of_other_shapes_are_refused_as_plain_ones_are() {
    for seed in 1000..1050 {
        let (mut plan, given) = Draft::new(seed).network();
        let mut random = Random::new(seed);
        let mut shape = given.shape().to_vec();
        let axis = random.below(shape.len() as u64) as usize;
        shape[axis] = between(&mut random, 0, 20);
        plan.values[plan.inputs[0].index()].shape = None;
        let plan = Arc::new(plan);
        let given = numbers(&mut random, &shape);
        let plain = run(&plan, &given, |_, _| ChannelBlocks::default());
        let blocked = run(&plan, &given, ChannelBlocks::find);
        assert_eq!(plain.is_ok(), blocked.is_ok(), "seed {seed}: {plain:?} {blocked:?}");
    }
}

#[test]
fn a_scale_of_too_few_channels_is_refused() {
    let mut draft = Draft::new(7);
    let x = draft.value(vec![1, 32, 4, 4]);
    draft.plan.inputs = vec![x];
    let given = numbers(&mut draft.random, &[1, 32, 4, 4]);
    let pointwise = || {
        let window = Window {
            kernel: vec![1, 1],
            strides: vec![],
            dilations: vec![],
            padding: Padding::Explicit(vec![]),
        };
        Op::Conv(Conv { window, groups: 1, activation: Activation::None })
    };
    let (first, last) = (draft.constant(&[32, 32, 1, 1]), draft.constant(&[32, 32, 1, 1]));
    let (scale, shift) = (draft.constant(&[20]), draft.constant(&[20]));
    let image = vec![1, 32, 4, 4];
    let before = draft.step(pointwise(), &[Some(x), Some(first)], image.clone());
    let op = Op::ScaleShift { activation: Activation::None };
    let scaled = draft.step(op, &[Some(before), Some(scale), Some(shift)], image.clone());
    let after = draft.step(pointwise(), &[Some(scaled), Some(last)], image);
    draft.plan.outputs = vec![after];
    draft.plan.plan_lifetimes();
    let plan = Arc::new(draft.plan);
    assert!(run(&plan, &given, |_, _| ChannelBlocks::default()).is_err());
    assert!(run(&plan, &given, ChannelBlocks::find).is_err());
}
