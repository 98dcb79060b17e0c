//! Reductions and normalisations over any dimensions.

use graph::ir::GraphNode;
use model::op::Op;

use crate::gpu::lowering::{Lowering, UnsupportedReason};
use crate::gpu::reduce;

impl Lowering<'_> {
    /// A reduction or normalisation; false when `node` is none.
    pub(super) fn general_reduction(
        &mut self,
        node: &GraphNode,
    ) -> Result<bool, UnsupportedReason> {
        match &node.op {
            Op::Reduce(spec) => self.reduction(node, spec)?,
            Op::ArgReduce(spec) => {
                let x = self.input(node, 0)?;
                let y = self.new_output(node)?;
                let mut kept = x.shape.clone();
                kept[reduce::axis(spec.axis, x.shape.len())?] = 1;
                let wide = y.reshaped(&kept).ok_or("an unexpected shape")?;
                let target = if spec.keep_dims { y.clone() } else { wide };
                let work = reduce::arg_reduce(spec, &x, &target)?;
                self.finish(node, work, vec![Some(y)])?;
            }
            Op::CumSum { exclusive, reverse } => {
                let x = self.input(node, 0)?;
                let axis = self.ints(node, 1)?.and_then(|axis| axis.first().copied());
                let axis = reduce::axis(axis.ok_or("no axis")?, x.shape.len())?;
                let y = self.like(Self::output(node)?, &x)?;
                let work = reduce::cum_sum(axis, *exclusive, *reverse, &x, &y)?;
                self.finish(node, work, vec![Some(y)])?;
            }
            Op::TopK { axis, largest, .. } => self.top_k(node, *axis, *largest)?,
            Op::Softmax(spec) => {
                let x = self.input(node, 0)?;
                let y = self.like(Self::output(node)?, &x)?;
                let work = reduce::softmax(spec, &x, &y)?;
                self.finish(node, work, vec![Some(y)])?;
            }
            Op::LpNorm { axis, p } => {
                let x = self.input(node, 0)?;
                let y = self.like(Self::output(node)?, &x)?;
                let work = reduce::lp_norm(*axis, *p, &x, &y)?;
                self.finish(node, work, vec![Some(y)])?;
            }
            _ => return self.normalization(node),
        }
        Ok(true)
    }

    fn reduction(
        &mut self,
        node: &GraphNode,
        spec: &model::op::Reduce,
    ) -> Result<(), UnsupportedReason> {
        let x = self.input(node, 0)?;
        let rank = x.shape.len();
        let axes = self.ints(node, 1)?.unwrap_or_default();
        if axes.is_empty() && spec.noop_with_empty_axes {
            return self.reshape(node);
        }
        let axes: Vec<usize> = if axes.is_empty() {
            (0..rank).collect()
        } else {
            axes.into_iter().map(|axis| reduce::axis(axis, rank)).collect::<Result<_, _>>()?
        };
        let y = self.new_output(node)?;
        let kept: Vec<usize> = x
            .shape
            .iter()
            .enumerate()
            .map(|(axis, size)| if axes.contains(&axis) { 1 } else { *size })
            .collect();
        let wide = y.reshaped(&kept).ok_or("an unexpected shape")?;
        let work = reduce::reduce(spec.kind, &x, &axes, &wide)?;
        self.finish(node, work, vec![Some(y)])
    }

    fn top_k(
        &mut self,
        node: &GraphNode,
        axis: i64,
        largest: bool,
    ) -> Result<(), UnsupportedReason> {
        let x = self.input(node, 0)?;
        let mut outputs = Vec::new();
        let some = node.outputs.iter().flatten().next().copied().ok_or("no output")?;
        let shape = self.shape(some)?;
        for index in 0..2 {
            let element = match index {
                0 => x.element,
                _ => crate::gpu::view::Element::I64,
            };
            outputs.push(self.packed(&shape, element));
        }
        let work = reduce::top_k(axis, largest, &x, &outputs[0], &outputs[1])?;
        self.finish(node, work, outputs.into_iter().map(Some).collect())
    }

    fn normalization(&mut self, node: &GraphNode) -> Result<bool, UnsupportedReason> {
        let is_one = matches!(
            node.op,
            Op::LayerNorm { .. }
                | Op::RmsNorm { .. }
                | Op::InstanceNorm { .. }
                | Op::GroupNorm { .. }
        );
        if !is_one {
            return Ok(false);
        }
        let (x, scale) = (self.input(node, 0)?, self.input(node, 1)?);
        let bias = self.optional(node, 2)?;
        let y = self.like(Self::output(node)?, &x)?;
        let needed = || bias.as_ref().ok_or_else(|| "no bias".to_string());
        let mut outputs = vec![Some(y.clone())];
        let work = match &node.op {
            Op::LayerNorm { axis, epsilon } => {
                for id in node.outputs.iter().skip(1) {
                    outputs.push(match id {
                        Some(id) => {
                            let (shape, element) = (self.shape(*id)?, self.element(*id)?);
                            Some(self.packed(&shape, element))
                        }
                        None => None,
                    });
                }
                let extra = |index: usize| outputs.get(index).and_then(Option::as_ref);
                let operands = (&x, &scale, bias.as_ref());
                reduce::layer_norm(*axis, *epsilon, operands, (&y, extra(1), extra(2)))?
            }
            Op::RmsNorm { axis, epsilon } => reduce::rms_norm(*axis, *epsilon, &x, &scale, &y)?,
            Op::InstanceNorm { epsilon } => {
                reduce::instance_norm(*epsilon, &x, &scale, needed()?, &y)?
            }
            Op::GroupNorm { groups, epsilon } => {
                reduce::group_norm(*groups, *epsilon, &x, &scale, needed()?, &y)?
            }
            _ => return Ok(false),
        };
        self.finish(node, work, outputs)?;
        Ok(true)
    }
}
