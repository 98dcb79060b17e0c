//! Quantized graphs: lowered to products of bytes, run on the host, compared with the CPU device.
//!
//! Scales are powers of two and numbers are few bits long, so that single precision is exact and
//! results must be equal to the last bit. Halves, which round to even, are frequent.

use std::collections::HashMap;

use compiler::gpu::{GpuCompiler, check};
use device::KernelCompiler;
use graph::infer::Fact;
use graph::{Graph, GraphNode};
use model::gpu::{GpuPlan, GpuTarget, Precision};
use model::op::{
    Activation, Binary, Cast, Conv, Gemm, MatMul, Op, Padding, Pool, PoolKind, Unary, Window,
};
use model::{DataType, Tensor, ValueId};

use crate::bench::{Bench, Random};

/// A graph that is being written, with its inputs.
struct Net {
    graph: Graph,
    feeds: Vec<Tensor>,
    random: Random,
}

/// A quantized value: bytes, and the numbers that they stand for.
#[derive(Clone, Copy)]
struct Quantized {
    bytes: ValueId,
    real: ValueId,
}

impl Net {
    fn new(seed: u64) -> Net {
        Net { graph: Graph::default(), feeds: Vec::new(), random: Random::new(seed) }
    }

    fn feed(&mut self, tensor: Tensor) -> ValueId {
        let name = format!("x{}", self.feeds.len());
        let id = self.graph.add_value(name, Fact::of_tensor(&tensor));
        self.graph.values[id.index()].content = None;
        self.graph.inputs.push(id);
        self.feeds.push(tensor);
        id
    }

    fn constant(&mut self, tensor: Tensor) -> ValueId {
        let name = format!("c{}", self.graph.values.len());
        self.graph.add_constant(name, tensor)
    }

    fn nodes(&mut self, op: Op, inputs: &[Option<ValueId>], outputs: usize) -> Vec<ValueId> {
        let facts = self.graph.infer(&op, inputs, outputs).unwrap();
        let name = format!("n{}", self.graph.nodes.len());
        let ids: Vec<ValueId> = facts
            .into_iter()
            .map(|fact| {
                let name = format!("v{}", self.graph.values.len());
                self.graph.add_value(name, fact)
            })
            .collect();
        let outputs = ids.iter().copied().map(Some).collect();
        self.graph.nodes.push(GraphNode { name, op, inputs: inputs.to_vec(), outputs });
        ids
    }

    fn node(&mut self, op: Op, inputs: &[ValueId]) -> ValueId {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        self.nodes(op, &inputs, 1)[0]
    }

    fn bytes(&mut self, shape: &[usize], dtype: DataType) -> Tensor {
        let len = shape.iter().product();
        match dtype {
            DataType::U8 => {
                let all: Vec<u8> = (0..len).map(|_| self.random.below(256) as u8).collect();
                Tensor::from_vec(shape.to_vec(), all).unwrap()
            }
            _ => {
                let all: Vec<i8> = (0..len).map(|_| self.random.below(256) as u8 as i8).collect();
                Tensor::from_vec(shape.to_vec(), all).unwrap()
            }
        }
    }

    /// Powers of two: one, or one for each channel.
    fn scale(&mut self, channels: Option<usize>) -> ValueId {
        let count = channels.unwrap_or(1);
        let all: Vec<f32> =
            (0..count).map(|_| 2f32.powi(-6 + self.random.below(3) as i32)).collect();
        let shape = channels.map_or(vec![], |count| vec![count]);
        self.constant(Tensor::from_vec(shape, all).unwrap())
    }

    fn zero(&mut self, dtype: DataType, value: i64) -> ValueId {
        let tensor = graph::content::tensor_of(dtype, vec![], &[value]).unwrap();
        self.constant(tensor)
    }

    fn dequantized(
        &mut self,
        bytes: ValueId,
        scale: ValueId,
        zero: ValueId,
        axis: i64,
    ) -> Quantized {
        let real = self.node(Op::DequantizeLinear { axis }, &[bytes, scale, zero]);
        Quantized { bytes, real }
    }

    /// An input of bytes.
    fn input(&mut self, shape: &[usize], dtype: DataType, zero: i64) -> Quantized {
        let tensor = self.bytes(shape, dtype);
        let (bytes, scale, zero) = (self.feed(tensor), self.scale(None), self.zero(dtype, zero));
        self.dequantized(bytes, scale, zero, 1)
    }

    fn quantized(&mut self, x: ValueId, dtype: DataType, zero: i64) -> Quantized {
        let scale = self.constant(Tensor::from_vec(vec![], vec![0.25f32]).unwrap());
        let zero = self.zero(dtype, zero);
        let bytes = self.node(Op::QuantizeLinear { axis: 1, dtype }, &[x, scale, zero]);
        self.dequantized(bytes, scale, zero, 1)
    }

    /// A weight with one scale, or one for each index along `axis`.
    fn weight(&mut self, shape: &[usize], axis: Option<usize>) -> ValueId {
        let tensor = self.bytes(shape, DataType::I8);
        let bytes = self.constant(tensor);
        let scale = self.scale(axis.map(|axis| shape[axis]));
        let count = axis.map_or(vec![], |axis| vec![shape[axis]]);
        let zeros = vec![0i8; count.iter().product()];
        let zero = self.constant(Tensor::from_vec(count, zeros).unwrap());
        self.dequantized(bytes, scale, zero, axis.unwrap_or(1) as i64).real
    }

    /// Multiples of a quarter.
    fn bias(&mut self, count: usize) -> ValueId {
        let all: Vec<f32> = (0..count).map(|_| self.random.below(64) as f32 / 4.0 - 8.0).collect();
        self.constant(Tensor::from_vec(vec![count], all).unwrap())
    }

    fn lowered(&self, outputs: &[ValueId], precision: Precision) -> GpuPlan {
        let mut graph = self.graph.clone();
        graph.outputs = outputs.to_vec();
        let plan = compiler::lower(&graph).unwrap();
        let target = GpuTarget { capability: 80, multiprocessors: 8, precision };
        let gpu = GpuCompiler::default().lower(&plan, &[], &target).unwrap();
        assert_eq!(check::faults(&gpu), Vec::<String>::new());
        gpu
    }

    /// Every value on the CPU device.
    fn values(&self) -> HashMap<ValueId, Tensor> {
        let mut known: HashMap<ValueId, Tensor> =
            self.graph.constants.iter().map(|(id, tensor)| (id, tensor.clone())).collect();
        known.extend(self.graph.inputs.iter().copied().zip(self.feeds.iter().cloned()));
        for node in &self.graph.nodes {
            let inputs: Vec<Option<Tensor>> =
                node.inputs.iter().map(|id| id.map(|id| known[&id].clone())).collect();
            let results = cpu::evaluate(&node.op, &inputs, node.outputs.len()).unwrap();
            known.extend(node.outputs.iter().flatten().copied().zip(results));
        }
        known
    }

    /// Checks that `outputs` are computed by `ops`, equal to the CPU device's.
    fn check(&self, bench: &mut Bench, name: &str, outputs: &[ValueId], ops: &[&str]) {
        let plan = self.lowered(outputs, Precision::F32);
        let found: Vec<&str> = plan.steps.iter().map(|step| step.op.as_str()).collect();
        assert_eq!(found, ops, "{name}");
        let products = plan.steps.iter().filter(|step| ["Conv", "MatMul"].contains(&&*step.op));
        for step in products {
            let expression = &plan.kernels[step.choices[0].kernel].expression;
            assert!(expression.contains("tiles::Bytes<"), "{name}: {expression}");
        }
        let values = self.values();
        let expected: Vec<(Tensor, f64)> =
            outputs.iter().map(|id| (values[id].clone(), 0.0)).collect();
        bench.check_plan(name, &plan, &self.feeds, &expected);
    }
}

fn conv(strides: usize, pads: usize, groups: usize, activation: Activation) -> Op {
    let padding = Padding::Explicit(vec![pads; 4]);
    let window = Window { kernel: vec![], strides: vec![strides; 2], dilations: vec![], padding };
    Op::Conv(Conv { window, groups, activation })
}

#[test]
fn convolutions_between_quantized_images() {
    let mut bench = Bench::default();
    // Zero points that are not zero fill the border; three channels are copied in fours.
    let mut net = Net::new(1);
    let x = net.input(&[2, 3, 11, 10], DataType::U8, 131);
    let (weight, bias) = (net.weight(&[20, 3, 5, 5], Some(0)), net.bias(20));
    let y = net.node(conv(2, 2, 1, Activation::None), &[x.real, weight, bias]);
    let y = net.node(Op::Unary(Unary::Relu), &[y]);
    let y = net.quantized(y, DataType::U8, 0);
    // A pool of bytes, then a convolution of odd channels, and one with a residual.
    let window = Window {
        kernel: vec![3, 3],
        strides: vec![1, 1],
        dilations: vec![],
        padding: Padding::Explicit(vec![1; 4]),
    };
    let pool = Pool { kind: PoolKind::Max, window, ceil_mode: false };
    let pooled = net.node(Op::Pool(pool), &[y.real]);
    let pooled = net.quantized(pooled, DataType::U8, 0);
    let weight = net.weight(&[20, 20, 3, 3], Some(0));
    let z = net.node(conv(1, 1, 1, Activation::None), &[pooled.real, weight]);
    let z = net.quantized(z, DataType::I8, -3);
    let sum = net.node(Op::Binary(Binary::Add), &[z.real, pooled.real]);
    let sum = net.node(Op::Unary(Unary::Relu), &[sum]);
    let sum = net.quantized(sum, DataType::U8, 7);
    net.check(&mut bench, "residual", &[sum.bytes], &["Copy", "Conv", "Pool", "Conv", "Copy"]);
    // Groups, one scale for all weights, and a result of numbers.
    let mut net = Net::new(2);
    let x = net.input(&[1, 16, 7, 7], DataType::I8, -5);
    let (weight, bias) = (net.weight(&[24, 8, 3, 3], None), net.bias(24));
    let y = net.node(conv(1, 0, 2, Activation::Relu), &[x.real, weight, bias]);
    net.check(&mut bench, "groups", &[y], &["Copy", "Conv", "Copy"]);
    bench.finish("byte_convolutions");
}

#[test]
fn matrix_products_between_quantized_rows() {
    let mut bench = Bench::default();
    let mut net = Net::new(3);
    let x = net.input(&[3, 20, 33], DataType::I8, 4);
    let (weight, bias) = (net.weight(&[33, 70], Some(1)), net.bias(70));
    let y = net.node(Op::MatMul(MatMul::default()), &[x.real, weight]);
    let y = net.node(Op::Binary(Binary::Add), &[y, bias]);
    let y = net.quantized(y, DataType::U8, 100);
    let weight = net.weight(&[70, 33], None);
    let z = net.node(Op::MatMul(MatMul::default()), &[y.real, weight]);
    let z = net.node(Op::Binary(Binary::Add), &[z, x.real]);
    net.check(&mut bench, "matmul", &[z], &["Copy", "MatMul", "MatMul", "Copy"]);
    // The transposed weight of a fully connected layer, and a deep product.
    let mut net = Net::new(4);
    let x = net.input(&[5, 600], DataType::U8, 0);
    let (weight, bias) = (net.weight(&[17, 600], Some(0)), net.bias(17));
    let gemm = Gemm {
        transpose_a: false,
        transpose_b: true,
        alpha: 0.5,
        beta: 2.0,
        activation: Activation::None,
    };
    let y = net.node(Op::Gemm(gemm), &[x.real, weight, bias]);
    let y = net.quantized(y, DataType::I8, 1);
    net.check(&mut bench, "gemm", &[y.bytes], &["MatMul", "Copy"]);
    bench.finish("byte_matrices");
}

/// Products of the same bytes are one launch; what follows one of them differs.
#[test]
fn products_of_the_same_rows() {
    let mut bench = Bench::default();
    let mut net = Net::new(11);
    let x = net.input(&[3, 20, 40], DataType::U8, 7);
    let mut outputs = Vec::new();
    for (columns, along) in [(64, Some(1)), (32, None), (96, Some(1))] {
        let weight = net.weight(&[40, columns], along);
        let mut y = net.node(Op::MatMul(MatMul::default()), &[x.real, weight]);
        if columns != 32 {
            let bias = net.bias(columns);
            y = net.node(Op::Binary(Binary::Add), &[y, bias]);
        }
        outputs.push(y);
    }
    // This one is stored as bytes, which the others are not.
    let weight = net.weight(&[40, 32], None);
    let y = net.node(Op::MatMul(MatMul::default()), &[x.real, weight]);
    outputs.push(net.quantized(y, DataType::I8, 3).bytes);
    let ops = ["MatMul", "MatMul", "Copy", "Copy", "Copy", "Copy"];
    net.check(&mut bench, "siblings", &outputs, &ops);
    bench.finish("byte_siblings");
}

/// The largest bytes of windows that are sixteen channels wide.
#[test]
fn windows_of_bytes() {
    let mut bench = Bench::default();
    for (seed, dtype, zero) in [(12, DataType::U8, 9), (13, DataType::I8, -5)] {
        let mut net = Net::new(seed);
        let x = net.input(&[2, 16, 9, 11], dtype, zero);
        let (weight, bias) = (net.weight(&[32, 16, 1, 1], Some(0)), net.bias(32));
        let y = net.node(conv(1, 0, 1, Activation::None), &[x.real, weight, bias]);
        let y = net.quantized(y, dtype, zero);
        let padding = Padding::Explicit(vec![1, 1, 1, 1]);
        let window = Window { kernel: vec![3; 2], strides: vec![2; 2], dilations: vec![], padding };
        let pool = Op::Pool(Pool { kind: PoolKind::Max, window, ceil_mode: false });
        let pooled = net.node(pool, &[y.bytes]);
        let name = format!("{dtype:?}");
        net.check(&mut bench, &name, &[pooled], &["Copy", "Conv", "MaxPool", "Copy"]);
    }
    bench.finish("byte_windows");
}

/// The operators that take bytes themselves, with zero points of the weights that do not leave room
/// in a byte.
#[test]
fn operators_of_bytes() {
    let mut bench = Bench::default();
    let mut net = Net::new(5);
    let tensor = net.bytes(&[1, 5, 8, 9], DataType::U8);
    let x = net.feed(tensor);
    let tensor = net.bytes(&[12, 5, 3, 2], DataType::U8);
    let weight = net.constant(tensor);
    let zeros: Vec<u8> = (0..12).map(|i| i * 23).collect();
    let weight_zero = net.constant(Tensor::from_vec(vec![12], zeros).unwrap());
    let (scale, weight_scale, zero) =
        (net.scale(None), net.scale(Some(12)), net.zero(DataType::U8, 77));
    let out_scale = net.constant(Tensor::from_vec(vec![], vec![3.7f32]).unwrap());
    let out_zero = net.zero(DataType::I8, -20);
    let bias: Vec<i32> = (0..12).map(|i| i * 1000 - 5000).collect();
    let bias = net.constant(Tensor::from_vec(vec![12], bias).unwrap());
    let Op::Conv(spec) = conv(1, 1, 1, Activation::None) else { unreachable!() };
    let y = net.node(
        Op::QLinearConv(spec.clone()),
        &[x, scale, zero, weight, weight_scale, weight_zero, out_scale, out_zero, bias],
    );
    let sums = net.node(Op::ConvInteger(spec), &[x, weight, zero]);
    net.check(&mut bench, "QLinearConv", &[y, sums], &["Copy", "Conv", "Conv", "Copy", "Copy"]);

    let mut net = Net::new(6);
    let tensor = net.bytes(&[2, 9, 40], DataType::I8);
    let a = net.feed(tensor);
    let tensor = net.bytes(&[40, 30], DataType::I8);
    let b = net.constant(tensor);
    let (scale, b_scale) = (net.scale(None), net.scale(None));
    let (zero, b_zero) = (net.zero(DataType::I8, -9), net.zero(DataType::I8, 2));
    let out_scale = net.constant(Tensor::from_vec(vec![], vec![1.1f32]).unwrap());
    let out_zero = net.zero(DataType::U8, 128);
    let y = net.node(Op::QLinearMatMul, &[a, scale, zero, b, b_scale, b_zero, out_scale, out_zero]);
    let sums = net.node(Op::MatMulInteger, &[a, b, zero, b_zero]);
    net.check(&mut bench, "QLinearMatMul", &[y, sums], &["MatMul", "MatMul", "Copy", "Copy"]);
    bench.finish("byte_operators");
}

/// The form of dynamic quantization: scale and zero point of the activations are known only when
/// the model runs.
#[test]
fn dynamically_quantized_products() {
    let mut bench = Bench::default();
    let mut net = Net::new(7);
    let tensor = net.random.floats(&[2, 7, 40]);
    let x = net.feed(tensor);
    let quantized = net.nodes(Op::DynamicQuantizeLinear, &[Some(x)], 3);
    let tensor = net.bytes(&[40, 24], DataType::I8);
    let weight = net.constant(tensor);
    let (weight_scale, bias) = (net.scale(Some(24)), net.bias(24));
    let sums = net.node(Op::MatMulInteger, &[quantized[0], weight, quantized[2]]);
    let real = net.node(Op::Cast(Cast { to: DataType::F32 }), &[sums]);
    let scale = net.node(Op::Binary(Binary::Mul), &[quantized[1], weight_scale]);
    let y = net.node(Op::Binary(Binary::Mul), &[real, scale]);
    let y = net.node(Op::Binary(Binary::Add), &[y, bias]);
    let y = net.node(Op::Unary(Unary::Relu), &[y]);
    let plan = net.lowered(&[y], Precision::F32);
    let products: Vec<_> = plan.steps.iter().filter(|step| step.op == "MatMul").collect();
    assert!(products.len() == 1 && plan.steps.last().unwrap().op != "MatMul");
    let expected = vec![(net.values()[&y].clone(), 1e-6)];
    bench.check_plan("dynamic", &plan, &net.feeds, &expected);
    bench.finish("byte_dynamic");
}

/// What is no product of bytes is computed with numbers, and its weights are not kept twice.
#[test]
fn other_products_of_quantized_values_are_products_of_numbers() {
    let mut net = Net::new(8);
    let x = net.input(&[1, 16, 9, 9], DataType::U8, 3);
    let weight = net.weight(&[16, 1, 3, 3], Some(0));
    let y = net.node(conv(1, 1, 16, Activation::None), &[x.real, weight]);
    let plan = net.lowered(&[y], Precision::F16);
    assert!(plan.steps.iter().any(|step| step.op == "Depthwise"), "{:?}", plan.steps);
    assert_eq!(plan.weights.len(), 1);
}
