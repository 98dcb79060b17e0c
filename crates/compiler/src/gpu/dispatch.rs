//! Selects the code that lowers a node.

use graph::ir::GraphNode;
use model::op::{self, Activation, GlobalPool, Op};
use model::{Tensor, ValueId};

use super::conv::{Matrix, MatrixPart};
use super::lowering::{Lowering, UnsupportedReason};

/// What a product that normalises its input needs: the input, scales and shifts.
pub type Normalized = (ValueId, Tensor, Tensor);

impl Lowering<'_> {
    /// Lowers one node.
    pub fn node(&mut self, node: &GraphNode) -> Result<(), UnsupportedReason> {
        self.begin(node);
        // A step of an earlier node may have computed this one too.
        let mut outputs = node.outputs.iter().flatten().peekable();
        let done = |id: &ValueId| self.is_defined(*id) || self.bytes.covers(*id);
        if outputs.peek().is_some() && outputs.all(done) {
            return Ok(());
        }
        if self.nothing_to_compute(node)? || self.known_outputs(node)? || self.elementwise(node)? {
            return Ok(());
        }
        if self.byte_product(node)? {
            return Ok(());
        }
        match &node.op {
            Op::Conv(conv) if self.conv_is_fast(node, conv) => self.fast_conv(node, conv),
            Op::Conv(conv) if self.depthwise_is_fast(node, conv) => self.fast_depthwise(node, conv),
            Op::Conv(_) | Op::ConvTranspose(_) if self.packed_conv(node)? => Ok(()),
            Op::MatMul(product) if self.matmul(node, product)? => Ok(()),
            Op::Gemm(gemm) if self.gemm(node, gemm)? => Ok(()),
            Op::Attention { scale } if self.fast_attention(node, *scale)? => Ok(()),
            Op::Pool(pool) if self.fast_pool(node, pool)? => Ok(()),
            Op::GlobalPool(GlobalPool::Average) if self.global_average(node)? => Ok(()),
            Op::Reduce(reduce) if self.mean_of_image(node, reduce)? => Ok(()),
            Op::LayerNorm { axis, epsilon } if self.fast_layer_norm(node, *axis, *epsilon)? => {
                Ok(())
            }
            Op::Softmax(softmax) if self.softmax(node, softmax)? => Ok(()),
            Op::Reshape { .. }
            | Op::Flatten { .. }
            | Op::Squeeze
            | Op::Unsqueeze
            | Op::Identity => self.reshape(node),
            Op::Transpose { perm } => self.transpose(node, perm.as_deref()),
            Op::Expand => self.expand(node),
            Op::Concat { axis } => self.concat(node, *axis),
            Op::Slice if self.slice(node)? => Ok(()),
            Op::Split { axis } => self.split(node, *axis),
            Op::Gather { axis } if self.gather_one(node, *axis)? => Ok(()),
            _ => self.general(node),
        }
    }

    /// Whether all outputs are empty, so that there is nothing to launch.
    fn nothing_to_compute(&mut self, node: &GraphNode) -> Result<bool, UnsupportedReason> {
        let outputs: Vec<ValueId> = node.outputs.iter().flatten().copied().collect();
        for id in &outputs {
            if !self.shape(*id)?.contains(&0) {
                return Ok(false);
            }
        }
        for id in outputs {
            let (shape, element) = (self.shape(id)?, self.element(id)?);
            let view = self.packed(&shape, element);
            self.define(id, view);
        }
        Ok(true)
    }

    fn matmul(
        &mut self,
        node: &GraphNode,
        product: &op::MatMul,
    ) -> Result<bool, UnsupportedReason> {
        let Some(own) = self.matrix_part(node) else { return Ok(false) };
        let input = node.inputs.first().copied().flatten().ok_or("no operand")?;
        let residual = node.inputs.get(3).copied().flatten();
        if product.transpose_a {
            return Ok(false);
        }
        let mut parts = vec![own];
        if residual.is_none() {
            parts.extend(self.siblings(node, product));
        }
        let residual = residual.map(|id| self.operand(id)).transpose()?;
        self.matrix_and_sum(Matrix {
            input,
            parts,
            transposed: product.transpose_b,
            alpha: product.alpha,
            beta: 1.0,
            residual,
            activation: product.activation,
        })
    }

    /// The constant operands of a product.
    fn matrix_part(&self, node: &GraphNode) -> Option<MatrixPart> {
        let value = |index: usize| node.inputs.get(index).copied().flatten();
        let output = node.outputs.first().copied().flatten()?;
        let weight = self.graph.constant(value(1)?).cloned()?;
        let rank = weight.shape().len();
        let plain = rank >= 2 && weight.shape()[..rank - 2].iter().all(|size| *size == 1);
        let columns = self.shape(output).ok()?.last().copied()?;
        let bias = match value(2) {
            Some(id) => Some(self.graph.constant(id).cloned().filter(|b| b.len() == columns)?),
            None => None,
        };
        plain.then_some(MatrixPart { weight, bias, columns, output })
    }

    /// Products of the same operand with other constants, which are then part of the same launch.
    fn siblings(&self, node: &GraphNode, product: &op::MatMul) -> Vec<MatrixPart> {
        let input = node.inputs.first();
        let wide = |part: &MatrixPart| part.columns.is_multiple_of(8);
        let like = |other: &&GraphNode| {
            other.op == Op::MatMul(*product)
                && other.inputs.first() == input
                && other.inputs.get(3).copied().flatten().is_none()
        };
        let rank = |part: &MatrixPart| part.weight.shape().len();
        let Some(own) = self.matrix_part(node).filter(wide) else { return vec![] };
        let Some(input) = input.copied().flatten() else { return vec![] };
        let others = self.readers_of(input).filter(|other| !std::ptr::eq(*other, node));
        let others = others.filter(like).filter_map(|other| self.matrix_part(other));
        others.filter(|part| wide(part) && rank(part) == rank(&own)).collect()
    }

    fn gemm(&mut self, node: &GraphNode, gemm: &op::Gemm) -> Result<bool, UnsupportedReason> {
        let input = node.inputs.first().copied().flatten().ok_or("no operand")?;
        let Some(part) = self.matrix_part(node).filter(|_| !gemm.transpose_a) else {
            return Ok(false);
        };
        self.matrix_and_sum(Matrix {
            input,
            parts: vec![part],
            transposed: gemm.transpose_b,
            alpha: gemm.alpha,
            beta: gemm.beta,
            residual: None,
            activation: gemm.activation,
        })
    }

    fn global_average(&mut self, node: &GraphNode) -> Result<bool, UnsupportedReason> {
        let x = node.inputs.first().copied().flatten().ok_or("no input")?;
        let output = node.outputs.first().copied().flatten().ok_or("no output")?;
        self.fast_global_average(x, output)
    }

    /// A mean over both spatial dimensions of an image.
    fn mean_of_image(
        &mut self,
        node: &GraphNode,
        reduce: &op::Reduce,
    ) -> Result<bool, UnsupportedReason> {
        let x = node.inputs.first().copied().flatten().ok_or("no input")?;
        let output = node.outputs.first().copied().flatten().ok_or("no output")?;
        if reduce.kind != op::ReduceKind::Mean || self.shape(x)?.len() != 4 {
            return Ok(false);
        }
        let mut axes = self.ints(node, 1)?.unwrap_or_default();
        axes.iter_mut().for_each(|axis| *axis = axis.rem_euclid(4));
        axes.sort_unstable();
        if axes != [2, 3] {
            return Ok(false);
        }
        self.fast_global_average(x, output)
    }

    fn softmax(
        &mut self,
        node: &GraphNode,
        softmax: &op::Softmax,
    ) -> Result<bool, UnsupportedReason> {
        let output = node.outputs.first().copied().flatten().ok_or("no output")?;
        let rank = self.shape(output)?.len() as i64;
        let last = softmax.axis == -1 || softmax.axis == rank - 1;
        if softmax.kind != op::SoftmaxKind::Softmax || !last {
            return Ok(false);
        }
        self.fast_softmax(node)
    }

    /// The operands of `relu(x * scale + shift)` that the readers of `id` apply themselves, if `id`
    /// is one.
    pub fn normalized(&self, id: ValueId) -> Option<Normalized> {
        if self.reads[id.index()] != 1 || self.target.precision != model::gpu::Precision::F16 {
            return None;
        }
        let producer = self.producer(id)?;
        let Op::ScaleShift { activation: Activation::Relu } = producer.op else { return None };
        let constant = |index: usize| {
            let id = producer.inputs.get(index).copied().flatten()?;
            self.graph.constant(id).cloned()
        };
        let x = producer.inputs.first().copied().flatten()?;
        let channels = self.shape(x).ok().filter(|shape| shape.len() == 4)?[1];
        let (scale, shift) = (constant(1)?, constant(2)?);
        let rows = scale.len() == channels && shift.len() == channels && channels % 8 == 0;
        rows.then_some((x, scale, shift))
    }
}
