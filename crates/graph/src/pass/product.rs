//! Folds transposes and factors into matrix products.

use model::ValueId;
use model::op::{Activation, Binary, Op};

use super::editor::{Editor, first, pair};
use crate::ir::Graph;

/// Folds what it can. Returns how many operators were folded.
pub fn run(graph: &mut Graph) -> usize {
    let mut editor = Editor::new(graph);
    for index in 0..editor.len() {
        fold_transposes(&mut editor, index);
        fold_factor(&mut editor, index);
    }
    editor.finish()
}

/// The operand of a transpose that swaps the last two dimensions and nothing else.
fn swapped(editor: &Editor, id: ValueId) -> Option<ValueId> {
    let (Op::Transpose { perm }, inputs) = editor.op(id)? else { return None };
    let rank = editor.graph.shape(id)?.len();
    let mut swap: Vec<usize> = (0..rank).collect();
    swap.swap(rank.checked_sub(2)?, rank - 1);
    let reversed = perm.is_none() && rank == 2;
    (reversed || perm.as_ref() == Some(&swap)).then(|| first(inputs)).flatten()
}

fn fold_transposes(editor: &mut Editor, index: usize) -> Option<()> {
    let node = editor.node(index)?;
    let (a, b) = pair(&node.inputs)?;
    let (from_a, from_b) = (swapped(editor, a), swapped(editor, b));
    if from_a.is_none() && from_b.is_none() {
        return None;
    }
    let mut op = node.op.clone();
    let (transpose_a, transpose_b) = match &mut op {
        Op::MatMul(matmul) => (&mut matmul.transpose_a, &mut matmul.transpose_b),
        Op::Gemm(gemm) => (&mut gemm.transpose_a, &mut gemm.transpose_b),
        _ => return None,
    };
    *transpose_a ^= from_a.is_some();
    *transpose_b ^= from_b.is_some();
    let mut inputs = node.inputs.clone();
    inputs[0] = Some(from_a.unwrap_or(a));
    inputs[1] = Some(from_b.unwrap_or(b));
    editor.replace(index, op, inputs);
    Some(())
}

/// A product that is only multiplied by a number absorbs it.
fn fold_factor(editor: &mut Editor, index: usize) -> Option<()> {
    let node = editor.node(index)?;
    let (a, b) = pair(&node.inputs)?;
    let output = node.outputs.first().copied().flatten()?;
    let (x, factor) = match (&node.op, editor.number(a), editor.number(b)) {
        (Op::Binary(Binary::Mul), None, Some(factor)) => (a, factor),
        (Op::Binary(Binary::Mul), Some(factor), None) => (b, factor),
        (Op::Binary(Binary::Div), None, Some(divisor)) => (a, divisor.recip()),
        _ => return None,
    };
    let (at, inner) = editor.producer(x)?;
    let Op::MatMul(matmul) = &inner.op else { return None };
    let plain =
        matmul.activation == Activation::None && inner.inputs.iter().skip(2).all(Option::is_none);
    if !plain || !editor.is_private(x) || !editor.same_rank(x, output) || !factor.is_finite() {
        return None;
    }
    let mut matmul = *matmul;
    matmul.alpha *= factor;
    let inputs = inner.inputs.clone();
    editor.replace(index, Op::MatMul(matmul), inputs);
    editor.remove(at);
    Some(())
}
