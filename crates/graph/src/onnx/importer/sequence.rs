//! Sequences, optionals and maps while a file is read: each is a list of values of the graph, or
//! one value that stacks members of one shape. None is left when the file is read.

use model::op::Op;
use model::{DataType, ValueId};

use super::super::attributes::Attributes;
use super::super::context::MapError;
use super::super::proto::NodeProto;
use super::control::{ControlError, Controlled, invalid, unsupported};
use super::{Importer, SourceNode};
use crate::content;
use crate::infer::Shape;
use crate::ir::GraphNode;

/// A sequence with more members is refused.
const MAX_MEMBERS: usize = 4096;

/// What a name stands for that is no tensor.
#[derive(Clone, Debug)]
pub(super) enum Members {
    /// The tensors of a sequence, in order.
    Sequence(Vec<ValueId>),
    /// The tensors of a sequence, all of one shape, along a new first dimension. How many there are
    /// is known only when the model runs.
    Stack(ValueId),
    /// An optional without a value.
    Nothing,
    /// Two vectors of one length.
    Map { keys: ValueId, values: ValueId },
}

/// What a node of this module gives.
pub(super) enum Given {
    Tensor(ValueId),
    Members(Members),
}

/// Whether a node applies a body to every member of a sequence.
pub(super) fn is_map(node: &NodeProto) -> bool {
    matches!(node.domain.as_str(), "" | "ai.onnx") && node.op_type == "SequenceMap"
}

/// Whether a node makes or reads sequences, optionals or maps.
pub(super) fn is_sequence(node: &NodeProto) -> bool {
    if node.domain == "ai.onnx.ml" {
        return matches!(node.op_type.as_str(), "DictVectorizer" | "CastMap");
    }
    matches!(node.domain.as_str(), "" | "ai.onnx")
        && matches!(
            node.op_type.as_str(),
            "SequenceEmpty"
                | "SequenceConstruct"
                | "SequenceInsert"
                | "SequenceErase"
                | "SequenceAt"
                | "SequenceLength"
                | "ConcatFromSequence"
                | "SplitToSequence"
                | "SequenceMap"
                | "Optional"
                | "OptionalHasElement"
                | "OptionalGetElement"
        )
}

impl Importer<'_> {
    /// Whether a node reads a name that is no tensor.
    pub(super) fn reads_members(&self, node: &SourceNode) -> bool {
        let mut read = node.proto.inputs.iter().chain(&node.captures);
        read.any(|name| self.members.contains_key(name))
    }

    /// Maps a node of sequences or optionals, or an `Identity` of one.
    pub(super) fn sequence(
        &mut self,
        node: &SourceNode,
        inputs: &[Option<ValueId>],
    ) -> Controlled<()> {
        if is_map(&node.proto) {
            let results = self.sequence_map(node, inputs)?;
            for (name, members) in node.proto.outputs.iter().zip(results) {
                self.give(name, Given::Members(members))?;
            }
            return Ok(());
        }
        let Some(name) = node.proto.outputs.first().filter(|name| !name.is_empty()) else {
            return invalid("a node without an output");
        };
        let given = match self.given_by_stack(node, inputs)? {
            Some(given) => given,
            None => self.given(node, inputs)?,
        };
        self.give(name, given)
    }

    /// Makes `name` stand for `given`.
    fn give(&mut self, name: &str, given: Given) -> Controlled<()> {
        match given {
            Given::Tensor(id) => {
                let id = self.rename(name, id)?;
                self.members.remove(name);
                self.names.insert(name.to_string(), id);
            }
            Given::Members(Members::Sequence(list)) if list.len() > MAX_MEMBERS => {
                return unsupported(format!("a sequence of {} tensors", list.len()));
            }
            Given::Members(members) => {
                self.names.remove(name);
                self.members.insert(name.to_string(), members);
            }
        }
        Ok(())
    }

    /// Applies the body of `node` to every member: written out for each, or as a `Scan` of a stack.
    fn sequence_map(
        &mut self,
        node: &SourceNode,
        inputs: &[Option<ValueId>],
    ) -> Controlled<Vec<Members>> {
        let of = |name: &String| self.members.get(name);
        if node.proto.inputs.iter().any(|name| matches!(of(name), Some(Members::Stack(_)))) {
            return self.stack_map(node, inputs);
        }
        let lists: Vec<Option<Vec<ValueId>>> = (0..node.proto.inputs.len())
            .map(|index| match of(&node.proto.inputs[index]) {
                Some(_) => self.list(node, index).map(Some),
                None => Ok(None),
            })
            .collect::<Controlled<_>>()?;
        let Some(Some(first)) = lists.first() else { return invalid("input 0 is no sequence") };
        let length = first.len();
        if lists.iter().flatten().any(|list| list.len() != length) {
            return invalid("sequences of different lengths");
        }
        let body = self.body(node, "body")?;
        let mut results = vec![Vec::with_capacity(length); node.proto.outputs.len()];
        for at in 0..length {
            let mut arguments = Vec::with_capacity(lists.len());
            for (index, list) in lists.iter().enumerate() {
                arguments.push(match list {
                    Some(list) => list[at],
                    None => tensor(inputs, index)?,
                });
            }
            let values = self.write(&body, &format!("{}/{at}", node.label), &arguments)?;
            if values.len() < results.len() {
                return invalid("a body with too few outputs");
            }
            results.iter_mut().zip(values).for_each(|(list, value)| list.push(value));
        }
        Ok(results.into_iter().map(Members::Sequence).collect())
    }

    fn given(&mut self, node: &SourceNode, inputs: &[Option<ValueId>]) -> Controlled<Given> {
        let attributes = Attributes::new(&node.proto.attributes);
        let list = |list: Vec<ValueId>| Ok(Given::Members(Members::Sequence(list)));
        match node.proto.op_type.as_str() {
            "DictVectorizer" => self.dict_vectorizer(node).map(Given::Tensor),
            "CastMap" => self.cast_map(node).map(Given::Tensor),
            "SequenceEmpty" => list(Vec::new()),
            "SequenceConstruct" => match inputs.iter().copied().collect() {
                Some(values) => list(values),
                None => invalid("a member is missing"),
            },
            "SequenceInsert" => {
                let mut values = self.list(node, 0)?;
                let value = tensor(inputs, 1)?;
                let length = values.len();
                let at = self.position(operand(inputs, 2), length, length, length + 1)?;
                values.insert(at, value);
                list(values)
            }
            "SequenceErase" => {
                let mut values = self.list(node, 0)?;
                let length = values.len();
                let last = length.saturating_sub(1);
                values.remove(self.position(operand(inputs, 1), last, length, length)?);
                list(values)
            }
            "SequenceAt" => {
                let values = self.list(node, 0)?;
                let at = self.position(operand(inputs, 1), 0, values.len(), values.len())?;
                Ok(Given::Tensor(values[at]))
            }
            "SequenceLength" => {
                let length = self.list(node, 0)?.len() as i64;
                Ok(Given::Tensor(self.number(&node.label, DataType::I64, length)?))
            }
            "ConcatFromSequence" => {
                let values = self.list(node, 0)?;
                let Some(axis) = attributes.int("axis")? else { return invalid("no axis") };
                let new_axis = attributes.flag("new_axis", false)?;
                self.joined(&node.label, &values, axis, new_axis).map(Given::Tensor)
            }
            "SplitToSequence" => {
                let axis = attributes.int_or("axis", 0)?;
                // Parts of given sizes keep their dimension.
                let keep = attributes.flag("keepdims", true)? || inputs.len() > 1;
                list(self.parts(&node.label, inputs, axis, keep)?)
            }
            "OptionalHasElement" => {
                let name = node.proto.inputs.first().filter(|name| !name.is_empty());
                let is_nothing = |name| matches!(self.members.get(name), Some(Members::Nothing));
                let has = name.is_some_and(|name| !is_nothing(name));
                Ok(Given::Tensor(self.number(&node.label, DataType::Bool, i64::from(has))?))
            }
            // `Optional`, `OptionalGetElement`, `Identity`.
            _ => self.same(node, inputs),
        }
    }

    /// The value of an optional, or an optional of a value.
    fn same(&self, node: &SourceNode, inputs: &[Option<ValueId>]) -> Controlled<Given> {
        let empties = node.proto.op_type == "Optional" && inputs.is_empty();
        let known = node.proto.inputs.first().and_then(|name| self.members.get(name));
        match (known, inputs.first().copied().flatten()) {
            _ if empties => Ok(Given::Members(Members::Nothing)),
            (Some(Members::Nothing), _) if node.proto.op_type == "OptionalGetElement" => {
                invalid("the optional has no value")
            }
            (Some(members), _) => Ok(Given::Members(members.clone())),
            (None, Some(id)) => Ok(Given::Tensor(id)),
            (None, None) => invalid("input 0 is missing"),
        }
    }

    fn list(&self, node: &SourceNode, index: usize) -> Controlled<Vec<ValueId>> {
        match node.proto.inputs.get(index).and_then(|name| self.members.get(name)) {
            Some(Members::Sequence(list)) => Ok(list.clone()),
            Some(Members::Nothing) => invalid("the optional has no value"),
            Some(Members::Stack(_)) => unsupported("a sequence whose length is not known"),
            Some(Members::Map { .. }) | None => invalid(format!("input {index} is no sequence")),
        }
    }

    /// The position that an operand gives in a list of `length`, counted from the front, below
    /// `end`.
    fn position(
        &self,
        operand: Option<ValueId>,
        default: usize,
        length: usize,
        end: usize,
    ) -> Controlled<usize> {
        let wanted = match operand {
            None => default as i64,
            Some(id) => match self.known(id) {
                Some(wanted) => wanted,
                None => return unsupported("a position that depends on the data"),
            },
        };
        let at = if wanted < 0 { wanted.saturating_add(length as i64) } else { wanted };
        match usize::try_from(at).ok().filter(|at| *at < end) {
            Some(at) => Ok(at),
            None => invalid(format!("position {wanted} of a sequence of {length}")),
        }
    }

    fn joined(
        &mut self,
        label: &str,
        values: &[ValueId],
        axis: i64,
        new_axis: bool,
    ) -> Controlled<ValueId> {
        if new_axis {
            return self.stacked(label, values, axis);
        }
        match values {
            [] => invalid("a sequence without members"),
            [only] => Ok(*only),
            _ => self.add(label, Op::Concat { axis }, values),
        }
    }

    /// Parts of a tensor along `axis`: of the given sizes, or of one each.
    fn parts(
        &mut self,
        label: &str,
        inputs: &[Option<ValueId>],
        axis: i64,
        keep: bool,
    ) -> Controlled<Vec<ValueId>> {
        let x = tensor(inputs, 0)?;
        if let Some((lengths, count)) = self.unknown_lengths(inputs) {
            return self.split(label, x, lengths, count, axis);
        }
        let sizes = self.part_sizes(inputs, x, axis)?;
        if sizes.len() > MAX_MEMBERS {
            return unsupported(format!("a sequence of {} tensors", sizes.len()));
        }
        if sizes.is_empty() {
            return Ok(Vec::new());
        }
        let lengths = self.constant(label, content::int_vector(&sizes))?;
        let values = self.split(label, x, lengths, sizes.len(), axis)?;
        if keep {
            return Ok(values);
        }
        let axes = self.constant(label, content::int_vector(&[axis]))?;
        values.iter().map(|id| self.add(label, Op::Squeeze, &[*id, axes])).collect()
    }

    /// The operand with the lengths of parts whose number alone is known, and that number.
    fn unknown_lengths(&self, inputs: &[Option<ValueId>]) -> Option<(ValueId, usize)> {
        let lengths = operand(inputs, 1).filter(|id| self.numbers(*id).is_none())?;
        let [count] = self.graph.shape(lengths)? else { return None };
        let count = usize::try_from(count.fixed()?).ok()?;
        Some((lengths, count)).filter(|_| (1..=MAX_MEMBERS).contains(&count))
    }

    /// `count` parts of `x` with these lengths along `axis`.
    fn split(
        &mut self,
        label: &str,
        x: ValueId,
        lengths: ValueId,
        count: usize,
        axis: i64,
    ) -> Controlled<Vec<ValueId>> {
        let (op, operands) = (Op::Split { axis }, vec![Some(x), Some(lengths)]);
        let facts = self.graph.infer(&op, &operands, count).map_err(MapError::from)?;
        let mut values = Vec::with_capacity(facts.len());
        for (index, fact) in facts.into_iter().enumerate() {
            values.push(self.graph.add_value(format!("{label}/{index}"), fact));
        }
        let outputs = values.iter().map(|id| Some(*id)).collect();
        self.graph.nodes.push(GraphNode { name: label.to_string(), op, inputs: operands, outputs });
        Ok(values)
    }

    /// The sizes of the parts of `x`.
    fn part_sizes(
        &self,
        inputs: &[Option<ValueId>],
        x: ValueId,
        axis: i64,
    ) -> Controlled<Vec<i64>> {
        let shape: Shape = self.graph.shape(x).map(<[_]>::to_vec);
        let size = shape.as_ref().and_then(|dims| {
            let at = if axis < 0 { axis + dims.len() as i64 } else { axis };
            dims.get(usize::try_from(at).ok()?)?.fixed()
        });
        let split = operand(inputs, 1);
        let scalar = split.is_some_and(|id| self.graph.shape(id).is_some_and(<[_]>::is_empty));
        let numbers = split.map(|id| self.numbers(id));
        let each = match numbers {
            Some(None) => return unsupported("sizes that depend on the data"),
            Some(Some(sizes)) if !scalar => return Ok(sizes),
            Some(Some(sizes)) => sizes.first().copied().unwrap_or(0),
            None => 1,
        };
        match size {
            _ if each < 1 => invalid(format!("parts of {each}")),
            None => unsupported("the number of parts depends on the data"),
            Some(size) if size / each > MAX_MEMBERS as i64 => {
                unsupported(format!("a sequence of {} tensors", size / each))
            }
            Some(size) => {
                let whole = vec![each; (size / each) as usize];
                let rest = (size % each > 0).then_some(size % each);
                Ok(whole.into_iter().chain(rest).collect())
            }
        }
    }

    /// The integers of `id`, when they are known.
    fn numbers(&self, id: ValueId) -> Option<Vec<i64>> {
        let tracked = self.graph.value(id).content.as_ref();
        let tracked = tracked.and_then(|dims| dims.iter().map(|dim| dim.fixed()).collect());
        tracked.or_else(|| self.graph.constant_ints(id))
    }

    /// Maps such a node and records what cannot be mapped.
    pub(super) fn map_sequence(
        &mut self,
        node: &SourceNode,
        inputs: &[Option<ValueId>],
    ) -> Result<(), super::ImportError> {
        let before = self.graph.nodes.len();
        let reason = match self.sequence(node, inputs) {
            Ok(()) => return Ok(()),
            Err(ControlError::Import(error)) => return Err(error),
            Err(ControlError::Map(MapError::Unsupported(reason))) => reason,
            Err(ControlError::Map(MapError::Invalid(reason))) => {
                return Err(super::ImportError::Node {
                    node: node.label.clone(),
                    op_type: node.proto.op_type.clone(),
                    inputs: super::describe(&self.graph, inputs),
                    reason,
                });
            }
        };
        self.refuse(node, inputs, reason);
        self.graph.nodes.truncate(before);
        self.poison_outputs(node);
        Ok(())
    }

    /// Records a node that is not supported.
    pub(super) fn refuse(
        &mut self,
        node: &SourceNode,
        inputs: &[Option<ValueId>],
        reason: Option<String>,
    ) {
        self.unsupported.push(super::UnsupportedNode {
            node: node.label.clone(),
            op_type: node.proto.op_type.clone(),
            domain: super::canonical_domain(&node.proto.domain).to_string(),
            opset: node.opsets.version(&node.proto.domain),
            inputs: super::describe(&self.graph, inputs),
            reason,
        });
    }
}

pub(super) fn operand(inputs: &[Option<ValueId>], index: usize) -> Option<ValueId> {
    inputs.get(index).copied().flatten()
}

pub(super) fn tensor(inputs: &[Option<ValueId>], index: usize) -> Controlled<ValueId> {
    match operand(inputs, index) {
        Some(id) => Ok(id),
        None => invalid(format!("input {index} is missing or no tensor")),
    }
}
