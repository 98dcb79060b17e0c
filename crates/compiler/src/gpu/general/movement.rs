//! Operators that move elements without computing.

use graph::ir::GraphNode;
use model::op::{Op, PadMode};

use crate::gpu::index;
use crate::gpu::lowering::{Lowering, UnsupportedReason};
use crate::gpu::reduce::axis;
use crate::gpu::view::View;

impl Lowering<'_> {
    /// An operator that moves elements; false when `node` is none.
    pub(super) fn movement(&mut self, node: &GraphNode) -> Result<bool, UnsupportedReason> {
        let (work, y) = match &node.op {
            Op::Gather { axis: along } => {
                let (x, indices) = (self.input(node, 0)?, self.input(node, 1)?);
                let y = self.new_output(node)?;
                (index::gather(axis(*along, x.shape.len())?, &x, &indices, &y)?, y)
            }
            Op::GatherElements { axis: along } => {
                let (x, indices) = (self.input(node, 0)?, self.input(node, 1)?);
                let y = self.new_output(node)?;
                (index::gather_elements(axis(*along, x.shape.len())?, &x, &indices, &y)?, y)
            }
            Op::GatherNd { batch_dims } => {
                let (x, indices) = (self.input(node, 0)?, self.input(node, 1)?);
                let y = self.new_output(node)?;
                (index::gather_nd(*batch_dims, &x, &indices, &y)?, y)
            }
            Op::ScatterElements { .. } | Op::ScatterNd { .. } => return self.scatter(node),
            Op::OneHot { axis: along } => {
                let (indices, values) = (self.input(node, 0)?, self.input(node, 2)?);
                let y = self.new_output(node)?;
                (index::one_hot(axis(*along, y.shape.len())?, &indices, &values, &y)?, y)
            }
            Op::Range => {
                let (start, delta) = (self.input(node, 0)?, self.input(node, 2)?);
                let y = self.new_output(node)?;
                (index::range(&start, &delta, &y)?, y)
            }
            Op::EyeLike { k, .. } => {
                let y = self.new_output(node)?;
                (index::eye_like(*k, &y)?, y)
            }
            Op::Trilu { upper } => {
                let x = self.input(node, 0)?;
                let k = self.ints(node, 1)?.and_then(|k| k.first().copied()).unwrap_or(0);
                let y = self.new_output(node)?;
                (index::trilu(*upper, k, &x, &y)?, y)
            }
            Op::DepthToSpace { block, crd } => {
                let x = self.input(node, 0)?;
                let y = self.picture(Self::output(node)?)?;
                (index::depth_to_space(*block, *crd, &x, &y)?, y)
            }
            Op::SpaceToDepth { block } => {
                let x = self.input(node, 0)?;
                let y = self.picture(Self::output(node)?)?;
                (index::space_to_depth(*block, &x, &y)?, y)
            }
            Op::ReverseSequence { batch_axis, time_axis } => {
                let (x, lengths) = (self.input(node, 0)?, self.input(node, 1)?);
                let y = self.new_output(node)?;
                (index::reverse_sequence((*batch_axis, *time_axis), &x, &lengths, &y)?, y)
            }
            _ => return self.repetition(node),
        };
        self.finish(node, work, vec![Some(y)])?;
        Ok(true)
    }

    /// Tile, Pad and slices with negative steps.
    fn repetition(&mut self, node: &GraphNode) -> Result<bool, UnsupportedReason> {
        let (work, y) = match &node.op {
            Op::Tile => {
                let x = self.input(node, 0)?;
                let repeats = self.ints(node, 1)?.ok_or("no repeats")?;
                let repeats: Option<Vec<usize>> =
                    repeats.into_iter().map(|count| usize::try_from(count).ok()).collect();
                let y = self.new_output(node)?;
                (index::tile(&repeats.ok_or("a negative number of repeats")?, &x, &y)?, y)
            }
            Op::Pad { mode } => {
                let x = self.input(node, 0)?;
                let begins = self.pad_begins(node, x.shape.len())?;
                let value = self.pad_value(node, *mode)?;
                let y = self.like(Self::output(node)?, &x)?;
                (index::pad(*mode, &begins, value, &x, &y)?, y)
            }
            Op::Slice => {
                let x = self.input(node, 0)?;
                let (starts, steps) = self.slice_bounds(node, &x)?;
                let y = self.new_output(node)?;
                (index::slice(&starts, &steps, &x, &y)?, y)
            }
            _ => return Ok(false),
        };
        self.finish(node, work, vec![Some(y)])?;
        Ok(true)
    }

    /// The padding before the first element of every dimension.
    fn pad_begins(&self, node: &GraphNode, rank: usize) -> Result<Vec<i64>, UnsupportedReason> {
        let pads = self.ints(node, 1)?.ok_or("no pads")?;
        let axes = match self.ints(node, 3)? {
            Some(axes) => axes,
            None => (0..rank as i64).collect(),
        };
        if pads.len() != 2 * axes.len() {
            return Err(format!("{} pads for {} dimensions", pads.len(), axes.len()));
        }
        let mut begins = vec![0; rank];
        for (position, along) in axes.into_iter().enumerate() {
            begins[axis(along, rank)?] = pads[position];
        }
        Ok(begins)
    }

    fn pad_value(&self, node: &GraphNode, mode: PadMode) -> Result<f64, UnsupportedReason> {
        let Some(id) = node.inputs.get(2).copied().flatten().filter(|_| mode == PadMode::Constant)
        else {
            return Ok(0.0);
        };
        let constant = self.graph.constant(id).ok_or("a border only known when the model runs")?;
        let float = graph::content::floats(constant).and_then(|v| v.first().map(|x| f64::from(*x)));
        let int = || graph::content::ints(constant).and_then(|v| v.first().map(|x| *x as f64));
        float.or_else(int).ok_or_else(|| "the padding value is not a number".to_string())
    }

    /// The first element and the step along every dimension of a slice.
    fn slice_bounds(
        &self,
        node: &GraphNode,
        x: &View,
    ) -> Result<(Vec<i64>, Vec<i64>), UnsupportedReason> {
        let rank = x.shape.len();
        let given = self.ints(node, 1)?.ok_or("no starts")?;
        let axes = match self.ints(node, 3)? {
            Some(axes) => axes,
            None => (0..given.len() as i64).collect(),
        };
        let by = self.ints(node, 4)?.unwrap_or_else(|| vec![1; given.len()]);
        let (mut starts, mut steps) = (vec![0; rank], vec![1; rank]);
        for ((start, along), step) in given.into_iter().zip(axes).zip(by) {
            let at = axis(along, rank)?;
            let size = x.shape[at] as i64;
            let from = if start < 0 { start.saturating_add(size) } else { start };
            let last = if step < 0 { size - 1 } else { size };
            (starts[at], steps[at]) = (from.clamp(0, last.max(0)), step);
        }
        Ok((starts, steps))
    }

    fn scatter(&mut self, node: &GraphNode) -> Result<bool, UnsupportedReason> {
        let operands = (self.input(node, 0)?, self.input(node, 1)?, self.input(node, 2)?);
        let (x, indices, updates) = (&operands.0, &operands.1, &operands.2);
        let y = self.new_output(node)?;
        let works = match &node.op {
            Op::ScatterElements { axis: along, reduction } => {
                let at = axis(*along, x.shape.len())?;
                index::scatter_elements(at, *reduction, (x, indices, updates), &y)?
            }
            Op::ScatterNd { reduction } => {
                index::scatter_nd(*reduction, (x, indices, updates), &y)?
            }
            _ => return Ok(false),
        };
        for work in works {
            self.push(work);
        }
        self.define(Self::output(node)?, y);
        Ok(true)
    }
}
