//! Attention in many dresses: every one is recognised, and computes what it did before.

use std::collections::HashMap;

use compiler::gpu::GpuCompiler;
use device::KernelCompiler;
use graph::infer::Fact;
use graph::{Evaluator, Graph, GraphNode};
use model::gpu::{GpuTarget, Precision};
use model::op::{Binary, Cast, Compare, MatMul, Op, Softmax, SoftmaxKind, Unary, Variadic};
use model::{DataType, Tensor, ValueId};

use crate::bench::{Random, numbers};

/// Folds with the CPU device, as a compiler of models does.
struct Folder;

impl Evaluator for Folder {
    fn evaluate(&self, op: &Op, inputs: &[Option<Tensor>], outputs: usize) -> Option<Vec<Tensor>> {
        cpu::evaluate(op, inputs, outputs)
    }
}

/// A graph that is being written, with its inputs.
pub struct Net {
    graph: Graph,
    feeds: HashMap<ValueId, Tensor>,
    pub random: Random,
    dtype: DataType,
}

impl Net {
    pub fn new(seed: u64, dtype: DataType) -> Net {
        let (graph, feeds) = (Graph::default(), HashMap::new());
        Net { graph, feeds, random: Random::new(seed), dtype }
    }

    fn typed(&self, tensor: Tensor) -> Tensor {
        if tensor.dtype() == self.dtype || tensor.dtype() != DataType::F32 {
            return tensor;
        }
        let op = Op::Cast(Cast { to: self.dtype });
        cpu::evaluate(&op, &[Some(tensor)], 1).unwrap().remove(0)
    }

    pub fn feed(&mut self, tensor: Tensor) -> ValueId {
        let tensor = self.typed(tensor);
        let name = format!("x{}", self.feeds.len());
        let id = self.graph.add_value(name, Fact::of_tensor(&tensor));
        self.graph.values[id.index()].content = None;
        self.graph.inputs.push(id);
        self.feeds.insert(id, tensor);
        id
    }

    pub fn input(&mut self, shape: &[usize]) -> ValueId {
        let tensor = self.random.floats(shape);
        self.feed(tensor)
    }

    pub fn constant(&mut self, tensor: Tensor) -> ValueId {
        let tensor = self.typed(tensor);
        let name = format!("c{}", self.graph.values.len());
        self.graph.add_constant(name, tensor)
    }

    pub fn number(&mut self, value: f32) -> ValueId {
        self.constant(Tensor::from_vec(vec![], vec![value]).unwrap())
    }

    pub fn ints(&mut self, values: &[i64]) -> ValueId {
        self.constant(Tensor::from_vec(vec![values.len()], values.to_vec()).unwrap())
    }

    pub fn node(&mut self, op: Op, inputs: &[ValueId]) -> ValueId {
        let inputs: Vec<Option<ValueId>> = inputs.iter().map(|id| Some(*id)).collect();
        let fact = self.graph.infer(&op, &inputs, 1).unwrap().remove(0);
        let name = format!("v{}", self.graph.values.len());
        let output = self.graph.add_value(&name, fact);
        self.graph.nodes.push(GraphNode { name, op, inputs, outputs: vec![Some(output)] });
        output
    }

    pub fn binary(&mut self, op: Binary, a: ValueId, b: ValueId) -> ValueId {
        self.node(Op::Binary(op), &[a, b])
    }

    fn scaled(&mut self, x: ValueId, factor: f32, divide: bool) -> ValueId {
        let number = self.number(if divide { factor.recip() } else { factor });
        match divide {
            true => self.binary(Binary::Div, x, number),
            false if self.random.below(2) == 0 => self.binary(Binary::Mul, number, x),
            false => self.binary(Binary::Mul, x, number),
        }
    }

    pub fn reshape(&mut self, x: ValueId, shape: &[usize]) -> ValueId {
        let shape: Vec<i64> = shape.iter().map(|size| *size as i64).collect();
        let target = self.ints(&shape);
        self.node(Op::Reshape { allow_zero: false }, &[x, target])
    }

    pub fn transpose(&mut self, x: ValueId, perm: &[usize]) -> ValueId {
        self.node(Op::Transpose { perm: Some(perm.to_vec()) }, &[x])
    }

    pub fn matmul(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.node(Op::MatMul(MatMul::default()), &[a, b])
    }

    pub fn softmax(&mut self, x: ValueId, axis: i64) -> ValueId {
        let kind = SoftmaxKind::Softmax;
        self.node(Op::Softmax(Softmax { kind, axis, flatten: false }), &[x])
    }

    fn shape(&self, id: ValueId) -> Vec<usize> {
        self.graph.shape(id).unwrap().iter().map(|dim| dim.size().unwrap()).collect()
    }

    pub fn finish(mut self, output: ValueId) -> (Graph, HashMap<ValueId, Tensor>) {
        self.graph.outputs.push(output);
        (self.graph, self.feeds)
    }
}

fn cast(tensor: &Tensor, to: DataType) -> Tensor {
    cpu::evaluate(&Op::Cast(Cast { to }), &[Some(tensor.clone())], 1).unwrap().remove(0)
}

/// On the CPU device; in single precision where it has no kernel for half precision.
fn evaluate(op: &Op, inputs: &[Option<Tensor>], outputs: usize) -> Option<Vec<Tensor>> {
    if let Some(known) = cpu::evaluate(op, inputs, outputs) {
        return Some(known);
    }
    let wide = |tensor: &Tensor| match tensor.dtype() {
        DataType::F16 => cast(tensor, DataType::F32),
        _ => tensor.clone(),
    };
    let inputs: Vec<Option<Tensor>> =
        inputs.iter().map(|tensor| tensor.as_ref().map(wide)).collect();
    let results = cpu::evaluate(op, &inputs, outputs)?;
    let narrow = |tensor: Tensor| match tensor.dtype() {
        DataType::F32 => cast(&tensor, DataType::F16),
        _ => tensor,
    };
    Some(results.into_iter().map(narrow).collect())
}

/// The outputs of `graph`, node by node on the CPU device.
fn run(graph: &Graph, feeds: &HashMap<ValueId, Tensor>) -> Vec<Tensor> {
    let mut values = feeds.clone();
    values.extend(graph.constants.iter().map(|(id, tensor)| (id, tensor.clone())));
    for node in &graph.nodes {
        let inputs: Vec<Option<Tensor>> =
            node.inputs.iter().map(|id| id.map(|id| values[&id].clone())).collect();
        let outputs = evaluate(&node.op, &inputs, node.outputs.len());
        let outputs = outputs.unwrap_or_else(|| panic!("{} failed in\n{graph}", node.op.name()));
        for (id, tensor) in node.outputs.iter().zip(outputs) {
            id.map(|id| values.insert(id, tensor));
        }
    }
    graph.outputs.iter().map(|id| values[id].clone()).collect()
}

fn wide(tensor: &Tensor) -> Vec<f64> {
    let op = Op::Cast(Cast { to: DataType::F32 });
    numbers(&cpu::evaluate(&op, &[Some(tensor.clone())], 1).unwrap()[0])
}

/// Optimises a copy, compares the results, and returns it.
pub fn optimized(graph: &Graph, feeds: &HashMap<ValueId, Tensor>, case: &str) -> Graph {
    let mut after = graph.clone();
    graph::optimize(&mut after, Some(&Folder));
    let (want, got) = (run(graph, feeds), run(&after, feeds));
    for ((want, got), id) in want.iter().zip(&got).zip(&graph.outputs) {
        assert_eq!((want.shape(), want.dtype()), (got.shape(), got.dtype()), "{case}\n{after}");
        let half = graph.value(*id).dtype == DataType::F16;
        let tolerance = if half { 8e-3 } else { 2e-5 };
        for (a, b) in wide(want).iter().zip(wide(got)) {
            let close = (a - b).abs() <= tolerance * a.abs().max(1.0);
            assert!(close, "{case}: {a} became {b}\n{after}");
        }
    }
    after
}

pub fn count(graph: &Graph, name: &str) -> usize {
    graph.nodes.iter().filter(|node| node.op.name() == name).count()
}

/// Sizes of the attention under the dress.
const B: usize = 2;
const L: usize = 6;
const D: usize = 8;

/// How heads are split: `[batch, tokens, heads * width]` to four dimensions, `[tokens, batch, ..]`
/// to three with merged batch and heads, or already there.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Layout {
    Split,
    Merged,
    Plain,
}

struct Dress {
    layout: Layout,
    heads: usize,
    key_heads: usize,
    keys: usize,
}

impl Dress {
    /// An operand as `[batch, heads, tokens, D]`, or `[batch * heads, tokens, D]`.
    fn operand(&self, net: &mut Net, heads: usize, tokens: usize) -> ValueId {
        match self.layout {
            Layout::Plain => net.input(&[B, heads, tokens, D]),
            Layout::Split => {
                let x = net.input(&[B, tokens, heads * D]);
                let x = net.reshape(x, &[B, tokens, heads, D]);
                net.transpose(x, &[0, 2, 1, 3])
            }
            Layout::Merged => {
                let x = net.input(&[tokens, B, heads * D]);
                let x = net.reshape(x, &[tokens, B * heads, D]);
                net.transpose(x, &[1, 0, 2])
            }
        }
    }

    /// Keys or values repeated for their groups.
    fn repeated(&self, net: &mut Net, x: ValueId) -> ValueId {
        let group = self.heads / self.key_heads;
        if group == 1 {
            return x;
        }
        let (keys, key_heads) = (self.keys, self.key_heads);
        let axis = net.ints(&[2]);
        let x = net.node(Op::Unsqueeze, &[x, axis]);
        let x = if net.random.below(2) == 0 {
            let target = net.ints(&[B, key_heads, group, keys, D].map(|size| size as i64));
            net.node(Op::Expand, &[x, target])
        } else {
            let times = net.ints(&[1, 1, group as i64, 1, 1]);
            net.node(Op::Tile, &[x, times])
        };
        net.reshape(x, &[B, self.heads, keys, D])
    }

    fn swapped(&self, net: &mut Net, x: ValueId) -> ValueId {
        let rank = net.shape(x).len();
        let mut perm: Vec<usize> = (0..rank).collect();
        perm.swap(rank - 2, rank - 1);
        net.transpose(x, &perm)
    }

    fn batch(&self) -> Vec<usize> {
        match self.layout {
            Layout::Merged => vec![B * self.heads],
            _ => vec![B, self.heads],
        }
    }

    /// Sizes of a mask that broadcasts to the scores.
    fn mask_shape(&self, random: &mut Random) -> Vec<usize> {
        let mut shape: Vec<usize> = self.batch();
        shape.extend([L, self.keys]);
        let last = shape.len() - 1;
        for size in &mut shape[..last] {
            if random.below(2) == 0 {
                *size = 1;
            }
        }
        let ones = shape.iter().take_while(|size| **size == 1).count();
        shape[random.below(ones + 1)..].to_vec()
    }
}

/// Conditions of which every row has a true one.
fn condition(net: &mut Net, shape: &[usize]) -> Tensor {
    let keys = shape[shape.len() - 1];
    let len = shape.iter().product();
    let keep =
        |n: usize, random: &mut Random| u8::from(n.is_multiple_of(keys) || random.below(2) == 0);
    let bytes: Vec<u8> = (0..len).map(|n| keep(n, &mut net.random)).collect();
    Tensor::from_raw(DataType::Bool, shape.to_vec(), bytes.into()).unwrap()
}

/// A mask in one of many forms.
fn masked(net: &mut Net, dress: &Dress, scores: ValueId, form: usize) -> ValueId {
    let shape = dress.mask_shape(&mut net.random);
    let low = [f32::NEG_INFINITY, -65504.0, -1e4][net.random.below(3)];
    match form {
        0 => {
            let mask = net.input(&shape);
            net.binary(Binary::Add, scores, mask)
        }
        1 => {
            let mask = net.random.floats(&shape);
            let mask = net.constant(mask);
            net.binary(Binary::Add, mask, scores)
        }
        2 => {
            let keep = condition(net, &shape);
            let (keep, low) = (net.feed(keep), net.number(low));
            net.node(Op::Where, &[keep, scores, low])
        }
        3 => {
            let keep = condition(net, &shape);
            let (keep, low) = (net.feed(keep), net.number(low));
            let hide = net.node(Op::Unary(Unary::Not), &[keep]);
            net.node(Op::Where, &[hide, low, scores])
        }
        4 => {
            // A boolean mask as numbers, added; then a clamp.
            let keep = condition(net, &shape);
            let keep = net.feed(keep);
            let dtype = net.dtype;
            let keep = net.node(Op::Cast(Cast { to: dtype }), &[keep]);
            let one = net.number(1.0);
            let hide = net.binary(Binary::Sub, one, keep);
            let mask = net.scaled(hide, -30000.0, false);
            let scores = net.binary(Binary::Add, scores, mask);
            let floor = net.number(-65504.0);
            net.node(Op::Variadic(Variadic::Max), &[scores, floor])
        }
        5 => {
            // Causal, generated from positions.
            let keys = dress.keys;
            let row = Tensor::from_vec(vec![L, 1], (0..L as i64).collect::<Vec<_>>()).unwrap();
            let column =
                Tensor::from_vec(vec![1, keys], (0..keys as i64).collect::<Vec<_>>()).unwrap();
            let (row, column) = (net.constant(row), net.constant(column));
            let seen = net.node(Op::Compare(Compare::LessOrEqual), &[column, row]);
            let low = net.number(low);
            net.node(Op::Where, &[seen, scores, low])
        }
        6 => {
            // Relative positions per head, and windows: the batch is split and merged again.
            let bias = net.random.floats(&shape);
            let bias = net.constant(bias);
            let scores = net.binary(Binary::Add, scores, bias);
            let (own, keys) = (net.shape(scores), dress.keys);
            if dress.layout == Layout::Merged {
                let wide = net.reshape(scores, &[B, dress.heads, L, keys]);
                let mask = net.input(&[B, 1, L, keys]);
                let sum = net.binary(Binary::Add, wide, mask);
                net.reshape(sum, &own)
            } else {
                let wide = net.reshape(scores, &[1, B, dress.heads, L, keys]);
                let mask = net.input(&[1, B, 1, L, keys]);
                let sum = net.binary(Binary::Add, wide, mask);
                net.reshape(sum, &own)
            }
        }
        _ => scores,
    }
}

/// Random choices of layout, scale, mask, types and groups.
fn dressed(seed: u64) -> (String, Graph, HashMap<ValueId, Tensor>) {
    let mut net = Net::new(seed, if seed % 5 == 4 { DataType::F16 } else { DataType::F32 });
    net.random.below(7);
    let layout = [Layout::Split, Layout::Merged, Layout::Plain][net.random.below(3)];
    let group = if layout == Layout::Merged { 1 } else { [1, 1, 2, 4][net.random.below(4)] };
    let (heads, keys) = (4, [L, 9][net.random.below(2)]);
    let dress = Dress { layout, heads, key_heads: heads / group, keys };
    let (scale, mask) = (net.random.below(7), net.random.below(8));
    let case = format!(
        "{seed}: {layout:?} {:?} groups of {group}, {keys} keys, scale {scale}, mask {mask}",
        net.dtype
    );
    let mut q = dress.operand(&mut net, heads, L);
    let mut k = dress.operand(&mut net, dress.key_heads, keys);
    let v = dress.operand(&mut net, dress.key_heads, keys);
    let factor = 0.35f32;
    match scale {
        0 => q = net.scaled(q, factor, false),
        1 => q = net.scaled(q, factor, true),
        2 => k = net.scaled(k, factor, false),
        3 => {
            q = net.scaled(q, factor.sqrt(), false);
            k = net.scaled(k, factor.sqrt(), true);
        }
        _ => {}
    }
    let (k, v) = (dress.repeated(&mut net, k), dress.repeated(&mut net, v));
    let mut k = dress.swapped(&mut net, k);
    if scale == 4 {
        k = net.scaled(k, factor, false);
    }
    let mut scores = net.matmul(q, k);
    if scale == 5 {
        scores = net.scaled(scores, factor, net.dtype == DataType::F32);
    }
    scores = masked(&mut net, &dress, scores, mask);
    let wide = net.dtype == DataType::F16;
    if wide {
        scores = net.node(Op::Cast(Cast { to: DataType::F32 }), &[scores]);
    }
    let axis = if net.random.below(2) == 0 { -1 } else { net.shape(scores).len() as i64 - 1 };
    let mut weights = net.softmax(scores, axis);
    if net.random.below(3) == 0 {
        let nan = net.node(Op::Unary(Unary::IsNan), &[weights]);
        let zero = net.graph.add_constant("zero", Tensor::from_vec(vec![], vec![0.0f32]).unwrap());
        weights = net.node(Op::Where, &[nan, zero, weights]);
    }
    if wide {
        weights = net.node(Op::Cast(Cast { to: DataType::F16 }), &[weights]);
    }
    let mut y = if net.random.below(4) == 0 {
        let (v, weights) = (dress.swapped(&mut net, v), dress.swapped(&mut net, weights));
        let y = net.matmul(v, weights);
        dress.swapped(&mut net, y)
    } else {
        net.matmul(weights, v)
    };
    y = match layout {
        Layout::Merged => {
            let y = net.transpose(y, &[1, 0, 2]);
            net.reshape(y, &[L, B, heads * D])
        }
        _ => {
            let y = net.transpose(y, &[0, 2, 1, 3]);
            net.reshape(y, &[B, L, heads * D])
        }
    };
    let (graph, feeds) = net.finish(y);
    (case, graph, feeds)
}

#[test]
fn every_dress_is_recognised_and_computes_the_same() {
    for seed in 0..240 {
        let (case, graph, feeds) = dressed(seed);
        let after = optimized(&graph, &feeds, &case);
        assert_eq!(count(&after, "Attention"), 1, "{case}\n{after}");
        let left = ["MatMul", "Softmax", "Expand", "Tile"].map(|name| count(&after, name));
        assert_eq!(left, [0; 4], "{case}\n{after}");
    }
}

/// On a GPU in half precision every dress is one fused launch, without copies of its operands.
#[test]
fn every_dress_is_one_launch() {
    let target = GpuTarget { capability: 90, multiprocessors: 132, precision: Precision::F16 };
    for seed in 0..120 {
        let (case, graph, _) = dressed(seed);
        let plan = compiler::lower(&graph).unwrap();
        let plan = GpuCompiler::default().lower(&plan, &[], &target).unwrap();
        let names: Vec<&str> = plan.steps.iter().map(|step| step.op.as_str()).collect();
        let fused = names.iter().filter(|name| **name == "Attention").count();
        assert_eq!(fused, 1, "{case} {names:?}");
        assert!(!names.contains(&"MatMul") && !names.contains(&"Softmax"), "{case} {names:?}");
    }
}

/// Attention that is none, or whose scores are needed: nothing is rewritten.
#[test]
fn near_misses_stay_as_they_are() {
    for miss in 0..7 {
        let mut net = Net::new(700 + miss, DataType::F32);
        let dress = Dress { layout: Layout::Plain, heads: 4, key_heads: 4, keys: L };
        let [q, k, v] = [0; 3].map(|_| dress.operand(&mut net, 4, L));
        let k = dress.swapped(&mut net, k);
        let mut scores = net.matmul(q, k);
        match miss {
            // The mask makes the batch larger.
            1 => {
                let mask = net.input(&[3, 1, 1, 1, L]);
                scores = net.binary(Binary::Add, scores, mask);
            }
            // A function of the scores.
            2 => scores = net.node(Op::Unary(Unary::Tanh), &[scores]),
            // A mask that hides too little.
            3 => {
                let keep = condition(&mut net, &[L, L]);
                let (keep, low) = (net.feed(keep), net.number(-5.0));
                scores = net.node(Op::Where, &[keep, scores, low]);
            }
            // The last dimensions are no longer queries and keys.
            4 => {
                let flat = net.reshape(scores, &[B, 4, L * L]);
                let weights = net.softmax(flat, -1);
                scores = net.reshape(weights, &[B, 4, L, L]);
            }
            _ => {}
        }
        let axis = if miss == 0 { 2 } else { -1 };
        let mut weights = net.softmax(scores, axis);
        if miss == 5 {
            weights = net.scaled(weights, 2.0, false);
        }
        let y = net.matmul(weights, v);
        let shown = if miss == 6 { Some(weights) } else { None };
        let (mut graph, feeds) = net.finish(y);
        graph.outputs.extend(shown);
        let after = optimized(&graph, &feeds, &format!("miss {miss}"));
        // Softmax of a softmax is an attention whose scores are no product.
        assert_eq!(count(&after, "Attention"), 0, "miss {miss}\n{after}");
    }
}
