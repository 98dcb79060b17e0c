//! One-step plans for the tests of kernels.

use std::sync::Arc;

use base::Random;
use device::Program;
use model::op::Op;
use model::tensor::Element;
use model::{DataType, LaunchPlan, Step, Tensor, ValueId, ValueInfo};

use crate::buffer_pool::BufferPool;
use crate::program::{CpuProgram, CpuTask};

/// A plan whose only step is `op`; inputs that are `None` are missing.
fn plan(op: Op, inputs: &[Option<Tensor>], outputs: usize) -> LaunchPlan {
    let info = |index: usize, dtype| ValueInfo { name: format!("v{index}"), dtype, shape: None };
    let mut values = Vec::new();
    let mut ids = Vec::new();
    for tensor in inputs {
        ids.push(tensor.as_ref().map(|tensor| {
            values.push(info(values.len(), tensor.dtype()));
            ValueId(values.len() as u32 - 1)
        }));
    }
    let first = values.len();
    // Kernels derive the types of their outputs and do not read them from the plan.
    values.extend((first..first + outputs).map(|index| info(index, DataType::F32)));
    let results: Vec<ValueId> = (first..first + outputs).map(|i| ValueId(i as u32)).collect();
    let mut plan = LaunchPlan {
        inputs: ids.iter().flatten().copied().collect(),
        outputs: results.clone(),
        steps: vec![Step {
            name: "test".to_string(),
            op,
            inputs: ids,
            outputs: results.into_iter().map(Some).collect(),
            last_uses: vec![],
        }],
        values,
        constants: vec![],
        warnings: Vec::new(),
    };
    plan.plan_lifetimes();
    plan
}

/// Loads and runs one step with operands that may be missing.
pub(crate) fn try_run(
    op: Op,
    inputs: &[Option<Tensor>],
    outputs: usize,
) -> Result<Vec<Tensor>, String> {
    let plan = Arc::new(plan(op, inputs, outputs));
    let program = CpuProgram::load(plan, crate::buffer::memory()).map_err(|err| err.to_string())?;
    let given = inputs.iter().flatten().cloned().collect();
    let mut task = program.prepare(given).map_err(|err| err.to_string())?;
    let (pool, steps) = (BufferPool::new(), task.step_count());
    let own = task.as_any_mut().downcast_mut::<CpuTask>().unwrap();
    for _ in 0..steps {
        own.run_step(&pool).map_err(|err| err.to_string())?;
    }
    task.into_outputs().map_err(|err| err.to_string())
}

/// Runs one step with one output.
pub(crate) fn run(op: Op, inputs: &[Tensor]) -> Vec<Tensor> {
    let inputs: Vec<Option<Tensor>> = inputs.iter().cloned().map(Some).collect();
    try_run(op, &inputs, 1).unwrap()
}

/// The error of one step with one output.
pub(crate) fn error(op: Op, inputs: &[Tensor]) -> String {
    let inputs: Vec<Option<Tensor>> = inputs.iter().cloned().map(Some).collect();
    try_run(op, &inputs, 1).unwrap_err()
}

/// A tensor of `f32`.
pub(crate) fn floats(shape: &[usize], data: &[f32]) -> Tensor {
    Tensor::from_vec(shape.to_vec(), data.to_vec()).unwrap()
}

/// A tensor of `i64`.
pub(crate) fn integers(shape: &[usize], data: &[i64]) -> Tensor {
    Tensor::from_vec(shape.to_vec(), data.to_vec()).unwrap()
}

/// A tensor of `bool`.
pub(crate) fn bools(shape: &[usize], data: &[bool]) -> Tensor {
    let raw: Vec<u8> = data.iter().map(|&b| u8::from(b)).collect();
    Tensor::from_raw(DataType::Bool, shape.to_vec(), raw.into()).unwrap()
}

/// A tensor of strings.
pub(crate) fn strings(shape: &[usize], data: &[&'static str]) -> Tensor {
    let data = data.iter().map(|text| bytes::Bytes::from_static(text.as_bytes())).collect();
    Tensor::from_strings(shape.to_vec(), data).unwrap()
}

/// The elements of a tensor.
pub(crate) fn values<T: Element>(tensor: &Tensor) -> Vec<T> {
    tensor.to_vec().unwrap_or_else(|| panic!("the tensor is {}", tensor.dtype()))
}

/// A tensor of random `f32` between -1 and 1.
pub(crate) fn random_floats(random: &mut Random, shape: &[usize]) -> Tensor {
    let count: usize = shape.iter().product();
    let data: Vec<f32> = (0..count).map(|_| random.symmetric_f32()).collect();
    floats(shape, &data)
}
