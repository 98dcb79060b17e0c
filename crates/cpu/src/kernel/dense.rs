//! Helpers of the heavy kernels: outputs, broadcasts, and element types that are computed as `f32`.

use std::ops::Deref;

use half::{bf16, f16};
use model::DataType;
use model::op::Activation;
use num_traits::Float;
use rten_simd::SimdOp;
use rten_vecmath::{LogSoftmax, Softmax};
use smallvec::SmallVec;

use super::strided::{StridedLoop, broadcast_shape};
use super::{Context, Inputs, Kernel, KernelResult, Operand, Outputs, StepFacts, activation};
use crate::buffer::Buffer;
use crate::buffer_pool::Pooled;
use crate::kernel::{KernelError, invalid};
pub(super) use crate::value::elements;
use crate::value::{Typed, TypedTensor, Value};
use crate::yield_point;

/// The number of elements of `shape`; an error if it overflows.
pub(super) fn count(shape: &[usize]) -> Result<usize, KernelError> {
    model::tensor::element_count(shape).map_err(|err| KernelError::from(err.to_string()))
}

/// One output of `shape`.
pub(super) fn output<T>(shape: &[usize], data: Buffer<T>) -> KernelResult
where
    TypedTensor<T>: Into<Value>,
{
    let mut outputs = Outputs::new();
    outputs.push(tensor(shape, data)?);
    Ok(outputs)
}

/// A value of `shape`.
pub(super) fn tensor<T>(shape: &[usize], data: Buffer<T>) -> Result<Value, KernelError>
where
    TypedTensor<T>: Into<Value>,
{
    let tensor =
        TypedTensor::try_from_data(shape, data).map_err(|_| "an output has a wrong size")?;
    Ok(tensor.into())
}

/// `axis` as an index below `rank`.
pub(super) fn resolve_axis(axis: i64, rank: usize) -> Result<usize, KernelError> {
    let resolved = if axis < 0 { axis + rank as i64 } else { axis };
    usize::try_from(resolved)
        .ok()
        .filter(|&axis| axis < rank)
        .ok_or_else(|| invalid!("axis {axis} is out of range for rank {rank}"))
}

/// The elements of `tensor` broadcast to `shape`, in row-major order.
pub(super) fn broadcast<T: Clone>(
    tensor: &TypedTensor<T>,
    shape: &[usize],
) -> Result<Buffer<T>, KernelError> {
    if broadcast_shape(&[tensor.shape(), shape]).as_deref() != Ok(shape) {
        return Err(invalid!("shape {:?} does not broadcast to {shape:?}", tensor.shape()));
    }
    let data = elements(tensor);
    let count = count(shape)?;
    let mut out = Buffer::with_capacity(count)?;
    let strided = StridedLoop::broadcast(shape, [tensor.shape()]);
    let repeats = strided.inner_strides == [0];
    strided.for_each_run(0, count, &mut |_, length, [offset]| match repeats {
        true => out.extend(std::iter::repeat_n(&data[offset], length).cloned()),
        false => out.extend_from_slice(&data[offset..][..length]),
    });
    Ok(out)
}

/// The shape that `a` and `b` broadcast to.
pub(super) fn broadcast_shapes(a: &[usize], b: &[usize]) -> Result<Vec<usize>, KernelError> {
    let rank = a.len().max(b.len());
    let dim = |shape: &[usize], index: usize| {
        (index + shape.len()).checked_sub(rank).map_or(1, |position| shape[position])
    };
    (0..rank)
        .map(|index| match (dim(a, index), dim(b, index)) {
            (x, y) if x == y => Ok(x),
            (1, y) => Ok(y),
            (x, 1) => Ok(x),
            _ => Err(invalid!("shapes {a:?} and {b:?} do not broadcast against each other")),
        })
        .collect()
}

/// For each index of the row-major `target`, the row-major index into `shape` broadcast to it.
pub(super) fn broadcast_indices(
    shape: &[usize],
    target: &[usize],
) -> Result<Buffer<usize>, KernelError> {
    let count = count(target)?;
    let mut strides = vec![0usize; target.len()];
    let mut stride = 1;
    for (position, &dim) in shape.iter().enumerate().rev() {
        if dim != 1 {
            strides[position + target.len() - shape.len()] = stride;
        }
        stride *= dim;
    }
    let mut index = vec![0usize; target.len()];
    let mut offset = 0;
    let mut offsets = Buffer::with_capacity(count)?;
    for _ in 0..count {
        offsets.extend([offset]);
        for axis in (0..target.len()).rev() {
            index[axis] += 1;
            offset += strides[axis];
            if index[axis] < target[axis] {
                break;
            }
            offset -= strides[axis] * index[axis];
            index[axis] = 0;
        }
    }
    Ok(offsets)
}

/// Whether all operands that are present have type `dtype`.
pub(super) fn all_of_type(facts: &StepFacts, dtype: DataType) -> bool {
    (0..facts.step.inputs.len())
        .all(|index| facts.input_dtype(index).is_none_or(|other| other == dtype))
}

/// The constant that operand `index` is, as `f32`; converted from a narrower type.
pub(super) fn constant_f32<'a>(
    facts: &'a StepFacts,
    index: usize,
) -> Result<Option<ConstantF32<'a>>, KernelError> {
    Ok(match facts.constant(index) {
        None => None,
        Some(Value::F32(tensor)) => Some(ConstantF32::Plan(tensor)),
        Some(value) => widened(value)?.map(ConstantF32::Widened),
    })
}

/// The value of `result`, or none when operands are invalid: a kernel that could not use them when
/// it was built refuses them when it runs.
pub(super) fn unless_invalid<T>(result: Result<T, KernelError>) -> Result<Option<T>, KernelError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(KernelError::Invalid(_)) => Ok(None),
        Err(error @ KernelError::Memory(_)) => Err(error),
    }
}

/// A constant in single precision.
pub(super) enum ConstantF32<'a> {
    Plan(&'a TypedTensor<f32>),
    Widened(TypedTensor<f32>),
}

impl Deref for ConstantF32<'_> {
    type Target = TypedTensor<f32>;
    fn deref(&self) -> &TypedTensor<f32> {
        match self {
            ConstantF32::Plan(tensor) => tensor,
            ConstantF32::Widened(tensor) => tensor,
        }
    }
}

fn mapped<T, U>(
    tensor: &TypedTensor<T>,
    f: impl Fn(&T) -> U,
) -> Result<TypedTensor<U>, KernelError> {
    let data = Buffer::collect(elements(tensor).iter().map(f))?;
    Ok(TypedTensor::try_from_data(tensor.shape(), data)?)
}

/// A tensor of half precision as `f32`.
fn widened(value: &Value) -> Result<Option<TypedTensor<f32>>, KernelError> {
    match value {
        Value::F16(tensor) => mapped(tensor, |x| x.to_f32()).map(Some),
        Value::BF16(tensor) => mapped(tensor, |x| x.to_f32()).map(Some),
        _ => Ok(None),
    }
}

/// A kernel that computes a step of half precision with `kernel`, which computes in `f32`.
pub(super) fn through_f32(facts: &StepFacts, kernel: Kernel) -> Kernel {
    let dtypes: Vec<Option<DataType>> =
        facts.step.outputs.iter().map(|id| id.map(|id| facts.plan.value(id).dtype)).collect();
    let Kernel { run, resident_bytes, packed_inputs } = kernel;
    let wide = move |context: &Context, mut inputs: Inputs| -> KernelResult {
        let operands: Result<SmallVec<[Operand; 4]>, KernelError> =
            inputs.operands.drain(..).map(|operand| widened_operand(operand)).collect();
        let outputs = run.run(context, Inputs::new(operands?, context.pool))?;
        outputs.into_iter().zip(&dtypes).map(|(value, dtype)| narrowed(value, *dtype)).collect()
    };
    Kernel { run: Box::new(wide), resident_bytes, packed_inputs }
}

fn widened_operand(operand: Operand) -> Result<Operand, KernelError> {
    let wide = match &operand {
        Operand::Absent => None,
        Operand::Shared(value) => widened(value)?,
        Operand::Owned(value) => widened(value)?,
    };
    Ok(wide.map_or(operand, |tensor| Operand::Owned(Value::F32(tensor))))
}

fn narrowed(value: Value, dtype: Option<DataType>) -> Result<Value, KernelError> {
    Ok(match (value, dtype) {
        (Value::F32(tensor), Some(DataType::F16)) => {
            Value::F16(mapped(&tensor, |&x| f16::from_f32(x))?)
        }
        (Value::F32(tensor), Some(DataType::BF16)) => {
            Value::BF16(mapped(&tensor, |&x| bf16::from_f32(x))?)
        }
        (value, _) => value,
    })
}

/// The floating-point types that kernels compute in.
pub(super) trait Real: Float + Default + Pooled + Typed
where
    TypedTensor<Self>: Into<Value>,
{
    /// From an attribute.
    fn from_f32(value: f32) -> Self;
    /// Applies a fused function in place.
    fn activate(activation: Activation, row: &mut [Self]);
    /// The softmax of `row`, or its logarithm, in place.
    fn softmax(row: &mut [Self], log: bool);
    /// Adds `other` to `row`, element by element.
    fn add_row(row: &mut [Self], other: &[Self]);
}

impl Real for f32 {
    fn from_f32(value: f32) -> f32 {
        value
    }

    fn activate(activation: Activation, row: &mut [f32]) {
        activation::apply(activation, row);
    }

    fn softmax(row: &mut [f32], log: bool) {
        if log {
            LogSoftmax::new_mut(row).dispatch();
        } else {
            Softmax::new_mut(row).dispatch();
        }
    }

    fn add_row(row: &mut [f32], other: &[f32]) {
        activation::add(row, other);
    }
}

impl Real for f64 {
    fn from_f32(value: f32) -> f64 {
        f64::from(value)
    }

    fn activate(activation: Activation, row: &mut [f64]) {
        row.iter_mut().for_each(|x| *x = activation::scalar(activation, *x));
    }

    fn softmax(row: &mut [f64], log: bool) {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|x| (x - max).exp()).sum();
        for x in row {
            *x = if log { *x - max - sum.ln() } else { (*x - max).exp() / sum };
        }
    }

    fn add_row(row: &mut [f64], other: &[f64]) {
        row.iter_mut().zip(other).for_each(|(x, y)| *x += y);
    }
}

/// Multiplications that are added up before they are reported.
const REPORT_AFTER: usize = 4096;

/// `out += a @ b` for row-major `m x k` and `k x n` matrices, in any arithmetic.
pub(super) fn plain_product<T, F>(out: &mut [T], a: &[T], b: &[T], n: usize, multiply_add: F)
where
    T: Copy,
    F: Fn(T, T, T) -> T,
{
    if n == 0 || out.is_empty() {
        return;
    }
    let k = b.len() / n;
    let mut multiplied = 0;
    for (row, out_row) in out.chunks_exact_mut(n).enumerate() {
        for depth in 0..k {
            let factor = a[row * k + depth];
            for (y, &x) in out_row.iter_mut().zip(&b[depth * n..(depth + 1) * n]) {
                *y = multiply_add(factor, x, *y);
            }
            multiplied += n;
            if multiplied >= REPORT_AFTER {
                yield_point::did_work(multiplied);
                multiplied = 0;
            }
        }
    }
}
