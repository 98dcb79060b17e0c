//! Operators with parameters per channel, as chains: batch normalization and quantization.

use model::op::{Binary, Unary};

use super::draft::StepDraft;
use super::elementwise::{Expr, work};
use super::reduce::axis;
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
    let (low, high) = match y.element {
        Element::U8 => (0.0, 255.0),
        Element::I8 => (-128.0, 127.0),
        Element::U16 => (0.0, 65535.0),
        Element::I16 => (-32768.0, 32767.0),
        other => return Err(format!("quantization to {other:?} is not supported")),
    };
    let inputs = operands(along, x, scale, zero)?;
    let real = Expr::Cast(Element::F32, Box::new(Expr::Input(0)));
    let scaled = binary(Binary::Div, real, Expr::Input(1));
    let mut whole = Expr::Unary(Unary::Round, Box::new(scaled));
    if zero.is_some() {
        let zero = Expr::Cast(Element::F32, Box::new(Expr::Input(2)));
        whole = binary(Binary::Add, whole, zero);
    }
    let bound = |value: f32| Some(Box::new(Expr::Float(value)));
    let expr =
        Expr::Cast(y.element, Box::new(Expr::Clip(Box::new(whole), bound(low), bound(high))));
    Ok(StepDraft { op: "QuantizeLinear", ..work(&expr, &inputs, y)? })
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
    // The difference is computed in integers: single precision cannot represent a large one.
    let whole = |index: usize| Expr::Cast(Element::I64, Box::new(Expr::Input(index)));
    let mut distance = whole(0);
    if zero.is_some() {
        distance = binary(Binary::Sub, distance, whole(2));
    }
    let real = Expr::Cast(Element::F32, Box::new(distance));
    let expr = binary(Binary::Mul, real, Expr::Input(1));
    Ok(StepDraft { op: "DequantizeLinear", ..work(&expr, &inputs, y)? })
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
