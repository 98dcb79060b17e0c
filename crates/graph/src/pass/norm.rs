//! Recognises layer and root-mean-square normalisation that exporters write as several operators.

use model::op::{Binary, Op, Reduce, ReduceKind, Unary};
use model::{DataType, ValueId};

use super::editor::{Editor, WithConstant, first, pair};
use crate::content;
use crate::ir::Graph;

/// Replaces written-out normalisations by one operator each. Returns how many.
pub fn run(graph: &mut Graph) -> usize {
    let mut editor = Editor::new(graph);
    for index in 0..editor.len() {
        if recognise(&mut editor, index).is_none() {
            absorb(&mut editor, index);
        }
    }
    editor.finish()
}

/// `x / sqrt(mean(..) + epsilon)` for any `x`.
struct Quotient {
    numerator: ValueId,
    /// The operand of the mean.
    averaged: ValueId,
    axis: i64,
    epsilon: f32,
}

fn recognise(editor: &mut Editor, index: usize) -> Option<()> {
    let quotient = quotient(editor, index)?;
    let output = editor.node(index)?.outputs.first().copied().flatten()?;
    let base = square_root_of(editor, quotient.averaged)?;
    let Quotient { numerator, axis, epsilon, .. } = quotient;
    if !same_value(editor, numerator, base) {
        return None;
    }
    let (op, x) = match centred(editor, numerator, axis) {
        Some(x) => (Op::LayerNorm { axis, epsilon }, x),
        None => (Op::RmsNorm { axis, epsilon }, numerator),
    };
    let dtype = editor.graph.value(x).dtype;
    if !editor.same_rank(x, output) || !matches!(dtype, DataType::F32 | DataType::F64) {
        return None;
    }
    let shape = editor.graph.shape(x)?;
    let first_axis = usize::try_from(axis + shape.len() as i64).ok()?;
    let sizes = content::fixed_shape(shape.get(first_axis..)?)?;
    let count = content::fixed_count(&shape[first_axis..])?;
    let ones = content::float_tensor(dtype, sizes, &vec![1.0; count])?;
    let name = format!("{}/scale", editor.node(index)?.name);
    let scale = editor.constant(&name, ones);
    editor.replace(index, op, vec![Some(x), Some(scale)]);
    Some(())
}

/// Matches `a / sqrt(mean(b) + epsilon)` and `a * (1 / sqrt(..))`.
fn quotient(editor: &Editor, index: usize) -> Option<Quotient> {
    let node = editor.node(index)?;
    let (a, b) = pair(&node.inputs)?;
    let candidates = match node.op {
        Op::Binary(Binary::Div) => vec![(a, root(editor, b, false))],
        Op::Binary(Binary::Mul) => vec![(a, root(editor, b, true)), (b, root(editor, a, true))],
        _ => return None,
    };
    candidates.into_iter().find_map(|(numerator, argument)| {
        let (mean, epsilon) = with_epsilon(editor, argument?)?;
        let (averaged, axis) = mean_of(editor, mean)?;
        Some(Quotient { numerator, averaged, axis, epsilon })
    })
}

/// The argument of a square root, behind a reciprocal when `inverse`.
fn root(editor: &Editor, id: ValueId, inverse: bool) -> Option<ValueId> {
    let (op, inputs) = editor.op(id)?;
    match (op, inverse) {
        (Op::Unary(Unary::Sqrt), false) => first(inputs),
        (Op::Binary(Binary::Pow), false) => {
            let (x, exponent) = pair(inputs)?;
            editor.is_number(exponent, 0.5).then_some(x)
        }
        (Op::Unary(Unary::Reciprocal), true) => root(editor, first(inputs)?, false),
        (Op::Binary(Binary::Div), true) => {
            let (one, divisor) = pair(inputs)?;
            editor.is_number(one, 1.0).then(|| root(editor, divisor, false)).flatten()
        }
        _ => None,
    }
}

fn with_epsilon(editor: &Editor, id: ValueId) -> Option<(ValueId, f32)> {
    let (Op::Binary(Binary::Add), inputs) = editor.op(id)? else { return None };
    let (a, b) = pair(inputs)?;
    let epsilon = |id: ValueId| editor.number(id).filter(|x| (0.0..0.1).contains(x));
    match (epsilon(a), epsilon(b)) {
        (None, Some(epsilon)) => Some((a, epsilon)),
        (Some(epsilon), None) => Some((b, epsilon)),
        _ => None,
    }
}

/// The operand of a mean over the last dimensions that keeps them, and the first of these, from the
/// end.
fn mean_of(editor: &Editor, id: ValueId) -> Option<(ValueId, i64)> {
    let (Op::Reduce(Reduce { kind: ReduceKind::Mean, keep_dims: true, .. }), inputs) =
        editor.op(id)?
    else {
        return None;
    };
    let (x, axes) = pair(inputs)?;
    let rank = editor.graph.shape(x)?.len() as i64;
    let axes = editor.graph.constant_ints(axes)?;
    let mut from_end: Vec<i64> =
        axes.iter().map(|axis| if *axis < 0 { *axis } else { axis - rank }).collect();
    from_end.sort_unstable();
    let first_axis = *from_end.first()?;
    from_end.iter().copied().eq(first_axis..0).then_some((x, first_axis))
}

/// The value whose square `id` is.
fn square_root_of(editor: &Editor, id: ValueId) -> Option<ValueId> {
    let (op, inputs) = editor.op(id)?;
    let (a, b) = pair(inputs)?;
    match op {
        Op::Binary(Binary::Pow) => editor.is_number(b, 2.0).then_some(a),
        Op::Binary(Binary::Mul) => (a == b).then_some(a),
        _ => None,
    }
}

/// Whether both are one value, or written by equal operators on equal operands.
fn same_value(editor: &Editor, a: ValueId, b: ValueId) -> bool {
    a == b || editor.op(a).is_some_and(|found| editor.op(b) == Some(found))
}

/// The value from which `id` subtracts its own mean.
fn centred(editor: &Editor, id: ValueId, axis: i64) -> Option<ValueId> {
    let (Op::Binary(Binary::Sub), inputs) = editor.op(id)? else { return None };
    let (x, mean) = pair(inputs)?;
    (mean_of(editor, mean)? == (x, axis)).then_some(x)
}

/// A factor or a summand after a normalisation becomes its scale or bias.
fn absorb(editor: &mut Editor, index: usize) -> Option<()> {
    let node = editor.node(index)?;
    let WithConstant { is_product, x: normed, constant: vector } = WithConstant::of(editor, node)?;
    let output = node.outputs.first().copied().flatten()?;
    let (at, norm) = editor.producer(normed)?;
    let axis = match (&norm.op, is_product) {
        (Op::LayerNorm { axis, .. }, _) => *axis,
        (Op::RmsNorm { axis, .. }, true) => *axis,
        _ => return None,
    };
    if !editor.is_private(normed) || !editor.same_rank(normed, output) || norm.outputs.len() != 1 {
        return None;
    }
    let (op, x) = (norm.op.clone(), first(&norm.inputs)?);
    let (scale, bias) =
        (norm.inputs.get(1).copied().flatten()?, norm.inputs.get(2).copied().flatten());
    let dims = editor.graph.shape(x)?;
    let start = usize::try_from(axis + dims.len() as i64).ok().or(usize::try_from(axis).ok())?;
    let normalised = content::fixed_shape(dims.get(start..)?)?;
    let vector_shape = content::fixed_shape(editor.graph.shape(vector)?)?;
    // Leading dimensions of size one are ignored; otherwise it must have the normalised dimensions.
    let ones = vector_shape.len().checked_sub(normalised.len())?;
    if vector_shape[ones..] != normalised || vector_shape[..ones].iter().any(|size| *size != 1) {
        return None;
    }
    let plain_scale =
        editor.graph.constant(scale).and_then(content::floats)?.iter().all(|x| *x == 1.0);
    if is_product && (!plain_scale || bias.is_some()) || !is_product && bias.is_some() {
        return None;
    }
    let tensor = editor.graph.constant(vector)?.clone().with_shape(normalised).ok()?;
    let name = format!("{}/vector", editor.node(index)?.name);
    let vector = editor.constant(&name, tensor);
    let inputs = match is_product {
        true => vec![Some(x), Some(vector)],
        false => vec![Some(x), Some(scale), Some(vector)],
    };
    editor.replace(index, op, inputs);
    editor.remove(at);
    Some(())
}
