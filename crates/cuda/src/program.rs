//! A loaded model: its weights, and its plans for the sizes that requests brought.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::Bytes;
use bytes::Bytes as RawBytes;
use device::{DeviceError, Program, Task, check_inputs};
use model::gpu::GpuPlan;
use model::{Dim, LaunchPlan, Tensor};

use crate::hub::Hub;
use crate::kernels::Progress;
use crate::lowered::Lowered;
use crate::task::CudaTask;
use crate::weights::WeightStore;

/// Sizes of a plan's symbols, in the order inputs name them.
pub(crate) type Sizes = Vec<(String, usize)>;

/// A loaded model.
pub(crate) struct CudaProgram {
    shared: Arc<Loaded>,
}

/// What tasks hold of their program.
pub(crate) struct Loaded {
    pub(crate) hub: Arc<Hub>,
    plan: Arc<LaunchPlan>,
    weights: Mutex<WeightStore>,
    /// Most recently used last.
    plans: Mutex<Vec<(Sizes, Arc<Lowered>)>>,
    /// One lowering at a time: whoever waits finds it done.
    lowering: Mutex<()>,
}

/// The steps of `plan` that have no kernel.
pub(crate) fn unsupported_steps(hub: &Hub, plan: &LaunchPlan) -> Vec<DeviceError> {
    lower(hub, plan, &example_sizes(hub, plan)).err().unwrap_or_default()
}

/// `plan` for `sizes`.
pub(crate) fn lower(
    hub: &Hub,
    plan: &LaunchPlan,
    sizes: &[(String, usize)],
) -> Result<GpuPlan, Vec<DeviceError>> {
    plan.check().map_err(|err| vec![DeviceError::BadPlan(err.to_string())])?;
    let gpu = hub.compiler.lower(plan, sizes, hub.target())?;
    let (inputs, outputs) = (gpu.inputs.len(), gpu.outputs.len());
    if (inputs, outputs) != (plan.inputs.len(), plan.outputs.len()) {
        let why =
            format!("{inputs} inputs and {outputs} outputs on the device are not the model's");
        return Err(vec![DeviceError::BadPlan(why)]);
    }
    Ok(gpu)
}

/// The first reason of a compiler that refused.
pub(crate) fn first_of(errors: Vec<DeviceError>) -> DeviceError {
    let unknown = || DeviceError::BadPlan("the compiler gave no reason".to_string());
    errors.into_iter().next().unwrap_or_else(unknown)
}

/// The symbols of `plan`'s inputs with the sizes to prepare for: those of the settings, else 1.
fn example_sizes(hub: &Hub, plan: &LaunchPlan) -> Sizes {
    let mut sizes = Sizes::new();
    for dim in plan.inputs.iter().filter_map(|id| plan.value(*id).shape.as_ref()).flatten() {
        if let Dim::Symbol(symbol) = dim
            && !sizes.iter().any(|(known, _)| known == symbol)
        {
            let set = hub.options().sizes.iter().find(|(name, _)| name == symbol);
            sizes.push((symbol.clone(), set.map_or(1, |(_, size)| *size)));
        }
    }
    sizes
}

/// The symbols of `plan`'s inputs as `inputs` bind them; they have been checked against the plan.
fn sizes_of(plan: &LaunchPlan, inputs: &[Tensor]) -> Sizes {
    let mut sizes = Sizes::new();
    for (id, tensor) in plan.inputs.iter().zip(inputs) {
        for (dim, size) in plan.value(*id).shape.iter().flatten().zip(tensor.shape()) {
            if let Dim::Symbol(symbol) = dim
                && !sizes.iter().any(|(known, _)| known == symbol)
            {
                sizes.push((symbol.clone(), *size));
            }
        }
    }
    sizes
}

impl CudaProgram {
    /// Makes `plan` ready for the sizes of the settings: kernels, weights, and one run's memory with its graph.
    pub(crate) fn load(
        hub: Arc<Hub>,
        plan: Arc<LaunchPlan>,
        progress: Progress<'_>,
    ) -> Result<CudaProgram, DeviceError> {
        hub.alive()?;
        let sizes = example_sizes(&hub, &plan);
        let shared = Arc::new(Loaded {
            hub,
            plan,
            weights: Mutex::default(),
            plans: Mutex::default(),
            lowering: Mutex::default(),
        });
        shared.lowered(sizes, progress)?;
        Ok(CudaProgram { shared })
    }
}

impl Loaded {
    fn plans(&self) -> MutexGuard<'_, Vec<(Sizes, Arc<Lowered>)>> {
        self.plans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known(&self, sizes: &Sizes) -> Option<Arc<Lowered>> {
        let mut plans = self.plans();
        let at = plans.iter().position(|(known, _)| known == sizes)?;
        let entry = plans.remove(at);
        let lowered = entry.1.clone();
        plans.push(entry);
        Some(lowered)
    }

    /// The plan for `sizes`, made now if it is not there.
    pub(crate) fn lowered(
        &self,
        sizes: Sizes,
        progress: Progress<'_>,
    ) -> Result<Arc<Lowered>, DeviceError> {
        if let Some(lowered) = self.known(&sizes) {
            return Ok(lowered);
        }
        let _lowering = self.lowering.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lowered) = self.known(&sizes) {
            return Ok(lowered);
        }
        let hub = &self.hub;
        let gpu = lower(hub, &self.plan, &sizes).map_err(first_of)?;
        let lowered = Arc::new(Lowered::new(hub, gpu, &self.weights, progress)?);
        hub.watch_spares(&lowered);
        // The first request shall find memory and graph in place.
        let mut instance = lowered.take_instance(hub)?;
        instance.graph(hub, &lowered).map_err(|err| hub.error(err))?;
        lowered.give_instance(instance);
        let mut plans = self.plans();
        plans.push((sizes, lowered.clone()));
        let over = plans.len().saturating_sub(hub.options().plans_most.max(1));
        plans.drain(..over);
        Ok(lowered)
    }
}

impl Program for CudaProgram {
    fn plan(&self) -> &Arc<LaunchPlan> {
        &self.shared.plan
    }

    fn resident(&self) -> Bytes {
        let weights = self.shared.weights.lock().unwrap_or_else(PoisonError::into_inner).bytes();
        let runs: u64 = self.shared.plans().iter().map(|(_, plan)| plan.spare_bytes()).sum();
        Bytes(weights + runs)
    }

    fn prepare(&self, inputs: Vec<Tensor>) -> Result<Box<dyn Task>, DeviceError> {
        let shared = &self.shared;
        shared.hub.alive()?;
        check_inputs(&shared.plan, &inputs)?;
        let lowered = shared.lowered(sizes_of(&shared.plan, &inputs), &|_, _| {})?;
        let raw = inputs.iter().map(raw_bytes).collect::<Result<Vec<_>, _>>()?;
        Ok(Box::new(CudaTask::new(shared.hub.clone(), lowered, &raw)?))
    }
}

fn raw_bytes(tensor: &Tensor) -> Result<&RawBytes, DeviceError> {
    tensor.raw().ok_or_else(|| {
        DeviceError::BadInput("a tensor of strings cannot be copied to a GPU".to_string())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::{DataType, ValueId, ValueInfo};

    #[test]
    fn sizes_are_bound_by_the_first_input_that_names_them() {
        let info = |dims: Vec<Dim>| ValueInfo {
            name: "x".to_string(),
            dtype: DataType::F32,
            shape: Some(dims),
        };
        let symbol = |name: &str| Dim::Symbol(name.to_string());
        let plan = LaunchPlan {
            values: vec![
                info(vec![symbol("batch"), Dim::Fixed(3)]),
                info(vec![symbol("batch"), symbol("tokens")]),
            ],
            inputs: vec![ValueId(0), ValueId(1)],
            ..LaunchPlan::default()
        };
        let tensor = |shape: Vec<usize>| {
            let count = shape.iter().product();
            Tensor::from_vec(shape, vec![0f32; count]).expect("a tensor")
        };
        let sizes = sizes_of(&plan, &[tensor(vec![2, 3]), tensor(vec![2, 7])]);
        assert_eq!(sizes, [("batch".to_string(), 2), ("tokens".to_string(), 7)]);
    }
}
