//! Operators with parameters per channel, as chains: batch normalization and quantization.

use graph::ir::GraphNode;
use model::ValueId;
use model::op::{Binary, Compare, Op, ReduceKind, Unary};

use super::chain::{Chain, scalar};
use super::draft::StepDraft;
use super::elementwise::{Expr, work};
use super::lowering::{DeferredValue, Lowering, UnsupportedReason};
use super::reduce::{self, axis};
use super::view::{Element, View};

/// `y = (x - mean) / sqrt(variance + epsilon) * scale + bias`, all four per channel.
pub fn batch_norm(
    epsilon: f32,
    x: &View,
    [scale, bias, mean, variance]: [&View; 4],
    y: &View,
) -> Result<StepDraft, String> {
    let along = |view: &View| along_axis(view, 1, x);
    let inputs = [x.clone(), along(scale)?, along(bias)?, along(mean)?, along(variance)?];
    let centred = binary(Binary::Sub, Expr::Input(0), Expr::Input(3));
    let spread = binary(Binary::Add, Expr::Input(4), Expr::Float(epsilon));
    let deviation = Expr::Unary(Unary::Sqrt, Box::new(spread));
    let scaled = binary(Binary::Mul, binary(Binary::Div, centred, deviation), Expr::Input(1));
    let expr = binary(Binary::Add, scaled, Expr::Input(2));
    Ok(StepDraft { op: "BatchNorm", ..work(&expr, &inputs, y)? })
}

/// `y = saturate(round(x / scale) + zero)`, per tensor or along `along`.
pub fn quantize_linear(
    along: i64,
    x: &View,
    scale: &View,
    zero: Option<&View>,
    y: &View,
) -> Result<StepDraft, String> {
    let inputs = operands(along, x, scale, zero)?;
    let zero = zero.map(|_| Expr::Input(2));
    let expr = quantized((Expr::Input(0), x.element), Expr::Input(1), zero, y.element)?;
    Ok(StepDraft { op: "QuantizeLinear", ..work(&expr, &inputs, y)? })
}

/// `saturate(round(x / scale) + zero)` as `element`. Of halves, whose own error is larger, the
/// quotient is a product with the inverse: a division takes longer than reading and writing.
fn quantized(
    (x, stored): (Expr, Element),
    scale: Expr,
    zero: Option<Expr>,
    element: Element,
) -> Result<Expr, String> {
    let (low, high) = match element {
        Element::U8 => (0.0, 255.0),
        Element::I8 => (-128.0, 127.0),
        Element::U16 => (0.0, 65535.0),
        Element::I16 => (-32768.0, 32767.0),
        other => return Err(format!("quantization to {other:?} is not supported")),
    };
    let real = |x: Expr| Expr::Cast(Element::F32, Box::new(x));
    let scaled = match stored {
        Element::F16 | Element::BF16 => {
            binary(Binary::Mul, real(x), binary(Binary::Div, Expr::Float(1.0), real(scale)))
        }
        _ => binary(Binary::Div, real(x), real(scale)),
    };
    let mut whole = Expr::Unary(Unary::Round, Box::new(scaled));
    if let Some(zero) = zero {
        whole = binary(Binary::Add, whole, real(zero));
    }
    let bound = |value: f32| Some(Box::new(Expr::Float(value)));
    Ok(Expr::Cast(element, Box::new(Expr::Clip(Box::new(whole), bound(low), bound(high)))))
}

/// `y = (x - zero) * scale`, per tensor or along `along`.
pub fn dequantize_linear(
    along: i64,
    x: &View,
    scale: &View,
    zero: Option<&View>,
    y: &View,
) -> Result<StepDraft, String> {
    if x.element.is_float() || x.element == Element::Bool {
        return Err(format!("quantized {:?} is not supported", x.element));
    }
    let inputs = operands(along, x, scale, zero)?;
    let zero = zero.map(|_| Expr::Input(2));
    let expr = dequantized(Expr::Input(0), Expr::Input(1), zero, x.element);
    Ok(StepDraft { op: "DequantizeLinear", ..work(&expr, &inputs, y)? })
}

/// `(x - zero) * scale` in single precision, `x` stored as `element`.
fn dequantized(x: Expr, scale: Expr, zero: Option<Expr>, element: Element) -> Expr {
    // Differences of up to 16 bits are exact in single precision; larger ones are computed in
    // integers, which takes several times as long.
    let small = matches!(element, Element::U8 | Element::I8 | Element::U16 | Element::I16);
    let kind = if small { Element::F32 } else { Element::I64 };
    let whole = |x: Expr| Expr::Cast(kind, Box::new(x));
    let distance = match zero {
        Some(zero) => binary(Binary::Sub, whole(x), whole(zero)),
        None => whole(x),
    };
    let real = |x: Expr| Expr::Cast(Element::F32, Box::new(x));
    binary(Binary::Mul, real(distance), real(scale))
}

impl Lowering<'_> {
    /// Quantization and its inverse as an expression, which other element-wise operators become
    /// part of.
    pub(super) fn quantization(
        &mut self,
        node: &GraphNode,
        along: i64,
    ) -> Result<(), UnsupportedReason> {
        let output = Self::output(node)?;
        let (shape, element) = (self.shape(output)?, self.element(output)?);
        let value = |index: usize| node.inputs.get(index).copied().flatten();
        let x = value(0).ok_or("no operand")?;
        let mut chain = Chain::default();
        let quantizes = matches!(node.op, Op::QuantizeLinear { .. });
        if !quantizes {
            let stored = self.element(x)?;
            if stored.is_float() || stored == Element::Bool {
                return Err(format!("quantized {stored:?} is not supported"));
            }
            self.keep_bytes(x)?;
        }
        let of_x = self.expression(&mut chain, node, 0, x, &shape)?;
        let scale = value(1).ok_or("no scale")?;
        let scale = self.quantum_operand(&mut chain, along, scale, &shape)?;
        let zero = match value(2) {
            Some(zero) => Some(self.quantum_operand(&mut chain, along, zero, &shape)?),
            None => None,
        };
        let expr = if quantizes {
            quantized((of_x, self.element(x)?), scale, zero, element)?
        } else {
            dequantized(of_x, scale, zero, self.element(x)?)
        };
        self.defer(output, DeferredValue { expr, inputs: chain.inputs, shape, element });
        Ok(())
    }

    /// Bytes over the range of the numbers themselves and zero, with their scale and zero point.
    pub(super) fn dynamic_quantization(
        &mut self,
        node: &GraphNode,
    ) -> Result<(), UnsupportedReason> {
        let output = |index: usize| {
            let id = node.outputs.get(index).copied().flatten();
            id.ok_or_else(|| format!("output {index} is absent"))
        };
        let x = self.input(node, 0)?;
        let (low, high) = (self.extreme(ReduceKind::Min, &x)?, self.extreme(ReduceKind::Max, &x)?);
        let zero = || Some(Box::new(Expr::Float(0.0)));
        let low_end = Expr::Clip(Box::new(Expr::Input(0)), None, zero());
        let high_end = Expr::Clip(Box::new(Expr::Input(1)), zero(), None);
        let flat =
            Expr::Compare(Compare::Equal, Box::new(high_end.clone()), Box::new(low_end.clone()));
        let steps =
            binary(Binary::Div, binary(Binary::Sub, high_end, low_end.clone()), Expr::Float(255.0));
        let expr = Expr::Where(Box::new(flat), Box::new(Expr::Float(1.0)), Box::new(steps));
        // Single precision whatever that of the model: every sum is multiplied by it.
        let scale = self.packed(&[], Element::F32);
        let ranges = [low.clone(), high];
        self.push(StepDraft { op: "DynamicQuantizeLinear", ..work(&expr, &ranges, &scale)? });
        let below = Expr::Unary(Unary::Neg, Box::new(low_end));
        let at = binary(Binary::Div, below, Expr::Input(1));
        let bound = |value: f32| Some(Box::new(Expr::Float(value)));
        let whole =
            Expr::Unary(Unary::Round, Box::new(Expr::Clip(Box::new(at), bound(0.0), bound(255.0))));
        let zero_point = self.packed(&[], Element::U8);
        let expr = Expr::Cast(Element::U8, Box::new(whole));
        let of = [low, scale.clone()];
        self.push(StepDraft { op: "DynamicQuantizeLinear", ..work(&expr, &of, &zero_point)? });
        let of_x = (Expr::Input(0), x.element);
        let expr = quantized(of_x, Expr::Input(1), Some(Expr::Input(2)), Element::U8)?;
        let (shape, element) = (x.shape.clone(), Element::U8);
        let inputs = vec![x, scale.clone(), zero_point.clone()];
        self.defer(output(0)?, DeferredValue { expr, inputs, shape, element });
        self.define(output(1)?, scale);
        self.define(output(2)?, zero_point);
        Ok(())
    }

    /// The least or the largest of all elements.
    fn extreme(&mut self, kind: ReduceKind, x: &View) -> Result<View, UnsupportedReason> {
        let mut view = x.clone();
        if x.shape.len() > 1 {
            // Rows first: one block for all elements would be slow.
            let fastest = x.memory_order()[x.shape.len() - 1];
            let rows: Vec<usize> =
                (0..x.shape.len()).filter(|axis| *axis != fastest).map(|at| x.shape[at]).collect();
            view = self.packed(&rows, Element::F32);
            self.push(reduce::reduce(kind, x, &[fastest], &view)?);
        }
        let all: Vec<usize> = (0..view.shape.len()).collect();
        let end = self.packed(&[], Element::F32);
        self.push(reduce::reduce(kind, &view, &all, &end)?);
        Ok(end)
    }

    /// A scale or zero point: a constant in full precision, or a value.
    fn quantum_operand(
        &mut self,
        chain: &mut Chain,
        along: i64,
        id: ValueId,
        shape: &[usize],
    ) -> Result<Expr, UnsupportedReason> {
        let constant = self.graph.constant(id).cloned();
        let element = self.element(id)?;
        if let Some(constant) = constant.as_ref().filter(|tensor| tensor.len() == 1)
            && let Some(expr) = scalar(constant, element)
        {
            return Ok(expr);
        }
        let view = match constant {
            Some(tensor) if element.is_float() => self.constant_view(id, &tensor, Element::F32)?,
            _ => self.operand(id)?,
        };
        if view.len() == 1 && view.shape.len() <= 1 {
            return Ok(chain.input(view));
        }
        let x = super::view::packed_in(shape, &(0..shape.len()).collect::<Vec<_>>(), element);
        Ok(chain.input(along_axis(&view, axis(along, shape.len())?, &x)?))
    }
}

fn binary(binary: Binary, a: Expr, b: Expr) -> Expr {
    Expr::Binary(binary, Box::new(a), Box::new(b))
}

/// `x` and its parameters, which have one element or one for every index along a dimension.
fn operands(along: i64, x: &View, scale: &View, zero: Option<&View>) -> Result<Vec<View>, String> {
    let mut inputs = vec![x.clone()];
    for parameter in [Some(scale), zero].into_iter().flatten() {
        if parameter.len() == 1 && parameter.shape.len() <= 1 {
            inputs.push(parameter.clone());
        } else {
            inputs.push(along_axis(parameter, axis(along, x.shape.len())?, x)?);
        }
    }
    Ok(inputs)
}

/// A vector as a tensor that broadcasts to `x` with its elements along `axis`.
fn along_axis(view: &View, axis: usize, x: &View) -> Result<View, String> {
    if view.shape.len() != 1 || x.shape.get(axis) != Some(&view.shape[0]) {
        return Err(format!(
            "{:?} is not one number for each index along {axis} of {:?}",
            view.shape, x.shape
        ));
    }
    let rank = x.shape.len() - axis;
    let (mut shape, mut strides) = (vec![1; rank], vec![0; rank]);
    (shape[0], strides[0]) = (view.shape[0], view.strides[0]);
    Ok(View { shape, strides, slack: 0, ..view.clone() })
}
