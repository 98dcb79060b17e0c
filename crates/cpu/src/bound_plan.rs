//! Plans whose steps are bound to kernels: those that are loaded, and those of control flow.

use std::sync::Arc;

use model::LaunchPlan;

use crate::byte_steps::{ByteSteps, with_byte_steps};
use crate::channel_blocks::ChannelBlocks;
use crate::dequantized_weights::{is_empty, weights_as_numbers};
use crate::kernel::{self, Kernel, KernelError, Outputs, StepFacts};
use crate::value::Value;

/// A plan as it runs, with its constants and kernels.
pub(crate) struct BoundPlan {
    /// The values and as many steps as were given, some of which may have nothing to do. Without
    /// its constants: values and kernels hold them.
    pub(crate) plan: LaunchPlan,
    pub(crate) constants: Vec<Option<Value>>,
    pub(crate) kernels: Vec<Kernel>,
    /// Steps that neither compute bytes instead nor have nothing to do.
    pub(crate) of_floats: Vec<bool>,
}

/// Why a plan is not bound.
pub(crate) enum BindError {
    /// The step that no kernel computes.
    Step(usize, KernelError),
    /// A constant that does not become a value.
    Constant(KernelError),
}

impl BoundPlan {
    /// Binds the steps of `plan`, which was checked, with the steps over channel blocks that `find`
    /// chooses.
    pub(crate) fn new(
        plan: Arc<LaunchPlan>,
        find: impl Fn(&LaunchPlan, &ByteSteps) -> ChannelBlocks,
    ) -> Result<BoundPlan, BindError> {
        let (plan, byte_steps) = with_byte_steps(plan);
        let plan = weights_as_numbers(plan);
        let blocks = find(&plan, &byte_steps);
        let mut constants: Vec<Option<Value>> = Vec::new();
        constants.resize_with(plan.values.len(), || None);
        for (id, tensor) in &plan.constants {
            constants[id.index()] = Some(Value::from_host(tensor).map_err(BindError::Constant)?);
        }
        let mut kernels = Vec::with_capacity(plan.steps.len());
        let mut of_floats = Vec::with_capacity(plan.steps.len());
        for (index, step) in plan.steps.iter().enumerate() {
            let facts = StepFacts { plan: &plan, step, constants: &constants };
            let output = step.outputs.first().copied().flatten();
            let byte_step = output.and_then(|id| byte_steps.get(&id));
            of_floats.push(byte_step.is_none() && !is_empty(step));
            let kernel = match (blocks.build(index, &facts, byte_step), byte_step) {
                (Some(kernel), _) => kernel,
                (None, Some(byte_step)) => byte_step.build(),
                (None, None) if is_empty(step) => Ok(Kernel::new(|_, _| Ok(Outputs::new()))),
                (None, None) => kernel::build(&facts),
            };
            kernels.push(kernel.map_err(|error| BindError::Step(index, error))?);
        }
        kernel::drop_packed(&plan, &kernels, &mut constants);
        let mut plan = Arc::unwrap_or_clone(plan);
        plan.constants = Vec::new();
        Ok(BoundPlan { plan, constants, kernels, of_floats })
    }

    /// What constants and kernels hold.
    pub(crate) fn resident_bytes(&self) -> usize {
        let constants: usize = self.constants.iter().flatten().map(Value::size_bytes).sum();
        constants + self.kernels.iter().map(|kernel| kernel.resident_bytes).sum::<usize>()
    }
}
