//! Different elements, determinants and rows written at positions.

use std::cmp::Ordering;

use model::op::Op;

use super::layout::rearrange;
use super::operand::{Element, around, dtype_of, elements, one, optional_integers, resolve_axis};
use super::wide::{from_reals, reals};
use super::{Inputs, Kernel, KernelResult, Outputs, StepFacts, no_kernel};
use crate::buffer::Buffer;
use crate::kernel::{KernelError, invalid};
use crate::value::{TypedTensor, Value, with_value};
use crate::yield_point;

pub(crate) fn build(facts: &StepFacts) -> Result<Kernel, KernelError> {
    let dtype = dtype_of(facts, 0)?;
    match facts.step.op {
        Op::Unique { axis, sorted } => {
            Ok(Kernel::new(move |_, inputs| unique(&inputs, axis, sorted)))
        }
        Op::Det if dtype.is_float() => Ok(Kernel::new(|_, inputs| determinants(&inputs))),
        Op::TensorScatter { axis, circular } if facts.input_dtype(1) == Some(dtype) => {
            Ok(Kernel::new(move |_, inputs| overwrite(&inputs, axis, circular)))
        }
        _ => Err(no_kernel(facts)),
    }
}

/// The distinct slices along a dimension: positions of each, and of which slice each position is.
struct Distinct {
    first: Buffer<i64>,
    place: Buffer<i64>,
    counts: Buffer<i64>,
}

fn unique(inputs: &Inputs, axis: Option<i64>, sorted: bool) -> KernelResult {
    let value = inputs.get(0)?;
    let (outer, along, inner) = match axis {
        None => (1, value.shape().iter().product(), 1),
        Some(axis) => around(value.shape(), resolve_axis(axis, value.shape().len())?),
    };
    let found = with_value!(value, tensor => distinct(tensor, (outer, along, inner), sorted))?;
    let kept = found.first.len();
    let shape = match axis {
        None => vec![kept],
        Some(axis) => {
            let mut shape = value.shape().to_vec();
            shape[resolve_axis(axis, value.shape().len())?] = kept;
            shape
        }
    };
    let rows = rearrange!(value, &shape, data => {
        let mut out = Buffer::with_capacity(outer * kept * inner)?;
        for row in 0..outer {
            for first in &found.first {
                let start = (row * along + *first as usize) * inner;
                out.extend_from_slice(&data[start..start + inner]);
            }
        }
        out
    });
    let list = |data: Buffer<i64>| i64::wrap(&[data.len()], data);
    Ok(Outputs::from_iter([rows, list(found.first), list(found.place), list(found.counts)]))
}

fn distinct<T: PartialOrd>(
    tensor: &TypedTensor<T>,
    (outer, along, inner): (usize, usize, usize),
    sorted: bool,
) -> Result<Distinct, KernelError> {
    let data = elements(tensor);
    let slice =
        |at: usize| (0..outer).flat_map(move |row| &data[(row * along + at) * inner..][..inner]);
    let order = |a: usize, b: usize| {
        let pairs = slice(a).zip(slice(b));
        // NaN is after all numbers and equal to itself.
        let compare = |(a, b): (&T, &T)| {
            a.partial_cmp(b).unwrap_or_else(|| {
                let is_nan = |x: &T| x.partial_cmp(x).is_none();
                is_nan(a).cmp(&is_nan(b))
            })
        };
        pairs.map(compare).find(|order| *order != Ordering::Equal).unwrap_or(Ordering::Equal)
    };
    let mut positions: Buffer<usize> = Buffer::collect(0..along)?;
    yield_point::did_work(along.saturating_mul(20));
    positions.sort_unstable_by(|a, b| order(*a, *b).then(a.cmp(b)));
    // In order, each group's first position; then the groups in the order that is wanted.
    let mut groups: Buffer<(usize, usize)> = Buffer::default();
    for (index, at) in positions.iter().enumerate() {
        if index == 0 || order(positions[index - 1], *at) != Ordering::Equal {
            groups.push((*at, index))?;
        }
    }
    let mut ranks: Buffer<usize> = Buffer::collect(0..groups.len())?;
    if !sorted {
        ranks.sort_unstable_by_key(|group| groups[*group].0);
    }
    let (mut first, mut counts) = (Buffer::default(), Buffer::default());
    let mut place = Buffer::filled(along, 0i64)?;
    for (rank, group) in ranks.iter().enumerate() {
        let start = groups[*group].1;
        let end = groups.get(group + 1).map_or(along, |next| next.1);
        first.push(groups[*group].0 as i64)?;
        counts.push((end - start) as i64)?;
        positions[start..end].iter().for_each(|at| place[*at] = rank as i64);
    }
    Ok(Distinct { first, place, counts })
}

fn determinants(inputs: &Inputs) -> KernelResult {
    let value = inputs.get(0)?;
    let &[ref batch @ .., rows, columns] = value.shape() else {
        return Err(invalid!("a matrix of shape {:?}", value.shape()));
    };
    if rows != columns {
        return Err(invalid!("a matrix of {rows} x {columns} has no determinant"));
    }
    let mut data = reals(value)?;
    let mut out = Buffer::with_capacity(batch.iter().product())?;
    if rows == 0 {
        out.extend((0..batch.iter().product()).map(|_| 1.0));
    }
    for matrix in data.chunks_exact_mut((rows * rows).max(1)) {
        yield_point::did_work(rows.saturating_pow(3));
        out.extend([determinant(matrix, rows)]);
    }
    one(from_reals(batch, out, value.dtype())?)
}

/// By elimination with the largest pivot of each column.
fn determinant(matrix: &mut [f64], size: usize) -> f64 {
    let mut product = 1.0;
    for column in 0..size {
        let magnitude = |row: usize| matrix[row * size + column].abs();
        let pivot = (column..size).max_by(|a, b| magnitude(*a).total_cmp(&magnitude(*b)));
        let Some(pivot) = pivot else { break };
        if matrix[pivot * size + column] == 0.0 {
            return 0.0;
        }
        if pivot != column {
            product = -product;
            (0..size).for_each(|at| matrix.swap(pivot * size + at, column * size + at));
        }
        let lead = matrix[column * size + column];
        product *= lead;
        for row in column + 1..size {
            let factor = matrix[row * size + column] / lead;
            for at in column..size {
                matrix[row * size + at] -= factor * matrix[column * size + at];
            }
        }
    }
    product
}

/// Rows of `update` put into `past` along one dimension.
fn overwrite(inputs: &Inputs, axis: i64, circular: bool) -> KernelResult {
    let (past, update) = (inputs.get(0)?, inputs.get(1)?);
    let shape = past.shape();
    let axis = resolve_axis(axis, shape.len())?;
    let beside = |(at, (a, b)): (usize, (&usize, &usize))| at == axis || a == b;
    let pairs = shape.iter().zip(update.shape());
    if axis == 0 || shape.len() != update.shape().len() || !pairs.enumerate().all(beside) {
        return Err(invalid!("an update of shape {:?} for {shape:?}", update.shape()));
    }
    let (outer, along, inner) = around(shape, axis);
    let (_, written, _) = around(update.shape(), axis);
    let starts = match optional_integers(inputs, 2)? {
        Some(starts) => starts,
        None => Buffer::filled(shape[0], 0)?,
    };
    if starts.len() != shape[0] || written > along {
        return Err(invalid!("{} positions for {} rows", starts.len(), shape[0]));
    }
    let mut targets: Buffer<usize> = Buffer::with_capacity(outer * written)?;
    for line in 0..outer {
        let start = starts[line / (outer / shape[0].max(1)).max(1)];
        for step in 0..written {
            let at = start.saturating_add(step as i64);
            let at = if circular { at.rem_euclid(along.max(1) as i64) } else { at };
            match usize::try_from(at).ok().filter(|at| *at < along) {
                Some(at) => targets.extend([(line * along + at) * inner]),
                None => return Err(invalid!("position {at} of {along}")),
            }
        }
    }
    let same_type = past.dtype() == update.dtype();
    if !same_type {
        return Err(invalid!("{} into {}", update.dtype(), past.dtype()));
    }
    with_value!(past, tensor => put_rows(tensor, update, &targets, inner))
}

fn put_rows<T: Element + Clone>(
    past: &TypedTensor<T>,
    update: &Value,
    targets: &[usize],
    inner: usize,
) -> KernelResult {
    let update = T::get(update).ok_or("the update has another type")?;
    let mut out = Buffer::copy_of(elements(past))?;
    for (row, target) in elements(update).chunks(inner.max(1)).zip(targets) {
        out[*target..*target + inner].clone_from_slice(row);
    }
    one(T::wrap(past.shape(), out))
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use base::Random;

    #[test]
    fn distinct_elements_agree_with_a_slow_reference() {
        let mut random = Random::new(9);
        for sorted in [false, true] {
            let data: Vec<i64> = (0..50).map(|_| random.below(12) as i64).collect();
            let op = Op::Unique { axis: None, sorted };
            let got = try_run(op, &[Some(integers(&[50], &data))], 4).unwrap();
            let mut want: Vec<i64> = Vec::new();
            data.iter().for_each(|x| {
                if !want.contains(x) {
                    want.push(*x)
                }
            });
            if sorted {
                want.sort_unstable();
            }
            assert_eq!(values::<i64>(&got[0]), want);
            for (index, x) in want.iter().enumerate() {
                let first = data.iter().position(|other| other == x).unwrap() as i64;
                assert_eq!(values::<i64>(&got[1])[index], first);
                let count = data.iter().filter(|other| *other == x).count() as i64;
                assert_eq!(values::<i64>(&got[3])[index], count);
            }
            let places = values::<i64>(&got[2]);
            assert!(places.iter().zip(&data).all(|(place, x)| want[*place as usize] == *x));
        }
    }

    #[test]
    fn determinants_of_products_are_products() {
        let mut random = Random::new(11);
        let (a, b) = (random_floats(&mut random, &[4, 4]), random_floats(&mut random, &[4, 4]));
        let product = run(Op::MatMul(model::op::MatMul::default()), &[a.clone(), b.clone()]);
        let of = |x: model::Tensor| values::<f32>(&run(Op::Det, &[x])[0])[0];
        let (ab, a, b) = (of(product[0].clone()), of(a), of(b));
        assert!((ab - a * b).abs() < 1e-5, "{ab} {a} {b}");
        assert!(error(Op::Det, &[floats(&[2, 3], &[0.0; 6])]).contains("no determinant"));
    }

    #[test]
    fn positions_outside_are_refused() {
        let (past, update) = (integers(&[1, 3], &[1, 2, 3]), integers(&[1, 2], &[8, 9]));
        let on = |circular, at: i64| {
            let op = Op::TensorScatter { axis: 1, circular };
            try_run(op, &[past.clone(), update.clone(), integers(&[1], &[at])].map(Some), 1)
        };
        assert_eq!(values::<i64>(&on(true, 2).unwrap()[0]), [9, 2, 8]);
        assert!(on(false, 2).is_err() && on(false, -1).is_err());
    }
}
