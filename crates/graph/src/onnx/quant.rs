//! Quantised operators.

use model::DataType;
use model::op::Op;

use super::context::{Context, MapError, Mapped, invalid, unsupported};
use super::tensor::data_type;
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
        "QLinearMatMul" => cx.emit_all(Op::QLinearMatMul, 8),
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

fn no_blocks(cx: &Context) -> Result<(), MapError> {
    match cx.attributes.int_or("block_size", 0)? {
        0 => Ok(()),
        size => unsupported(format!("blocks of {size}")),
    }
}

fn quantize(cx: &mut Context) -> Mapped {
    no_blocks(cx)?;
    let axis = cx.attributes.int_or("axis", 1)?;
    // Only matters for 8-bit floats.
    cx.attributes.ignore(&["saturate"]);
    if cx.attributes.int_or("precision", 0)? > 1 {
        return unsupported("a division in another precision");
    }
    let dtype = match cx.attributes.int_or("output_dtype", 0)? {
        0 => DataType::U8,
        number => match data_type(number) {
            Some(dtype) => dtype,
            None => return unsupported("an output type without kernels"),
        },
    };
    let given = cx.optional(2).map(|zero| cx.dtype(zero));
    let out = given.unwrap_or(dtype);
    if !out.is_integer() {
        return unsupported(format!("quantization to {out}"));
    }
    cx.emit_all(Op::QuantizeLinear { axis, dtype: out }, 3)
}

fn dequantize(cx: &mut Context) -> Mapped {
    no_blocks(cx)?;
    let axis = cx.attributes.int_or("axis", 1)?;
    let out = cx.attributes.int_or("output_dtype", 0)?;
    let scale = cx.dtype(cx.input(1)?);
    if out != 0 && data_type(out) != Some(scale) {
        return unsupported("an output type other than the scale's");
    }
    cx.emit_all(Op::DequantizeLinear { axis }, 3)
}
