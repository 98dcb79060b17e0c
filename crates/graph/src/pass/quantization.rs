//! Keeps quantized values as bytes: between operators that only move or compare them, and as
//! weights of quantized products.

use std::collections::HashSet;

use model::op::{Op, PoolKind};
use model::{DataType, Tensor, ValueId};

use super::editor::{Editor, first};
use crate::ir::{Graph, GraphNode};

/// The most operators between dequantization and quantization.
const MAX_CHAIN: usize = 8;

/// Removes quantization behind dequantization with the same parameters. What is between them runs
/// on bytes. Returns how many.
pub fn run(graph: &mut Graph) -> usize {
    let mut editor = Editor::new(graph);
    for index in 0..editor.len() {
        rewrite(&mut editor, index);
    }
    editor.finish()
}

/// Whether a byte is the result of `op` exactly if its number is: the order of bytes is that of
/// their numbers.
fn takes_bytes(op: &Op) -> bool {
    op.only_moves() || matches!(op, Op::Pool(pool) if pool.kind == PoolKind::Max)
}

fn rewrite(editor: &mut Editor, index: usize) -> Option<()> {
    let node = editor.node(index)?;
    let Op::QuantizeLinear { .. } = node.op else { return None };
    let dtype = editor.graph.value(first(&node.outputs)?).dtype;
    let quantum = parameters(editor.graph, node)?;
    let mut chain = Vec::new();
    let mut id = first(&node.inputs)?;
    let bytes = loop {
        let (at, producer) = editor.producer(id)?;
        if let Op::DequantizeLinear { .. } = producer.op {
            let same = parameters(editor.graph, producer)? == quantum;
            break first(&producer.inputs).filter(|_| same)?;
        }
        if !takes_bytes(&producer.op) || !editor.is_private(id) || chain.len() == MAX_CHAIN {
            return None;
        }
        chain.push(at);
        id = first(&producer.inputs)?;
    };
    if editor.graph.value(bytes).dtype != dtype {
        return None;
    }
    let mut moved = bytes;
    for (place, at) in chain.iter().enumerate().rev() {
        let node = editor.node(*at)?.clone();
        let inputs = with_first(&node, moved);
        if place == 0 {
            editor.replace(index, node.op, inputs);
        } else {
            moved = editor.insert(index, &node.name, node.op, inputs)?;
        }
    }
    if chain.is_empty() {
        editor.replace(index, Op::Identity, vec![Some(bytes)]);
    }
    chain.into_iter().for_each(|at| editor.remove(at));
    Some(())
}

fn with_first(node: &GraphNode, id: ValueId) -> Vec<Option<ValueId>> {
    let mut inputs = node.inputs.clone();
    inputs[0] = Some(id);
    inputs
}

/// The constant scale and zero point of a whole tensor; no zero point is zero.
fn parameters(graph: &Graph, node: &GraphNode) -> Option<(f32, i64)> {
    let single = |tensor: &&Tensor| tensor.len() == 1;
    let scale = graph.constant_float(node.inputs.get(1).copied().flatten()?)?;
    let zero = match node.inputs.get(2).copied().flatten() {
        Some(id) => crate::content::ints(graph.constant(id).filter(single)?)?[0],
        None => 0,
    };
    Some((scale, zero))
}

/// The dequantized weights of products of bytes. They are not computed ahead: the bytes are what a
/// device with such products needs, and the others compute the numbers when they load a plan.
pub(super) fn weights_in_bytes(graph: &Graph) -> HashSet<ValueId> {
    let dequantizes = |node: &GraphNode| matches!(node.op, Op::DequantizeLinear { .. });
    if !graph.nodes.iter().any(dequantizes) {
        return HashSet::new();
    }
    let producers = graph.producers();
    let dequantized = |id: Option<ValueId>| -> Option<ValueId> {
        let node = &graph.nodes[producers[id?.index()]?];
        let x = first(&node.inputs)?;
        let is_byte = matches!(graph.value(x).dtype, DataType::U8 | DataType::I8);
        (matches!(node.op, Op::DequantizeLinear { .. }) && is_byte).then_some(x)
    };
    let mut weights = HashSet::new();
    let mut others: HashSet<ValueId> = graph.outputs.iter().copied().collect();
    for node in &graph.nodes {
        let value = |index: usize| node.inputs.get(index).copied().flatten();
        let weight = match &node.op {
            Op::Conv(conv) => value(1).filter(|id| {
                // A filter for each channel is no product.
                let channels = graph.shape(*id).and_then(|shape| shape.get(1)?.size());
                conv.groups == 1 || channels != Some(1)
            }),
            Op::MatMul(_) | Op::Gemm(_) => value(1),
            _ => None,
        };
        let activations =
            dequantized(value(0)).filter(|x| graph.constant(*x).is_none() && value(0) != value(1));
        let weight = weight.filter(|id| activations.is_some() && dequantized(Some(*id)).is_some());
        weights.extend(weight);
        others.extend(node.inputs.iter().flatten().filter(|id| Some(**id) != weight));
    }
    weights.retain(|id| !others.contains(id));
    weights
}
