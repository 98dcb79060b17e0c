//! Recognises attention: `softmax(scale * q @ k^T + bias) @ v`.
//!
//! The recogniser works on algebra. From the product with the values it goes up to the softmax, and
//! from there to the product of queries and keys; every operator in between is a factor, a term of
//! the bias, a condition that excludes keys, a cast between floats, or a change of the batch
//! dimensions. Factors may also be on the queries and the keys, behind any views; one that differs
//! between rows or batches, but not between keys, becomes a factor of the queries.
//!
//! Batch dimensions may be merged and split on the way (`[batch * heads, ..]`, windows of an image,
//! groups of heads that share their keys). The operator gets the finest of these levels, and
//! everything else is reshaped to it.

use model::op::{Activation, Binary, MatMul, Op, Softmax, SoftmaxKind, Unary, Variadic};
use model::{DataType, ValueId};

use self::level::{Level, batch_of};
use super::editor::{Editor, first, pair};
use crate::content;
use crate::ir::Graph;
use model::dim::SymDim;

mod build;
pub(super) mod level;

/// From here on, a number in place of a score excludes its key: the exponential is zero beside any
/// other. Clamps at this magnitude and beyond have no effect.
const EXCLUDED: f32 = -1e4;

/// The maximum number of operators between the product and the softmax.
const MAX_DEPTH: usize = 24;

/// Replaces attention written as several operators by one operator each. Returns how many.
pub fn run(graph: &mut Graph) -> usize {
    let mut editor = Editor::new(graph);
    for index in 0..editor.len() {
        if let Some(found) = find(&editor, index).or_else(|| simpler(&editor, index)) {
            build::replace(&mut editor, index, found);
        }
    }
    editor.finish()
}

/// What is added to the scores, or excludes some.
struct Term {
    value: ValueId,
    kind: TermKind,
    /// The batch dimensions of the scores where it joins them.
    level: Level,
}

enum TermKind {
    /// `factor * value` is added.
    Add { factor: f32 },
    /// Where the condition is `keep`, the score stays; elsewhere it is `low`.
    Choose { keep: bool, low: f32 },
}

/// An operand of a product, as `[.., rows, width]` after the transposition.
struct Matrix {
    value: ValueId,
    /// Its permutation to that order.
    perm: Option<Vec<usize>>,
    /// The batch dimensions of its product.
    level: Level,
}

struct Scores {
    q: Matrix,
    k: Matrix,
    scale: f32,
    terms: Vec<Term>,
    /// Nodes that multiply queries or keys with a number, and their other operand.
    factors: Vec<(usize, ValueId)>,
    /// What the rows of the scores are multiplied with, and the batch dimensions of the scores
    /// there.
    row_factors: Vec<(ValueId, Level)>,
}

impl Scores {
    fn new(q: Matrix, k: Matrix, scale: f32) -> Scores {
        let (terms, factors, row_factors) = (Vec::new(), Vec::new(), Vec::new());
        Scores { q, k, scale, terms, factors, row_factors }
    }
}

/// An attention.
struct Found {
    scores: Scores,
    v: Matrix,
    /// Whether the result is transposed: `v^T @ weights^T`.
    swapped: bool,
    /// The batch dimensions of the result.
    level: Level,
}

fn is_float(dtype: DataType) -> bool {
    matches!(dtype, DataType::F16 | DataType::BF16 | DataType::F32 | DataType::F64)
}

/// Whether the product has no epilogue but `alpha`.
fn plain(matmul: &MatMul) -> bool {
    matmul.activation == Activation::None
}

/// Matches the attention whose product with the values is node `index`.
fn find(editor: &Editor, index: usize) -> Option<Found> {
    let node = editor.node(index)?;
    let Op::MatMul(matmul) = &node.op else { return None };
    if !plain(matmul) || matmul.alpha != 1.0 || node.inputs.iter().skip(2).any(Option::is_some) {
        return None;
    }
    let (a, b) = pair(&node.inputs)?;
    let output = first(&node.outputs)?;
    let level = batch_of(editor.graph, output)?;
    let (weights, value, swapped, transposed) = match (matmul.transpose_a, matmul.transpose_b) {
        (false, transposed) if leads_to_softmax(editor, a) => (a, b, false, transposed),
        (transposed, true) if leads_to_softmax(editor, b) => (b, a, true, !transposed),
        (transposed, false) => {
            let (_, node) = editor.producer(b).filter(|_| editor.is_private(b))?;
            let Op::Transpose { perm: Some(perm) } = &node.op else { return None };
            let source = first(&node.inputs)?;
            let swaps = perm.iter().copied().eq(level::swapped(perm.len())?);
            if !swaps || !leads_to_softmax(editor, source) {
                return None;
            }
            (source, a, true, !transposed)
        }
        _ => return None,
    };
    let scores = softmax_input(editor, weights)?;
    let same_batch = level.is_same(&batch_of(editor.graph, weights)?);
    let rank = editor.graph.shape(value)?.len();
    let perm = if transposed { Some(level::swapped(rank)?) } else { None };
    let v = untransposed(editor, Matrix { value, perm, level: level.clone() });
    let scores = scores_of(editor, scores, 1.0, 0)?;
    let scores = reduce_operands(editor, scores)?;
    let all = [scores.q.value, scores.k.value, value];
    let floats = all.iter().all(|id| is_float(editor.graph.value(*id).dtype));
    (same_batch && floats).then_some(Found { scores, v, swapped, level })
}

/// An operator whose keys or values are repeated, or whose operands have factors.
fn simpler(editor: &Editor, index: usize) -> Option<Found> {
    let node = editor.node(index)?;
    let Op::Attention { scale } = node.op else { return None };
    let output = first(&node.outputs)?;
    let level = batch_of(editor.graph, output)?;
    let matrix = |index: usize| {
        let value = node.inputs.get(index).copied().flatten()?;
        Some(Matrix { value, perm: None, level: level.clone() })
    };
    let (q, k, v) = (matrix(0)?, matrix(1)?, matrix(2)?);
    let mut scores = Scores::new(q, k, scale);
    if let Some(value) = node.inputs.get(3).copied().flatten() {
        let kind = match editor.graph.value(value).dtype {
            DataType::Bool => TermKind::Choose { keep: true, low: f32::NEG_INFINITY },
            _ => TermKind::Add { factor: 1.0 },
        };
        scores = with_term(editor, scores, output, value, kind)?;
    }
    let scores = reduce_operands(editor, scores)?;
    let better = scores.scale != scale
        || build::is_repeated(editor, &scores.k)
        || build::is_repeated(editor, &v);
    better.then_some(Found { scores, v, swapped: false, level })
}

fn leads_to_softmax(editor: &Editor, id: ValueId) -> bool {
    softmax_input(editor, id).is_some()
}

/// Whether `id` is read once, or as often as `reads`, and is not an output of the model.
fn is_inner(editor: &Editor, id: ValueId, reads: usize) -> bool {
    editor.readers(id) == Some(reads)
}

/// The scores, when `id` is their softmax over the last dimension, perhaps cast or reshaped.
fn softmax_input(editor: &Editor, id: ValueId) -> Option<ValueId> {
    let (mut id, mut reads) = (id, 1);
    for _ in 0..MAX_DEPTH {
        if !is_inner(editor, id, reads) {
            return None;
        }
        reads = 1;
        let (op, inputs) = editor.op(id)?;
        let x = first(inputs)?;
        match op {
            Op::Softmax(Softmax { kind: SoftmaxKind::Softmax, axis, .. }) => {
                let rank = editor.graph.shape(x)?.len() as i64;
                let last = rank >= 2 && (*axis == -1 || *axis == rank - 1);
                return last.then_some(x);
            }
            // A row without any key is zero instead of NaN: so it is in the operator.
            Op::Where => {
                let [Some(condition), Some(zero), Some(weights)] = inputs[..] else { return None };
                let (Op::Unary(Unary::IsNan), tested) = editor.op(condition)? else { return None };
                if first(tested) != Some(weights) || uniform(editor, zero) != Some(0.0) {
                    return None;
                }
                (id, reads) = (weights, 2);
            }
            _ => id = passed(editor, id, op, x)?,
        }
    }
    None
}

/// The operand of an operator that changes only the type or the batch dimensions.
fn passed(editor: &Editor, id: ValueId, op: &Op, x: ValueId) -> Option<ValueId> {
    let same = match op {
        Op::Identity => true,
        Op::Cast(cast) => is_float(cast.to) && is_float(editor.graph.value(x).dtype),
        Op::Reshape { .. } | Op::Flatten { .. } | Op::Squeeze | Op::Unsqueeze => {
            level::keeps_matrices(editor.graph, x, id)
        }
        _ => false,
    };
    same.then_some(x)
}

/// The number of which all elements of `id` are.
fn uniform(editor: &Editor, id: ValueId) -> Option<f32> {
    if let Some(number) = editor.number(id) {
        return Some(number);
    }
    if let Some(tensor) = editor.graph.constant(id) {
        return content::uniform_float(tensor);
    }
    match editor.op(id)? {
        (Op::Expand | Op::Reshape { .. } | Op::Unsqueeze | Op::Identity, inputs) => {
            uniform(editor, first(inputs)?)
        }
        (Op::Cast(cast), inputs) if is_float(cast.to) => uniform(editor, first(inputs)?),
        _ => None,
    }
}

/// Matches scores from the outside in. `factor` is what follows them.
fn scores_of(editor: &Editor, id: ValueId, factor: f32, depth: usize) -> Option<Scores> {
    if depth > MAX_DEPTH || !is_inner(editor, id, 1) {
        return None;
    }
    let (op, inputs) = editor.op(id)?;
    let x = first(inputs)?;
    let inner = |id: ValueId, factor: f32| scores_of(editor, id, factor, depth + 1);
    match op {
        Op::MatMul(matmul) if plain(matmul) => product(editor, id, matmul, inputs, factor),
        Op::Binary(Binary::Mul) => {
            let (a, b) = pair(inputs)?;
            match (uniform(editor, a), uniform(editor, b)) {
                (None, Some(number)) if editor.same_rank(a, id) => inner(a, factor * number),
                (Some(number), None) if editor.same_rank(b, id) => inner(b, factor * number),
                (None, None) => {
                    let by_row = |scores: ValueId, other: ValueId| {
                        let rows = is_per_row(editor, other) && editor.same_shape(scores, id);
                        let found = rows.then(|| inner(scores, factor))??;
                        with_row_factor(editor, found, id, other)
                    };
                    by_row(a, b).or_else(|| by_row(b, a))
                }
                _ => None,
            }
        }
        Op::Binary(Binary::Div) => {
            let number = uniform(editor, inputs.get(1).copied().flatten()?)?;
            editor.same_rank(x, id).then(|| inner(x, factor / number))?
        }
        Op::Binary(Binary::Add) => {
            let (a, b) = pair(inputs)?;
            let term = |scores: ValueId, value: ValueId| {
                let found = editor.same_shape(scores, id).then(|| inner(scores, factor))??;
                with_term(editor, found, id, value, TermKind::Add { factor })
            };
            term(a, b).or_else(|| term(b, a))
        }
        Op::Binary(Binary::Sub) => {
            let (a, b) = pair(inputs)?;
            let found = editor.same_shape(a, id).then(|| inner(a, factor))??;
            with_term(editor, found, id, b, TermKind::Add { factor: -factor })
        }
        Op::Where => {
            let [Some(condition), Some(a), Some(b)] = inputs[..] else { return None };
            let term = |scores: ValueId, other: ValueId, keep: bool| {
                let low = uniform(editor, other)? * factor;
                let excludes = low <= EXCLUDED && editor.same_shape(scores, id);
                let found = excludes.then(|| inner(scores, factor))??;
                with_term(editor, found, id, condition, TermKind::Choose { keep, low })
            };
            term(a, b, true).or_else(|| term(b, a, false))
        }
        Op::Clip | Op::Variadic(Variadic::Max | Variadic::Min) => {
            let scores = unclamped(editor, id, op, inputs)?;
            inner(scores, factor)
        }
        _ => inner(passed(editor, id, op, x)?, factor),
    }
}

fn with_term(
    editor: &Editor,
    mut scores: Scores,
    at: ValueId,
    value: ValueId,
    kind: TermKind,
) -> Option<Scores> {
    let dtype = editor.graph.value(value).dtype;
    let typed = match kind {
        TermKind::Add { factor } => is_float(dtype) && factor.is_finite(),
        TermKind::Choose { .. } => dtype == DataType::Bool,
    };
    editor.graph.shape(value)?;
    let level = batch_of(editor.graph, at)?;
    scores.terms.push(Term { value, kind, level });
    typed.then_some(scores)
}

/// Whether `id` is the same for all keys.
fn is_per_row(editor: &Editor, id: ValueId) -> bool {
    let shape = editor.graph.shape(id);
    is_float(editor.graph.value(id).dtype)
        && shape.is_some_and(|shape| shape.last().is_none_or(|dim| dim.is(1)))
}

/// Scores that are multiplied with `value`, which is the same for all keys. What was added before
/// would be multiplied too.
fn with_row_factor(
    editor: &Editor,
    mut scores: Scores,
    at: ValueId,
    value: ValueId,
) -> Option<Scores> {
    scores.row_factors.push((value, batch_of(editor.graph, at)?));
    scores.terms.is_empty().then_some(scores)
}

/// The operand of a clamp that changes no score that counts.
fn unclamped(editor: &Editor, id: ValueId, op: &Op, inputs: &[Option<ValueId>]) -> Option<ValueId> {
    let low = |id: ValueId| uniform(editor, id).is_some_and(|number| number <= EXCLUDED);
    let high = |id: ValueId| uniform(editor, id).is_some_and(|number| number >= -EXCLUDED);
    let operand = |index: usize| inputs.get(index).copied().flatten();
    match (op, inputs) {
        (Op::Clip, _) => {
            let wide = operand(1).is_none_or(low) && operand(2).is_none_or(high);
            first(inputs).filter(|_| wide)
        }
        (Op::Variadic(kind), [Some(a), Some(b)]) => {
            let bound = |id| if *kind == Variadic::Max { low(id) } else { high(id) };
            let scores = match (bound(*a), bound(*b)) {
                (true, false) => *b,
                (false, true) => *a,
                _ => return None,
            };
            editor.same_shape(scores, id).then_some(scores)
        }
        _ => None,
    }
}

/// The product of queries and keys.
fn product(
    editor: &Editor,
    id: ValueId,
    matmul: &MatMul,
    inputs: &[Option<ValueId>],
    factor: f32,
) -> Option<Scores> {
    let (a, b) = pair(inputs)?;
    let level = batch_of(editor.graph, id)?;
    let rank = |id: ValueId| editor.graph.shape(id).map(<[SymDim]>::len).filter(|rank| *rank >= 2);
    let perm = |id: ValueId, swap: bool| {
        let rank = rank(id)?;
        Some(if swap { Some(level::swapped(rank)?) } else { None })
    };
    let q = Matrix { value: a, perm: perm(a, matmul.transpose_a)?, level: level.clone() };
    let k = Matrix { value: b, perm: perm(b, !matmul.transpose_b)?, level };
    let scale = factor * matmul.alpha;
    let mut scores = Scores::new(q, k, scale);
    for value in inputs.iter().skip(2).copied().flatten() {
        scores = with_term(editor, scores, id, value, TermKind::Add { factor })?;
    }
    Some(scores)
}

/// Joins a transposition, and factors beside it, with the one that is needed anyway.
fn untransposed(editor: &Editor, matrix: Matrix) -> Matrix {
    let Some(perm) = &matrix.perm else { return matrix };
    let Some((Op::Transpose { perm: Some(before) }, inputs)) = editor.op(matrix.value) else {
        return matrix;
    };
    let joined: Option<Vec<usize>> = perm.iter().map(|axis| before.get(*axis).copied()).collect();
    match (first(inputs), joined) {
        (Some(value), Some(joined)) => {
            let plain = joined.iter().copied().eq(0..joined.len());
            Matrix { value, perm: (!plain).then_some(joined), level: matrix.level }
        }
        _ => matrix,
    }
}

/// The other operand and the factor, when node `at` multiplies with or divides by a number.
fn factor_of(editor: &Editor, id: ValueId) -> Option<(usize, ValueId, f32)> {
    let (at, node) = editor.producer(id)?;
    let (a, b) = pair(&node.inputs)?;
    let (x, factor) = match (&node.op, uniform(editor, a), uniform(editor, b)) {
        (Op::Binary(Binary::Mul), None, Some(factor)) => (a, factor),
        (Op::Binary(Binary::Mul), Some(factor), None) => (b, factor),
        (Op::Binary(Binary::Div), None, Some(divisor)) => (a, divisor.recip()),
        _ => return None,
    };
    editor.same_rank(x, id).then_some((at, x, factor))
}

/// The operand without factors and without a transposition that cancels, and `scale` with the
/// factors. Factors behind views are recorded: their nodes are replaced once the attention is
/// certain. That changes a value for all its readers, so there must be no other.
fn reduced(
    editor: &Editor,
    matrix: Matrix,
    scale: &mut f32,
    factors: &mut Vec<(usize, ValueId)>,
) -> Matrix {
    let (mut matrix, mut exclusive) = (matrix, true);
    loop {
        let id = matrix.value;
        if let Some((_, x, factor)) = factor_of(editor, id) {
            matrix.value = x;
            *scale *= factor;
        } else {
            matrix = untransposed(editor, matrix);
        }
        if matrix.value == id {
            break;
        }
        exclusive &= editor.is_private(id);
    }
    let mut behind = matrix.value;
    for _ in 0..MAX_DEPTH {
        if !exclusive || !editor.is_private(behind) {
            break;
        }
        if let Some((at, x, factor)) = factor_of(editor, behind) {
            factors.push((at, x));
            *scale *= factor;
            behind = x;
            continue;
        }
        let Some((op, inputs)) = editor.op(behind) else { break };
        let moves = match op {
            Op::Expand => true,
            Op::Cast(cast) => is_float(cast.to),
            op => op.only_moves(),
        };
        let Some(x) = first(inputs).filter(|_| moves) else { break };
        behind = x;
    }
    matrix
}

/// Factors on queries and keys are part of the scale.
fn reduce_operands(editor: &Editor, scores: Scores) -> Option<Scores> {
    let Scores { q, k, mut scale, terms, mut factors, row_factors } = scores;
    let q = reduced(editor, q, &mut scale, &mut factors);
    let k = reduced(editor, k, &mut scale, &mut factors);
    let usable = scale.is_finite() && scale != 0.0;
    usable.then_some(Scores { q, k, scale, terms, factors, row_factors })
}
