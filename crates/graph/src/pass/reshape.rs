//! Reshapes to computed shapes become reshapes to constant ones.
//!
//! Exporters compute `[batch, sequence, 12, 64]` from the input's shape at run time. Copied
//! dimensions and one inferred dimension are equivalent, and the arithmetic before it becomes dead.

use model::op::Op;

use super::editor::Editor;
use crate::ir::Graph;
use model::dim::SymDim;

/// Gives reshapes constant targets where inference allows. Returns how many.
pub fn run(graph: &mut Graph) -> usize {
    let mut editor = Editor::new(graph);
    for index in 0..editor.len() {
        rewrite(&mut editor, index);
    }
    editor.finish()
}

fn rewrite(editor: &mut Editor, index: usize) -> Option<()> {
    let node = editor.node(index)?;
    if !matches!(node.op, Op::Reshape { .. }) {
        return None;
    }
    let (mut x, target) = super::editor::pair(&node.inputs)?;
    let output = node.outputs.first().copied().flatten()?;
    // Only the last of two reshapes matters.
    let inner = editor.op(x).filter(|(op, _)| op.is_reshape());
    let source = inner.and_then(|(_, inputs)| super::editor::first(inputs));
    let skips = source.is_some_and(|source| plain(editor, source, output).is_some());
    if let Some(source) = source.filter(|_| skips) {
        x = source;
    }
    if !skips && editor.graph.constant(target).is_some() {
        return None;
    }
    let dims = plain(editor, x, output)?;
    let name = format!("{}/shape", editor.node(index)?.name);
    let shape = editor.ints(&name, &dims)?;
    editor.replace(index, Op::Reshape { allow_zero: false }, vec![Some(x), Some(shape)]);
    Some(())
}

/// The output's shape as a target for `x`: numbers, copies, and at most one inferred dimension.
pub(super) fn plain(
    editor: &Editor,
    x: model::ValueId,
    output: model::ValueId,
) -> Option<Vec<i64>> {
    let input = editor.graph.shape(x)?;
    let mut inferred = 0;
    let dims: Option<Vec<i64>> = editor
        .graph
        .shape(output)?
        .iter()
        .enumerate()
        .map(|(axis, dim)| match dim {
            SymDim::Fixed(size) => (*size > 0).then_some(*size),
            dim if input.get(axis).is_some_and(|own| own.is_same(dim)) => Some(0),
            _ => {
                inferred += 1;
                Some(-1)
            }
        })
        .collect();
    dims.filter(|_| inferred <= 1)
}
