//! A slow, plain interpreter for single-precision graphs, so that tests can compare results before
//! and after a pass. It knows the operators the passes rewrite, and shares no code with any device.

use std::collections::HashMap;

use model::op::{
    Activation, Binary, Conv, Gemm, MatMul, Op, Padding, Reduce, ReduceKind, Softmax, Unary,
};
use model::{DataType, Tensor, ValueId};

use crate::content;
use crate::infer::Fact;
use crate::ir::{Graph, GraphNode};
use model::dim::SymDim;

/// A dense tensor of floats.
#[derive(Clone, Debug)]
pub struct Array {
    pub shape: Vec<usize>,
    pub data: Vec<f32>,
}

/// Builds graphs for tests.
#[derive(Default)]
pub struct Builder {
    pub graph: Graph,
    seed: u64,
}

impl Builder {
    pub fn input(&mut self, name: &str, dims: &[SymDim]) -> ValueId {
        let id = self.graph.add_value(name, Fact::new(DataType::F32, Some(dims.to_vec())));
        self.graph.inputs.push(id);
        id
    }

    pub fn fixed_input(&mut self, name: &str, dims: &[usize]) -> ValueId {
        let dims: Vec<SymDim> = dims.iter().map(|dim| SymDim::from(*dim)).collect();
        self.input(name, &dims)
    }

    /// A constant of reproducible numbers between -1 and 1.
    pub fn weight(&mut self, shape: &[usize]) -> ValueId {
        self.seed += 1;
        let data = noise(self.seed, shape.iter().product());
        self.constant(shape, data)
    }

    /// A constant of reproducible numbers between 0.5 and 1.5.
    pub fn positive(&mut self, shape: &[usize]) -> ValueId {
        self.seed += 1;
        let data = noise(self.seed, shape.iter().product()).iter().map(|x| 1.0 + x / 2.0).collect();
        self.constant(shape, data)
    }

    pub fn constant(&mut self, shape: &[usize], data: Vec<f32>) -> ValueId {
        let name = format!("c{}", self.graph.values.len());
        self.graph.add_constant(name, Tensor::from_vec(shape.to_vec(), data).unwrap())
    }

    pub fn number(&mut self, value: f32) -> ValueId {
        self.constant(&[], vec![value])
    }

    pub fn ints(&mut self, values: &[i64]) -> ValueId {
        self.graph.add_constant("ints", content::int_vector(values).unwrap())
    }

    pub fn node(&mut self, op: Op, inputs: &[ValueId]) -> ValueId {
        let inputs: Vec<Option<ValueId>> = inputs.iter().map(|id| Some(*id)).collect();
        let fact = self.graph.infer(&op, &inputs, 1).unwrap().remove(0);
        let name = format!("v{}", self.graph.values.len());
        let output = self.graph.add_value(&name, fact);
        self.graph.nodes.push(GraphNode { name, op, inputs, outputs: vec![Some(output)] });
        output
    }

    pub fn output(mut self, id: ValueId) -> Graph {
        self.graph.outputs.push(id);
        self.graph
    }
}

pub fn noise(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Runs `pass` on a copy and checks that the outputs are unchanged, on inputs where every symbol is
/// 3.
pub fn check(graph: &Graph, pass: impl Fn(&mut Graph) -> usize) -> (Graph, usize) {
    let mut rewritten = graph.clone();
    let count = pass(&mut rewritten);
    let (before, after) = (evaluate(graph), evaluate(&rewritten));
    for (a, b) in before.iter().zip(&after) {
        assert_eq!(a.shape, b.shape, "{rewritten}");
        for (x, y) in a.data.iter().zip(&b.data) {
            assert!((x - y).abs() <= 2e-5 * x.abs().max(1.0), "{x} became {y}:\n{rewritten}");
        }
    }
    (rewritten, count)
}

/// Names of the operators, in order.
pub fn names(graph: &Graph) -> Vec<String> {
    graph.nodes.iter().map(|node| node.op.name()).collect()
}

pub fn evaluate(graph: &Graph) -> Vec<Array> {
    let mut values: HashMap<ValueId, Array> = HashMap::new();
    for (index, id) in graph.inputs.iter().enumerate() {
        let size = |dim: &SymDim| dim.substitute(&|_| Some(3)).size().unwrap();
        let shape: Vec<usize> = graph.shape(*id).unwrap().iter().map(size).collect();
        let data = noise(1000 + index as u64, shape.iter().product());
        values.insert(*id, Array { shape, data });
    }
    for (id, tensor) in graph.constants.iter() {
        let data = content::floats(tensor)
            .unwrap_or_else(|| content::ints(tensor).unwrap().iter().map(|x| *x as f32).collect());
        values.insert(id, Array { shape: tensor.shape().to_vec(), data });
    }
    for node in &graph.nodes {
        let inputs: Vec<Option<&Array>> =
            node.inputs.iter().map(|id| id.map(|id| &values[&id])).collect();
        let result = run(&node.op, &inputs);
        values.insert(node.outputs[0].unwrap(), result);
    }
    graph.outputs.iter().map(|id| values[id].clone()).collect()
}

fn indices(shape: &[usize]) -> impl Iterator<Item = Vec<usize>> + '_ {
    (0..shape.iter().product::<usize>()).map(|flat| {
        let mut rest = flat;
        let mut index = vec![0; shape.len()];
        for axis in (0..shape.len()).rev() {
            index[axis] = rest % shape[axis];
            rest /= shape[axis];
        }
        index
    })
}

impl Array {
    fn make(shape: Vec<usize>, f: impl Fn(&[usize]) -> f32) -> Array {
        let data = indices(&shape).map(|index| f(&index)).collect();
        Array { shape, data }
    }

    /// The element at `index`, broadcasting from the right.
    fn at(&self, index: &[usize]) -> f32 {
        let skip = index.len() - self.shape.len();
        let flat = self
            .shape
            .iter()
            .zip(&index[skip..])
            .fold(0, |flat, (size, i)| flat * size + if *size == 1 { 0 } else { *i });
        self.data[flat]
    }

    fn map(&self, f: impl Fn(f32) -> f32) -> Array {
        Array { shape: self.shape.clone(), data: self.data.iter().map(|x| f(*x)).collect() }
    }

    fn zip(&self, other: &Array, f: impl Fn(f32, f32) -> f32) -> Array {
        let rank = self.shape.len().max(other.shape.len());
        let size = |shape: &[usize], axis: usize| {
            let missing = rank - shape.len();
            if axis < missing { 1 } else { shape[axis - missing] }
        };
        let shape = (0..rank).map(|a| size(&self.shape, a).max(size(&other.shape, a))).collect();
        Array::make(shape, |index| f(self.at(index), other.at(index)))
    }

    fn swap_last(&self) -> Array {
        let rank = self.shape.len();
        let mut perm: Vec<usize> = (0..rank).collect();
        perm.swap(rank - 2, rank - 1);
        self.transpose(&perm)
    }

    fn transpose(&self, perm: &[usize]) -> Array {
        let shape = perm.iter().map(|axis| self.shape[*axis]).collect();
        Array::make(shape, |index| {
            let mut source = vec![0; index.len()];
            perm.iter().zip(index).for_each(|(axis, i)| source[*axis] = *i);
            self.at(&source)
        })
    }

    fn matmul(&self, other: &Array) -> Array {
        let (ra, rb) = (self.shape.len(), other.shape.len());
        let (batch_a, batch_b) = (&self.shape[..ra - 2], &other.shape[..rb - 2]);
        let batch = if batch_a.len() >= batch_b.len() { batch_a } else { batch_b };
        let shape = [batch, &[self.shape[ra - 2], other.shape[rb - 1]]].concat();
        Array::make(shape, |index| {
            let (front, matrix) = index.split_at(index.len() - 2);
            (0..self.shape[ra - 1])
                .map(|k| {
                    let left = [&front[front.len() - batch_a.len()..], &[matrix[0], k]].concat();
                    let right = [&front[front.len() - batch_b.len()..], &[k, matrix[1]]].concat();
                    self.at(&left) * other.at(&right)
                })
                .sum()
        })
    }

    /// Reduces the dimensions in `axes`, keeping them as 1.
    fn mean(&self, axes: &[usize]) -> Array {
        let shape: Vec<usize> = (0..self.shape.len())
            .map(|a| if axes.contains(&a) { 1 } else { self.shape[a] })
            .collect();
        let count: usize = axes.iter().map(|axis| self.shape[*axis]).product();
        let mut sums = Array::make(shape, |_| 0.0);
        for index in indices(&self.shape) {
            let flat = sums
                .shape
                .iter()
                .zip(&index)
                .fold(0, |flat, (size, i)| flat * size + if *size == 1 { 0 } else { *i });
            sums.data[flat] += self.at(&index) / count as f32;
        }
        sums
    }

    fn softmax(&self) -> Array {
        let width = *self.shape.last().unwrap();
        let mut out = self.clone();
        for row in out.data.chunks_mut(width) {
            let top = row.iter().fold(f32::MIN, |a, b| a.max(*b));
            row.iter_mut().for_each(|x| *x = (*x - top).exp());
            let sum: f32 = row.iter().sum();
            row.iter_mut().for_each(|x| *x /= sum);
        }
        out
    }
}

/// Abramowitz and Stegun 7.1.26 is too coarse here; a series is exact enough for small arguments.
fn erf(x: f32) -> f32 {
    let x = f64::from(x);
    let (mut term, mut sum) = (x, x);
    for n in 1..60 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    (sum * 2.0 / std::f64::consts::PI.sqrt()) as f32
}

fn gelu(x: f32, tanh: bool) -> f32 {
    match tanh {
        false => 0.5 * x * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2)),
        true => 0.5 * x * (1.0 + (0.797_884_6 * (x + 0.044_715 * x * x * x)).tanh()),
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn activate(array: &Array, activation: Activation) -> Array {
    array.map(|x| match activation {
        Activation::None => x,
        Activation::Relu => x.max(0.0),
        Activation::LeakyRelu { alpha } => {
            if x < 0.0 {
                alpha * x
            } else {
                x
            }
        }
        Activation::Clip { low, high } => x.clamp(low, high),
        Activation::Sigmoid => sigmoid(x),
        Activation::Tanh => x.tanh(),
        Activation::Silu => x * sigmoid(x),
        Activation::Gelu { tanh } => gelu(x, tanh),
        Activation::HardSwish => x * (x / 6.0 + 0.5).clamp(0.0, 1.0),
        Activation::HardSigmoid { alpha, beta } => (alpha * x + beta).clamp(0.0, 1.0),
    })
}

fn unary(op: Unary, x: f32) -> f32 {
    match op {
        Unary::Relu => x.max(0.0),
        Unary::LeakyRelu { alpha } => {
            if x < 0.0 {
                alpha * x
            } else {
                x
            }
        }
        Unary::Sigmoid => sigmoid(x),
        Unary::Tanh => x.tanh(),
        Unary::Erf => erf(x),
        Unary::Sqrt => x.sqrt(),
        Unary::Reciprocal => 1.0 / x,
        Unary::Softplus => x.exp().ln_1p(),
        Unary::Silu { alpha } => x * sigmoid(alpha * x),
        Unary::Gelu { tanh } => gelu(x, tanh),
        Unary::Mish => x * x.exp().ln_1p().tanh(),
        Unary::HardSigmoid { alpha, beta } => (alpha * x + beta).clamp(0.0, 1.0),
        Unary::HardSwish => x * (x / 6.0 + 0.5).clamp(0.0, 1.0),
        other => panic!("{other:?} is not interpreted"),
    }
}

fn run(op: &Op, inputs: &[Option<&Array>]) -> Array {
    let x = inputs[0].unwrap();
    let operand = |index: usize| inputs.get(index).copied().flatten();
    match op {
        Op::Unary(kind) => x.map(|value| unary(*kind, value)),
        Op::Binary(kind) => x.zip(operand(1).unwrap(), |a, b| match kind {
            Binary::Add => a + b,
            Binary::Sub => a - b,
            Binary::Mul => a * b,
            Binary::Div => a / b,
            Binary::Pow => a.powf(b),
            other => panic!("{other:?} is not interpreted"),
        }),
        Op::Clip => x.map(|value| {
            let low = operand(1).map_or(f32::MIN, |bound| bound.data[0]);
            value.clamp(low, operand(2).map_or(f32::MAX, |bound| bound.data[0]))
        }),
        Op::Identity | Op::Cast(_) => x.clone(),
        Op::ScaleShift { activation } => activate(&per_channel(x, inputs), *activation),
        Op::BatchNorm { epsilon } => {
            let [scale, bias, mean, variance] = [1, 2, 3, 4].map(|index| operand(index).unwrap());
            Array::make(x.shape.clone(), |index| {
                let c = index[1];
                let deviation = (variance.data[c] + epsilon).sqrt();
                (x.at(index) - mean.data[c]) / deviation * scale.data[c] + bias.data[c]
            })
        }
        Op::Conv(conv) => conv_2d(conv, x, operand(1).unwrap(), operand(2), operand(3)),
        Op::MatMul(matmul) => product(matmul, x, operand(1).unwrap(), operand(2), operand(3)),
        Op::Gemm(gemm) => general_product(gemm, x, operand(1).unwrap(), operand(2)),
        Op::Attention { scale } => {
            let scores = x.matmul(&operand(1).unwrap().swap_last()).map(|value| value * scale);
            let masked = operand(3).map_or(scores.clone(), |mask| scores.zip(mask, |a, b| a + b));
            masked.softmax().matmul(operand(2).unwrap())
        }
        Op::Softmax(Softmax { axis: -1, .. }) => x.softmax(),
        Op::Reduce(Reduce { kind: ReduceKind::Mean, keep_dims: true, .. }) => {
            let rank = x.shape.len() as f32;
            let axes: Vec<usize> =
                operand(1).unwrap().data.iter().map(|a| ((a + rank) % rank) as usize).collect();
            x.mean(&axes)
        }
        Op::LayerNorm { axis, epsilon } => normalise(x, inputs, *axis, *epsilon, true),
        Op::RmsNorm { axis, epsilon } => normalise(x, inputs, *axis, *epsilon, false),
        Op::InstanceNorm { epsilon } => normalise_groups(x, inputs, x.shape[1], *epsilon),
        Op::GroupNorm { groups, epsilon } => normalise_groups(x, inputs, *groups, *epsilon),
        Op::Transpose { perm } => x.transpose(perm.as_ref().unwrap()),
        Op::Reshape { .. } => reshape(x, operand(1).unwrap()),
        Op::Shape { .. } => {
            Array { shape: vec![x.shape.len()], data: x.shape.iter().map(|d| *d as f32).collect() }
        }
        Op::Gather { axis: 0 } => {
            let at = operand(1).unwrap();
            Array {
                shape: at.shape.clone(),
                data: at.data.iter().map(|i| x.data[*i as usize]).collect(),
            }
        }
        Op::Concat { axis: 0 } => {
            let data: Vec<f32> =
                inputs.iter().flat_map(|input| input.unwrap().data.clone()).collect();
            Array { shape: vec![data.len()], data }
        }
        Op::Pad { .. } => pad(x, operand(1).unwrap()),
        other => panic!("{other:?} is not interpreted"),
    }
}

fn per_channel(x: &Array, inputs: &[Option<&Array>]) -> Array {
    let (scale, shift) = (inputs[1].unwrap(), inputs[2].unwrap());
    Array::make(x.shape.clone(), |index| x.at(index) * scale.data[index[1]] + shift.data[index[1]])
}

fn reshape(x: &Array, target: &Array) -> Array {
    let mut shape: Vec<usize> = target
        .data
        .iter()
        .enumerate()
        .map(|(axis, size)| if *size == 0.0 { x.shape[axis] } else { size.max(1.0) as usize })
        .collect();
    if let Some(open) = target.data.iter().position(|size| *size == -1.0) {
        shape[open] = x.data.len() / shape.iter().product::<usize>();
    }
    Array { shape, data: x.data.clone() }
}

fn pad(x: &Array, pads: &Array) -> Array {
    let rank = x.shape.len();
    let pad = |at: usize| pads.data[at] as usize;
    let shape = (0..rank).map(|axis| x.shape[axis] + pad(axis) + pad(axis + rank)).collect();
    Array::make(shape, |index| {
        let inside =
            |axis: usize| index[axis] >= pad(axis) && index[axis] - pad(axis) < x.shape[axis];
        if !(0..rank).all(inside) {
            return 0.0;
        }
        let source: Vec<usize> = (0..rank).map(|axis| index[axis] - pad(axis)).collect();
        x.at(&source)
    })
}

fn normalise_groups(x: &Array, inputs: &[Option<&Array>], groups: usize, epsilon: f32) -> Array {
    let (images, channels) = (x.shape[0], x.shape[1]);
    let length = x.data.len() / (images * groups);
    let mut out = x.clone();
    for group in out.data.chunks_mut(length) {
        let mean = group.iter().sum::<f32>() / length as f32;
        let square = group.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / length as f32;
        group.iter_mut().for_each(|x| *x = (*x - mean) / (square + epsilon).sqrt());
    }
    let (scale, bias) = (inputs[1].unwrap(), inputs[2].unwrap());
    assert_eq!((scale.data.len(), bias.data.len()), (channels, channels));
    Array::make(out.shape.clone(), |index| {
        out.at(index) * scale.data[index[1]] + bias.data[index[1]]
    })
}

fn normalise(x: &Array, inputs: &[Option<&Array>], axis: i64, epsilon: f32, centre: bool) -> Array {
    let rank = x.shape.len();
    let start = ((axis + rank as i64) % rank as i64) as usize;
    let axes: Vec<usize> = (start..rank).collect();
    let centred = if centre { x.zip(&x.mean(&axes), |a, b| a - b) } else { x.clone() };
    let power = centred.map(|value| value * value).mean(&axes);
    let normed = centred.zip(&power, |a, b| a / (b + epsilon).sqrt());
    let scaled = normed.zip(inputs[1].unwrap(), |a, b| a * b);
    match inputs.get(2).copied().flatten() {
        Some(bias) => scaled.zip(bias, |a, b| a + b),
        None => scaled,
    }
}

fn product(op: &MatMul, a: &Array, b: &Array, bias: Option<&Array>, rest: Option<&Array>) -> Array {
    let left = if op.transpose_a { a.swap_last() } else { a.clone() };
    let right = if op.transpose_b { b.swap_last() } else { b.clone() };
    let mut out = left.matmul(&right).map(|x| x * op.alpha);
    for extra in [bias, rest].into_iter().flatten() {
        out = out.zip(extra, |x, y| x + y);
    }
    activate(&out, op.activation)
}

fn general_product(op: &Gemm, a: &Array, b: &Array, c: Option<&Array>) -> Array {
    let matmul = MatMul {
        transpose_a: op.transpose_a,
        transpose_b: op.transpose_b,
        alpha: op.alpha,
        activation: Activation::None,
    };
    let out = product(&matmul, a, b, None, None);
    let out = c.map_or(out.clone(), |c| out.zip(c, |x, y| x + op.beta * y));
    activate(&out, op.activation)
}

fn conv_2d(
    op: &Conv,
    x: &Array,
    w: &Array,
    bias: Option<&Array>,
    residual: Option<&Array>,
) -> Array {
    let Padding::Explicit(pads) = &op.window.padding else { panic!("explicit padding only") };
    let pads = if pads.is_empty() { vec![0; 4] } else { pads.clone() };
    let stride = |axis: usize| op.window.strides.get(axis).copied().unwrap_or(1);
    let extent = |axis: usize| {
        (x.shape[axis + 2] + pads[axis] + pads[axis + 2] - w.shape[axis + 2]) / stride(axis) + 1
    };
    let group_in = w.shape[1];
    let group_out = w.shape[0] / op.groups;
    let out = Array::make(vec![x.shape[0], w.shape[0], extent(0), extent(1)], |index| {
        let [n, m, oy, ox] = [index[0], index[1], index[2], index[3]];
        let mut sum = bias.map_or(0.0, |bias| bias.data[m]);
        for tap in indices(&w.shape[1..]) {
            let (y, z) = (oy * stride(0) + tap[1], ox * stride(1) + tap[2]);
            let inside = y >= pads[0]
                && z >= pads[1]
                && y - pads[0] < x.shape[2]
                && z - pads[1] < x.shape[3];
            if inside {
                let channel = m / group_out * group_in + tap[0];
                sum += x.at(&[n, channel, y - pads[0], z - pads[1]])
                    * w.at(&[m, tap[0], tap[1], tap[2]]);
            }
        }
        sum
    });
    let out = residual.map_or(out.clone(), |residual| out.zip(residual, |a, b| a + b));
    activate(&out, op.activation)
}
