//! Removes operators that pass their operand on unchanged, and merges transposes.

use std::collections::HashMap;

use model::ValueId;
use model::op::{Binary, Op, Reduce};

use super::PassResult;
use crate::ir::{Graph, GraphNode};
use model::dim::SymDim;

/// Makes readers of no-ops read their operand. Returns how many nodes became dead or were merged.
pub fn run(graph: &mut Graph) -> usize {
    noted(graph).rewrites
}

/// The same; a permutation that is written down is a change.
pub(super) fn noted(graph: &mut Graph) -> PassResult {
    let outputs: Vec<bool> = {
        let mut flags = vec![false; graph.values.len()];
        graph.outputs.iter().for_each(|id| flags[id.index()] = true);
        flags
    };
    let mut alias: HashMap<ValueId, ValueId> = HashMap::new();
    let mut transposed: HashMap<ValueId, (ValueId, Vec<usize>)> = HashMap::new();
    let (mut count, mut written) = (0, false);
    let mut nodes = std::mem::take(&mut graph.nodes);
    nodes.retain_mut(|node| {
        for input in node.inputs.iter_mut().flatten() {
            if let Some(source) = alias.get(input) {
                *input = *source;
            }
        }
        let unwritten = |op: &Op| matches!(op, Op::Transpose { perm: None });
        let before = unwritten(&node.op);
        count += usize::from(merge_transpose(graph, node, &mut transposed));
        written |= before && !unwritten(&node.op);
        let [Some(output)] = node.outputs.as_slice() else { return true };
        let Some(source) = passed_on(graph, node, *output) else { return true };
        if outputs[output.index()] {
            count += usize::from(node.op != Op::Identity);
            (node.op, node.inputs) = (Op::Identity, vec![Some(source)]);
            return true;
        }
        alias.insert(*output, source);
        count += 1;
        false
    });
    graph.nodes = nodes;
    let rewrites = count + rename_outputs(graph);
    PassResult { rewrites, changed: written || rewrites > 0 }
}

/// An output that is only passed on is renamed to the value itself.
fn rename_outputs(graph: &mut Graph) -> usize {
    let producers = graph.producers();
    let mut renamed: HashMap<ValueId, ValueId> = HashMap::new();
    let mut drop: Vec<usize> = Vec::new();
    for (index, node) in graph.nodes.iter().enumerate() {
        if node.op != Op::Identity {
            continue;
        }
        let (Some(Some(source)), Some(Some(output))) = (node.inputs.first(), node.outputs.first())
        else {
            continue;
        };
        if let Some(tensor) = graph.constants.shared(*source) {
            graph.constants.insert(*output, tensor);
            graph.values[output.index()].content = graph.values[source.index()].content.clone();
            drop.push(index);
        } else if producers[source.index()].is_some()
            && !graph.outputs.contains(source)
            && !renamed.contains_key(source)
        {
            renamed.insert(*source, *output);
            drop.push(index);
        }
    }
    if drop.is_empty() {
        return 0;
    }
    let mut index = 0;
    let mut dropped = drop.iter().peekable();
    graph.nodes.retain(|_| {
        index += 1;
        dropped.next_if(|d| **d == index - 1).is_none()
    });
    for node in &mut graph.nodes {
        for id in node.inputs.iter_mut().chain(&mut node.outputs).flatten() {
            if let Some(output) = renamed.get(id) {
                *id = *output;
            }
        }
    }
    drop.len()
}

/// A transpose of a transpose is one of the original.
fn merge_transpose(
    graph: &Graph,
    node: &mut GraphNode,
    transposed: &mut HashMap<ValueId, (ValueId, Vec<usize>)>,
) -> bool {
    let (Op::Transpose { perm }, Some(Some(input))) = (&node.op, node.inputs.first()) else {
        return false;
    };
    let Some(rank) = graph.shape(*input).map(<[SymDim]>::len) else { return false };
    let perm = perm.clone().unwrap_or_else(|| (0..rank).rev().collect());
    let (source, merged, changed) = match transposed.get(input) {
        Some((source, inner)) if perm.iter().all(|axis| *axis < inner.len()) => {
            (*source, perm.iter().map(|axis| inner[*axis]).collect(), true)
        }
        _ => (*input, perm, false),
    };
    if let Some(Some(output)) = node.outputs.first() {
        transposed.insert(*output, (source, merged.clone()));
    }
    node.op = Op::Transpose { perm: Some(merged) };
    node.inputs = vec![Some(source)];
    changed
}

/// The operand that is also the output, when the node changes nothing.
fn passed_on(graph: &Graph, node: &GraphNode, output: ValueId) -> Option<ValueId> {
    let x = node.inputs.first().copied().flatten()?;
    let same = |id: ValueId| same_dims(graph.shape(id), graph.shape(output));
    let alone = node.inputs.iter().flatten().count() == 1;
    let all = |id: Option<&Option<ValueId>>, number: i64| {
        let content = id.copied().flatten().and_then(|id| graph.value(id).content.as_deref());
        content.is_some_and(|content| content.iter().all(|element| element.is(number)))
    };
    let nothing = match &node.op {
        Op::Identity => true,
        Op::Cast(cast) => graph.value(x).dtype == cast.to,
        Op::Transpose { perm: Some(perm) } => perm.iter().copied().eq(0..perm.len()),
        Op::Reshape { .. } | Op::Flatten { .. } | Op::Squeeze | Op::Unsqueeze => same(x),
        Op::Expand => same(x),
        Op::Tile => all(node.inputs.get(1), 1),
        Op::Concat { .. } | Op::Variadic(_) | Op::Split { .. } | Op::Clip => alone,
        Op::Slice => same(x) && (node.inputs.len() < 5 || all(node.inputs.get(4), 1)),
        Op::Pad { .. } => all(node.inputs.get(1), 0),
        Op::Binary(Binary::Mul) if all(node.inputs.first(), 1) => {
            let other = node.inputs.get(1).copied().flatten()?;
            return same(other).then_some(other);
        }
        Op::Binary(Binary::Mul | Binary::Div) => all(node.inputs.get(1), 1) && same(x),
        Op::Binary(Binary::Add) if all(node.inputs.first(), 0) => {
            let other = node.inputs.get(1).copied().flatten()?;
            return same(other).then_some(other);
        }
        Op::Binary(Binary::Add | Binary::Sub) => all(node.inputs.get(1), 0) && same(x),
        Op::Binary(Binary::Pow) => all(node.inputs.get(1), 1) && same(x),
        Op::Reduce(Reduce { noop_with_empty_axes: true, kind, .. }) => {
            use model::op::ReduceKind::{Max, Mean, Min, Prod, Sum};
            alone && matches!(kind, Max | Mean | Min | Prod | Sum)
        }
        _ => false,
    };
    nothing.then_some(x)
}

fn same_dims(a: Option<&[SymDim]>, b: Option<&[SymDim]>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.is_same(b)),
        _ => false,
    }
}
