//! Views whose dimensions are products of strided ones.
//!
//! A reshape that joins dimensions apart in memory is no view: `[tokens, batch, heads * width]` as
//! `[tokens, batch * heads, width]`, where the batch is not beside the heads. The factors of a
//! joined dimension keep their strides here, so that a reader with several outer dimensions needs
//! no copy, and a copy moves the elements only once however many reshapes and transpositions are
//! between.

use super::view::View;

/// A view of the factors, and how many of them make each dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FactoredView {
    /// The factors of all dimensions, in order.
    pub factors: View,
    /// Factors per dimension; none for a dimension of size one.
    pub counts: Vec<usize>,
}

/// One factor: its size and stride.
type Factor = (usize, usize);

impl FactoredView {
    /// Every dimension is its own factor.
    pub fn new(view: &View) -> FactoredView {
        FactoredView { counts: vec![1; view.shape.len()], factors: view.clone() }
    }

    /// The sizes of the dimensions.
    pub fn shape(&self) -> Vec<usize> {
        self.dimensions().iter().map(|all| all.iter().map(|(size, _)| size).product()).collect()
    }

    /// The factors of every dimension.
    pub fn dimensions(&self) -> Vec<Vec<Factor>> {
        let View { shape, strides, .. } = &self.factors;
        let mut all = shape.iter().copied().zip(strides.iter().copied());
        self.counts.iter().map(|count| all.by_ref().take(*count).collect()).collect()
    }

    fn of(&self, dimensions: &[Vec<Factor>]) -> FactoredView {
        let (shape, strides) = dimensions.iter().flatten().copied().unzip();
        let counts = dimensions.iter().map(Vec::len).collect();
        FactoredView { factors: self.factors.with(shape, strides, 0), counts }
    }

    /// The dimensions in another order.
    pub fn permuted(&self, perm: &[usize]) -> FactoredView {
        let dimensions = self.dimensions();
        let moved: Vec<Vec<Factor>> = perm.iter().map(|axis| dimensions[*axis].clone()).collect();
        self.of(&moved)
    }

    /// The same elements in row-major order with another shape; `None` when a factor would have to
    /// be cut where it cannot be.
    pub fn reshaped(&self, shape: &[usize]) -> Option<FactoredView> {
        let View { shape: sizes, strides, .. } = &self.factors;
        if self.factors.is_empty() || self.factors.len() != shape.iter().product::<usize>() {
            return None;
        }
        let all: Vec<Factor> = sizes.iter().copied().zip(strides.iter().copied()).collect();
        let mut left = joined(&all);
        let mut dimensions = Vec::with_capacity(shape.len());
        for size in shape.iter().rev() {
            dimensions.push(take(&mut left, *size)?);
        }
        dimensions.reverse();
        left.is_empty().then(|| self.of(&dimensions))
    }

    /// As a view, where every dimension has one stride.
    pub fn plain(&self) -> Option<View> {
        let View { shape: sizes, strides: steps, .. } = &self.factors;
        let rank = self.counts.len();
        let (mut shape, mut strides) = (vec![1; rank], vec![1; rank]);
        let (mut end, mut extent) = (sizes.len(), 1);
        for axis in (0..rank).rev() {
            let begin = end - self.counts[axis];
            let (size, stride) = match only(&sizes[begin..end], &steps[begin..end]) {
                Some(Some(factor)) => factor,
                Some(None) => (1, extent),
                None => return None,
            };
            (extent, end) = (size * stride, begin);
            (shape[axis], strides[axis]) = (size, stride);
        }
        Some(self.factors.with(shape, strides, self.factors.slack))
    }

    /// Whether each of the last `count` dimensions has one stride.
    pub fn last_are_plain(&self, count: usize) -> bool {
        self.dimensions().iter().rev().take(count).all(|factors| joined(factors).len() <= 1)
    }

    /// Loops that a copy of it needs, at most.
    pub fn loops(&self) -> usize {
        self.factors.shape.iter().filter(|size| **size != 1).count()
    }

    /// The dimensions from the slowest to the fastest for a copy of its elements: as they are, but
    /// with the one fastest that contains adjacent elements.
    pub fn copy_order(&self) -> Vec<usize> {
        let dimensions = self.dimensions();
        let adjacent = |factors: &Vec<Factor>| factors.iter().any(|(size, s)| *size > 1 && *s == 1);
        let fastest = dimensions.iter().position(adjacent);
        let mut order: Vec<usize> = (0..dimensions.len()).collect();
        if let Some(fastest) = fastest {
            order.retain(|axis| *axis != fastest);
            order.push(fastest);
        }
        order
    }
}

/// Factors with neighbours of a common stride as one, without those of size one.
fn joined(factors: &[Factor]) -> Vec<Factor> {
    let mut all: Vec<Factor> = Vec::with_capacity(factors.len());
    for &(size, stride) in factors.iter().filter(|(size, _)| *size != 1) {
        match all.last_mut() {
            Some((count, step)) if *step == size * stride => {
                (*count, *step) = (*count * size, stride);
            }
            _ => all.push((size, stride)),
        }
    }
    all
}

/// The one factor that all of these are [`joined`], `Some(None)` for none; `None` for several.
fn only(sizes: &[usize], strides: &[usize]) -> Option<Option<Factor>> {
    let mut one: Option<Factor> = None;
    for (&size, &stride) in sizes.iter().zip(strides).filter(|(size, _)| **size != 1) {
        one = Some(match one {
            None => (size, stride),
            Some((count, step)) if step == size * stride => (count * size, stride),
            Some(_) => return None,
        });
    }
    Some(one)
}

/// Removes the fastest factors whose sizes make `size`, cutting the last of them if necessary.
fn take(left: &mut Vec<Factor>, size: usize) -> Option<Vec<Factor>> {
    let mut taken = Vec::new();
    let mut wanted = size;
    while wanted > 1 {
        let (available, stride) = left.pop()?;
        if wanted.is_multiple_of(available) {
            taken.push((available, stride));
            wanted /= available;
        } else if available.is_multiple_of(wanted) {
            taken.push((wanted, stride));
            left.push((available / wanted, stride * wanted));
            wanted = 1;
        } else {
            return None;
        }
    }
    taken.reverse();
    Some(taken)
}

/// Views of the same sizes for `all`, whose leading dimensions but the last `kept` have the same
/// sizes, or one where they repeat: every leading dimension is cut so that each of them has a
/// single stride along each piece. `None` when the factors of one are not a refinement of those of
/// another, or one of the last dimensions is no plain one.
pub fn refined(all: &[FactoredView], kept: usize) -> Option<Vec<View>> {
    let rank = all.iter().map(|view| view.counts.len()).max()?;
    if let Some(views) = refined_plain(all, kept) {
        return Some(views);
    }
    let mut views: Vec<View> = Vec::with_capacity(all.len());
    let mut dimensions: Vec<Vec<Vec<Factor>>> = Vec::with_capacity(all.len());
    for view in all {
        let mut own = view.dimensions();
        let leading = own.len().checked_sub(kept)?;
        let tail = own.split_off(leading);
        let last = view.of(&tail).plain()?;
        let mut padded = vec![Vec::new(); rank - kept - leading];
        padded.append(&mut own);
        dimensions.push(padded);
        views.push(last);
    }
    let mut leading: Vec<Vec<Factor>> = vec![Vec::new(); all.len()];
    for axis in (0..rank - kept).rev() {
        let mut own: Vec<Vec<Factor>> = dimensions.iter().map(|view| joined(&view[axis])).collect();
        let size = own.iter().map(|factors| factors.iter().map(|each| each.0).product()).max()?;
        cut(&mut own, size, &mut leading)?;
    }
    for (view, mut factors) in views.iter_mut().zip(leading) {
        factors.reverse();
        let (sizes, strides): (Vec<usize>, Vec<usize>) = factors.into_iter().unzip();
        view.shape.splice(0..0, sizes);
        view.strides.splice(0..0, strides);
    }
    Some(views)
}

/// The same for views of one rank without joined dimensions whose leading sizes are equal, or one.
fn refined_plain(all: &[FactoredView], kept: usize) -> Option<Vec<View>> {
    let rank = all.first()?.counts.len();
    let leading = rank.checked_sub(kept)?;
    let plain = |view: &FactoredView| {
        view.counts.len() == rank && view.counts.iter().all(|count| *count == 1)
    };
    if !all.iter().all(plain) {
        return None;
    }
    let sizes: Vec<usize> = (0..leading)
        .map(|axis| all.iter().map(|view| view.factors.shape[axis]).max())
        .collect::<Option<_>>()?;
    let fits = |view: &FactoredView| {
        view.factors.shape.iter().zip(&sizes).all(|(own, size)| own == size || *own == 1)
    };
    if sizes.contains(&0) || !all.iter().all(fits) {
        return None;
    }
    let one = |view: &FactoredView| {
        let View { shape: own, strides: steps, .. } = &view.factors;
        let (mut shape, mut strides) = (Vec::with_capacity(rank), Vec::with_capacity(rank));
        for (axis, size) in sizes.iter().enumerate().filter(|(_, size)| **size > 1) {
            shape.push(*size);
            strides.push(if own[axis] == 1 { 0 } else { steps[axis] });
        }
        let (first, mut extent) = (shape.len(), 1);
        shape.extend_from_slice(&own[leading..]);
        strides.extend_from_slice(&steps[leading..]);
        for axis in (first..shape.len()).rev() {
            if shape[axis] == 1 {
                strides[axis] = extent;
            }
            extent = shape[axis] * strides[axis];
        }
        view.factors.with(shape, strides, 0)
    };
    Some(all.iter().map(one).collect())
}

/// Cuts one dimension of `size`, given as the factors of each view, into pieces that go to
/// `pieces`, the fastest first. A view without factors repeats.
fn cut(own: &mut [Vec<Factor>], size: usize, pieces: &mut [Vec<Factor>]) -> Option<()> {
    let repeats: Vec<bool> = own.iter().map(Vec::is_empty).collect();
    let mut left = size;
    while left > 1 {
        let fastest = |factors: &Vec<Factor>| factors.last().map(|each| each.0);
        let piece = own.iter().filter_map(fastest).min().filter(|piece| *piece > 1)?;
        for ((factors, repeats), pieces) in own.iter_mut().zip(&repeats).zip(&mut *pieces) {
            if *repeats {
                pieces.push((piece, 0));
                continue;
            }
            let (available, stride) = factors.pop()?;
            if !available.is_multiple_of(piece) {
                return None;
            }
            pieces.push((piece, stride));
            if available > piece {
                factors.push((available / piece, stride * piece));
            }
        }
        left = left.is_multiple_of(piece).then(|| left / piece)?;
    }
    own.iter().all(Vec::is_empty).then_some(())
}

#[cfg(test)]
mod tests {
    use super::super::view::tests::{offsets, packed};
    use super::*;

    #[test]
    fn reshapes_join_and_cut_dimensions_of_any_strides() {
        // Activations [tokens, batch, heads * width] that are in memory with the batch slowest.
        let x = packed(&[3, 5, 24]).permuted(&[1, 0, 2]);
        let heads = FactoredView::new(&x).reshaped(&[5, 12, 6]).unwrap();
        assert_eq!(heads.shape(), [5, 12, 6]);
        assert!(heads.plain().is_none());
        assert_eq!(offsets(&heads.factors), offsets(&x));
        let swapped = heads.permuted(&[1, 0, 2]);
        assert_eq!(swapped.shape(), [12, 5, 6]);
        let back = swapped.permuted(&[1, 0, 2]).reshaped(&[5, 3, 24]).unwrap();
        assert_eq!(back.plain(), Some(x.clone()));
        assert!(FactoredView::new(&x).reshaped(&[5, 8, 9]).is_none(), "8 cuts the batch of 3");
        assert!(FactoredView::new(&x).reshaped(&[5, 12, 7]).is_none());
        let ones = FactoredView::new(&packed(&[1, 4, 1])).reshaped(&[4, 1, 1]).unwrap();
        assert_eq!(ones.plain().unwrap().shape, [4, 1, 1]);
    }

    #[test]
    fn several_views_are_cut_into_the_same_pieces() {
        let x = packed(&[3, 5, 24]).permuted(&[1, 0, 2]);
        let heads = FactoredView::new(&x).reshaped(&[5, 12, 6]).unwrap().permuted(&[1, 0, 2]);
        let y = FactoredView::new(&packed(&[12, 5, 6]));
        let repeated = FactoredView::new(&packed(&[1, 5, 6]));
        let short = FactoredView::new(&packed(&[5, 6]));
        let all = [heads.clone(), y.clone(), repeated, short];
        let views = refined(&all, 2).unwrap();
        for view in &views {
            assert_eq!(view.shape, [3, 4, 5, 6]);
        }
        assert_eq!(offsets(&views[0]), offsets(&heads.factors));
        assert_eq!(offsets(&views[1]), offsets(&y.factors));
        assert_eq!((views[2].strides[0], views[3].strides[1]), (0, 0));
        let uneven = FactoredView::new(&packed(&[2, 6, 5, 6])).reshaped(&[12, 5, 6]).unwrap();
        assert!(refined(&[heads, uneven.clone()], 2).is_some(), "packed factors join");
        let odd = packed(&[6, 2, 5, 6]).permuted(&[1, 0, 2, 3]);
        let odd = FactoredView::new(&odd).reshaped(&[12, 5, 6]).unwrap();
        let thirds = packed(&[4, 3, 5, 6]).permuted(&[1, 0, 2, 3]);
        let thirds = FactoredView::new(&thirds).reshaped(&[12, 5, 6]).unwrap();
        assert!(refined(&[odd, thirds], 2).is_none(), "2 x 6 against 3 x 4");
        assert!(refined(&[uneven], 2).is_some());
    }

    #[test]
    fn a_copy_keeps_adjacent_elements_adjacent() {
        let keys = FactoredView::new(&packed(&[2, 7, 8]).permuted(&[0, 2, 1]));
        assert_eq!(keys.copy_order(), [0, 2, 1]);
        assert_eq!(FactoredView::new(&packed(&[2, 7, 8])).copy_order(), [0, 1, 2]);
    }
}
