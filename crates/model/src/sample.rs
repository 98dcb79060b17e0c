//! Tensors of random values, to measure or test a model with.

use base::Random;
use bytes::Bytes;
use half::{bf16, f16};

use crate::tensor::{TensorError, element_count};
use crate::{DataType, Tensor};

/// A tensor of random values. Floating-point numbers lie between -1 and 1; integers are 0 or 1,
/// which are valid tokens of any vocabulary.
pub fn random_tensor(
    dtype: DataType,
    shape: Vec<usize>,
    random: &mut Random,
) -> Result<Tensor, TensorError> {
    let count = element_count(&shape)?;
    macro_rules! whole {
        ($rust:ty) => {{
            let values = filled(&shape, count, || random.below(2) as $rust)?;
            Tensor::from_vec(shape, values)
        }};
    }
    macro_rules! real {
        ($convert:expr) => {{
            let values = filled(&shape, count, || $convert(random.symmetric_f32()))?;
            Tensor::from_vec(shape, values)
        }};
    }
    match dtype {
        DataType::F32 => real!(|x: f32| x),
        DataType::F64 => real!(f64::from),
        DataType::F16 => real!(f16::from_f32),
        DataType::BF16 => real!(bf16::from_f32),
        DataType::U8 => whole!(u8),
        DataType::U16 => whole!(u16),
        DataType::U32 => whole!(u32),
        DataType::U64 => whole!(u64),
        DataType::I8 => whole!(i8),
        DataType::I16 => whole!(i16),
        DataType::I32 => whole!(i32),
        DataType::I64 => whole!(i64),
        DataType::Bool => {
            let bytes = filled(&shape, count, || random.below(2) as u8)?;
            Tensor::from_raw(DataType::Bool, shape, bytes.into())
        }
        DataType::String => {
            let texts = filled(&shape, count, || Bytes::from_static(b"text"))?;
            Tensor::from_strings(shape, texts)
        }
    }
}

/// A tensor of ones; of text, one of its elements.
pub fn ones(dtype: DataType, shape: Vec<usize>) -> Result<Tensor, TensorError> {
    let count = element_count(&shape)?;
    macro_rules! ones {
        ($one:expr) => {{
            let values = filled(&shape, count, || $one)?;
            Tensor::from_vec(shape, values)
        }};
    }
    match dtype {
        DataType::F32 => ones!(1f32),
        DataType::F64 => ones!(1f64),
        DataType::F16 => ones!(f16::ONE),
        DataType::BF16 => ones!(bf16::ONE),
        DataType::U8 => ones!(1u8),
        DataType::U16 => ones!(1u16),
        DataType::U32 => ones!(1u32),
        DataType::U64 => ones!(1u64),
        DataType::I8 => ones!(1i8),
        DataType::I16 => ones!(1i16),
        DataType::I32 => ones!(1i32),
        DataType::I64 => ones!(1i64),
        DataType::Bool => {
            let bytes = filled(&shape, count, || 1u8)?;
            Tensor::from_raw(DataType::Bool, shape, bytes.into())
        }
        DataType::String => {
            let texts = filled(&shape, count, || Bytes::from_static(b"1"))?;
            Tensor::from_strings(shape, texts)
        }
    }
}

/// `count` values; an error where memory does not suffice.
fn filled<T>(
    shape: &[usize],
    count: usize,
    mut value: impl FnMut() -> T,
) -> Result<Vec<T>, TensorError> {
    let mut values = Vec::new();
    let too_large = |_| TensorError::TooLarge { shape: shape.to_vec() };
    values.try_reserve_exact(count).map_err(too_large)?;
    values.extend((0..count).map(|_| value()));
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_random_values() {
        for dtype in DataType::ALL {
            let tensor = random_tensor(dtype, vec![2, 3], &mut Random::new(1)).unwrap();
            assert_eq!((tensor.dtype(), tensor.len()), (dtype, 6));
            let same = ones(dtype, vec![2, 3]).unwrap();
            assert_eq!((same.dtype(), same.len()), (dtype, 6));
            assert!(same.to_reals().is_none_or(|reals| reals == [1.0; 6]));
        }
        assert!(random_tensor(DataType::F32, vec![usize::MAX, 3], &mut Random::new(1)).is_err());
    }
}
