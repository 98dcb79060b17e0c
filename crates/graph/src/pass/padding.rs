//! Moves zero padding into the following convolution.

use model::op::{Conv, Op, PadMode, Padding};

use super::editor::{Editor, first};
use crate::ir::Graph;

/// Larger padding is not folded.
const MAX_BORDER: usize = 1 << 20;

/// Folds paddings into convolutions. Returns how many.
pub fn run(graph: &mut Graph) -> usize {
    let mut editor = Editor::new(graph);
    for index in 0..editor.len() {
        rewrite(&mut editor, index);
    }
    editor.finish()
}

fn rewrite(editor: &mut Editor, index: usize) -> Option<()> {
    let node = editor.node(index)?;
    let Op::Conv(conv) = &node.op else { return None };
    let x = first(&node.inputs)?;
    let (at, pad) = editor.producer(x).filter(|_| editor.is_private(x))?;
    let (Op::Pad { mode: PadMode::Constant }, [Some(source), Some(pads), value @ ..]) =
        (&pad.op, pad.inputs.as_slice())
    else {
        return None;
    };
    let zero = match value {
        [] | [None] => true,
        [Some(value)] => editor.number(*value) == Some(0.0),
        _ => false,
    };
    let pads = editor.graph.constant_ints(*pads)?;
    let rank = pads.len() / 2;
    let sizes: Vec<usize> =
        pads.iter().map(|pad| usize::try_from(*pad).ok()).collect::<Option<_>>()?;
    let batch_or_channel = sizes.len() != 2 * rank
        || rank < 3
        || [0, 1, rank, rank + 1].iter().any(|at| sizes[*at] != 0);
    let Padding::Explicit(own) = &conv.window.padding else { return None };
    if !zero || batch_or_channel || ![0, 2 * (rank - 2)].contains(&own.len()) {
        return None;
    }
    let border: Vec<usize> = sizes[2..rank].iter().chain(&sizes[rank + 2..]).copied().collect();
    let wide = |(at, size): (usize, &usize)| {
        size.checked_add(*own.get(at).unwrap_or(&0)).filter(|sum| *sum < MAX_BORDER)
    };
    let sum: Vec<usize> = border.iter().enumerate().map(wide).collect::<Option<_>>()?;
    let mut conv: Conv = conv.clone();
    conv.window.padding = Padding::Explicit(sum);
    let mut inputs = node.inputs.clone();
    inputs[0] = Some(*source);
    editor.replace(index, Op::Conv(conv), inputs);
    editor.remove(at);
    Some(())
}
