//! Batch dimensions of matrices, merged or split.

use std::ops::Range;

use model::ValueId;
use model::dim::SymDim;

use crate::ir::Graph;

/// The dimensions of a value before the last two.
#[derive(Clone, Debug)]
pub struct Level(pub Vec<SymDim>);

impl Level {
    /// Whether the dimensions are provably equal.
    pub fn is_same(&self, other: &Level) -> bool {
        self.0.len() == other.0.len() && self.0.iter().zip(&other.0).all(|(a, b)| a.is_same(b))
    }

    /// The dimensions other than one.
    pub fn without_ones(&self) -> Level {
        Level(self.0.iter().filter(|dim| !is_one(dim)).cloned().collect())
    }

    /// For every dimension the range of `fine`'s dimensions of which it is the product.
    pub fn split(&self, fine: &Level) -> Option<Vec<Range<usize>>> {
        let mut groups = Vec::new();
        let mut next = 0;
        for dim in &self.0 {
            let start = next;
            if dim.is(1) {
                next += usize::from(fine.0.get(next).is_some_and(is_one));
            } else {
                let mut product = SymDim::from(1usize);
                while !product.is_same(dim) {
                    product = product.mul(fine.0.get(next)?);
                    next += 1;
                }
            }
            groups.push(start..next);
        }
        fine.0[next..].iter().all(is_one).then_some(groups)
    }

    /// The shape at level `fine` of a value of `shape` that broadcasts to this level.
    pub fn reshaped(&self, fine: &Level, shape: &[SymDim]) -> Option<Vec<SymDim>> {
        let groups = self.split(fine)?;
        let rank = shape.len();
        let (batch, matrix) = shape.split_at(rank.checked_sub(2)?);
        let missing = self.0.len().checked_sub(batch.len())?;
        let mut dims = vec![SymDim::from(1usize); fine.0.len()];
        for (axis, group) in groups.into_iter().enumerate().skip(missing) {
            let own = &batch[axis - missing];
            if own.is_same(&self.0[axis]) {
                dims[group.clone()].clone_from_slice(&fine.0[group]);
            } else if !own.is(1) {
                return None;
            }
        }
        dims.extend_from_slice(matrix);
        Some(dims)
    }
}

fn is_one(dim: &SymDim) -> bool {
    dim.is(1)
}

/// The batch dimensions of a value of matrices.
pub fn batch_of(graph: &Graph, id: ValueId) -> Option<Level> {
    let shape = graph.shape(id)?;
    Some(Level(shape[..shape.len().checked_sub(2)?].to_vec()))
}

/// The permutation that swaps the last two of `rank` dimensions.
pub fn swapped(rank: usize) -> Option<Vec<usize>> {
    let mut perm: Vec<usize> = (0..rank).collect();
    perm.swap(rank.checked_sub(2)?, rank - 1);
    Some(perm)
}

/// Whether both consist of matrices of the same two sizes.
pub fn keeps_matrices(graph: &Graph, a: ValueId, b: ValueId) -> bool {
    let (Some(a), Some(b)) = (graph.shape(a), graph.shape(b)) else { return false };
    let last = |shape: &[SymDim]| shape.len().checked_sub(2).map(|from| shape[from..].to_vec());
    match (last(a), last(b)) {
        (Some(a), Some(b)) => a[0].is_same(&b[0]) && a[1].is_same(&b[1]),
        _ => false,
    }
}

/// Whether two shapes differ only in leading ones.
pub fn broadcasts_alike(a: &[SymDim], b: &[SymDim]) -> bool {
    let trim = |shape: &[SymDim]| -> Vec<SymDim> {
        shape.iter().skip_while(|dim| is_one(dim)).cloned().collect()
    };
    let (a, b) = (trim(a), trim(b));
    a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| a.is_same(b))
}

/// A target of `Reshape` from `from` to `to`: at most one dimension is inferred.
pub fn target(from: &[SymDim], to: &[SymDim]) -> Option<Vec<i64>> {
    let mut inferred = false;
    let number = |(axis, dim): (usize, &SymDim)| {
        if let Some(size) = dim.fixed().filter(|size| *size != 0) {
            return Some(size);
        }
        if from.get(axis).is_some_and(|old| old.is_same(dim)) {
            return Some(0);
        }
        (!std::mem::replace(&mut inferred, true)).then_some(-1)
    };
    to.iter().enumerate().map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn level(dims: &[usize]) -> Level {
        Level(dims.iter().map(|dim| SymDim::from(*dim)).collect())
    }

    #[test]
    fn levels_split_into_finer_ones() {
        let split = |coarse: &[usize], fine: &[usize]| level(coarse).split(&level(fine));
        assert_eq!(split(&[6], &[2, 3]), Some(std::iter::once(0..2).collect()));
        assert_eq!(split(&[2, 8], &[2, 2, 4]), Some(vec![0..1, 1..3]));
        assert_eq!(split(&[1, 8], &[1, 8]), Some(vec![0..1, 1..2]));
        assert_eq!(split(&[8], &[1, 8, 1]).map(|groups| groups[0].start), Some(0));
        assert_eq!(split(&[], &[1, 1]), Some(vec![]));
        assert_eq!(split(&[6], &[4, 2]), None);
        assert_eq!(split(&[6, 4], &[2, 3]), None);
        assert_eq!(split(&[2], &[2, 3]), None);
        let n = SymDim::symbol("n");
        let merged = Level(vec![n.mul(&SymDim::from(4usize))]);
        assert_eq!(
            merged.split(&Level(vec![n, 4usize.into()])),
            Some(std::iter::once(0..2).collect())
        );
    }

    #[test]
    fn broadcast_dimensions_stay_ones() {
        let dims = |dims: &[usize]| -> Vec<SymDim> { level(dims).0 };
        let reshaped = |shape: &[usize]| level(&[6, 4]).reshaped(&level(&[2, 3, 4]), &dims(shape));
        assert_eq!(reshaped(&[6, 4, 5, 7]), Some(dims(&[2, 3, 4, 5, 7])));
        assert_eq!(reshaped(&[1, 4, 5, 7]), Some(dims(&[1, 1, 4, 5, 7])));
        assert_eq!(reshaped(&[5, 7]), Some(dims(&[1, 1, 1, 5, 7])));
        assert_eq!(reshaped(&[3, 4, 5, 7]), None);
    }
}
