//! Nests of loops over several strided operands at once, as `Walk` of `kernels/number.cuh` runs them.

use super::args::{Address, ArgsWriter};
use super::draft::{KernelText, LaunchDraft, StepDraft};
use super::view::{Element, View};

/// The largest rank a kernel is generated for, after dimensions were merged.
pub const MAX_RANK: usize = 6;

/// The most threads a launch may have, so that the number of any of them is an `int` with room to add a block.
pub const MAX_ITEMS: usize = i32::MAX as usize - 4096;

/// One loop: how often, and how far each operand moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loop {
    /// Iterations.
    pub size: usize,
    /// Elements each operand moves.
    pub strides: Vec<usize>,
}

/// Loops from the slowest to the fastest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopNest {
    /// The loops; none of a single iteration.
    pub loops: Vec<Loop>,
    /// Operands.
    pub operands: usize,
}

impl LoopNest {
    /// Loops over `shape`, in its order. Every operand has a stride for each dimension.
    pub fn new(shape: &[usize], operands: &[Vec<usize>]) -> LoopNest {
        let each = |axis: usize| Loop {
            size: shape[axis],
            strides: operands.iter().map(|strides| strides[axis]).collect(),
        };
        let loops = (0..shape.len()).filter(|&axis| shape[axis] != 1).map(each).collect();
        LoopNest { loops, operands: operands.len() }
    }

    /// The loops in the memory order of `operand`, slowest first.
    #[must_use]
    pub fn ordered_by(mut self, operand: usize) -> LoopNest {
        self.loops.sort_by_key(|each| std::cmp::Reverse(each.strides[operand]));
        self
    }

    /// With neighbouring loops made one where every operand steps evenly through both.
    #[must_use]
    pub fn merged(self) -> LoopNest {
        let mut loops: Vec<Loop> = Vec::with_capacity(self.loops.len());
        for each in self.loops {
            let evenly = |outer: &Loop| {
                outer.strides.iter().zip(&each.strides).all(|(far, near)| *far == near * each.size)
            };
            match loops.last_mut() {
                Some(outer) if evenly(outer) => {
                    *outer = Loop { size: outer.size * each.size, strides: each.strides };
                }
                _ => loops.push(each),
            }
        }
        LoopNest { loops, operands: self.operands }
    }

    /// Adds a fastest loop.
    pub fn push(&mut self, size: usize, strides: Vec<usize>) {
        self.loops.push(Loop { size, strides });
    }

    /// Rank of the kernel's walk: a walk over nothing has one loop of one iteration.
    pub fn rank(&self) -> usize {
        self.loops.len().max(1)
    }

    /// Iterations of all loops.
    pub fn len(&self) -> usize {
        self.loops.iter().map(|each| each.size).product()
    }

    /// Whether there is no iteration.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Refuses what no kernel is generated for.
    pub fn check(&self) -> Result<(), String> {
        if self.rank() > MAX_RANK {
            return Err(format!(
                "{} dimensions that cannot be merged, at most {MAX_RANK}",
                self.rank()
            ));
        }
        let items = self.loops.iter().try_fold(1usize, |all, each| all.checked_mul(each.size));
        match items {
            Some(items) if (1..=MAX_ITEMS).contains(&items) => Ok(()),
            _ => Err(format!("{items:?} elements: a launch has 1 to {MAX_ITEMS}")),
        }
    }

    /// Writes the kernel's `Walk<rank, operands>`.
    pub fn write(&self, args: &mut ArgsWriter) {
        if self.loops.is_empty() {
            args.fast_div(1);
            for _ in 0..self.operands {
                args.int(0);
            }
            return;
        }
        for each in &self.loops {
            args.fast_div(each.size);
        }
        for operand in 0..self.operands {
            for each in &self.loops {
                args.int(each.strides[operand]);
            }
        }
    }
}

/// Refuses a view whose elements cannot be counted in an `int`.
pub fn check_view(view: &View) -> Result<(), String> {
    let end = view.shape.iter().zip(&view.strides).try_fold(1usize, |end, (size, stride)| {
        end.checked_add(size.saturating_sub(1).checked_mul(*stride)?)
    });
    let len = view.shape.iter().try_fold(1usize, |all, size| all.checked_mul(*size));
    match (end, len) {
        (Some(end), Some(len)) if end.max(len) <= MAX_ITEMS => Ok(()),
        _ => Err(format!("a value of shape {:?} has more than {MAX_ITEMS} elements", view.shape)),
    }
}

/// Refuses an output that cannot be written: no element, or one place for several.
pub fn check_output(view: &View) -> Result<(), String> {
    check_view(view)?;
    if view.is_empty() {
        return Err("the output has no element, there is nothing to launch".to_string());
    }
    let repeats =
        view.shape.iter().zip(&view.strides).any(|(&size, &stride)| size > 1 && stride == 0);
    if repeats {
        return Err(format!("an output of strides {:?} writes one place twice", view.strides));
    }
    Ok(())
}

/// Where a view's first element is.
pub fn address(view: &View) -> Address {
    Address::Buffer(view.buffer, (view.offset * view.element.size()) as u64)
}

/// A view without its place: what decides how fast a step is.
pub fn describe(view: &View) -> String {
    let align = (view.offset * view.element.size()) % 16;
    format!("{:?}{:?}/{:?}@{align}+{}", view.element, view.shape, view.strides, view.slack)
}

/// What a signature says of an optional operand.
pub fn describe_all(views: &[&View]) -> String {
    views.iter().map(|view| describe(view)).collect::<Vec<_>>().join(" ")
}

/// What elements are computed in: small floating-point numbers in single precision, all others as they are.
pub fn computed(element: Element) -> Element {
    match element {
        Element::F16 | Element::BF16 => Element::F32,
        other => other,
    }
}

/// The C++ type numbers are computed in.
pub fn computed_name(element: Element) -> &'static str {
    match computed(element) {
        Element::Bool => "bool",
        other => other.cuda_name(),
    }
}

/// The text before a kernel of these elements: what `header` includes depends on them.
pub fn include(header: &str, elements: &[Element]) -> String {
    let brain = if elements.contains(&Element::BF16) { "#define TILES_BF16\n" } else { "" };
    format!("{brain}#include \"{header}\"\n")
}

/// A kernel that is a type of a header.
pub fn kernel(header: &str, elements: &[Element], expression: String, threads: u32) -> KernelText {
    KernelText { source: include(header, elements), expression, threads, shared_bytes: 0 }
}

/// A step of one launch that may be left anywhere.
pub fn single(
    op: &'static str,
    signature: String,
    draft: LaunchDraft,
    reads: &[&View],
    write: &View,
) -> StepDraft {
    StepDraft {
        op,
        signature,
        drafts: vec![draft],
        reads: reads.iter().map(|view| (*view).clone()).collect(),
        writes: vec![write.clone()],
        flops: 0,
        weight_bytes: 0,
        finish_tiles: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loops_merge_where_all_operands_step_evenly() {
        let nest = LoopNest::new(&[2, 3, 1, 4], &[vec![12, 4, 4, 1], vec![0, 4, 9, 1]]).merged();
        let loops =
            vec![Loop { size: 2, strides: vec![12, 0] }, Loop { size: 12, strides: vec![1, 1] }];
        assert_eq!(nest, LoopNest { loops, operands: 2 });
    }

    #[test]
    fn loops_follow_the_memory_of_an_operand() {
        let nest = LoopNest::new(&[2, 3, 4], &[vec![12, 1, 3]]).ordered_by(0).merged();
        assert_eq!(nest.loops, [Loop { size: 24, strides: vec![1] }]);
        assert_eq!(nest.rank(), 1);
    }

    #[test]
    fn too_much_is_refused() {
        let nest = LoopNest::new(&[1 << 20, 1 << 20], &[vec![1 << 20, 1]]);
        assert!(nest.check().is_err());
        assert!(LoopNest::new(&[0, 3], &[vec![3, 1]]).check().is_err());
    }
}
