//! Sequences whose length is known only when the model runs: one tensor, whose first dimension
//! counts the members.

use model::op::{Op, Reduce, ReduceKind};
use model::{DataType, ValueId};

use super::super::attributes::Attributes;
use super::super::proto::AttributeProto;
use super::container::member_dims;
use super::control::{Controlled, MAX_DEPTH, invalid, unsupported};
use super::sequence::{Given, Members, operand, tensor};
use super::{Importer, SourceNode};
use crate::content;

const RESHAPE: Op = Op::Reshape { allow_zero: true };

impl Importer<'_> {
    /// What a node gives whose sequence is a stack, or that makes one; `None` for other nodes.
    pub(super) fn given_by_stack(
        &mut self,
        node: &SourceNode,
        inputs: &[Option<ValueId>],
    ) -> Controlled<Option<Given>> {
        let attributes = Attributes::new(&node.proto.attributes);
        let op = node.proto.op_type.as_str();
        if op == "SplitToSequence" {
            let axis = attributes.int_or("axis", 0)?;
            let keep = attributes.flag("keepdims", true)?;
            return self.slices_of(node, inputs, axis, keep);
        }
        let first = node.proto.inputs.first().and_then(|name| self.members.get(name));
        let Some(Members::Stack(stack)) = first else { return Ok(None) };
        let (stack, label) = (*stack, node.label.as_str());
        let members = |id| Ok(Some(Given::Members(Members::Stack(id))));
        match op {
            "SequenceAt" => {
                let at = tensor(inputs, 1)?;
                let at = self.scalar_of(label, at)?;
                let member = self.add(label, Op::Gather { axis: 0 }, &[stack, at])?;
                Ok(Some(Given::Tensor(member)))
            }
            "SequenceLength" => {
                let length = self.length_of(label, stack)?;
                self.scalar_of(label, length).map(|id| Some(Given::Tensor(id)))
            }
            "SequenceInsert" => {
                let front = match operand(inputs, 2).map(|id| self.known(id)) {
                    None => false,
                    Some(Some(0)) => true,
                    Some(_) => {
                        return unsupported("a position in a sequence whose length is not known");
                    }
                };
                let value = tensor(inputs, 1)?;
                members(self.longer(label, stack, value, front)?)
            }
            "SequenceErase" => {
                let at = operand(inputs, 1);
                members(self.without(label, stack, at)?)
            }
            "ConcatFromSequence" => {
                let Some(axis) = attributes.int("axis")? else { return invalid("no axis") };
                let new_axis = attributes.flag("new_axis", false)?;
                self.joined_stack(label, stack, axis, new_axis).map(|id| Some(Given::Tensor(id)))
            }
            _ => Ok(None),
        }
    }

    /// The slices of a tensor along an axis of unknown size.
    fn slices_of(
        &mut self,
        node: &SourceNode,
        inputs: &[Option<ValueId>],
        axis: i64,
        keep: bool,
    ) -> Controlled<Option<Given>> {
        let x = tensor(inputs, 0)?;
        let Some(rank) = self.graph.shape(x).map(<[_]>::len) else { return Ok(None) };
        let axis = position(axis, rank)?;
        let known = self.graph.shape(x).is_some_and(|dims| dims[axis].fixed().is_some());
        if known || operand(inputs, 1).is_some() {
            return Ok(None);
        }
        let order = [axis].into_iter().chain((0..rank).filter(|other| *other != axis)).collect();
        let mut stack = self.add(&node.label, Op::Transpose { perm: Some(order) }, &[x])?;
        if keep {
            let axes = self.constant(&node.label, content::int_vector(&[axis as i64 + 1]))?;
            stack = self.add(&node.label, Op::Unsqueeze, &[stack, axes])?;
        }
        Ok(Some(Given::Members(Members::Stack(stack))))
    }

    /// `id`, which has one element, without dimensions.
    fn scalar_of(&mut self, label: &str, id: ValueId) -> Controlled<ValueId> {
        let target = self.constant(label, content::int_vector(&[]))?;
        self.add(label, RESHAPE, &[id, target])
    }

    /// The number of members, as a vector of one.
    fn length_of(&mut self, label: &str, stack: ValueId) -> Controlled<ValueId> {
        self.add(label, Op::Shape { start: 0, end: Some(1) }, &[stack])
    }

    fn longer(
        &mut self,
        label: &str,
        stack: ValueId,
        value: ValueId,
        front: bool,
    ) -> Controlled<ValueId> {
        let axes = self.constant(label, content::int_vector(&[0]))?;
        let row = self.add(label, Op::Unsqueeze, &[value, axes])?;
        let parts = if front { [row, stack] } else { [stack, row] };
        self.add(label, Op::Concat { axis: 0 }, &parts)
    }

    /// `stack` without the member at a position, the last one when there is none. A position
    /// outside of it is an error of `Gather` when the model runs.
    fn without(
        &mut self,
        label: &str,
        stack: ValueId,
        position: Option<ValueId>,
    ) -> Controlled<ValueId> {
        let position = match position {
            Some(position) => position,
            None => self.number(label, DataType::I64, -1)?,
        };
        let position = self.scalar_of(label, position)?;
        let length = self.length_of(label, stack)?;
        let length = self.scalar_of(label, length)?;
        let zero = self.number(label, DataType::I64, 0)?;
        let one = self.number(label, DataType::I64, 1)?;
        let places = self.add(label, Op::Range, &[zero, length, one])?;
        let place = self.add(label, Op::Gather { axis: 0 }, &[places, position])?;
        let is_place = self.add(label, Op::Compare(model::op::Compare::Equal), &[places, place])?;
        let others = self.add(label, Op::Unary(model::op::Unary::Not), &[is_place])?;
        self.add(label, Op::Compress { axis: Some(0) }, &[stack, others])
    }

    /// The members one after another along `axis`, or along a new axis.
    fn joined_stack(
        &mut self,
        label: &str,
        stack: ValueId,
        axis: i64,
        new_axis: bool,
    ) -> Controlled<ValueId> {
        let Some(rank) = member_dims(self.graph.shape(stack)).map(<[_]>::len) else {
            return unsupported("members of unknown rank");
        };
        let axis = position(axis, if new_axis { rank + 1 } else { rank })?;
        let mut order: Vec<usize> = (1..=rank).collect();
        order.insert(axis, 0);
        let moved = self.add(label, Op::Transpose { perm: Some(order) }, &[stack])?;
        if new_axis {
            return Ok(moved);
        }
        let dims = |start: usize, end: usize| {
            let (start, end) = (start as i64, Some(end as i64));
            Op::Shape { start, end }
        };
        let both = self.add(label, dims(axis, axis + 2), &[moved])?;
        let (kind, keep_dims) = (ReduceKind::Prod, true);
        let product = Op::Reduce(Reduce { kind, keep_dims, noop_with_empty_axes: false });
        let merged = self.add(label, product, &[both])?;
        let before = self.add(label, dims(0, axis), &[moved])?;
        let after = self.add(label, dims(axis + 2, rank + 1), &[moved])?;
        let target = self.add(label, Op::Concat { axis: 0 }, &[before, merged, after])?;
        self.add(label, RESHAPE, &[moved, target])
    }

    /// `SequenceMap` of stacks: a `Scan` over their members. Tensors are the same for all of them.
    pub(super) fn stack_map(
        &mut self,
        node: &SourceNode,
        inputs: &[Option<ValueId>],
    ) -> Controlled<Vec<Members>> {
        if self.depth >= MAX_DEPTH {
            return unsupported(format!("bodies are nested more than {MAX_DEPTH} deep"));
        }
        let label = node.label.as_str();
        let mut stacks = Vec::with_capacity(inputs.len());
        for name in &node.proto.inputs {
            stacks.push(match self.members.get(name) {
                Some(Members::Stack(id)) => Some(*id),
                None => None,
                Some(_) => return unsupported("sequences of known and of unknown length"),
            });
        }
        let Some(Some(first)) = stacks.first().copied() else {
            return invalid("input 0 is no sequence");
        };
        let mut scanned = Vec::with_capacity(stacks.len());
        for (index, stack) in stacks.into_iter().enumerate() {
            scanned.push(Some(match stack {
                Some(stack) => stack,
                None => {
                    let value = tensor(inputs, index)?;
                    let length = self.length_of(label, first)?;
                    let dims = self.add(label, Op::Shape { start: 0, end: None }, &[value])?;
                    let target = self.add(label, Op::Concat { axis: 0 }, &[length, dims])?;
                    self.add(label, Op::Expand, &[value, target])?
                }
            }));
        }
        let mut scan = node.clone();
        scan.proto.op_type = "Scan".to_string();
        scan.proto.attributes.push(AttributeProto {
            name: "num_scan_inputs".to_string(),
            int: Some(scanned.len() as i64),
            ..AttributeProto::default()
        });
        self.depth += 1;
        let results = self.structure(&scan, &scanned);
        self.depth -= 1;
        Ok(results?.into_iter().map(Members::Stack).collect())
    }
}

/// The dimension that `axis` is of `rank`.
fn position(axis: i64, rank: usize) -> Controlled<usize> {
    let at = if axis < 0 { axis.saturating_add(rank as i64) } else { axis };
    match usize::try_from(at).ok().filter(|at| *at < rank) {
        Some(at) => Ok(at),
        None => invalid(format!("axis {axis} of {rank} dimensions")),
    }
}
