//! Concatenations without copies: the step that computes a part writes it into the whole.

use graph::Graph;
use graph::ir::GraphNode;
use model::ValueId;
use model::op::Op;

use super::factored::FactoredView;
use super::lowering::{Buffer, DeferredValue, Lowering, UnsupportedReason};
use super::view::{View, packed_in};

/// Channels of a vector load; parts must begin and end at multiples of it.
const VECTOR: usize = 8;

/// A part of a concatenation: in memory, or still to be computed.
enum Part {
    Stored(View),
    Joined(FactoredView),
    Computed(DeferredValue),
}

impl Part {
    fn shape(&self) -> Vec<usize> {
        match self {
            Part::Stored(view) => view.shape.clone(),
            Part::Joined(view) => view.shape(),
            Part::Computed(value) => value.shape.clone(),
        }
    }

    /// The view, or one of the same sizes and order.
    fn view(&self, buffers: &[Buffer]) -> View {
        match self {
            Part::Stored(view) => view.clone(),
            Part::Joined(view) => {
                packed_in(&view.shape(), &view.copy_order(), view.factors.element)
            }
            Part::Computed(value) => value.natural_view(buffers),
        }
    }
}

impl Lowering<'_> {
    /// Decides, for every concatenation of images along channels, where its parts are written.
    /// Later concatenations decide first: in a network that concatenates all previous outputs, the
    /// last one contains the others.
    pub fn plan_concats(&mut self) {
        let graph: &Graph = self.graph;
        for node in graph.nodes.iter().rev() {
            if let Some(parts) = self.image_parts(node) {
                self.plan_concat(node, &parts);
            }
        }
    }

    /// The parts of a concatenation of images along channels, with their channels.
    fn image_parts(&self, node: &GraphNode) -> Option<Vec<(ValueId, usize)>> {
        let Op::Concat { axis } = node.op else { return None };
        let output = node.outputs.first().copied().flatten()?;
        let shape = self.shape(output).ok()?;
        if shape.len() != 4 || !(axis == 1 || axis == -3) || !self.element(output).ok()?.is_float()
        {
            return None;
        }
        let part = |id: &Option<ValueId>| {
            let channels = self.shape((*id)?).ok()?[1];
            (channels % VECTOR == 0).then_some(((*id)?, channels))
        };
        node.inputs.iter().map(part).collect()
    }

    fn plan_concat(&mut self, node: &GraphNode, parts: &[(ValueId, usize)]) {
        let Some(output) = node.outputs.first().copied().flatten() else { return };
        if let Some(whole) = self.joined(parts) {
            self.place(output, whole);
            return;
        }
        let whole = match self.placement(output) {
            Some(view) => view.clone(),
            None => match self.output_image(output) {
                Ok(view) => view,
                Err(_) => return,
            },
        };
        self.place(output, whole.clone());
        let mut channel = 0;
        for (id, channels) in parts {
            let producible = self.graph.constant(*id).is_none() && !self.graph.inputs.contains(id);
            let twice = parts.iter().filter(|(other, _)| other == id).count() > 1;
            if producible && !twice && self.placement(*id).is_none() {
                self.place(*id, whole.sliced(1, channel, *channels, 1));
            }
            channel += channels;
        }
    }

    /// The view that covers all parts, when they are already adjacent.
    fn joined(&self, parts: &[(ValueId, usize)]) -> Option<View> {
        let first = self.placement(parts.first()?.0)?.clone();
        let mut end = first.offset;
        for (id, channels) in parts {
            let view = self.placement(*id)?;
            let beside =
                view.buffer == first.buffer && view.offset == end && view.strides == first.strides;
            if !beside {
                return None;
            }
            end += channels;
        }
        let mut whole = first.clone();
        whole.shape[1] = end - first.offset;
        // A pixel of the buffer must hold all parts.
        (whole.strides[3].max(whole.strides[2]) >= whole.shape[1]).then_some(whole)
    }

    /// A concatenation: copies only the parts that are not in position already.
    pub fn concat(&mut self, node: &GraphNode, axis: i64) -> Result<(), UnsupportedReason> {
        let output_id = node.outputs.first().copied().flatten().ok_or("no output")?;
        let shape = self.shape(output_id)?;
        let axis = if axis < 0 { axis + shape.len() as i64 } else { axis };
        let axis = usize::try_from(axis).ok().filter(|axis| *axis < shape.len());
        let axis = axis.ok_or("an axis beyond the rank")?;
        let inputs: Vec<ValueId> = node.inputs.iter().flatten().copied().collect();
        let mut parts = Vec::new();
        for id in &inputs {
            parts.push(self.part(*id)?);
        }
        let whole = match self.placement(output_id) {
            Some(view) => view.clone(),
            None => {
                let views = parts.iter().map(|part| part.view(&self.buffers));
                let order = views.into_iter().find(|view| !view.is_empty());
                let order = order.map(|view| view.memory_order());
                let order = order.unwrap_or_else(|| (0..shape.len()).collect());
                let element = self.element(output_id)?;
                self.ordered(&shape, &order, element)
            }
        };
        if let Some(view) = evenly_spaced(&parts, axis).filter(|v| v.buffer != whole.buffer)
            && let Ok(copy) = self.copy(&view, &whole.split(axis, parts.len()))
        {
            self.push(copy);
            self.define(output_id, whole);
            return Ok(());
        }
        let mut start = 0;
        for part in parts {
            let length = part.shape()[axis];
            let target = whole.sliced(axis, start, length, 1);
            start += length;
            match part {
                _ if length == 0 => {}
                Part::Computed(value) => self.compute_into(&value, &target)?,
                Part::Joined(view) => self.copy_factors(&view, &target)?,
                Part::Stored(view) => {
                    let there = view.buffer == target.buffer
                        && view.offset == target.offset
                        && view.strides == target.strides;
                    if !there {
                        self.copy_into(&view, &target)?;
                    }
                }
            }
        }
        self.define(output_id, whole);
        Ok(())
    }

    /// A part of a concatenation. An expression that nothing else reads is computed in its place.
    fn part(&mut self, id: ValueId) -> Result<Part, UnsupportedReason> {
        if let Some(view) = self.joined_value(id) {
            return Ok(Part::Joined(view.clone()));
        }
        if self.reads[id.index()] == 1
            && self.placement(id).is_none()
            && let Some(value) = self.take_deferred(id)
        {
            return Ok(Part::Computed(value));
        }
        self.operand(id).map(Part::Stored)
    }
}

/// Parts that are windows of one buffer at equal distances, as one view with their number before
/// `axis`: a series that is cut into patches is one copy, not one for each of them.
fn evenly_spaced(parts: &[Part], axis: usize) -> Option<View> {
    const LEAST: usize = 3;
    let stored = |part: &Part| match part {
        Part::Stored(view) => Some(view.clone()),
        _ => None,
    };
    let views: Vec<View> = parts.iter().map(stored).collect::<Option<_>>()?;
    let [first, second, ..] = &views[..] else { return None };
    let step = second.offset.checked_sub(first.offset)?;
    let alike = |(number, view): (usize, &View)| {
        view.buffer == first.buffer
            && view.shape == first.shape
            && view.strides == first.strides
            && view.element == first.element
            && view.offset == first.offset + number * step
    };
    if views.len() < LEAST || !views.iter().enumerate().all(alike) || first.is_empty() {
        return None;
    }
    let mut view = View { slack: 0, ..first.clone() };
    view.shape.insert(axis, views.len());
    view.strides.insert(axis, step);
    Some(view)
}
