//! Numbers of any type in double precision, for operators whose time does not matter.

use model::DataType;

use super::cast::convert;
use super::operand::{Element, elements};
use crate::buffer::Buffer;
use crate::kernel::{Inputs, KernelError, invalid};
use crate::value::{Value, into_elements};

/// The elements of `value` in double precision.
pub(crate) fn reals(value: &Value) -> Result<Buffer<f64>, KernelError> {
    match convert(value, DataType::F64)? {
        Value::F64(tensor) => Ok(into_elements(tensor)),
        other => Err(invalid!("{} are not numbers", other.dtype())),
    }
}

/// The only element of operand `index`.
pub(crate) fn real_scalar(inputs: &Inputs, index: usize) -> Result<f64, KernelError> {
    match &*reals(inputs.get(index)?)? {
        [only] => Ok(*only),
        many => Err(invalid!("operand {index} must be one number, has {}", many.len())),
    }
}

/// A value of type `dtype`.
pub(crate) fn from_reals(
    shape: &[usize],
    data: Buffer<f64>,
    dtype: DataType,
) -> Result<Value, KernelError> {
    let wide = f64::wrap(shape, data);
    if dtype == DataType::F64 { Ok(wide) } else { convert(&wide, dtype) }
}

/// The elements of `value` in single precision.
pub(crate) fn singles(value: &Value) -> Result<Buffer<f32>, KernelError> {
    if let Value::F32(tensor) = value {
        return Ok(Buffer::copy_of(elements(tensor))?);
    }
    match convert(value, DataType::F32)? {
        Value::F32(tensor) => Ok(into_elements(tensor)),
        other => Err(invalid!("{} are not numbers", other.dtype())),
    }
}

/// A value of type `dtype`.
pub(crate) fn from_singles(
    shape: &[usize],
    data: Buffer<f32>,
    dtype: DataType,
) -> Result<Value, KernelError> {
    let wide = f32::wrap(shape, data);
    if dtype == DataType::F32 { Ok(wide) } else { convert(&wide, dtype) }
}
