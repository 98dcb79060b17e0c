//! Which normalizations run on vectors of adjacent elements: `kernels/rows.cuh`.

use super::super::loop_nest::LoopNest;
use super::super::view::{Element, View};

/// Threads of a block.
const THREADS: usize = 256;

/// Vectors of a thread in registers, as the kernels are compiled for.
const HELD: [usize; 8] = [1, 2, 3, 4, 6, 8, 12, 16];

/// The blocks that a device should have at least, where rows are long enough to share.
const BLOCKS: usize = 132;

/// How rows are divided among threads: the parameters of `NormalizeRows`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowVectors {
    /// Threads of a row.
    pub along: usize,
    /// Elements of a vector.
    pub vec: usize,
    /// Scales and biases of a vector.
    pub weights: usize,
    /// Vectors of a thread in registers.
    pub held: usize,
}

/// The strides of one operand along all loops but the fastest inner one, and its first element.
struct Steps<'a> {
    view: &'a View,
    fastest: usize,
    others: Vec<usize>,
}

impl Steps<'_> {
    /// Whether every vector of `vec` elements begins at a multiple of its size.
    fn allow(&self, vec: usize) -> bool {
        let even = |elements: &usize| elements.is_multiple_of(vec);
        self.fastest == 1 && even(&self.view.offset) && self.others.iter().all(even)
    }
}

impl RowVectors {
    /// `None` if the elements of a row are not adjacent. The nests are those of the kernel's
    /// arguments; `views` are input, output, scale and bias.
    pub(super) fn of(
        outer: &LoopNest,
        inner: &LoopNest,
        views: [Option<&View>; 4],
    ) -> Option<RowVectors> {
        let fast = inner.loops.last()?;
        let steps = |operand: usize| {
            let slower = inner.loops.iter().rev().skip(1).chain(&outer.loops);
            let others = slower.map(|each| each.strides[operand]).collect();
            let fastest = fast.strides[operand];
            views[operand].map(|view| Steps { view, fastest, others })
        };
        let (input, output) = (steps(0)?, steps(1)?);
        if input.fastest != 1 || output.fastest != 1 {
            return None;
        }
        let weights: Vec<Steps> = [2, 3].into_iter().filter_map(steps).collect();
        let repeat = weights.iter().all(|steps| steps.fastest == 0);
        let fits = |vec: &usize| {
            fast.size.is_multiple_of(*vec)
                && vec * input.view.element.size() <= 16
                && [&input, &output].into_iter().all(|steps| steps.allow(*vec))
                && (repeat || weights.iter().all(|steps| steps.allow(*vec)))
        };
        let vec = [8, 4, 2].into_iter().find(fits).unwrap_or(1);
        let vectors = inner.len() / vec;
        let along = along(outer.len(), vectors);
        let held = HELD.into_iter().find(|held| held * along >= vectors).unwrap_or(0);
        Some(RowVectors { along, vec, weights: if repeat { 1 } else { vec }, held })
    }

    /// The inner loops in vectors.
    pub(super) fn nest(&self, inner: &LoopNest) -> LoopNest {
        let mut nest = inner.clone();
        if let Some(fast) = nest.loops.last_mut() {
            fast.size /= self.vec;
            fast.strides.iter_mut().for_each(|stride| *stride *= self.vec);
            if fast.size == 1 {
                nest.loops.pop();
            }
        }
        nest
    }

    /// Rows of a block.
    pub(super) fn rows(&self) -> usize {
        THREADS / self.along
    }

    /// The end of the kernel's type.
    pub(super) fn text(&self) -> String {
        let RowVectors { along, vec, weights, held } = self;
        format!("{along}, {vec}, {weights}, {held}")
    }
}

/// Threads of a row of `vectors`: few vectors each, and enough blocks for the device.
fn along(rows: usize, vectors: usize) -> usize {
    let mut along = 4;
    while along < THREADS && along * 4 < vectors {
        along *= 2;
    }
    while along < THREADS && along < vectors && (rows * along).div_ceil(THREADS) < BLOCKS {
        along *= 2;
    }
    along
}

/// Whether the kernel computes `kind` on these elements.
pub(super) fn supports(kind: &str, element: Element) -> bool {
    kind != "Hardmax" && element.is_float() && element != Element::F64
}

#[cfg(test)]
mod tests {
    use super::super::super::view::{BufferId, packed_strides};
    use super::*;

    fn view(shape: &[usize]) -> View {
        let strides = packed_strides(shape);
        let element = Element::F16;
        View { buffer: BufferId(0), offset: 0, shape: shape.to_vec(), strides, element, slack: 0 }
    }

    fn nests(rows: usize, width: usize, scale: usize) -> (LoopNest, LoopNest) {
        let outer = LoopNest::new(&[rows], &[vec![width], vec![width], vec![0], vec![0]]);
        let inner = LoopNest::new(&[width], &[vec![1], vec![1], vec![scale], vec![scale]]);
        (outer, inner)
    }

    #[test]
    fn rows_are_read_in_the_widest_vectors_that_all_operands_allow() {
        for (width, scale, vec, weights) in
            [(768, 1, 8, 8), (770, 1, 2, 2), (769, 1, 1, 1), (1024, 0, 8, 1), (12, 1, 4, 4)]
        {
            let x = view(&[64, width]);
            let (outer, inner) = nests(64, width, scale);
            let found = RowVectors::of(&outer, &inner, [Some(&x), Some(&x), Some(&x), None]);
            let found = found.unwrap();
            assert_eq!((found.vec, found.weights), (vec, weights), "{width}");
            assert!(found.held * found.along * found.vec >= width, "{width}");
            assert_eq!(found.nest(&inner).len(), width / vec);
        }
    }

    #[test]
    fn odd_beginnings_and_strides_prevent_vectors() {
        let (x, mut odd) = (view(&[64, 768]), view(&[64, 768]));
        odd.offset = 4;
        let (outer, inner) = nests(64, 768, 1);
        let of = |x: &View, y: &View, inner: &LoopNest| {
            RowVectors::of(&outer, inner, [Some(x), Some(y), None, None])
        };
        assert_eq!(of(&x, &odd, &inner).unwrap().vec, 4);
        let apart = LoopNest::new(&[768], &[vec![2], vec![1], vec![0], vec![0]]);
        assert!(of(&x, &x, &apart).is_none());
    }

    #[test]
    fn long_rows_are_shared_and_read_again() {
        let (outer, inner) = nests(32, 400_000, 0);
        let x = view(&[32, 400_000]);
        let long = RowVectors::of(&outer, &inner, [Some(&x), Some(&x), None, None]).unwrap();
        assert_eq!((long.along, long.held), (256, 0));
        assert_eq!(along(100_000, 4), 4);
        assert_eq!(along(8, 96), 128, "few rows are shared by more threads");
    }
}
