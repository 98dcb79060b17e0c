//! Control flow: `If`, `Loop` and `Scan`, written as the nodes that run.
//!
//! A branch that is known is taken. Of a branch that depends on data both sides are computed, and
//! the result is selected; neither has an effect besides its result. A loop whose number of rounds
//! is known is written once per round.

use std::collections::{HashMap, HashSet};

use model::dim::SymDim;
use model::op::Op;
use model::{DataType, Tensor, ValueId};

use super::super::attributes::Attributes;
use super::super::context::MapError;
use super::super::function::{self, Call};
use super::super::proto::{AttributeProto, GraphProto, Message, NodeProto};
use super::super::tensor::to_tensor;
use super::super::{ImportError, order};
use super::{Importer, SourceNode, sequence};
use crate::content;
use crate::ir::GraphNode;

/// The maximum nesting of bodies.
pub(super) const MAX_DEPTH: usize = 8;

/// The maximum number of rounds of a loop that is written out.
const MAX_ROUNDS: i64 = 4096;

/// The maximum number of bodies that are written, so that nested loops without nodes end, and of
/// the bytes that are copied for them.
const MAX_WRITTEN: usize = 1 << 14;
const MAX_COPIED_BYTES: usize = 128 << 20;

/// The maximum number of nodes of two branches that are both computed.
const MAX_SELECTED: usize = 12;

/// What writing bodies has cost so far.
#[derive(Default)]
pub(super) struct Written {
    bodies: usize,
    bytes: usize,
}

/// Why control flow cannot be mapped.
pub(super) enum ControlError {
    Map(MapError),
    Import(ImportError),
}

impl From<ImportError> for ControlError {
    fn from(error: ImportError) -> ControlError {
        ControlError::Import(error)
    }
}

impl From<MapError> for ControlError {
    fn from(error: MapError) -> ControlError {
        ControlError::Map(error)
    }
}

pub(super) type Controlled<T> = Result<T, ControlError>;

pub(super) fn unsupported<T>(reason: impl Into<String>) -> Controlled<T> {
    Err(MapError::Unsupported(Some(reason.into())).into())
}

pub(super) fn invalid<T>(reason: impl Into<String>) -> Controlled<T> {
    Err(MapError::Invalid(reason.into()).into())
}

/// Whether a node is control flow.
pub(super) fn is_control(node: &NodeProto) -> bool {
    matches!(node.domain.as_str(), "" | "ai.onnx")
        && matches!(node.op_type.as_str(), "If" | "Loop" | "Scan")
}

/// Whether a node has a body.
fn has_body(node: &NodeProto) -> bool {
    is_control(node) || sequence::is_map(node)
}

/// The names that the bodies of `node` read from outside. A body that cannot be decoded has none
/// here, and is refused when it is mapped.
pub(super) fn captures(node: &NodeProto) -> Vec<String> {
    let mut names = Vec::new();
    if has_body(node) {
        for attribute in &node.attributes {
            collect(attribute, 0, &mut names);
        }
        names.sort();
        names.dedup();
    }
    names
}

fn collect(attribute: &AttributeProto, depth: usize, names: &mut Vec<String>) {
    let Some(bytes) = attribute.graph.clone().filter(|_| depth < MAX_DEPTH) else { return };
    let Ok(body) = GraphProto::decode(bytes) else { return };
    let mut own: HashSet<&str> = HashSet::new();
    own.extend(body.inputs.iter().map(|info| info.name.as_str()));
    own.extend(body.initializers.iter().map(|tensor| tensor.name.as_str()));
    own.extend(body.nodes.iter().flat_map(|node| &node.outputs).map(String::as_str));
    let mut read: Vec<String> = body.nodes.iter().flat_map(|node| &node.inputs).cloned().collect();
    read.extend(body.outputs.iter().map(|info| info.name.clone()));
    for inner in body.nodes.iter().filter(|node| has_body(node)).flat_map(|n| &n.attributes) {
        collect(inner, depth + 1, &mut read);
    }
    names.extend(read.into_iter().filter(|name| !name.is_empty() && !own.contains(name.as_str())));
}

/// A body, ready to be written several times.
pub(super) struct Body {
    pub(super) inputs: Vec<String>,
    outputs: Vec<String>,
    constants: Vec<(String, ValueId)>,
    nodes: Vec<SourceNode>,
    read: HashSet<String>,
    /// Bytes of a copy of the nodes.
    bytes: usize,
}

fn bytes_of(node: &SourceNode) -> usize {
    let names = node.proto.inputs.iter().chain(&node.proto.outputs).chain([&node.label]);
    let prefix = node.call.as_ref().map_or(0, |call| call.name_bytes());
    let names: usize = names.map(|name| size_of::<String>() + name.len() + prefix).sum();
    // Bodies inside are decoded again.
    let body = |attribute: &AttributeProto| attribute.graph.as_ref().map_or(0, |bytes| bytes.len());
    let attribute =
        |attribute: &AttributeProto| function::attribute_bytes(attribute) + 4 * body(attribute);
    let attributes: usize = node.proto.attributes.iter().map(attribute).sum();
    size_of::<SourceNode>() + size_of::<GraphNode>() + 2 * names + attributes
}

/// Gives all names of a graph inside of a function their prefix, and references to attributes of
/// the function their values. One rule for all names keeps those together that are the same.
fn rename(graph: &mut GraphProto, call: &Call) {
    for info in graph.inputs.iter_mut().chain(&mut graph.outputs) {
        call.rename(&mut info.name);
    }
    graph.initializers.iter_mut().for_each(|tensor| call.rename(&mut tensor.name));
    for node in &mut graph.nodes {
        node.inputs.iter_mut().chain(&mut node.outputs).for_each(|name| call.rename(name));
        call.resolve(&mut node.attributes);
    }
}

impl Importer<'_> {
    /// The values of the outputs of a node with bodies.
    pub(super) fn control(
        &mut self,
        node: &SourceNode,
        inputs: &[Option<ValueId>],
    ) -> Controlled<Vec<ValueId>> {
        if self.depth >= MAX_DEPTH {
            return unsupported(format!("bodies are nested more than {MAX_DEPTH} deep"));
        }
        self.depth += 1;
        let results = self.written_or_run(node, inputs);
        self.depth -= 1;
        results
    }

    /// Writes bodies where that is possible, and else makes them plans that a step runs.
    fn written_or_run(
        &mut self,
        node: &SourceNode,
        inputs: &[Option<ValueId>],
    ) -> Controlled<Vec<ValueId>> {
        let before = (self.graph.nodes.len(), self.unsupported.len());
        let written = match node.proto.op_type.as_str() {
            "If" => self.branch(node, inputs),
            "Loop" => self.unrolled_loop(node, inputs),
            _ => self.unrolled_scan(node, inputs),
        };
        match written {
            Err(ControlError::Map(MapError::Unsupported(_))) => {
                self.graph.nodes.truncate(before.0);
                self.unsupported.truncate(before.1);
                self.structure(node, inputs)
            }
            other => other,
        }
    }

    /// The body in attribute `name`.
    pub(super) fn body(&mut self, node: &SourceNode, name: &str) -> Controlled<Body> {
        let attribute = node.proto.attributes.iter().find(|attribute| attribute.name == name);
        let Some(bytes) = attribute.and_then(|attribute| attribute.graph.clone()) else {
            return invalid(format!("attribute '{name}' is no graph"));
        };
        let Ok(mut graph) = GraphProto::decode(bytes) else {
            return invalid(format!("the graph in '{name}' cannot be read"));
        };
        if let Some(call) = &node.call {
            rename(&mut graph, call);
        }
        if graph.sparse_initializers > 0 {
            return unsupported("sparse initializers");
        }
        let mut constants = Vec::new();
        for proto in &graph.initializers {
            let tensor = to_tensor(proto, self.external)?;
            let id = self.graph.add_constant(&proto.name, tensor);
            self.graph.values[id.index()].narrow = super::narrow_type(proto.data_type);
            constants.push((proto.name.clone(), id));
        }
        let names = |infos: &[super::ValueInfoProto]| -> Vec<String> {
            infos.iter().map(|info| info.name.clone()).collect()
        };
        let (inputs, outputs) = (names(&graph.inputs), names(&graph.outputs));
        let source = |(index, proto)| {
            let inner = SourceNode::new(proto, node.opsets.clone(), index);
            match &node.call {
                Some(call) => inner.inside(call.clone()),
                None => inner,
            }
        };
        let nodes: Vec<SourceNode> = graph.nodes.into_iter().enumerate().map(source).collect();
        let nodes = match self.functions.expand(nodes) {
            Err(error @ ImportError::TooLarge { .. }) => return unsupported(error.to_string()),
            other => other?,
        };
        let own = inputs.iter().chain(constants.iter().map(|(name, _)| name));
        let mut defined: HashSet<String> = own.cloned().collect();
        // What the body writes itself may be written outside too, by another body.
        let written: HashSet<&String> = nodes.iter().flat_map(|n| &n.proto.outputs).collect();
        let read: HashSet<String> = (nodes.iter())
            .flat_map(|node| node.proto.inputs.iter().chain(&node.captures))
            .chain(&outputs)
            .cloned()
            .collect();
        let known = |name: &str| self.names.contains_key(name) || self.members.contains_key(name);
        let outside = |name: &&String| !written.contains(name) && known(name);
        defined.extend(read.iter().filter(outside).cloned());
        let nodes = order::sort(nodes, &defined)?;
        let bytes = nodes.iter().map(bytes_of).sum();
        Ok(Body { inputs, outputs, constants, nodes, read, bytes })
    }

    /// Writes the nodes of `body` with `arguments` as its inputs, and returns its outputs.
    pub(super) fn write(
        &mut self,
        body: &Body,
        label: &str,
        arguments: &[ValueId],
    ) -> Controlled<Vec<ValueId>> {
        if arguments.len() != body.inputs.len() {
            let (have, want) = (arguments.len(), body.inputs.len());
            return invalid(format!("{have} values for a body of {want} inputs"));
        }
        self.written.bodies += 1;
        self.written.bytes = self.written.bytes.saturating_add(body.bytes);
        if self.graph.nodes.len() + body.nodes.len() > self.limit
            || self.written.bodies > MAX_WRITTEN
            || self.written.bytes > MAX_COPIED_BYTES
        {
            return unsupported("its rounds are more than fit into a graph");
        }
        let given = body.inputs.iter().cloned().zip(arguments.iter().copied());
        let given: Vec<_> = given.chain(body.constants.iter().cloned()).collect();
        let own = given.iter().map(|(name, _)| name);
        let written = body.nodes.iter().flat_map(|node| &node.proto.outputs);
        let hidden: HashMap<String, Option<ValueId>> =
            own.chain(written).map(|name| (name.clone(), self.names.get(name).copied())).collect();
        self.names.extend(given);
        let result = self.write_nodes(body, label);
        for (name, before) in hidden {
            match before {
                Some(id) => self.names.insert(name, id),
                None => self.names.remove(&name),
            };
        }
        result
    }

    fn write_nodes(&mut self, body: &Body, label: &str) -> Controlled<Vec<ValueId>> {
        for node in &body.nodes {
            let mut node = node.clone();
            node.label = format!("{label}/{}", node.label);
            self.map_node(&node, &body.read)?;
        }
        let mut outputs = Vec::with_capacity(body.outputs.len());
        for name in &body.outputs {
            match self.names.get(name) {
                Some(id) => outputs.push(*id),
                None if self.members.contains_key(name) => {
                    return unsupported("a result of its body is a sequence");
                }
                None => return invalid(format!("the body has no value '{name}'")),
            }
        }
        Ok(outputs)
    }

    /// Adds a node with one output.
    pub(super) fn add(&mut self, label: &str, op: Op, inputs: &[ValueId]) -> Controlled<ValueId> {
        let inputs: Vec<Option<ValueId>> = inputs.iter().map(|id| Some(*id)).collect();
        let facts = self.graph.infer(&op, &inputs, 1).map_err(MapError::from)?;
        let Some(fact) = facts.into_iter().next() else { return invalid("no result") };
        let output = self.graph.add_value(label, fact);
        let outputs = vec![Some(output)];
        self.graph.nodes.push(GraphNode { name: label.to_string(), op, inputs, outputs });
        Ok(output)
    }

    pub(super) fn constant(&mut self, label: &str, tensor: Option<Tensor>) -> Controlled<ValueId> {
        match tensor {
            Some(tensor) => Ok(self.graph.add_constant(label, tensor)),
            None => invalid("a number that no tensor holds"),
        }
    }

    pub(super) fn number(
        &mut self,
        label: &str,
        dtype: DataType,
        value: i64,
    ) -> Controlled<ValueId> {
        self.constant(label, content::scalar(dtype, value as f64))
    }

    /// The single number of `id`, when it is known.
    pub(super) fn known(&self, id: ValueId) -> Option<i64> {
        let known = self.graph.value(id).content.as_deref();
        if let Some([dim]) = known {
            return dim.fixed();
        }
        let tensor = self.graph.constant(id)?;
        if tensor.len() != 1 {
            return None;
        }
        match tensor.dtype() {
            DataType::Bool => tensor.raw().map(|raw| i64::from(raw[0] != 0)),
            DataType::I64 => tensor.to_vec::<i64>()?.first().copied(),
            DataType::I32 => tensor.to_vec::<i32>()?.first().map(|value| i64::from(*value)),
            _ => None,
        }
    }

    fn branch(
        &mut self,
        node: &SourceNode,
        inputs: &[Option<ValueId>],
    ) -> Controlled<Vec<ValueId>> {
        let [Some(condition)] = inputs[..] else { return invalid("no condition") };
        let label = node.label.as_str();
        if let Some(taken) = self.known(condition) {
            let name = if taken != 0 { "then_branch" } else { "else_branch" };
            let body = self.body(node, name)?;
            return self.write(&body, label, &[]);
        }
        let sides = ["then_branch", "else_branch"];
        let sizes = sides.map(|side| self.body(node, side).map(|body| body.nodes.len()));
        let nodes: usize = sizes.into_iter().sum::<Controlled<usize>>()?;
        if nodes > MAX_SELECTED {
            return unsupported("branches that are too large to compute both");
        }
        let body = self.body(node, "then_branch")?;
        let on = self.write(&body, &format!("{label}/then"), &[])?;
        let body = self.body(node, "else_branch")?;
        let off = self.write(&body, &format!("{label}/else"), &[])?;
        if on.len() != off.len() {
            return invalid("branches with different numbers of outputs");
        }
        let target = self.constant(label, content::int_vector(&[]))?;
        let scalar = Op::Reshape { allow_zero: false };
        let condition = self.add(&format!("{label}/condition"), scalar, &[condition, target])?;
        let mut results = Vec::with_capacity(on.len());
        for (on, off) in on.into_iter().zip(off) {
            if !self.is_alike(on, off) {
                return unsupported(
                    "a condition that depends on data, and branches of different shapes",
                );
            }
            results.push(self.add(&format!("{label}/select"), Op::Where, &[condition, on, off])?);
        }
        Ok(results)
    }

    /// Whether two values have one type and one known shape.
    fn is_alike(&self, a: ValueId, b: ValueId) -> bool {
        let same = |a: &[SymDim], b: &[SymDim]| {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.is_same(b))
        };
        let shapes = (self.graph.shape(a), self.graph.shape(b));
        self.graph.value(a).dtype == self.graph.value(b).dtype
            && matches!(shapes, (Some(a), Some(b)) if same(a, b))
    }

    fn unrolled_loop(
        &mut self,
        node: &SourceNode,
        inputs: &[Option<ValueId>],
    ) -> Controlled<Vec<ValueId>> {
        let label = node.label.as_str();
        let at = |index: usize| inputs.get(index).copied().flatten();
        let rounds = match at(0).map(|id| self.known(id)) {
            Some(Some(rounds)) if rounds <= MAX_ROUNDS => rounds.max(0),
            Some(Some(rounds)) => return unsupported(format!("a loop of {rounds} rounds")),
            Some(None) => return unsupported("a number of rounds that depends on data"),
            None => return unsupported("a loop without a number of rounds"),
        };
        let mut goes_on = match at(1).map(|id| self.known(id)) {
            None => true,
            Some(Some(condition)) => condition != 0,
            Some(None) => return unsupported("a loop whose condition depends on data"),
        };
        let mut state: Vec<ValueId> = Vec::new();
        for index in 2..inputs.len() {
            match at(index) {
                Some(id) => state.push(id),
                None => return invalid(format!("input {index} is missing")),
            }
        }
        let body = self.body(node, "body")?;
        let carried = state.len();
        let Some(collected) = body.outputs.len().checked_sub(1 + carried) else {
            return invalid("a body with too few outputs");
        };
        let mut rows: Vec<Vec<ValueId>> = vec![Vec::new(); collected];
        for round in 0..rounds {
            if !goes_on {
                break;
            }
            let name = format!("{label}/{round}");
            let number = self.number(&name, DataType::I64, round)?;
            let condition = self.number(&name, DataType::Bool, 1)?;
            let arguments = [&[number, condition], &state[..]].concat();
            let outputs = self.write(&body, &name, &arguments)?;
            goes_on = match self.known(outputs[0]) {
                Some(condition) => condition != 0,
                None => return unsupported("a loop whose condition depends on data"),
            };
            state = outputs[1..1 + carried].to_vec();
            for (row, value) in rows.iter_mut().zip(&outputs[1 + carried..]) {
                row.push(*value);
            }
        }
        for row in rows {
            state.push(self.stacked(label, &row, 0)?);
        }
        Ok(state)
    }

    /// `values` along a new dimension.
    pub(super) fn stacked(
        &mut self,
        label: &str,
        values: &[ValueId],
        axis: i64,
    ) -> Controlled<ValueId> {
        if values.is_empty() {
            return unsupported("a loop that collects values in no round");
        }
        let name = format!("{label}/collected");
        let axes = self.constant(&name, content::int_vector(&[axis]))?;
        let mut rows = Vec::with_capacity(values.len());
        for value in values {
            rows.push(self.add(&name, Op::Unsqueeze, &[*value, axes])?);
        }
        match rows[..] {
            [row] => Ok(row),
            _ => self.add(&name, Op::Concat { axis }, &rows),
        }
    }

    fn unrolled_scan(
        &mut self,
        node: &SourceNode,
        inputs: &[Option<ValueId>],
    ) -> Controlled<Vec<ValueId>> {
        if node.opsets.version("") < 9 {
            return unsupported("Scan before opset 9");
        }
        let label = node.label.as_str();
        let attributes = Attributes::new(&node.proto.attributes);
        let scanned = attributes.size_or("num_scan_inputs", 0)?;
        let list = |name: &str| attributes.ints(name).map(<[i64]>::to_vec).unwrap_or_default();
        let (input_axes, output_axes) = (list("scan_input_axes"), list("scan_output_axes"));
        let (backwards, writes) = (list("scan_input_directions"), list("scan_output_directions"));
        let Some(values) = inputs.iter().copied().collect::<Option<Vec<ValueId>>>() else {
            return invalid("an input is missing");
        };
        let Some(carried) = values.len().checked_sub(scanned).filter(|_| scanned > 0) else {
            return invalid(format!("{scanned} scanned inputs of {}", values.len()));
        };
        let (state, sequences) = values.split_at(carried);
        let mut state = state.to_vec();
        let axis_of = |axes: &[i64], index: usize| axes.get(index).copied().unwrap_or(0);
        let mut rounds: Option<i64> = None;
        for (index, id) in sequences.iter().enumerate() {
            let axis = axis_of(&input_axes, index);
            let size = self.graph.shape(*id).and_then(|shape| {
                let axis = if axis < 0 { axis + shape.len() as i64 } else { axis };
                shape.get(usize::try_from(axis).ok()?)?.fixed()
            });
            match (size, rounds) {
                (Some(size), Some(other)) if size != other => return invalid("different lengths"),
                (Some(size), _) if size <= MAX_ROUNDS => rounds = Some(size),
                _ => return unsupported("a sequence whose length is not known or too large"),
            }
        }
        let (rounds, body) = (rounds.unwrap_or(0), self.body(node, "body")?);
        let Some(collected) = body.outputs.len().checked_sub(carried) else {
            return invalid("a body with too few outputs");
        };
        let mut rows: Vec<Vec<ValueId>> = vec![Vec::new(); collected];
        for round in 0..rounds {
            let name = format!("{label}/{round}");
            let mut arguments = state;
            for (index, id) in sequences.iter().enumerate() {
                let at = if axis_of(&backwards, index) == 1 { rounds - 1 - round } else { round };
                let at = self.number(&name, DataType::I64, at)?;
                let axis = axis_of(&input_axes, index);
                arguments.push(self.add(&name, Op::Gather { axis }, &[*id, at])?);
            }
            let outputs = self.write(&body, &name, &arguments)?;
            state = outputs[..carried].to_vec();
            for (row, value) in rows.iter_mut().zip(&outputs[carried..]) {
                row.push(*value);
            }
        }
        for (index, mut row) in rows.into_iter().enumerate() {
            if axis_of(&writes, index) == 1 {
                row.reverse();
            }
            state.push(self.stacked(label, &row, axis_of(&output_axes, index))?);
        }
        Ok(state)
    }

    /// Gives `id` the name of a node's output.
    pub(super) fn rename(&mut self, name: &str, id: ValueId) -> Controlled<ValueId> {
        match self.graph.constant(id).cloned() {
            Some(tensor) => self.constant(name, Some(tensor)),
            None => self.add(name, Op::Identity, &[id]),
        }
    }
}
