//! Arithmetic on whole shapes.

use super::{Inferred, Shape, fail};
use model::dim::{SymDim, shape_text};

/// `axis` counted from the front.
pub(crate) fn axis_index(axis: i64, rank: usize) -> Inferred<usize> {
    let wide = rank as i64;
    let index = if axis < 0 { axis.saturating_add(wide) } else { axis };
    if (0..wide).contains(&index) {
        Ok(index as usize)
    } else {
        fail(format!("axis {axis} is out of range for rank {rank}"))
    }
}

/// The axes counted from the front, each once.
pub(crate) fn axes_indices(axes: &[i64], rank: usize) -> Inferred<Vec<usize>> {
    let mut found = Vec::with_capacity(axes.len());
    for axis in axes {
        let index = axis_index(*axis, rank)?;
        if found.contains(&index) {
            return fail(format!("axis {axis} is named twice"));
        }
        found.push(index);
    }
    Ok(found)
}

/// The common size of two element-wise dimensions, or `None` when they are incompatible.
pub(crate) fn broadcast_dim(a: &SymDim, b: &SymDim) -> Option<SymDim> {
    Some(match (a, b) {
        (SymDim::Fixed(1), other) | (other, SymDim::Fixed(1)) => other.clone(),
        (SymDim::Fixed(x), SymDim::Fixed(y)) => (x == y).then_some(SymDim::Fixed(*x))?,
        // The other can only be 1 or the same.
        (SymDim::Fixed(x), _) | (_, SymDim::Fixed(x)) => SymDim::Fixed(*x),
        (a, b) if a.is_same(b) || b.is_capped(a) => a.clone(),
        (a, b) if a.is_capped(b) => b.clone(),
        _ => SymDim::Unknown,
    })
}

/// The common shape of element-wise operands.
pub(crate) fn broadcast(a: &[SymDim], b: &[SymDim]) -> Inferred<Vec<SymDim>> {
    let rank = a.len().max(b.len());
    let at = |shape: &[SymDim], index: usize| {
        let missing = rank - shape.len();
        if index < missing { SymDim::Fixed(1) } else { shape[index - missing].clone() }
    };
    let dims: Option<Vec<SymDim>> =
        (0..rank).map(|index| broadcast_dim(&at(a, index), &at(b, index))).collect();
    match dims {
        Some(dims) => Ok(dims),
        None => fail(format!(
            "shapes {} and {} do not broadcast",
            shape_text(Some(a)),
            shape_text(Some(b))
        )),
    }
}

/// The common shape of many element-wise operands; `None` when one has no known rank.
pub(crate) fn broadcast_all<'a>(
    shapes: impl IntoIterator<Item = Option<&'a [SymDim]>>,
) -> Inferred<Shape> {
    let mut common: Option<Vec<SymDim>> = Some(Vec::new());
    for shape in shapes {
        common = match (common, shape) {
            (Some(common), Some(shape)) => Some(broadcast(&common, shape)?),
            _ => None,
        };
    }
    Ok(common)
}

/// The combined knowledge of a dimension that two sources describe.
pub(crate) fn unify(a: &SymDim, b: &SymDim, what: &str) -> Inferred<SymDim> {
    match (a, b) {
        (SymDim::Fixed(x), SymDim::Fixed(y)) if x != y => {
            fail(format!("{what}: {x} and {y} differ"))
        }
        (SymDim::Fixed(_), _) => Ok(a.clone()),
        (_, SymDim::Fixed(_)) | (SymDim::Unknown, _) => Ok(b.clone()),
        _ => Ok(a.clone()),
    }
}

/// The product of dimensions.
pub(crate) fn product(dims: &[SymDim]) -> SymDim {
    dims.iter().fold(SymDim::Fixed(1), |product, dim| product.mul(dim))
}
