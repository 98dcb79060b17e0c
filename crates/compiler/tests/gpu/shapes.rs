//! Arithmetic on shapes, as exporters write it: nothing of it is left once sizes are bound.

use std::sync::Arc;

use compiler::gpu::{GpuCompiler, check};
use device::{DeviceError, KernelCompiler};
use graph::infer::Fact;
use graph::{Evaluator, Graph, GraphNode, SymDim};
use model::gpu::{GpuPlan, GpuTarget, Precision};
use model::op::{Binary, Cast, Compare, MatMul, Op, PadMode, Unary};
use model::{DataType, LaunchPlan, Tensor, ValueId};

pub struct CpuEvaluator;

impl Evaluator for CpuEvaluator {
    fn evaluate(&self, op: &Op, inputs: &[Option<Tensor>], outputs: usize) -> Option<Vec<Tensor>> {
        cpu::evaluate(op, inputs, outputs)
    }
}

/// Builds graphs as an importer does: every node is inferred.
#[derive(Default)]
pub struct Builder {
    pub graph: Graph,
}

impl Builder {
    pub fn input(&mut self, dims: &[SymDim]) -> ValueId {
        let id = self.graph.add_value("x", Fact::new(DataType::F32, Some(dims.to_vec())));
        self.graph.inputs.push(id);
        id
    }

    pub fn node(&mut self, op: Op, inputs: &[ValueId]) -> ValueId {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        let fact = self.graph.infer(&op, &inputs, 1).unwrap().remove(0);
        let name = format!("v{}", self.graph.values.len());
        let output = self.graph.add_value(&name, fact);
        self.graph.nodes.push(GraphNode { name, op, inputs, outputs: vec![Some(output)] });
        output
    }

    pub fn ints(&mut self, values: &[i64]) -> ValueId {
        let tensor = Tensor::from_vec(vec![values.len()], values.to_vec()).unwrap();
        self.graph.add_constant("ints", tensor)
    }

    pub fn number(&mut self, value: f32) -> ValueId {
        self.graph.add_constant("number", Tensor::from_vec(vec![], vec![value]).unwrap())
    }

    /// Dimension `axis` of `x`, as a vector of one.
    pub fn size(&mut self, x: ValueId, axis: i64) -> ValueId {
        let shape = self.node(Op::Shape { start: 0, end: None }, &[x]);
        let axis = self.ints(&[axis]);
        self.node(Op::Gather { axis: 0 }, &[shape, axis])
    }

    fn binary(&mut self, op: Binary, a: ValueId, b: ValueId) -> ValueId {
        self.node(Op::Binary(op), &[a, b])
    }

    fn concat(&mut self, axis: i64, parts: &[ValueId]) -> ValueId {
        self.node(Op::Concat { axis }, parts)
    }

    pub fn reshape(&mut self, x: ValueId, target: ValueId) -> ValueId {
        self.node(Op::Reshape { allow_zero: false }, &[x, target])
    }

    pub fn finish(mut self, outputs: &[ValueId]) -> LaunchPlan {
        self.graph.outputs = outputs.to_vec();
        graph::optimize(&mut self.graph, Some(&CpuEvaluator));
        compiler::lower(&self.graph).unwrap()
    }
}

fn lowered(plan: &LaunchPlan, sizes: &[(&str, usize)]) -> Result<GpuPlan, Vec<DeviceError>> {
    let target = GpuTarget { capability: 90, multiprocessors: 132, precision: Precision::F16 };
    let sizes: Vec<(String, usize)> =
        sizes.iter().map(|(name, size)| (name.to_string(), *size)).collect();
    GpuCompiler::new(Some(Arc::new(CpuEvaluator))).lower(plan, &sizes, &target)
}

/// Rows and columns up to a multiple of seven, with pads computed as the older exporter of PyTorch
/// does: a list in its own order, extended with zeros, reversed in pairs.
fn pad_to_windows(b: &mut Builder, x: ValueId) -> ValueId {
    let seven = b.ints(&[7]);
    let missing = |b: &mut Builder, axis: i64| {
        let size = b.size(x, axis);
        let over = b.binary(Binary::Mod, size, seven);
        let rest = b.binary(Binary::Sub, seven, over);
        b.binary(Binary::Mod, rest, seven)
    };
    let (rows, columns) = (missing(b, 1), missing(b, 2));
    let zero = b.ints(&[0]);
    let given = b.concat(0, &[zero, zero, zero, columns, zero, rows]);
    let count = b.ints(&[2]);
    let fill = Op::ConstantOfShape { dtype: DataType::I64, value: [0; 8] };
    let zeros = b.node(fill, &[count]);
    let all = b.concat(0, &[given, zeros]);
    let pairs = b.ints(&[-1, 2]);
    let pairs = b.reshape(all, pairs);
    let bounds = [b.ints(&[-1]), b.ints(&[i64::MIN + 1]), b.ints(&[0]), b.ints(&[-1])];
    let reversed = b.node(Op::Slice, &[pairs, bounds[0], bounds[1], bounds[2], bounds[3]]);
    let turned = b.node(Op::Transpose { perm: Some(vec![1, 0]) }, &[reversed]);
    let flat = b.ints(&[-1]);
    let pads = b.reshape(turned, flat);
    let pads = b.node(Op::Cast(Cast { to: DataType::I64 }), &[pads]);
    let value = b.number(0.0);
    b.node(Op::Pad { mode: PadMode::Constant }, &[x, pads, value])
}

/// `x` with its elements along `axis` moved by three.
fn roll(b: &mut Builder, x: ValueId, axis: i64) -> ValueId {
    let axis_of = b.ints(&[axis]);
    let (zero, three, end) = (b.ints(&[0]), b.ints(&[3]), b.ints(&[i64::MAX]));
    let size = b.size(x, axis);
    let first = b.node(Op::Slice, &[x, three, end, axis_of]);
    let rest = b.binary(Binary::Sub, size, three);
    let rest = b.binary(Binary::Sub, size, rest);
    let second = b.node(Op::Slice, &[x, zero, rest, axis_of]);
    b.concat(axis, &[first, second])
}

/// Windows of seven by seven: `[windows, 49, channels]` of `[n, rows, columns, channels]`.
fn windows(b: &mut Builder, x: ValueId) -> ValueId {
    let sizes: Vec<ValueId> = (0..4).map(|axis| b.size(x, axis)).collect();
    let seven = b.ints(&[7]);
    let down = b.binary(Binary::Div, sizes[1], seven);
    let across = b.binary(Binary::Div, sizes[2], seven);
    let target = b.concat(0, &[sizes[0], down, seven, across, seven, sizes[3]]);
    let split = b.reshape(x, target);
    let turned = b.node(Op::Transpose { perm: Some(vec![0, 1, 3, 2, 4, 5]) }, &[split]);
    let count = b.binary(Binary::Mul, sizes[0], down);
    let count = b.binary(Binary::Mul, count, across);
    let pixels = b.ints(&[49]);
    let target = b.concat(0, &[count, pixels, sizes[3]]);
    b.reshape(turned, target)
}

/// The mask of shifted windows, `[windows, 49, 49]`: a map of the regions, compared with itself.
fn mask(b: &mut Builder, x: ValueId) -> ValueId {
    let (rows, columns) = (b.size(x, 1), b.size(x, 2));
    let scalar = b.ints(&[0]);
    let rows_of_one = b.node(Op::Squeeze, &[rows, scalar]);
    let zero = b.graph.add_constant("0", Tensor::from_vec(vec![], vec![0i64]).unwrap());
    let one = b.graph.add_constant("1", Tensor::from_vec(vec![], vec![1i64]).unwrap());
    let numbers = b.node(Op::Range, &[zero, rows_of_one, one]);
    let seven = b.ints(&[7]);
    let border = b.binary(Binary::Sub, rows, seven);
    let below = b.node(Op::Compare(Compare::Less), &[numbers, border]);
    let below = b.node(Op::Cast(Cast { to: DataType::F32 }), &[below]);
    let last = b.ints(&[1]);
    let column = b.node(Op::Unsqueeze, &[below, last]);
    let shape = b.concat(0, &[rows, columns]);
    let fill = Op::ConstantOfShape { dtype: DataType::F32, value: [0; 8] };
    let zeros = b.node(fill, &[shape]);
    let regions = b.binary(Binary::Add, zeros, column);
    let ends = b.ints(&[0, 3]);
    let image = b.node(Op::Unsqueeze, &[regions, ends]);
    let cut = windows(b, image);
    let axes = b.ints(&[2]);
    let flat = b.node(Op::Squeeze, &[cut, axes]);
    let (first, second) = (b.ints(&[1]), b.ints(&[2]));
    let a = b.node(Op::Unsqueeze, &[flat, first]);
    let c = b.node(Op::Unsqueeze, &[flat, second]);
    let difference = b.binary(Binary::Sub, a, c);
    let (none, far) = (b.number(0.0), b.number(-100.0));
    let same = b.node(Op::Compare(Compare::Equal), &[difference, none]);
    b.node(Op::Where, &[same, none, far])
}

/// Two blocks of shifted windows: pad, roll, cut, attend with the mask. The shape of the second is
/// that of what the first computed.
pub fn shifted_windows() -> LaunchPlan {
    let mut b = Builder::default();
    let dims = ["n", "h", "w"].map(SymDim::symbol);
    let x = b.input(&[dims[0].clone(), dims[1].clone(), dims[2].clone(), 8.into()]);
    let mut y = x;
    let mut scores = Vec::new();
    for _ in 0..2 {
        let padded = pad_to_windows(&mut b, y);
        let rolled = roll(&mut b, padded, 1);
        let rolled = roll(&mut b, rolled, 2);
        let cut = windows(&mut b, rolled);
        let turned = b.node(Op::Transpose { perm: Some(vec![0, 2, 1]) }, &[cut]);
        let products = b.node(Op::MatMul(MatMul::default()), &[cut, turned]);
        let masked = mask(&mut b, rolled);
        scores.push(b.binary(Binary::Add, products, masked));
        let shape = b.node(Op::Shape { start: 0, end: None }, &[rolled]);
        let joined = b.reshape(cut, shape);
        y = b.node(Op::Unary(Unary::Relu), &[joined]);
        let border = [b.ints(&[0]), b.ints(&[-1]), b.ints(&[1])];
        y = b.node(Op::Slice, &[y, border[0], border[1], border[2]]);
    }
    b.finish(&[scores[0], scores[1], y])
}

#[test]
fn shape_arithmetic_leaves_no_step() {
    let plan = shifted_windows();
    for (h, w) in [(56, 56), (50, 30), (7, 8), (14, 100)] {
        let gpu = lowered(&plan, &[("n", 1), ("h", h), ("w", w)]);
        let gpu = gpu.unwrap_or_else(|errors| panic!("{h} by {w}: {errors:?}"));
        assert_eq!(check::faults(&gpu), Vec::<String>::new(), "{h} by {w}");
        let (rows, columns) = (h.next_multiple_of(7) - 1, w.next_multiple_of(7));
        let windows = h.div_ceil(7) * w.div_ceil(7);
        assert_eq!(gpu.outputs[0].shape, [windows, 49, 49]);
        assert_eq!(gpu.outputs[2].shape[1..], [rows.next_multiple_of(7) - 1, columns, 8]);
        let integers = |step: &model::gpu::GpuStep| step.signature.contains("i64");
        assert!(!gpu.steps.iter().any(integers), "a step computes with integers");
    }
}
