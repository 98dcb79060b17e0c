//! Conversion of elements to another type.

use bytes::Bytes;
use half::{bf16, f16};
use model::DataType;
use model::excerpt::excerpt;
use num_traits::AsPrimitive;

use super::elementwise;
use super::operand::{Element, dtype_of, elements, one};
use super::parallel::in_pieces;
use super::{Kernel, StepFacts};
use crate::buffer::Buffer;
use crate::kernel::{KernelError, invalid};
use crate::string_contents::StringContents;
use crate::value::{TypedTensor, Value, with_number};

pub(crate) fn build(facts: &StepFacts, to: DataType) -> Result<Kernel, KernelError> {
    if dtype_of(facts, 0)? == to {
        return Ok(Kernel::new(|_, mut inputs| one(inputs.take(0)?)));
    }
    Ok(Kernel::new(move |_, inputs| one(convert(inputs.get(0)?, to)?)))
}

/// `value` with each element converted to `to`. Floats are truncated and saturate when converted to
/// integers; integers keep their low bits when converted to narrower ones.
pub(crate) fn convert(value: &Value, to: DataType) -> Result<Value, KernelError> {
    match (value, to) {
        (value, to) if value.dtype() == to => value.try_clone(),
        (Value::String(tensor), to) => parse(tensor, to),
        (Value::Bool(tensor), DataType::String) => {
            texts(tensor, |&x| if x { "True" } else { "False" }.to_string())
        }
        (Value::Bool(tensor), to) => {
            let bytes = Buffer::collect(elements(tensor).iter().map(|&x| u8::from(x)))?;
            convert(&u8::wrap(tensor.shape(), bytes), to)
        }
        (value, DataType::Bool) => {
            with_number!(value, tensor => truth(tensor), _ => Err("not a number".into()))
        }
        (value, DataType::String) => format(value),
        (value, to) => number(value, to),
    }
}

/// Elements that are widened at once.
const BLOCK: usize = 256;

/// A type that holds all numbers of some element types exactly. Conversions go through one of three
/// such types, so that not every pair of types needs code of its own.
trait WideNumber: Copy + Default + Send + Sync + 'static {
    /// Widens the elements of `value` from `start` on.
    fn load(value: &Value, start: usize, block: &mut [Self]);
}

macro_rules! wide {
    ($wide:ty: $($variant:ident),+) => {
        impl WideNumber for $wide {
            fn load(value: &Value, start: usize, block: &mut [Self]) {
                match value {
                    $(Value::$variant(tensor) => {
                        for (slot, &x) in block.iter_mut().zip(&elements(tensor)[start..]) {
                            *slot = x.as_();
                        }
                    })+
                    other => unreachable!("{} is not widened to this type", other.dtype()),
                }
            }
        }
    };
}

wide!(i64: U8, U16, U32, I8, I16, I32, I64);
wide!(u64: U64);
wide!(f64: F16, BF16, F32, F64);

fn number(value: &Value, to: DataType) -> Result<Value, KernelError> {
    // The conversions that models use most, in one pass.
    match (value, to) {
        (Value::U8(x), DataType::F32) => direct(x, f32::from),
        (Value::U8(x), DataType::I64) => direct(x, i64::from),
        (Value::I32(x), DataType::F32) => direct(x, |x| x as f32),
        (Value::I32(x), DataType::I64) => direct(x, i64::from),
        (Value::I64(x), DataType::F32) => direct(x, |x| x as f32),
        (Value::I64(x), DataType::I32) => direct(x, |x| x as i32),
        (Value::F16(x), DataType::F32) => direct(x, f16::to_f32),
        (Value::BF16(x), DataType::F32) => direct(x, bf16::to_f32),
        (Value::F32(x), DataType::F16) => direct(x, f16::from_f32),
        (Value::F32(x), DataType::BF16) => direct(x, bf16::from_f32),
        (Value::F32(x), DataType::I32) => direct(x, |x| x as i32),
        (Value::F32(x), DataType::I64) => direct(x, |x| x as i64),
        (Value::F32(x), DataType::U8) => direct(x, |x| x as u8),
        (Value::F32(x), DataType::F64) => direct(x, f64::from),
        (Value::F64(x), DataType::F32) => direct(x, |x| x as f32),
        (value, to) if value.dtype().is_float() => through::<f64>(value, to),
        (Value::U64(_), to) => through::<u64>(value, to),
        (value, to) => through::<i64>(value, to),
    }
}

fn direct<T: Element + Copy, U: Element>(
    tensor: &TypedTensor<T>,
    f: impl Fn(T) -> U + Sync + Copy,
) -> Result<Value, KernelError> {
    let mut out = Buffer::filled(tensor.len(), U::default())?;
    elementwise::convert(elements(tensor), &mut out, f);
    Ok(U::wrap(tensor.shape(), out))
}

/// Converts through `W`.
fn through<W>(value: &Value, to: DataType) -> Result<Value, KernelError>
where
    W: WideNumber
        + AsPrimitive<u8>
        + AsPrimitive<u16>
        + AsPrimitive<u32>
        + AsPrimitive<u64>
        + AsPrimitive<i8>
        + AsPrimitive<i16>
        + AsPrimitive<i32>
        + AsPrimitive<i64>
        + AsPrimitive<f32>
        + AsPrimitive<f64>,
{
    fn all<W: WideNumber, U: Element>(
        value: &Value,
        f: impl Fn(W) -> U + Sync,
    ) -> Result<Value, KernelError> {
        let mut out = Buffer::filled(value.shape().iter().product(), U::default())?;
        in_pieces(&mut out, &|start: usize, piece: &mut [U]| {
            let mut wide = [W::default(); BLOCK];
            for (index, block) in piece.chunks_mut(BLOCK).enumerate() {
                let wide = &mut wide[..block.len()];
                W::load(value, start + index * BLOCK, wide);
                for (slot, &x) in block.iter_mut().zip(&*wide) {
                    *slot = f(x);
                }
            }
        });
        Ok(U::wrap(value.shape(), out))
    }
    let double = |x: W| -> f64 { x.as_() };
    match to {
        DataType::U8 => all::<W, u8>(value, |x| x.as_()),
        DataType::U16 => all::<W, u16>(value, |x| x.as_()),
        DataType::U32 => all::<W, u32>(value, |x| x.as_()),
        DataType::U64 => all::<W, u64>(value, |x| x.as_()),
        DataType::I8 => all::<W, i8>(value, |x| x.as_()),
        DataType::I16 => all::<W, i16>(value, |x| x.as_()),
        DataType::I32 => all::<W, i32>(value, |x| x.as_()),
        DataType::I64 => all::<W, i64>(value, |x| x.as_()),
        DataType::F16 => all::<W, f16>(value, |x| f16::from_f64(double(x))),
        DataType::BF16 => all::<W, bf16>(value, |x| bf16::from_f64(double(x))),
        DataType::F32 => all::<W, f32>(value, |x| x.as_()),
        DataType::F64 => all::<W, f64>(value, |x| x.as_()),
        DataType::Bool | DataType::String => {
            Err(invalid!("numbers cannot be converted to {to} here"))
        }
    }
}

/// Whether each element differs from zero.
fn truth<T: Element>(tensor: &TypedTensor<T>) -> Result<Value, KernelError> {
    let zero = T::default();
    let data = Buffer::collect(elements(tensor).iter().map(|x| *x != zero))?;
    Ok(bool::wrap(tensor.shape(), data))
}

fn texts<T>(tensor: &TypedTensor<T>, f: impl Fn(&T) -> String) -> Result<Value, KernelError> {
    let mut texts = StringContents::with_capacity(tensor.len(), 0)?;
    for x in elements(tensor) {
        texts.write(f(x).as_bytes())?;
        texts.end()?;
    }
    Ok(Bytes::wrap(tensor.shape(), texts.finish()?))
}

fn format(value: &Value) -> Result<Value, KernelError> {
    match value {
        Value::F16(tensor) => texts(tensor, |x| float_text(x.to_f32().into(), &x.to_f32())),
        Value::BF16(tensor) => texts(tensor, |x| float_text(x.to_f32().into(), &x.to_f32())),
        Value::F32(tensor) => texts(tensor, |x| float_text(f64::from(*x), x)),
        Value::F64(tensor) => texts(tensor, |x| float_text(*x, x)),
        Value::Bool(tensor) => texts(tensor, ToString::to_string),
        Value::U8(tensor) => texts(tensor, ToString::to_string),
        Value::U16(tensor) => texts(tensor, ToString::to_string),
        Value::U32(tensor) => texts(tensor, ToString::to_string),
        Value::U64(tensor) => texts(tensor, ToString::to_string),
        Value::I8(tensor) => texts(tensor, ToString::to_string),
        Value::I16(tensor) => texts(tensor, ToString::to_string),
        Value::I32(tensor) => texts(tensor, ToString::to_string),
        Value::I64(tensor) => texts(tensor, ToString::to_string),
        Value::String(tensor) => Ok(Value::String(tensor.try_clone()?)),
    }
}

/// A float as numpy prints it: the shortest digits that read back, in scientific notation when the
/// magnitude is below 1e-4 or at least 1e16.
fn float_text(wide: f64, exact: &(impl std::fmt::Display + std::fmt::LowerExp)) -> String {
    if wide.is_nan() {
        return "nan".to_string();
    }
    if wide.is_infinite() {
        return if wide > 0.0 { "inf" } else { "-inf" }.to_string();
    }
    let magnitude = wide.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{exact:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let exponent: i32 = exponent.parse().unwrap_or(0);
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let text = exact.to_string();
    if text.contains('.') { text } else { format!("{text}.0") }
}

fn parse(tensor: &TypedTensor<Bytes>, to: DataType) -> Result<Value, KernelError> {
    macro_rules! all {
        ($rust:ty, $parse:expr) => {{
            let mut data: Buffer<$rust> = Buffer::with_capacity(tensor.len())?;
            for bytes in elements(tensor) {
                let text = std::str::from_utf8(bytes).unwrap_or_default().trim();
                let parsed: Option<$rust> = $parse(text);
                data.push(parsed.ok_or_else(|| invalid!("'{}' is not a {to}", excerpt(text)))?)?;
            }
            Ok(<$rust>::wrap(tensor.shape(), data))
        }};
    }
    let float = |text: &str| text.parse::<f64>().ok();
    match to {
        DataType::Bool => all!(bool, |text: &str| match text {
            "True" | "true" | "1" => Some(true),
            "False" | "false" | "0" => Some(false),
            _ => None,
        }),
        DataType::U8 => all!(u8, |text: &str| text.parse().ok()),
        DataType::U16 => all!(u16, |text: &str| text.parse().ok()),
        DataType::U32 => all!(u32, |text: &str| text.parse().ok()),
        DataType::U64 => all!(u64, |text: &str| text.parse().ok()),
        DataType::I8 => all!(i8, |text: &str| text.parse().ok()),
        DataType::I16 => all!(i16, |text: &str| text.parse().ok()),
        DataType::I32 => all!(i32, |text: &str| text.parse().ok()),
        DataType::I64 => all!(i64, |text: &str| text.parse().ok()),
        DataType::F16 => all!(f16, |text| float(text).map(f16::from_f64)),
        DataType::BF16 => all!(bf16, |text| float(text).map(bf16::from_f64)),
        DataType::F32 => all!(f32, |text: &str| text.parse().ok()),
        DataType::F64 => all!(f64, float),
        DataType::String => Ok(Value::String(tensor.try_clone()?)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use model::Tensor as Host;
    use model::op::{Cast, Op};

    fn cast(x: &Host, to: DataType) -> Host {
        run(Op::Cast(Cast { to }), std::slice::from_ref(x)).remove(0)
    }

    #[test]
    fn floats_saturate_and_truncate() {
        let x = floats(&[6], &[-1.9, 300.7, f32::NAN, 1e20, -1e20, 0.5]);
        assert_eq!(values::<u8>(&cast(&x, DataType::U8)), [0, 255, 0, 255, 0, 0]);
        assert_eq!(values::<i64>(&cast(&x, DataType::I64)), [-1, 300, 0, i64::MAX, i64::MIN, 0]);
        assert_eq!(cast(&x, DataType::Bool), bools(&[6], &[true; 6]));
        assert_eq!(cast(&floats(&[2], &[0.0, -0.0]), DataType::Bool), bools(&[2], &[false; 2]));
    }

    #[test]
    fn integers_keep_low_bits() {
        let x = integers(&[3], &[300, -1, i64::MAX]);
        assert_eq!(values::<u8>(&cast(&x, DataType::U8)), [44, 255, 255]);
        assert_eq!(values::<i32>(&cast(&x, DataType::I32)), [300, -1, -1]);
        let round = cast(&cast(&bools(&[2], &[true, false]), DataType::I64), DataType::Bool);
        assert_eq!(round, bools(&[2], &[true, false]));
    }

    #[test]
    fn strings_are_parsed_and_printed() {
        let x = strings(&[5], &["3.25", "1e-5", "NaN", "-INF", "1E5"]);
        let got: Vec<f32> = values(&cast(&x, DataType::F32));
        assert_eq!(got[..2], [3.25, 1e-5]);
        assert!(got[2].is_nan() && got[3] == f32::NEG_INFINITY && got[4] == 1e5);
        let texts = cast(&floats(&[4], &[0.1, 1.0, 1e-5, f32::INFINITY]), DataType::String);
        assert_eq!(texts, strings(&[4], &["0.1", "1.0", "1e-05", "inf"]));
        let huge = cast(&integers(&[1], &[i64::MIN]), DataType::String);
        assert_eq!(huge, strings(&[1], &["-9223372036854775808"]));
        let op = Op::Cast(Cast { to: DataType::I32 });
        assert!(error(op.clone(), &[strings(&[1], &["x"])]).contains("'x'"));
        // What a client sends is part of a message, and neither long nor more than one line.
        let long: &'static str = "a\nb".repeat(100_000).leak();
        let message = error(op, &[strings(&[1], &[long])]);
        assert!(message.len() < 1000 && message.contains("'a\\nba") && !message.contains('\n'));
    }
}
