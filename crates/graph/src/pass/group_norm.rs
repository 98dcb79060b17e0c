//! Recognises group normalisation that exporters write as an instance normalisation between two
//! reshapes, and takes the factors and summands behind it as its scale and bias.

use model::ValueId;
use model::op::Op;

use super::editor::{Editor, WithConstant, first};
use crate::content;
use crate::ir::Graph;

/// Replaces written-out group normalisations by one operator each. Returns how many.
pub fn run(graph: &mut Graph) -> usize {
    let mut editor = Editor::new(graph);
    for index in 0..editor.len() {
        if recognise(&mut editor, index).is_none() {
            absorb(&mut editor, index);
        }
    }
    editor.finish()
}

/// Matches `Reshape(InstanceNorm(Reshape(x, [N, groups, ..])), shape of x)`.
fn recognise(editor: &mut Editor, index: usize) -> Option<()> {
    let node = editor.node(index)?;
    let (Op::Reshape { .. }, normed) = (&node.op, first(&node.inputs)?) else { return None };
    let output = node.outputs.first().copied().flatten()?;
    let name = node.name.clone();
    let (at, norm) = editor.producer(normed)?;
    let Op::InstanceNorm { epsilon } = norm.op else { return None };
    let [Some(split), Some(scale), Some(bias)] = norm.inputs[..] else { return None };
    let (Op::Reshape { .. }, inputs) = editor.op(split)? else { return None };
    let x = first(inputs)?;
    if !editor.is_private(normed) || !editor.same_shape(x, output) {
        return None;
    }
    let (whole, parts) = (editor.graph.shape(x)?, editor.graph.shape(split)?);
    let same_images = whole.len() > 2 && parts.len() > 2 && whole[0].is_same(&parts[0]);
    let size = |dim: &model::dim::SymDim| dim.fixed().and_then(|size| usize::try_from(size).ok());
    let (channels, groups) = (size(whole.get(1)?)?, size(parts.get(1)?)?);
    // Groups of whole channels: row-major order keeps a channel together.
    if !same_images || groups == 0 || !channels.is_multiple_of(groups) {
        return None;
    }
    let within = channels / groups;
    let scale = repeated(editor, scale, groups, within)?;
    let bias = repeated(editor, bias, groups, within)?;
    let dtype = editor.graph.value(x).dtype;
    let scale = content::float_tensor(dtype, vec![channels], &scale)?;
    let bias = content::float_tensor(dtype, vec![channels], &bias)?;
    let scale = editor.constant(&format!("{name}/scale"), scale);
    let bias = editor.constant(&format!("{name}/bias"), bias);
    let op = Op::GroupNorm { groups, epsilon };
    editor.replace(index, op, vec![Some(x), Some(scale), Some(bias)]);
    editor.remove(at);
    Some(())
}

/// The numbers of a constant row of one per group, each for `within` channels.
fn repeated(editor: &Editor, id: ValueId, groups: usize, within: usize) -> Option<Vec<f64>> {
    let numbers = numbers(editor, id)?;
    let wide = numbers.iter().flat_map(|number| std::iter::repeat_n(*number, within));
    (numbers.len() == groups).then(|| wide.collect())
}

/// A factor or a summand per channel after a normalisation becomes its scale or bias.
fn absorb(editor: &mut Editor, index: usize) -> Option<()> {
    let node = editor.node(index)?;
    let WithConstant { is_product, x: normed, constant: row } = WithConstant::of(editor, node)?;
    let output = node.outputs.first().copied().flatten()?;
    let name = node.name.clone();
    let (at, norm) = editor.producer(normed)?;
    let (Op::GroupNorm { .. } | Op::InstanceNorm { .. }) = norm.op else { return None };
    let [Some(x), Some(scale), Some(bias)] = norm.inputs[..] else { return None };
    if !editor.is_private(normed) || !editor.same_shape(normed, output) {
        return None;
    }
    let op = norm.op.clone();
    let channels = numbers(editor, scale)?.len();
    let row = channel_row(editor, row, editor.graph.shape(x)?.len(), channels)?;
    let (mut scales, mut biases) = (numbers(editor, scale)?, numbers(editor, bias)?);
    let product = |all: &mut Vec<f64>| all.iter_mut().zip(&row).for_each(|(x, by)| *x *= by);
    if is_product {
        product(&mut scales);
        product(&mut biases);
    } else {
        biases.iter_mut().zip(&row).for_each(|(x, by)| *x += by);
    }
    let dtype = editor.graph.value(x).dtype;
    let scales = content::float_tensor(dtype, vec![channels], &scales)?;
    let biases = content::float_tensor(dtype, vec![channels], &biases)?;
    let scale = editor.constant(&format!("{name}/scale"), scales);
    let bias = editor.constant(&format!("{name}/bias"), biases);
    editor.replace(index, op, vec![Some(x), Some(scale), Some(bias)]);
    editor.remove(at);
    Some(())
}

/// The numbers of a constant that varies only along dimension 1 of `rank`, one per channel.
fn channel_row(editor: &Editor, id: ValueId, rank: usize, channels: usize) -> Option<Vec<f64>> {
    let constant = editor.graph.constant(id)?;
    let shape = constant.shape();
    let missing = rank.checked_sub(shape.len())?;
    let is_row = (0..rank).all(|axis| match axis.checked_sub(missing) {
        Some(at) => shape[at] == if axis == 1 { channels } else { 1 },
        None => axis != 1,
    });
    let numbers = numbers(editor, id)?;
    match numbers[..] {
        [number] => Some(vec![number; channels]),
        _ => is_row.then_some(numbers),
    }
}

/// The numbers of a constant.
fn numbers(editor: &Editor, id: ValueId) -> Option<Vec<f64>> {
    let floats = content::floats(editor.graph.constant(id)?)?;
    Some(floats.into_iter().map(f64::from).collect())
}
