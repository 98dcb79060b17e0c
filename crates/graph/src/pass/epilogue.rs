//! Fuses bias, residual and activation into the preceding convolution or matrix product.

use model::op::{Activation, Binary, Op, Unary};
use model::{DataType, Tensor, ValueId};

use super::editor::{Editor, first, pair};
use crate::content;
use crate::ir::Graph;
use model::dim::SymDim;

/// Fuses step by step; each fusion makes the next one possible. Returns how many.
pub fn run(graph: &mut Graph) -> usize {
    let mut editor = Editor::new(graph);
    for index in 0..editor.len() {
        match editor.node(index).map(|node| &node.op) {
            Some(Op::Binary(Binary::Add)) => {
                fuse_bias(&mut editor, index).or_else(|| fuse_residual(&mut editor, index))
            }
            Some(Op::Variadic(model::op::Variadic::Sum)) => fuse_residual(&mut editor, index),
            Some(Op::Unary(_) | Op::Clip) => fuse_activation(&mut editor, index),
            _ => None,
        };
    }
    editor.finish()
}

fn activation_of(op: &Op) -> Option<Activation> {
    match op {
        Op::Conv(conv) => Some(conv.activation),
        Op::MatMul(matmul) => Some(matmul.activation),
        Op::Gemm(gemm) => Some(gemm.activation),
        Op::ScaleShift { activation } => Some(*activation),
        _ => None,
    }
}

fn with_activation(op: &Op, new: Activation) -> Op {
    let mut op = op.clone();
    match &mut op {
        Op::Conv(conv) => conv.activation = new,
        Op::MatMul(matmul) => matmul.activation = new,
        Op::Gemm(gemm) => gemm.activation = new,
        Op::ScaleShift { activation } => *activation = new,
        _ => {}
    }
    op
}

/// The index of the node that writes `id`, when another operator can be fused into it.
fn open(editor: &Editor, id: ValueId) -> Option<usize> {
    let (at, node) = editor.producer(id)?;
    let fusable = activation_of(&node.op) == Some(Activation::None);
    (fusable && editor.is_private(id) && editor.graph.value(id).dtype.is_float()).then_some(at)
}

/// The activation that a product may end with.
pub fn activation(unary: Unary) -> Option<Activation> {
    Some(match unary {
        Unary::Relu => Activation::Relu,
        Unary::LeakyRelu { alpha } => Activation::LeakyRelu { alpha },
        Unary::Sigmoid => Activation::Sigmoid,
        Unary::Tanh => Activation::Tanh,
        Unary::Silu { alpha: 1.0 } => Activation::Silu,
        Unary::Gelu { tanh } => Activation::Gelu { tanh },
        Unary::HardSwish => Activation::HardSwish,
        Unary::HardSigmoid { alpha, beta } => Activation::HardSigmoid { alpha, beta },
        _ => return None,
    })
}

fn fuse_activation(editor: &mut Editor, index: usize) -> Option<()> {
    let node = editor.node(index)?;
    let x = first(&node.inputs)?;
    let activation = match &node.op {
        Op::Unary(unary) => activation(*unary)?,
        Op::Clip => {
            let bound = |index: usize, default: f32| match node.inputs.get(index).copied().flatten()
            {
                None => Some(default),
                Some(id) => editor.number(id),
            };
            Activation::Clip { low: bound(1, f32::NEG_INFINITY)?, high: bound(2, f32::INFINITY)? }
        }
        _ => return None,
    };
    let Some(at) = open(editor, x) else { return activate_before_views(editor, index, activation) };
    let producer = editor.node(at)?;
    let (op, inputs) = (with_activation(&producer.op, activation), producer.inputs.clone());
    editor.replace(index, op, inputs);
    editor.remove(at);
    Some(())
}

/// An activation behind operators that only move elements belongs to the product before them.
fn activate_before_views(editor: &mut Editor, index: usize, activation: Activation) -> Option<()> {
    let x = first(&editor.node(index)?.inputs)?;
    let mut source = x;
    loop {
        let (_, node) = editor.producer(source)?;
        if !node.op.only_moves() || !editor.is_private(source) {
            break;
        }
        source = first(&node.inputs)?;
    }
    let at = open(editor, source).filter(|_| source != x)?;
    let producer = editor.node(at)?;
    let (op, inputs) = (with_activation(&producer.op, activation), producer.inputs.clone());
    editor.replace(at, op, inputs);
    editor.replace(index, Op::Identity, vec![Some(x)]);
    Some(())
}

/// A constant summand that varies along the output channels only.
fn fuse_bias(editor: &mut Editor, index: usize) -> Option<()> {
    let node = editor.node(index)?;
    let (a, b) = pair(&node.inputs)?;
    let output = node.outputs.first().copied().flatten()?;
    let constant = |id: ValueId| editor.graph.constant(id).is_some();
    let (x, summand) = match (constant(a), constant(b)) {
        (false, true) => (a, b),
        (true, false) => (b, a),
        _ => return None,
    };
    let transposed = |id: ValueId| {
        let (at, node) = editor.producer(id)?;
        (matches!(node.op, Op::ConvTranspose(_)) && editor.is_private(id)).then_some(at)
    };
    let at = open(editor, x).or_else(|| transposed(x))?;
    // The summand has the output's channels and ones elsewhere, so equal ranks mean equal shapes.
    if !editor.same_rank(x, output) {
        return None;
    }
    let producer = editor.node(at)?;
    let (mut op, mut inputs) = (producer.op.clone(), producer.inputs.clone());
    let shape = editor.graph.shape(x)?;
    let axis = match &op {
        Op::Conv(_) | Op::ConvTranspose(_) => 1,
        Op::MatMul(_) | Op::Gemm(_) => shape.len().checked_sub(1)?,
        _ => return None,
    };
    let channels = shape.get(axis)?.size()?;
    let vector = along_axis(editor.graph.constant(summand)?, axis, shape)?;
    let mut sum = if vector.len() == 1 { vec![vector[0]; channels] } else { vector };
    if let Op::Gemm(gemm) = &mut op {
        // The factor applies to the fused bias and residual as well.
        let beta = f64::from(gemm.beta);
        if let Some(own) = inputs.get(2).copied().flatten() {
            let own = bias_vector(editor, own, channels)?;
            sum.iter_mut().zip(own).for_each(|(sum, own)| *sum += beta * own);
        }
        gemm.beta = 1.0;
    } else if let Some(own) = inputs.get(2).copied().flatten() {
        let own = bias_vector(editor, own, channels)?;
        sum.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
    }
    let tensor = content::float_tensor(editor.graph.value(x).dtype, vec![channels], &sum)?;
    let name = format!("{}/bias", editor.node(index)?.name);
    let bias = editor.constant(&name, tensor);
    inputs.resize(inputs.len().max(3), None);
    inputs[2] = Some(bias);
    editor.replace(index, op, inputs);
    editor.remove(at);
    Some(())
}

fn doubles(tensor: &Tensor) -> Option<Vec<f64>> {
    match tensor.dtype() {
        DataType::F64 => tensor.to_vec::<f64>(),
        _ => Some(content::floats(tensor)?.into_iter().map(f64::from).collect()),
    }
}

/// The elements of a constant that varies along `axis` of `shape` only: one, or one per channel.
pub(super) fn along_axis(tensor: &Tensor, axis: usize, shape: &[SymDim]) -> Option<Vec<f64>> {
    let rank = shape.len();
    let own = tensor.shape();
    let missing = rank.checked_sub(own.len())?;
    let size = |at: usize| if at < missing { 1 } else { own[at - missing] };
    let flat = (0..rank).all(|at| at == axis || size(at) == 1);
    let channels = shape.get(axis)?.size()?;
    (flat && [1, channels].contains(&size(axis))).then(|| doubles(tensor)).flatten()
}

/// A constant bias as one number per channel.
fn bias_vector(editor: &Editor, id: ValueId, channels: usize) -> Option<Vec<f64>> {
    let tensor = editor.graph.constant(id)?;
    let vector = tensor.shape().iter().rev().skip(1).all(|size| *size == 1);
    match doubles(tensor)? {
        own if own.len() == 1 => Some(vec![own[0]; channels]),
        own if own.len() == channels && vector => Some(own),
        _ => None,
    }
}

/// A summand of the output's own shape. Of two candidates the later product absorbs the other.
fn fuse_residual(editor: &mut Editor, index: usize) -> Option<()> {
    let node = editor.node(index)?;
    if node.inputs.len() != 2 {
        return None;
    }
    let (a, b) = pair(&node.inputs)?;
    let output = node.outputs.first().copied().flatten()?;
    if a == b || !editor.same_shape(a, output) || !editor.same_shape(b, output) {
        return None;
    }
    let able = |id: ValueId| {
        let at = open(editor, id)?;
        let node = editor.node(at)?;
        let kind = matches!(node.op, Op::Conv(_) | Op::MatMul(_));
        (kind && node.inputs.get(3).copied().flatten().is_none()).then_some(at)
    };
    let (at, residual) = match (able(a), able(b)) {
        (Some(first), Some(second)) if first > second => (first, b),
        (Some(first), None) => (first, b),
        (_, Some(second)) => (second, a),
        (None, None) => return None,
    };
    let producer = editor.node(at)?;
    let (op, mut inputs) = (producer.op.clone(), producer.inputs.clone());
    inputs.resize(4, None);
    inputs[3] = Some(residual);
    editor.replace(index, op, inputs);
    editor.remove(at);
    Some(())
}
