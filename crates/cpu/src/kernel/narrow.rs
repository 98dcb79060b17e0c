//! Bytes of narrow types as numbers and back, and bits as another type.

use bytes::Bytes;
use model::op::{Encode, Op};
use model::{DataType, NarrowType, Tensor};

use super::operand::{Element, dtype_of, elements, one};
use super::{Inputs, Kernel, KernelResult, StepFacts, no_kernel};
use crate::buffer::Buffer;
use crate::kernel::elementwise;
use crate::kernel::{KernelError, invalid};
use crate::value::Value;

pub(crate) fn build(facts: &StepFacts) -> Result<Kernel, KernelError> {
    let dtype = dtype_of(facts, 0)?;
    match facts.step.op {
        Op::Decode { from } if matches!(dtype, DataType::U8 | DataType::I8) => {
            let table: Vec<f32> = (0..=255).map(|byte| from.decode(byte)).collect();
            Ok(Kernel::new(move |_, inputs| decode(&inputs, &table)))
        }
        Op::Encode(encode) if matches!(dtype, DataType::F32 | DataType::I64) => {
            Ok(Kernel::new(move |_, inputs| encoded(&inputs, encode)))
        }
        Op::BitCast { to } if to.size_bytes() == dtype.size_bytes() => {
            Ok(Kernel::new(move |_, inputs| bit_cast(inputs, to)))
        }
        _ => Err(no_kernel(facts)),
    }
}

fn decode(inputs: &Inputs, table: &[f32]) -> KernelResult {
    let value = inputs.get(0)?;
    let mut out = Buffer::filled(value.shape().iter().product(), 0f32)?;
    match value {
        Value::U8(x) => elementwise::convert(elements(x), &mut out, |x: u8| table[x as usize]),
        Value::I8(x) => {
            elementwise::convert(elements(x), &mut out, |x: i8| table[x as u8 as usize]);
        }
        other => return Err(invalid!("{} are not bytes", other.dtype())),
    }
    one(f32::wrap(value.shape(), out))
}

fn encoded(inputs: &Inputs, encode: Encode) -> KernelResult {
    let Encode { to, saturate, rounding } = encode;
    let value = inputs.get(0)?;
    let mut out = Buffer::filled(value.shape().iter().product(), 0u8)?;
    match value {
        Value::F32(x) => {
            let code = |x: f32| to.encode(x, saturate, rounding);
            elementwise::convert(elements(x), &mut out, code);
        }
        Value::I64(x) => elementwise::convert(elements(x), &mut out, |x: i64| to.low_bits(x)),
        other => return Err(invalid!("{} cannot become {}", other.dtype(), to.name())),
    }
    one(stored(to, value.shape(), out))
}

/// Bytes as the type that holds `narrow`.
fn stored(narrow: NarrowType, shape: &[usize], bytes: Buffer<u8>) -> Value {
    match narrow.storage() {
        DataType::I8 => i8::wrap(shape, bytes.cast()),
        _ => u8::wrap(shape, bytes),
    }
}

fn bit_cast(mut inputs: Inputs, to: DataType) -> KernelResult {
    let tensor = inputs.take(0)?.into_host()?;
    let raw: Bytes = tensor.raw().cloned().ok_or("strings have no bits")?;
    let shape = tensor.shape().to_vec();
    let tensor = Tensor::from_raw(to, shape, raw).map_err(|error| error.to_string())?;
    one(Value::from_host(&tensor)?)
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use model::narrow::PowerRounding;

    #[test]
    fn codes_round_trip() {
        let x = floats(&[4], &[0.5, -448.0, 1e9, 3.1]);
        let to = NarrowType::F8E4M3Fn;
        let encode = Encode { to, saturate: true, rounding: PowerRounding::Up };
        let codes = run(Op::Encode(encode), &[x]).remove(0);
        let back = run(Op::Decode { from: to }, &[codes]).remove(0);
        assert_eq!(values::<f32>(&back), [0.5, -448.0, 448.0, 3.0]);
    }

    #[test]
    fn bits_are_kept() {
        let bits = run(Op::BitCast { to: DataType::I32 }, &[floats(&[2], &[1.0, -0.0])]).remove(0);
        assert_eq!(values::<i32>(&bits), [0x3f80_0000, i32::MIN]);
        assert!(error(Op::BitCast { to: DataType::I64 }, &[floats(&[1], &[1.0])]).contains("FP32"));
    }
}
