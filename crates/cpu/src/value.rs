//! Tensors of every element type.

use bytes::Bytes;
use half::{bf16, f16};
use model::tensor::Strings;
use model::{DataType, MemoryError, Tensor as HostTensor, TensorData};
use smallvec::SmallVec;

use crate::buffer::Buffer;
use crate::buffer_pool::BufferPool;
use crate::kernel::KernelError;
use crate::spare_buffers;

/// A contiguous tensor in row-major order.
#[derive(Debug)]
pub(crate) struct TypedTensor<T> {
    shape: SmallVec<[usize; 6]>,
    data: Buffer<T>,
}

impl<T> TypedTensor<T> {
    /// A tensor of `data`, which must have as many elements as `shape`.
    pub(crate) fn from_data(shape: &[usize], data: Buffer<T>) -> TypedTensor<T> {
        TypedTensor::try_from_data(shape, data).expect("shape and data have one size")
    }

    /// Like [`from_data`](TypedTensor::from_data), with an error if the sizes differ.
    pub(crate) fn try_from_data(
        shape: &[usize],
        data: Buffer<T>,
    ) -> Result<TypedTensor<T>, String> {
        let count: usize = shape.iter().product();
        if count != data.len() {
            return Err(format!("{} elements for shape {shape:?}", data.len()));
        }
        Ok(TypedTensor { shape: shape.into(), data })
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The number of elements.
    pub(crate) fn len(&self) -> usize {
        self.data.len()
    }

    /// Appends `row`, one more along the first dimension. `false` if its shape is another.
    pub(crate) fn push_row(&mut self, row: &TypedTensor<T>) -> Result<bool, MemoryError>
    where
        T: Clone,
    {
        if self.shape.get(1..) != Some(&row.shape[..]) {
            return Ok(false);
        }
        self.data.append(&row.data)?;
        self.shape[0] += 1;
        Ok(true)
    }

    /// Turns the first dimension around.
    pub(crate) fn reverse_rows(&mut self) {
        let rows = self.shape.first().copied().unwrap_or(0);
        let size = self.data.len().checked_div(rows).unwrap_or(0);
        if size == 0 {
            return;
        }
        for row in 0..rows / 2 {
            let (front, back) = self.data.split_at_mut((rows - 1 - row) * size);
            front[row * size..][..size].swap_with_slice(&mut back[..size]);
        }
    }

    /// A copy in memory of its own.
    pub(crate) fn try_clone(&self) -> Result<TypedTensor<T>, KernelError>
    where
        T: Clone,
    {
        Ok(TypedTensor { shape: self.shape.clone(), data: Buffer::copy_of(&self.data)? })
    }
}

/// A tensor of any element type.
#[derive(Debug)]
pub(crate) enum Value {
    Bool(TypedTensor<bool>),
    U8(TypedTensor<u8>),
    U16(TypedTensor<u16>),
    U32(TypedTensor<u32>),
    U64(TypedTensor<u64>),
    I8(TypedTensor<i8>),
    I16(TypedTensor<i16>),
    I32(TypedTensor<i32>),
    I64(TypedTensor<i64>),
    F16(TypedTensor<f16>),
    BF16(TypedTensor<bf16>),
    F32(TypedTensor<f32>),
    F64(TypedTensor<f64>),
    String(TypedTensor<Bytes>),
}

/// Runs `$body` with `$tensor` bound to the typed tensor inside `$value`, whatever its type.
macro_rules! with_value {
    ($value:expr, $tensor:ident => $body:expr) => {
        match $value {
            $crate::value::Value::Bool($tensor) => $body,
            $crate::value::Value::String($tensor) => $body,
            other => $crate::value::with_number!(other, $tensor => $body, _ => unreachable!()),
        }
    };
}

/// Like [`with_value`], for elements that are `Copy`: all but strings, which take `$otherwise`.
macro_rules! with_copy {
    ($value:expr, $tensor:ident => $body:expr, _ => $otherwise:expr) => {
        match $value {
            $crate::value::Value::Bool($tensor) => $body,
            other => $crate::value::with_number!(other, $tensor => $body, _ => $otherwise),
        }
    };
}

/// Like [`with_value`], for numbers: booleans and strings take `$otherwise`.
macro_rules! with_number {
    ($value:expr, $tensor:ident => $body:expr, _ => $otherwise:expr) => {
        match $value {
            $crate::value::Value::U8($tensor) => $body,
            $crate::value::Value::U16($tensor) => $body,
            $crate::value::Value::U32($tensor) => $body,
            $crate::value::Value::U64($tensor) => $body,
            $crate::value::Value::I8($tensor) => $body,
            $crate::value::Value::I16($tensor) => $body,
            $crate::value::Value::I32($tensor) => $body,
            $crate::value::Value::I64($tensor) => $body,
            $crate::value::Value::F16($tensor) => $body,
            $crate::value::Value::BF16($tensor) => $body,
            $crate::value::Value::F32($tensor) => $body,
            $crate::value::Value::F64($tensor) => $body,
            #[allow(unreachable_patterns)]
            _ => $otherwise,
        }
    };
}

#[allow(unused_imports)] // Not every kernel needs each.
pub(crate) use {with_copy, with_number, with_value};

impl Value {
    pub(crate) fn dtype(&self) -> DataType {
        match self {
            Value::Bool(_) => DataType::Bool,
            Value::U8(_) => DataType::U8,
            Value::U16(_) => DataType::U16,
            Value::U32(_) => DataType::U32,
            Value::U64(_) => DataType::U64,
            Value::I8(_) => DataType::I8,
            Value::I16(_) => DataType::I16,
            Value::I32(_) => DataType::I32,
            Value::I64(_) => DataType::I64,
            Value::F16(_) => DataType::F16,
            Value::BF16(_) => DataType::BF16,
            Value::F32(_) => DataType::F32,
            Value::F64(_) => DataType::F64,
            Value::String(_) => DataType::String,
        }
    }

    pub(crate) fn shape(&self) -> &[usize] {
        with_value!(self, tensor => tensor.shape())
    }

    pub(crate) fn size_bytes(&self) -> usize {
        let count: usize = self.shape().iter().product();
        count * self.dtype().size_bytes().unwrap_or(size_of::<Bytes>())
    }

    /// Keeps the memory for the outputs of later steps.
    pub(crate) fn recycle(self, pool: &BufferPool) {
        if let Value::F32(tensor) = self {
            return spare_buffers::keep(into_elements(tensor), pool);
        }
        with_copy!(self, tensor => pool.add(into_elements(tensor)), _ => {});
    }

    /// A copy in memory of its own.
    pub(crate) fn try_clone(&self) -> Result<Value, KernelError> {
        with_value!(self, tensor => Ok(tensor.try_clone()?.into()))
    }

    /// The value as a tensor of the host, in the same memory.
    pub(crate) fn into_host(self) -> Result<HostTensor, String> {
        let dtype = self.dtype();
        match self {
            Value::String(tensor) => {
                let shape = tensor.shape().to_vec();
                let (strings, reservation) = into_elements(tensor).into_parts();
                let strings = Strings::reserved(strings, reservation);
                HostTensor::from_shared_strings(shape, strings).map_err(|err| err.to_string())
            }
            other => with_copy!(other, tensor => {
                let TypedTensor { shape, data } = tensor;
                data.into_tensor(dtype, &shape)
            }, _ => Err("type and data disagree".to_string())),
        }
    }

    /// A copy of a tensor of the host.
    pub(crate) fn from_host(tensor: &HostTensor) -> Result<Value, KernelError> {
        const WRONG: &str = "type and data disagree";
        let shape = tensor.shape();
        macro_rules! numbers {
            ($rust:ty) => {{
                let raw = tensor.raw().ok_or(WRONG)?;
                let values: Buffer<$rust> = match bytemuck::try_cast_slice(raw) {
                    Ok(aligned) => Buffer::copy_of(aligned)?,
                    Err(_) => {
                        let chunks = raw.chunks_exact(size_of::<$rust>());
                        Buffer::collect(chunks.map(bytemuck::pod_read_unaligned))?
                    }
                };
                Ok(TypedTensor::try_from_data(shape, values)?.into())
            }};
        }
        match tensor.dtype() {
            DataType::U8 => numbers!(u8),
            DataType::U16 => numbers!(u16),
            DataType::U32 => numbers!(u32),
            DataType::U64 => numbers!(u64),
            DataType::I8 => numbers!(i8),
            DataType::I16 => numbers!(i16),
            DataType::I32 => numbers!(i32),
            DataType::I64 => numbers!(i64),
            DataType::F16 => numbers!(f16),
            DataType::BF16 => numbers!(bf16),
            DataType::F32 => numbers!(f32),
            DataType::F64 => numbers!(f64),
            DataType::Bool => {
                let raw = tensor.raw().ok_or(WRONG)?;
                let data = Buffer::collect(raw.iter().map(|&b| b != 0))?;
                Ok(TypedTensor::try_from_data(shape, data)?.into())
            }
            DataType::String => match tensor.data() {
                TensorData::Strings(strings) => {
                    Ok(TypedTensor::try_from_data(shape, Buffer::copy_of(strings)?)?.into())
                }
                TensorData::Raw(_) => Err(WRONG.into()),
            },
        }
    }
}

macro_rules! conversions {
    ($($variant:ident($rust:ty)),+ $(,)?) => {
        $(
            impl From<TypedTensor<$rust>> for Value {
                fn from(tensor: TypedTensor<$rust>) -> Value {
                    Value::$variant(tensor)
                }
            }

            impl Typed for $rust {
                fn get(value: &Value) -> Option<&TypedTensor<$rust>> {
                    match value {
                        Value::$variant(tensor) => Some(tensor),
                        _ => None,
                    }
                }

                fn get_mut(value: &mut Value) -> Option<&mut TypedTensor<$rust>> {
                    match value {
                        Value::$variant(tensor) => Some(tensor),
                        _ => None,
                    }
                }

                fn take(value: Value) -> Result<TypedTensor<$rust>, Value> {
                    match value {
                        Value::$variant(tensor) => Ok(tensor),
                        other => Err(other),
                    }
                }
            }
        )+
    };
}

/// The elements of `tensor` in row-major order.
pub(crate) fn elements<T>(tensor: &TypedTensor<T>) -> &[T] {
    &tensor.data
}

/// Like [`elements`], by value.
pub(crate) fn into_elements<T>(tensor: TypedTensor<T>) -> Buffer<T> {
    tensor.data
}

/// Access to the typed tensor inside a [`Value`].
pub(crate) trait Typed: Sized {
    /// The tensor, if it is of this type.
    fn get(value: &Value) -> Option<&TypedTensor<Self>>;
    /// The same, to change it.
    fn get_mut(value: &mut Value) -> Option<&mut TypedTensor<Self>>;
    /// The tensor itself, or the value back.
    fn take(value: Value) -> Result<TypedTensor<Self>, Value>;
}

conversions! {
    Bool(bool), U8(u8), U16(u16), U32(u32), U64(u64), I8(i8), I16(i16), I32(i32), I64(i64),
    F16(f16), BF16(bf16), F32(f32), F64(f64), String(Bytes),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_tensors_round_trip() {
        let tensors = [
            HostTensor::from_vec(vec![2], vec![1i64, i64::MIN]).unwrap(),
            HostTensor::from_vec(vec![1, 2], vec![0.5f32, f32::NAN]).unwrap(),
            HostTensor::from_raw(DataType::Bool, vec![3], Bytes::from_static(&[1, 0, 1])).unwrap(),
            HostTensor::from_strings(vec![1], vec![Bytes::from_static(b"a")]).unwrap(),
        ];
        for tensor in tensors {
            let back = Value::from_host(&tensor).unwrap().into_host().unwrap();
            assert_eq!(back.data(), tensor.data());
            assert_eq!(back.shape(), tensor.shape());
        }
    }
}
