//! Helpers of kernels for operands: element types, axes and indices.

use bytes::Bytes;
use half::{bf16, f16};
use model::DataType;
use model::tensor::element_count;

use super::{Context, Inputs, Kernel, KernelResult, Operand, Outputs};
use crate::buffer::{Buffer, Data};
use crate::buffer_pool::Pooled;
use crate::kernel::{KernelError, invalid};
pub(crate) use crate::value::elements;
use crate::value::{Typed, TypedTensor, Value};

/// Maximum number of sizes in one operand.
const MAX_SIZES: usize = 1 << 16;

/// An element type of a [`Value`].
pub(crate) trait Element: Typed + Pooled + Default + PartialEq {
    /// Whether loops over it are worth compiling for the processor's widest vectors.
    const WIDE: bool = false;

    /// A value of these elements.
    fn wrap(shape: &[usize], data: Buffer<Self>) -> Value;
}

macro_rules! impl_element {
    ($($variant:ident($rust:ty)),+ $(,)?) => {
        $(impl Element for $rust {
            fn wrap(shape: &[usize], data: Buffer<Self>) -> Value {
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

    fn wrap(shape: &[usize], data: Buffer<Self>) -> Value {
        Value::F32(TypedTensor::from_data(shape, data))
    }
}

/// One output.
pub(crate) fn one(value: Value) -> KernelResult {
    Ok(Outputs::from_iter([value]))
}

/// The number of elements of an output of `shape`.
pub(crate) fn output_len(shape: &[usize]) -> Result<usize, KernelError> {
    element_count(shape).map_err(|err| KernelError::from(err.to_string()))
}

/// A dimension from an axis that may be negative.
pub(crate) fn resolve_axis(axis: i64, rank: usize) -> Result<usize, KernelError> {
    let resolved = if axis < 0 { axis + rank as i64 } else { axis };
    if (0..rank as i64).contains(&resolved) {
        Ok(resolved as usize)
    } else {
        Err(invalid!("axis {axis} is outside of a shape of {rank} dimensions"))
    }
}

/// Dimensions from axes that may be negative; each at most once.
pub(crate) fn resolve_axes(axes: &[i64], rank: usize) -> Result<Vec<usize>, KernelError> {
    if axes.len() > rank {
        return Err(invalid!("{} axes for {rank} dimensions", axes.len()));
    }
    let mut resolved = Vec::with_capacity(axes.len());
    for &axis in axes {
        let axis = resolve_axis(axis, rank)?;
        if resolved.contains(&axis) {
            return Err(invalid!("axis {axis} is given twice"));
        }
        resolved.push(axis);
    }
    Ok(resolved)
}

/// A position from an index that may be negative.
pub(crate) fn resolve_index(index: i64, bound: usize) -> Result<usize, KernelError> {
    let resolved = if index < 0 { index.wrapping_add(bound as i64) } else { index };
    if resolved >= 0 && (resolved as u64) < bound as u64 {
        Ok(resolved as usize)
    } else {
        Err(invalid!("index {index} is outside of 0..{bound}"))
    }
}

/// The elements of an integer operand.
pub(crate) fn integers(value: &Value) -> Result<Data<'_, i64>, KernelError> {
    fn wide<T: Copy>(tensor: &TypedTensor<T>) -> Result<Data<'static, i64>, KernelError>
    where
        i64: From<T>,
    {
        Ok(Data::Owned(Buffer::collect(elements(tensor).iter().map(|&x| i64::from(x)))?))
    }
    match value {
        Value::I64(tensor) => Ok(Data::Borrowed(elements(tensor))),
        Value::I32(tensor) => wide(tensor),
        Value::I16(tensor) => wide(tensor),
        Value::I8(tensor) => wide(tensor),
        Value::U32(tensor) => wide(tensor),
        Value::U16(tensor) => wide(tensor),
        Value::U8(tensor) => wide(tensor),
        other => Err(invalid!("indices cannot be {}", other.dtype())),
    }
}

/// The elements of integer operand `index`.
pub(crate) fn integer_list(inputs: &Inputs, index: usize) -> Result<Buffer<i64>, KernelError> {
    Ok(integers(inputs.get(index)?)?.into_owned()?)
}

/// The elements of integer operand `index`, if there is one.
pub(crate) fn optional_integers(
    inputs: &Inputs,
    index: usize,
) -> Result<Option<Buffer<i64>>, KernelError> {
    inputs.optional(index).map(|_| integer_list(inputs, index)).transpose()
}

/// The only element of integer operand `index`.
pub(crate) fn integer_scalar(inputs: &Inputs, index: usize) -> Result<i64, KernelError> {
    match &*integers(inputs.get(index)?)? {
        [only] => Ok(*only),
        many => Err(invalid!("operand {index} must be one integer, has {}", many.len())),
    }
}

/// Sizes from integers of a request: none may be negative.
pub(crate) fn sizes(values: &[i64]) -> Result<Vec<usize>, KernelError> {
    if values.len() > MAX_SIZES {
        return Err(invalid!("{} sizes are more than {MAX_SIZES}", values.len()));
    }
    values
        .iter()
        .map(|&size| usize::try_from(size).map_err(|_| invalid!("size {size} is negative")))
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
pub(crate) fn widened(value: &Value) -> Result<Option<Value>, KernelError> {
    Ok(match value {
        Value::F16(tensor) => {
            let data = Buffer::collect(elements(tensor).iter().map(|x| x.to_f32()))?;
            Some(f32::wrap(tensor.shape(), data))
        }
        Value::BF16(tensor) => {
            let data = Buffer::collect(elements(tensor).iter().map(|x| x.to_f32()))?;
            Some(f32::wrap(tensor.shape(), data))
        }
        _ => None,
    })
}

/// A single-precision value rounded to half-precision type `dtype`; any other unchanged.
pub(crate) fn narrowed(value: Value, dtype: DataType) -> Result<Value, KernelError> {
    Ok(match (value, dtype) {
        (Value::F32(tensor), DataType::F16) => {
            let data = Buffer::collect(elements(&tensor).iter().map(|&x| f16::from_f32(x)))?;
            f16::wrap(tensor.shape(), data)
        }
        (Value::F32(tensor), DataType::BF16) => {
            let data = Buffer::collect(elements(&tensor).iter().map(|&x| bf16::from_f32(x)))?;
            bf16::wrap(tensor.shape(), data)
        }
        (other, _) => other,
    })
}

/// A kernel that computes a step of half-precision type `dtype` in single precision: operands are
/// widened, and results are rounded back.
pub(crate) fn through_f32(dtype: DataType, kernel: Kernel) -> Kernel {
    let (resident_bytes, packed_inputs) = (kernel.resident_bytes, kernel.packed_inputs.clone());
    let run = move |context: &Context, inputs: Inputs| -> KernelResult {
        let wide = |index: usize| match inputs.optional(index) {
            None => Ok(Operand::Absent),
            Some(value) => Ok(Operand::Owned(match widened(value)? {
                Some(wide) => wide,
                None => value.try_clone()?,
            })),
        };
        let operands: Result<_, KernelError> = (0..inputs.len()).map(wide).collect();
        let operands = operands?;
        drop(inputs);
        let outputs = kernel.run.run(context, Inputs::new(operands, context.pool))?;
        outputs.into_iter().map(|value| narrowed(value, dtype)).collect()
    };
    Kernel { run: Box::new(run), resident_bytes, packed_inputs }
}

/// The element type of operand `index`; an error if it is missing.
pub(crate) fn dtype_of(facts: &super::StepFacts, index: usize) -> Result<DataType, KernelError> {
    facts.input_dtype(index).ok_or_else(|| invalid!("operand {index} is missing"))
}
