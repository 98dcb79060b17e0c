//! Powers: the exponent may have another type than the base, whose type the result has.

use model::DataType;
use rten_tensor::prelude::*;

use super::{broadcast, combine};
use crate::kernel::cast::convert;
use crate::kernel::operand::{dtype_of, through_f32};
use crate::kernel::{Context, Inputs, Kernel, KernelResult, StepFacts, no_kernel};

pub(super) fn build(facts: &StepFacts, dtype: DataType) -> Result<Kernel, String> {
    let exponent = dtype_of(facts, 1)?;
    if !(exponent.is_float() || exponent.is_integer()) {
        return Err(no_kernel(facts));
    }
    match dtype {
        DataType::F16 | DataType::BF16 => Ok(through_f32(dtype, Kernel::new(single))),
        DataType::F32 => Ok(Kernel::new(single)),
        DataType::F64 => Ok(Kernel::new(|context, inputs| {
            combine(context, with_exponent(inputs, DataType::F64)?, f64::powf)
        })),
        DataType::I32 if exponent.is_integer() => Ok(Kernel::new(|context, inputs| {
            let inputs = with_exponent(inputs, DataType::I64)?;
            broadcast(context, &inputs, |a: i32, e: i64| power(i64::from(a), e) as i32)
        })),
        DataType::I64 if exponent.is_integer() => Ok(Kernel::new(|context, inputs| {
            let inputs = with_exponent(inputs, DataType::I64)?;
            broadcast(context, &inputs, power)
        })),
        DataType::I32 => Ok(Kernel::new(|context, inputs| {
            let inputs = with_exponent(inputs, DataType::F64)?;
            broadcast(context, &inputs, |a: i32, e: f64| f64::from(a).powf(e) as i32)
        })),
        DataType::I64 => Ok(Kernel::new(|context, inputs| {
            let inputs = with_exponent(inputs, DataType::F64)?;
            broadcast(context, &inputs, |a: i64, e: f64| (a as f64).powf(e) as i64)
        })),
        _ => Err(no_kernel(facts)),
    }
}

/// The operands with the exponent as `dtype`.
fn with_exponent(mut inputs: Inputs, dtype: DataType) -> Result<Inputs, String> {
    let exponent = inputs.get(1)?;
    if exponent.dtype() != dtype {
        let converted = convert(exponent, dtype)?;
        inputs.replace(1, converted);
    }
    Ok(inputs)
}

fn single(context: &Context, inputs: Inputs) -> KernelResult {
    let inputs = with_exponent(inputs, DataType::F32)?;
    let exponent = inputs.typed::<f32>(1)?;
    // The exponents models have most, which need no logarithm.
    match (exponent.len() == 1).then(|| exponent.iter().next().copied()).flatten() {
        Some(2.0) => combine(context, inputs, |x: f32, _| x * x),
        Some(3.0) => combine(context, inputs, |x: f32, _| x * x * x),
        _ => combine(context, inputs, f32::powf),
    }
}

/// `base` to the `exponent`, wrapping around. A negative exponent makes a fraction, which truncates.
fn power(base: i64, exponent: i64) -> i64 {
    if exponent < 0 {
        return match base {
            1 => 1,
            -1 => 1 - 2 * (exponent & 1),
            _ => 0,
        };
    }
    let (mut result, mut square, mut left) = (1i64, base, exponent);
    while left > 0 {
        if left & 1 == 1 {
            result = result.wrapping_mul(square);
        }
        square = square.wrapping_mul(square);
        left >>= 1;
    }
    result
}
