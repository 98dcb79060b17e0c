//! Values whose dimensions are permuted, joined and cut: they reach the fast kernels without
//! copies, and the results are those of the CPU.

use std::sync::Arc;

use base::Random;
use compiler::gpu::{GpuCompiler, check};
use device::{Device, KernelCompiler};
use graph::SymDim;
use model::gpu::{GpuPlan, GpuTarget, Precision};
use model::op::{
    Activation, Binary, Conv, CoordinateMode, Gemm, MatMul, NearestMode, Op, Padding, Resize,
    ResizeMode, Softmax, SoftmaxKind, Unary, Window,
};
use model::{LaunchPlan, ValueId};

use super::sections::{TestQueue, host, numbers, open_gpu_with, weight};
use super::shapes::{Builder, CpuEvaluator};

const TOKENS: usize = 21;
const CHANNELS: usize = 64;
const HEADS: usize = 4;

struct Net {
    b: Builder,
    random: Random,
}

impl Net {
    fn new(seed: u64) -> Net {
        Net { b: Builder::default(), random: Random::new(seed) }
    }

    /// A weight whose products keep the size of their operand.
    fn weight(&mut self, shape: &[usize]) -> ValueId {
        let id = weight(&mut self.b, &mut self.random, shape);
        let factor = self.b.number(1.0 / (shape[0] as f32).sqrt());
        self.b.node(Op::Binary(Binary::Mul), &[id, factor])
    }

    fn row(&mut self, length: usize) -> ValueId {
        weight(&mut self.b, &mut self.random, &[length])
    }

    fn reshape(&mut self, x: ValueId, target: &[i64]) -> ValueId {
        let target = self.b.ints(target);
        self.b.reshape(x, target)
    }

    fn transpose(&mut self, x: ValueId, perm: &[usize]) -> ValueId {
        self.b.node(Op::Transpose { perm: Some(perm.to_vec()) }, &[x])
    }

    fn binary(&mut self, op: Binary, a: ValueId, b: ValueId) -> ValueId {
        self.b.node(Op::Binary(op), &[a, b])
    }

    fn linear(&mut self, x: ValueId, from: usize, to: usize) -> ValueId {
        let (weight, bias) = (self.weight(&[from, to]), self.row(to));
        let product = self.b.node(Op::MatMul(MatMul::default()), &[x, weight]);
        self.binary(Binary::Add, product, bias)
    }

    fn gemm(&mut self, x: ValueId, from: usize, to: usize) -> ValueId {
        let (weight, bias) = (self.weight(&[from, to]), self.row(to));
        let (transpose_a, transpose_b, alpha, beta) = (false, false, 1.0, 1.0);
        let activation = Activation::None;
        let gemm = Gemm { transpose_a, transpose_b, alpha, beta, activation };
        self.b.node(Op::Gemm(gemm), &[x, weight, bias])
    }

    fn layer_norm(&mut self, x: ValueId) -> ValueId {
        let (scale, bias) = (self.row(CHANNELS), self.row(CHANNELS));
        self.b.node(Op::LayerNorm { axis: -1, epsilon: 1e-5 }, &[x, scale, bias])
    }

    /// Attention with the batch beside the heads, on `[tokens, batch, channels]`.
    fn attention(&mut self, x: ValueId) -> ValueId {
        let parts: Vec<ValueId> = (0..3)
            .map(|_| {
                let y = self.linear(x, CHANNELS, CHANNELS);
                let width = (CHANNELS / HEADS) as i64;
                let y = self.reshape(y, &[TOKENS as i64, -1, width]);
                self.transpose(y, &[1, 0, 2])
            })
            .collect();
        let keys = self.transpose(parts[1], &[0, 2, 1]);
        let factor = self.b.number(0.25);
        let queries = self.binary(Binary::Mul, parts[0], factor);
        let scores = self.b.node(Op::MatMul(MatMul::default()), &[queries, keys]);
        let softmax = Softmax { kind: SoftmaxKind::Softmax, axis: -1, flatten: false };
        let weights = self.b.node(Op::Softmax(softmax), &[scores]);
        let y = self.b.node(Op::MatMul(MatMul::default()), &[weights, parts[2]]);
        let y = self.transpose(y, &[1, 0, 2]);
        let y = self.reshape(y, &[-1, CHANNELS as i64]);
        let y = self.gemm(y, CHANNELS, CHANNELS);
        self.reshape(y, &[TOKENS as i64, -1, CHANNELS as i64])
    }

    /// A layer of a transformer whose attention has tokens first, as torchvision's.
    fn layer(&mut self, x: ValueId) -> ValueId {
        let y = self.layer_norm(x);
        let y = self.transpose(y, &[1, 0, 2]);
        let y = self.attention(y);
        let y = self.transpose(y, &[1, 0, 2]);
        let x = self.binary(Binary::Add, y, x);
        let y = self.layer_norm(x);
        let y = self.linear(y, CHANNELS, 2 * CHANNELS);
        let y = self.b.node(Op::Unary(Unary::Gelu { tanh: false }), &[y]);
        let y = self.linear(y, 2 * CHANNELS, CHANNELS);
        self.binary(Binary::Add, x, y)
    }
}

pub fn transformer() -> LaunchPlan {
    let mut net = Net::new(1);
    let x = net.b.input(&[SymDim::symbol("batch"), TOKENS.into(), CHANNELS.into()]);
    let mut x = net.layer(x);
    for _ in 0..2 {
        x = net.layer(x);
    }
    net.b.finish(&[x])
}

/// Products of matrices between reshapes, with sums behind them, as GPT-2's.
fn flattened() -> LaunchPlan {
    let mut net = Net::new(2);
    let mut x = net.b.input(&[SymDim::symbol("batch"), TOKENS.into(), CHANNELS.into()]);
    for _ in 0..2 {
        let y = net.layer_norm(x);
        let y = net.reshape(y, &[-1, CHANNELS as i64]);
        let y = net.gemm(y, CHANNELS, 2 * CHANNELS);
        let y = net.reshape(y, &[-1, TOKENS as i64, 2 * CHANNELS as i64]);
        let y = net.b.node(Op::Unary(Unary::Gelu { tanh: true }), &[y]);
        let y = net.reshape(y, &[-1, 2 * CHANNELS as i64]);
        let y = net.gemm(y, 2 * CHANNELS, CHANNELS);
        let y = net.reshape(y, &[-1, TOKENS as i64, CHANNELS as i64]);
        x = net.binary(Binary::Add, x, y);
    }
    net.b.finish(&[x])
}

fn window(edge: usize) -> Window {
    let padding = Padding::Explicit(vec![edge / 2; 4]);
    Window { kernel: vec![edge; 2], strides: vec![], dilations: vec![], padding }
}

fn conv(net: &mut Net, x: ValueId, from: usize, to: usize, edge: usize) -> ValueId {
    let weight = net.weight(&[to, from, edge, edge]);
    let conv = Conv { window: window(edge), groups: 1, activation: Activation::None };
    net.b.node(Op::Conv(conv), &[x, weight])
}

/// Group normalisation as an instance normalisation between reshapes, then a resized image.
pub fn image() -> LaunchPlan {
    let mut net = Net::new(3);
    let x = net.b.input(&[SymDim::symbol("batch"), 16.into(), 12.into(), 10.into()]);
    let x = conv(&mut net, x, 16, 40, 3);
    let y = net.reshape(x, &[0, 8, -1]);
    let (scale, bias) = (net.row(8), net.row(8));
    let y = net.b.node(Op::InstanceNorm { epsilon: 1e-5 }, &[y, scale, bias]);
    let y = net.reshape(y, &[-1, 40, 12, 10]);
    let (scale, bias) = (net.weight(&[40, 1, 1]), net.weight(&[40, 1, 1]));
    let y = net.binary(Binary::Mul, y, scale);
    let y = net.binary(Binary::Add, y, bias);
    let y = net.b.node(Op::Unary(Unary::Silu { alpha: 1.0 }), &[y]);
    let y = conv(&mut net, y, 40, 40, 3);
    let scales = net.b.graph.add_constant(
        "scales",
        model::Tensor::from_vec(vec![4], vec![1.0f32, 1.0, 2.0, 2.0]).unwrap(),
    );
    let resize = Resize {
        mode: ResizeMode::Linear,
        coordinates: CoordinateMode::HalfPixel,
        nearest: NearestMode::Floor,
        cubic_coefficient: -0.75,
        exclude_outside: false,
        extrapolation_value: 0.0,
        antialias: false,
        axes: None,
        keep_aspect: model::op::AspectPolicy::Stretch,
    };
    let none = net
        .b
        .graph
        .add_constant("none", model::Tensor::from_vec(vec![0], Vec::<f32>::new()).unwrap());
    let y = net.b.node(Op::Resize(resize), &[y, none, scales]);
    net.b.finish(&[y])
}

/// A detector's head: odd channels, permuted, an activation, joined.
fn one_head(net: &mut Net, x: ValueId) -> ValueId {
    let y = conv(net, x, 16, 21, 1);
    let y = net.reshape(y, &[-1, 3, 7, 36]);
    let y = net.transpose(y, &[0, 1, 3, 2]);
    let y = net.b.node(Op::Unary(Unary::Sigmoid), &[y]);
    net.reshape(y, &[-1, 108, 7])
}

fn head() -> LaunchPlan {
    let mut net = Net::new(4);
    let x = net.b.input(&[SymDim::symbol("batch"), 16.into(), 6.into(), 6.into()]);
    let y = one_head(&mut net, x);
    net.b.finish(&[y])
}

pub fn two_heads() -> LaunchPlan {
    let mut net = Net::new(5);
    let x = net.b.input(&[SymDim::symbol("batch"), 16.into(), 6.into(), 6.into()]);
    let heads = [one_head(&mut net, x), one_head(&mut net, x)];
    let y = net.b.node(Op::Concat { axis: 1 }, &heads);
    net.b.finish(&[y])
}

/// A function that no product has, before a reshape and before a concatenation.
pub fn expressions() -> LaunchPlan {
    let mut net = Net::new(6);
    let x = net.b.input(&[SymDim::symbol("batch"), 16.into(), 6.into(), 6.into()]);
    let y = conv(&mut net, x, 16, 24, 1);
    let z = net.b.node(Op::Unary(Unary::Cos), &[y]);
    let z = net.reshape(z, &[-1, 864]);
    let w = net.transpose(y, &[0, 2, 3, 1]);
    let w = net.reshape(w, &[-1, 864]);
    let sine = net.b.node(Op::Unary(Unary::Sin), &[w]);
    let y = net.b.node(Op::Concat { axis: 1 }, &[z, sine]);
    net.b.finish(&[y])
}

fn lower(plan: &LaunchPlan, batch: usize, precision: Precision) -> GpuPlan {
    let target = GpuTarget { capability: 90, multiprocessors: 132, precision };
    let compiler = GpuCompiler::new(Some(Arc::new(CpuEvaluator)));
    let gpu = compiler.lower(plan, &[("batch".to_string(), batch)], &target).unwrap();
    assert_eq!(check::faults(&gpu), Vec::<String>::new());
    gpu
}

fn ops(plan: &GpuPlan) -> Vec<&str> {
    plan.steps.iter().map(|step| step.op.as_str()).collect()
}

#[test]
fn a_transformer_with_tokens_first_is_products_attention_and_norms() {
    for batch in [1, 3, 8] {
        let gpu = lower(&transformer(), batch, Precision::F16);
        let layer = ["LayerNorm", "MatMul", "Attention", "MatMul", "LayerNorm", "MatMul", "MatMul"];
        // The residual of the first layer has the batch first, the product has tokens first.
        let mut first = layer.to_vec();
        if batch > 1 {
            first.insert(4, "Elementwise");
        }
        let want = [&["Copy"], &first[..], &layer, &layer, &["Copy"]].concat();
        assert_eq!(ops(&gpu), want, "batch {batch}");
    }
}

#[test]
fn sums_and_activations_behind_reshapes_belong_to_the_product() {
    let layer = ["LayerNorm", "MatMul", "MatMul"];
    let want = [&["Copy"][..], &layer, &layer, &["Copy"]].concat();
    assert_eq!(ops(&lower(&flattened(), 4, Precision::F16)), want);
}

#[test]
fn group_norm_keeps_channels_fastest() {
    let want = ["Copy", "Conv", "Normalize", "Elementwise", "Conv", "Resize", "Copy"];
    let gpu = lower(&image(), 4, Precision::F16);
    assert_eq!(ops(&gpu), want);
    let expression = |step: usize| &gpu.kernels[gpu.steps[step].choices[0].kernel].expression;
    assert!(expression(5).ends_with(", 8>"), "{}", expression(5));
}

/// The activation is the convolution's; the parts are joined where the whole is written.
#[test]
fn heads_of_a_detector_are_moved_once() {
    assert_eq!(ops(&lower(&head(), 4, Precision::F16)), ["Copy", "Conv", "Copy"]);
    let want = ["Copy", "Conv", "Conv", "Copy", "Copy", "Copy"];
    assert_eq!(ops(&lower(&two_heads(), 4, Precision::F16)), want);
}

/// An expression is computed in the order that the reshape behind it needs, or where a
/// concatenation has it.
#[test]
fn expressions_are_computed_where_they_are_read() {
    let gpu = lower(&expressions(), 4, Precision::F16);
    assert_eq!(ops(&gpu), ["Copy", "Conv", "Elementwise", "Copy", "Elementwise", "Copy"]);
}

#[test]
fn results_are_those_of_the_cpu() {
    for (precision, tolerance) in [(Precision::F16, 2e-2), (Precision::F32, 1e-3)] {
        let Some(gpu) = open_gpu_with(false, precision) else { return };
        let host = host();
        let (queue, alone) = (TestQueue::open(&gpu, true), TestQueue::open(&*host, true));
        let cases = [
            ("transformer", transformer(), vec![TOKENS, CHANNELS]),
            ("flattened", flattened(), vec![TOKENS, CHANNELS]),
            ("image", image(), vec![16, 12, 10]),
            ("head", head(), vec![16, 6, 6]),
            ("two heads", two_heads(), vec![16, 6, 6]),
            ("expressions", expressions(), vec![16, 6, 6]),
        ];
        for (name, plan, shape) in cases {
            let plan = Arc::new(plan);
            let program = gpu.load(plan.clone()).unwrap();
            let reference = host.load(plan).unwrap();
            for batch in [1usize, 2, 5, 8] {
                let shape = [&[batch], &shape[..]].concat();
                let input = numbers(&mut Random::new(batch as u64), &shape);
                let (got, want) = (queue.run(&*program, &input), alone.run(&*reference, &input));
                let pairs = got[0].to_vec::<f32>().unwrap().into_iter();
                let pairs = pairs.zip(want[0].to_vec::<f32>().unwrap());
                let worst =
                    pairs.map(|(a, b)| (a - b).abs() / b.abs().max(1.0)).fold(0.0, f32::max);
                assert!(worst < tolerance, "{name} {precision:?} {batch}: an error of {worst}");
            }
        }
    }
}
