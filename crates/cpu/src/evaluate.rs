//! Evaluation of one operator without a device, for constant folding.

use std::panic::{AssertUnwindSafe, catch_unwind};

use model::op::Op;
use model::{DataType, LaunchPlan, Step, Tensor, ValueId, ValueInfo};
use smallvec::SmallVec;

use crate::buffer_pool::BufferPool;
use crate::kernel::{self, Context, Inputs, Operand, StepFacts};
use crate::value::Value;

/// The outputs of `op` on `inputs`, or `None` when this device cannot compute it or it fails.
///
/// All `outputs` are computed, in the operator's order.
pub fn evaluate(op: &Op, inputs: &[Option<Tensor>], outputs: usize) -> Option<Vec<Tensor>> {
    let values: Vec<Option<Value>> = inputs
        .iter()
        .map(|tensor| tensor.as_ref().map(Value::from_host).transpose())
        .collect::<Result<_, _>>()
        .ok()?;
    let plan = single_step(op, inputs, outputs);
    // Kernels may bind constants, so that an evaluation takes the same path as a loaded plan.
    let mut constants = values;
    constants.resize_with(plan.values.len(), || None);
    let facts = StepFacts { plan: &plan, step: &plan.steps[0], constants: &constants };
    let kernel = kernel::build(&facts).ok()?;
    let pool = BufferPool::new();
    let operands: SmallVec<[Operand; 4]> = constants[..inputs.len()]
        .iter()
        .map(|value| value.as_ref().map_or(Operand::Absent, Operand::Shared))
        .collect();
    let run = || kernel.run.run(&Context { pool: &pool }, Inputs::new(operands, &pool));
    // A kernel that panics is a defect, but folding is an optimization and must not fail a load.
    let results = catch_unwind(AssertUnwindSafe(run)).ok()?.ok()?;
    let tensors: Vec<Tensor> =
        results.into_iter().map(Value::into_host).collect::<Result<_, _>>().ok()?;
    (tensors.len() >= outputs).then_some(tensors)
}

/// A plan of one step whose operands are constants; value `i` is operand `i`.
fn single_step(op: &Op, inputs: &[Option<Tensor>], outputs: usize) -> LaunchPlan {
    let info = |index: usize, dtype| ValueInfo { name: format!("v{index}"), dtype, shape: None };
    let id = |index: usize| ValueId(index as u32);
    let mut values: Vec<ValueInfo> = Vec::with_capacity(inputs.len() + outputs);
    for (index, tensor) in inputs.iter().enumerate() {
        values.push(info(index, tensor.as_ref().map_or(DataType::F32, Tensor::dtype)));
    }
    // Kernels derive the types of their outputs and do not read them from the plan.
    values.extend((0..outputs).map(|index| info(inputs.len() + index, DataType::F32)));
    let step = Step {
        name: "constant".to_string(),
        op: op.clone(),
        inputs: inputs.iter().enumerate().map(|(i, x)| x.is_some().then(|| id(i))).collect(),
        outputs: (0..outputs).map(|index| Some(id(inputs.len() + index))).collect(),
        last_uses: Vec::new(),
    };
    LaunchPlan { values, steps: vec![step], ..LaunchPlan::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::op::{Binary, Unary};

    #[test]
    fn returns_none_for_what_fails() {
        let of = |data: &[i64]| Some(Tensor::from_vec(vec![data.len()], data.to_vec()).unwrap());
        let sum = evaluate(&Op::Binary(Binary::Add), &[of(&[1, 2]), of(&[3])], 1).unwrap();
        assert_eq!(sum[0].to_vec::<i64>(), Some(vec![4, 5]));
        assert_eq!(evaluate(&Op::Binary(Binary::Div), &[of(&[1]), of(&[0])], 1), None);
        assert_eq!(evaluate(&Op::Unary(Unary::Exp), &[of(&[1])], 1), None);
        assert_eq!(evaluate(&Op::Gather { axis: 0 }, &[of(&[1]), of(&[7])], 1), None);
    }
}
