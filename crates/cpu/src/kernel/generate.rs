//! Generated tensors: ranges, constants, one-hot vectors and identities.

use model::DataType;
use model::op::Op;

use super::binary::{Number, with_type};
use super::cast::convert;
use super::operand::{
    Element, dtype_of, elements, integer_list, is_half, one, output_len, resolve_axis, sizes,
    through_f32,
};
use super::{Context, Inputs, Kernel, KernelResult, StepFacts, no_kernel};
use crate::buffer::Buffer;
use crate::buffer_pool::{BufferPool, Pooled};
use crate::kernel::{KernelError, invalid};
use crate::value::{TypedTensor, Value, into_elements, with_value};

pub(crate) fn build(facts: &StepFacts) -> Result<Kernel, KernelError> {
    match facts.step.op {
        Op::OneHot { axis } => {
            Ok(Kernel::new(move |context, inputs| one_hot(context, &inputs, axis)))
        }
        Op::Range => {
            let dtype = dtype_of(facts, 0)?;
            if facts.input_dtype(1) != Some(dtype) || facts.input_dtype(2) != Some(dtype) {
                return Err(no_kernel(facts));
            }
            match is_half(dtype) {
                true => Ok(through_f32(dtype, Kernel::new(|_, inputs| range::<f32>(&inputs)))),
                false => {
                    with_type!(dtype, facts, T => Ok(Kernel::new(|_, inputs| range::<T>(&inputs))))
                }
            }
        }
        Op::ConstantOfShape { dtype, value } => fill_kernel(dtype, value),
        Op::EyeLike { dtype, k } => {
            let dtype = dtype.unwrap_or(dtype_of(facts, 0)?);
            if dtype == DataType::String {
                return Err(no_kernel(facts));
            }
            Ok(Kernel::new(move |_, inputs| eye(&inputs, dtype, k)))
        }
        _ => Err(no_kernel(facts)),
    }
}

/// Numbers of any type as integers; fractions are truncated.
fn whole(value: &Value) -> Result<Buffer<i64>, KernelError> {
    let wide = convert(value, DataType::I64)?;
    match wide {
        Value::I64(tensor) => Ok(into_elements(tensor)),
        other => Err(invalid!("{} is not an integer", other.dtype())),
    }
}

fn one_hot(context: &Context, inputs: &Inputs, axis: i64) -> KernelResult {
    let indices = inputs.get(0)?;
    let depth = match &*whole(inputs.get(1)?)? {
        &[depth] if depth >= 0 => depth as usize,
        other => return Err(invalid!("the depth must be one size, is {other:?}")),
    };
    let shape = indices.shape();
    let axis = resolve_axis(axis, shape.len() + 1)?;
    let out = [&shape[..axis], &[depth], &shape[axis..]].concat();
    let count = output_len(&out)?;
    let inner: usize = shape[axis..].iter().product();
    let indices = whole(indices)?;
    let values = inputs.get(2)?;
    with_value!(values, tensor => {
        let data = hot(context.pool, elements(tensor), &indices, count, depth, inner)?;
        one(Value::from(TypedTensor::from_data(&out, data)))
    })
}

/// `count` times the first of `pair`, with the second at the indices.
fn hot<T: Pooled>(
    pool: &BufferPool,
    pair: &[T],
    indices: &[i64],
    count: usize,
    depth: usize,
    inner: usize,
) -> Result<Buffer<T>, KernelError> {
    let [off, on] = pair else {
        return Err(invalid!("values must be two, are {}", pair.len()));
    };
    let mut data = pool.filled(count, off.clone())?;
    for (position, &index) in indices.iter().enumerate() {
        let hot = if index < 0 { index.saturating_add(depth as i64) } else { index };
        if (0..depth as i64).contains(&hot) {
            let (row, column) = (position / inner, position % inner);
            data[(row * depth + hot as usize) * inner + column] = on.clone();
        }
    }
    Ok(data)
}

/// The only element of operand `index`.
fn scalar<T: Number>(inputs: &Inputs, index: usize) -> Result<T, KernelError> {
    match elements(inputs.typed::<T>(index)?) {
        [only] => Ok(*only),
        many => Err(invalid!("operand {index} must be one number, has {}", many.len())),
    }
}

/// `start`, `start + delta` and so on until before `limit`.
fn range<T: Number>(inputs: &Inputs) -> KernelResult {
    let (start, limit) = (scalar::<T>(inputs, 0)?, scalar::<T>(inputs, 1)?);
    let delta = scalar::<T>(inputs, 2)?;
    if delta == T::default() {
        return Err("delta is 0".into());
    }
    let count = if T::INTEGER {
        // 128 bits hold the distance of any two integers.
        let (start, limit, delta) = (start.to_i128(), limit.to_i128(), delta.to_i128());
        let distance = limit - start;
        let steps = (distance + delta - delta.signum()) / delta;
        usize::try_from(steps.max(0)).unwrap_or(usize::MAX)
    } else {
        let steps = ((limit.to_f64() - start.to_f64()) / delta.to_f64()).ceil();
        if steps.is_nan() {
            return Err("a bound of the range is not a number".into());
        }
        steps.max(0.0) as usize
    };
    output_len(&[count])?;
    let mut data = Buffer::with_capacity(count)?;
    let mut next = start;
    for index in 0..count {
        // Floats are multiplied so that errors do not accumulate.
        data.extend([match T::INTEGER {
            true => next,
            false => start.add(T::from_f64(index as f64).mul(delta)),
        }]);
        next = next.add(delta);
    }
    one(T::wrap(&[count], data))
}

fn fill_kernel(dtype: DataType, value: [u8; 8]) -> Result<Kernel, KernelError> {
    macro_rules! kernel {
        ($rust:ty) => {{
            let mut bytes = [0; size_of::<$rust>()];
            bytes.copy_from_slice(&value[..size_of::<$rust>()]);
            filling(<$rust>::from_le_bytes(bytes))
        }};
    }
    Ok(match dtype {
        DataType::Bool => filling(value[0] != 0),
        DataType::U8 => kernel!(u8),
        DataType::U16 => kernel!(u16),
        DataType::U32 => kernel!(u32),
        DataType::U64 => kernel!(u64),
        DataType::I8 => kernel!(i8),
        DataType::I16 => kernel!(i16),
        DataType::I32 => kernel!(i32),
        DataType::I64 => kernel!(i64),
        DataType::F16 => kernel!(half::f16),
        DataType::BF16 => kernel!(half::bf16),
        DataType::F32 => kernel!(f32),
        DataType::F64 => kernel!(f64),
        DataType::String => filling(bytes::Bytes::new()),
    })
}

fn filling<T: Element>(element: T) -> Kernel {
    Kernel::new(move |context, inputs| {
        let shape = sizes(&integer_list(&inputs, 0)?)?;
        let count = output_len(&shape)?;
        one(T::wrap(&shape, context.pool.filled(count, element.clone())?))
    })
}

fn eye(inputs: &Inputs, dtype: DataType, k: i64) -> KernelResult {
    let &[rows, columns] = inputs.get(0)?.shape() else {
        return Err(invalid!("shape {:?} is not a matrix", inputs.get(0)?.shape()));
    };
    let mut data = Buffer::filled(output_len(&[rows, columns])?, 0u8)?;
    for row in 0..rows {
        let column = (row as i64).saturating_add(k);
        if (0..columns as i64).contains(&column) {
            data[row * columns + column as usize] = 1;
        }
    }
    one(convert(&u8::wrap(&[rows, columns], data), dtype)?)
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    #[test]
    fn ranges_end_before_their_limit() {
        let of = |x: i64| integers(&[], &[x]);
        let on = |a, b, c| values::<i64>(&run(Op::Range, &[of(a), of(b), of(c)])[0]);
        assert_eq!(on(3, 9, 3), [3, 6]);
        assert_eq!(on(10, 4, -2), [10, 8, 6]);
        assert_eq!(on(1, 0, 1), [0i64; 0]);
        assert!(error(Op::Range, &[of(0), of(i64::MAX), of(1)]).contains("elements"));
        assert!(error(Op::Range, &[of(0), of(1), of(0)]).contains("delta"));
        let f = |x| floats(&[], &[x]);
        assert_eq!(values::<f32>(&run(Op::Range, &[f(1.0), f(2.0), f(0.3)])[0]).len(), 4);
    }

    #[test]
    fn one_hots_ignore_indices_out_of_range() {
        let inputs = [integers(&[2], &[-1, 7]), integers(&[], &[3]), floats(&[2], &[0.5, 2.0])];
        let last = run(Op::OneHot { axis: -1 }, &inputs);
        assert_eq!(last[0], floats(&[2, 3], &[0.5, 0.5, 2.0, 0.5, 0.5, 0.5]));
        let first = run(Op::OneHot { axis: 0 }, &inputs);
        assert_eq!(first[0], floats(&[3, 2], &[0.5, 0.5, 0.5, 0.5, 2.0, 0.5]));
        let hostile = [inputs[0].clone(), integers(&[], &[1 << 38]), inputs[2].clone()];
        assert!(error(Op::OneHot { axis: 0 }, &hostile).contains("bytes"));
    }

    #[test]
    fn makes_constants_and_identities() {
        let mut value = [0; 8];
        value[..4].copy_from_slice(&2.5f32.to_le_bytes());
        let op = Op::ConstantOfShape { dtype: DataType::F32, value };
        assert_eq!(run(op.clone(), &[integers(&[2], &[1, 2])])[0], floats(&[1, 2], &[2.5, 2.5]));
        assert!(error(op.clone(), &[integers(&[1], &[-1])]).contains("negative"));
        assert!(error(op, &[integers(&[2], &[1 << 30, 1 << 30])]).contains("elements"));
        let eye = run(Op::EyeLike { dtype: None, k: 1 }, &[floats(&[2, 3], &[9.0; 6])]);
        assert_eq!(eye[0], floats(&[2, 3], &[0.0, 1.0, 0.0, 0.0, 0.0, 1.0]));
    }
}
