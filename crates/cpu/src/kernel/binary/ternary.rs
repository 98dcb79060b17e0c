//! Selection between two operands, and clamping.

use model::DataType;

use super::{Number, with_type};
use crate::kernel::elementwise::MapFn;
use crate::kernel::operand::{Element, dtype_of, elements, one, output_len};
use crate::kernel::parallel::in_pieces;
use crate::kernel::strided::{StridedLoop, broadcast_shape};
use crate::kernel::unary::apply;
use crate::kernel::{Context, Inputs, Kernel, KernelResult, StepFacts, no_kernel};
use crate::kernel::{KernelError, invalid};
use crate::value::{TypedTensor, Value, with_value};

pub(super) fn where_kernel(facts: &StepFacts) -> Result<Kernel, KernelError> {
    let (condition, a, b) = (dtype_of(facts, 0)?, dtype_of(facts, 1)?, dtype_of(facts, 2)?);
    if condition != DataType::Bool || a != b {
        return Err(no_kernel(facts));
    }
    Ok(Kernel::new(|context, inputs| {
        let value = inputs.get(1)?;
        with_value!(value, a => {
            let b = inputs.get(2)?;
            select(context, inputs.typed::<bool>(0)?, a, b)
        })
    }))
}

fn select<T: Element>(
    context: &Context,
    condition: &TypedTensor<bool>,
    a: &TypedTensor<T>,
    b: &Value,
) -> KernelResult {
    let b = T::get(b).ok_or("the operands differ in type")?;
    let shape = broadcast_shape(&[condition.shape(), a.shape(), b.shape()])?;
    let count = output_len(&shape)?;
    let strided = StridedLoop::broadcast(&shape, [condition.shape(), a.shape(), b.shape()]);
    let (condition, a, b) = (elements(condition), elements(a), elements(b));
    let strides = strided.inner_strides.map(|stride| stride as usize);
    let mut out = context.pool.filled(count, T::default())?;
    in_pieces(&mut out, &|start: usize, chunk: &mut [T]| {
        strided.for_each_run(start, start + chunk.len(), &mut |position, length, at| {
            let target = &mut chunk[position - start..][..length];
            for (i, slot) in target.iter_mut().enumerate() {
                let source = if condition[at[0] + i * strides[0]] {
                    &a[at[1] + i * strides[1]]
                } else {
                    &b[at[2] + i * strides[2]]
                };
                slot.clone_from(source);
            }
        });
    });
    one(T::wrap(&shape, out))
}

pub(super) fn clip(facts: &StepFacts, dtype: DataType) -> Result<Kernel, KernelError> {
    with_type!(dtype, facts, T => Ok(Kernel::new(clamp::<T>)))
}

/// `x` raised to the lower bound, then lowered to the upper one; NaN stays.
fn clamp<T: Number>(context: &Context, inputs: Inputs) -> KernelResult {
    let low = bound::<T>(&inputs, 1)?.unwrap_or(T::LOWEST);
    let high = bound::<T>(&inputs, 2)?.unwrap_or(T::HIGHEST);
    let f = move |x: T| {
        let raised = if x < low { low } else { x };
        if raised > high { high } else { raised }
    };
    apply(context, inputs, &MapFn(f))
}

fn bound<T: Number>(inputs: &Inputs, index: usize) -> Result<Option<T>, KernelError> {
    match inputs.optional_typed::<T>(index)? {
        None => Ok(None),
        Some(tensor) if tensor.len() == 1 => Ok(elements(tensor).first().copied()),
        Some(tensor) => Err(invalid!("a bound must be one number, has shape {:?}", tensor.shape())),
    }
}
