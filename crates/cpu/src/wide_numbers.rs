//! Plans of half precision in single precision: the processor has no arithmetic for halves, so that
//! every step would convert its operands and its result.
//!
//! Weights are converted once, when a plan is loaded, inputs when they arrive and outputs when they
//! leave. Results are at least as exact as with a rounding after every step.

use std::sync::Arc;

use model::op::{Cast, Op};
use model::{DataType, LaunchPlan, Step, ValueId, ValueInfo};

use crate::evaluate::evaluate;

fn is_half(dtype: DataType) -> bool {
    matches!(dtype, DataType::F16 | DataType::BF16)
}

/// `plan` with single precision inside, or as it is if a step is in the way.
pub(crate) fn in_single_precision(plan: Arc<LaunchPlan>) -> Arc<LaunchPlan> {
    if !plan.values.iter().any(|value| is_half(value.dtype)) || plan.check().is_err() {
        return plan;
    }
    match rewritten(&plan) {
        Some(wide) => Arc::new(wide),
        None => plan,
    }
}

/// Whether the type of a step's results follows from that of its operands.
fn follows_operands(plan: &LaunchPlan, step: &Step) -> bool {
    let half = |id: &ValueId| is_half(plan.value(*id).dtype);
    let reads = step.inputs.iter().flatten().any(half);
    let writes = step.outputs.iter().flatten().any(half);
    match &step.op {
        Op::Cast(_) => true,
        // Bodies have types of their own.
        Op::Control(_) => false,
        // These name the type of their result, or read bits.
        Op::Draw(_) | Op::Signal(_) | Op::ConstantOfShape { .. } | Op::EyeLike { .. } => !writes,
        Op::BitCast { .. } => !reads && !writes,
        _ => reads || !writes,
    }
}

fn cast(name: &str, from: ValueId, to: ValueId, dtype: DataType) -> Step {
    Step {
        name: format!("{name}/{dtype}"),
        op: Op::Cast(Cast { to: dtype }),
        inputs: vec![Some(from)],
        outputs: vec![Some(to)],
        last_uses: Vec::new(),
    }
}

fn rewritten(plan: &LaunchPlan) -> Option<LaunchPlan> {
    if !plan.steps.iter().all(|step| follows_operands(plan, step)) {
        return None;
    }
    let mut wide = plan.clone();
    // What a step reads or writes instead of a value of the interface.
    let mut inside: Vec<ValueId> = (0..plan.values.len() as u32).map(ValueId).collect();
    let (mut first, mut last) = (Vec::new(), Vec::new());
    let written: Vec<bool> = {
        let mut written = vec![false; plan.values.len()];
        let outputs = plan.steps.iter().flat_map(|step| step.outputs.iter().flatten());
        outputs.for_each(|id| written[id.index()] = true);
        written
    };
    for index in 0..plan.values.len() {
        let (id, value) = (ValueId(index as u32), &plan.values[index]);
        if !is_half(value.dtype) {
            continue;
        }
        let is_input = plan.inputs.contains(&id);
        let is_output = plan.outputs.contains(&id);
        let is_result = is_output && written[index];
        if !(is_input || is_result) {
            // A constant that is a result stays what it is.
            if !is_output {
                wide.values[index].dtype = DataType::F32;
            }
            continue;
        }
        let new = ValueId(wide.values.len() as u32);
        wide.values.push(ValueInfo { dtype: DataType::F32, ..value.clone() });
        inside[index] = new;
        if is_input {
            first.push(cast(&value.name, id, new, DataType::F32));
        } else {
            last.push(cast(&value.name, new, id, value.dtype));
        }
    }
    for (id, tensor) in &mut wide.constants {
        if is_half(tensor.dtype()) && wide.values[id.index()].dtype == DataType::F32 {
            let op = Op::Cast(Cast { to: DataType::F32 });
            *tensor = evaluate(&op, &[Some(tensor.clone())], 1)?.into_iter().next()?;
        }
    }
    for step in &mut wide.steps {
        let values = step.inputs.iter_mut().chain(&mut step.outputs).flatten();
        values.for_each(|id| *id = inside[id.index()]);
        if let Op::Cast(to) = &mut step.op
            && is_half(to.to)
        {
            to.to = DataType::F32;
        }
    }
    wide.steps.splice(0..0, first);
    wide.steps.extend(last);
    wide.plan_lifetimes();
    wide.check().is_ok().then_some(wide)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;
    use model::Tensor;
    use model::op::{Binary, MatMul, Unary};

    fn halves(values: &[f32], shape: &[usize]) -> Tensor {
        let values: Vec<f16> = values.iter().map(|x| f16::from_f32(*x)).collect();
        Tensor::from_vec(shape.to_vec(), values).unwrap()
    }

    fn draft() -> LaunchPlan {
        let half =
            |name: &str| ValueInfo { name: name.to_string(), dtype: DataType::F16, shape: None };
        let step = |op, inputs: &[u32], output: u32| Step {
            name: format!("s{output}"),
            op,
            inputs: inputs.iter().map(|id| Some(ValueId(*id))).collect(),
            outputs: vec![Some(ValueId(output))],
            last_uses: vec![],
        };
        let mut plan = LaunchPlan {
            values: ["x", "w", "product", "sum", "y"].map(half).to_vec(),
            inputs: vec![ValueId(0)],
            outputs: vec![ValueId(4), ValueId(2), ValueId(0)],
            constants: vec![(ValueId(1), halves(&[1.0, 2.0, 3.0, 4.0], &[2, 2]))],
            steps: vec![
                step(Op::MatMul(MatMul::default()), &[0, 1], 2),
                step(Op::Binary(Binary::Add), &[2, 0], 3),
                step(Op::Unary(Unary::Relu), &[3], 4),
            ],
        };
        plan.plan_lifetimes();
        plan
    }

    #[test]
    fn only_inputs_and_outputs_stay_halves() {
        let plan = draft();
        assert_eq!(plan.check(), Ok(()));
        let wide = in_single_precision(Arc::new(plan.clone()));
        assert_eq!(wide.check(), Ok(()));
        assert_eq!((&wide.inputs, &wide.outputs), (&plan.inputs, &plan.outputs));
        for id in wide.inputs.iter().chain(&wide.outputs) {
            assert_eq!(wide.value(*id).dtype, DataType::F16);
        }
        assert_eq!(wide.constants[0].1.dtype(), DataType::F32);
        let inner = |step: &&Step| !matches!(step.op, Op::Cast(_));
        for step in wide.steps.iter().filter(inner) {
            for id in step.inputs.iter().chain(&step.outputs).flatten() {
                assert_eq!(wide.value(*id).dtype, DataType::F32, "{}", step.name);
            }
        }
        assert_eq!(wide.steps.len(), plan.steps.len() + 3);
    }

    #[test]
    fn a_plan_whose_types_do_not_follow_is_left_alone() {
        let mut plan = draft();
        let shape = Tensor::from_vec(vec![1], vec![2i64]).unwrap();
        plan.values[1].dtype = DataType::I64;
        plan.constants = vec![(ValueId(1), shape)];
        plan.steps[0].op = Op::ConstantOfShape { dtype: DataType::F16, value: [0; 8] };
        plan.steps[0].inputs = vec![Some(ValueId(1))];
        plan.plan_lifetimes();
        let plan = Arc::new(plan);
        assert!(Arc::ptr_eq(&in_single_precision(plan.clone()), &plan));
    }
}
