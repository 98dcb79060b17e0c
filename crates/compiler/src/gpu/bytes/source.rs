//! Recognises products of bytes: by their operands, or between operators that quantize.

use graph::Graph;
use graph::ir::GraphNode;
use model::op::{Activation, Conv, Op};
use model::{DataType, Tensor, ValueId};

use crate::gpu::product::Quantum;
use crate::gpu::view::Element;

/// Where the columns of a product are in its weight.
#[derive(Clone, Debug)]
pub(super) enum WeightLayout {
    /// `[out, in, taps...]`.
    Convolution(Conv),
    /// `[depth, columns]`, or its transpose.
    Matrix { transposed: bool },
}

/// A zero point.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum ZeroPoint {
    Constant(i32),
    /// Known when the step runs.
    Value(ValueId),
}

/// A product of bytes with a constant weight.
#[derive(Clone, Debug)]
pub(super) struct ByteSource {
    pub a: ValueId,
    pub a_zero: ZeroPoint,
    pub weight: ValueId,
    /// One, or one for each column.
    pub weight_zero: Vec<i32>,
    pub layout: WeightLayout,
    pub columns: usize,
    /// One for each column; none where the result is plain sums.
    pub scale: Option<Vec<f32>>,
    /// One for each column.
    pub bias: Option<Vec<f32>>,
    /// As above, added to the sums.
    pub sum_bias: Option<Vec<i32>>,
    pub activation: Activation,
    /// What is added before the activation.
    pub residual: Option<ValueId>,
    /// How the result is stored, if the product itself quantizes it.
    pub output: Option<Quantum>,
    /// The dequantized weight, which nothing computes.
    pub dequantized_weight: Option<ValueId>,
}

/// What is read of the graph.
#[derive(Clone, Copy)]
pub(super) struct Scope<'a> {
    pub graph: &'a Graph,
    pub producers: &'a [Option<usize>],
}

/// A dequantized value: its bytes, scales and zero points, and the dimension they belong to.
struct Dequantized {
    bytes: ValueId,
    scale: Vec<f32>,
    zero: Vec<i32>,
    axis: i64,
}

impl<'a> Scope<'a> {
    fn operand(node: &GraphNode, index: usize) -> Option<ValueId> {
        node.inputs.get(index).copied().flatten()
    }

    pub fn producer(&self, id: ValueId) -> Option<&'a GraphNode> {
        let graph: &'a Graph = self.graph;
        Some(&graph.nodes[self.producers[id.index()]?])
    }

    fn floats(&self, id: ValueId) -> Option<Vec<f32>> {
        graph::content::floats(self.graph.constant(id)?)
    }

    fn ints(&self, id: ValueId) -> Option<Vec<i32>> {
        let ints = graph::content::ints(self.graph.constant(id)?)?;
        ints.into_iter().map(|value| i32::try_from(value).ok()).collect()
    }

    /// The byte type of a value.
    fn byte(&self, id: ValueId) -> Option<Element> {
        match self.graph.value(id).dtype {
            DataType::U8 => Some(Element::U8),
            DataType::I8 => Some(Element::I8),
            _ => None,
        }
    }

    /// Constant scales that are numbers to divide by.
    fn scales(&self, id: ValueId) -> Option<Vec<f32>> {
        let usable = |scale: &f32| *scale > 0.0 && scale.is_finite() && scale.recip().is_finite();
        self.floats(id).filter(|all| !all.is_empty() && all.iter().all(usable))
    }

    /// Constant zero points; zeros where there is none.
    fn zeros(&self, id: Option<ValueId>, count: usize) -> Option<Vec<i32>> {
        match id {
            Some(id) => self.ints(id).filter(|zeros| zeros.len() == count || zeros.len() == 1),
            None => Some(vec![0]),
        }
    }

    fn dequantized(&self, id: ValueId) -> Option<Dequantized> {
        let node = self.producer(id)?;
        let Op::DequantizeLinear { axis } = node.op else { return None };
        let bytes = Self::operand(node, 0)?;
        self.byte(bytes)?;
        let scale = self.scales(Self::operand(node, 1)?)?;
        let zero = self.zeros(Self::operand(node, 2), scale.len())?;
        Some(Dequantized { bytes, scale, zero, axis })
    }

    /// The bytes and the quantum of a value that is dequantized with one scale.
    pub fn dequantized_tensor(&self, id: ValueId) -> Option<(ValueId, Quantum)> {
        let Dequantized { bytes, scale, zero, .. } = self.dequantized(id)?;
        let ([scale], [zero]) = (&scale[..], &zero[..]) else { return None };
        Some((bytes, Quantum { scale: *scale, zero: *zero, element: self.byte(bytes)? }))
    }

    /// The quantum of a node that quantizes with one scale.
    pub fn quantizes(&self, node: &GraphNode) -> Option<Quantum> {
        let Op::QuantizeLinear { .. } = node.op else { return None };
        let element = self.byte(node.outputs.first().copied().flatten()?)?;
        self.quantum(Self::operand(node, 1)?, Self::operand(node, 2), element)
    }

    fn quantum(&self, scale: ValueId, zero: Option<ValueId>, element: Element) -> Option<Quantum> {
        let (scale, zero) = (self.scales(scale)?, self.zeros(zero, 1)?);
        let ([scale], [zero]) = (&scale[..], &zero[..]) else { return None };
        Some(Quantum { scale: *scale, zero: *zero, element })
    }

    fn rank(&self, id: ValueId) -> Option<usize> {
        self.graph.shape(id).map(<[_]>::len)
    }

    /// The constant weight `id` as the operand of a product whose first operand is `a`.
    fn weight(
        &self,
        id: ValueId,
        a: ValueId,
        layout: &WeightLayout,
    ) -> Option<(&'a Tensor, usize)> {
        let graph: &'a Graph = self.graph;
        let tensor = graph.constant(id)?;
        self.byte(id)?;
        let shape = tensor.shape();
        let columns = match layout {
            WeightLayout::Convolution(conv) => {
                let grouped = conv.groups > 1 && shape.get(1) == Some(&1);
                // One filter per channel is no product.
                let depthwise = grouped && shape[0] / conv.groups.max(1) < 8;
                (shape.len() >= 3 && !depthwise).then_some(shape[0])?
            }
            WeightLayout::Matrix { transposed } => {
                let [first, second] = shape[..] else { return None };
                if self.rank(a)? < 2 {
                    return None;
                }
                if *transposed { first } else { second }
            }
        };
        (!tensor.is_empty()).then_some((tensor, columns))
    }

    /// `values` for each column: one is all of them.
    fn spread<T: Copy>(values: &[T], columns: usize) -> Option<Vec<T>> {
        match values {
            [one] => Some(vec![*one; columns]),
            all => (all.len() == columns).then(|| all.to_vec()),
        }
    }

    /// The product of bytes that `node` is, if it is one.
    pub fn source(&self, node: &GraphNode) -> Option<ByteSource> {
        let value = |index: usize| Self::operand(node, index);
        match &node.op {
            Op::Conv(conv) => {
                let layout = WeightLayout::Convolution(conv.clone());
                let source = self.between(node, layout, 1.0, 1.0)?;
                Some(ByteSource { activation: conv.activation, residual: value(3), ..source })
            }
            Op::MatMul(spec) if !spec.transpose_a => {
                let layout = WeightLayout::Matrix { transposed: spec.transpose_b };
                let source = self.between(node, layout, spec.alpha, 1.0)?;
                Some(ByteSource { activation: spec.activation, residual: value(3), ..source })
            }
            Op::Gemm(spec) if !spec.transpose_a => {
                let layout = WeightLayout::Matrix { transposed: spec.transpose_b };
                let source = self.between(node, layout, spec.alpha, spec.beta)?;
                Some(ByteSource { activation: spec.activation, ..source })
            }
            Op::QLinearConv(conv) => self.linear(node, WeightLayout::Convolution(conv.clone())),
            Op::QLinearMatMul => self.linear(node, WeightLayout::Matrix { transposed: false }),
            Op::ConvInteger(conv) => self.integer(node, WeightLayout::Convolution(conv.clone())),
            Op::MatMulInteger => self.integer(node, WeightLayout::Matrix { transposed: false }),
            _ => None,
        }
    }

    /// A product of dequantized operands.
    fn between(
        &self,
        node: &GraphNode,
        layout: WeightLayout,
        alpha: f32,
        beta: f32,
    ) -> Option<ByteSource> {
        let (a, a_quantum) = self.dequantized_tensor(Self::operand(node, 0)?)?;
        let dequantized_weight = Self::operand(node, 1)?;
        let weight = self.dequantized(dequantized_weight)?;
        let (tensor, columns) = self.weight(weight.bytes, a, &layout)?;
        let rank = tensor.shape().len() as i64;
        let axis = match &layout {
            WeightLayout::Convolution(_) => 0,
            WeightLayout::Matrix { transposed } => rank - 1 - i64::from(*transposed),
        };
        let own = if weight.axis < 0 { weight.axis + rank } else { weight.axis };
        if (weight.scale.len() > 1 || weight.zero.len() > 1) && own != axis {
            return None;
        }
        let mut scale = Self::spread(&weight.scale, columns)?;
        scale.iter_mut().for_each(|scale| *scale = alpha * (a_quantum.scale * *scale));
        let bias = match Self::operand(node, 2) {
            None => None,
            Some(id) => {
                let plain = self.graph.constant(id)?.shape().iter().rev().skip(1).all(|n| *n == 1);
                let floats = self.floats(id).filter(|_| plain)?;
                Some(Self::spread(&floats, columns)?.into_iter().map(|x| beta * x).collect())
            }
        };
        Some(ByteSource {
            a,
            a_zero: ZeroPoint::Constant(a_quantum.zero),
            weight: weight.bytes,
            weight_zero: weight.zero,
            layout,
            columns,
            scale: Some(scale),
            bias,
            sum_bias: None,
            activation: Activation::None,
            residual: None,
            output: None,
            dequantized_weight: Some(dequantized_weight),
        })
    }

    /// A product whose operands and result are bytes with scales.
    fn linear(&self, node: &GraphNode, layout: WeightLayout) -> Option<ByteSource> {
        let value = |index: usize| Self::operand(node, index);
        let a = value(0)?;
        let quantum = self.quantum(value(1)?, value(2), self.byte(a)?)?;
        let weight = value(3)?;
        let (_, columns) = self.weight(weight, a, &layout)?;
        let (scale, zero) = (self.scales(value(4)?)?, value(5));
        let weight_zero = self.zeros(zero, columns)?;
        let output = node.outputs.first().copied().flatten()?;
        let stored = self.quantum(value(6)?, value(7), self.byte(output)?)?;
        let sum_bias = match value(8) {
            Some(id) => Some(self.ints(id).filter(|bias| bias.len() == columns)?),
            None => None,
        };
        let factor = |scale: &f32| quantum.scale * scale / stored.scale;
        let scale: Vec<f32> = scale.iter().map(factor).collect();
        Some(ByteSource {
            a,
            a_zero: ZeroPoint::Constant(quantum.zero),
            weight,
            weight_zero,
            layout,
            columns,
            scale: Some(Self::spread(&scale, columns)?),
            bias: None,
            sum_bias,
            activation: Activation::None,
            residual: None,
            // The scale is part of the others.
            output: Some(Quantum { scale: 1.0, ..stored }),
            dequantized_weight: None,
        })
    }

    /// A product of bytes whose result is sums.
    fn integer(&self, node: &GraphNode, layout: WeightLayout) -> Option<ByteSource> {
        let value = |index: usize| Self::operand(node, index);
        let (a, weight) = (value(0)?, value(1)?);
        self.byte(a)?;
        let (_, columns) = self.weight(weight, a, &layout)?;
        let weight_zero = self.zeros(value(3), columns)?;
        let a_zero = match value(2) {
            None => ZeroPoint::Constant(0),
            Some(id) if self.graph.constant(id).is_some() => {
                let [zero] = self.ints(id)?[..] else { return None };
                ZeroPoint::Constant(zero)
            }
            // What fills the padding of an image has to be known.
            Some(id) if matches!(layout, WeightLayout::Matrix { .. }) => {
                let single = graph::content::fixed_count(self.graph.shape(id)?) == Some(1);
                single.then_some(ZeroPoint::Value(id))?
            }
            Some(_) => return None,
        };
        Some(ByteSource {
            a,
            a_zero,
            weight,
            weight_zero,
            layout,
            columns,
            scale: None,
            bias: None,
            sum_bias: None,
            activation: Activation::None,
            residual: None,
            output: None,
            dequantized_weight: None,
        })
    }
}
