//! Products of any strides.

use graph::ir::GraphNode;
use model::Tensor;
use model::op::{MatMul, Op};

use crate::gpu::lowering::{BufferLocation, Lowering, UnsupportedReason};
use crate::gpu::view::{Element, View, packed_strides};
use crate::gpu::{packing, product};

/// The launch of a copy, and the bytes it moves per microsecond.
const COPY_US: f64 = 2.5;
const COPY_BYTES: f64 = 3e6;

impl Lowering<'_> {
    /// A product; false when `node` is none.
    pub(super) fn general_product(&mut self, node: &GraphNode) -> Result<bool, UnsupportedReason> {
        let work = match &node.op {
            Op::Conv(conv) => {
                let (x, weight) = (self.input(node, 0)?, self.filter(node)?);
                let (bias, residual) = (self.optional(node, 2)?, self.optional(node, 3)?);
                let y = self.picture(Self::output(node)?)?;
                let extra = (bias.as_ref(), residual.as_ref());
                (product::conv(&self.target, conv, (&x, &weight), extra, &y)?, y)
            }
            Op::ConvTranspose(conv) => {
                let (x, weight) = (self.input(node, 0)?, self.filter(node)?);
                let bias = self.optional(node, 2)?;
                let y = self.picture(Self::output(node)?)?;
                (product::conv_transpose(&self.target, conv, (&x, &weight), bias.as_ref(), &y)?, y)
            }
            Op::MatMul(spec) => {
                let y = self.new_output(node)?;
                let (a, b) = self.factors(node, spec, &y)?;
                let (bias, residual) = (self.optional(node, 2)?, self.optional(node, 3)?);
                let extra = (bias.as_ref(), residual.as_ref());
                (product::matmul(&self.target, spec, (&a, &b), extra, &y)?, y)
            }
            Op::Gemm(spec) => {
                let y = self.new_output(node)?;
                let like = MatMul {
                    transpose_a: spec.transpose_a,
                    transpose_b: spec.transpose_b,
                    ..MatMul::default()
                };
                let (a, b) = self.factors(node, &like, &y)?;
                let c = self.optional(node, 2)?;
                (product::gemm(&self.target, spec, (&a, &b), c.as_ref(), &y)?, y)
            }
            Op::Attention { scale } => {
                self.composed_attention(node, *scale)?;
                return Ok(true);
            }
            Op::Einsum { equation } => {
                let mut operands = Vec::new();
                for index in 0..node.inputs.len() {
                    operands.push(self.input(node, index)?);
                }
                let y = self.new_output(node)?;
                let operands: Vec<&View> = operands.iter().collect();
                (product::einsum(&self.target, equation, &operands, &y)?, y)
            }
            _ => return Ok(false),
        };
        self.finish(node, work.0, vec![Some(work.1)])?;
        Ok(true)
    }

    /// The factors of a matrix product: as they are, or copies with aligned rows where reading them
    /// in small pieces would cost more.
    fn factors(
        &mut self,
        node: &GraphNode,
        spec: &MatMul,
        output: &View,
    ) -> Result<(View, View), UnsupportedReason> {
        let mut factors = [self.factor(node, 0)?, self.factor(node, 1)?];
        let cost = product::matmul_reading(spec, (&factors[0], &factors[1]), output);
        for (factor, cost) in factors.iter_mut().zip(cost) {
            if cost > COPY_US + (2 * factor.len() * factor.element.size()) as f64 / COPY_BYTES {
                *factor = self.with_aligned_rows(factor)?;
            }
        }
        let [a, b] = factors;
        Ok((a, b))
    }

    /// Operand `index`; a constant matrix of 16-bit numbers has aligned rows.
    fn factor(&mut self, node: &GraphNode, index: usize) -> Result<View, UnsupportedReason> {
        let id = node.inputs.get(index).copied().flatten().ok_or("an operand is absent")?;
        let constant = self.graph.constant(id).filter(|tensor| tensor.shape().len() > 1).cloned();
        let element = self.element(id)?;
        let Some(tensor) = constant.filter(|_| element.size() == 2 && element.is_float()) else {
            return self.operand(id);
        };
        let shape = tensor.shape().to_vec();
        let row = shape[shape.len() - 1];
        if row.is_multiple_of(8) || !packing::converts(&tensor, element) {
            return self.operand(id);
        }
        let stride = row.next_multiple_of(8);
        let bytes = tensor.len() / row * stride * element.size();
        let pack =
            move |tensor: &Tensor| packing::aligned_rows(tensor, element).unwrap_or_default();
        let number = self.weight(&tensor, &format!("rows{element:?}"), bytes, pack);
        let location = BufferLocation::Fixed(model::gpu::MemoryLocation::Weight(number, 0));
        let buffer = self.buffer(bytes, location);
        let mut rounded = shape.clone();
        rounded[shape.len() - 1] = stride;
        let strides = packed_strides(&rounded);
        Ok(View { buffer, offset: 0, shape, strides, element, slack: 0 })
    }

    /// A copy whose rows begin at multiples of eight elements; columns, if they are fastest.
    fn with_aligned_rows(&mut self, view: &View) -> Result<View, UnsupportedReason> {
        let rank = view.shape.len();
        let mut order: Vec<usize> = (0..rank).collect();
        if rank > 1 && view.strides[rank - 2] == 1 && view.strides[rank - 1] != 1 {
            order.swap(rank - 2, rank - 1);
        }
        let fastest = order[rank - 1];
        let mut rounded = view.shape.clone();
        rounded[fastest] = rounded[fastest].next_multiple_of(8);
        let mut copy = self.ordered(&rounded, &order, view.element);
        copy.shape[fastest] = view.shape[fastest];
        self.copy_into(view, &copy)?;
        Ok(copy)
    }

    /// A filter `[out, in, taps...]` with its input channels fastest, as in images.
    fn filter(&mut self, node: &GraphNode) -> Result<View, UnsupportedReason> {
        let id = node.inputs.get(1).copied().flatten().ok_or("no weight")?;
        let Some(tensor) = self.graph.constant(id).cloned().filter(|t| t.shape().len() > 2) else {
            return self.operand(id);
        };
        let element = self.element(id)?;
        let bytes = tensor.len() * element.size();
        let pack =
            move |tensor: &Tensor| packing::channels_fastest(tensor, element).unwrap_or_default();
        let number = self.weight(&tensor, &format!("fastest{element:?}"), bytes, pack);
        let buffer = self
            .buffer(bytes, BufferLocation::Fixed(model::gpu::MemoryLocation::Weight(number, 0)));
        let shape = tensor.shape().to_vec();
        let mut order: Vec<usize> = (0..shape.len()).filter(|axis| *axis != 1).collect();
        order.push(1);
        let mut strides = vec![1; shape.len()];
        let mut step = 1;
        for axis in order.into_iter().rev() {
            strides[axis] = step;
            step *= shape[axis];
        }
        Ok(View { buffer, offset: 0, shape, strides, element, slack: 0 })
    }

    /// Attention of any width: scores, softmax, weighted sum.
    fn composed_attention(
        &mut self,
        node: &GraphNode,
        scale: f32,
    ) -> Result<(), UnsupportedReason> {
        let (q, k, v) = (self.input(node, 0)?, self.input(node, 1)?, self.input(node, 2)?);
        let mask = self.optional(node, 3)?;
        let rank = q.shape.len();
        if rank < 2 || k.shape.len() < 2 {
            return Err(format!("no matrices: {:?} and {:?}", q.shape, k.shape));
        }
        let mut shape = self.shape(Self::output(node)?)?;
        shape[rank - 1] = k.shape[k.shape.len() - 2];
        // Scores are in single precision: their exponentials amplify errors.
        let scratch = (self.packed(&shape, Element::F32), self.packed(&shape, q.element));
        let y = self.for_the_reader(Self::output(node)?)?;
        let scratch = (&scratch.0, &scratch.1);
        let works =
            product::attention(&self.target, scale, (&q, &k, &v), mask.as_ref(), scratch, &y)?;
        for work in works {
            self.push(work);
        }
        self.define(Self::output(node)?, y);
        Ok(())
    }
}
