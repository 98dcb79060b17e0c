//! Imports the whole model: inputs, initializers, nodes in order, outputs.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use model::{DataType, ValueId};

use super::attributes::Attributes;
use super::context::{Context, MapError, Mapped};
use super::external::ExternalData;
use super::function::{Call, Functions};
use super::proto::{
    DimProto, GraphProto, ModelProto, NodeProto, OperatorSet, TypeProto, ValueInfoProto,
};
use super::tensor::{data_type, data_type_name, held_type, narrow_type, to_tensor};
use super::{ImportError, Limits, MAX_OPSET, UnsupportedNode};
use super::{
    brevitas, elementwise, index, layout, loss, matrix, microsoft, ml, nchwc, nn, norm, order,
    quant, random, recurrent, reduce, signal, spatial, text, training, window,
};
use crate::infer::{Fact, describe};
use crate::ir::Graph;
use model::dim::SymDim;

mod container;
mod control;
mod entries;
mod names;
mod sequence;
mod stack;
mod structure;

use control::ControlError;

/// Operator sets by domain.
#[derive(Clone, Debug, Default)]
pub(crate) struct Opsets(HashMap<String, i64>);

fn canonical_domain(domain: &str) -> &str {
    if domain.is_empty() { "ai.onnx" } else { domain }
}

impl Opsets {
    pub fn new(list: &[OperatorSet]) -> Opsets {
        let one = |set: &OperatorSet| (canonical_domain(&set.domain).to_string(), set.version);
        Opsets(list.iter().map(one).collect())
    }

    /// The version in effect; files older than the field use version 1.
    pub fn version(&self, domain: &str) -> i64 {
        self.0.get(canonical_domain(domain)).copied().unwrap_or(1)
    }
}

/// A node with the operator sets it was written for.
#[derive(Clone, Debug)]
pub(crate) struct SourceNode {
    pub proto: NodeProto,
    pub opsets: Arc<Opsets>,
    pub label: String,
    /// What the bodies of control flow read from outside.
    pub captures: Vec<String>,
    /// The call of a function that it is part of: bodies use the function's names.
    pub call: Option<Arc<Call>>,
}

impl SourceNode {
    pub fn new(proto: NodeProto, opsets: Arc<Opsets>, index: usize) -> SourceNode {
        let output = || proto.outputs.iter().find(|name| !name.is_empty());
        let label = match (proto.name.as_str(), output()) {
            ("", Some(output)) => output.clone(),
            ("", None) => format!("{}_{index}", proto.op_type),
            (name, _) => name.to_string(),
        };
        let captures = control::captures(&proto);
        SourceNode { proto, opsets, label, captures, call: None }
    }

    /// As a part of a function. Its own names are the caller's already, those in its bodies not.
    pub fn inside(mut self, call: Arc<Call>) -> SourceNode {
        self.captures.iter_mut().for_each(|name| call.rename(name));
        self.call = Some(call);
        self
    }
}

/// Whether a dimension's name identifies it. Some exporters write `?` or `-1` for every unknown
/// dimension, which does not make them equal.
fn is_name(param: &str) -> bool {
    param.contains(|c: char| c.is_alphabetic()) && !matches!(param, "None" | "unk" | "unknown")
}

struct Importer<'a> {
    graph: Graph,
    names: HashMap<String, ValueId>,
    /// Names that stand for sequences, optionals and maps.
    members: HashMap<String, sequence::Members>,
    /// Values that depend on a node that could not be mapped: their errors are not reported again.
    poisoned: HashSet<ValueId>,
    unsupported: Vec<UnsupportedNode>,
    /// What a person should know of the model, see [`Graph::warnings`].
    warnings: Vec<String>,
    declared: HashMap<String, TypeProto>,
    symbols: HashMap<String, String>,
    separate: names::SeparateNames,
    taken: HashSet<String>,
    fresh: usize,
    external: &'a ExternalData,
    /// Channels of a block where weights are in blocks.
    block: usize,
    /// The maximum number of nodes.
    limit: usize,
    functions: Functions,
    /// Bodies around the node that is mapped.
    depth: usize,
    written: control::Written,
}

/// Imports a model. Names of dimensions that inputs share without need are taken apart.
pub(crate) fn run(
    model: ModelProto,
    external: &ExternalData,
    limits: &Limits,
) -> Result<Graph, ImportError> {
    let shared = model.graph.as_ref().map(names::shared).unwrap_or_default();
    let mut separate = names::SeparateNames::default();
    if shared.is_empty() {
        return run_with(model, external, limits, separate);
    }
    let mut best = run_with(model.clone(), external, limits, separate.clone())?;
    for name in shared {
        let Some(source) = &model.graph else { break };
        let trial = separate.with(source, &name);
        let Ok(other) = run_with(model.clone(), external, limits, trial.clone()) else { continue };
        if names::unknown_dims(&other) <= names::unknown_dims(&best) {
            (best, separate) = (other, trial);
        }
    }
    best.warnings.extend(separate.warnings());
    Ok(best)
}

fn run_with(
    model: ModelProto,
    external: &ExternalData,
    limits: &Limits,
    separate: names::SeparateNames,
) -> Result<Graph, ImportError> {
    let opsets = Arc::new(Opsets::new(&model.opsets));
    if opsets.version("") > MAX_OPSET {
        let version = opsets.version("");
        return Err(ImportError::Model(format!(
            "the model uses opset {version}, the newest supported one is {MAX_OPSET}"
        )));
    }
    let mut source =
        model.graph.ok_or_else(|| ImportError::Model("the file has no graph".to_string()))?;
    if source.sparse_initializers > 0 {
        return Err(ImportError::Model("sparse initializers are not supported".to_string()));
    }
    let block = nchwc::block_size(&source);
    let protos = std::mem::take(&mut source.nodes);
    let source_node = |(index, proto)| SourceNode::new(proto, opsets.clone(), index);
    let nodes = protos.into_iter().enumerate().map(source_node).collect();
    let mut functions = Functions::new(model.functions, limits.nodes);
    let nodes = functions.expand(nodes)?;
    let mut importer = Importer {
        graph: Graph { name: source.name.clone(), ..Graph::default() },
        names: HashMap::new(),
        members: HashMap::new(),
        poisoned: HashSet::new(),
        unsupported: Vec::new(),
        warnings: Vec::new(),
        declared: HashMap::new(),
        symbols: HashMap::new(),
        separate,
        taken: HashSet::from(["min".to_string(), "max".to_string()]),
        fresh: 0,
        external,
        block,
        limit: limits.nodes,
        functions,
        depth: 0,
        written: control::Written::default(),
    };
    importer.define(&mut source)?;
    let defined = importer.names.keys().chain(importer.members.keys()).cloned().collect();
    let nodes = order::sort(nodes, &defined)?;
    importer.map_all(&nodes, &source.outputs)?;
    importer.finish(&source.outputs)
}

impl Importer<'_> {
    fn define(&mut self, source: &mut GraphProto) -> Result<(), ImportError> {
        for proto in std::mem::take(&mut source.initializers) {
            let tensor = to_tensor(&proto, self.external)?;
            let id = self.graph.add_constant(proto.name.clone(), tensor);
            self.graph.values[id.index()].narrow = narrow_type(proto.data_type);
            self.name(&proto.name, id)?;
        }
        for info in &source.inputs {
            self.reserve_symbols(info);
        }
        for info in &source.inputs {
            // Old files list initializers among the inputs: they are defaults that requests never
            // replace.
            if self.names.contains_key(&info.name) {
                if self.graph.inputs.contains(&self.names[&info.name]) {
                    return Err(ImportError::Duplicate { name: info.name.clone() });
                }
                continue;
            }
            if info.kind.other.is_some() && self.define_container(info)? {
                continue;
            }
            let (fact, poisoned) = self.input_fact(info)?;
            self.add_input(&info.name, fact, poisoned)?;
        }
        let infos = source.value_infos.iter().chain(&source.outputs);
        self.declared = infos.map(|info| (info.name.clone(), info.kind.clone())).collect();
        Ok(())
    }

    fn name(&mut self, name: &str, id: ValueId) -> Result<(), ImportError> {
        if name.is_empty() {
            return Err(ImportError::Model("an input or initializer has no name".to_string()));
        }
        match self.names.insert(name.to_string(), id) {
            None => Ok(()),
            Some(_) => Err(ImportError::Duplicate { name: name.to_string() }),
        }
    }

    fn input_fact(&mut self, info: &ValueInfoProto) -> Result<(Fact, bool), ImportError> {
        let bad = |reason: String| ImportError::Input { name: info.name.clone(), reason };
        let Some(tensor) = &info.kind.tensor else {
            let what = info.kind.other.unwrap_or("without a type");
            self.note_input(info, format!("an input of the model is {what}"));
            return Ok((Fact::new(DataType::F32, None), true));
        };
        let Some((dtype, narrow)) = held_type(tensor.data_type) else {
            let what = data_type_name(tensor.data_type);
            self.note_input(info, format!("an input of the model is {what}"));
            return Ok((Fact::new(DataType::F32, None), true));
        };
        let fact = |shape| Fact { narrow, ..Fact::new(dtype, shape) };
        let Some(shape) = &tensor.shape else { return Ok((fact(None), false)) };
        let mut dims = Vec::with_capacity(shape.dims.len());
        for (axis, dim) in shape.dims.iter().enumerate() {
            dims.push(match dim.value {
                Some(value) if value >= 0 => SymDim::Fixed(value),
                _ if !is_name(&dim.param) => self.fresh_symbol(),
                _ if axis > 0 => {
                    let own = self.separate.of(&info.name, &dim.param).to_string();
                    SymDim::symbol(&self.symbol(&own))
                }
                _ => SymDim::symbol(&self.symbol(&dim.param)),
            });
        }
        let sizes: Vec<usize> = dims.iter().filter_map(SymDim::size).collect();
        model::tensor::element_count(&sizes).map_err(|error| bad(error.to_string()))?;
        Ok((fact(Some(dims)), false))
    }

    /// Records an input of an unsupported type. It is reported with the nodes that use it.
    fn note_input(&mut self, info: &ValueInfoProto, reason: String) {
        self.unsupported.push(UnsupportedNode {
            node: info.name.clone(),
            op_type: "input".to_string(),
            domain: "ai.onnx".to_string(),
            opset: 0,
            inputs: String::new(),
            reason: Some(reason),
        });
    }

    fn reserve_symbols(&mut self, info: &ValueInfoProto) {
        let shape = info.kind.tensor.as_ref().and_then(|tensor| tensor.shape.as_ref());
        for dim in shape.iter().flat_map(|shape| &shape.dims) {
            if is_name(&dim.param) {
                self.symbol(&dim.param);
            }
        }
    }

    /// The symbol for an ONNX dimension name: the name with characters replaced that expressions
    /// cannot contain.
    fn symbol(&mut self, param: &str) -> String {
        if let Some(known) = self.symbols.get(param) {
            return known.clone();
        }
        let plain =
            |c: char| if c.is_ascii_alphanumeric() || c == '_' || c == '.' { c } else { '_' };
        let mut name: String = param.chars().take(64).map(plain).collect();
        if name.starts_with(|c: char| c.is_ascii_digit() || c == '.') || name.is_empty() {
            name.insert(0, 'd');
        }
        let wanted = name.clone();
        while !self.taken.insert(name.clone()) {
            self.fresh += 1;
            name = format!("{wanted}_{}", self.fresh);
        }
        self.symbols.insert(param.to_string(), name.clone());
        name
    }

    fn fresh_symbol(&mut self) -> SymDim {
        loop {
            let name = format!("dim{}", self.fresh);
            self.fresh += 1;
            if self.taken.insert(name.clone()) {
                return SymDim::symbol(&name);
            }
        }
    }

    fn map_all(
        &mut self,
        nodes: &[SourceNode],
        outputs: &[ValueInfoProto],
    ) -> Result<(), ImportError> {
        let read = nodes.iter().flat_map(|node| node.proto.inputs.iter().chain(&node.captures));
        let read_names: HashSet<String> =
            read.chain(outputs.iter().map(|info| &info.name)).cloned().collect();
        for node in nodes {
            self.map_node(node, &read_names)?;
        }
        Ok(())
    }

    fn map_node(
        &mut self,
        node: &SourceNode,
        read_names: &HashSet<String>,
    ) -> Result<(), ImportError> {
        let inputs: Vec<Option<ValueId>> =
            node.proto.inputs.iter().map(|name| self.names.get(name).copied()).collect();
        let read = |name: &String| self.names.get(name).copied();
        let all = inputs.iter().flatten().copied().chain(node.captures.iter().filter_map(read));
        let tainted = all.into_iter().any(|id| self.poisoned.contains(&id));
        let identity = node.proto.op_type == "Identity" && self.reads_members(node);
        if (sequence::is_sequence(&node.proto) || identity) && !tainted {
            return self.map_sequence(node, &inputs);
        }
        if self.reads_members(node) {
            self.refuse(node, &inputs, Some("an operand is a sequence or a map".to_string()));
            self.poison_outputs(node);
            return Ok(());
        }
        if control::is_control(&node.proto) {
            return self.map_control(node, &inputs, tainted);
        }
        let before = (self.graph.nodes.len(), self.graph.values.len());
        let mut context = Context {
            graph: &mut self.graph,
            node: &node.proto,
            opset: node.opsets.version(&node.proto.domain),
            label: &node.label,
            attributes: Attributes::new(&node.proto.attributes),
            inputs,
            external: self.external,
            read_names,
            results: vec![None; node.proto.outputs.len()],
            parts: 0,
            block: self.block,
        };
        let outcome = map(&mut context);
        let (inputs, opset) = (std::mem::take(&mut context.inputs), context.opset);
        let results = std::mem::take(&mut context.results);
        let described = || describe(&self.graph, &inputs);
        match outcome {
            Ok(()) => return self.bind_results(node, results, tainted),
            Err(MapError::Invalid(reason)) if !tainted => {
                return Err(ImportError::Node {
                    node: node.label.clone(),
                    op_type: node.proto.op_type.clone(),
                    inputs: described(),
                    reason,
                });
            }
            Err(MapError::Invalid(_)) => {}
            // After an unknown node, an error may only mean that something is not known.
            Err(MapError::Unsupported(Some(_))) if tainted => {}
            Err(MapError::Unsupported(reason)) => {
                let entry = UnsupportedNode {
                    node: node.label.clone(),
                    op_type: node.proto.op_type.clone(),
                    domain: canonical_domain(&node.proto.domain).to_string(),
                    opset,
                    inputs: described(),
                    reason,
                };
                self.unsupported.push(entry);
            }
        }
        self.graph.nodes.truncate(before.0);
        self.poison_outputs(node);
        Ok(())
    }

    /// Maps a node with bodies.
    fn map_control(
        &mut self,
        node: &SourceNode,
        inputs: &[Option<ValueId>],
        tainted: bool,
    ) -> Result<(), ImportError> {
        let before = self.graph.nodes.len();
        let results = self.control(node, inputs).and_then(|results| {
            let names = node.proto.outputs.iter().zip(results);
            let named = names.filter(|(name, _)| !name.is_empty());
            named.map(|(name, id)| Ok((name.clone(), self.rename(name, id)?))).collect()
        });
        let reason = match results {
            Ok(results) => {
                let results: Vec<(String, ValueId)> = results;
                self.names.extend(results);
                return Ok(());
            }
            // After an unknown node, an error may only mean that something is not known.
            Err(_) if tainted => None,
            Err(ControlError::Import(error)) => return Err(error),
            Err(ControlError::Map(MapError::Unsupported(reason))) => reason,
            Err(ControlError::Map(MapError::Invalid(reason))) => {
                return Err(ImportError::Node {
                    node: node.label.clone(),
                    op_type: node.proto.op_type.clone(),
                    inputs: describe(&self.graph, inputs),
                    reason,
                });
            }
        };
        if !tainted {
            self.refuse(node, inputs, reason);
        }
        self.graph.nodes.truncate(before);
        self.poison_outputs(node);
        Ok(())
    }

    fn bind_results(
        &mut self,
        node: &SourceNode,
        results: Vec<Option<ValueId>>,
        tainted: bool,
    ) -> Result<(), ImportError> {
        for (name, id) in node.proto.outputs.iter().zip(results) {
            if let Some(id) = id {
                self.members.remove(name);
                self.names.insert(name.clone(), id);
                if tainted {
                    self.poisoned.insert(id);
                }
            }
        }
        // Missing outputs of an operator are an error only where they are read.
        Ok(())
    }

    fn poison_outputs(&mut self, node: &SourceNode) {
        for name in node.proto.outputs.iter().filter(|name| !name.is_empty()) {
            let declared = self.declared.get(name).and_then(|kind| kind.tensor.as_ref());
            let dtype = declared.and_then(|tensor| data_type(tensor.data_type));
            let fact = Fact::new(dtype.unwrap_or(DataType::F32), None);
            let id = self.graph.add_value(name.clone(), fact);
            self.poisoned.insert(id);
            self.names.insert(name.clone(), id);
        }
    }

    /// The keys of a sequence of maps become an output behind their values.
    fn add_keys(&mut self, name: &str) -> Result<(), ImportError> {
        let keys = format!("{name}{}", ml::KEYS);
        let found = self.graph.values.iter().rposition(|value| value.name == keys);
        match found {
            Some(index) => self.graph.outputs.push(ValueId(index as u32)),
            None => {
                let reason = "an output that is a sequence of other values than maps";
                return Err(ImportError::Model(format!("'{name}': {reason}")));
            }
        }
        Ok(())
    }

    /// Notes a size of an output that the file declares and the model does not compute.
    fn compare_declared(&mut self, info: &ValueInfoProto, id: ValueId) {
        let shape = info.kind.tensor.as_ref().and_then(|tensor| tensor.shape.as_ref());
        let (Some(declared), Some(known)) = (shape, self.graph.shape(id)) else { return };
        let differs = |(declared, known): (&DimProto, &SymDim)| {
            let sizes = declared.value.filter(|size| *size > 0).zip(known.fixed());
            sizes.is_some_and(|(declared, known)| declared != known)
        };
        let same_rank = declared.dims.len() == known.len();
        if !same_rank || declared.dims.iter().zip(known).any(differs) {
            let is = describe(&self.graph, &[Some(id)]);
            let text = "is declared with other dimensions, which are not taken at their word";
            self.warn(format!("output {is} {text}"));
        }
    }

    fn finish(mut self, outputs: &[ValueInfoProto]) -> Result<Graph, ImportError> {
        if !self.unsupported.is_empty() {
            // Inputs are reported only when no node gives a better reason.
            let nodes_only = self.unsupported.iter().any(|entry| entry.opset != 0);
            self.unsupported.retain(|entry| !nodes_only || entry.opset != 0);
            return Err(ImportError::Unsupported(self.unsupported));
        }
        for info in outputs {
            if let Some(members) = self.members.get(&info.name).cloned() {
                self.give_members(&info.name, members)?;
                continue;
            }
            let Some(id) = self.names.get(&info.name) else {
                let node = "outputs".to_string();
                return Err(ImportError::Missing { node, name: info.name.clone() });
            };
            if self.graph.outputs.contains(id) {
                return Err(ImportError::Duplicate { name: info.name.clone() });
            }
            let id = *id;
            self.graph.outputs.push(id);
            if info.kind.other == Some("sequence") {
                self.add_keys(&info.name)?;
            }
            self.compare_declared(info, id);
        }
        if self.graph.outputs.is_empty() {
            return Err(ImportError::Model("the model has no outputs".to_string()));
        }
        self.graph.warnings = self.warnings;
        Ok(self.graph)
    }
}

type OperatorMapper = fn(&mut Context, &str) -> Mapped;

const OPERATOR_MAPPERS: [OperatorMapper; 15] = [
    elementwise::map,
    layout::map,
    matrix::map,
    window::map,
    norm::map,
    reduce::map,
    index::map,
    quant::map,
    recurrent::map,
    nn::map,
    loss::map,
    signal::map,
    spatial::map,
    random::map,
    text::map,
];

fn map(context: &mut Context) -> Result<(), MapError> {
    let (domain, op) = (context.node.domain.as_str(), context.node.op_type.as_str());
    if let Some(index) = missing_input(context) {
        return Err(MapError::Invalid(format!("input {index} is missing")));
    }
    let known = match domain {
        "" | "ai.onnx" => map_standard(context, op)?,
        "com.microsoft" => microsoft::map(context, op)?,
        "ai.onnx.ml" => ml::map(context, op)?,
        "ai.onnx.preview.training" => training::map(context, op)?,
        nchwc::DOMAIN => nchwc::map(context, op)?,
        "onnx.brevitas" | "qonnx.custom_op.general" => brevitas::map(context, op)?,
        _ => false,
    };
    if !known {
        return Err(MapError::Unsupported(None));
    }
    match context.attributes.unused() {
        None => Ok(()),
        Some(name) => {
            Err(MapError::Unsupported(Some(format!("attribute '{name}' is not understood"))))
        }
    }
}

/// An input with a name but no value: an output that its operator did not produce.
fn missing_input(context: &Context) -> Option<usize> {
    let pairs = context.node.inputs.iter().zip(&context.inputs);
    pairs
        .enumerate()
        .find(|(_, (name, id))| !name.is_empty() && id.is_none())
        .map(|(index, _)| index)
}

fn map_standard(context: &mut Context, op: &str) -> Mapped {
    for mapper in OPERATOR_MAPPERS {
        if mapper(context, op)? {
            return Ok(true);
        }
    }
    Ok(false)
}
