//! Recognises attention: `softmax(scale * q @ k^T + mask) @ v`.

use model::op::{Activation, Binary, MatMul, Op, Softmax, SoftmaxKind};
use model::{DataType, ValueId};

use super::editor::{Editor, first, pair};
use crate::ir::Graph;

/// Replaces attention written as several operators by one operator each. Returns how many.
pub fn run(graph: &mut Graph) -> usize {
    let mut editor = Editor::new(graph);
    for index in 0..editor.len() {
        rewrite(&mut editor, index);
    }
    editor.finish()
}

/// The parts of a score matrix.
struct Scores {
    q: ValueId,
    k: Key,
    scale: f32,
    mask: Option<ValueId>,
    /// Nodes with no other reader, to be removed.
    nodes: Vec<usize>,
}

/// The keys, `[.., tokens, width]`, directly or permuted.
enum Key {
    Plain(ValueId),
    /// A value and its permutation to that order.
    Permuted(ValueId, Vec<usize>),
}

fn plain(matmul: &MatMul, inputs: &[Option<ValueId>]) -> bool {
    matmul.activation == Activation::None && inputs.iter().skip(2).all(Option::is_none)
}

fn rewrite(editor: &mut Editor, index: usize) -> Option<()> {
    let node = editor.node(index)?;
    let Op::MatMul(matmul) = &node.op else { return None };
    if !plain(matmul, &node.inputs)
        || matmul.transpose_a
        || matmul.transpose_b
        || matmul.alpha != 1.0
    {
        return None;
    }
    let (weights, v) = pair(&node.inputs)?;
    let name = node.name.clone();
    let (at, softmax) = editor.producer(weights)?;
    let Op::Softmax(Softmax { kind: SoftmaxKind::Softmax, axis, flatten: false }) = softmax.op
    else {
        return None;
    };
    let scores = first(&softmax.inputs)?;
    let rank = editor.graph.shape(scores)?.len();
    if !editor.is_private(weights) || (axis != -1 && axis != rank as i64 - 1) {
        return None;
    }
    let mut found = scores_of(editor, scores)?;
    found.nodes.push(at);
    if !fits(editor, &found, v, rank) {
        return None;
    }
    let k = match found.k {
        Key::Plain(k) => k,
        Key::Permuted(source, perm) => {
            let op = Op::Transpose { perm: Some(perm) };
            editor.insert(index, &format!("{name}/k"), op, vec![Some(source)])?
        }
    };
    let inputs = [Some(found.q), Some(k), Some(v), found.mask];
    let count = if found.mask.is_some() { 4 } else { 3 };
    editor.replace(index, Op::Attention { scale: found.scale }, inputs[..count].to_vec());
    found.nodes.iter().for_each(|node| editor.remove(*node));
    Some(())
}

/// Matches scores from the outside in: mask, factor, product.
fn scores_of(editor: &Editor, id: ValueId) -> Option<Scores> {
    let (mut id, mut scale, mut mask, mut nodes) = (id, 1.0, None, Vec::new());
    let (q, k, transposed) = loop {
        if !editor.is_private(id) {
            return None;
        }
        let (at, node) = editor.producer(id)?;
        let (a, b) = pair(&node.inputs)?;
        nodes.push(at);
        match &node.op {
            Op::Binary(Binary::Add) if mask.is_none() && scale == 1.0 => {
                let is_scores = |id: ValueId| leads_to_product(editor, id);
                (id, mask) = match (is_scores(a), is_scores(b)) {
                    (true, false) => (a, Some(b)),
                    (false, true) => (b, Some(a)),
                    _ => return None,
                };
            }
            Op::Binary(Binary::Mul) => match (editor.number(a), editor.number(b)) {
                (None, Some(factor)) => (id, scale) = (a, scale * factor),
                (Some(factor), None) => (id, scale) = (b, scale * factor),
                _ => return None,
            },
            Op::Binary(Binary::Div) => (id, scale) = (a, scale / editor.number(b)?),
            Op::MatMul(matmul) if plain(matmul, &node.inputs) && !matmul.transpose_a => {
                scale *= matmul.alpha;
                break (a, b, matmul.transpose_b);
            }
            _ => return None,
        }
    };
    let (q, factor) = unscaled(editor, q, &mut nodes);
    scale *= factor;
    let (k, factor) = unscaled(editor, k, &mut nodes);
    scale *= factor;
    let (k, factor) = key(editor, k, transposed, &mut nodes)?;
    scale *= factor;
    (scale.is_finite() && scale != 0.0).then_some(Scores { q, k, scale, mask, nodes })
}

/// Whether `id` is a product, perhaps scaled.
fn leads_to_product(editor: &Editor, id: ValueId) -> bool {
    let mut id = id;
    for _ in 0..3 {
        match editor.op(id) {
            Some((Op::MatMul(_), _)) => return editor.is_private(id),
            Some((Op::Binary(Binary::Mul | Binary::Div), inputs)) => match pair(inputs) {
                Some((a, b)) => id = if editor.number(a).is_some() { b } else { a },
                None => return false,
            },
            _ => return false,
        }
    }
    false
}

/// The operand and factor when `id` is a private product with a number; else `id` itself.
fn unscaled(editor: &Editor, id: ValueId, nodes: &mut Vec<usize>) -> (ValueId, f32) {
    let scaled = || {
        let (at, node) = editor.producer(id).filter(|_| editor.is_private(id))?;
        let (a, b) = pair(&node.inputs)?;
        let (x, factor) = match (&node.op, editor.number(a), editor.number(b)) {
            (Op::Binary(Binary::Mul), None, Some(factor)) => (a, factor),
            (Op::Binary(Binary::Mul), Some(factor), None) => (b, factor),
            (Op::Binary(Binary::Div), None, Some(divisor)) => (a, divisor.recip()),
            _ => return None,
        };
        editor.same_rank(x, id).then_some((at, x, factor))
    };
    match scaled() {
        Some((at, x, factor)) => {
            nodes.push(at);
            (x, factor)
        }
        None => (id, 1.0),
    }
}

/// The keys from the right operand of the scores' product.
fn key(
    editor: &Editor,
    id: ValueId,
    transposed: bool,
    nodes: &mut Vec<usize>,
) -> Option<(Key, f32)> {
    if transposed {
        return Some((Key::Plain(id), 1.0));
    }
    let rank = editor.graph.shape(id)?.len();
    let mut swap: Vec<usize> = (0..rank).collect();
    swap.swap(rank.checked_sub(2)?, rank - 1);
    let (at, node) = match editor.producer(id) {
        Some((at, node)) if editor.is_private(id) => (at, node),
        _ => return Some((Key::Permuted(id, swap), 1.0)),
    };
    let Op::Transpose { perm: Some(perm) } = &node.op else {
        return Some((Key::Permuted(id, swap), 1.0));
    };
    let perm: Vec<usize> =
        swap.iter().map(|axis| perm.get(*axis).copied()).collect::<Option<_>>()?;
    let source = first(&node.inputs)?;
    nodes.push(at);
    let (source, factor) = unscaled(editor, source, nodes);
    match perm.iter().copied().eq(0..rank) {
        true => Some((Key::Plain(source), factor)),
        false => Some((Key::Permuted(source, perm), factor)),
    }
}

/// Whether types, ranks and batch dimensions are supported by every device.
fn fits(editor: &Editor, scores: &Scores, v: ValueId, rank: usize) -> bool {
    let graph = &editor.graph;
    let (Some(q), Some(v_shape)) = (graph.shape(scores.q), graph.shape(v)) else { return false };
    let k: Option<Vec<_>> = match &scores.k {
        Key::Plain(k) => graph.shape(*k).map(<[_]>::to_vec),
        Key::Permuted(source, perm) => graph
            .shape(*source)
            .and_then(|shape| perm.iter().map(|axis| shape.get(*axis).cloned()).collect()),
    };
    let Some(k) = k else { return false };
    let batch = rank - 2;
    let ranks = rank == 4 && q.len() == rank && k.len() == rank && v_shape.len() == rank;
    let types = [Some(scores.q), Some(v), scores.mask].into_iter().flatten().all(|id| {
        let dtype = graph.value(id).dtype;
        dtype == graph.value(v).dtype
            && matches!(dtype, DataType::F32 | DataType::F16 | DataType::BF16)
    });
    let mask_rank =
        scores.mask.is_none_or(|mask| graph.shape(mask).is_some_and(|m| m.len() <= rank));
    ranks
        && types
        && mask_rank
        && (0..batch).all(|axis| q[axis].is_same(&k[axis]) && q[axis].is_same(&v_shape[axis]))
}
