//! A body: a plan of control flow whose steps are bound to kernels, as those of a loaded plan are.

use std::sync::Arc;

use model::op::Body;
use model::{Step, ValueId, ValueInfo};

use crate::bound_plan::{BindError, BoundPlan};
use crate::buffer_pool::BufferPool;
use crate::channel_blocks::ChannelBlocks;
use crate::kernel::{Context, Inputs, KernelError, Operand, StepFacts, invalid};
use crate::value::Value;
use crate::yield_point;

/// A plan of a step, bound to kernels. Constants that the step captured are those of the plan.
pub(super) struct BodyKernels {
    bound: BoundPlan,
    /// Captured values that are no constants: the value and the operand that it is.
    captured: Vec<(ValueId, usize)>,
    arguments: usize,
    pub(super) resident_bytes: usize,
}

impl BodyKernels {
    pub(super) fn new(
        facts: &StepFacts,
        body: &Body,
        arguments: usize,
    ) -> Result<BodyKernels, KernelError> {
        body.plan.check().map_err(|error| invalid!("a body: {error}"))?;
        if body.plan.inputs.len() != arguments + body.operands.len() {
            return Err(invalid!("a body of {} inputs", body.plan.inputs.len()));
        }
        let mut plan = (*body.plan).clone();
        let mut captured = Vec::new();
        let own = plan.inputs.split_off(arguments);
        for (id, operand) in own.into_iter().zip(&body.operands) {
            match facts.constant(*operand) {
                Some(value) => plan.constants.push((id, value.try_clone()?.into_host()?)),
                None => captured.push((id, *operand)),
            }
        }
        plan.inputs.extend(captured.iter().map(|(id, _)| *id));
        let bound =
            BoundPlan::new(Arc::new(plan), ChannelBlocks::find).map_err(|error| match error {
                BindError::Step(index, error) => named(&body.plan.steps[index], error),
                BindError::Constant(error) => error,
            })?;
        let resident_bytes = bound.resident_bytes();
        Ok(BodyKernels { bound, captured, arguments, resident_bytes })
    }

    /// How many values the body gives.
    pub(super) fn outputs(&self) -> usize {
        self.bound.plan.outputs.len()
    }

    /// What is known of output `index`.
    pub(super) fn output_info(&self, index: usize) -> &ValueInfo {
        self.bound.plan.value(self.bound.plan.outputs[index])
    }

    /// Runs the body once. Captured values are operands of `outer`.
    pub(super) fn run(
        &self,
        context: &Context,
        arguments: Vec<Value>,
        outer: &Inputs,
    ) -> Result<Vec<Value>, KernelError> {
        if arguments.len() != self.arguments {
            return Err(invalid!("{} arguments instead of {}", arguments.len(), self.arguments));
        }
        let count = self.bound.plan.values.len();
        let mut own: Vec<Option<Value>> = (0..count).map(|_| None).collect();
        let mut shared: Vec<Option<&Value>> = (0..count).map(|_| None).collect();
        for (id, value) in self.bound.plan.inputs.iter().zip(arguments) {
            own[id.index()] = Some(value);
        }
        for (id, operand) in &self.captured {
            shared[id.index()] = Some(outer.get(*operand)?);
        }
        for (step, kernel) in self.bound.plan.steps.iter().zip(&self.bound.kernels) {
            // Estimates of small kernels would add up too slowly: a check is cheap beside a step.
            yield_point::check();
            let outputs = {
                let inputs = self.operands(step, &mut own, &shared, context.pool);
                kernel.run.run(context, inputs).map_err(|error| named(step, error))?
            };
            for (id, value) in step.outputs.iter().zip(outputs) {
                if let Some(id) = id {
                    own[id.index()] = Some(value);
                }
            }
            for id in &step.last_uses {
                if let Some(value) = own[id.index()].take() {
                    value.recycle(context.pool);
                }
            }
        }
        self.results(own, &shared)
    }

    /// The operands of a step. Values that nothing else reads are moved.
    fn operands<'a>(
        &'a self,
        step: &Step,
        own: &'a mut [Option<Value>],
        shared: &[Option<&'a Value>],
        pool: &'a BufferPool,
    ) -> Inputs<'a> {
        let is_last = |id: &ValueId| {
            step.last_uses.contains(id)
                && step.inputs.iter().flatten().filter(|other| *other == id).count() == 1
        };
        let taken: Vec<Option<Value>> = step
            .inputs
            .iter()
            .map(|input| input.filter(is_last).and_then(|id| own[id.index()].take()))
            .collect();
        let own = &*own;
        let operands = step.inputs.iter().zip(taken).map(|(input, taken)| match (input, taken) {
            (None, _) => Operand::Absent,
            (Some(_), Some(value)) => Operand::Owned(value),
            (Some(id), None) => {
                let at = id.index();
                let value = own[at].as_ref().or(shared[at]).or(self.bound.constants[at].as_ref());
                value.map_or(Operand::Absent, Operand::Shared)
            }
        });
        Inputs::new(operands.collect(), pool)
    }

    fn results(
        &self,
        mut own: Vec<Option<Value>>,
        shared: &[Option<&Value>],
    ) -> Result<Vec<Value>, KernelError> {
        let ids = &self.bound.plan.outputs;
        let mut results = Vec::new();
        for (position, id) in ids.iter().enumerate() {
            let at = id.index();
            let again = ids[position + 1..].contains(id);
            let moved = if again { None } else { own[at].take() };
            results.push(match moved {
                Some(value) => value,
                None => {
                    let value =
                        own[at].as_ref().or(shared[at]).or(self.bound.constants[at].as_ref());
                    value.ok_or_else(|| invalid!("output {position} is missing"))?.try_clone()?
                }
            });
        }
        Ok(results)
    }
}

/// An error with the step of the body that it comes from.
fn named(step: &Step, error: KernelError) -> KernelError {
    match error {
        KernelError::Invalid(reason) => invalid!("'{}' ({}): {reason}", step.name, step.op.name()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dequantized_weights::is_empty;
    use base::Random;
    use model::op::{MatMul, Op};
    use model::{DataType, LaunchPlan, Tensor};

    fn step(op: Op, inputs: &[u32], output: u32) -> Step {
        Step {
            name: format!("s{output}"),
            op,
            inputs: inputs.iter().map(|at| Some(ValueId(*at))).collect(),
            outputs: vec![Some(ValueId(output))],
            last_uses: vec![],
        }
    }

    fn plan(types: &[DataType], inputs: u32, output: u32, steps: Vec<Step>) -> LaunchPlan {
        let value =
            |dtype: &DataType| ValueInfo { name: String::new(), dtype: *dtype, shape: None };
        let mut plan = LaunchPlan {
            values: types.iter().map(value).collect(),
            inputs: (0..inputs).map(ValueId).collect(),
            outputs: vec![ValueId(output)],
            steps,
            ..LaunchPlan::default()
        };
        plan.plan_lifetimes();
        plan
    }

    /// A quantized product in a body is one step of bytes, as outside of it, and the constants that
    /// it captured are packed.
    #[test]
    fn bodies_are_bound_as_plans_are() {
        let mut random = Random::new(5);
        let (rows, depth, columns) = (3, 20, 18);
        let mut numbers = |count: usize, least: i32, count_of: u64| -> Vec<i32> {
            (0..count).map(|_| least + random.below(count_of) as i32).collect()
        };
        let (x, w) = (numbers(rows * depth, 0, 256), numbers(depth * columns, -128, 256));
        let given = [
            Tensor::from_vec(vec![rows, depth], x.iter().map(|x| *x as u8).collect()).unwrap(),
            Tensor::from_vec(vec![], vec![0.25f32]).unwrap(),
            Tensor::from_vec(vec![depth, columns], w.iter().map(|w| *w as i8).collect()).unwrap(),
            Tensor::from_vec(vec![], vec![0.5f32]).unwrap(),
        ];
        use DataType::{F32, I8, U8};
        let dequantize = Op::DequantizeLinear { axis: 1 };
        let steps = vec![
            step(dequantize.clone(), &[0, 1], 4),
            step(dequantize, &[2, 3], 5),
            step(Op::MatMul(MatMul::default()), &[4, 5], 6),
        ];
        let inner = plan(&[U8, F32, I8, F32, F32, F32, F32], 4, 6, steps);
        let body = Body { plan: Arc::new(inner), operands: vec![0, 1, 2, 3] };
        let outer = plan(&[U8, F32, I8, F32, F32], 4, 4, vec![]);
        let branch = step(Op::Identity, &[0, 1, 2, 3], 4);
        let value = |tensor: &Tensor| Value::from_host(tensor).unwrap();
        let mut constants: Vec<Option<Value>> = given.iter().map(value).map(Some).collect();
        constants[0] = None;
        constants.push(None);
        let facts = StepFacts { plan: &outer, step: &branch, constants: &constants };
        let body = BodyKernels::new(&facts, &body, 0).unwrap();
        let idle = body.bound.plan.steps.iter().filter(|step| is_empty(step)).count();
        assert_eq!((idle, body.bound.constants.iter().flatten().count()), (2, 0));
        let pool = BufferPool::new();
        let operands = given.iter().map(|tensor| Operand::Owned(value(tensor))).collect();
        let inputs = Inputs::new(operands, &pool);
        let got = body.run(&Context { pool: &pool }, vec![], &inputs).unwrap().remove(0);
        let got: Vec<f32> = got.into_host().unwrap().to_vec().unwrap();
        for (at, got) in got.into_iter().enumerate() {
            let (row, column) = (at / columns, at % columns);
            let products = (0..depth).map(|k| x[row * depth + k] * w[k * columns + column]);
            assert_eq!(got, products.sum::<i32>() as f32 * 0.125, "{at}");
        }
    }
}
