//! A network that can be real time or best effort of a pair.

use device::{DeviceError, check_inputs};
use model::gpu::GpuPlan;
use model::{LaunchPlan, Tensor};

use crate::compile::kernel_cache::CompileProgress;
use crate::driver::{PinnedBuffer, Stream};
use crate::error::CudaError;
use crate::measure::profile::{ProfileOptions, Profiler};
use crate::program::instance::Instance;
use crate::program::layout::Addresses;
use crate::program::lowering::{first_of, lower, raw_bytes, sizes_of};
use crate::program::specialization::{BoundKernel, Specialization};
use crate::services::DeviceServices;

/// Positions of the two launches among a step's choices.
const REAL_TIME: usize = 0;
const BEST_EFFORT: usize = 1;

/// Pattern in the outputs before a network computes them.
const NOT_COMPUTED: u32 = 0xa5a5_a5a5;

/// A network on the device, with memory for both roles.
pub(super) struct Network {
    /// Launches of best effort.
    plain: Vec<BoundKernel>,
    pub(super) real_time: NetworkInstance,
    pub(super) best_effort: NetworkInstance,
    /// After the instances, whose memory it describes.
    specialization: Specialization,
}

/// The memory of one role.
pub(super) struct NetworkInstance {
    pub(super) instance: Instance,
    /// Arguments of each step's launch in that role.
    args: Vec<Vec<u8>>,
}

impl Network {
    pub(super) fn new(
        services: &DeviceServices,
        plan: &LaunchPlan,
        inputs: &[Tensor],
        progress: CompileProgress<'_>,
    ) -> Result<Network, DeviceError> {
        check_inputs(plan, inputs)?;
        let mut gpu = lower(services, plan, &sizes_of(plan, inputs), device::LaunchChoices::All)
            .map_err(first_of)?;
        services.compile.tuning().apply(&mut gpu);
        keep_in_use(&mut gpu);
        let profiler = Profiler::new(services, gpu, ProfileOptions::default(), progress)?;
        let bound = |step| profiler.bound(step, BEST_EFFORT);
        let steps = profiler.specialization.gpu.steps.iter();
        let plain = steps.map(bound).collect();
        let Profiler { specialization, .. } = profiler;
        let real_time = NetworkInstance::new(services, &specialization, REAL_TIME, inputs)?;
        let best_effort = NetworkInstance::new(services, &specialization, BEST_EFFORT, inputs)?;
        Ok(Network { plain, real_time, best_effort, specialization })
    }

    /// Number of steps.
    pub(super) fn step_count(&self) -> usize {
        self.plain.len()
    }

    /// Enqueues step `index` as real time.
    ///
    /// # Safety
    /// This network lives until it is done, and nothing else uses its memory for real time.
    pub(super) unsafe fn launch_real_time(
        &self,
        index: usize,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let instance = &self.real_time.instance;
        // SAFETY: the caller is responsible for the memory.
        unsafe { instance.launch_real_time(&self.specialization, index, index > 0, stream) }
    }

    /// Enqueues step `index` as best effort that is never preempted. `behind` says that it follows
    /// another kernel of the same graph.
    ///
    /// # Safety
    /// This network lives until it is done, and nothing else uses its memory for best effort.
    pub(super) unsafe fn launch_best_effort(
        &self,
        services: &DeviceServices,
        index: usize,
        behind: bool,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let bound = &self.plain[index];
        let mut shape = bound.shape;
        shape.dependent = behind && self.starts_early(services, index);
        let args = &self.best_effort.args[index];
        // SAFETY: the arguments were checked against the kernel's size, and every address in them
        // is of this network.
        unsafe { stream.launch(bound.kernel.function(), shape, &[args]) }
    }

    /// Whether step `index` may start before the previous one has ended.
    fn starts_early(&self, services: &DeviceServices, index: usize) -> bool {
        !self.specialization.kernels[index].apart && services.device.has_dependent_launches()
    }

    /// Enqueues a pattern over the outputs of `side`, which no network produces.
    ///
    /// # Safety
    /// This network lives until it is done, and nothing else in flight uses that side.
    pub(super) unsafe fn overwrite_outputs(
        &self,
        side: &NetworkInstance,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let layout = &self.specialization.layout;
        let words = (layout.staged_bytes - layout.outputs_at).div_ceil(4) as usize;
        let at = side.instance.address() + layout.outputs_at;
        // SAFETY: outputs of this instance, and padding up to the next section, which is aligned to
        // more than a word.
        unsafe { stream.fill(at, NOT_COMPUTED, words) }
    }

    /// Fault words and outputs of `side`, of which nothing is in flight.
    pub(super) fn outputs(
        &self,
        services: &DeviceServices,
        side: &NetworkInstance,
        stream: &Stream,
    ) -> Result<Vec<u8>, CudaError> {
        let layout = &self.specialization.layout;
        let staging =
            PinnedBuffer::zeroed(services.device.context(), layout.staged_bytes as usize)?;
        // SAFETY: both live until the stream is waited for.
        unsafe { side.instance.copy_outputs(&self.specialization, &staging, stream) }?;
        stream.synchronize()?;
        Ok(staging.as_slice()[layout.faults_at as usize..].to_vec())
    }

    /// Whether all of `outputs` are the pattern.
    pub(super) fn is_overwritten(&self, outputs: &[u8]) -> bool {
        let layout = &self.specialization.layout;
        let at = (layout.outputs_at - layout.faults_at) as usize;
        let pattern = NOT_COMPUTED.to_le_bytes()[0];
        outputs.get(at..).is_none_or(|outputs| outputs.iter().all(|byte| *byte == pattern))
    }
}

impl NetworkInstance {
    fn new(
        services: &DeviceServices,
        specialization: &Specialization,
        choice: usize,
        inputs: &[Tensor],
    ) -> Result<NetworkInstance, DeviceError> {
        let instance = Instance::new(specialization)?;
        let addresses = Addresses {
            block: instance.address(),
            layout: &specialization.layout,
            weights: &specialization.weights,
        };
        let patched = |(index, step): (usize, &model::gpu::GpuStep)| {
            let own = specialization.layout.real_time_words(index);
            addresses.patch(&step.choices[choice], own).map_err(DeviceError::BadPlan)
        };
        let args =
            specialization.gpu.steps.iter().enumerate().map(patched).collect::<Result<_, _>>()?;
        let side = NetworkInstance { instance, args };
        side.copy_inputs_to_device(services, specialization, inputs)?;
        Ok(side)
    }

    /// Copies the inputs of all runs to the device.
    fn copy_inputs_to_device(
        &self,
        services: &DeviceServices,
        specialization: &Specialization,
        inputs: &[Tensor],
    ) -> Result<(), DeviceError> {
        let bytes = specialization.layout.staged_bytes as usize;
        let mut staging = PinnedBuffer::zeroed(services.device.context(), bytes)
            .map_err(|err| services.device.error(err))?;
        for (index, (slot, tensor)) in specialization.gpu.inputs.iter().zip(inputs).enumerate() {
            let raw = raw_bytes(tensor)?;
            if raw.len() as u64 != slot.bytes {
                let (name, want, got) = (&slot.name, slot.bytes, raw.len());
                let why = format!("input '{name}' has {got} bytes, the device expects {want}");
                return Err(DeviceError::BadInput(why));
            }
            let at = specialization.layout.input(index) as usize;
            staging.as_mut_slice()[at..at + raw.len()].copy_from_slice(raw);
        }
        let stream = &services.memory.memory_stream;
        // SAFETY: both sides live until the stream is waited for.
        unsafe { self.instance.copy_inputs(specialization, &staging, true, stream) }
            .and_then(|()| stream.synchronize())
            .map_err(|err| services.device.error(err))
    }
}

/// Reduces the choices of each step to its RT launch and the one without a cluster, in this order.
fn keep_in_use(gpu: &mut GpuPlan) {
    for step in &mut gpu.steps {
        step.choices = vec![step.choices[step.rt].clone(), step.choices[step.be].clone()];
        (step.rt, step.be) = (REAL_TIME, BEST_EFFORT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::layout::tests::{launch, step};
    use model::gpu::Launch;

    #[test]
    fn keeps_the_two_launches_of_a_step() {
        let named = |name: &str| Launch { variant: name.to_string(), ..launch(4, 0) };
        let mut one = step(named("a"));
        one.choices.extend([named("b"), named("c")]);
        (one.rt, one.be) = (2, 1);
        let mut plan = GpuPlan { steps: vec![one], ..GpuPlan::default() };
        keep_in_use(&mut plan);
        let names: Vec<&str> =
            plan.steps[0].choices.iter().map(|launch| launch.variant.as_str()).collect();
        assert_eq!(names, ["c", "b"]);
        assert_eq!((plan.steps[0].rt, plan.steps[0].be), (0, 1));
    }
}
