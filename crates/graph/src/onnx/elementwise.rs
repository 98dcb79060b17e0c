//! Element-wise operators, casts and constants.

use bytes::Bytes;
use model::op::{Binary, Cast, Compare, Op, Unary, Variadic};
use model::{DataType, NarrowType, Tensor, ValueId};

use super::context::{Context, MapError, Mapped, invalid, unsupported};
use super::narrow;
use super::tensor::{data_type_name, held_type, narrow_type, to_tensor};

pub(crate) fn map(cx: &mut Context, op: &str) -> Mapped {
    if let Some(unary) = plain_unary(op) {
        return cx.emit_all(Op::Unary(unary), 1);
    }
    if let Some(unary) = unary_with_attributes(cx, op)? {
        return cx.emit_all(Op::Unary(unary), 1);
    }
    if let Some(binary) = binary(op) {
        return legacy_broadcast(cx, Op::Binary(binary));
    }
    if let Some(compare) = compare(op) {
        return legacy_broadcast(cx, Op::Compare(compare));
    }
    match op {
        "Sum" => variadic(cx, Variadic::Sum),
        "Mean" => variadic(cx, Variadic::Mean),
        "Max" => variadic(cx, Variadic::Max),
        "Min" => variadic(cx, Variadic::Min),
        "Mod" => modulo(cx),
        "BitShift" => shift(cx),
        "Where" => cx.emit_all(Op::Where, 3),
        "Clip" => clip(cx),
        "PRelu" => prelu(cx),
        "Cast" => cast(cx),
        "CastLike" => cast_like(cx),
        "BitCast" => bit_cast(cx),
        "Identity" => cx.emit_all(Op::Identity, 1),
        "Dropout" => dropout(cx),
        "Constant" => constant(cx),
        "Affine" => affine(cx),
        _ => Ok(false),
    }
}

fn plain_unary(op: &str) -> Option<Unary> {
    Some(match op {
        "Abs" => Unary::Abs,
        "Acos" => Unary::Acos,
        "Acosh" => Unary::Acosh,
        "Asin" => Unary::Asin,
        "Asinh" => Unary::Asinh,
        "Atan" => Unary::Atan,
        "Atanh" => Unary::Atanh,
        "BitwiseNot" => Unary::BitNot,
        "Ceil" => Unary::Ceil,
        "Cos" => Unary::Cos,
        "Cosh" => Unary::Cosh,
        "Erf" => Unary::Erf,
        "Exp" => Unary::Exp,
        "Floor" => Unary::Floor,
        "HardSwish" => Unary::HardSwish,
        "IsNaN" => Unary::IsNan,
        "Log" => Unary::Log,
        "Mish" => Unary::Mish,
        "Neg" => Unary::Neg,
        "Not" => Unary::Not,
        "Reciprocal" => Unary::Reciprocal,
        "Relu" => Unary::Relu,
        "Round" => Unary::Round,
        "Sigmoid" => Unary::Sigmoid,
        "Sign" => Unary::Sign,
        "Sin" => Unary::Sin,
        "Sinh" => Unary::Sinh,
        "Softplus" => Unary::Softplus,
        "Softsign" => Unary::Softsign,
        "Sqrt" => Unary::Sqrt,
        "Tan" => Unary::Tan,
        "Tanh" => Unary::Tanh,
        _ => return None,
    })
}

fn unary_with_attributes(cx: &Context, op: &str) -> Result<Option<Unary>, MapError> {
    let a = &cx.attributes;
    Ok(Some(match op {
        "Celu" => Unary::Celu { alpha: a.float_or("alpha", 1.0)? },
        "Elu" => Unary::Elu { alpha: a.float_or("alpha", 1.0)? },
        "Gelu" => match a.string("approximate")?.as_deref() {
            None | Some("none") => Unary::Gelu { tanh: false },
            Some("tanh") => Unary::Gelu { tanh: true },
            Some(other) => return unsupported(format!("approximate '{other}'")),
        },
        "HardSigmoid" => {
            Unary::HardSigmoid { alpha: a.float_or("alpha", 0.2)?, beta: a.float_or("beta", 0.5)? }
        }
        "IsInf" => Unary::IsInf {
            positive: a.flag("detect_positive", true)?,
            negative: a.flag("detect_negative", true)?,
        },
        "LeakyRelu" => Unary::LeakyRelu { alpha: a.float_or("alpha", 0.01)? },
        "Selu" if cx.opset < 6 => {
            Unary::Selu { alpha: a.float_or("alpha", 1.6732)?, gamma: a.float_or("gamma", 1.0507)? }
        }
        "Selu" => Unary::Selu {
            alpha: a.float_or("alpha", 1.673_263_2)?,
            gamma: a.float_or("gamma", 1.050_701)?,
        },
        "Shrink" => {
            Unary::Shrink { bias: a.float_or("bias", 0.0)?, lambda: a.float_or("lambd", 0.5)? }
        }
        "Swish" => Unary::Silu { alpha: a.float_or("alpha", 1.0)? },
        "ThresholdedRelu" => Unary::ThresholdedRelu { alpha: a.float_or("alpha", 1.0)? },
        _ => return Ok(None),
    }))
}

fn binary(op: &str) -> Option<Binary> {
    Some(match op {
        "Add" => Binary::Add,
        "Sub" => Binary::Sub,
        "Mul" => Binary::Mul,
        "Div" => Binary::Div,
        "Pow" => Binary::Pow,
        "And" => Binary::And,
        "Or" => Binary::Or,
        "Xor" => Binary::Xor,
        "BitwiseAnd" => Binary::BitAnd,
        "BitwiseOr" => Binary::BitOr,
        "BitwiseXor" => Binary::BitXor,
        _ => return None,
    })
}

fn compare(op: &str) -> Option<Compare> {
    Some(match op {
        "Equal" => Compare::Equal,
        "Less" => Compare::Less,
        "LessOrEqual" => Compare::LessOrEqual,
        "Greater" => Compare::Greater,
        "GreaterOrEqual" => Compare::GreaterOrEqual,
        _ => return None,
    })
}

/// Before opset 7 the second operand is aligned by an attribute instead of from the right.
fn legacy_broadcast(cx: &mut Context, op: Op) -> Mapped {
    if cx.opset >= 7 {
        return cx.emit_all(op, 2);
    }
    cx.at_most(2)?;
    let broadcast = cx.attributes.flag("broadcast", false)?;
    let axis = cx.attributes.int("axis")?.filter(|_| broadcast);
    let (a, mut b) = (cx.input(0)?, cx.input(1)?);
    if !broadcast && cx.shape(a) != cx.shape(b) {
        return unsupported("operands of different shapes without broadcast");
    }
    if let Some(axis) = axis {
        let (rank, width) = (cx.rank(a)? as i64, cx.rank(b)? as i64);
        let axis = if axis < 0 { axis + rank } else { axis };
        let behind = rank - axis - width;
        if axis < 0 || behind < 0 {
            return invalid(format!("axis {axis} for ranks {rank} and {width}"));
        }
        let axes = cx.ints(&(width..width + behind).collect::<Vec<_>>())?;
        b = cx.part(Op::Unsqueeze, &[b, axes])?;
    }
    cx.emit(op, vec![Some(a), Some(b)])
}

fn variadic(cx: &mut Context, op: Variadic) -> Mapped {
    let count = cx.inputs.len();
    cx.emit_all(Op::Variadic(op), count)
}

fn modulo(cx: &mut Context) -> Mapped {
    let fmod = cx.attributes.flag("fmod", false)?;
    let dtype = cx.dtype(cx.input(0)?);
    if dtype.is_float() && !fmod {
        return invalid("fmod must be 1 for floating-point operands");
    }
    cx.emit_all(Op::Binary(if fmod { Binary::Fmod } else { Binary::Mod }), 2)
}

fn shift(cx: &mut Context) -> Mapped {
    let op = match cx.attributes.string("direction")?.as_deref() {
        Some("LEFT") => Binary::ShiftLeft,
        Some("RIGHT") => Binary::ShiftRight,
        _ => return invalid("direction is neither LEFT nor RIGHT"),
    };
    cx.emit_all(Op::Binary(op), 2)
}

fn clip(cx: &mut Context) -> Mapped {
    if cx.opset >= 11 {
        return cx.emit_all(Op::Clip, 3);
    }
    cx.at_most(1)?;
    let x = cx.input(0)?;
    let dtype = cx.dtype(x);
    let (low, high) = (cx.attributes.float("min")?, cx.attributes.float("max")?);
    let mut bound = |value: Option<f32>| value.map(|v| cx.scalar(dtype, f64::from(v))).transpose();
    let (low, high) = (bound(low)?, bound(high)?);
    cx.emit(Op::Clip, vec![Some(x), low, high])
}

fn prelu(cx: &mut Context) -> Mapped {
    cx.at_most(2)?;
    let (x, mut slope) = (cx.input(0)?, cx.input(1)?);
    // Before opset 7 a vector of slopes applies to channels.
    let per_channel = cx.shape(slope).is_some_and(|shape| shape.len() == 1 && !shape[0].is(1));
    if cx.opset < 7 && per_channel {
        let behind = cx.rank(x)?.saturating_sub(2) as i64;
        let axes = cx.ints(&(1..=behind).collect::<Vec<_>>())?;
        slope = cx.part(Op::Unsqueeze, &[slope, axes])?;
    }
    cx.emit(Op::PRelu, vec![Some(x), Some(slope)])
}

fn target_type(cx: &Context) -> Result<(DataType, Option<NarrowType>), MapError> {
    let number = if cx.opset < 6 {
        let name = cx.attributes.string("to")?.unwrap_or_default();
        match name.as_str() {
            "FLOAT" => 1,
            "UINT8" => 2,
            "INT8" => 3,
            "UINT16" => 4,
            "INT16" => 5,
            "INT32" => 6,
            "INT64" => 7,
            "BOOL" => 9,
            "FLOAT16" => 10,
            "DOUBLE" => 11,
            "UINT32" => 12,
            "UINT64" => 13,
            _ => return unsupported(format!("a cast to '{name}'")),
        }
    } else {
        cx.attributes.int_or("to", 0)?
    };
    match held_type(number) {
        Some(held) => Ok(held),
        None => unsupported(format!("a cast to {}", data_type_name(number))),
    }
}

fn cast(cx: &mut Context) -> Mapped {
    let to = target_type(cx)?;
    cx.at_most(1)?;
    cast_to(cx, to)
}

fn cast_to(cx: &mut Context, to: (DataType, Option<NarrowType>)) -> Mapped {
    // Both affect 8-bit floats only.
    cx.attributes.ignore(&["saturate", "round_mode"]);
    let x = cx.input(0)?;
    match (cx.narrow(x), to) {
        (None, (to, None)) => cx.emit(Op::Cast(Cast { to }), vec![Some(x)]),
        _ => narrow::cast(cx, x, to),
    }
}

fn cast_like(cx: &mut Context) -> Mapped {
    cx.at_most(2)?;
    let like = cx.input(1)?;
    cast_to(cx, (cx.dtype(like), cx.narrow(like)))
}

fn bit_cast(cx: &mut Context) -> Mapped {
    let (to, narrow) = target_type(cx)?;
    if narrow.is_some_and(|narrow| narrow.bits() < 8) {
        return unsupported("elements that share a byte");
    }
    cx.emit_all(Op::BitCast { to }, 1)?;
    if let Some(narrow) = narrow {
        cx.mark_narrow(0, narrow);
    }
    Ok(true)
}

fn dropout(cx: &mut Context) -> Mapped {
    let seed = super::random::seed(cx)?;
    let ratio = cx.attributes.float_or("ratio", 0.5)?;
    let training = match cx.opset {
        ..7 => !cx.attributes.flag("is_test", false)?,
        7..12 => false,
        _ => match cx.optional(2) {
            None => false,
            Some(id) => match cx.graph.constant_ints(id).as_deref() {
                Some([flag]) => *flag != 0,
                _ => return unsupported("training mode is not a constant"),
            },
        },
    };
    if training {
        return super::random::dropped(cx, seed, ratio);
    }
    let x = cx.input(0)?;
    if cx.wants(1) {
        // In inference nothing is dropped, so the mask is all true.
        let shape = cx.part(Op::Shape { start: 0, end: None }, &[x])?;
        let value = [1, 0, 0, 0, 0, 0, 0, 0];
        let mask = cx.part(Op::ConstantOfShape { dtype: DataType::Bool, value }, &[shape])?;
        cx.emit_identity(1, mask)?;
    }
    cx.emit_identity(0, x)
}

fn constant(cx: &mut Context) -> Mapped {
    let a = &cx.attributes;
    let vector = |tensor: Result<Tensor, model::TensorError>| match tensor {
        Ok(tensor) => Ok(tensor),
        Err(error) => Err(MapError::Invalid(error.to_string())),
    };
    let mut narrow = None;
    let tensor = if let Some(proto) = a.tensor("value")? {
        narrow = narrow_type(proto.data_type);
        match to_tensor(proto, cx.external) {
            Ok(tensor) => tensor,
            Err(error) if held_type(proto.data_type).is_none() => {
                return unsupported(error.to_string());
            }
            Err(error) => return invalid(error.to_string()),
        }
    } else if let Some(value) = a.float("value_float")? {
        vector(Tensor::from_vec(vec![], vec![value]))?
    } else if let Some(values) = a.floats("value_floats") {
        vector(Tensor::from_vec(vec![values.len()], values.to_vec()))?
    } else if let Some(value) = a.int("value_int")? {
        vector(Tensor::from_vec(vec![], vec![value]))?
    } else if let Some(values) = a.ints("value_ints") {
        vector(Tensor::from_vec(vec![values.len()], values.to_vec()))?
    } else if let Some(text) = a.bytes("value_string") {
        vector(Tensor::from_strings(vec![], vec![text]))?
    } else if let Some(texts) = a.strings("value_strings") {
        let texts: Vec<Bytes> = texts.to_vec();
        vector(Tensor::from_strings(vec![texts.len()], texts))?
    } else {
        return unsupported("a constant without a dense value");
    };
    cx.emit_constant(0, tensor)?;
    if let Some(narrow) = narrow {
        cx.mark_narrow(0, narrow);
    }
    Ok(true)
}

/// `alpha * x + beta`, an experimental operator of the first opset.
fn affine(cx: &mut Context) -> Mapped {
    cx.at_most(1)?;
    let x = cx.input(0)?;
    let dtype = cx.dtype(x);
    let alpha = cx.attributes.float_or("alpha", 1.0)?;
    let beta = cx.attributes.float_or("beta", 0.0)?;
    let (alpha, beta): (ValueId, ValueId) =
        (cx.scalar(dtype, f64::from(alpha))?, cx.scalar(dtype, f64::from(beta))?);
    let scaled = cx.part(Op::Binary(Binary::Mul), &[x, alpha])?;
    cx.emit(Op::Binary(Binary::Add), vec![Some(scaled), Some(beta)])
}

/// The bytes of one element, as [`Op::ConstantOfShape`] stores them.
pub(crate) fn element_bytes(tensor: &Tensor) -> Option<[u8; 8]> {
    let raw = tensor.raw().filter(|_| tensor.len() == 1)?;
    let mut bytes = [0; 8];
    bytes.get_mut(..raw.len())?.copy_from_slice(raw);
    Some(bytes)
}
