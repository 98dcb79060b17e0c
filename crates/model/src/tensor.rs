//! Tensors: a type, a shape and the elements as little-endian bytes.

use bytes::Bytes;
use half::{bf16, f16};
use thiserror::Error;

pub use crate::strings::Strings;
use crate::{DataType, Reservation};

/// The maximum number of elements; larger shapes are refused before anything is allocated.
pub const MAX_ELEMENTS: usize = 1 << 40;

/// The elements of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum TensorData {
    /// Fixed-size elements, packed little-endian in row-major order. Not necessarily aligned.
    Raw(Bytes),
    /// Strings, in row-major order.
    Strings(Strings),
}

/// A dense tensor in host memory. Cloning shares the elements.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    dtype: DataType,
    shape: Vec<usize>,
    data: TensorData,
}

/// Why a tensor is invalid.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TensorError {
    /// The shape's product overflows or exceeds [`MAX_ELEMENTS`].
    #[error("shape {shape:?} has too many elements")]
    TooLarge {
        /// The offending shape.
        shape: Vec<usize>,
    },
    /// The bytes are not as many as type and shape need.
    #[error("shape {shape:?} of {dtype} needs {expected} bytes, got {actual}")]
    WrongByteLength {
        /// The element type.
        dtype: DataType,
        /// The claimed shape.
        shape: Vec<usize>,
        /// Bytes that type and shape need.
        expected: usize,
        /// Bytes given.
        actual: usize,
    },
    /// The elements are not as many as the shape needs.
    #[error("shape {shape:?} needs {expected} elements, got {actual}")]
    WrongElementCount {
        /// The claimed shape.
        shape: Vec<usize>,
        /// Elements the shape needs.
        expected: usize,
        /// Elements given.
        actual: usize,
    },
    /// Raw bytes for a string tensor, or strings for another.
    #[error("{dtype} tensors do not hold this kind of data")]
    WrongKind {
        /// The element type.
        dtype: DataType,
    },
}

/// The product of `shape`, if it is at most [`MAX_ELEMENTS`].
pub fn element_count(shape: &[usize]) -> Result<usize, TensorError> {
    let too_large = || TensorError::TooLarge { shape: shape.to_vec() };
    // A zero dimension makes the product zero, but must not hide huge ones.
    let mut count = 1usize;
    for &dim in shape {
        count =
            count.checked_mul(dim.max(1)).filter(|&c| c <= MAX_ELEMENTS).ok_or_else(too_large)?;
    }
    Ok(if shape.contains(&0) { 0 } else { count })
}

/// A vector of numbers that exposes its memory as bytes, so that outputs are not copied. Holds the
/// reservation of that memory.
struct Owner<T> {
    values: Vec<T>,
    _reservation: Option<Reservation>,
}

impl<T: bytemuck::NoUninit> AsRef<[u8]> for Owner<T> {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.values)
    }
}

impl Tensor {
    /// A tensor of fixed-size elements from their packed little-endian bytes.
    pub fn from_raw(dtype: DataType, shape: Vec<usize>, raw: Bytes) -> Result<Tensor, TensorError> {
        let size = dtype.size_bytes().ok_or(TensorError::WrongKind { dtype })?;
        let expected = element_count(&shape)?
            .checked_mul(size)
            .ok_or_else(|| TensorError::TooLarge { shape: shape.clone() })?;
        if raw.len() != expected {
            return Err(TensorError::WrongByteLength { dtype, shape, expected, actual: raw.len() });
        }
        Ok(Tensor { dtype, shape, data: TensorData::Raw(raw) })
    }

    /// A tensor of strings.
    pub fn from_strings(shape: Vec<usize>, strings: Vec<Bytes>) -> Result<Tensor, TensorError> {
        Tensor::from_shared_strings(shape, strings.into())
    }

    /// A tensor of strings that others may hold, too.
    pub fn from_shared_strings(shape: Vec<usize>, strings: Strings) -> Result<Tensor, TensorError> {
        let expected = element_count(&shape)?;
        if strings.len() != expected {
            return Err(TensorError::WrongElementCount { shape, expected, actual: strings.len() });
        }
        Ok(Tensor { dtype: DataType::String, shape, data: TensorData::Strings(strings) })
    }

    /// A tensor that takes ownership of `values` without copying them.
    pub fn from_vec<T>(shape: Vec<usize>, values: Vec<T>) -> Result<Tensor, TensorError>
    where
        T: Element,
    {
        let expected = element_count(&shape)?;
        if values.len() != expected {
            return Err(TensorError::WrongElementCount { shape, expected, actual: values.len() });
        }
        let raw = Bytes::from_owner(Owner { values, _reservation: None });
        Ok(Tensor { dtype: T::DTYPE, shape, data: TensorData::Raw(raw) })
    }

    /// A tensor that takes ownership of `values` and of the reservation of their memory.
    pub fn from_reserved<T>(
        dtype: DataType,
        shape: Vec<usize>,
        values: Vec<T>,
        reservation: Reservation,
    ) -> Result<Tensor, TensorError>
    where
        T: bytemuck::NoUninit + Send,
    {
        let raw = Bytes::from_owner(Owner { values, _reservation: Some(reservation) });
        Tensor::from_raw(dtype, shape, raw)
    }

    /// The element type.
    pub fn dtype(&self) -> DataType {
        self.dtype
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements.
    pub fn data(&self) -> &TensorData {
        &self.data
    }

    /// How many elements there are.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Bytes the elements take in memory.
    pub fn size_bytes(&self) -> usize {
        match &self.data {
            TensorData::Raw(raw) => raw.len(),
            TensorData::Strings(strings) => strings.iter().map(Bytes::len).sum(),
        }
    }

    /// The packed bytes, unless this is a tensor of strings.
    pub fn raw(&self) -> Option<&Bytes> {
        match &self.data {
            TensorData::Raw(raw) => Some(raw),
            TensorData::Strings(_) => None,
        }
    }

    /// The elements as a vector of `T`, or `None` when the type is another.
    pub fn to_vec<T: Element>(&self) -> Option<Vec<T>> {
        let raw = self.raw().filter(|_| self.dtype == T::DTYPE)?;
        Some(match bytemuck::try_cast_slice::<u8, T>(raw) {
            Ok(aligned) => aligned.to_vec(),
            Err(_) => raw.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect(),
        })
    }

    /// Its values, if they are real numbers of any width.
    pub fn to_reals(&self) -> Option<Vec<f64>> {
        match self.dtype {
            DataType::F32 => Some(self.to_vec::<f32>()?.into_iter().map(f64::from).collect()),
            DataType::F64 => self.to_vec::<f64>(),
            DataType::F16 => Some(self.to_vec::<f16>()?.into_iter().map(f64::from).collect()),
            DataType::BF16 => Some(self.to_vec::<bf16>()?.into_iter().map(f64::from).collect()),
            _ => None,
        }
    }

    /// The rows `rows` of the first dimension; `None` when they do not exist. Fixed-size elements
    /// are shared, not copied.
    pub fn rows(&self, rows: std::ops::Range<usize>) -> Option<Tensor> {
        let (&count, rest) = self.shape.split_first()?;
        if rows.start > rows.end || rows.end > count {
            return None;
        }
        let shape = [&[rows.len()], rest].concat();
        let each: usize = rest.iter().product();
        let data = match &self.data {
            TensorData::Raw(raw) => {
                let bytes = each * self.dtype.size_bytes()?;
                TensorData::Raw(raw.slice(rows.start * bytes..rows.end * bytes))
            }
            TensorData::Strings(strings) => {
                TensorData::Strings(strings.part(rows.start * each..rows.end * each)?)
            }
        };
        Some(Tensor { dtype: self.dtype, shape, data })
    }

    /// One tensor of the rows of all `parts`, which must have the same type and other dimensions.
    pub fn of_rows(parts: &[&Tensor]) -> Option<Tensor> {
        let first = *parts.first()?;
        let (_, rest) = first.shape.split_first()?;
        let agrees =
            |part: &&Tensor| part.dtype == first.dtype && part.shape.get(1..) == Some(rest);
        if !parts.iter().all(agrees) {
            return None;
        }
        if parts.len() == 1 {
            return Some(first.clone());
        }
        let shape = [&[parts.iter().map(|part| part.shape[0]).sum()], rest].concat();
        let data = match first.data {
            TensorData::Raw(_) => {
                let mut raw = Vec::with_capacity(parts.iter().map(|part| part.size_bytes()).sum());
                parts.iter().filter_map(|part| part.raw()).for_each(|part| raw.extend(part));
                TensorData::Raw(Bytes::from(raw))
            }
            TensorData::Strings(_) => {
                let strings = |part: &&Tensor| match &part.data {
                    TensorData::Strings(strings) => strings.to_vec(),
                    TensorData::Raw(_) => Vec::new(),
                };
                let all: Vec<Bytes> = parts.iter().flat_map(strings).collect();
                TensorData::Strings(all.into())
            }
        };
        Some(Tensor { dtype: first.dtype, shape, data })
    }

    /// The same elements with another shape of the same size.
    pub fn with_shape(self, shape: Vec<usize>) -> Result<Tensor, TensorError> {
        let expected = element_count(&shape)?;
        if expected != self.len() {
            return Err(TensorError::WrongElementCount { shape, expected, actual: self.len() });
        }
        Ok(Tensor { shape, ..self })
    }
}

/// A Rust type that is the in-memory form of a [`DataType`]. Booleans are `u8` and have none.
pub trait Element: bytemuck::Pod + Send + Sync + 'static {
    /// The corresponding data type.
    const DTYPE: DataType;
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident),+ $(,)?) => {
        $(impl Element for $rust { const DTYPE: DataType = DataType::$dtype; })+
    };
}

elements! {
    u8 => U8, u16 => U16, u32 => U32, u64 => U64,
    i8 => I8, i16 => I16, i32 => I32, i64 => I64,
    half::f16 => F16, half::bf16 => BF16, f32 => F32, f64 => F64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_checked() {
        assert!(matches!(element_count(&[usize::MAX, 2]), Err(TensorError::TooLarge { .. })));
        assert!(matches!(element_count(&[0, usize::MAX, 9]), Err(TensorError::TooLarge { .. })));
        assert_eq!(element_count(&[0, 7]), Ok(0));
        assert_eq!(element_count(&[]), Ok(1));
    }

    #[test]
    fn lengths_are_checked() {
        let err = Tensor::from_raw(DataType::F32, vec![2], Bytes::from_static(&[0; 7]));
        assert!(matches!(err, Err(TensorError::WrongByteLength { expected: 8, actual: 7, .. })));
        assert!(Tensor::from_vec(vec![3], vec![1f32]).is_err());
    }

    #[test]
    fn unaligned_bytes_read_back() {
        let bytes = Bytes::from(vec![9, 0, 0, 128, 63, 0, 0, 0, 64]).slice(1..);
        let tensor = Tensor::from_raw(DataType::F32, vec![2], bytes).unwrap();
        assert_eq!(tensor.to_vec::<f32>(), Some(vec![1.0, 2.0]));
        assert_eq!(tensor.to_vec::<i32>(), None);
    }

    #[test]
    fn rows_are_sliced_and_concatenated() {
        let all = Tensor::from_vec(vec![3, 2], vec![1i32, 2, 3, 4, 5, 6]).unwrap();
        let (head, tail) = (all.rows(0..1).unwrap(), all.rows(1..3).unwrap());
        assert_eq!((head.shape(), tail.to_vec()), ([1, 2].as_slice(), Some(vec![3i32, 4, 5, 6])));
        assert_eq!(
            Tensor::of_rows(&[&tail, &head]).unwrap().to_vec(),
            Some(vec![3i32, 4, 5, 6, 1, 2])
        );
        assert_eq!(all.rows(2..4), None);
        assert_eq!(Tensor::of_rows(&[&all, &all.clone().with_shape(vec![2, 3]).unwrap()]), None);
        let words = [b"a".as_slice(), b"b"].map(Bytes::from_static).to_vec();
        let words = Tensor::from_strings(vec![2], words).unwrap();
        let turned = Tensor::of_rows(&[&words.rows(1..2).unwrap(), &words.rows(0..1).unwrap()]);
        assert_eq!(turned.unwrap().rows(0..1), words.rows(1..2));
    }

    #[test]
    fn wire_names_round_trip() {
        for dtype in DataType::ALL {
            assert_eq!(DataType::from_wire_name(dtype.wire_name()), Some(dtype));
        }
    }
}
