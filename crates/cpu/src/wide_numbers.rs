//! Plans of half precision in single precision: the processor has no arithmetic for halves, so that
//! every step would convert its operands and its result.
//!
//! Weights are converted once, when a plan is loaded; inputs when they arrive and outputs when they
//! leave, by the task. Results are at least as exact as with a rounding after every step.

use std::sync::Arc;

use model::op::{Cast, Op};
use model::{DataType, LaunchPlan, Step, ValueId};

use crate::evaluate::evaluate;

pub(crate) fn is_half(dtype: DataType) -> bool {
    matches!(dtype, DataType::F16 | DataType::BF16)
}

/// `plan` with single precision inside, or as it is if a step is in the way.
pub(crate) fn in_single_precision(plan: Arc<LaunchPlan>) -> Arc<LaunchPlan> {
    if !has_halves(&plan) || plan.check().is_err() {
        return plan;
    }
    match rewritten(&plan) {
        Some(wide) => Arc::new(wide),
        None => plan,
    }
}

/// Whether a value of the plan, or of a body in it, has half precision.
fn has_halves(plan: &LaunchPlan) -> bool {
    let of_step = |step: &Step| match &step.op {
        Op::Control(control) => control.bodies.iter().any(|body| has_halves(&body.plan)),
        _ => false,
    };
    plan.values.iter().any(|value| is_half(value.dtype)) || plan.steps.iter().any(of_step)
}

/// Whether the type of a step's results follows from that of its operands.
fn follows_operands(plan: &LaunchPlan, step: &Step) -> bool {
    let half = |id: &ValueId| is_half(plan.value(*id).dtype);
    let reads = step.inputs.iter().flatten().any(half);
    let writes = step.outputs.iter().flatten().any(half);
    match &step.op {
        Op::Cast(_) => true,
        // Bodies are rewritten themselves.
        Op::Control(_) => true,
        // These name the type of their result, or read bits.
        Op::Draw(_) | Op::Signal(_) | Op::EyeLike { .. } => !writes,
        Op::ConstantOfShape { .. } => true,
        Op::BitCast { .. } => !reads && !writes,
        _ => reads || !writes,
    }
}

fn rewritten(plan: &LaunchPlan) -> Option<LaunchPlan> {
    if !plan.steps.iter().all(|step| follows_operands(plan, step)) {
        return None;
    }
    let mut wide = plan.clone();
    for value in &mut wide.values {
        if is_half(value.dtype) {
            value.dtype = DataType::F32;
        }
    }
    for (_, tensor) in &mut wide.constants {
        if is_half(tensor.dtype()) {
            let op = Op::Cast(Cast { to: DataType::F32 });
            *tensor = evaluate(&op, &[Some(tensor.clone())], 1)?.into_iter().next()?;
        }
    }
    for step in &mut wide.steps {
        match &mut step.op {
            Op::Cast(to) if is_half(to.to) => to.to = DataType::F32,
            Op::Control(control) => {
                for body in &mut control.bodies {
                    body.plan = Arc::new(rewritten(&body.plan)?);
                }
            }
            Op::ConstantOfShape { dtype, value } if is_half(*dtype) => {
                let bits = u16::from_le_bytes([value[0], value[1]]);
                let number = match dtype {
                    DataType::F16 => half::f16::from_bits(bits).to_f32(),
                    _ => half::bf16::from_bits(bits).to_f32(),
                };
                *dtype = DataType::F32;
                value[..4].copy_from_slice(&number.to_le_bytes());
            }
            _ => {}
        }
    }
    Some(wide)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer_pool::BufferPool;
    use crate::program::{CpuProgram, CpuTask};
    use device::Program;
    use half::f16;
    use model::op::{Binary, Body, Control, ControlKind, MatMul, Unary};
    use model::{Tensor, ValueInfo};

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
            warnings: Vec::new(),
        };
        plan.plan_lifetimes();
        plan
    }

    #[test]
    fn steps_compute_in_single_precision_and_tensors_stay_halves() {
        let plan = Arc::new(draft());
        let wide = in_single_precision(plan.clone());
        assert_eq!(wide.check(), Ok(()));
        assert!(wide.values.iter().all(|value| value.dtype == DataType::F32));
        assert_eq!(wide.constants[0].1.dtype(), DataType::F32);
        assert_eq!(wide.steps.len(), plan.steps.len());
        let program = CpuProgram::load(plan.clone(), crate::buffer::memory()).unwrap();
        assert!(Arc::ptr_eq(program.plan(), &plan));
        let mut task = program.prepare(vec![halves(&[1.0, 0.5], &[1, 2])]).unwrap();
        let pool = BufferPool::new();
        let own = task.as_any_mut().downcast_mut::<CpuTask>().unwrap();
        (0..plan.steps.len()).for_each(|_| own.run_step(&pool).unwrap());
        let outputs = task.into_outputs().unwrap();
        let wanted = [halves(&[3.5, 4.5], &[1, 2]), halves(&[2.5, 4.0], &[1, 2])];
        assert_eq!(outputs[..2], wanted);
        assert_eq!(outputs[2], halves(&[1.0, 0.5], &[1, 2]));
    }

    /// A product beyond half precision in the branch of an `If`, and its logarithm.
    #[test]
    fn bodies_compute_in_single_precision_too() {
        let value = |dtype| ValueInfo { name: String::new(), dtype, shape: None };
        let step = |op, inputs: &[u32], output: u32| Step {
            name: format!("s{output}"),
            op,
            inputs: inputs.iter().map(|id| Some(ValueId(*id))).collect(),
            outputs: vec![Some(ValueId(output))],
            last_uses: vec![],
        };
        let plan = |types: &[DataType], inputs: u32, steps: Vec<Step>| {
            let mut plan = LaunchPlan {
                values: types.iter().copied().map(value).collect(),
                inputs: (0..inputs).map(ValueId).collect(),
                outputs: vec![ValueId(types.len() as u32 - 1)],
                steps,
                ..LaunchPlan::default()
            };
            plan.plan_lifetimes();
            plan
        };
        use DataType::{Bool, F16};
        let steps =
            vec![step(Op::Binary(Binary::Mul), &[0, 1], 2), step(Op::Unary(Unary::Log), &[2], 3)];
        let body = Body { plan: Arc::new(plan(&[F16; 4], 2, steps)), operands: vec![1, 2] };
        let bodies = vec![body.clone(), body];
        let branch = Op::Control(Control { kind: ControlKind::If, id: 0, bodies });
        let mut outer = plan(&[Bool, F16, F16, F16], 3, vec![step(branch, &[0, 1, 2], 3)]);
        outer.inputs.pop();
        outer.constants = vec![(ValueId(2), halves(&[60_000.0], &[]))];
        outer.plan_lifetimes();
        let program = CpuProgram::load(Arc::new(outer), crate::buffer::memory()).unwrap();
        let taken = Tensor::from_raw(Bool, vec![], vec![1u8].into()).unwrap();
        let mut task = program.prepare(vec![taken, halves(&[100.0, 2.0], &[2])]).unwrap();
        let own = task.as_any_mut().downcast_mut::<CpuTask>().unwrap();
        own.run_step(&BufferPool::new()).unwrap();
        let outputs = task.into_outputs().unwrap();
        assert_eq!(outputs, [halves(&[6e6f32.ln(), 1.2e5f32.ln()], &[2])]);
    }

    #[test]
    fn a_plan_whose_types_do_not_follow_is_left_alone() {
        let mut plan = draft();
        let shape = Tensor::from_vec(vec![1], vec![2i64]).unwrap();
        plan.values[1].dtype = DataType::I64;
        plan.constants = vec![(ValueId(1), shape)];
        plan.steps[0].op = Op::EyeLike { dtype: Some(DataType::F16), k: 0 };
        plan.steps[0].inputs = vec![Some(ValueId(1))];
        plan.plan_lifetimes();
        let plan = Arc::new(plan);
        assert!(Arc::ptr_eq(&in_single_precision(plan.clone()), &plan));
    }

    #[test]
    fn what_is_filled_with_a_half_is_filled_with_the_same_number() {
        for (dtype, bits) in [
            (DataType::F16, f16::from_f32(-1.5).to_bits()),
            (DataType::BF16, half::bf16::from_f32(-1.5).to_bits()),
        ] {
            let mut plan = draft();
            let shape = Tensor::from_vec(vec![1], vec![2i64]).unwrap();
            plan.values[1].dtype = DataType::I64;
            plan.constants = vec![(ValueId(1), shape)];
            let mut value = [0; 8];
            value[..2].copy_from_slice(&bits.to_le_bytes());
            plan.steps[0].op = Op::ConstantOfShape { dtype, value };
            plan.steps[0].inputs = vec![Some(ValueId(1))];
            plan.plan_lifetimes();
            let wide = in_single_precision(Arc::new(plan));
            let mut value = [0; 8];
            value[..4].copy_from_slice(&(-1.5f32).to_le_bytes());
            assert_eq!(wide.steps[0].op, Op::ConstantOfShape { dtype: DataType::F32, value });
        }
    }
}
