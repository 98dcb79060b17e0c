//! Quantized weights as numbers: computed once, when a plan is loaded.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use model::op::Op;
use model::{LaunchPlan, Step, Tensor, ValueId};

/// Makes a step do nothing. It keeps its place, so that the plan has the steps of its source.
pub(crate) fn empty(step: &mut Step) {
    step.op = Op::Identity;
    step.inputs.clear();
    step.outputs.clear();
    step.last_uses.clear();
}

/// Whether a step does nothing.
pub(crate) fn is_empty(step: &Step) -> bool {
    step.inputs.is_empty() && step.outputs.is_empty()
}

/// `plan` with nothing to do for the steps that dequantize constants; their results are constants
/// instead.
pub(crate) fn weights_as_numbers(plan: Arc<LaunchPlan>) -> Arc<LaunchPlan> {
    if !plan.steps.iter().any(|step| matches!(step.op, Op::DequantizeLinear { .. })) {
        return plan;
    }
    let constants: HashMap<ValueId, &Tensor> =
        plan.constants.iter().map(|(id, tensor)| (*id, tensor)).collect();
    let mut numbers: Vec<(ValueId, Tensor)> = Vec::new();
    for step in &plan.steps {
        let (Op::DequantizeLinear { .. }, [Some(output)]) = (&step.op, &step.outputs[..]) else {
            continue;
        };
        let operands: Option<Vec<Option<Tensor>>> = step
            .inputs
            .iter()
            .map(|id| match id {
                Some(id) => constants.get(id).map(|tensor| Some((*tensor).clone())),
                None => Some(None),
            })
            .collect();
        let computed =
            operands.and_then(|operands| crate::evaluate::evaluate(&step.op, &operands, 1));
        if let Some(tensor) = computed.and_then(|all| all.into_iter().next()) {
            numbers.push((*output, tensor));
        }
    }
    // A broken plan is refused as it is.
    if numbers.is_empty() || plan.check().is_err() {
        return plan;
    }
    let mut plan = (*plan).clone();
    let known: HashSet<ValueId> = numbers.iter().map(|(id, _)| *id).collect();
    for step in &mut plan.steps {
        if step.outputs.iter().flatten().any(|id| known.contains(id)) {
            empty(step);
        }
    }
    plan.constants.extend(numbers);
    let mut read: HashSet<ValueId> = plan.outputs.iter().copied().collect();
    read.extend(plan.steps.iter().flat_map(|step| step.inputs.iter().flatten()));
    plan.constants.retain(|(id, _)| read.contains(id));
    plan.plan_lifetimes();
    Arc::new(plan)
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::{DataType, ValueInfo};

    #[test]
    fn constants_are_dequantized_once_and_their_bytes_dropped() {
        let value = |name: &str, dtype| ValueInfo { name: name.to_string(), dtype, shape: None };
        let step = |name: &str, op, inputs: &[u32], output: u32| Step {
            name: name.to_string(),
            op,
            inputs: inputs.iter().map(|id| Some(ValueId(*id))).collect(),
            outputs: vec![Some(ValueId(output))],
            last_uses: vec![],
        };
        let mut plan = LaunchPlan {
            values: vec![
                value("x", DataType::F32),
                value("w", DataType::I8),
                value("scale", DataType::F32),
                value("numbers", DataType::F32),
                value("y", DataType::F32),
            ],
            inputs: vec![ValueId(0)],
            outputs: vec![ValueId(4)],
            constants: vec![
                (ValueId(1), Tensor::from_vec(vec![2], vec![-4i8, 6]).unwrap()),
                (ValueId(2), Tensor::from_vec(vec![], vec![0.5f32]).unwrap()),
            ],
            steps: vec![
                step("weight", Op::DequantizeLinear { axis: 1 }, &[1, 2], 3),
                step("sum", Op::Binary(model::op::Binary::Add), &[0, 3], 4),
            ],
            warnings: Vec::new(),
        };
        plan.plan_lifetimes();
        let folded = weights_as_numbers(Arc::new(plan));
        assert_eq!(folded.steps.iter().map(is_empty).collect::<Vec<bool>>(), [true, false]);
        assert_eq!(folded.check(), Ok(()));
        let [(id, numbers)] = &folded.constants[..] else { panic!("{:?}", folded.constants) };
        assert_eq!((id.0, numbers.to_vec::<f32>()), (3, Some(vec![-2.0, 3.0])));
    }
}
