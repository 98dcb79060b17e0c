//! Quantised operators.

use model::DataType;
use model::op::Op;

use super::context::{Context, MapError, Mapped, invalid, unsupported};
use super::narrow;
use super::tensor::{data_type, held_type};
use super::window;
use crate::content;

pub(crate) fn map(cx: &mut Context, op: &str) -> Mapped {
    match op {
        "QuantizeLinear" | "DequantizeLinear" => check_scales(cx, &[1])?,
        "QLinearMatMul" | "QLinearConv" => check_scales(cx, &[1, 4, 6])?,
        _ => {}
    }
    match op {
        "QuantizeLinear" => quantize(cx),
        "DequantizeLinear" => dequantize(cx),
        "DynamicQuantizeLinear" => cx.emit_all(Op::DynamicQuantizeLinear, 1),
        "MatMulInteger" => cx.emit_all(Op::MatMulInteger, 4),
        "ConvInteger" => {
            let conv = window::conv(cx)?;
            cx.emit_all(Op::ConvInteger(conv), 4)
        }
        "QLinearMatMul" => {
            // Scales of half precision are exact in single precision.
            for index in [1, 4, 6] {
                let scale = cx.input(index)?;
                cx.inputs[index] = Some(narrow::as_type(cx, scale, DataType::F32)?);
            }
            cx.emit_all(Op::QLinearMatMul, 8)
        }
        "QLinearConv" => {
            let conv = window::conv(cx)?;
            cx.emit_all(Op::QLinearConv(conv), 9)
        }
        _ => Ok(false),
    }
}

/// Fails for constant scales that no number can be divided by.
fn check_scales(cx: &Context, operands: &[usize]) -> Result<(), MapError> {
    for index in operands {
        let scales = cx.optional(*index).and_then(|id| cx.graph.constant(id));
        let scales = scales.and_then(content::floats).unwrap_or_default();
        if let Some(scale) = scales.iter().find(|scale| !(**scale > 0.0 && scale.is_finite())) {
            return invalid(format!("a scale of {scale}, which must be positive and finite"));
        }
    }
    Ok(())
}

fn quantize(cx: &mut Context) -> Mapped {
    // The shape of the scales tells how large blocks are.
    cx.attributes.ignore(&["block_size", "saturate"]);
    let axis = cx.attributes.int_or("axis", 1)?;
    if cx.attributes.int_or("precision", 0)? > 1 {
        return unsupported("a division in another precision");
    }
    let dtype = match cx.attributes.int_or("output_dtype", 0)? {
        0 => (DataType::U8, None),
        number => match held_type(number) {
            Some(held) => held,
            None => return unsupported("an output type without kernels"),
        },
    };
    let given = cx.optional(2).map(|zero| (cx.dtype(zero), cx.narrow(zero)));
    let (out, narrow) = given.unwrap_or(dtype);
    cx.at_most(3)?;
    match narrow {
        Some(to) if to.is_float() => return narrow::quantize(cx, axis, to),
        Some(to) => return narrow::quantize_integers(cx, axis, to),
        None => {}
    }
    if !out.is_integer() {
        return unsupported(format!("quantization to {out}"));
    }
    cx.emit_all(Op::QuantizeLinear { axis, dtype: out }, 3)
}

fn dequantize(cx: &mut Context) -> Mapped {
    cx.attributes.ignore(&["block_size"]);
    let axis = cx.attributes.int_or("axis", 1)?;
    let out = cx.attributes.int_or("output_dtype", 0)?;
    let scale = cx.dtype(cx.input(1)?);
    let to = if out == 0 { Some(scale) } else { data_type(out) };
    let Some(to) = to else { return unsupported("an output type without kernels") };
    cx.at_most(3)?;
    let x = cx.input(0)?;
    if cx.narrow(x).is_some_and(|narrow| narrow.is_float()) {
        return narrow::dequantize(cx, axis, to);
    }
    if to != scale {
        let inputs = cx.inputs.clone();
        let y = cx.parts(Op::DequantizeLinear { axis }, inputs, 1)?[0];
        return cx.emit(Op::Cast(model::op::Cast { to }), vec![Some(y)]);
    }
    cx.emit_all(Op::DequantizeLinear { axis }, 3)
}
