//! A program for one set of sizes: kernels in place, every address but the run's own known.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device::DeviceError;
use model::gpu::{GpuPlan, GpuStep, Launch, TilePreemption};

use crate::driver::{LaunchShape, PinnedBuffer, Priority, Stream};
use crate::error::CudaError;
use crate::form::{BestEffortForm, best_effort_choice, form_of};
use crate::hub::Hub;
use crate::instance::Instance;
use crate::kernel_text::Flavour;
use crate::kernels::{LoadedKernel, Progress, Wanted};
use crate::layout::{Choices, Layout};
use crate::weights::arrival::{self, Part};
use crate::weights::{Arrival, ProgramWeights, WeightError};

/// Runs whose memory is kept for the next ones.
const SPARE_INSTANCES: usize = 8;

/// Steps below which a recorded launch is not worth having: it keeps others out of the driver while it is made.
const RECORDED_LEAST: usize = 4;

/// Host buffers kept for the next requests.
const SPARE_STAGING: usize = 64;

/// A step's launches, without addresses.
pub(crate) struct StepKernels {
    pub(crate) real_time: BoundKernel,
    pub(crate) best_effort: BoundKernel,
    /// As best effort, tiles that were done before it was left stay done.
    pub(crate) resumes: bool,
    /// The step may not be left inside a tile. No kernel looks between tiles alone, so it runs to its end.
    pub(crate) finishes: bool,
    /// It starts only when the step before has ended.
    pub(crate) apart: bool,
}

/// A kernel with its shape.
#[derive(Clone)]
pub(crate) struct BoundKernel {
    pub(crate) kernel: Arc<LoadedKernel>,
    pub(crate) entry: usize,
    pub(crate) shape: LaunchShape,
}

/// A plan that is ready to run.
pub(crate) struct Lowered {
    pub(crate) gpu: GpuPlan,
    pub(crate) layout: Layout,
    pub(crate) kernels: Vec<StepKernels>,
    /// Each weight's address and size.
    pub(crate) weights: Vec<(u64, u64)>,
    /// Best-effort steps that are launched as one; together they are all steps, in order.
    pub(crate) chains: Vec<Range<usize>>,
    /// For each step, the chain it is in.
    chain_of: Vec<usize>,
    /// What is launched at once while weights arrive; together they are all steps, in order.
    pub(crate) parts: Vec<Part>,
    /// For each step, bytes of weights that must be there.
    needs: Vec<u64>,
    slabs: usize,
    /// Memory that waits for its next run, by the priority it was last used at: graphs are of one.
    instances: Mutex<[Vec<Instance>; 2]>,
    staging: Mutex<Vec<PinnedBuffer>>,
    /// Let go of last: with a program's weights goes what the driver keeps of its runs.
    pub(crate) program: Arc<ProgramWeights>,
}

impl Lowered {
    /// Compiles and loads what `gpu` names and puts its weights in place.
    pub(crate) fn new(
        hub: &Hub,
        gpu: GpuPlan,
        weights: &Arc<ProgramWeights>,
        progress: Progress<'_>,
    ) -> Result<Lowered, DeviceError> {
        Lowered::with(hub, gpu, weights, Choices::InUse, progress)
    }

    /// The same with memory for these choices.
    pub(crate) fn with(
        hub: &Hub,
        mut gpu: GpuPlan,
        weights: &Arc<ProgramWeights>,
        choices: Choices,
        progress: Progress<'_>,
    ) -> Result<Lowered, DeviceError> {
        check(&gpu).map_err(DeviceError::BadPlan)?;
        hub.tuning().apply(&mut gpu);
        let mut kernels = bind(hub, &gpu, progress)?;
        for (step, apart) in kernels.iter_mut().zip(hub.tuning().apart(&gpu)) {
            step.apart = apart;
        }
        let placed = weights.place(&gpu).map_err(|err| match err {
            WeightError::Cuda(err) => hub.error(err),
            WeightError::Packed(why) => DeviceError::BadPlan(why),
            WeightError::Load(err) => err,
        })?;
        // They are packed; their packers would hold the model's own copy in memory.
        gpu.weights.clear();
        let needs = arrival::needs(&gpu.steps, &placed.spans);
        let finishing: Vec<bool> = kernels.iter().map(|step| step.finishes).collect();
        let chains = chains(&finishing, hub.options().chain_length.max(1));
        let of = |(number, steps): (usize, &Range<usize>)| vec![number; steps.len()];
        Ok(Lowered {
            layout: Layout::new(&gpu, choices),
            parts: arrival::parts(&gpu.steps, &needs),
            needs,
            slabs: placed.slabs,
            program: weights.clone(),
            gpu,
            kernels,
            weights: placed.addresses,
            chain_of: chains.iter().enumerate().flat_map(of).collect(),
            chains,
            instances: Mutex::default(),
            staging: Mutex::new(Vec::new()),
        })
    }

    /// The chain that `step` is in.
    pub(crate) fn chain_of(&self, step: usize) -> &Range<usize> {
        &self.chains[self.chain_of[step]]
    }

    /// What is launched as one from step `first` on; `None` when that is too little.
    pub(crate) fn stretch(&self, first: usize) -> Option<Range<usize>> {
        let steps = stretch(self.chain_of(first), first);
        (steps.len() >= RECORDED_LEAST).then_some(steps)
    }

    /// All that is ever launched as one.
    pub(crate) fn stretches(&self) -> impl Iterator<Item = Range<usize>> {
        (0..self.chain_of.len()).filter_map(|first| self.stretch(first))
    }

    /// What a run must wait for on its stream; an error when its weights are not on the device.
    pub(crate) fn arrival(&self) -> Result<Option<Arc<Arrival>>, CudaError> {
        self.program.arrival(self.slabs)
    }

    /// Holds what is queued on `stream` from now on until the weights of all steps before `end` are there; whether it waits.
    pub(crate) fn hold(&self, stream: &Stream, end: usize) -> Result<bool, CudaError> {
        let needed = end.checked_sub(1).and_then(|last| self.needs.get(last)).copied();
        match (self.arrival()?, needed) {
            (Some(arrival), Some(needed)) => arrival.hold(stream, needed),
            _ => Ok(false),
        }
    }

    fn instances(&self) -> MutexGuard<'_, [Vec<Instance>; 2]> {
        self.instances.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn staging(&self) -> MutexGuard<'_, Vec<PinnedBuffer>> {
        self.staging.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Device memory of a run: what was used last, and rather at the same priority, since its graphs are there.
    pub(crate) fn take_instance(
        &self,
        hub: &Hub,
        priority: Priority,
    ) -> Result<Instance, DeviceError> {
        let spare = {
            let [high, low] = &mut *self.instances();
            let (own, other) = if priority == Priority::High { (high, low) } else { (low, high) };
            own.pop().or_else(|| other.pop())
        };
        if let Some(spare) = spare {
            return Ok(spare);
        }
        match Instance::new(hub, self) {
            // What other plans keep for later is worth less than a request that is here.
            Err(DeviceError::OutOfMemory { .. }) if hub.drop_spares() => Instance::new(hub, self),
            made => made,
        }
    }

    /// Lets go of memory that waits for the next run; whether there was any.
    pub(crate) fn drop_spares(&self) -> bool {
        std::mem::take(&mut *self.instances()).iter().any(|spare| !spare.is_empty())
    }

    /// Takes memory back. Nothing queued may still use it.
    pub(crate) fn give_instance(&self, instance: Instance, priority: Priority) {
        let mut instances = self.instances();
        if instances.iter().map(Vec::len).sum::<usize>() < SPARE_INSTANCES {
            instances[priority as usize].push(instance);
        }
    }

    /// A host buffer for inputs and outputs.
    pub(crate) fn take_staging(&self, hub: &Hub) -> Result<PinnedBuffer, DeviceError> {
        let spare = self.staging().pop();
        let bytes = self.layout.staged_bytes as usize;
        spare.map_or_else(
            || PinnedBuffer::zeroed(hub.context(), bytes).map_err(|err| hub.error(err)),
            Ok,
        )
    }

    pub(crate) fn give_staging(&self, buffer: PinnedBuffer) {
        let mut staging = self.staging();
        if staging.len() < SPARE_STAGING {
            staging.push(buffer);
        }
    }

    /// Bytes of runs that wait for the next request.
    pub(crate) fn spare_bytes(&self) -> u64 {
        self.instances().iter().map(Vec::len).sum::<usize>() as u64 * self.layout.bytes
    }
}

/// Refuses plans that contradict themselves before anything is made of them.
fn check(gpu: &GpuPlan) -> Result<(), String> {
    for step in &gpu.steps {
        let fits = |index: usize| step.choices.get(index);
        let (Some(_), Some(be)) = (fits(step.rt), fits(step.be)) else {
            return Err(format!("step '{}' has no such choice", step.name));
        };
        if be.cluster > 1 {
            return Err(format!("step '{}' is a cluster as a loop", step.name));
        }
        for launch in &step.choices {
            let Some(kernel) = gpu.kernels.get(launch.kernel) else {
                return Err(format!("step '{}' names a kernel that is not there", step.name));
            };
            if launch.args.len() != kernel.args_bytes as usize {
                let (have, want) = (launch.args.len(), kernel.args_bytes);
                return Err(format!("step '{}': {have} bytes of {want} arguments", step.name));
            }
            if launch.tiles == 0 || launch.tiles % launch.cluster.max(1) != 0 {
                return Err(format!("step '{}': {} tiles", step.name, launch.tiles));
            }
        }
    }
    Ok(())
}

/// The kernels of every step's two launches.
fn bind(hub: &Hub, gpu: &GpuPlan, progress: Progress<'_>) -> Result<Vec<StepKernels>, DeviceError> {
    let wanted = |launch: &Launch, flavour: Flavour| -> Wanted {
        (gpu.kernels[launch.kernel].clone(), flavour)
    };
    let mut all: Vec<Wanted> = Vec::new();
    for step in &gpu.steps {
        all.push(wanted(&step.choices[step.rt], Flavour::RealTime));
        all.push(wanted(&step.choices[best_effort_choice(step)], Flavour::BestEffort));
    }
    let kernels = hub.kernels().obtain(&all, progress)?;
    gpu.steps
        .iter()
        .map(|step| {
            let (rt, be) = (&step.choices[step.rt], &step.choices[best_effort_choice(step)]);
            let rt_kernel = kernels[&wanted(rt, Flavour::RealTime)].clone();
            let be_kernel = kernels[&wanted(be, Flavour::BestEffort)].clone();
            Ok(StepKernels {
                real_time: real_time(gpu, rt, rt_kernel).map_err(|err| hub.error(err))?,
                best_effort: best_effort(hub, gpu, step, be_kernel)
                    .map_err(|err| hub.error(err))?,
                resumes: form_of(step) == BestEffortForm::Loop,
                finishes: finishes(step),
                apart: false,
            })
        })
        .collect()
}

fn finishes(step: &GpuStep) -> bool {
    match &step.preemption {
        TilePreemption::InsideTile => false,
        TilePreemption::AtTileBoundary(why) => {
            tracing::warn!(
                step = step.name,
                why,
                "a tile of this step must finish, and no kernel looks between tiles alone: the step is never left"
            );
            true
        }
    }
}

/// `launch` as real time.
pub(crate) fn real_time(
    gpu: &GpuPlan,
    launch: &Launch,
    kernel: Arc<LoadedKernel>,
) -> Result<BoundKernel, CudaError> {
    kernel.allow_cluster(0, launch.cluster)?;
    let facts = &gpu.kernels[launch.kernel];
    let shape = LaunchShape {
        grid: launch.tiles,
        threads: facts.threads,
        shared: facts.shared_bytes,
        cluster: launch.cluster,
        dependent: false,
    };
    Ok(BoundKernel { kernel, entry: 0, shape })
}

fn best_effort(
    hub: &Hub,
    gpu: &GpuPlan,
    step: &GpuStep,
    kernel: Arc<LoadedKernel>,
) -> Result<BoundKernel, CudaError> {
    let launch = &step.choices[best_effort_choice(step)];
    let facts = &gpu.kernels[launch.kernel];
    let (entry, grid) = match form_of(step) {
        BestEffortForm::Loop => {
            let resident = kernel.function(0).blocks.max(1) * hub.target().multiprocessors.max(1);
            (0, launch.tiles.min(resident))
        }
        BestEffortForm::Grid => (1, launch.tiles),
        BestEffortForm::LongGrid => (2, launch.tiles),
    };
    kernel.allow_cluster(entry, launch.cluster)?;
    let (threads, shared) = (facts.threads, facts.shared_bytes);
    let shape = LaunchShape { grid, threads, shared, cluster: launch.cluster, dependent: false };
    Ok(BoundKernel { kernel, entry, shape })
}

/// All steps in runs of up to `length`. A step that runs to its end whatever happens is alone.
fn chains(finishing: &[bool], length: usize) -> Vec<Range<usize>> {
    let mut chains: Vec<Range<usize>> = Vec::new();
    for (index, &finishes) in finishing.iter().enumerate() {
        match chains.last_mut() {
            Some(last) if !finishes && !finishing[last.start] && last.len() < length => {
                last.end = index + 1;
            }
            _ => chains.push(index..index + 1),
        }
    }
    chains
}

/// What of `chain` is launched as one from its step `first` on: all of it, or, where it was left, the longest stretch of a power of
/// two that begins at a multiple of itself. So the rest of any chain is a few launches, and few graphs are ever made of it.
fn stretch(chain: &Range<usize>, first: usize) -> Range<usize> {
    match first - chain.start {
        0 => chain.clone(),
        offset => first..chain.end.min(first + (1 << offset.trailing_zeros())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::tests::{launch, step};
    use model::gpu::Kernel;

    fn plan(launch: Launch) -> GpuPlan {
        let kernel = Kernel {
            source: String::new(),
            expression: "Op".to_string(),
            threads: 128,
            shared_bytes: 0,
            args_bytes: 24,
        };
        GpuPlan { kernels: vec![kernel], steps: vec![step(launch)], ..GpuPlan::default() }
    }

    #[test]
    fn plans_that_contradict_themselves_are_refused() {
        assert_eq!(check(&plan(launch(4, 0))), Ok(()));
        let refuse = |launch: Launch| check(&plan(launch)).expect_err("a broken plan");
        assert!(refuse(Launch { kernel: 1, ..launch(4, 0) }).contains("not there"));
        assert!(refuse(Launch { args: vec![0; 8], ..launch(4, 0) }).contains("8 bytes"));
        assert!(refuse(Launch { cluster: 2, ..launch(4, 0) }).contains("cluster"));
        assert!(refuse(launch(0, 0)).contains("0 tiles"));
        let mut no_choice = plan(launch(4, 0));
        no_choice.steps[0].be = 3;
        assert!(check(&no_choice).expect_err("a broken plan").contains("choice"));
    }

    #[test]
    fn chains_are_all_steps_in_order() {
        assert_eq!(chains(&[false; 10], 4), [0..4, 4..8, 8..10]);
        assert_eq!(chains(&[false, false, true, false, false], 4), [0..2, 2..3, 3..5]);
        assert_eq!(chains(&[true, true], 4), [0..1, 1..2]);
        assert_eq!(chains(&[], 4), []);
    }

    #[test]
    fn the_rest_of_a_chain_is_a_few_stretches() {
        let chain = 32..48;
        assert_eq!(stretch(&chain, 32), chain);
        for first in 33..48 {
            let (mut at, mut launches) = (first, 0);
            while at < chain.end {
                let next = stretch(&chain, at);
                assert!(next.start == at && next.end > at && next.end <= chain.end, "{next:?}");
                (at, launches) = (next.end, launches + 1);
            }
            assert!(launches <= 4, "{launches} from {first}");
        }
        assert_eq!(stretch(&(0..11), 8), 8..11, "a chain may be shorter");
    }

    #[test]
    fn steps_that_must_finish_a_tile_are_never_left() {
        let in_place = GpuStep {
            preemption: TilePreemption::AtTileBoundary("writes in place".to_string()),
            ..step(launch(4, 0))
        };
        assert!(finishes(&in_place));
        assert!(!finishes(&step(launch(4, 0))));
    }
}
