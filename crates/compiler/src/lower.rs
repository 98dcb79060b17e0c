//! Lowers the IR to a launch plan.

use std::sync::Arc;

use graph::{Graph, SymDim};
use model::op::{Body, Control, Op};
use model::{LaunchPlan, Step, Tensor, ValueId, ValueInfo};

use crate::CompileError;

/// The plan that computes `graph`: values renumbered, steps in an order that keeps few values
/// alive.
pub fn lower(graph: &Graph) -> Result<LaunchPlan, CompileError> {
    let order = order(graph);
    let mut numbering =
        Numbering { graph, plan: LaunchPlan::default(), ids: vec![None; graph.values.len()] };
    for id in &graph.inputs {
        let id = numbering.id(*id);
        numbering.plan.inputs.push(id);
    }
    for index in order {
        let node = &graph.nodes[index];
        let mut map = |ids: &[Option<ValueId>]| -> Vec<Option<ValueId>> {
            ids.iter().map(|id| id.map(|id| numbering.id(id))).collect()
        };
        let (mut inputs, outputs) = (map(&node.inputs), map(&node.outputs));
        let op = match &node.op {
            Op::Control(control) => numbering.control(control, &mut inputs)?,
            op => op.clone(),
        };
        let step = Step { name: node.name.clone(), op, inputs, outputs, last_uses: vec![] };
        numbering.plan.steps.push(step);
    }
    for id in &graph.outputs {
        let id = numbering.id(*id);
        numbering.plan.outputs.push(id);
    }
    let mut plan = numbering.plan;
    plan.warnings.clone_from(&graph.warnings);
    plan.plan_lifetimes();
    plan.check()?;
    Ok(plan)
}

struct Numbering<'a> {
    graph: &'a Graph,
    plan: LaunchPlan,
    ids: Vec<Option<ValueId>>,
}

impl Numbering<'_> {
    /// Control flow with its bodies as plans. Their constants become operands, so that a device
    /// holds and counts them like all others.
    fn control(
        &mut self,
        control: &Control,
        inputs: &mut Vec<Option<ValueId>>,
    ) -> Result<Op, CompileError> {
        let captured: Vec<usize> = (control.kind.operands()..inputs.len()).collect();
        let mut bodies = Vec::new();
        for graph in self.graph.bodies.get(&control.id).into_iter().flatten() {
            let mut plan = lower(graph)?;
            let mut operands = captured.clone();
            for (id, tensor) in std::mem::take(&mut plan.constants) {
                operands.push(inputs.len());
                inputs.push(Some(self.lifted(plan.value(id).clone(), tensor)));
                plan.inputs.push(id);
            }
            plan.plan_lifetimes();
            bodies.push(Body { plan: Arc::new(plan), operands });
        }
        Ok(Op::Control(Control { kind: control.kind.clone(), id: control.id, bodies }))
    }

    /// A constant that no value of the graph is.
    fn lifted(&mut self, info: ValueInfo, tensor: Tensor) -> ValueId {
        let id = ValueId(self.plan.values.len() as u32);
        self.plan.values.push(info);
        self.plan.constants.push((id, tensor));
        id
    }

    fn id(&mut self, id: ValueId) -> ValueId {
        if let Some(known) = self.ids[id.index()] {
            return known;
        }
        let new = ValueId(self.plan.values.len() as u32);
        self.ids[id.index()] = Some(new);
        let value = self.graph.value(id);
        self.plan.values.push(ValueInfo {
            name: value.name.clone(),
            dtype: value.dtype,
            shape: value.shape.as_ref().map(|shape| shape.iter().map(Into::into).collect()),
        });
        if let Some(tensor) = self.graph.constant(id) {
            self.plan.constants.push((new, tensor.clone()));
        }
        new
    }
}

/// Depth first from the outputs: a value is computed shortly before its first reader. Of several
/// operands the largest is computed first, so that less memory is held while the others run.
fn order(graph: &Graph) -> Vec<usize> {
    let producers = graph.producers();
    let needs = |index: usize| -> Vec<usize> {
        let mut needed: Vec<usize> = graph.nodes[index]
            .inputs
            .iter()
            .flatten()
            .filter_map(|id| producers[id.index()])
            .collect();
        needed.dedup();
        needed
    };
    let mut order = Vec::with_capacity(graph.nodes.len());
    let mut placed = vec![false; graph.nodes.len()];
    let mut stack: Vec<(usize, bool)> = Vec::new();
    let roots = graph.outputs.iter().filter_map(|id| producers[id.index()]);
    for root in roots.chain(0..graph.nodes.len()) {
        stack.push((root, false));
        while let Some((index, expanded)) = stack.pop() {
            if placed[index] {
                continue;
            }
            if expanded {
                placed[index] = true;
                order.push(index);
                continue;
            }
            stack.push((index, true));
            let mut needed = needs(index);
            needed.retain(|other| !placed[*other]);
            // The last one pushed runs first: the longest chains, that is the latest in the file.
            needed.sort_by_key(|other| (weight(graph, *other), *other));
            stack.extend(needed.into_iter().map(|other| (other, false)));
        }
    }
    order
}

/// Bytes of a node's outputs as far as they are known; symbols count as one.
fn weight(graph: &Graph, index: usize) -> u64 {
    let one = |_: &str| Some(1);
    let bytes = |id: &ValueId| -> Option<u64> {
        let value = graph.value(*id);
        let size = value.dtype.size_bytes()? as u64;
        let dims = value.shape.as_ref()?.iter().map(|dim: &SymDim| {
            dim.substitute(&one).fixed().and_then(|size| u64::try_from(size).ok())
        });
        dims.collect::<Option<Vec<u64>>>()?.into_iter().try_fold(size, u64::checked_mul)
    };
    graph.nodes[index].outputs.iter().flatten().filter_map(bytes).sum()
}

#[cfg(test)]
mod tests {
    use graph::infer::Fact;
    use graph::ir::GraphNode;
    use model::op::{Binary, Op, Unary};
    use model::{DataType, Dim};

    use super::*;

    fn value(graph: &mut Graph, name: &str) -> ValueId {
        let dims = vec![SymDim::symbol("n"), SymDim::Fixed(4)];
        graph.add_value(name, Fact::new(DataType::F32, Some(dims)))
    }

    fn push(graph: &mut Graph, op: Op, inputs: &[ValueId]) -> ValueId {
        let name = format!("v{}", graph.values.len());
        let output = value(graph, &name);
        let inputs = inputs.iter().map(|id| Some(*id)).collect();
        graph.nodes.push(GraphNode { name, op, inputs, outputs: vec![Some(output)] });
        output
    }

    /// Many branches of the input, each added to the sum at once.
    fn fan(width: usize) -> Graph {
        let mut graph = Graph::default();
        let x = value(&mut graph, "x");
        graph.inputs.push(x);
        let branches: Vec<ValueId> =
            (0..width).map(|_| push(&mut graph, Op::Unary(Unary::Abs), &[x])).collect();
        let add = Op::Binary(Binary::Add);
        let sum = branches[1..]
            .iter()
            .fold(branches[0], |sum, branch| push(&mut graph, add.clone(), &[sum, *branch]));
        graph.outputs.push(sum);
        graph
    }

    #[test]
    fn branches_are_computed_before_their_first_reader() {
        let plan = lower(&fan(16)).unwrap();
        assert_eq!(plan.steps.len(), 31);
        assert_eq!(plan.values[0].shape, Some(vec![Dim::Symbol("n".to_string()), Dim::Fixed(4)]));
        let peak = crate::memory::peak_activation_bytes(&plan, &[("n", 2)]).unwrap();
        // The input, the sum so far, one branch and the next sum; the file's order would need 17.
        assert_eq!(peak, 4 * 2 * 4 * 4);
        assert_eq!(crate::memory::peak_activation_bytes(&plan, &[]), None);
    }

    #[test]
    fn lowering_is_deterministic_and_drops_what_is_unused() {
        let mut graph = fan(5);
        value(&mut graph, "unused");
        let (one, two) = (lower(&graph).unwrap(), lower(&graph).unwrap());
        assert_eq!((&one.steps, &one.values), (&two.steps, &two.values));
        assert_eq!(one.values.len(), 10);
    }
}
