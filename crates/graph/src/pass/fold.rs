//! Computes what depends only on constants.

use std::ops::Range;
use std::time::{Duration, Instant};

use bytes::Bytes;
use model::op::{Binary, Op, Unary};
use model::{DataType, Tensor, ValueId};

use super::quantization::weights_in_bytes;
use super::{Evaluator, PassResult};
use crate::content;
use crate::ir::{Graph, GraphNode};
use model::dim::SymDim;

/// A result may always have this many bytes, and as many as the model's own constants have: weights
/// that are only moved or converted are computed ahead whatever their size.
const MAX_BYTES: usize = 64 << 20;

/// Operands up to this many elements are computed here; larger ones need a device's kernels.
const MAX_SMALL: usize = 64;

/// All results of one model may take this much, beside a multiple of its own constants.
const MAX_TOTAL_BYTES: usize = 256 << 20;

/// Weights that a file makes by filling them may take this much in all, beside other results: they
/// would be made again in every run.
const MAX_FILLED_BYTES: usize = 1 << 30;

/// How much more memory than the model's own constants their results may take. Dequantized weights
/// take four times as much.
const MAX_GROWTH: usize = 4;

/// Time after which nothing more is computed ahead.
const MAX_TIME: Duration = Duration::from_secs(30);

/// What may still be computed ahead for one model.
pub struct FoldBudget {
    bytes: usize,
    filled: usize,
    largest: usize,
    until: Instant,
}

impl FoldBudget {
    /// The budget of `graph`.
    pub fn new(graph: &Graph) -> FoldBudget {
        let own: usize = graph.constants.iter().map(|(_, tensor)| tensor.size_bytes()).sum();
        let bytes = own.saturating_mul(MAX_GROWTH).saturating_add(MAX_TOTAL_BYTES);
        let until = Instant::now() + MAX_TIME;
        FoldBudget { bytes, filled: MAX_FILLED_BYTES, largest: own.max(MAX_BYTES), until }
    }

    /// Takes `bytes`, if they and some time are left.
    fn take(&mut self, bytes: usize) -> Option<()> {
        if Instant::now() > self.until {
            self.bytes = 0;
        }
        self.bytes = self.bytes.checked_sub(bytes)?;
        Some(())
    }

    /// Takes `bytes` of a weight that is filled.
    fn take_filled(&mut self, bytes: usize) -> Option<()> {
        self.filled = self.filled.checked_sub(bytes)?;
        Some(())
    }
}

/// Replaces nodes whose outputs are known by constants. Returns how many.
///
/// A constant may be the shape that a later node computes: what was not known of a node's outputs
/// is inferred again before the node is looked at, so one pass follows the whole chain.
pub fn run(graph: &mut Graph, evaluator: Option<&dyn Evaluator>, budget: &mut FoldBudget) -> usize {
    noted(graph, evaluator, budget).rewrites
}

/// The same; what is inferred again is a change.
pub(super) fn noted(
    graph: &mut Graph,
    evaluator: Option<&dyn Evaluator>,
    budget: &mut FoldBudget,
) -> PassResult {
    let mut removed = vec![false; graph.nodes.len()];
    let mut refined = false;
    let bytes = weights_in_bytes(graph);
    for (index, gone) in removed.iter_mut().enumerate() {
        refined |= refine(graph, index);
        if graph.nodes[index].outputs.iter().flatten().any(|id| bytes.contains(id)) {
            continue;
        }
        let computed = value_of(graph, &graph.nodes[index], evaluator, budget);
        let Some(tensors) = computed else { continue };
        let outputs = graph.nodes[index].outputs.clone();
        for (id, tensor) in outputs.into_iter().zip(tensors) {
            if let (Some(id), Some(tensor)) = (id, tensor) {
                graph.set_constant(id, tensor);
            }
        }
        *gone = true;
    }
    let mut index = 0;
    graph.nodes.retain(|_| {
        index += 1;
        !removed[index - 1]
    });
    let rewrites = removed.iter().filter(|gone| **gone).count();
    PassResult { rewrites, changed: refined || rewrites > 0 }
}

/// Infers the outputs of node `index` again where something of them is unknown, and keeps what is
/// known now. Inference that fails changes nothing: the node was accepted when it was read. Returns
/// whether more is known than before.
fn refine(graph: &mut Graph, index: usize) -> bool {
    let node = &graph.nodes[index];
    let is_open = |id: &ValueId| {
        let value = graph.value(*id);
        let fixed = value.shape.as_ref().is_some_and(|dims| dims.iter().all(is_fixed));
        let followed = value.content.as_ref().is_some_and(|all| all.iter().all(is_fixed));
        !fixed || !(followed || value.dtype.is_float())
    };
    if !node.outputs.iter().flatten().any(is_open) {
        return false;
    }
    let Ok(facts) = graph.infer(&node.op, &node.inputs, node.outputs.len()) else { return false };
    let mut changed = false;
    for (id, fact) in node.outputs.clone().into_iter().zip(facts) {
        let Some(id) = id else { continue };
        let value = &mut graph.values[id.index()];
        if fact.dtype != value.dtype {
            continue;
        }
        let shape = match (&value.shape, fact.shape) {
            (Some(old), Some(new)) if old.len() == new.len() => {
                Some(old.iter().cloned().zip(new).map(|(old, new)| more_known(old, new)).collect())
            }
            (old, new) => old.clone().or(new),
        };
        let all_fixed = |content: &[SymDim]| content.iter().all(is_fixed);
        let replaced = value.content.is_none() || fact.content.as_deref().is_some_and(all_fixed);
        let content = if replaced { fact.content } else { value.content.clone() };
        changed |= (&shape, &content) != (&value.shape, &value.content);
        (value.shape, value.content) = (shape, content);
    }
    changed
}

fn is_fixed(dim: &SymDim) -> bool {
    dim.fixed().is_some()
}

/// The one of two descriptions of a size that says more.
fn more_known(old: SymDim, new: SymDim) -> SymDim {
    match (&old, &new) {
        (SymDim::Fixed(_), _) | (_, SymDim::Unknown) => old,
        (SymDim::Unknown, _) | (_, SymDim::Fixed(_)) => new,
        _ => old,
    }
}

/// The outputs of a node, when they can be computed now. Absent ones are outputs that are not read.
fn value_of(
    graph: &Graph,
    node: &GraphNode,
    evaluator: Option<&dyn Evaluator>,
    budget: &mut FoldBudget,
) -> Option<Vec<Option<Tensor>>> {
    let known: Option<Vec<Option<Tensor>>> = node
        .outputs
        .iter()
        .map(|id| match id {
            Some(id) => followed(graph, *id).map(Some),
            None => Some(None),
        })
        .collect();
    if known.is_some() {
        return known;
    }
    let all_constant = !node.inputs.is_empty()
        && node.inputs.iter().flatten().all(|id| graph.constant(*id).is_some());
    if !all_constant || matches!(node.op, Op::Identity | Op::Draw(_) | Op::Control(_)) {
        return None;
    }
    let expected = largest_result(graph, node)?;
    let filled = matches!(node.op, Op::ConstantOfShape { .. });
    if expected > budget.largest && !filled {
        return None;
    }
    if let Some(rows) = shared_rows(graph, node) {
        return checked(graph, node, vec![rows]);
    }
    // Reshaped constants share their memory.
    match filled && expected > budget.largest {
        true => budget.take_filled(expected)?,
        false => budget.take(if node.op.is_reshape() { 0 } else { expected })?,
    }
    let computed = match layout(graph, node).or_else(|| small(graph, node)) {
        Some(tensor) => vec![tensor],
        None => {
            let inputs: Vec<Option<Tensor>> =
                node.inputs.iter().map(|id| graph.constant((*id)?).cloned()).collect();
            evaluator?.evaluate(&node.op, &inputs, node.outputs.len())?
        }
    };
    checked(graph, node, computed)
}

/// A value whose elements shape inference tracked to numbers.
fn followed(graph: &Graph, id: ValueId) -> Option<Tensor> {
    let value = graph.value(id);
    let elements: Vec<i64> =
        value.content.as_ref()?.iter().map(SymDim::fixed).collect::<Option<_>>()?;
    let shape = content::fixed_shape(value.shape.as_ref()?)?;
    content::tensor_of(value.dtype, shape, &elements)
}

/// A limit on the bytes of a node's outputs. Where inference does not know it, the operator may.
fn largest_result(graph: &Graph, node: &GraphNode) -> Option<usize> {
    let known =
        node.outputs.iter().flatten().map(|id| size_of_value(graph, *id)).sum::<Option<usize>>();
    known.or_else(|| {
        let x = graph.constant(node.inputs.first().copied().flatten()?)?;
        match node.op {
            Op::NonZero => x.len().checked_mul(x.shape().len())?.checked_mul(size_of::<i64>()),
            Op::Compress { .. } => Some(x.size_bytes()),
            _ => None,
        }
    })
}

fn size_of_value(graph: &Graph, id: ValueId) -> Option<usize> {
    let value = graph.value(id);
    content::fixed_count(value.shape.as_ref()?)?.checked_mul(value.dtype.size_bytes()?)
}

/// Results are used only if they agree with the inferred type and shape.
fn checked(graph: &Graph, node: &GraphNode, tensors: Vec<Tensor>) -> Option<Vec<Option<Tensor>>> {
    let mut tensors: Vec<Option<Tensor>> = tensors.into_iter().map(Some).collect();
    tensors.resize(node.outputs.len(), None);
    for (id, tensor) in node.outputs.iter().zip(&tensors) {
        let Some(id) = id else { continue };
        let (value, tensor) = (graph.value(*id), tensor.as_ref()?);
        if tensor.dtype() != value.dtype || !fits(value.shape.as_deref(), tensor.shape()) {
            return None;
        }
    }
    Some(tensors)
}

/// Whether `shape` agrees with what was inferred; sizes that depend on data may be any.
fn fits(inferred: Option<&[SymDim]>, shape: &[usize]) -> bool {
    let agrees = |(dim, size): (&SymDim, &usize)| match dim {
        SymDim::Unknown => true,
        dim => dim.size() == Some(*size),
    };
    inferred.is_none_or(|dims| dims.len() == shape.len() && dims.iter().zip(shape).all(agrees))
}

/// Operators that only move elements.
fn layout(graph: &Graph, node: &GraphNode) -> Option<Tensor> {
    let x = graph.constant(node.inputs.first().copied().flatten()?)?;
    let output = node.outputs.first().copied().flatten()?;
    match &node.op {
        Op::Reshape { .. } | Op::Flatten { .. } | Op::Squeeze | Op::Unsqueeze => {
            let shape = content::fixed_shape(graph.shape(output)?)?;
            x.clone().with_shape(shape).ok()
        }
        Op::Transpose { perm } => {
            let reversed: Vec<usize> = (0..x.shape().len()).rev().collect();
            permuted(x, perm.as_deref().unwrap_or(&reversed))
        }
        _ => None,
    }
}

/// Neighbouring rows of a constant, which share its memory: a table of positions cut to a request's
/// length is then no new constant for every length.
fn shared_rows(graph: &Graph, node: &GraphNode) -> Option<Tensor> {
    let constant = |index: usize| graph.constant(node.inputs.get(index).copied().flatten()?);
    let table = constant(0)?;
    let range = match &node.op {
        Op::Gather { axis } => gathered_rows(table, constant(1)?, *axis)?,
        Op::Slice => {
            let ints = |index: usize| content::ints(constant(index)?);
            let (start, end) = (ints(1)?, ints(2)?);
            let axes = match node.inputs.get(3) {
                Some(Some(_)) => ints(3)?,
                _ => (0..start.len() as i64).collect(),
            };
            if matches!(node.inputs.get(4), Some(Some(_))) && ints(4)?.iter().any(|step| *step != 1)
            {
                return None;
            }
            sliced_rows(table, &start, &end, &axes)?
        }
        _ => return None,
    };
    let output = node.outputs.first().copied().flatten()?;
    let shape = content::fixed_shape(graph.shape(output)?)?;
    let raw = table.raw()?;
    let range = range.start.checked_mul(table.dtype().size_bytes()?)?
        ..range.end.checked_mul(table.dtype().size_bytes()?)?;
    (range.start <= range.end && range.end <= raw.len())
        .then(|| Tensor::from_raw(table.dtype(), shape, raw.slice(range)).ok())?
}

/// The elements of consecutive rows.
fn gathered_rows(table: &Tensor, rows: &Tensor, axis: i64) -> Option<Range<usize>> {
    let rows = content::ints(rows)?;
    let first = usize::try_from(*rows.first()?).ok()?;
    let last = first.checked_add(rows.len())?;
    let consecutive = rows.iter().zip(first..last).all(|(row, want)| *row == want as i64);
    let count = *table.shape().first()?;
    let row: usize = table.shape()[1..].iter().product();
    (axis == 0 && consecutive && last <= count)
        .then(|| Some(first.checked_mul(row)?..last.checked_mul(row)?))?
}

/// The elements of a slice that takes all of every dimension but one, before which there are only
/// dimensions of size one.
fn sliced_rows(table: &Tensor, start: &[i64], end: &[i64], axes: &[i64]) -> Option<Range<usize>> {
    let shape = table.shape();
    let mut cut: Option<(usize, Range<usize>)> = None;
    for ((start, end), axis) in start.iter().zip(end).zip(axes) {
        let axis = if *axis < 0 { axis + shape.len() as i64 } else { *axis };
        let axis = usize::try_from(axis).ok().filter(|axis| *axis < shape.len())?;
        let size = shape[axis] as i64;
        let bound = |at: i64| (if at < 0 { at.saturating_add(size) } else { at }).clamp(0, size);
        let (first, last) = (bound(*start), bound(*end));
        if (first, last) == (0, size) {
            continue;
        }
        if cut.is_some() || last <= first || shape[..axis].iter().any(|size| *size != 1) {
            return None;
        }
        cut = Some((axis, first as usize..last as usize));
    }
    let (axis, rows) = cut?;
    let row: usize = shape[axis + 1..].iter().product();
    Some(rows.start.checked_mul(row)?..rows.end.checked_mul(row)?)
}

/// The tensor with its dimensions in another order.
pub(crate) fn permuted(x: &Tensor, perm: &[usize]) -> Option<Tensor> {
    let (raw, size, rank) = (x.raw()?, x.dtype().size_bytes()?, x.shape().len());
    if perm.len() != rank || perm.iter().any(|axis| *axis >= rank) {
        return None;
    }
    let mut strides = vec![size; rank];
    for axis in (0..rank.saturating_sub(1)).rev() {
        strides[axis] = strides[axis + 1] * x.shape()[axis + 1];
    }
    let shape: Vec<usize> = perm.iter().map(|axis| x.shape()[*axis]).collect();
    let steps: Vec<usize> = perm.iter().map(|axis| strides[*axis]).collect();
    let mut out = Vec::with_capacity(raw.len());
    let mut index = vec![0usize; rank];
    let mut offset = 0;
    for _ in 0..x.len() {
        out.extend_from_slice(raw.get(offset..offset + size)?);
        for axis in (0..rank).rev() {
            index[axis] += 1;
            offset += steps[axis];
            if index[axis] < shape[axis] {
                break;
            }
            offset -= steps[axis] * shape[axis];
            index[axis] = 0;
        }
    }
    Tensor::from_raw(x.dtype(), shape, Bytes::from(out)).ok()
}

/// A few floating-point numbers, such as the scale of an attention.
fn small(graph: &Graph, node: &GraphNode) -> Option<Tensor> {
    let output = node.outputs.first().copied().flatten()?;
    let value = graph.value(output);
    let shape = content::fixed_shape(value.shape.as_ref()?)?;
    let count = shape.iter().product::<usize>();
    if count > MAX_SMALL || value.dtype != DataType::F32 {
        return None;
    }
    let operand = |index: usize| -> Option<Vec<f32>> {
        let tensor = graph.constant(node.inputs.get(index).copied().flatten()?)?;
        let elements = match content::floats(tensor) {
            Some(floats) if tensor.dtype() == DataType::F32 => floats,
            Some(_) => return None,
            None => content::ints(tensor)?.into_iter().map(|x| x as f32).collect(),
        };
        match elements.len() {
            1 => Some(vec![elements[0]; count]),
            length if length == count && tensor.shape() == shape => Some(elements),
            _ => None,
        }
    };
    let binary = |f: fn(f32, f32) -> f32| -> Option<Vec<f32>> {
        Some(operand(0)?.into_iter().zip(operand(1)?).map(|(a, b)| f(a, b)).collect())
    };
    let unary = |f: fn(f32) -> f32| Some(operand(0)?.into_iter().map(f).collect::<Vec<f32>>());
    let elements = match &node.op {
        Op::Binary(Binary::Add) => binary(|a, b| a + b)?,
        Op::Binary(Binary::Sub) => binary(|a, b| a - b)?,
        Op::Binary(Binary::Mul) => binary(|a, b| a * b)?,
        Op::Binary(Binary::Div) => binary(|a, b| a / b)?,
        Op::Binary(Binary::Pow) => binary(f32::powf)?,
        Op::Unary(Unary::Sqrt) => unary(f32::sqrt)?,
        Op::Unary(Unary::Neg) => unary(|x| -x)?,
        Op::Unary(Unary::Reciprocal) => unary(f32::recip)?,
        Op::Cast(_) => unary(|x| x)?,
        _ => return None,
    };
    Tensor::from_vec(shape, elements).ok()
}
