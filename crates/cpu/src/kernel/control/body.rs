//! A body: a plan whose steps are bound to kernels.

use std::sync::Arc;

use model::op::Body;
use model::{LaunchPlan, Step, ValueId, ValueInfo};

use crate::buffer_pool::BufferPool;
use crate::kernel::{self, Context, Inputs, Kernel, KernelError, Operand, StepFacts, invalid};
use crate::value::Value;
use crate::yield_point;

/// A plan of a step, bound to kernels.
pub(super) struct BodyKernels {
    plan: Arc<LaunchPlan>,
    kernels: Vec<Kernel>,
    /// Constants that the step captured, by value.
    constants: Vec<Option<Value>>,
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
        let plan = body.plan.clone();
        plan.check().map_err(|error| invalid!("a body: {error}"))?;
        if plan.inputs.len() != arguments + body.operands.len() {
            return Err(invalid!("a body of {} inputs", plan.inputs.len()));
        }
        let mut constants: Vec<Option<Value>> = Vec::new();
        constants.resize_with(plan.values.len(), || None);
        let mut captured = Vec::new();
        for (id, operand) in plan.inputs[arguments..].iter().zip(&body.operands) {
            match facts.constant(*operand) {
                Some(value) => constants[id.index()] = Some(value.try_clone()?),
                None => captured.push((*id, *operand)),
            }
        }
        let mut kernels = Vec::new();
        for step in &plan.steps {
            let facts = StepFacts { plan: &plan, step, constants: &constants };
            let kernel = kernel::build(&facts).map_err(|error| named(step, error))?;
            kernels.push(kernel);
        }
        kernel::drop_packed(&plan, &kernels, &mut constants);
        let held: usize = constants.iter().flatten().map(Value::size_bytes).sum();
        let resident_bytes = held + kernels.iter().map(|k| k.resident_bytes).sum::<usize>();
        Ok(BodyKernels { plan, kernels, constants, captured, arguments, resident_bytes })
    }

    /// How many values the body gives.
    pub(super) fn outputs(&self) -> usize {
        self.plan.outputs.len()
    }

    /// What is known of output `index`.
    pub(super) fn output_info(&self, index: usize) -> &ValueInfo {
        self.plan.value(self.plan.outputs[index])
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
        let count = self.plan.values.len();
        let mut own: Vec<Option<Value>> = (0..count).map(|_| None).collect();
        let mut shared: Vec<Option<&Value>> = (0..count).map(|_| None).collect();
        for (id, value) in self.plan.inputs.iter().zip(arguments) {
            own[id.index()] = Some(value);
        }
        for (id, operand) in &self.captured {
            shared[id.index()] = Some(outer.get(*operand)?);
        }
        for (step, kernel) in self.plan.steps.iter().zip(&self.kernels) {
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
                let value = own[at].as_ref().or(shared[at]).or(self.constants[at].as_ref());
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
        let ids = &self.plan.outputs;
        let mut results = Vec::new();
        for (position, id) in ids.iter().enumerate() {
            let at = id.index();
            let again = ids[position + 1..].contains(id);
            let moved = if again { None } else { own[at].take() };
            results.push(match moved {
                Some(value) => value,
                None => {
                    let value = own[at].as_ref().or(shared[at]).or(self.constants[at].as_ref());
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
