//! Positions of extremes, and running sums.

use model::op::ArgReduce;

use crate::buffer::Buffer;
use crate::kernel::binary::Number;
use crate::kernel::invalid;
use crate::kernel::operand::{
    Element, around, elements, integer_scalar, one, resolve_axis, widened,
};
use crate::kernel::parallel::in_weighted_pieces;
use crate::kernel::{Inputs, KernelResult};
use crate::value::{Value, into_elements};
use crate::yield_point;

/// Calls `$body` with the typed tensor in `$value`, half precision excluded.
macro_rules! with_full {
    ($value:expr, $tensor:ident => $body:expr) => {
        match $value {
            Value::U8($tensor) => $body,
            Value::U16($tensor) => $body,
            Value::U32($tensor) => $body,
            Value::U64($tensor) => $body,
            Value::I8($tensor) => $body,
            Value::I16($tensor) => $body,
            Value::I32($tensor) => $body,
            Value::I64($tensor) => $body,
            Value::F32($tensor) => $body,
            Value::F64($tensor) => $body,
            other => Err(invalid!("{} is not a number of full precision", other.dtype())),
        }
    };
}

pub(crate) use with_full;

pub(super) fn arg_reduce(inputs: &Inputs, arg: ArgReduce) -> KernelResult {
    let value = inputs.get(0)?;
    let wide = widened(value)?;
    let value = wide.as_ref().unwrap_or(value);
    let axis = resolve_axis(arg.axis, value.shape().len())?;
    let mut shape = value.shape().to_vec();
    match arg.keep_dims {
        true => shape[axis] = 1,
        false => drop(shape.remove(axis)),
    }
    let extents = around(value.shape(), axis);
    if extents.1 == 0 {
        return Err(invalid!("dimension {axis} is empty"));
    }
    let mut out = Buffer::filled(extents.0 * extents.2, 0i64)?;
    with_full!(value, tensor => {
        positions(elements(tensor), extents, arg, &mut out);
        one(i64::wrap(&shape, out))
    })
}

fn positions<T: Number>(
    data: &[T],
    (_, along, inner): (usize, usize, usize),
    arg: ArgReduce,
    out: &mut [i64],
) {
    // NaN counts as the extreme, as it does in numpy.
    let is_nan = |x: T| x.partial_cmp(&x).is_none();
    let beats = |new: T, best: T| {
        let farther = if arg.max { new > best } else { new < best };
        let equal = new == best || (is_nan(new) && is_nan(best));
        farther || (is_nan(new) && !is_nan(best)) || (arg.select_last && equal)
    };
    in_weighted_pieces(out, 1, along, &|first: usize, piece: &mut [i64]| {
        for (number, slot) in piece.iter_mut().enumerate() {
            let (row, column) = ((first + number) / inner, (first + number) % inner);
            let lane = &data[row * along * inner + column..];
            let mut best = 0;
            yield_point::did_work(along * 2);
            for step in 1..along {
                if beats(lane[step * inner], lane[best * inner]) {
                    best = step;
                }
            }
            *slot = best as i64;
        }
    });
}

pub(super) fn cum_sum(inputs: Inputs, exclusive: bool, reverse: bool) -> KernelResult {
    cumulative(inputs, exclusive, reverse, false)
}

pub(super) fn cum_prod(inputs: Inputs, exclusive: bool, reverse: bool) -> KernelResult {
    cumulative(inputs, exclusive, reverse, true)
}

fn cumulative(mut inputs: Inputs, exclusive: bool, reverse: bool, product: bool) -> KernelResult {
    let axis = integer_scalar(&inputs, 1)?;
    let value = inputs.take(0)?;
    let axis = resolve_axis(axis, value.shape().len())?;
    let extents = around(value.shape(), axis);
    let shape = value.shape().to_vec();
    with_full!(value, tensor => {
        let mut data = into_elements(tensor);
        running(&mut data, extents, exclusive, reverse, product);
        one(Element::wrap(&shape, data))
    })
}

fn running<T: Number>(
    data: &mut [T],
    (_, along, inner): (usize, usize, usize),
    exclusive: bool,
    reverse: bool,
    product: bool,
) {
    let block = along * inner;
    if block == 0 {
        return;
    }
    for rows in data.chunks_mut(block) {
        for column in 0..inner {
            let mut total = if product { T::ONE } else { T::default() };
            yield_point::did_work(along);
            for step in 0..along {
                let step = if reverse { along - 1 - step } else { step };
                let slot = &mut rows[step * inner + column];
                let next = if product { total.mul(*slot) } else { total.add(*slot) };
                *slot = if exclusive { total } else { next };
                total = next;
            }
        }
    }
}
