//! Random numbers.

use model::op::{Binary, Cast, Compare, Distribution, Draw, Op};
use model::{DataType, ValueId};

use super::context::{Context, MapError, Mapped, invalid, unsupported};
use super::tensor::{data_type, data_type_name};

pub(crate) fn map(cx: &mut Context, op: &str) -> Mapped {
    match op {
        "RandomNormal" => from_shape(cx, true),
        "RandomUniform" => from_shape(cx, false),
        "RandomNormalLike" => like(cx, true),
        "RandomUniformLike" => like(cx, false),
        "Bernoulli" => {
            let x = cx.input(0)?;
            let (dtype, seed) = (result_type(cx, cx.dtype(x))?, seed(cx)?);
            let distribution = Distribution::Bernoulli;
            cx.emit_all(Op::Draw(Draw { distribution, dtype, seed }), 1)
        }
        "Multinomial" => {
            let count = cx.attributes.size_or("sample_size", 1)?;
            let (dtype, seed) = (result_type(cx, DataType::I32)?, seed(cx)?);
            let distribution = Distribution::Multinomial { count };
            cx.emit_all(Op::Draw(Draw { distribution, dtype, seed }), 1)
        }
        _ => Ok(false),
    }
}

/// The bits of the attribute 'seed', which is a number of any kind.
pub(super) fn seed(cx: &Context) -> Result<Option<u32>, MapError> {
    if let Ok(Some(seed)) = cx.attributes.int("seed") {
        return Ok(Some(seed as u32));
    }
    Ok(cx.attributes.float("seed")?.map(f32::to_bits))
}

fn result_type(cx: &Context, default: DataType) -> Result<DataType, MapError> {
    match cx.attributes.int("dtype")? {
        None => Ok(default),
        Some(number) => match data_type(number) {
            Some(dtype) if dtype != DataType::String => Ok(dtype),
            _ => unsupported(format!("random {}", data_type_name(number))),
        },
    }
}

fn distribution(cx: &Context, normal: bool) -> Result<Distribution, MapError> {
    let a = &cx.attributes;
    Ok(match normal {
        true => Distribution::Normal {
            mean: a.float_or("mean", 0.0)?,
            scale: a.float_or("scale", 1.0)?,
        },
        false => {
            Distribution::Uniform { low: a.float_or("low", 0.0)?, high: a.float_or("high", 1.0)? }
        }
    })
}

fn from_shape(cx: &mut Context, normal: bool) -> Mapped {
    cx.at_most(0)?;
    let distribution = distribution(cx, normal)?;
    let (dtype, seed) = (result_type(cx, DataType::F32)?, seed(cx)?);
    let Some(shape) = cx.attributes.ints("shape") else {
        return invalid("attribute 'shape' is missing");
    };
    let shape = cx.ints(shape)?;
    cx.emit(Op::Draw(Draw { distribution, dtype, seed }), vec![Some(shape)])
}

fn like(cx: &mut Context, normal: bool) -> Mapped {
    cx.at_most(1)?;
    let x = cx.input(0)?;
    let distribution = distribution(cx, normal)?;
    let (dtype, seed) = (result_type(cx, cx.dtype(x))?, seed(cx)?);
    let shape = cx.part(Op::Shape { start: 0, end: None }, &[x])?;
    cx.emit(Op::Draw(Draw { distribution, dtype, seed }), vec![Some(shape)])
}

/// Dropout in training: elements are kept by chance, and scaled so that their mean stays.
pub(super) fn dropped(cx: &mut Context, seed: Option<u32>, ratio: f32) -> Mapped {
    cx.at_most(3)?;
    let x = cx.input(0)?;
    let ratio: ValueId = match cx.optional(1) {
        Some(ratio) => cx.part(Op::Cast(Cast { to: DataType::F32 }), &[ratio])?,
        None => cx.scalar(DataType::F32, f64::from(ratio))?,
    };
    let shape = cx.part(Op::Shape { start: 0, end: None }, &[x])?;
    let distribution = Distribution::Uniform { low: 0.0, high: 1.0 };
    let dtype = DataType::F32;
    let chance = cx.part(Op::Draw(Draw { distribution, dtype, seed }), &[shape])?;
    let kept = cx.part(Op::Compare(Compare::GreaterOrEqual), &[chance, ratio])?;
    if cx.wants(1) {
        cx.emit_identity(1, kept)?;
    }
    let dtype = cx.dtype(x);
    let (one, zero) = (cx.scalar(DataType::F32, 1.0)?, cx.scalar(dtype, 0.0)?);
    let share = cx.part(Op::Binary(Binary::Sub), &[one, ratio])?;
    let share = cx.part(Op::Cast(Cast { to: dtype }), &[share])?;
    let scaled = cx.part(Op::Binary(Binary::Div), &[x, share])?;
    cx.emit(Op::Where, vec![Some(kept), Some(scaled), Some(zero)])
}
