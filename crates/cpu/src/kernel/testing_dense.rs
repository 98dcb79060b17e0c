//! One-step plans for the tests of heavy kernels.

use std::sync::Arc;

use base::Random;
use device::Program;
use model::op::Op;
use model::{DataType, LaunchPlan, Step, Tensor, ValueId, ValueInfo};

use crate::buffer_pool::BufferPool;
use crate::program::{CpuProgram, CpuTask};

/// An operand of a test: missing, an input of the plan, or a constant.
#[derive(Clone)]
pub(crate) enum TestOperand {
    Absent,
    Input(Tensor),
    Constant(Tensor),
}

/// Runs `op` on `operands`; the outputs have the element types `outputs`.
pub(crate) fn run(
    op: Op,
    operands: &[TestOperand],
    outputs: &[DataType],
) -> Result<Vec<Tensor>, String> {
    let mut plan = LaunchPlan::default();
    let mut inputs = Vec::new();
    let mut step_inputs = Vec::new();
    for operand in operands {
        let (tensor, constant) = match operand {
            TestOperand::Absent => {
                step_inputs.push(None);
                continue;
            }
            TestOperand::Input(tensor) => (tensor, false),
            TestOperand::Constant(tensor) => (tensor, true),
        };
        let id = add_value(&mut plan, tensor.dtype());
        // The shape of scalars is always known.
        plan.values[id.index()].shape = tensor.shape().is_empty().then(Vec::new);
        step_inputs.push(Some(id));
        if constant {
            plan.constants.push((id, tensor.clone()));
        } else {
            plan.inputs.push(id);
            inputs.push(tensor.clone());
        }
    }
    let outputs: Vec<ValueId> = outputs.iter().map(|&dtype| add_value(&mut plan, dtype)).collect();
    plan.steps.push(Step {
        name: "tested".to_string(),
        op,
        inputs: step_inputs,
        outputs: outputs.iter().copied().map(Some).collect(),
        last_uses: vec![],
    });
    plan.outputs = outputs;
    plan.plan_lifetimes();
    let program =
        CpuProgram::load(Arc::new(plan), crate::buffer::memory()).map_err(|err| err.to_string())?;
    let mut task = program.prepare(inputs).map_err(|err| err.to_string())?;
    let (pool, steps) = (BufferPool::new(), task.step_count());
    let cpu_task = task.as_any_mut().downcast_mut::<CpuTask>().ok_or("not a task of the CPU")?;
    for _ in 0..steps {
        cpu_task.run_step(&pool).map_err(|err| err.to_string())?;
    }
    task.into_outputs().map_err(|err| err.to_string())
}

fn add_value(plan: &mut LaunchPlan, dtype: DataType) -> ValueId {
    let id = ValueId(plan.values.len() as u32);
    plan.values.push(ValueInfo { name: format!("v{}", id.0), dtype, shape: None });
    id
}

/// Runs `op` on `f32` operands with one `f32` output; gives its shape and elements.
pub(crate) fn run_f32(op: Op, operands: &[TestOperand]) -> Result<(Vec<usize>, Vec<f32>), String> {
    let outputs = run(op, operands, &[DataType::F32])?;
    Ok((outputs[0].shape().to_vec(), outputs[0].to_vec().ok_or("not f32")?))
}

/// A tensor of `shape` with elements in `[-1, 1)`.
pub(crate) fn random(random: &mut Random, shape: &[usize]) -> Tensor {
    let count = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|_| random.symmetric_f32()).collect();
    Tensor::from_vec(shape.to_vec(), values).expect("shape and count agree")
}

/// An input or a constant, at random.
pub(crate) fn input_or_constant(random: &mut Random, tensor: &Tensor) -> TestOperand {
    if random.below(2) == 0 {
        TestOperand::Input(tensor.clone())
    } else {
        TestOperand::Constant(tensor.clone())
    }
}

/// Uniform in `low..=high`.
pub(crate) fn between(random: &mut Random, low: usize, high: usize) -> usize {
    low + random.below((high - low + 1) as u64) as usize
}

/// The elements as `f64`.
pub(crate) fn wide(tensor: &Tensor) -> Vec<f64> {
    match tensor.dtype() {
        DataType::F64 => tensor.to_vec::<f64>().expect("type was checked"),
        DataType::F16 => convert(tensor.to_vec::<half::f16>()),
        DataType::BF16 => convert(tensor.to_vec::<half::bf16>()),
        DataType::F32 => convert(tensor.to_vec::<f32>()),
        DataType::U8 => convert(tensor.to_vec::<u8>()),
        DataType::I8 => convert(tensor.to_vec::<i8>()),
        DataType::I32 => convert(tensor.to_vec::<i32>()),
        DataType::I64 => tensor.to_vec::<i64>().unwrap().iter().map(|&x| x as f64).collect(),
        other => panic!("no conversion of {other}"),
    }
}

fn convert<T: Into<f64>>(values: Option<Vec<T>>) -> Vec<f64> {
    values.expect("type was checked").into_iter().map(Into::into).collect()
}

/// Panics unless `actual` is `expected` within `tolerance`, relative to the largest element.
pub(crate) fn assert_close(actual: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    let actual: Vec<f64> = actual.iter().map(|&x| f64::from(x)).collect();
    assert_close_f64(&actual, expected, tolerance, what);
}

/// Like [`assert_close`], for elements of double precision.
pub(crate) fn assert_close_f64(actual: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}: element counts differ");
    let scale = expected.iter().fold(1.0f64, |max, x| max.max(x.abs()));
    for (index, (a, e)) in actual.iter().zip(expected).enumerate() {
        let same = a == e || (a.is_nan() && e.is_nan());
        assert!(same || (a - e).abs() <= tolerance * scale, "{what}: [{index}] is {a}, not {e}");
    }
}
