//! Casts and quantisation with narrow types, as operators on their bytes.

use model::narrow::PowerRounding;
use model::op::{Binary, Cast, Encode, Op};
use model::{DataType, NarrowType, ValueId};

use super::context::{Context, MapError, Mapped, invalid, unsupported};

/// What bytes are, or how a cast makes them.
pub(super) fn encoding(cx: &Context, to: NarrowType) -> Result<Encode, MapError> {
    let saturate = cx.attributes.flag("saturate", true)?;
    let rounding = match cx.attributes.string("round_mode")?.as_deref() {
        None | Some("up") => PowerRounding::Up,
        Some("down") => PowerRounding::Down,
        Some("nearest") => PowerRounding::Nearest,
        Some(other) => return unsupported(format!("round_mode '{other}'")),
    };
    Ok(Encode { to, saturate, rounding })
}

/// The numbers that the bytes of a narrow float stand for; another value unchanged.
pub(super) fn decoded(cx: &mut Context, x: ValueId) -> Result<ValueId, MapError> {
    match cx.narrow(x) {
        Some(from) if from.is_float() => cx.part(Op::Decode { from }, &[x]),
        _ => Ok(x),
    }
}

/// `x` as `dtype`, without a node where it is already.
pub(super) fn as_type(cx: &mut Context, x: ValueId, to: DataType) -> Result<ValueId, MapError> {
    if cx.dtype(x) == to && !cx.narrow(x).is_some_and(NarrowType::is_float) {
        return Ok(x);
    }
    let x = decoded(cx, x)?;
    if cx.dtype(x) == to { Ok(x) } else { cx.part(Op::Cast(Cast { to }), &[x]) }
}

/// A cast from or to a narrow type.
pub(super) fn cast(cx: &mut Context, x: ValueId, to: (DataType, Option<NarrowType>)) -> Mapped {
    match to {
        (_, Some(narrow)) if cx.narrow(x) == Some(narrow) => cx.emit_identity(0, x),
        (_, Some(narrow)) => {
            let encode = encoding(cx, narrow)?;
            let number = if narrow.is_float() { DataType::F32 } else { DataType::I64 };
            let x = as_type(cx, x, number)?;
            cx.emit(Op::Encode(encode), vec![Some(x)])
        }
        (dtype, None) => {
            let x = decoded(cx, x)?;
            if cx.dtype(x) == dtype {
                return cx.emit_identity(0, x);
            }
            cx.emit(Op::Cast(Cast { to: dtype }), vec![Some(x)])
        }
    }
}

/// A scale or zero point that broadcasts against `x`: along `axis`, one for each or one for each
/// block.
fn spread(cx: &mut Context, x: ValueId, scale: ValueId, axis: i64) -> Result<ValueId, MapError> {
    let rank = cx.rank(x)?;
    let at = if axis < 0 { axis + rank as i64 } else { axis };
    let scale_rank = cx.rank(scale)?;
    if scale_rank == 0 {
        return Ok(scale);
    }
    let Some(at) = usize::try_from(at).ok().filter(|at| *at < rank) else {
        return invalid(format!("axis {axis} of rank {rank}"));
    };
    if scale_rank == 1 {
        let mut target = vec![1; rank];
        target[at] = -1;
        let target = cx.ints(&target)?;
        return cx.part(Op::Reshape { allow_zero: false }, &[scale, target]);
    }
    let sizes = |id: ValueId| -> Option<Vec<i64>> {
        cx.shape(id)?.iter().map(model::dim::SymDim::fixed).collect()
    };
    let (Some(whole), Some(blocks)) = (sizes(x), sizes(scale)) else {
        return unsupported("blocks of a size that is not known");
    };
    if blocks.len() != rank || blocks[at] == 0 || whole[at] % blocks[at] != 0 {
        return invalid(format!("scales of shape {blocks:?} for {whole:?}"));
    }
    let mut wide = blocks.clone();
    wide.insert(at + 1, whole[at] / blocks[at]);
    let mut flat = blocks;
    flat[at] = whole[at];
    let (after, wide) = (cx.ints(&[at as i64 + 1])?, cx.ints(&wide)?);
    let flat = cx.ints(&flat)?;
    let column = cx.part(Op::Unsqueeze, &[scale, after])?;
    let repeated = cx.part(Op::Expand, &[column, wide])?;
    cx.part(Op::Reshape { allow_zero: false }, &[repeated, flat])
}

/// Codes times their scales.
pub(super) fn dequantize(cx: &mut Context, axis: i64, to: DataType) -> Mapped {
    let (x, scale) = (cx.input(0)?, cx.input(1)?);
    let numbers = decoded(cx, x)?;
    let scale = as_type(cx, scale, DataType::F32)?;
    let scale = spread(cx, x, scale, axis)?;
    let y = cx.part(Op::Binary(Binary::Mul), &[numbers, scale])?;
    let y = as_type(cx, y, to)?;
    cx.emit_identity(0, y)
}

/// The codes of numbers over their scales.
pub(super) fn quantize(cx: &mut Context, axis: i64, to: NarrowType) -> Mapped {
    let encode = encoding(cx, to)?;
    let (x, scale) = (cx.input(0)?, cx.input(1)?);
    let x = as_type(cx, x, DataType::F32)?;
    let scale = as_type(cx, scale, DataType::F32)?;
    let scale = spread(cx, x, scale, axis)?;
    let mut y = cx.part(Op::Binary(Binary::Div), &[x, scale])?;
    if let Some(zero) = cx.optional(2).filter(|_| to == NarrowType::F4E2M1) {
        let zero = decoded(cx, zero)?;
        let zero = spread(cx, x, zero, axis)?;
        y = cx.part(Op::Binary(Binary::Add), &[y, zero])?;
    }
    cx.emit(Op::Encode(encode), vec![Some(y)])
}

/// Integers of fewer than eight bits: quantised to bytes, and limited to their range.
pub(super) fn quantize_integers(cx: &mut Context, axis: i64, to: NarrowType) -> Mapped {
    let dtype = to.storage();
    let Some((low, high)) = to.range() else { return invalid("not an integer") };
    let inputs = cx.inputs.clone();
    let bytes = cx.parts(Op::QuantizeLinear { axis, dtype }, inputs, 1)?[0];
    let (low, high) = (cx.scalar(dtype, low as f64)?, cx.scalar(dtype, high as f64)?);
    cx.emit(Op::Clip, vec![Some(bytes), Some(low), Some(high)])?;
    cx.mark_narrow(0, to);
    Ok(true)
}
