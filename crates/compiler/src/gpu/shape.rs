//! Operators that only change the view of their operand.

use graph::ir::GraphNode;
use model::ValueId;

use super::loop_nest::MAX_RANK;
use super::lowering::{Lowering, UnsupportedReason};
use super::view::View;

impl Lowering<'_> {
    fn only_output(node: &GraphNode) -> Result<ValueId, UnsupportedReason> {
        node.outputs.first().copied().flatten().ok_or_else(|| "no output".to_string())
    }

    /// The constant integers of operand `index`, if present.
    pub fn ints(
        &self,
        node: &GraphNode,
        index: usize,
    ) -> Result<Option<Vec<i64>>, UnsupportedReason> {
        let Some(id) = node.inputs.get(index).copied().flatten() else { return Ok(None) };
        let constant = self.graph.constant_ints(id).or_else(|| {
            let content = self.graph.value(id).content.as_ref()?;
            content.iter().map(graph::SymDim::fixed).collect()
        });
        let name = &self.graph.value(id).name;
        constant.map(Some).ok_or_else(|| format!("'{name}' is only known when the model runs"))
    }

    /// Reshape, Flatten, Squeeze, Unsqueeze, Identity: the same elements with another shape.
    pub fn reshape(&mut self, node: &GraphNode) -> Result<(), UnsupportedReason> {
        let output = Self::only_output(node)?;
        let shape = self.shape(output)?;
        self.settle_for(node, &shape)?;
        let input = self.factored(node, 0)?;
        if let Some(view) = input.plain().and_then(|view| view.reshaped(&shape)) {
            self.define(output, view);
            return Ok(());
        }
        match input.reshaped(&shape).filter(|view| view.loops() <= MAX_RANK) {
            Some(view) => self.define_factored(output, view),
            None => {
                let input = self.input(node, 0)?;
                let packed = self.in_row_major(input)?;
                let view = packed.reshaped(&shape).ok_or("shapes of different sizes")?;
                self.define(output, view);
            }
        }
        Ok(())
    }

    /// Computes an expression that only `node` reads in row-major order, if in the order of its
    /// operands it could not be given the sizes of `shape`.
    fn settle_for(&mut self, node: &GraphNode, shape: &[usize]) -> Result<(), UnsupportedReason> {
        let Some(id) = node.inputs.first().copied().flatten() else { return Ok(()) };
        if self.reads[id.index()] != 1 || self.placement(id).is_some() {
            return Ok(());
        }
        let Some(value) = self.take_deferred(id) else { return Ok(()) };
        if value.natural_view(&self.buffers).reshaped(shape).is_some() {
            self.defer(id, value);
            return Ok(());
        }
        let view = self.packed(&value.shape, value.element);
        self.compute_into(&value, &view)?;
        self.define(id, view);
        Ok(())
    }

    /// Transpose.
    pub fn transpose(
        &mut self,
        node: &GraphNode,
        perm: Option<&[usize]>,
    ) -> Result<(), UnsupportedReason> {
        let output = Self::only_output(node)?;
        let id = node.inputs.first().copied().flatten().ok_or("no operand")?;
        let reversed: Vec<usize> = (0..self.shape(id)?.len()).rev().collect();
        let perm = perm.unwrap_or(&reversed);
        let joined = self.factored(node, 0)?;
        // Several readers share one copy.
        if joined.plain().is_some() || self.reads[id.index()] != 1 {
            let input = self.input(node, 0)?;
            self.define(output, input.permuted(perm));
        } else {
            self.define_factored(output, joined.permuted(perm));
        }
        Ok(())
    }

    /// Expand.
    pub fn expand(&mut self, node: &GraphNode) -> Result<(), UnsupportedReason> {
        let output = Self::only_output(node)?;
        let shape = self.shape(output)?;
        let view = self.input(node, 0)?.broadcast(&shape).ok_or("shapes that do not broadcast")?;
        self.define(output, view);
        Ok(())
    }

    /// Slice with constant bounds and positive steps: a view. False for a negative step.
    pub fn slice(&mut self, node: &GraphNode) -> Result<bool, UnsupportedReason> {
        let output = Self::only_output(node)?;
        let starts = self.ints(node, 1)?.ok_or("no starts")?;
        let shape = self.shape(output)?;
        let mut view = self.input(node, 0)?;
        let axes = match self.ints(node, 3)? {
            Some(axes) => axes,
            None => (0..starts.len() as i64).collect(),
        };
        let steps = self.ints(node, 4)?.unwrap_or_else(|| vec![1; starts.len()]);
        if steps.iter().any(|step| *step <= 0) {
            return Ok(false);
        }
        for ((start, axis), step) in starts.into_iter().zip(axes).zip(steps) {
            let rank = view.shape.len() as i64;
            let axis = usize::try_from(if axis < 0 { axis + rank } else { axis }).ok();
            let axis =
                axis.filter(|axis| *axis < view.shape.len()).ok_or("an axis beyond the rank")?;
            let step = usize::try_from(step).map_err(|err| err.to_string())?;
            let size = view.shape[axis] as i64;
            let from = if start < 0 { start + size } else { start }.clamp(0, size) as usize;
            view = view.sliced(axis, from, shape[axis], step);
        }
        self.define(output, view);
        Ok(true)
    }

    /// Split along `axis`; the parts' sizes are those of the outputs.
    pub fn split(&mut self, node: &GraphNode, axis: i64) -> Result<(), UnsupportedReason> {
        let view = self.input(node, 0)?;
        let rank = view.shape.len() as i64;
        let axis = usize::try_from(if axis < 0 { axis + rank } else { axis }).ok();
        let axis = axis.filter(|axis| *axis < view.shape.len()).ok_or("an axis beyond the rank")?;
        let sizes = self.split_sizes(node, axis, view.shape[axis])?;
        let mut start = 0;
        for (output, size) in node.outputs.iter().zip(sizes) {
            if let Some(id) = output {
                self.define(*id, view.sliced(axis, start, size, 1));
            }
            start += size;
        }
        Ok(())
    }

    fn split_sizes(
        &self,
        node: &GraphNode,
        axis: usize,
        total: usize,
    ) -> Result<Vec<usize>, UnsupportedReason> {
        if let Some(sizes) = self.ints(node, 1)? {
            let sizes: Option<Vec<usize>> =
                sizes.into_iter().map(|size| usize::try_from(size).ok()).collect();
            return sizes.ok_or_else(|| "a negative size".to_string());
        }
        let first = node.outputs.iter().flatten().next().ok_or("no output")?;
        let part = self.shape(*first)?[axis];
        let part =
            if node.outputs[0].is_some() { part } else { total.div_ceil(node.outputs.len()) };
        let size = |index: usize| part.min(total.saturating_sub(index * part));
        Ok((0..node.outputs.len()).map(size).collect())
    }

    /// Gather with one constant index: a slice. False for any other.
    pub fn gather_one(&mut self, node: &GraphNode, axis: i64) -> Result<bool, UnsupportedReason> {
        let Some(indices) = node.inputs.get(1).copied().flatten() else { return Ok(false) };
        let constant = self.graph.constant(indices).filter(|tensor| tensor.len() == 1);
        let Some(index) = constant.and_then(|_| self.graph.constant_ints(indices)) else {
            return Ok(false);
        };
        let output = Self::only_output(node)?;
        let shape = self.shape(output)?;
        let view: View = self.input(node, 0)?;
        let rank = view.shape.len() as i64;
        let axis = usize::try_from(if axis < 0 { axis + rank } else { axis }).ok();
        let axis = axis.filter(|axis| *axis < view.shape.len()).ok_or("an axis beyond the rank")?;
        let size = view.shape[axis] as i64;
        let index = if index[0] < 0 { index[0] + size } else { index[0] };
        if !(0..size).contains(&index) {
            return Err(format!("index {index} of {size}"));
        }
        let one = view.sliced(axis, index as usize, 1, 1);
        match one.reshaped(&shape) {
            Some(view) => self.define(output, view),
            None => {
                let packed = self.in_row_major(one)?;
                self.define(output, packed.reshaped(&shape).ok_or("an unexpected shape")?);
            }
        }
        Ok(true)
    }
}
