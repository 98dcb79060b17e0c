//! Gathers at positions that enumerate all of their operand become reshapes.
//!
//! Exporters write `mask[:, None, None, :]` as a gather at the positions `[row, token]` of every
//! row and token, or at `row * tokens + token` of the flattened mask. As a gather it reads rows by
//! number, so that nothing shows that rows are independent.

use model::ValueId;
use model::dim::SymDim;
use model::op::{Binary, Op};

use super::editor::{Editor, first, pair};
use super::reshape::plain;
use crate::ir::Graph;

/// Operators between a range and a gather, at most.
const MAX_DEPTH: usize = 24;

/// Integers that are linear in their own position: an offset, and what each axis adds per step.
#[derive(Clone, Debug)]
struct Linear {
    offset: SymDim,
    steps: Vec<SymDim>,
}

/// Replaces such gathers. Returns how many.
pub fn run(graph: &mut Graph) -> usize {
    let mut editor = Editor::new(graph);
    for index in 0..editor.len() {
        rewrite(&mut editor, index);
    }
    editor.finish()
}

fn rewrite(editor: &mut Editor, index: usize) -> Option<()> {
    let node = editor.node(index)?;
    let (data, indices) = pair(&node.inputs)?;
    let output = first(&node.outputs)?;
    let source = match node.op {
        Op::Gather { axis: 0 } => enumerated(editor, data, indices)?,
        Op::GatherNd { batch_dims: 0 } => enumerated_nd(editor, data, indices)?,
        _ => return None,
    };
    let dims = plain(editor, source, output)?;
    let name = format!("{}/shape", editor.node(index)?.name);
    let shape = editor.ints(&name, &dims)?;
    editor.replace(index, Op::Reshape { allow_zero: false }, vec![Some(source), Some(shape)]);
    Some(())
}

/// The value whose leading dimensions `indices` enumerate in order: `data`, or what it is a reshape
/// of.
fn enumerated(editor: &Editor, data: ValueId, indices: ValueId) -> Option<ValueId> {
    let linear = linear(editor, indices, 0)?;
    let sizes = editor.graph.shape(indices)?;
    let (rows, rest) = editor.graph.shape(data)?.split_first()?;
    let reshaped = editor.op(data).filter(|(op, _)| op.is_reshape());
    let sources = [Some(data), reshaped.and_then(|(_, inputs)| first(inputs))];
    sources.into_iter().flatten().find(|source| {
        let Some(dims) = editor.graph.shape(*source) else { return false };
        (1..=dims.len()).any(|leading| {
            let (leading, others) = dims.split_at(leading);
            product(leading).is_same(rows)
                && product(others).is_same(&product(rest))
                && counts_through(&linear, sizes, leading)
        })
    })
}

/// Whether `linear`, of these sizes, is the number of every element of `dims` in order.
fn counts_through(linear: &Linear, sizes: &[SymDim], dims: &[SymDim]) -> bool {
    let axes = || sizes.iter().zip(&linear.steps).filter(|(size, _)| !size.is(1));
    let strides = (0..dims.len()).map(|axis| product(&dims[axis + 1..]));
    let wanted: Vec<_> = dims.iter().zip(strides).filter(|(dim, _)| !dim.is(1)).collect();
    linear.offset.is(0)
        && axes().count() == wanted.len()
        && axes()
            .zip(&wanted)
            .all(|((size, step), (dim, stride))| size.is_same(dim) && step.is_same(stride))
}

/// `data`, when the lists of positions in `indices` enumerate its leading dimensions in order.
fn enumerated_nd(editor: &Editor, data: ValueId, indices: ValueId) -> Option<ValueId> {
    let last = editor.graph.shape(indices)?.len().checked_sub(1)?;
    let parts: Vec<ValueId> = match editor.op(indices) {
        Some((Op::Concat { axis }, inputs)) if [-1, last as i64].contains(axis) => {
            inputs.iter().copied().collect::<Option<_>>()?
        }
        _ => vec![indices],
    };
    let dims = editor.graph.shape(data)?.get(..parts.len())?;
    let mut at = 0;
    for (part, dim) in parts.iter().zip(dims) {
        let (linear, sizes) = (linear(editor, *part, 0)?, editor.graph.shape(*part)?);
        if sizes.len() != last + 1 || !sizes[last].is(1) || !linear.offset.is(0) {
            return None;
        }
        // Its one axis lies behind those of the parts before; axes of one element add nothing.
        let is_own = |axis: &usize| !sizes[*axis].is(1) && !linear.steps[*axis].is(0);
        let mut own = (0..last).filter(is_own);
        match (own.next(), dim.is(1)) {
            (None, true) => {}
            (Some(axis), false) if own.next().is_none() && axis >= at => {
                if !linear.steps[axis].is(1) || !sizes[axis].is_same(dim) {
                    return None;
                }
                at = axis + 1;
            }
            _ => return None,
        }
    }
    // Every axis of the positions belongs to a part, so that none is repeated.
    let elements = product(editor.graph.shape(indices)?.get(..last)?);
    elements.is_same(&product(dims)).then_some(data)
}

fn product(dims: &[SymDim]) -> SymDim {
    dims.iter().fold(SymDim::Fixed(1), |product, dim| product.mul(dim))
}

/// How the elements of `id` follow from their position, if they are linear in it.
fn linear(editor: &Editor, id: ValueId, depth: usize) -> Option<Linear> {
    let sizes = editor.graph.shape(id)?;
    if let Some([only]) = editor.graph.value(id).content.as_deref() {
        let known = (*only != SymDim::Unknown).then(|| only.clone())?;
        return Some(Linear { offset: known, steps: vec![SymDim::Fixed(0); sizes.len()] });
    }
    if depth == MAX_DEPTH {
        return None;
    }
    let (op, inputs) = editor.op(id)?;
    let of = |input: ValueId| linear(editor, input, depth + 1);
    match op {
        Op::Range => {
            let number = |at: usize| {
                let input = inputs.get(at).copied().flatten()?;
                match editor.graph.value(input).content.as_deref()? {
                    [SymDim::Unknown] => None,
                    [only] => Some(only.clone()),
                    _ => None,
                }
            };
            Some(Linear { offset: number(0)?, steps: vec![number(2)?] })
        }
        Op::Identity => of(first(inputs)?),
        Op::Cast(_) if !editor.graph.value(id).dtype.is_float() => of(first(inputs)?),
        op if op.is_reshape() => {
            let input = first(inputs)?;
            reshaped(&of(input)?, editor.graph.shape(input)?, sizes)
        }
        Op::Expand => {
            let input = first(inputs)?;
            broadcast(&of(input)?, editor.graph.shape(input)?, sizes.len())
        }
        Op::Binary(binary @ (Binary::Add | Binary::Sub | Binary::Mul)) => {
            let (a, b) = pair(inputs)?;
            let wide =
                |input: ValueId| broadcast(&of(input)?, editor.graph.shape(input)?, sizes.len());
            combined(*binary, &wide(a)?, &wide(b)?)
        }
        _ => None,
    }
}

/// The same elements with other axes of one element.
fn reshaped(linear: &Linear, from: &[SymDim], to: &[SymDim]) -> Option<Linear> {
    let mut long = from.iter().zip(&linear.steps).filter(|(size, _)| !size.is(1));
    let mut steps = Vec::with_capacity(to.len());
    for size in to {
        steps.push(match size.is(1) {
            true => SymDim::Fixed(0),
            false => long.next().filter(|(own, _)| own.is_same(size))?.1.clone(),
        });
    }
    let offset = linear.offset.clone();
    long.next().is_none().then_some(Linear { offset, steps })
}

/// The same elements, repeated along further axes.
fn broadcast(linear: &Linear, sizes: &[SymDim], rank: usize) -> Option<Linear> {
    let mut steps = vec![SymDim::Fixed(0); rank.checked_sub(sizes.len())?];
    let own = sizes.iter().zip(&linear.steps);
    // An axis of one element may be repeated.
    steps.extend(own.map(|(size, step)| if size.is(1) { SymDim::Fixed(0) } else { step.clone() }));
    Some(Linear { offset: linear.offset.clone(), steps })
}

fn combined(op: Binary, a: &Linear, b: &Linear) -> Option<Linear> {
    let is_number = |linear: &Linear| linear.steps.iter().all(|step| step.is(0));
    let each = |f: &dyn Fn(&SymDim, &SymDim) -> SymDim| {
        let steps = a.steps.iter().zip(&b.steps).map(|(a, b)| f(a, b)).collect();
        Linear { offset: f(&a.offset, &b.offset), steps }
    };
    let scaled = |linear: &Linear, by: &SymDim| Linear {
        offset: linear.offset.mul(by),
        steps: linear.steps.iter().map(|step| step.mul(by)).collect(),
    };
    match op {
        Binary::Add => Some(each(&SymDim::add)),
        Binary::Sub => Some(each(&SymDim::sub)),
        Binary::Mul if is_number(b) => Some(scaled(a, &b.offset)),
        Binary::Mul if is_number(a) => Some(scaled(b, &a.offset)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use model::DataType;

    use super::*;
    use crate::pass::testing::Builder;

    /// Positions along an axis of a mask, as exporters count them.
    fn range(b: &mut Builder, mask: ValueId, axis: i64, start: i64, axes: &[i64]) -> ValueId {
        let shape = b.node(Op::Shape { start: 0, end: None }, &[mask]);
        let at = scalar(b, axis);
        let size = b.node(Op::Gather { axis: 0 }, &[shape, at]);
        let (start, one) = (scalar(b, start), scalar(b, 1));
        let range = b.node(Op::Range, &[start, size, one]);
        let axes = b.ints(axes);
        b.node(Op::Unsqueeze, &[range, axes])
    }

    fn scalar(b: &mut Builder, value: i64) -> ValueId {
        let tensor = model::Tensor::from_vec(vec![], vec![value]).unwrap();
        b.graph.add_constant("number", tensor)
    }

    fn symbols() -> [SymDim; 2] {
        [SymDim::symbol("batch"), SymDim::symbol("tokens")]
    }

    /// `mask[rows, tokens]` by lists of positions.
    fn by_lists(start: i64, swapped: bool) -> Graph {
        let mut b = Builder::default();
        let mask = b.input("mask", &symbols());
        let rows = range(&mut b, mask, 0, start, &[1, 2, 3]);
        let tokens = range(&mut b, mask, 1, 0, &[0, 1, 2]);
        let sum = b.node(Op::Binary(Binary::Add), &[rows, tokens]);
        let shape = b.node(Op::Shape { start: 0, end: None }, &[sum]);
        let last = b.ints(&[-1]);
        let mut parts = [rows, tokens].map(|part| {
            let wide = b.node(Op::Expand, &[part, shape]);
            b.node(Op::Unsqueeze, &[wide, last])
        });
        if swapped {
            parts.reverse();
        }
        let indices = b.node(Op::Concat { axis: -1 }, &parts);
        let y = b.node(Op::GatherNd { batch_dims: 0 }, &[mask, indices]);
        b.output(y)
    }

    /// The same by numbers of elements of the flattened mask.
    fn by_numbers(step: i64) -> Graph {
        let mut b = Builder::default();
        let mask = b.input("mask", &symbols());
        let rows = range(&mut b, mask, 0, 0, &[1, 2, 3]);
        let tokens = range(&mut b, mask, 1, 0, &[0, 1, 2]);
        let shape = b.node(Op::Shape { start: 0, end: None }, &[mask]);
        let at = b.ints(&[step]);
        let width = b.node(Op::Gather { axis: 0 }, &[shape, at]);
        let first = b.node(Op::Binary(Binary::Mul), &[rows, width]);
        let numbers = b.node(Op::Binary(Binary::Add), &[tokens, first]);
        let flat = b.node(Op::Flatten { axis: 2 }, &[mask]);
        let y = b.node(Op::Gather { axis: 0 }, &[flat, numbers]);
        b.output(y)
    }

    fn reshapes(graph: &Graph) -> usize {
        graph.nodes.iter().filter(|node| matches!(node.op, Op::Reshape { .. })).count()
    }

    #[test]
    fn gathers_of_everything_in_order_are_reshapes() {
        for (mut graph, rank) in [(by_lists(0, false), 4), (by_numbers(1), 5)] {
            let before = graph.shape(graph.outputs[0]).unwrap().to_vec();
            assert_eq!(run(&mut graph), 1);
            assert_eq!(reshapes(&graph), 1);
            graph.infer_all().unwrap();
            let output = graph.outputs[0];
            assert_eq!(graph.shape(output).unwrap(), before);
            assert_eq!((before.len(), graph.value(output).dtype), (rank, DataType::F32));
        }
    }

    #[test]
    fn other_gathers_stay() {
        // From the second row on; positions of the transposed mask; rows that are as far apart as
        // there are rows.
        for mut graph in [by_lists(1, false), by_lists(0, true), by_numbers(0)] {
            assert_eq!((run(&mut graph), reshapes(&graph)), (0, 0));
        }
    }
}
