//! Tensors of every element type.

use bytes::Bytes;
use half::{bf16, f16};
use model::{DataType, Tensor as HostTensor, TensorData};
use smallvec::SmallVec;

use crate::buffer_pool::BufferPool;
use crate::spare_buffers;

/// A contiguous tensor in row-major order.
#[derive(Clone, Debug)]
pub(crate) struct TypedTensor<T> {
    shape: SmallVec<[usize; 6]>,
    data: Vec<T>,
}

impl<T> TypedTensor<T> {
    /// A tensor of `data`, which must have as many elements as `shape`.
    pub(crate) fn from_data(shape: &[usize], data: Vec<T>) -> TypedTensor<T> {
        TypedTensor::try_from_data(shape, data).expect("shape and data have one size")
    }

    /// Like [`from_data`](TypedTensor::from_data), with an error if the sizes differ.
    pub(crate) fn try_from_data(shape: &[usize], data: Vec<T>) -> Result<TypedTensor<T>, String> {
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
}

/// A tensor of any element type.
#[derive(Clone, Debug)]
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

    /// The value as a tensor of the host, in the same memory where possible.
    pub(crate) fn into_host(self) -> Result<HostTensor, String> {
        let shape = self.shape().to_vec();
        let text = |err: model::TensorError| err.to_string();
        match self {
            Value::Bool(tensor) => {
                let bytes: Vec<u8> = elements(&tensor).iter().map(|&b| u8::from(b)).collect();
                HostTensor::from_raw(DataType::Bool, shape, bytes.into()).map_err(text)
            }
            Value::String(tensor) => {
                let strings = into_elements(tensor);
                HostTensor::from_strings(shape, strings).map_err(text)
            }
            other => with_number!(other, tensor => {
                HostTensor::from_vec(shape, into_elements(tensor)).map_err(text)
            }, _ => Err("not a number".to_string())),
        }
    }

    /// A copy of a tensor of the host.
    pub(crate) fn from_host(tensor: &HostTensor) -> Result<Value, String> {
        let shape = tensor.shape();
        macro_rules! numbers {
            ($variant:ident) => {{
                let values = tensor.to_vec().ok_or("type and data disagree")?;
                Ok(Value::$variant(TypedTensor::from_data(shape, values)))
            }};
        }
        match tensor.dtype() {
            DataType::U8 => numbers!(U8),
            DataType::U16 => numbers!(U16),
            DataType::U32 => numbers!(U32),
            DataType::U64 => numbers!(U64),
            DataType::I8 => numbers!(I8),
            DataType::I16 => numbers!(I16),
            DataType::I32 => numbers!(I32),
            DataType::I64 => numbers!(I64),
            DataType::F16 => numbers!(F16),
            DataType::BF16 => numbers!(BF16),
            DataType::F32 => numbers!(F32),
            DataType::F64 => numbers!(F64),
            DataType::Bool => {
                let raw = tensor.raw().ok_or("type and data disagree")?;
                Ok(Value::Bool(TypedTensor::from_data(
                    shape,
                    raw.iter().map(|&b| b != 0).collect::<Vec<_>>(),
                )))
            }
            DataType::String => match tensor.data() {
                TensorData::Strings(strings) => {
                    Ok(Value::String(TypedTensor::from_data(shape, strings.clone())))
                }
                TensorData::Raw(_) => Err("type and data disagree".to_string()),
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
pub(crate) fn into_elements<T>(tensor: TypedTensor<T>) -> Vec<T> {
    tensor.data
}

/// Access to the typed tensor inside a [`Value`].
pub(crate) trait Typed: Sized {
    /// The tensor, if it is of this type.
    fn get(value: &Value) -> Option<&TypedTensor<Self>>;
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
