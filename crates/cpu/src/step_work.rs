//! What a step has to do at least: operations, and bytes of operands that must be moved.

use device::StepWork;
use model::op::Op;
use model::{LaunchPlan, Step, ValueId};

/// The work of `step` where `bound` gives the sizes of symbols; `None` where sizes depend on data,
/// or where the operations are not those of floats.
pub(crate) fn of(plan: &LaunchPlan, step: &Step, bound: &[(&str, usize)]) -> Option<StepWork> {
    let sizes = Sizes { plan, bound };
    let mut bytes = 0u64;
    for id in step.inputs.iter().chain(&step.outputs).flatten() {
        bytes = bytes.saturating_add(sizes.bytes(*id)?);
    }
    Some(StepWork { flops: sizes.flops(step)?, bytes })
}

struct Sizes<'a> {
    plan: &'a LaunchPlan,
    bound: &'a [(&'a str, usize)],
}

fn product(dims: &[usize]) -> u64 {
    dims.iter().fold(1, |product: u64, dim| product.saturating_mul(*dim as u64))
}

impl Sizes<'_> {
    fn dims(&self, id: ValueId) -> Option<Vec<usize>> {
        self.plan.dims_of(id, self.bound)
    }

    fn bytes(&self, id: ValueId) -> Option<u64> {
        let element = self.plan.value(id).dtype.size_bytes()? as u64;
        Some(product(&self.dims(id)?).saturating_mul(element))
    }

    /// Floating-point operations; a multiplication and an addition count as two.
    fn flops(&self, step: &Step) -> Option<u64> {
        let input = |index: usize| self.dims(step.inputs.get(index).copied().flatten()?);
        let written = match step.outputs.iter().flatten().next() {
            Some(id) => product(&self.dims(*id)?),
            None => 0,
        };
        // Products for each number of `base`.
        let each = |base: u64, depth: u64| Some(base.saturating_mul(depth).saturating_mul(2));
        match &step.op {
            Op::Conv(_) => {
                let weight = input(1)?;
                each(written, product(weight.get(1..)?))
            }
            Op::ConvTranspose(_) => each(product(&input(0)?), product(input(1)?.get(1..)?)),
            Op::MatMul(op) => each(written, depth(&input(0)?, op.transpose_a)?),
            Op::Gemm(op) => each(written, depth(&input(0)?, op.transpose_a)?),
            Op::Attention { .. } => {
                let (q, k) = (input(0)?, input(1)?);
                let [.., keys, width] = k[..] else { return None };
                let scores = product(q.split_last()?.1).saturating_mul(keys as u64);
                let values = written.saturating_mul(keys as u64);
                each(scores, width as u64)?.checked_add(values.saturating_mul(2))
            }
            // Integers have other limits, and what these do depends on more than sizes.
            Op::MatMulInteger
            | Op::ConvInteger(_)
            | Op::QLinearMatMul
            | Op::QLinearConv(_)
            | Op::Einsum { .. }
            | Op::Rnn(_)
            | Op::LinearAttention(_)
            | Op::Signal(_)
            | Op::Spatial(_)
            | Op::Ml(_)
            | Op::Text(_)
            | Op::Control(_) => None,
            // One operation for each element read or written; moving them takes longer.
            _ => {
                let read = step.inputs.first().copied().flatten();
                let read = read.map_or(Some(0), |id| Some(product(&self.dims(id)?)))?;
                Some(written.max(read))
            }
        }
    }
}

/// The dimension that a product sums over.
fn depth(left: &[usize], transposed: bool) -> Option<u64> {
    let axis = match (left.len(), transposed) {
        (0, _) => return None,
        (1, _) | (_, false) => left.len() - 1,
        (rank, true) => rank - 2,
    };
    Some(left[axis] as u64)
}

#[cfg(test)]
mod tests {
    use model::op::{Activation, Conv, MatMul, Padding, Unary, Window};
    use model::{DataType, Dim, ValueInfo};

    use super::*;

    fn value(name: &str, dims: Vec<Dim>) -> ValueInfo {
        ValueInfo { name: name.to_string(), dtype: DataType::F32, shape: Some(dims) }
    }

    fn fixed(dims: &[usize]) -> Vec<Dim> {
        dims.iter().map(|dim| Dim::Fixed(*dim)).collect()
    }

    fn work(op: Op, inputs: &[Vec<Dim>], output: Vec<Dim>, batch: usize) -> Option<StepWork> {
        let mut values: Vec<ValueInfo> =
            inputs.iter().map(|dims| value("in", dims.clone())).collect();
        values.push(value("out", output));
        let ids: Vec<Option<ValueId>> =
            (0..values.len() as u32).map(|id| Some(ValueId(id))).collect();
        let step = Step {
            name: "step".to_string(),
            op,
            inputs: ids[..inputs.len()].to_vec(),
            outputs: ids[inputs.len()..].to_vec(),
            last_uses: Vec::new(),
        };
        let plan = LaunchPlan { values, ..LaunchPlan::default() };
        of(&plan, &step, &[("n", batch)])
    }

    #[test]
    fn work_follows_sizes() {
        let window = Window {
            kernel: vec![3, 3],
            strides: vec![1, 1],
            dilations: vec![1, 1],
            padding: Padding::Explicit(vec![1; 4]),
        };
        let conv = Op::Conv(Conv { window, groups: 1, activation: Activation::None });
        let batched = |dims: &[usize]| {
            let mut all = vec![Dim::Symbol("n".into())];
            all.extend(fixed(dims));
            all
        };
        let (image, weight) = (batched(&[4, 8, 8]), fixed(&[16, 4, 3, 3]));
        let got = work(conv, &[image, weight], batched(&[16, 8, 8]), 2);
        let (written, read) = (2 * 16 * 64, 2 * 4 * 64 + 16 * 36);
        let expected = StepWork { flops: 2 * written * 36, bytes: 4 * (written + read) };
        assert_eq!(got, Some(expected));

        let product = Op::MatMul(MatMul { transpose_a: true, ..MatMul::default() });
        let got = work(product, &[fixed(&[7, 5]), fixed(&[7, 3])], fixed(&[5, 3]), 1);
        assert_eq!(got.map(|work| work.flops), Some(2 * 15 * 7));

        let attention = Op::Attention { scale: 1.0 };
        let heads = fixed(&[2, 6, 8]);
        let got = work(attention, &[heads.clone(), heads.clone(), heads.clone()], heads, 1);
        assert_eq!(got.map(|work| work.flops), Some(2 * 2 * 2 * 6 * 6 * 8));

        let got = work(Op::Unary(Unary::Relu), &[vec![Dim::Unknown]], vec![Dim::Unknown], 1);
        assert_eq!(got, None, "sizes that depend on data are not known");
        assert_eq!(
            work(Op::MatMulInteger, &[fixed(&[2, 2]), fixed(&[2, 2])], fixed(&[2, 2]), 1),
            None
        );
    }
}
