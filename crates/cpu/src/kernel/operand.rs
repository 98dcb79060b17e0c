//! Helpers of kernels for operands: element types, axes, indices, and the check of an output's size
//! before memory is allocated.

use std::borrow::Cow;

use bytes::Bytes;
use half::{bf16, f16};
use model::DataType;
use model::tensor::element_count;

use super::{Context, Inputs, Kernel, KernelResult, Operand, Outputs};
use crate::buffer_pool::{BufferPool, Pooled};
pub(crate) use crate::value::elements;
use crate::value::{Typed, TypedTensor, Value};
use crate::yield_point;

/// Maximum bytes of an output that is larger than its operands.
const MAX_OUTPUT_BYTES: usize = 4 << 30;

/// An element type of a [`Value`].
pub(crate) trait Element: Typed + Pooled + Default + PartialEq {
    /// Whether loops over it are worth compiling for the processor's widest vectors.
    const WIDE: bool = false;

    /// A value of these elements.
    fn wrap(shape: &[usize], data: Vec<Self>) -> Value;
}

macro_rules! impl_element {
    ($($variant:ident($rust:ty)),+ $(,)?) => {
        $(impl Element for $rust {
            fn wrap(shape: &[usize], data: Vec<Self>) -> Value {
                Value::$variant(TypedTensor::from_data(shape, data))
            }
        })+
    };
}

impl_element! {
    Bool(bool), U8(u8), U16(u16), U32(u32), U64(u64), I8(i8), I16(i16), I32(i32), I64(i64),
    F16(f16), BF16(bf16), F64(f64), String(Bytes),
}

impl Element for f32 {
    const WIDE: bool = true;

    fn wrap(shape: &[usize], data: Vec<Self>) -> Value {
        Value::F32(TypedTensor::from_data(shape, data))
    }
}

/// One output.
pub(crate) fn one(value: Value) -> KernelResult {
    Ok(Outputs::from_elem(value, 1))
}

/// A vector of `count` copies of `value`, in reused memory if there is any.
pub(crate) fn filled<T: Pooled>(pool: &BufferPool, count: usize, value: T) -> Vec<T> {
    let mut data = pool.alloc(count);
    yield_point::resize(&mut data, count, value);
    data
}

/// The number of elements of an output of `shape`, or why it is not computed. `source_bytes` is the
/// size of its operands: an output that is not larger is never refused.
pub(crate) fn output_len<T>(shape: &[usize], source_bytes: usize) -> Result<usize, String> {
    let count = element_count(shape).map_err(|err| err.to_string())?;
    let bytes = count.saturating_mul(size_of::<T>());
    if bytes > MAX_OUTPUT_BYTES.max(source_bytes) {
        return Err(format!("an output of shape {shape:?} would take {bytes} bytes"));
    }
    Ok(count)
}

/// A dimension from an axis that may be negative.
pub(crate) fn resolve_axis(axis: i64, rank: usize) -> Result<usize, String> {
    let resolved = if axis < 0 { axis + rank as i64 } else { axis };
    if (0..rank as i64).contains(&resolved) {
        Ok(resolved as usize)
    } else {
        Err(format!("axis {axis} is outside of a shape of {rank} dimensions"))
    }
}

/// Dimensions from axes that may be negative; each at most once.
pub(crate) fn resolve_axes(axes: &[i64], rank: usize) -> Result<Vec<usize>, String> {
    let mut resolved = Vec::with_capacity(axes.len());
    for &axis in axes {
        let axis = resolve_axis(axis, rank)?;
        if resolved.contains(&axis) {
            return Err(format!("axis {axis} is given twice"));
        }
        resolved.push(axis);
    }
    Ok(resolved)
}

/// A position from an index that may be negative.
pub(crate) fn resolve_index(index: i64, bound: usize) -> Result<usize, String> {
    let resolved = if index < 0 { index.wrapping_add(bound as i64) } else { index };
    if resolved >= 0 && (resolved as u64) < bound as u64 {
        Ok(resolved as usize)
    } else {
        Err(format!("index {index} is outside of 0..{bound}"))
    }
}

/// The elements of an integer operand.
pub(crate) fn integers(value: &Value) -> Result<Cow<'_, [i64]>, String> {
    let wide = |data: Vec<i64>| Ok(Cow::Owned(data));
    match value {
        Value::I64(tensor) => Ok(Cow::Borrowed(elements(tensor))),
        Value::I32(tensor) => wide(elements(tensor).iter().map(|&x| i64::from(x)).collect()),
        Value::I16(tensor) => wide(elements(tensor).iter().map(|&x| i64::from(x)).collect()),
        Value::I8(tensor) => wide(elements(tensor).iter().map(|&x| i64::from(x)).collect()),
        Value::U32(tensor) => wide(elements(tensor).iter().map(|&x| i64::from(x)).collect()),
        Value::U16(tensor) => wide(elements(tensor).iter().map(|&x| i64::from(x)).collect()),
        Value::U8(tensor) => wide(elements(tensor).iter().map(|&x| i64::from(x)).collect()),
        other => Err(format!("indices cannot be {}", other.dtype())),
    }
}

/// The elements of integer operand `index`.
pub(crate) fn integer_list(inputs: &Inputs, index: usize) -> Result<Vec<i64>, String> {
    Ok(integers(inputs.get(index)?)?.into_owned())
}

/// The elements of integer operand `index`, if there is one.
pub(crate) fn optional_integers(inputs: &Inputs, index: usize) -> Result<Option<Vec<i64>>, String> {
    inputs.optional(index).map(|_| integer_list(inputs, index)).transpose()
}

/// The only element of integer operand `index`.
pub(crate) fn integer_scalar(inputs: &Inputs, index: usize) -> Result<i64, String> {
    match integers(inputs.get(index)?)?.as_ref() {
        [only] => Ok(*only),
        many => Err(format!("operand {index} must be one integer, has {}", many.len())),
    }
}

/// Sizes from integers of a request: none may be negative.
pub(crate) fn sizes(values: &[i64]) -> Result<Vec<usize>, String> {
    values
        .iter()
        .map(|&size| usize::try_from(size).map_err(|_| format!("size {size} is negative")))
        .collect()
}

/// The elements before, along and after `axis`.
pub(crate) fn around(shape: &[usize], axis: usize) -> (usize, usize, usize) {
    (shape[..axis].iter().product(), shape[axis], shape[axis + 1..].iter().product())
}

/// The row-major strides of `shape`.
pub(crate) fn row_strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis].max(1);
    }
    strides
}

/// Whether `dtype` is a half-precision float, which kernels compute in single precision.
pub(crate) fn is_half(dtype: DataType) -> bool {
    matches!(dtype, DataType::F16 | DataType::BF16)
}

/// A half-precision value in single precision; any other unchanged.
pub(crate) fn widened(value: &Value) -> Option<Value> {
    match value {
        Value::F16(tensor) => {
            let data = elements(tensor).iter().map(|x| x.to_f32()).collect();
            Some(f32::wrap(tensor.shape(), data))
        }
        Value::BF16(tensor) => {
            let data = elements(tensor).iter().map(|x| x.to_f32()).collect();
            Some(f32::wrap(tensor.shape(), data))
        }
        _ => None,
    }
}

/// A single-precision value rounded to half-precision type `dtype`; any other unchanged.
pub(crate) fn narrowed(value: Value, dtype: DataType) -> Value {
    match (value, dtype) {
        (Value::F32(tensor), DataType::F16) => {
            let data = elements(&tensor).iter().map(|&x| f16::from_f32(x)).collect();
            f16::wrap(tensor.shape(), data)
        }
        (Value::F32(tensor), DataType::BF16) => {
            let data = elements(&tensor).iter().map(|&x| bf16::from_f32(x)).collect();
            bf16::wrap(tensor.shape(), data)
        }
        (other, _) => other,
    }
}

/// A kernel that computes a step of half-precision type `dtype` in single precision: operands are
/// widened, and results are rounded back.
pub(crate) fn through_f32(dtype: DataType, kernel: Kernel) -> Kernel {
    let (resident_bytes, packed_inputs) = (kernel.resident_bytes, kernel.packed_inputs.clone());
    let run = move |context: &Context, inputs: Inputs| -> KernelResult {
        let wide: Vec<Option<Value>> = (0..inputs.len())
            .map(|index| {
                inputs.optional(index).map(|value| widened(value).unwrap_or_else(|| value.clone()))
            })
            .collect();
        inputs.recycle(context.pool);
        let operands = wide.into_iter().map(|v| v.map_or(Operand::Absent, Operand::Owned));
        let outputs = kernel.run.run(context, Inputs::new(operands.collect()))?;
        Ok(outputs.into_iter().map(|value| narrowed(value, dtype)).collect())
    };
    Kernel { run: Box::new(run), resident_bytes, packed_inputs }
}

/// The element type of operand `index`; an error if it is missing.
pub(crate) fn dtype_of(facts: &super::StepFacts, index: usize) -> Result<DataType, String> {
    facts.input_dtype(index).ok_or_else(|| format!("operand {index} is missing"))
}
