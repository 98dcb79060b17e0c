//! Nested loops over several strided operands, as `Walk` of `kernels/number.cuh` runs them.

use super::args::{Address, ArgsWriter};
use super::draft::{KernelText, LaunchDraft, StepDraft};
use super::view::{Element, View};

/// The maximum rank of a kernel, after dimensions are merged.
pub const MAX_RANK: usize = 6;

/// The maximum number of threads of a launch: any thread's number plus a block fits into an `int`.
pub const MAX_ITEMS: usize = i32::MAX as usize - 4096;

/// One loop: its iterations, and the stride of each operand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loop {
    /// Iterations.
    pub size: usize,
    /// Elements between two iterations, per operand.
    pub strides: Vec<usize>,
}

/// Loops from the slowest to the fastest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopNest {
    /// The loops; none has just one iteration.
    pub loops: Vec<Loop>,
    /// Operands.
    pub operands: usize,
}

impl LoopNest {
    /// Loops over `shape`, in its order. Every operand has a stride per dimension.
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

    /// Merges adjacent loops where every operand has one stride for both.
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

    /// Rank of the kernel's `Walk`: without loops it has one loop of one iteration.
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

    /// Fails where no kernel can be generated.
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

/// Fails for a view whose elements cannot be counted in an `int`.
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

/// Fails for an output that cannot be written: no element, or several with one address.
pub fn check_output(view: &View) -> Result<(), String> {
    check_view(view)?;
    if view.is_empty() {
        return Err("the output has no element, there is nothing to launch".to_string());
    }
    let repeats =
        view.shape.iter().zip(&view.strides).any(|(&size, &stride)| size > 1 && stride == 0);
    if repeats {
        return Err(format!("an output of strides {:?} writes one element twice", view.strides));
    }
    Ok(())
}

/// The address of a view's first element.
pub fn address(view: &View) -> Address {
    Address::Buffer(view.buffer, (view.offset * view.element.size()) as u64)
}

/// A view without its address: the properties that its speed depends on.
pub fn describe(view: &View) -> String {
    let align = (view.offset * view.element.size()) % 16;
    format!("{:?}{:?}/{:?}@{align}+{}", view.element, view.shape, view.strides, view.slack)
}

/// Several views as text for a signature.
pub fn describe_all(views: &[&View]) -> String {
    views.iter().map(|view| describe(view)).collect::<Vec<_>>().join(" ")
}

/// The type in which elements are computed: single precision for smaller floating-point types,
/// their own for all others.
pub fn computed(element: Element) -> Element {
    match element {
        Element::F16 | Element::BF16 => Element::F32,
        other => other,
    }
}

/// The C++ type in which elements are computed.
pub fn computed_name(element: Element) -> &'static str {
    match computed(element) {
        Element::Bool => "bool",
        other => other.cuda_name(),
    }
}

/// The text before a kernel of these elements: the includes of `header` depend on them.
pub fn include(header: &str, elements: &[Element]) -> String {
    let brain = if elements.contains(&Element::BF16) { "#define TILES_BF16\n" } else { "" };
    format!("{brain}#include \"{header}\"\n")
}

/// A kernel whose operator is a type of a header.
pub fn kernel(header: &str, elements: &[Element], expression: String, threads: u32) -> KernelText {
    KernelText { source: include(header, elements), expression, threads, shared_bytes: 0 }
}

/// A step of one launch that may be preempted inside a tile.
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
    fn oversized_loops_are_refused() {
        let nest = LoopNest::new(&[1 << 20, 1 << 20], &[vec![1 << 20, 1]]);
        assert!(nest.check().is_err());
        assert!(LoopNest::new(&[0, 3], &[vec![3, 1]]).check().is_err());
    }
}
