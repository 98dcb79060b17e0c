//! Control flow as steps that run bodies: what cannot be written out.

use model::dim::SymDim;
use model::op::{Control, ControlKind, Op, Scan};
use model::{DataType, ValueId};

use super::super::attributes::Attributes;
use super::control::{Controlled, invalid, unsupported};
use super::{Importer, SourceNode};
use crate::infer::{Fact, Shape, common};
use crate::ir::{Graph, GraphNode};

/// How often the shapes of a state are tried: each time less of them is assumed.
const MAX_TRIES: usize = 4;

/// The operands of a node and what its bodies capture.
struct Operands {
    kind: ControlKind,
    inputs: Vec<Option<ValueId>>,
    /// Names and values that bodies read from outside and that are no constants.
    captured: Vec<(String, ValueId)>,
    /// The same for constants, which every body gets for itself.
    constants: Vec<(String, ValueId)>,
}

impl Importer<'_> {
    /// Adds a node that runs the bodies of `node`; returns its outputs.
    pub(super) fn structure(
        &mut self,
        node: &SourceNode,
        inputs: &[Option<ValueId>],
    ) -> Controlled<Vec<ValueId>> {
        let operands = self.operands(node, inputs)?;
        let bodies = match &operands.kind {
            ControlKind::If => {
                let mut bodies = Vec::with_capacity(2);
                for name in ["then_branch", "else_branch"] {
                    bodies.push(self.body_graph(node, name, &operands, &[])?);
                }
                bodies
            }
            ControlKind::Loop { carried } => {
                let own = [DataType::I64, DataType::Bool];
                let fixed = own.map(|dtype| Fact::new(dtype, Some(vec![]))).to_vec();
                vec![self.stable_body(node, &operands, fixed, 2, *carried, 1, vec![])?]
            }
            ControlKind::Scan(scan) => {
                let carried = scan.carried;
                let slices = self.slices(&operands, scan)?;
                vec![self.stable_body(node, &operands, vec![], 0, carried, 0, slices)?]
            }
        };
        self.add_control(node, operands, bodies)
    }

    fn operands(&self, node: &SourceNode, inputs: &[Option<ValueId>]) -> Controlled<Operands> {
        let kind = match node.proto.op_type.as_str() {
            "If" => ControlKind::If,
            "Loop" => match inputs.len().checked_sub(2) {
                Some(carried) => ControlKind::Loop { carried },
                None => return invalid("a loop without rounds and condition"),
            },
            _ => ControlKind::Scan(self.scan(node, inputs.len())?),
        };
        let needed = if kind == ControlKind::If { 0 } else { 2 };
        let first = if matches!(kind, ControlKind::Loop { .. }) { needed } else { 0 };
        if inputs.iter().skip(first).any(Option::is_none) {
            return invalid("an input is missing");
        }
        let (mut captured, mut constants) = (Vec::new(), Vec::new());
        for name in &node.captures {
            let Some(id) = self.names.get(name) else { continue };
            match self.graph.constant(*id) {
                Some(_) => constants.push((name.clone(), *id)),
                None => captured.push((name.clone(), *id)),
            }
        }
        Ok(Operands { kind, inputs: inputs.to_vec(), captured, constants })
    }

    fn scan(&self, node: &SourceNode, inputs: usize) -> Controlled<Scan> {
        if node.opsets.version("") < 9 {
            return unsupported("Scan before opset 9");
        }
        let attributes = Attributes::new(&node.proto.attributes);
        let scanned = attributes.size_or("num_scan_inputs", 0)?;
        let list = |name: &str| attributes.ints(name).map(<[i64]>::to_vec).unwrap_or_default();
        let Some(carried) = inputs.checked_sub(scanned).filter(|_| scanned > 0) else {
            return invalid(format!("{scanned} scanned inputs of {inputs}"));
        };
        let collected = node.proto.outputs.len().saturating_sub(carried);
        let pairs = |axes: Vec<i64>, directions: Vec<i64>, count: usize| {
            let at = |list: &[i64], index: usize| list.get(index).copied().unwrap_or(0);
            (0..count).map(|index| (at(&axes, index), at(&directions, index) == 1)).collect()
        };
        Ok(Scan {
            carried,
            inputs: pairs(list("scan_input_axes"), list("scan_input_directions"), scanned),
            outputs: pairs(list("scan_output_axes"), list("scan_output_directions"), collected),
        })
    }

    /// What is known of the slices of a scan's sequences.
    fn slices(&self, operands: &Operands, scan: &Scan) -> Controlled<Vec<Fact>> {
        let mut slices = Vec::with_capacity(scan.inputs.len());
        for ((axis, _), id) in scan.inputs.iter().zip(&operands.inputs[scan.carried..]) {
            let Some(id) = id else { return invalid("a sequence is missing") };
            let value = self.graph.value(*id);
            let shape = match &value.shape {
                None => None,
                Some(dims) => {
                    let at = if *axis < 0 { axis + dims.len() as i64 } else { *axis };
                    let at = usize::try_from(at).ok().filter(|at| *at < dims.len());
                    let Some(at) = at else { return invalid(format!("axis {axis}")) };
                    let mut dims = dims.clone();
                    dims.remove(at);
                    Some(dims)
                }
            };
            slices.push(Fact::new(value.dtype, shape));
        }
        Ok(slices)
    }

    /// A body whose state has the same shapes before and after a round. Sizes that change are not
    /// known.
    #[allow(clippy::too_many_arguments)]
    fn stable_body(
        &mut self,
        node: &SourceNode,
        operands: &Operands,
        fixed: Vec<Fact>,
        first: usize,
        carried: usize,
        given: usize,
        slices: Vec<Fact>,
    ) -> Controlled<Graph> {
        let mut state: Vec<Fact> = Vec::with_capacity(carried);
        for id in operands.inputs[first..first + carried].iter().flatten() {
            let value = self.graph.value(*id);
            let fact = Fact::new(value.dtype, value.shape.clone());
            state.push(Fact { narrow: value.narrow, kind: value.kind, ..fact });
        }
        for attempt in 0..MAX_TRIES {
            let arguments = [&fixed[..], &state[..], &slices[..]].concat();
            let body = self.body_graph(node, "body", operands, &arguments)?;
            if body.outputs.len() < given + carried {
                return invalid("a body with too few outputs");
            }
            let mut stable = true;
            for (fact, id) in state.iter_mut().zip(&body.outputs[given..]) {
                let value = body.value(*id);
                if value.dtype != fact.dtype || value.kind != fact.kind {
                    return invalid(format!("a state of {} becomes {}", fact.dtype, value.dtype));
                }
                let shared = match attempt + 2 < MAX_TRIES {
                    true => common(&fact.shape, &value.shape),
                    false => None,
                };
                if !is_covered(&fact.shape, &value.shape) {
                    (stable, fact.shape) = (false, shared);
                }
            }
            if stable {
                return Ok(body);
            }
        }
        unsupported("a state whose shape changes in every round")
    }

    /// The graph of a body with `arguments` as its first inputs.
    fn body_graph(
        &mut self,
        node: &SourceNode,
        name: &str,
        operands: &Operands,
        arguments: &[Fact],
    ) -> Controlled<Graph> {
        let outer = std::mem::take(&mut self.graph);
        let names = std::mem::take(&mut self.names);
        let poisoned = std::mem::take(&mut self.poisoned);
        let before = self.unsupported.len();
        let ids: Vec<ValueId> = arguments
            .iter()
            .enumerate()
            .map(|(index, fact)| self.graph.add_value(format!("argument{index}"), fact.clone()))
            .collect();
        self.graph.inputs = ids.clone();
        for (name, id) in &operands.captured {
            let value = outer.value(*id);
            let fact =
                Fact::new(value.dtype, value.shape.clone()).with_content(value.content.clone());
            let fact = Fact { narrow: value.narrow, kind: value.kind, ..fact };
            let inner = self.graph.add_value(value.name.clone(), fact);
            self.graph.inputs.push(inner);
            self.names.insert(name.clone(), inner);
        }
        for (name, id) in &operands.constants {
            if let Some(tensor) = outer.constant(*id) {
                let inner = self.graph.add_constant(name.clone(), tensor.clone());
                self.graph.values[inner.index()].narrow = outer.value(*id).narrow;
                self.names.insert(name.clone(), inner);
            }
        }
        let result = self.filled(node, name, &ids);
        let made = std::mem::replace(&mut self.graph, outer);
        self.names = names;
        self.poisoned = poisoned;
        result?;
        if self.unsupported.len() > before {
            return unsupported("an operator of its body is not supported");
        }
        Ok(made)
    }

    /// Writes a body into the graph that is its own.
    fn filled(&mut self, node: &SourceNode, name: &str, arguments: &[ValueId]) -> Controlled<()> {
        let body = self.body(node, name)?;
        let outputs = self.write(&body, &node.label, arguments)?;
        for (index, id) in outputs.into_iter().enumerate() {
            // Every output is a value of its own, also where it is an input or given twice.
            let output = self.rename(&format!("result{index}"), id)?;
            self.graph.outputs.push(output);
        }
        Ok(())
    }

    fn add_control(
        &mut self,
        node: &SourceNode,
        operands: Operands,
        bodies: Vec<Graph>,
    ) -> Controlled<Vec<ValueId>> {
        let id = self.graph.bodies.len() as u32;
        self.graph.bodies.insert(id, bodies);
        let mut inputs = operands.inputs;
        inputs.extend(operands.captured.iter().map(|(_, id)| Some(*id)));
        let op = Op::Control(Control { kind: operands.kind, id, bodies: Vec::new() });
        let count = node.proto.outputs.len();
        let facts = self.graph.infer(&op, &inputs, count).map_err(super::MapError::from)?;
        let outputs: Vec<ValueId> = facts
            .into_iter()
            .enumerate()
            .map(|(index, fact)| self.graph.add_value(format!("{}/{index}", node.label), fact))
            .collect();
        let wanted = outputs.iter().map(|id| Some(*id)).collect();
        let name = node.label.clone();
        self.graph.nodes.push(GraphNode { name, op, inputs, outputs: wanted });
        Ok(outputs)
    }
}

/// Whether a value of shape `new` may be where one of shape `known` was assumed.
fn is_covered(known: &Shape, new: &Shape) -> bool {
    let fits = |(known, new): (&SymDim, &SymDim)| *known == SymDim::Unknown || known.is_same(new);
    match (known, new) {
        (None, _) => true,
        (Some(known), Some(new)) => known.len() == new.len() && known.iter().zip(new).all(fits),
        (Some(_), None) => false,
    }
}
