//! Operators of Brevitas and QONNX, which train networks with few bits: numbers that are rounded to
//! steps and stay numbers.

use model::op::{Binary, Compare, Op, Unary};
use model::{DataType, ValueId};

use super::context::{Context, MapError, Mapped, invalid, unsupported};

/// Integers of more bits than single precision holds exactly are refused.
const MAX_BITS: f32 = 24.0;

pub(crate) fn map(cx: &mut Context, op: &str) -> Mapped {
    match op {
        "Quant" | "IntQuant" => quant(cx),
        "BipolarQuant" => bipolar(cx),
        _ => Ok(false),
    }
}

/// `x, scale, zero point, bits`: `(clip(round(x / scale + zero)) - zero) * scale`.
fn quant(cx: &mut Context) -> Mapped {
    cx.at_most(4)?;
    let (x, scale, zero) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let bits = cx.input(3)?;
    let Some(bits) = cx.graph.constant_float(bits) else {
        return unsupported("a number of bits that depends on the data");
    };
    if !(1.0..=MAX_BITS).contains(&bits) {
        return invalid(format!("{bits} bits"));
    }
    let signed = cx.attributes.flag("signed", true)?;
    let narrow = cx.attributes.flag("narrow", false)?;
    let round = match cx.attributes.string("rounding_mode")?.as_deref() {
        None | Some("ROUND") => Unary::Round,
        Some("CEIL") => Unary::Ceil,
        Some("FLOOR") => Unary::Floor,
        Some(other) => return unsupported(format!("rounding mode {other}")),
    };
    let (low, high) = range(bits, signed, narrow);
    let steps = cx.part(Op::Binary(Binary::Div), &[x, scale])?;
    let moved = cx.part(Op::Binary(Binary::Add), &[steps, zero])?;
    let dtype = cx.dtype(moved);
    let (low, high) = (cx.scalar(dtype, low)?, cx.scalar(dtype, high)?);
    let clipped = cx.part(Op::Clip, &[moved, low, high])?;
    let rounded = cx.part(Op::Unary(round), &[clipped])?;
    let back = cx.part(Op::Binary(Binary::Sub), &[rounded, zero])?;
    cx.emit(Op::Binary(Binary::Mul), vec![Some(back), Some(scale)])
}

/// The smallest and the largest integer.
fn range(bits: f32, signed: bool, narrow: bool) -> (f64, f64) {
    let narrowed = f64::from(u8::from(narrow));
    if signed {
        let half = f64::from(bits - 1.0).exp2();
        (narrowed - half, half - 1.0)
    } else {
        (0.0, f64::from(bits).exp2() - 1.0 - narrowed)
    }
}

/// `x, scale`: the scale with the sign of `x`.
fn bipolar(cx: &mut Context) -> Mapped {
    cx.at_most(2)?;
    let (x, scale) = (cx.input(0)?, cx.input(1)?);
    let dtype = cx.dtype(x);
    let zero = cx.scalar(dtype, 0.0)?;
    let at_least = cx.part(Op::Compare(Compare::GreaterOrEqual), &[x, zero])?;
    let signs = signs(cx, dtype)?;
    let sign = cx.part(Op::Where, &[at_least, signs.0, signs.1])?;
    cx.emit(Op::Binary(Binary::Mul), vec![Some(sign), Some(scale)])
}

fn signs(cx: &mut Context, dtype: DataType) -> Result<(ValueId, ValueId), MapError> {
    Ok((cx.scalar(dtype, 1.0)?, cx.scalar(dtype, -1.0)?))
}
