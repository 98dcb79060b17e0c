//! Reductions, normalisations and recurrent layers.

use model::DataType;
use model::op::{ArgReduce, Reduce, ReduceKind, Rnn, RnnDirection, Softmax};

use super::elementwise::{meet_channels, same_float};
use super::shape::{axes_indices, axis_index, broadcast};
use super::tracked;
use super::{Fact, Inferred, Operands, Shape, fail};
use model::dim::SymDim;
use model::op::Variadic;

/// `shape` without `axes`, or with size one for them.
fn without(shape: &[SymDim], axes: &[usize], keep: bool) -> Vec<SymDim> {
    let one = |(index, dim): (usize, &SymDim)| match (axes.contains(&index), keep) {
        (false, _) => Some(dim.clone()),
        (true, true) => Some(SymDim::Fixed(1)),
        (true, false) => None,
    };
    shape.iter().enumerate().filter_map(one).collect()
}

pub fn reduce(op: &Reduce, x: &Operands) -> Inferred<Fact> {
    let dtype = x.dtype(0)?;
    if matches!(dtype, DataType::String) {
        return fail("strings cannot be reduced");
    }
    let axes = match x.has(1) {
        true => x.ints(1),
        false => Some(vec![]),
    };
    let shape = match (x.shape(0), axes) {
        (Some(shape), Some(axes)) if axes.is_empty() => match op.noop_with_empty_axes {
            true => Some(shape.to_vec()),
            false => Some(without(shape, &(0..shape.len()).collect::<Vec<_>>(), op.keep_dims)),
        },
        (Some(shape), Some(axes)) => {
            Some(without(shape, &axes_indices(&axes, shape.len())?, op.keep_dims))
        }
        (Some(shape), None) => unknown_axes(op, shape, x.shape(1)),
        (None, _) => None,
    };
    let content = reduced_content(op, x, &shape);
    Ok(Fact::new(dtype, shape).with_content(content))
}

/// The rank is known if the dimensions are kept, or if their number is known.
fn unknown_axes(op: &Reduce, shape: &[SymDim], axes: Option<&[SymDim]>) -> Shape {
    if op.keep_dims {
        return Some(vec![SymDim::Unknown; shape.len()]);
    }
    match axes.and_then(|axes| axes.first()).and_then(SymDim::size) {
        Some(count) if count > 0 => Some(vec![SymDim::Unknown; shape.len().checked_sub(count)?]),
        _ => None,
    }
}

fn reduced_content(op: &Reduce, x: &Operands, shape: &Shape) -> Option<Vec<SymDim>> {
    let vector_to_one = x.rank(0)? == 1 && super::shape::product(shape.as_ref()?).is(1);
    let content = x.content(0).filter(|_| vector_to_one)?;
    let (first, rest) = content.split_first()?;
    let combine = |a: SymDim, b: &SymDim| match op.kind {
        ReduceKind::Prod => Some(a.mul(b)),
        ReduceKind::Sum => tracked::variadic(Variadic::Sum, &a, b),
        ReduceKind::Max => tracked::variadic(Variadic::Max, &a, b),
        ReduceKind::Min => tracked::variadic(Variadic::Min, &a, b),
        _ => None,
    };
    let plain =
        matches!(op.kind, ReduceKind::Prod | ReduceKind::Sum | ReduceKind::Max | ReduceKind::Min);
    plain.then(|| rest.iter().try_fold(first.clone(), combine)).flatten().map(|value| vec![value])
}

pub fn arg_reduce(op: &ArgReduce, x: &Operands) -> Inferred<Fact> {
    x.require(1)?;
    let shape = match x.shape(0) {
        Some(shape) => {
            let axis = axis_index(op.axis, shape.len())?;
            Some(without(shape, &[axis], op.keep_dims))
        }
        None => None,
    };
    Ok(Fact::new(DataType::I64, shape))
}

pub fn along(axis: i64, x: &Operands) -> Inferred<Fact> {
    if let Some(rank) = x.rank(0) {
        axis_index(axis, rank)?;
    }
    same_float(x)
}

pub fn softmax(op: &Softmax, x: &Operands) -> Inferred<Fact> {
    match x.rank(0) {
        // A flattened one may split behind the last dimension.
        Some(rank) if op.flatten && op.axis == rank as i64 => {}
        Some(rank) => {
            axis_index(op.axis, rank)?;
        }
        None => {}
    }
    same_float(x)
}

pub fn top_k(axis: i64, x: &Operands) -> Inferred<Vec<Fact>> {
    x.require(2)?;
    let dtype = x.dtype(0)?;
    let shape = match x.shape(0) {
        Some(shape) => {
            let axis = axis_index(axis, shape.len())?;
            let mut shape = shape.to_vec();
            let k = x.content(1).and_then(|content| content.first());
            if let (Some(k), Some(size)) = (k.and_then(SymDim::fixed), shape[axis].fixed())
                && k > size
            {
                return fail(format!("the best {k} of {size}"));
            }
            shape[axis] = k.cloned().unwrap_or(SymDim::Unknown);
            Some(shape)
        }
        None => None,
    };
    Ok(vec![Fact::new(dtype, shape.clone()), Fact::new(DataType::I64, shape)])
}

pub(super) fn check_channels(x: &Operands, vectors: &[usize]) -> Inferred<()> {
    if x.rank(0).is_some_and(|rank| rank < 2) {
        return fail("operand 0 has no channels");
    }
    vectors.iter().try_for_each(|index| {
        x.expect_rank(*index, 1)?;
        meet_channels(x, *index)
    })
}

pub fn batch_norm(x: &Operands) -> Inferred<Fact> {
    x.require(5)?;
    // A batch of scalars per channel has rank 1 in ONNX; it is not supported.
    check_channels(x, &[1, 2, 3, 4])?;
    same_float(x)
}

pub fn channel_norm(x: &Operands) -> Inferred<Fact> {
    x.require(3)?;
    check_channels(x, &[1, 2])?;
    same_float(x)
}

pub fn group_norm(groups: usize, x: &Operands) -> Inferred<Fact> {
    if let Some(channels) = x.shape(0).and_then(|shape| shape.get(1)).and_then(SymDim::size)
        && (groups == 0 || channels % groups != 0)
    {
        return fail(format!("{channels} channels in {groups} groups"));
    }
    channel_norm(x)
}

pub fn layer_norm(axis: i64, x: &Operands) -> Inferred<Vec<Fact>> {
    x.require(2)?;
    let dtype = x.dtype(0)?;
    let statistics = match x.shape(0) {
        Some(shape) => {
            let axis = axis_index(axis, shape.len())?;
            for vector in [1, 2] {
                if let Some(other) = x.shape(vector)
                    && broadcast(shape, other)?.len() != shape.len()
                {
                    return fail("scale or bias has a higher rank than the input");
                }
            }
            Some(without(shape, &(axis..shape.len()).collect::<Vec<_>>(), true))
        }
        None => None,
    };
    // The statistics are outputs in single precision.
    let precise = if dtype == DataType::F64 { DataType::F64 } else { DataType::F32 };
    Ok(vec![same_float(x)?, Fact::new(precise, statistics.clone()), Fact::new(precise, statistics)])
}

pub fn rms_norm(axis: i64, x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    along(axis, x)
}

pub fn rnn(op: &Rnn, x: &Operands) -> Inferred<Vec<Fact>> {
    x.require(3)?;
    let dtype = x.same_type([0, 1, 2, 3, 5, 6, 7])?;
    x.expect_rank(0, 3)?;
    let directions = SymDim::Fixed(match op.direction {
        RnnDirection::Bidirectional => 2,
        _ => 1,
    });
    let hidden = SymDim::from(op.hidden_size);
    let (time, batch) = match (x.shape(0), op.batch_first) {
        (Some([time, batch, _]), false) | (Some([batch, time, _]), true) => {
            (time.clone(), batch.clone())
        }
        _ => (SymDim::Unknown, SymDim::Unknown),
    };
    let (all, last) = match op.batch_first {
        false => (
            vec![time, directions.clone(), batch.clone(), hidden.clone()],
            vec![directions, batch, hidden],
        ),
        true => (
            vec![batch.clone(), time, directions.clone(), hidden.clone()],
            vec![batch, directions, hidden],
        ),
    };
    Ok(vec![
        Fact::new(dtype, Some(all)),
        Fact::new(dtype, Some(last.clone())),
        Fact::new(dtype, Some(last)),
    ])
}
