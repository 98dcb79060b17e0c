//! The context in which one node is mapped to the IR.

use std::collections::HashSet;

use model::op::Op;
use model::{DataType, NarrowType, Tensor, ValueId};

use super::attributes::Attributes;
use super::external::ExternalData;
use super::proto::NodeProto;
use crate::content;
use crate::infer::{Fact, InferError};
use crate::ir::{Graph, GraphNode};
use model::dim::SymDim;

/// Why one node cannot be mapped.
#[derive(Clone, Debug)]
pub(crate) enum MapError {
    /// Valid ONNX that is not supported; `None` when the operator itself is unknown.
    Unsupported(Option<String>),
    /// Not valid ONNX.
    Invalid(String),
}

impl From<InferError> for MapError {
    fn from(error: InferError) -> MapError {
        MapError::Invalid(error.0)
    }
}

/// Whether a mapper knows the operator.
pub(crate) type Mapped = Result<bool, MapError>;

pub(crate) fn unsupported<T>(reason: impl Into<String>) -> Result<T, MapError> {
    Err(MapError::Unsupported(Some(reason.into())))
}

pub(crate) fn invalid<T>(reason: impl Into<String>) -> Result<T, MapError> {
    Err(MapError::Invalid(reason.into()))
}

pub(crate) struct Context<'a> {
    pub graph: &'a mut Graph,
    pub node: &'a NodeProto,
    pub opset: i64,
    pub label: &'a str,
    pub attributes: Attributes<'a>,
    pub inputs: Vec<Option<ValueId>>,
    pub external: &'a ExternalData,
    /// Names that some node or the model's outputs read.
    pub read_names: &'a HashSet<String>,
    /// The value of each of the node's outputs, once mapped.
    pub results: Vec<Option<ValueId>>,
    pub parts: usize,
    /// Channels of a block where weights are in blocks.
    pub block: usize,
}

impl Context<'_> {
    /// Operand `index`, which must be present.
    pub fn input(&self, index: usize) -> Result<ValueId, MapError> {
        match self.optional(index) {
            Some(id) => Ok(id),
            None => invalid(format!("input {index} is missing")),
        }
    }

    pub fn optional(&self, index: usize) -> Option<ValueId> {
        self.inputs.get(index).copied().flatten()
    }

    pub fn has(&self, index: usize) -> bool {
        self.optional(index).is_some()
    }

    pub fn dtype(&self, id: ValueId) -> DataType {
        self.graph.value(id).dtype
    }

    /// What the bytes of `id` are, when they are not themselves.
    pub fn narrow(&self, id: ValueId) -> Option<NarrowType> {
        self.graph.value(id).narrow
    }

    /// Records what the bytes of output `index` are.
    pub fn mark_narrow(&mut self, index: usize, narrow: NarrowType) {
        if let Some(id) = self.results.get(index).copied().flatten() {
            self.graph.values[id.index()].narrow = Some(narrow);
        }
    }

    pub fn shape(&self, id: ValueId) -> Option<&[SymDim]> {
        self.graph.shape(id)
    }

    /// The rank of `id`, which the mapping requires.
    pub fn rank(&self, id: ValueId) -> Result<usize, MapError> {
        match self.shape(id) {
            Some(shape) => Ok(shape.len()),
            None => {
                unsupported(format!("the rank of '{}' is not known", self.graph.value(id).name))
            }
        }
    }

    /// Refuses nodes with more than `count` inputs.
    pub fn at_most(&self, count: usize) -> Result<(), MapError> {
        if self.inputs.iter().skip(count).any(Option::is_some) {
            return invalid(format!("{} inputs, at most {count} are allowed", self.inputs.len()));
        }
        Ok(())
    }

    /// Whether anything reads output `index`.
    pub fn wants(&self, index: usize) -> bool {
        self.node.outputs.get(index).is_some_and(|name| self.read_names.contains(name))
    }

    /// Refuses nodes of which an output from `index` on is read.
    pub fn no_output_from(&self, index: usize, reason: &str) -> Result<(), MapError> {
        if (index..self.node.outputs.len()).any(|index| self.wants(index)) {
            return unsupported(reason);
        }
        Ok(())
    }

    fn part_name(&mut self) -> String {
        self.parts += 1;
        format!("{}/{}", self.label, self.parts)
    }

    /// Adds a constant.
    pub fn constant(&mut self, tensor: Tensor) -> ValueId {
        let name = self.part_name();
        self.graph.add_constant(name, tensor)
    }

    /// Adds a vector of `I64`.
    pub fn ints(&mut self, values: &[i64]) -> Result<ValueId, MapError> {
        match content::int_vector(values) {
            Some(tensor) => Ok(self.constant(tensor)),
            None => invalid("too many integers"),
        }
    }

    /// Adds a scalar.
    pub fn scalar(&mut self, dtype: DataType, value: f64) -> Result<ValueId, MapError> {
        match content::scalar(dtype, value) {
            Some(tensor) => Ok(self.constant(tensor)),
            None => invalid(format!("{value} is not a {dtype}")),
        }
    }

    /// Adds an auxiliary node with one output.
    pub fn part(&mut self, op: Op, inputs: &[ValueId]) -> Result<ValueId, MapError> {
        Ok(self.parts(op, inputs.iter().map(|id| Some(*id)).collect(), 1)?[0])
    }

    /// Adds an auxiliary node.
    pub fn parts(
        &mut self,
        op: Op,
        inputs: Vec<Option<ValueId>>,
        outputs: usize,
    ) -> Result<Vec<ValueId>, MapError> {
        let facts = self.graph.infer(&op, &inputs, outputs)?;
        let name = self.part_name();
        let ids: Vec<ValueId> = facts
            .into_iter()
            .enumerate()
            .map(|(index, fact)| self.graph.add_value(output_name(&name, index), fact))
            .collect();
        let outputs = ids.iter().map(|id| Some(*id)).collect();
        self.graph.nodes.push(GraphNode { name, op, inputs, outputs });
        Ok(ids)
    }

    /// Adds the node itself: its outputs are the ONNX node's.
    pub fn emit(&mut self, op: Op, inputs: Vec<Option<ValueId>>) -> Mapped {
        let mut inputs = inputs;
        while inputs.last() == Some(&None) {
            inputs.pop();
        }
        let named = |name: &String| !name.is_empty();
        let count = self.node.outputs.iter().rposition(named).map_or(0, |last| last + 1);
        let wanted = (0..count).rfind(|index| self.wants(*index)).map_or(1, |last| last + 1);
        // An output that the operator does not have is an error only if it is read.
        let facts = match self.graph.infer(&op, &inputs, count.max(1)) {
            Ok(facts) => facts,
            Err(_) if wanted < count => self.graph.infer(&op, &inputs, wanted)?,
            Err(error) => return Err(error.into()),
        };
        let outputs = self.bind_facts(facts);
        let name = self.label.to_string();
        self.graph.nodes.push(GraphNode { name, op, inputs, outputs });
        Ok(true)
    }

    fn bind_facts(&mut self, facts: Vec<Fact>) -> Vec<Option<ValueId>> {
        let mut outputs = Vec::with_capacity(facts.len());
        for (index, fact) in facts.into_iter().enumerate() {
            let id = match self.node.outputs.get(index).filter(|name| !name.is_empty()) {
                Some(name) => Some(self.graph.add_value(name.clone(), fact)),
                None => None,
            };
            if let Some(slot) = self.results.get_mut(index) {
                *slot = id;
            }
            outputs.push(id);
        }
        outputs
    }

    /// Makes output `index` a constant.
    pub fn emit_constant(&mut self, index: usize, tensor: Tensor) -> Mapped {
        if let Some(name) = self.node.outputs.get(index) {
            self.results[index] = Some(self.graph.add_constant(name.clone(), tensor));
        }
        Ok(true)
    }

    /// Makes output `index` the same as the value `id`.
    pub fn emit_identity(&mut self, index: usize, id: ValueId) -> Mapped {
        let Some(name) = self.node.outputs.get(index).filter(|name| !name.is_empty()) else {
            return Ok(true);
        };
        let inputs = vec![Some(id)];
        let mut facts = self.graph.infer(&Op::Identity, &inputs, 1)?;
        let output = self.graph.add_value(name.clone(), facts.remove(0));
        self.results[index] = Some(output);
        let name = self.part_name();
        self.graph.nodes.push(GraphNode {
            name,
            op: Op::Identity,
            inputs,
            outputs: vec![Some(output)],
        });
        Ok(true)
    }

    /// Emits `op` on all of the node's inputs, of which there may be at most `count`.
    pub fn emit_all(&mut self, op: Op, count: usize) -> Mapped {
        self.at_most(count)?;
        let inputs = self.inputs.clone();
        self.emit(op, inputs)
    }
}

fn output_name(node: &str, index: usize) -> String {
    if index == 0 { node.to_string() } else { format!("{node}.{index}") }
}
