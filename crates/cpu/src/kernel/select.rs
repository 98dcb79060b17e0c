//! Selection: TopK, NonZero, Compress and NonMaxSuppression.

mod boxes;

use model::DataType;
use model::op::Op;

use super::binary::Number;
use super::layout::rearrange;
use super::operand::{
    Element, around, dtype_of, elements, integer_scalar, is_half, one, output_len, resolve_axis,
    through_f32,
};
use super::reduce::with_full;
use super::{Inputs, Kernel, KernelResult, Outputs, StepFacts, no_kernel};
use crate::buffer::Buffer;
use crate::kernel::{KernelError, invalid};
use crate::value::{TypedTensor, Value, with_number};

pub(crate) fn build(facts: &StepFacts) -> Result<Kernel, KernelError> {
    let dtype = dtype_of(facts, 0)?;
    match facts.step.op {
        Op::TopK { axis, largest, .. } if dtype.is_float() || dtype.is_integer() => {
            let kernel = Kernel::new(move |_, inputs| top_k(&inputs, axis, largest));
            Ok(if is_half(dtype) { through_f32(dtype, kernel) } else { kernel })
        }
        Op::NonZero if dtype != DataType::String => Ok(Kernel::new(|_, inputs| non_zero(&inputs))),
        Op::Compress { axis } if dtype_of(facts, 1)? == DataType::Bool => {
            Ok(Kernel::new(move |_, inputs| compress(&inputs, axis)))
        }
        Op::NonMaxSuppression { center_point } if dtype == DataType::F32 => {
            Ok(Kernel::new(move |_, inputs| boxes::suppress(&inputs, center_point)))
        }
        _ => Err(no_kernel(facts)),
    }
}

/// The first `k` elements along `axis` in descending or ascending order; equal ones by position.
fn top_k(inputs: &Inputs, axis: i64, largest: bool) -> KernelResult {
    let k = integer_scalar(inputs, 1)?;
    let value = inputs.get(0)?;
    let axis = resolve_axis(axis, value.shape().len())?;
    let extents = around(value.shape(), axis);
    let k = usize::try_from(k).ok().filter(|&k| k <= extents.1);
    let k = k.ok_or_else(|| invalid!("k must be within 0..={}", extents.1))?;
    let mut shape = value.shape().to_vec();
    shape[axis] = k;
    with_full!(value, tensor => {
        let (values, indices) = first_along(elements(tensor), extents, k, largest)?;
        Ok(Outputs::from_iter([Element::wrap(&shape, values), i64::wrap(&shape, indices)]))
    })
}

fn first_along<T: Number>(
    data: &[T],
    (outer, along, inner): (usize, usize, usize),
    k: usize,
    largest: bool,
) -> Result<(Buffer<T>, Buffer<i64>), KernelError> {
    let mut values = Buffer::filled(outer * k * inner, T::default())?;
    let mut indices = Buffer::filled(outer * k * inner, 0i64)?;
    let mut entries: Buffer<(u64, usize)> = Buffer::with_capacity(along)?;
    for row in 0..if k == 0 { 0 } else { outer } {
        for column in 0..inner {
            let at = |step: usize| (row * along + step) * inner + column;
            entries.clear();
            entries.extend((0..along).map(|step| {
                let key = data[at(step)].sort_key();
                (if largest { !key } else { key }, step)
            }));
            sort_first(&mut entries, k);
            for (rank, &(_, step)) in entries.iter().enumerate() {
                let target = (row * k + rank) * inner + column;
                values[target] = data[at(step)];
                indices[target] = step as i64;
            }
        }
    }
    Ok((values, indices))
}

/// Keeps the `k` lowest entries, which is at least one, in ascending order.
fn sort_first(entries: &mut Buffer<(u64, usize)>, k: usize) {
    if k < entries.len() {
        entries.select_nth_unstable(k - 1);
        entries.truncate(k);
    }
    entries.sort_unstable();
}

/// The positions of elements that are not zero, one row per dimension.
fn non_zero(inputs: &Inputs) -> KernelResult {
    let value = inputs.get(0)?;
    let hits = match value {
        Value::Bool(tensor) => positions(tensor)?,
        other => with_number!(other, tensor => positions(tensor)?, _ => Buffer::default()),
    };
    let shape = value.shape();
    let mut out = Buffer::filled(shape.len() * hits.len(), 0i64)?;
    for (column, &hit) in hits.iter().enumerate() {
        let mut rest = hit;
        for axis in (0..shape.len()).rev() {
            out[axis * hits.len() + column] = (rest % shape[axis]) as i64;
            rest /= shape[axis];
        }
    }
    one(i64::wrap(&[shape.len(), hits.len()], out))
}

fn positions<T: Element>(tensor: &TypedTensor<T>) -> Result<Buffer<usize>, KernelError> {
    let zero = T::default();
    let data = elements(tensor);
    let mut found = Buffer::default();
    for (position, _) in data.iter().enumerate().filter(|(_, x)| **x != zero) {
        found.push(position)?;
    }
    Ok(found)
}

fn compress(inputs: &Inputs, axis: Option<i64>) -> KernelResult {
    let (value, condition) = (inputs.get(0)?, inputs.typed::<bool>(1)?);
    let mut shape = value.shape().to_vec();
    let (axis, extents) = match axis {
        Some(axis) => {
            let axis = resolve_axis(axis, shape.len())?;
            (axis, around(&shape, axis))
        }
        None => {
            shape = vec![shape.iter().product()];
            (0, (1, shape[0], 1))
        }
    };
    let (outer, along, inner) = extents;
    // Positions past the end of the condition are dropped.
    let kept = positions(condition)?;
    if let Some(far) = kept.iter().find(|&&position| position >= along) {
        return Err(invalid!("the condition keeps position {far} of {along}"));
    }
    shape[axis] = kept.len();
    output_len(&shape)?;
    one(rearrange!(value, &shape, data => {
        let mut out = Buffer::with_capacity(outer * kept.len() * inner)?;
        for row in 0..outer {
            for &position in kept.iter() {
                out.extend_from_slice(&data[(row * along + position) * inner..][..inner]);
            }
        }
        out
    }))
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    #[test]
    fn top_k_orders_by_value_then_index() {
        let x = floats(&[2, 4], &[1.0, 3.0, 3.0, f32::NAN, 8.0, 6.0, 7.0, 5.0]);
        let on = |axis, largest, k| {
            let op = Op::TopK { axis, largest, sorted: true };
            try_run(op, &[Some(x.clone()), Some(integers(&[1], &[k]))], 2)
        };
        let top = on(-1, true, 3).unwrap();
        assert_eq!(values::<i64>(&top[1]), [3, 1, 2, 0, 2, 1]);
        let low = on(1, false, 2).unwrap();
        assert_eq!(low[0], floats(&[2, 2], &[1.0, 3.0, 5.0, 6.0]));
        let columns = on(0, true, 1).unwrap();
        assert_eq!(values::<i64>(&columns[1]), [1, 1, 1, 0]);
        assert_eq!(on(1, true, 0).unwrap()[0].shape(), [2, 0]);
        assert!(on(1, true, 5).unwrap_err().contains("0..=4"));
        assert!(on(1, true, -1).is_err());
    }

    #[test]
    fn non_zero_returns_positions() {
        let x = floats(&[2, 2], &[1.0, 0.0, 3.0, 4.0]);
        assert_eq!(run(Op::NonZero, &[x])[0], integers(&[2, 3], &[0, 1, 1, 0, 0, 1]));
        assert_eq!(run(Op::NonZero, &[bools(&[], &[true])])[0].shape(), [0, 1]);
    }

    #[test]
    fn masks_may_be_short_but_not_long() {
        let x = floats(&[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let rows = run(Op::Compress { axis: Some(0) }, &[x.clone(), bools(&[2], &[false, true])]);
        assert_eq!(rows[0], floats(&[1, 2], &[3.0, 4.0]));
        let all = run(Op::Compress { axis: None }, &[x.clone(), bools(&[2], &[false, true])]);
        assert_eq!(all[0], floats(&[1], &[2.0]));
        let long = error(Op::Compress { axis: Some(1) }, &[x, bools(&[3], &[false, false, true])]);
        assert!(long.contains("position 2"));
    }
}
