//! Plans made by hand.

use base::Random;
use model::op::Op;
use model::{DataType, Dim, LaunchPlan, Step, Tensor, ValueId, ValueInfo};

/// Makes a plan value by value.
#[derive(Default)]
pub(super) struct Builder {
    plan: LaunchPlan,
}

impl Builder {
    fn value(&mut self, dtype: DataType, shape: Option<Vec<Dim>>) -> ValueId {
        let id = ValueId(self.plan.values.len() as u32);
        self.plan.values.push(ValueInfo { name: format!("v{}", id.0), dtype, shape });
        id
    }

    /// An input of fixed shape.
    pub(super) fn input(&mut self, dtype: DataType, shape: &[usize]) -> ValueId {
        let dims = shape.iter().map(|&size| Dim::Fixed(size)).collect();
        self.input_of(dtype, dims)
    }

    /// An input of any shape.
    pub(super) fn input_of(&mut self, dtype: DataType, shape: Vec<Dim>) -> ValueId {
        let id = self.value(dtype, Some(shape));
        self.plan.inputs.push(id);
        id
    }

    pub(super) fn constant(&mut self, tensor: Tensor) -> ValueId {
        let dims = tensor.shape().iter().map(|&size| Dim::Fixed(size)).collect();
        let id = self.value(tensor.dtype(), Some(dims));
        self.plan.constants.push((id, tensor));
        id
    }

    /// A step with one output of `dtype`.
    pub(super) fn step(&mut self, op: Op, inputs: &[ValueId], dtype: DataType) -> ValueId {
        let output = self.value(dtype, None);
        self.plan.steps.push(Step {
            name: format!("{}_{}", op.name().to_lowercase(), self.plan.steps.len()),
            op,
            inputs: inputs.iter().copied().map(Some).collect(),
            outputs: vec![Some(output)],
            last_uses: Vec::new(),
        });
        output
    }

    /// A step on `f32`.
    pub(super) fn real(&mut self, op: Op, inputs: &[ValueId]) -> ValueId {
        self.step(op, inputs, DataType::F32)
    }

    pub(super) fn finish(mut self, outputs: &[ValueId]) -> LaunchPlan {
        self.plan.outputs = outputs.to_vec();
        self.plan.plan_lifetimes();
        self.plan
    }
}

/// A tensor of random `f32` between -1 and 1.
pub(super) fn noise(random: &mut Random, shape: &[usize]) -> Tensor {
    let count: usize = shape.iter().product();
    let data: Vec<f32> = (0..count).map(|_| random.symmetric_f32()).collect();
    reals(shape, data)
}

/// A tensor of `f32`.
pub(super) fn reals(shape: &[usize], data: Vec<f32>) -> Tensor {
    Tensor::from_vec(shape.to_vec(), data).unwrap_or_else(|err| unreachable!("{err}"))
}

/// A tensor of `i64`.
pub(super) fn integers(data: &[i64]) -> Tensor {
    Tensor::from_vec(vec![data.len()], data.to_vec()).unwrap_or_else(|err| unreachable!("{err}"))
}
