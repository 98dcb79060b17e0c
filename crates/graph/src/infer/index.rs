//! Operators that gather, scatter or find elements.

use model::DataType;

use super::shape::{axes_indices, axis_index, unify};
use super::{Fact, Inferred, Operands, fail};
use model::dim::SymDim;

fn expect_index(x: &Operands, index: usize) -> Inferred<()> {
    match x.dtype(index)? {
        DataType::I32 | DataType::I64 => Ok(()),
        dtype => fail(format!("indices of type {dtype}")),
    }
}

pub fn gather(axis: i64, x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    expect_index(x, 1)?;
    let dtype = x.dtype(0)?;
    let (Some(shape), Some(indices)) = (x.shape(0), x.shape(1)) else {
        return Ok(Fact::new(dtype, None));
    };
    let axis = axis_index(axis, shape.len())?;
    let dims = [&shape[..axis], indices, &shape[axis + 1..]].concat();
    let content = match (x.content(0), x.ints(1)) {
        (Some(elements), Some(indices)) if shape.len() == 1 => Some(pick(elements, &indices)?),
        _ => None,
    };
    Ok(Fact::new(dtype, Some(dims)).with_content(content))
}

fn pick(elements: &[SymDim], indices: &[i64]) -> Inferred<Vec<SymDim>> {
    let length = elements.len() as i64;
    let one = |index: &i64| {
        let from_front = if *index < 0 { index.saturating_add(length) } else { *index };
        match usize::try_from(from_front).ok().and_then(|at| elements.get(at)) {
            Some(element) => Ok(element.clone()),
            None => fail(format!("index {index} into {length} elements")),
        }
    };
    indices.iter().map(one).collect()
}

pub fn gather_elements(axis: i64, x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    expect_index(x, 1)?;
    if let (Some(a), Some(b)) = (x.rank(0), x.rank(1)) {
        axis_index(axis, a)?;
        if a != b {
            return fail(format!("indices of rank {b} into rank {a}"));
        }
    }
    Ok(Fact::new(x.dtype(0)?, x.owned_shape(1)))
}

pub fn gather_nd(batch_dims: usize, x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    expect_index(x, 1)?;
    let dtype = x.dtype(0)?;
    let (Some(shape), Some(indices)) = (x.shape(0), x.shape(1)) else {
        return Ok(Fact::new(dtype, None));
    };
    let Some((last, front)) = indices.split_last() else { return fail("scalar indices") };
    let Some(depth) = last.size() else { return Ok(Fact::new(dtype, None)) };
    if batch_dims > front.len() || batch_dims.checked_add(depth).is_none_or(|end| end > shape.len())
    {
        return fail(format!(
            "{depth} indices and {batch_dims} batch dimensions into rank {}",
            shape.len()
        ));
    }
    let dims = [front, &shape[batch_dims + depth..]].concat();
    Ok(Fact::new(dtype, Some(dims)))
}

pub fn scatter_elements(axis: i64, x: &Operands) -> Inferred<Fact> {
    x.require(3)?;
    expect_index(x, 1)?;
    let dtype = x.same_type([0, 2])?;
    if let Some(rank) = x.rank(0) {
        axis_index(axis, rank)?;
    }
    if let (Some(indices), Some(updates)) = (x.shape(1), x.shape(2)) {
        if indices.len() != updates.len() {
            return fail("indices and updates differ in rank");
        }
        for (a, b) in indices.iter().zip(updates) {
            unify(a, b, "indices and updates")?;
        }
    }
    Ok(Fact::new(dtype, x.owned_shape(0)))
}

pub fn scatter_nd(x: &Operands) -> Inferred<Fact> {
    x.require(3)?;
    expect_index(x, 1)?;
    Ok(Fact::new(x.same_type([0, 2])?, x.owned_shape(0)))
}

pub fn one_hot(axis: i64, x: &Operands) -> Inferred<Fact> {
    x.require(3)?;
    let dtype = x.dtype(2)?;
    let Some(indices) = x.shape(0) else { return Ok(Fact::new(dtype, None)) };
    let axis = axis_index(axis, indices.len() + 1)?;
    let depth = x.content(1).and_then(|content| content.first()).cloned();
    let mut dims = indices.to_vec();
    dims.insert(axis, depth.unwrap_or(SymDim::Unknown));
    Ok(Fact::new(dtype, Some(dims)))
}

pub fn non_zero(x: &Operands) -> Inferred<Fact> {
    x.require(1)?;
    let rank = x.rank(0).map_or(SymDim::Unknown, SymDim::from);
    Ok(Fact::new(DataType::I64, Some(vec![rank, SymDim::Unknown])))
}

pub fn reverse_sequence(batch_axis: usize, time_axis: usize, x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    let pair = (batch_axis, time_axis);
    if !matches!(pair, (0, 1) | (1, 0)) || x.rank(0).is_some_and(|rank| rank < 2) {
        return fail(format!("batch axis {batch_axis} and time axis {time_axis}"));
    }
    Ok(Fact::new(x.dtype(0)?, x.owned_shape(0)))
}

pub fn compress(axis: Option<i64>, x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    let dtype = x.dtype(0)?;
    let dims = match (axis, x.shape(0)) {
        (None, _) => Some(vec![SymDim::Unknown]),
        (Some(axis), Some(shape)) => {
            let mut dims = shape.to_vec();
            dims[axis_index(axis, shape.len())?] = SymDim::Unknown;
            Some(dims)
        }
        (Some(_), None) => None,
    };
    Ok(Fact::new(dtype, dims))
}

pub fn non_max_suppression(x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    x.expect_rank(0, 3)?;
    x.expect_rank(1, 3)?;
    Ok(Fact::new(DataType::I64, Some(vec![SymDim::Unknown, SymDim::Fixed(3)])))
}

pub fn slice(x: &Operands) -> Inferred<Fact> {
    x.require(3)?;
    let dtype = x.dtype(0)?;
    let Some(shape) = x.shape(0) else { return Ok(Fact::new(dtype, None)) };
    let unknown = || Ok(Fact::new(dtype, Some(vec![SymDim::Unknown; shape.len()])));
    let count = match (x.shape(1), x.content(1)) {
        (_, Some(starts)) => Some(starts.len()),
        (Some([length]), None) => length.size(),
        _ => None,
    };
    let Some(count) = count else { return unknown() };
    let axes = match (x.has(3), x.ints(3)) {
        (false, _) if count > shape.len() => {
            return fail(format!("{count} slices of rank {}", shape.len()));
        }
        (false, _) => (0..count).collect(),
        (true, Some(axes)) => axes_indices(&axes, shape.len())?,
        (true, None) => return unknown(),
    };
    let steps = match (x.has(4), x.ints(4)) {
        (false, _) => vec![1; count],
        (true, Some(steps)) => steps,
        (true, None) => return unknown(),
    };
    let lengths =
        [Some(count), x.content(2).map(<[SymDim]>::len), Some(axes.len()), Some(steps.len())];
    if lengths.iter().flatten().any(|length| *length != count) {
        return fail("starts, ends, axes and steps differ in length");
    }
    let at = |index: usize, entry: usize| match x.content(index) {
        Some(content) => content[entry].clone(),
        None => SymDim::Unknown,
    };
    let mut dims = shape.to_vec();
    let mut picked = None;
    for (entry, axis) in axes.iter().enumerate() {
        let range = SliceRange { start: at(1, entry), end: at(2, entry), step: steps[entry] };
        picked = range.positions(&shape[*axis]);
        dims[*axis] = range.length(&shape[*axis])?;
    }
    let content = match (x.content(0), picked, shape.len(), count) {
        (Some(elements), Some(positions), 1, 1) => {
            positions.into_iter().map(|at| elements.get(at).cloned()).collect()
        }
        (Some(elements), _, 1, 0) => Some(elements.to_vec()),
        _ => None,
    };
    Ok(Fact::new(dtype, Some(dims)).with_content(content))
}

/// A slice along one dimension.
struct SliceRange {
    start: SymDim,
    end: SymDim,
    step: i64,
}

/// Ends at least this large mean "to the end", whatever the size.
const FAR: i64 = i32::MAX as i64 - 1;

impl SliceRange {
    /// Start and end as positions, when everything is a number. Ends before the front are -1.
    fn bounds(&self, size: i64) -> Option<(i64, i64)> {
        let from_front = |at: i64| if at < 0 { at.saturating_add(size) } else { at };
        let (start, end) = (from_front(self.start.fixed()?), from_front(self.end.fixed()?));
        Some(match self.step > 0 {
            true => (start.clamp(0, size), end.clamp(0, size)),
            false => (start.clamp(-1, size - 1), end.clamp(-1, size - 1)),
        })
    }

    fn length(&self, dim: &SymDim) -> Inferred<SymDim> {
        if self.step == 0 {
            return fail("a slice with a step of zero");
        }
        if let Some((start, end)) = dim.fixed().and_then(|size| self.bounds(size)) {
            let (span, step) = match self.step > 0 {
                true => (end - start, self.step),
                false => (start - end, self.step.checked_neg().unwrap_or(i64::MAX)),
            };
            let count = span.max(0).checked_add(step - 1).map_or(1, |wide| wide / step);
            return Ok(SymDim::Fixed(count.max(i64::from(span > 0))));
        }
        if self.step < 0 {
            let whole = self.start.is(-1) && self.end.fixed().is_some_and(|end| end <= -FAR);
            return Ok(if whole && self.step == -1 { dim.clone() } else { SymDim::Unknown });
        }
        let zero = SymDim::Fixed(0);
        let (Some(start), Some(end)) = (position(&self.start, dim), position(&self.end, dim))
        else {
            return Ok(SymDim::Unknown);
        };
        Ok(end.sub(&start).greater(&zero).div_ceil(&SymDim::Fixed(self.step)))
    }

    fn positions(&self, dim: &SymDim) -> Option<Vec<usize>> {
        let size = dim.fixed().filter(|size| *size <= crate::content::MAX_CONTENT as i64)?;
        let (start, end) = self.bounds(size)?;
        let mut positions = Vec::new();
        let mut at = start;
        while self.step != 0 && if self.step > 0 { at < end } else { at > end } {
            positions.push(usize::try_from(at).ok()?);
            at = at.checked_add(self.step)?;
        }
        Some(positions)
    }
}

/// A bound as a position from the front, clamped to the dimension.
fn position(at: &SymDim, dim: &SymDim) -> Option<SymDim> {
    match at {
        SymDim::Unknown => None,
        SymDim::Fixed(value) if *value >= FAR => Some(dim.clone()),
        SymDim::Fixed(value) if *value < 0 => Some(dim.add(at).greater(&SymDim::Fixed(0))),
        at if at.is_non_negative() => Some(at.lesser(dim)),
        _ => None,
    }
}

pub fn unique(axis: Option<i64>, x: &Operands) -> Inferred<Vec<Fact>> {
    let dtype = x.dtype(0)?;
    let shape = match (axis, x.shape(0)) {
        (None, _) => Some(vec![SymDim::Unknown]),
        (Some(_), None) => None,
        (Some(axis), Some(shape)) => {
            let axis = axis_index(axis, shape.len())?;
            let mut dims = shape.to_vec();
            dims[axis] = SymDim::Unknown;
            Some(dims)
        }
    };
    let positions = || Fact::new(DataType::I64, Some(vec![SymDim::Unknown]));
    Ok(vec![Fact::new(dtype, shape), positions(), positions(), positions()])
}

pub fn tensor_scatter(x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    x.same_type([0, 1])?;
    Ok(Fact::new(x.dtype(0)?, x.owned_shape(0)))
}
