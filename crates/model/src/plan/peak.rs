//! The memory that a request needs at least, known from its plan before it runs.

use std::sync::{Mutex, PoisonError};

use super::{Dim, LaunchPlan, ValueId};
use crate::Tensor;
use crate::dim::SymDim;

/// Bytes of a string without its characters.
const STRING_BYTES: usize = size_of::<bytes::Bytes>();

/// Remembers the answer for the latest sizes: requests often repeat them.
#[derive(Debug, Default)]
pub struct PeakMemory {
    latest: Mutex<Option<(Vec<usize>, usize)>>,
}

impl PeakMemory {
    /// See [`LaunchPlan::peak_bytes`].
    pub fn of(&self, plan: &LaunchPlan, inputs: &[Tensor]) -> usize {
        let sizes = || inputs.iter().flat_map(|input| input.shape().iter().copied());
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, bytes)) = &*latest
            && known.iter().copied().eq(sizes())
        {
            return *bytes;
        }
        let bytes = plan.peak_bytes(inputs);
        *latest = Some((sizes().collect(), bytes));
        bytes
    }
}

impl LaunchPlan {
    /// Bytes of all values that exist at one time between two steps, constants aside, when the
    /// plan runs on `inputs`: no run needs less. Values whose size depends on data count nothing.
    pub fn peak_bytes(&self, inputs: &[Tensor]) -> usize {
        let bound = self.bound_symbols(inputs.iter().map(Tensor::shape));
        let size = |id: ValueId| self.size_of(id, &bound);
        let mut live: usize = inputs.iter().map(Tensor::size_bytes).sum();
        let mut peak = live;
        for step in &self.steps {
            for id in step.outputs.iter().flatten() {
                live = live.saturating_add(size(*id));
            }
            if live == usize::MAX {
                return live;
            }
            for id in &step.last_uses {
                live = live.saturating_sub(size(*id));
            }
            peak = peak.max(live);
        }
        peak
    }

    /// The sizes of the symbols in the inputs' dimensions, for inputs of these shapes.
    pub fn bound_symbols<'p, 's>(
        &'p self,
        shapes: impl Iterator<Item = &'s [usize]>,
    ) -> Vec<(&'p str, usize)> {
        let mut bound: Vec<(&str, usize)> = Vec::new();
        for (id, shape) in self.inputs.iter().zip(shapes) {
            for (dim, &size) in self.value(*id).shape.iter().flatten().zip(shape) {
                if let Dim::Symbol(symbol) = dim
                    && !bound.iter().any(|(known, _)| known == symbol)
                {
                    bound.push((symbol, size));
                }
            }
        }
        bound
    }

    /// The dimensions of a value where `bound` gives the sizes of symbols; `None` when one is not
    /// known.
    pub fn dims_of(&self, id: ValueId, bound: &[(&str, usize)]) -> Option<Vec<usize>> {
        let lookup = |name: &str| {
            let found = bound.iter().find(|(symbol, _)| *symbol == name);
            found.and_then(|(_, size)| i64::try_from(*size).ok())
        };
        let dim_size = |dim: &Dim| match dim {
            Dim::Fixed(size) => Some(*size),
            Dim::Symbol(name) => lookup(name).and_then(|size| usize::try_from(size).ok()),
            Dim::Expr(_) => SymDim::from(dim).substitute(&lookup).size(),
            Dim::Unknown => None,
        };
        self.value(id).shape.as_ref()?.iter().map(dim_size).collect()
    }

    /// Bytes of a value where `bound` gives the sizes of symbols; 0 when they are not known.
    fn size_of(&self, id: ValueId, bound: &[(&str, usize)]) -> usize {
        let element = self.value(id).dtype.size_bytes().unwrap_or(STRING_BYTES);
        let dims = self.dims_of(id, bound);
        dims.map_or(0, |dims| dims.into_iter().fold(element, usize::saturating_mul))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::{Op, Unary};
    use crate::{DataType, Step, ValueInfo};

    /// x [n, 10] -> y [n, n] -> z of unknown size -> w [n].
    fn plan() -> LaunchPlan {
        let n = || Dim::symbol("n");
        let info = |name: &str, shape: &[Dim]| ValueInfo {
            name: name.to_string(),
            dtype: DataType::F32,
            shape: Some(shape.to_vec()),
        };
        let step = |from: u32, to: u32| Step {
            name: String::new(),
            op: Op::Unary(Unary::Relu),
            inputs: vec![Some(ValueId(from))],
            outputs: vec![Some(ValueId(to))],
            last_uses: Vec::new(),
        };
        let mut plan = LaunchPlan {
            values: vec![
                info("x", &[n(), Dim::Fixed(10)]),
                info("y", &[n(), n()]),
                info("z", &[Dim::Unknown]),
                info("w", &[n()]),
            ],
            inputs: vec![ValueId(0)],
            outputs: vec![ValueId(3)],
            steps: vec![step(0, 1), step(1, 2), step(2, 3)],
            ..LaunchPlan::default()
        };
        plan.plan_lifetimes();
        plan
    }

    #[test]
    fn the_largest_set_of_live_values_counts() {
        let plan = plan();
        let input = |n: usize| Tensor::from_vec(vec![n, 10], vec![0f32; n * 10]).unwrap();
        // For few rows the input is the largest value, for many the product.
        assert_eq!(plan.peak_bytes(&[input(2)]), 80);
        assert_eq!(plan.peak_bytes(&[input(1000)]), 4_000_000);
        let peak = PeakMemory::default();
        for n in [2, 2, 1000, 1000, 2] {
            assert_eq!(peak.of(&plan, &[input(n)]), plan.peak_bytes(&[input(n)]));
        }
    }

    #[test]
    fn sizes_that_overflow_are_the_largest() {
        let mut plan = plan();
        plan.values[1].shape = Some(vec![Dim::Fixed(usize::MAX), Dim::Fixed(8)]);
        let input = Tensor::from_vec(vec![1, 10], vec![0f32; 10]).unwrap();
        assert_eq!(plan.peak_bytes(&[input]), usize::MAX);
    }
}
