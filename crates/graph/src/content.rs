//! Reads and builds small tensors.

use half::{bf16, f16};
use model::tensor::element_count;
use model::{DataType, Tensor};

use model::dim::SymDim;

/// The maximum number of elements whose values shape inference tracks.
pub const MAX_CONTENT: usize = 256;

/// The elements of an integer or boolean tensor.
pub fn ints(tensor: &Tensor) -> Option<Vec<i64>> {
    Some(match tensor.dtype() {
        DataType::I64 => tensor.to_vec::<i64>()?,
        DataType::I32 => tensor.to_vec::<i32>()?.into_iter().map(i64::from).collect(),
        DataType::I16 => tensor.to_vec::<i16>()?.into_iter().map(i64::from).collect(),
        DataType::I8 => tensor.to_vec::<i8>()?.into_iter().map(i64::from).collect(),
        DataType::U32 => tensor.to_vec::<u32>()?.into_iter().map(i64::from).collect(),
        DataType::U16 => tensor.to_vec::<u16>()?.into_iter().map(i64::from).collect(),
        DataType::U8 => tensor.to_vec::<u8>()?.into_iter().map(i64::from).collect(),
        DataType::U64 => {
            tensor.to_vec::<u64>()?.into_iter().map(i64::try_from).collect::<Result<_, _>>().ok()?
        }
        DataType::Bool => tensor.raw()?.iter().map(|byte| i64::from(*byte != 0)).collect(),
        _ => return None,
    })
}

/// The elements of a floating-point tensor, rounded to single precision.
pub fn floats(tensor: &Tensor) -> Option<Vec<f32>> {
    Some(match tensor.dtype() {
        DataType::F32 => tensor.to_vec::<f32>()?,
        DataType::F64 => tensor.to_vec::<f64>()?.into_iter().map(|x| x as f32).collect(),
        DataType::F16 => tensor.to_vec::<f16>()?.into_iter().map(f16::to_f32).collect(),
        DataType::BF16 => tensor.to_vec::<bf16>()?.into_iter().map(bf16::to_f32).collect(),
        _ => return None,
    })
}

/// The number that all elements of a floating-point tensor are. Weights are large and differ in
/// their first elements: nothing is copied before one differs.
pub fn uniform_float(tensor: &Tensor) -> Option<f32> {
    let (raw, size) = (tensor.raw()?, tensor.dtype().size_bytes()?);
    let mut elements = raw.chunks_exact(size.max(1));
    let first = elements.next()?;
    if elements.all(|element| element == first) {
        let one = Tensor::from_raw(tensor.dtype(), vec![1], raw.slice(..size)).ok()?;
        return floats(&one)?.first().copied();
    }
    // Zeros of both signs are equal.
    let all = (tensor.len() <= MAX_CONTENT).then(|| floats(tensor))??;
    let number = *all.first()?;
    all.iter().all(|other| *other == number).then_some(number)
}

/// The elements as tracked values, when they are few and integers.
pub fn of_tensor(tensor: &Tensor) -> Option<Vec<SymDim>> {
    if tensor.len() > MAX_CONTENT || tensor.dtype() == DataType::String {
        return None;
    }
    if let Some(ints) = ints(tensor) {
        return Some(ints.into_iter().map(SymDim::Fixed).collect());
    }
    let whole = |x: f32| x.fract() == 0.0 && x.abs() < (1 << 24) as f32;
    let floats = floats(tensor)?;
    floats.into_iter().map(|x| whole(x).then_some(SymDim::Fixed(x as i64))).collect()
}

/// A tensor of `dtype` with these integers; `None` when one does not fit.
pub fn tensor_of(dtype: DataType, shape: Vec<usize>, values: &[i64]) -> Option<Tensor> {
    fn narrow<T: TryFrom<i64> + model::tensor::Element>(
        shape: Vec<usize>,
        values: &[i64],
    ) -> Option<Tensor> {
        let values: Option<Vec<T>> = values.iter().map(|v| T::try_from(*v).ok()).collect();
        Tensor::from_vec(shape, values?).ok()
    }
    match dtype {
        DataType::I64 => narrow::<i64>(shape, values),
        DataType::I32 => narrow::<i32>(shape, values),
        DataType::I16 => narrow::<i16>(shape, values),
        DataType::I8 => narrow::<i8>(shape, values),
        DataType::U64 => narrow::<u64>(shape, values),
        DataType::U32 => narrow::<u32>(shape, values),
        DataType::U16 => narrow::<u16>(shape, values),
        DataType::U8 => narrow::<u8>(shape, values),
        DataType::Bool => {
            let raw: Vec<u8> = values.iter().map(|v| u8::from(*v != 0)).collect();
            Tensor::from_raw(DataType::Bool, shape, raw.into()).ok()
        }
        DataType::String => None,
        _ => {
            let values: Vec<f64> = values.iter().map(|v| *v as f64).collect();
            float_tensor(dtype, shape, &values)
        }
    }
}

/// A tensor of the floating-point type `dtype`; `None` when it is not one or the count is wrong.
pub fn float_tensor(dtype: DataType, shape: Vec<usize>, values: &[f64]) -> Option<Tensor> {
    let tensor = match dtype {
        DataType::F64 => Tensor::from_vec(shape, values.to_vec()),
        DataType::F32 => Tensor::from_vec(shape, values.iter().map(|x| *x as f32).collect()),
        DataType::F16 => {
            Tensor::from_vec(shape, values.iter().map(|x| f16::from_f64(*x)).collect())
        }
        DataType::BF16 => {
            Tensor::from_vec(shape, values.iter().map(|x| bf16::from_f64(*x)).collect())
        }
        _ => return None,
    };
    tensor.ok()
}

/// A scalar of any numeric type; `None` when the value does not fit it.
pub fn scalar(dtype: DataType, value: f64) -> Option<Tensor> {
    if dtype.is_float() {
        return float_tensor(dtype, vec![], &[value]);
    }
    (value.fract() == 0.0 && value.abs() < 2f64.powi(62))
        .then(|| tensor_of(dtype, vec![], &[value as i64]))
        .flatten()
}

/// A one-dimensional `I64` tensor.
pub fn int_vector(values: &[i64]) -> Option<Tensor> {
    Tensor::from_vec(vec![values.len()], values.to_vec()).ok()
}

/// The number of elements of a shape that is all numbers.
pub fn fixed_count(shape: &[SymDim]) -> Option<usize> {
    let sizes: Option<Vec<usize>> = shape.iter().map(SymDim::size).collect();
    element_count(&sizes?).ok()
}

/// A shape that is all numbers.
pub fn fixed_shape(shape: &[SymDim]) -> Option<Vec<usize>> {
    shape.iter().map(SymDim::size).collect()
}
