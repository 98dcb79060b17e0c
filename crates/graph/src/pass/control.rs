//! Control flow: constants go into bodies, and a branch that is known is taken.

use std::collections::HashMap;

use model::op::{ControlKind, Op};
use model::{DataType, ValueId};

use super::{Evaluator, optimize};
use crate::infer::Fact;
use crate::ir::{Graph, GraphNode};

/// Optimises bodies, moves captured constants into them, and replaces an `If` whose condition is
/// known by the branch it takes. Returns how many rewrites the graph itself got.
pub fn run(graph: &mut Graph, evaluator: Option<&dyn Evaluator>) -> usize {
    if graph.bodies.is_empty() {
        return 0;
    }
    let mut changes = 0;
    let mut index = 0;
    while index < graph.nodes.len() {
        let Op::Control(control) = &graph.nodes[index].op else {
            index += 1;
            continue;
        };
        let (kind, id) = (control.kind.clone(), control.id);
        changes += sink_constants(graph, index, &kind, id);
        match taken(graph, index, &kind) {
            Some(branch) => {
                inline(graph, index, id, branch);
                changes += 1;
            }
            None => index += 1,
        }
    }
    let used: Vec<u32> = graph
        .nodes
        .iter()
        .filter_map(|node| match &node.op {
            Op::Control(control) => Some(control.id),
            _ => None,
        })
        .collect();
    graph.bodies.retain(|id, _| used.contains(id));
    for body in graph.bodies.values_mut().flatten() {
        optimize(body, evaluator);
    }
    changes
}

/// Makes captured values that are constants by now constants of the bodies.
fn sink_constants(graph: &mut Graph, index: usize, kind: &ControlKind, id: u32) -> usize {
    let (first, arguments) = (kind.operands(), kind.arguments());
    let inputs = graph.nodes[index].inputs.clone();
    let mut moved = 0;
    for position in (first..inputs.len()).rev() {
        let tensor = inputs[position].and_then(|id| graph.constant(id)).cloned();
        let Some(tensor) = tensor else { continue };
        for body in graph.bodies.get_mut(&id).into_iter().flatten() {
            let inner = body.inputs.remove(arguments + position - first);
            body.set_constant(inner, tensor.clone());
        }
        graph.nodes[index].inputs.remove(position);
        moved += 1;
    }
    moved
}

/// The branch that is taken, when the condition is known.
fn taken(graph: &Graph, index: usize, kind: &ControlKind) -> Option<usize> {
    if *kind != ControlKind::If {
        return None;
    }
    let condition = graph.nodes[index].inputs.first().copied().flatten()?;
    let value = graph.value(condition);
    let known = match value.content.as_deref() {
        Some([dim]) => dim.fixed()? != 0,
        _ => {
            let tensor = graph.constant(condition)?;
            let single = tensor.len() == 1 && tensor.dtype() == DataType::Bool;
            *tensor.raw().filter(|_| single)?.first()? != 0
        }
    };
    Some(usize::from(!known))
}

/// Replaces node `index` by the nodes of one of its bodies.
fn inline(graph: &mut Graph, index: usize, id: u32, branch: usize) {
    let Some(mut bodies) = graph.bodies.remove(&id) else { return };
    if branch >= bodies.len() {
        return;
    }
    let body = bodies.swap_remove(branch);
    let node = graph.nodes.remove(index);
    let given: HashMap<ValueId, ValueId> = (body.inputs.iter())
        .zip(&node.inputs[1..])
        .filter_map(|(inner, outer)| Some((*inner, (*outer)?)))
        .collect();
    // Every other value of the body becomes one of the graph.
    let mut ids: Vec<ValueId> = Vec::with_capacity(body.values.len());
    for (at, value) in body.values.iter().enumerate() {
        let inner = ValueId(at as u32);
        ids.push(given.get(&inner).copied().unwrap_or_else(|| {
            let fact = Fact {
                dtype: value.dtype,
                shape: value.shape.clone(),
                content: value.content.clone(),
                narrow: value.narrow,
                kind: value.kind,
            };
            graph.add_value(value.name.clone(), fact)
        }));
    }
    for (inner, tensor) in body.constants.iter() {
        graph.constants.insert(ids[inner.index()], tensor.clone());
    }
    let first_free = graph.bodies.keys().max().map_or(0, |last| last + 1).max(id + 1);
    let map = |list: &[Option<ValueId>]| -> Vec<Option<ValueId>> {
        list.iter().map(|id| id.map(|id| ids[id.index()])).collect()
    };
    let mut nodes = Vec::with_capacity(body.nodes.len() + body.outputs.len());
    for inner in &body.nodes {
        let mut op = inner.op.clone();
        if let Op::Control(control) = &mut op {
            control.id += first_free;
        }
        let (inputs, outputs) = (map(&inner.inputs), map(&inner.outputs));
        nodes.push(GraphNode { name: inner.name.clone(), op, inputs, outputs });
    }
    for (number, inner) in body.bodies {
        graph.bodies.insert(number + first_free, inner);
    }
    for (output, inner) in node.outputs.iter().zip(&body.outputs) {
        let Some(output) = output else { continue };
        let source = ids[inner.index()];
        let value = graph.value(source);
        let (shape, content) = (value.shape.clone(), value.content.clone());
        let target = &mut graph.values[output.index()];
        (target.shape, target.content) = (shape, content);
        let name = node.name.clone();
        let (inputs, outputs) = (vec![Some(source)], vec![Some(*output)]);
        nodes.push(GraphNode { name, op: Op::Identity, inputs, outputs });
    }
    graph.nodes.splice(index..index, nodes);
}
