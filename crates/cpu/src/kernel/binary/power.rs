//! Powers. The result has the type of the base; the exponent may have another one.

use model::DataType;

use super::{broadcast, combine};
use crate::kernel::KernelError;
use crate::kernel::cast::convert;
use crate::kernel::elementwise::ZipFn;
use crate::kernel::operand::{Element, dtype_of, elements, through_f32};
use crate::kernel::{Context, Inputs, Kernel, KernelResult, StepFacts, no_kernel};

pub(super) fn build(facts: &StepFacts, dtype: DataType) -> Result<Kernel, KernelError> {
    let exponent = dtype_of(facts, 1)?;
    if !(exponent.is_float() || exponent.is_integer()) {
        return Err(no_kernel(facts));
    }
    let whole = exponent.is_integer();
    Ok(match dtype {
        DataType::F16 | DataType::BF16 => through_f32(dtype, Kernel::new(single)),
        DataType::F32 => Kernel::new(single),
        DataType::F64 => Kernel::new(|context: &Context, inputs: Inputs| {
            combine(context, with_exponent(inputs, DataType::F64)?, &ZipFn(f64::powf))
        }),
        DataType::I32 if whole => {
            integer(DataType::I64, |a: i32, e: i64| power(i64::from(a), e) as i32)
        }
        DataType::I64 if whole => integer(DataType::I64, power),
        DataType::I32 => integer(DataType::F64, |a: i32, e: f64| f64::from(a).powf(e) as i32),
        DataType::I64 => integer(DataType::F64, |a: i64, e: f64| (a as f64).powf(e) as i64),
        _ => return Err(no_kernel(facts)),
    })
}

/// A kernel for integer bases of type `A` and exponents that are converted to `dtype`, of type `B`.
fn integer<A: Element + Copy, B: Element + Copy>(
    dtype: DataType,
    f: impl Fn(A, B) -> A + Copy + Send + Sync + 'static,
) -> Kernel {
    Kernel::new(move |context: &Context, inputs: Inputs| {
        broadcast(context, &with_exponent(inputs, dtype)?, &ZipFn(f))
    })
}

/// The operands with the exponent as `dtype`.
fn with_exponent(mut inputs: Inputs, dtype: DataType) -> Result<Inputs, KernelError> {
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
    // The most common exponents need no logarithm.
    match elements(exponent) {
        [2.0] => combine(context, inputs, &ZipFn(|x: f32, _| x * x)),
        [3.0] => combine(context, inputs, &ZipFn(|x: f32, _| x * x * x)),
        _ => combine(context, inputs, &ZipFn(f32::powf)),
    }
}

/// `base` to the power of `exponent`, wrapping around. A negative exponent gives a fraction, which
/// is truncated.
fn power(base: i64, exponent: i64) -> i64 {
    if exponent < 0 {
        return match base {
            1 => 1,
            -1 => 1 - 2 * (exponent & 1),
            _ => 0,
        };
    }
    let (mut result, mut square, mut remaining) = (1i64, base, exponent);
    while remaining > 0 {
        if remaining & 1 == 1 {
            result = result.wrapping_mul(square);
        }
        square = square.wrapping_mul(square);
        remaining >>= 1;
    }
    result
}
