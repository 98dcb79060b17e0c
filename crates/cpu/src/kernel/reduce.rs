//! Reductions, positions of extremes and running sums.

mod fold;
mod scan;

pub(crate) use scan::with_full;

use model::DataType;
use model::op::{Op, Reduce, ReduceKind};

use super::layout::{reshaped, transposed};
use super::operand::{dtype_of, is_half, one, optional_integers, resolve_axes, through_f32};
use super::{Context, Inputs, Kernel, KernelResult, StepFacts, no_kernel};
use crate::buffer_pool::BufferPool;
use crate::kernel::KernelError;
use crate::value::Value;

pub(crate) fn build(facts: &StepFacts) -> Result<Kernel, KernelError> {
    let dtype = dtype_of(facts, 0)?;
    match facts.step.op {
        Op::Reduce(reduce) => {
            let extreme = matches!(reduce.kind, ReduceKind::Max | ReduceKind::Min);
            match dtype {
                DataType::Bool if extreme => {
                    Ok(Kernel::new(move |context, inputs| reduce_bool(context, inputs, reduce)))
                }
                _ if is_half(dtype) => {
                    let single = Kernel::new(move |context, inputs| run(context, inputs, reduce));
                    Ok(through_f32(dtype, single))
                }
                DataType::U8 | DataType::I8 | DataType::U16 | DataType::I16 if !extreme => {
                    Err(no_kernel(facts))
                }
                _ if dtype.is_float() || dtype.is_integer() => {
                    Ok(Kernel::new(move |context, inputs| run(context, inputs, reduce)))
                }
                _ => Err(no_kernel(facts)),
            }
        }
        Op::ArgReduce(arg) if dtype.is_float() || dtype.is_integer() => {
            Ok(Kernel::new(move |_, inputs| scan::arg_reduce(&inputs, arg)))
        }
        Op::CumSum { exclusive, reverse } if dtype.is_float() || dtype.is_integer() => {
            let kernel = Kernel::new(move |_, inputs| scan::cum_sum(inputs, exclusive, reverse));
            Ok(if is_half(dtype) { through_f32(dtype, kernel) } else { kernel })
        }
        Op::CumProd { exclusive, reverse } if dtype.is_float() || dtype.is_integer() => {
            let kernel = Kernel::new(move |_, inputs| scan::cum_prod(inputs, exclusive, reverse));
            Ok(if is_half(dtype) { through_f32(dtype, kernel) } else { kernel })
        }
        _ => Err(no_kernel(facts)),
    }
}

/// The effect of a reduction on a shape.
struct ReducedShape {
    /// Dimensions that are reduced, in ascending order.
    axes: Vec<usize>,
    /// The output's shape.
    shape: Vec<usize>,
}

/// The dimensions to reduce, or `None` when there is nothing to do.
fn reduced(inputs: &Inputs, reduce: Reduce) -> Result<Option<ReducedShape>, KernelError> {
    let shape = inputs.get(0)?.shape();
    let axes = optional_integers(inputs, 1)?.unwrap_or_default();
    let mut axes = resolve_axes(&axes, shape.len())?;
    if axes.is_empty() {
        if reduce.noop_with_empty_axes {
            return Ok(None);
        }
        axes = (0..shape.len()).collect();
    }
    axes.sort_unstable();
    let kept = |axis: usize| match (axes.contains(&axis), reduce.keep_dims) {
        (false, _) => Some(shape[axis]),
        (true, true) => Some(1),
        (true, false) => None,
    };
    let shape = (0..shape.len()).filter_map(kept).collect();
    Ok(Some(ReducedShape { axes, shape }))
}

/// A value seen as `outer` times `along` times `inner`, to be reduced along the middle.
struct ReductionView {
    value: Value,
    outer: usize,
    along: usize,
    inner: usize,
}

/// Extents before, along and after the reduced axes, if those are adjacent.
fn neighbours(shape: &[usize], axes: &[usize]) -> Option<(usize, usize, usize)> {
    let wide: Vec<usize> = axes.iter().copied().filter(|&axis| shape[axis] != 1).collect();
    let Some((&first, &last)) = wide.first().zip(wide.last()) else {
        return Some((shape.iter().product(), 1, 1));
    };
    // Dimensions between them must be reduced too, or have extent 1.
    let together = (first..=last).all(|axis| axes.contains(&axis) || shape[axis] == 1);
    together.then(|| {
        (
            shape[..first].iter().product(),
            shape[first..=last].iter().product(),
            shape[last + 1..].iter().product(),
        )
    })
}

/// `value` with the reduced axes moved to the end.
fn moved_to_end(
    pool: &BufferPool,
    value: &Value,
    axes: &[usize],
) -> Result<ReductionView, KernelError> {
    let shape = value.shape();
    let kept = (0..shape.len()).filter(|axis| !axes.contains(axis));
    let perm: Vec<usize> = kept.chain(axes.iter().copied()).collect();
    let along: usize = axes.iter().map(|&axis| shape[axis]).product();
    let outer = perm[..shape.len() - axes.len()].iter().map(|&axis| shape[axis]).product();
    Ok(ReductionView { value: transposed(pool, value, &perm)?, outer, along, inner: 1 })
}

fn run(context: &Context, mut inputs: Inputs, reduce: Reduce) -> KernelResult {
    let Some(ReducedShape { axes, shape }) = reduced(&inputs, reduce)? else {
        // Nothing is combined, but the function is still applied to each element.
        let value = inputs.get(0)?;
        let count = value.shape().iter().product();
        return fold::reduce(context, value, [count, 1, 1], reduce.kind, value.shape());
    };
    let value = inputs.get(0)?;
    match neighbours(value.shape(), &axes) {
        Some((outer, along, inner)) => {
            if along == 1 && matches!(reduce.kind, ReduceKind::Sum | ReduceKind::Mean) {
                let value = inputs.take(0)?;
                return one(reshaped(value, &shape)?);
            }
            fold::reduce(context, value, [outer, along, inner], reduce.kind, &shape)
        }
        None => {
            let ReductionView { value, outer, along, inner } =
                moved_to_end(context.pool, value, &axes)?;
            let result = fold::reduce(context, &value, [outer, along, inner], reduce.kind, &shape);
            value.recycle(context.pool);
            result
        }
    }
}

/// Booleans are reduced as bytes.
fn reduce_bool(context: &Context, inputs: Inputs, reduce: Reduce) -> KernelResult {
    let bytes = super::cast::convert(inputs.get(0)?, DataType::U8)?;
    let axes = inputs.optional(1).map(super::Value::try_clone).transpose()?;
    let operands =
        [super::Operand::Owned(bytes), axes.map_or(super::Operand::Absent, super::Operand::Owned)];
    let reduced = run(context, Inputs::new(operands.into_iter().collect(), context.pool), reduce)?;
    // An empty set has the lowest or highest byte.
    one(super::cast::convert(&reduced[0], DataType::Bool)?)
}

#[cfg(test)]
mod tests;
