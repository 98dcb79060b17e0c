//! A program compiled for one set of sizes: its kernels, and all addresses except those of a run.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device::DeviceError;
use model::gpu::{GpuPlan, GpuStep, Launch, TilePreemption};

use crate::compile::kernel_cache::{CompileProgress, KernelRequest, LoadedKernel};
use crate::compile::kernel_text::KernelClass;
use crate::device_context::DeviceContext;
use crate::driver::{LaunchShape, PinnedBuffer, Priority, Stream};
use crate::error::CudaError;
use crate::memory::weights::arrival::{self, PlanPart};
use crate::memory::weights::{ProgramWeights, WeightArrival, WeightError};
use crate::memory::{MemoryServices, SpareOwner};
use crate::preempt::PreemptionServices;
use crate::preempt::best_effort_variant::{BestEffortVariant, best_effort_choice, variant_of};
use crate::program::graph_recorder::GraphRecorder;
use crate::program::instance::Instance;
use crate::program::layout::{LaunchSet, Layout};
use crate::services::DeviceServices;

/// Instances kept for later runs.
const SPARE_INSTANCES: usize = 8;

/// Shorter chains are not recorded: instantiating a graph blocks other driver calls.
const MIN_RECORDED_STEPS: usize = 4;

/// Staging buffers kept for later requests.
const SPARE_STAGING: usize = 64;

/// A step's launches, without addresses.
pub(crate) struct StepKernels {
    pub(crate) real_time: BoundKernel,
    pub(crate) best_effort: BoundKernel,
    /// As best effort, tiles done before a preemption stay done.
    pub(crate) resumes: bool,
    /// The step cannot be preempted inside a tile. No kernel checks only between tiles, so the step
    /// runs to its end.
    pub(crate) runs_to_end: bool,
    /// It starts only when the previous step has ended (no dependent launch).
    pub(crate) apart: bool,
}

/// A kernel with its launch shape.
#[derive(Clone)]
pub(crate) struct BoundKernel {
    pub(crate) kernel: Arc<LoadedKernel>,
    pub(crate) shape: LaunchShape,
}

/// A plan that is ready to run.
pub(crate) struct Specialization {
    pub(crate) gpu: GpuPlan,
    pub(crate) layout: Layout,
    pub(crate) kernels: Vec<StepKernels>,
    /// Each weight's address and size.
    pub(crate) weights: Vec<(u64, u64)>,
    /// Best-effort steps recorded as one graph; together they are all steps, in order.
    pub(crate) chains: Vec<Range<usize>>,
    /// For each step, the chain it is in.
    chain_of: Vec<usize>,
    /// What is launched at once while weights load; together they are all steps, in order.
    pub(crate) parts: Vec<PlanPart>,
    /// For each step, bytes of weights that must have arrived.
    needs: Vec<u64>,
    slabs: usize,
    /// Instances kept for later runs, by the priority they were last used with, since graphs have
    /// one.
    instances: Mutex<[Vec<Instance>; 2]>,
    staging: Mutex<Vec<PinnedBuffer>>,
    /// Its instances were asked for ahead.
    reserved: AtomicBool,
    pub(crate) recorder: Arc<GraphRecorder>,
    pub(crate) preemption: Arc<PreemptionServices>,
    pub(crate) memory: Arc<MemoryServices>,
    pub(crate) device: Arc<DeviceContext>,
    /// Dropped last: dropping weights trims the driver's memory pool.
    pub(crate) program: Arc<ProgramWeights>,
}

impl Specialization {
    /// Compiles the kernels of `gpu` and packs its weights.
    pub(crate) fn new(
        services: &DeviceServices,
        gpu: GpuPlan,
        weights: &Arc<ProgramWeights>,
        progress: CompileProgress<'_>,
    ) -> Result<Specialization, DeviceError> {
        Specialization::with(services, gpu, weights, LaunchSet::Selected, progress)
    }

    /// The same with memory for `choices`.
    pub(crate) fn with(
        services: &DeviceServices,
        mut gpu: GpuPlan,
        weights: &Arc<ProgramWeights>,
        choices: LaunchSet,
        progress: CompileProgress<'_>,
    ) -> Result<Specialization, DeviceError> {
        services.compile.tuning().apply(&mut gpu);
        Specialization::assemble(services, gpu, weights, choices, progress)
    }

    /// As [`Specialization::new`], with the variants that `gpu` has selected.
    pub(crate) fn selected(
        services: &DeviceServices,
        gpu: GpuPlan,
        weights: &Arc<ProgramWeights>,
        progress: CompileProgress<'_>,
    ) -> Result<Specialization, DeviceError> {
        Specialization::assemble(services, gpu, weights, LaunchSet::Selected, progress)
    }

    fn assemble(
        services: &DeviceServices,
        mut gpu: GpuPlan,
        weights: &Arc<ProgramWeights>,
        choices: LaunchSet,
        progress: CompileProgress<'_>,
    ) -> Result<Specialization, DeviceError> {
        check(&gpu).map_err(DeviceError::BadPlan)?;
        let source = &services.compile.kernels;
        if choices == LaunchSet::Selected && !source.can_compile() {
            prefer_loaded(&mut gpu, |request| source.is_at_hand(request));
        }
        let mut kernels = bind(services, &gpu, choices, progress)?;
        for (step, apart) in kernels.iter_mut().zip(services.compile.tuning().apart(&gpu)) {
            step.apart = apart;
        }
        let placed = weights.place(&gpu).map_err(|err| match err {
            WeightError::Cuda(err) => services.device.error(err),
            WeightError::WrongSize(why) => DeviceError::BadPlan(why),
            WeightError::Load(err) => err,
        })?;
        // They are packed; their packers would keep the model's own copy in memory.
        gpu.weights.clear();
        let needs = arrival::needs(&gpu.steps, &placed.spans);
        let to_end: Vec<bool> = kernels.iter().map(|step| step.runs_to_end).collect();
        let chains = chains(&to_end, services.device.options().chain_length.max(1));
        let of = |(number, steps): (usize, &Range<usize>)| vec![number; steps.len()];
        Ok(Specialization {
            layout: Layout::new(&gpu, choices),
            parts: arrival::parts(&gpu.steps, &needs),
            needs,
            slabs: placed.slabs,
            program: weights.clone(),
            recorder: services.recorder.clone(),
            preemption: services.preemption.clone(),
            memory: services.memory.clone(),
            device: services.device.clone(),
            gpu,
            kernels,
            weights: placed.addresses,
            chain_of: chains.iter().enumerate().flat_map(of).collect(),
            chains,
            instances: Mutex::default(),
            staging: Mutex::new(Vec::new()),
            reserved: AtomicBool::new(false),
        })
    }

    /// The chain that `step` is in.
    pub(crate) fn chain_of(&self, step: usize) -> &Range<usize> {
        &self.chains[self.chain_of[step]]
    }

    /// The steps that are launched as one from `first` on; `None` when they are too few.
    pub(crate) fn chain_part(&self, first: usize) -> Option<Range<usize>> {
        let steps = chain_part(self.chain_of(first), first);
        (steps.len() >= MIN_RECORDED_STEPS).then_some(steps)
    }

    /// All that are ever launched as one.
    pub(crate) fn chain_parts(&self) -> impl Iterator<Item = Range<usize>> {
        (0..self.chain_of.len()).filter_map(|first| self.chain_part(first))
    }

    /// What a run must wait for on its stream; an error when its weights are evicted.
    pub(crate) fn arrival(&self) -> Result<Option<Arc<WeightArrival>>, CudaError> {
        self.program.arrival(self.slabs)
    }

    /// Makes `stream` wait for the weights of all steps before `end`; false when they have arrived.
    pub(crate) fn wait_for_weights(&self, stream: &Stream, end: usize) -> Result<bool, CudaError> {
        let needed = end.checked_sub(1).and_then(|last| self.needs.get(last)).copied();
        match (self.arrival()?, needed) {
            (Some(arrival), Some(needed)) => arrival.block_stream(stream, needed),
            _ => Ok(false),
        }
    }

    fn instances(&self) -> MutexGuard<'_, [Vec<Instance>; 2]> {
        self.instances.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn staging(&self) -> MutexGuard<'_, Vec<PinnedBuffer>> {
        self.staging.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device memory of a run: the one used last, preferably with the same priority, since its
    /// graphs are recorded.
    pub(crate) fn take_instance(&self, priority: Priority) -> Result<Instance, DeviceError> {
        let spare = {
            let [high, low] = &mut *self.instances();
            let (own, other) = if priority == Priority::High { (high, low) } else { (low, high) };
            own.pop().or_else(|| other.pop())
        };
        if let Some(spare) = spare {
            return Ok(spare);
        }
        match Instance::new(self) {
            // What other specializations keep for later is worth less than a request that is here.
            Err(DeviceError::OutOfMemory { .. }) if self.memory.spares.release() => {
                Instance::new(self)
            }
            made => made,
        }
    }

    /// Keeps `instance` for a later run. Nothing enqueued may still use it.
    pub(crate) fn return_instance(&self, instance: Instance, priority: Priority) {
        let mut instances = self.instances();
        if instances.iter().map(Vec::len).sum::<usize>() < SPARE_INSTANCES {
            instances[priority as usize].push(instance);
        }
    }

    /// A staging buffer for inputs and outputs.
    pub(crate) fn take_staging(&self) -> Result<PinnedBuffer, DeviceError> {
        let spare = self.staging().pop();
        let bytes = self.layout.staged_bytes as usize;
        if let Some(spare) = spare {
            return Ok(spare);
        }
        let mut buffer = PinnedBuffer::recycled(self.device.context(), bytes)
            .map_err(|err| self.device.error(err))?;
        // Words that are copied to the device with the inputs, and written by nobody.
        let (from, to) = (self.layout.inputs_end(), self.layout.outputs_at);
        buffer.as_mut_slice()[from as usize..to as usize].fill(0);
        Ok(buffer)
    }

    pub(crate) fn return_staging(&self, buffer: PinnedBuffer) {
        let mut staging = self.staging();
        if self.is_reserved() && staging.len() < SPARE_STAGING {
            staging.push(buffer);
        }
    }

    /// Its memory is kept however much others keep.
    pub(crate) fn reserve(&self) {
        self.reserved.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_reserved(&self) -> bool {
        self.reserved.load(Ordering::Relaxed)
    }

    /// Bytes of instances kept for later runs.
    pub(crate) fn spare_bytes(&self) -> u64 {
        self.instances().iter().map(Vec::len).sum::<usize>() as u64 * self.layout.bytes
    }
}

impl SpareOwner for Specialization {
    fn drop_spares(&self) -> bool {
        std::mem::take(&mut *self.instances()).iter().any(|spare| !spare.is_empty())
    }
}

/// Blocks of a cluster, at most. Larger ones are not portable, and fault a device whose
/// multiprocessors are partitioned.
const MAX_CLUSTER: u32 = 8;

/// Refuses inconsistent plans.
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
                return Err(format!("step '{}' names an unknown kernel", step.name));
            };
            if launch.args.len() != kernel.args_bytes as usize {
                let (have, want) = (launch.args.len(), kernel.args_bytes);
                return Err(format!("step '{}': {have} bytes of {want} arguments", step.name));
            }
            let cluster = launch.cluster.max(1);
            if cluster > MAX_CLUSTER {
                return Err(format!("step '{}': clusters of {cluster} blocks", step.name));
            }
            for blocks in [launch.tiles, launch.rt_blocks] {
                if blocks == 0 || blocks % cluster != 0 {
                    return Err(format!("step '{}': {blocks} tiles", step.name));
                }
            }
        }
    }
    Ok(())
}

/// The RT and best-effort kernels of every step. Where variants are compared, nothing runs as best
/// effort, and the RT kernel is both.
fn bind(
    services: &DeviceServices,
    gpu: &GpuPlan,
    choices: LaunchSet,
    progress: CompileProgress<'_>,
) -> Result<Vec<StepKernels>, DeviceError> {
    let all = match choices {
        LaunchSet::Selected => requests_of(gpu),
        LaunchSet::All => gpu.steps.iter().map(|step| real_time_request(gpu, step)).collect(),
    };
    let kernels = services.compile.kernels.get(&all, progress)?;
    Ok(gpu
        .steps
        .iter()
        .map(|step| {
            let rt = &step.choices[step.rt];
            let rt_kernel = kernels[&real_time_request(gpu, step)].clone();
            let real_time = real_time(gpu, rt, rt_kernel);
            let best_effort = match choices {
                LaunchSet::Selected => {
                    let kernel = kernels[&best_effort_request(gpu, step)].clone();
                    best_effort(services, gpu, step, kernel)
                }
                LaunchSet::All => real_time.clone(),
            };
            StepKernels {
                real_time,
                best_effort,
                resumes: variant_of(step) == BestEffortVariant::Loop,
                runs_to_end: runs_to_end(step),
                apart: false,
            }
        })
        .collect())
}

/// The kernels that the selected variants of `gpu` need, for real time and for best effort.
pub(crate) fn requests_of(gpu: &GpuPlan) -> Vec<KernelRequest> {
    let of = |step: &GpuStep| [real_time_request(gpu, step), best_effort_request(gpu, step)];
    gpu.steps.iter().flat_map(of).collect()
}

/// Selects variants whose kernels are loaded, in the order of their estimates, where the selected
/// ones are not.
pub(crate) fn prefer_loaded(gpu: &mut GpuPlan, loaded: impl Fn(&KernelRequest) -> bool) {
    for index in 0..gpu.steps.len() {
        let count = gpu.steps[index].choices.len();
        let ready = |gpu: &GpuPlan| {
            let step = &gpu.steps[index];
            loaded(&real_time_request(gpu, step)) && loaded(&best_effort_request(gpu, step))
        };
        let selected = (gpu.steps[index].rt, gpu.steps[index].be);
        if ready(gpu) {
            continue;
        }
        let single = |gpu: &GpuPlan, be: usize| gpu.steps[index].choices[be].cluster <= 1;
        let pairs = (0..count).flat_map(|rt| (0..count).map(move |be| (rt, be)));
        let found = pairs.filter(|(_, be)| single(gpu, *be)).collect::<Vec<_>>();
        let found = found.into_iter().find(|(rt, be)| {
            (gpu.steps[index].rt, gpu.steps[index].be) = (*rt, *be);
            ready(gpu)
        });
        (gpu.steps[index].rt, gpu.steps[index].be) = found.unwrap_or(selected);
    }
}

/// The kernel of `step` as real time.
fn real_time_request(gpu: &GpuPlan, step: &GpuStep) -> KernelRequest {
    (gpu.kernels[step.choices[step.rt].kernel].clone(), KernelClass::RealTime)
}

/// The kernel of `step` in the form that best effort launches.
fn best_effort_request(gpu: &GpuPlan, step: &GpuStep) -> KernelRequest {
    let launch = &step.choices[best_effort_choice(step)];
    (gpu.kernels[launch.kernel].clone(), KernelClass::BestEffort(variant_of(step)))
}

fn runs_to_end(step: &GpuStep) -> bool {
    match &step.preemption {
        TilePreemption::InsideTile => false,
        TilePreemption::AtTileBoundary(why) => {
            tracing::warn!(step = step.name, why, "step cannot be preempted");
            true
        }
    }
}

/// `launch` as real time.
pub(crate) fn real_time(gpu: &GpuPlan, launch: &Launch, kernel: Arc<LoadedKernel>) -> BoundKernel {
    let facts = &gpu.kernels[launch.kernel];
    let shape = LaunchShape {
        grid: launch.rt_blocks,
        threads: facts.threads,
        shared: facts.shared_bytes,
        cluster: launch.cluster,
        dependent: false,
    };
    BoundKernel { kernel, shape }
}

fn best_effort(
    services: &DeviceServices,
    gpu: &GpuPlan,
    step: &GpuStep,
    kernel: Arc<LoadedKernel>,
) -> BoundKernel {
    let launch = &step.choices[best_effort_choice(step)];
    let facts = &gpu.kernels[launch.kernel];
    let grid = match variant_of(step) {
        BestEffortVariant::Loop => {
            let resident =
                kernel.function().blocks.max(1) * services.device.target().multiprocessors.max(1);
            launch.tiles.min(resident)
        }
        BestEffortVariant::Grid | BestEffortVariant::CheckedGrid => launch.tiles,
    };
    let (threads, shared) = (facts.threads, facts.shared_bytes);
    let shape = LaunchShape { grid, threads, shared, cluster: launch.cluster, dependent: false };
    BoundKernel { kernel, shape }
}

/// All steps in chains of up to `length`. A step that always runs to its end is a chain of its own.
fn chains(to_end: &[bool], length: usize) -> Vec<Range<usize>> {
    let mut chains: Vec<Range<usize>> = Vec::new();
    for (index, &runs_to_end) in to_end.iter().enumerate() {
        match chains.last_mut() {
            Some(last) if !runs_to_end && !to_end[last.start] && last.len() < length => {
                last.end = index + 1;
            }
            _ => chains.push(index..index + 1),
        }
    }
    chains
}

/// The part of `chain` that is launched as one from step `first` on: all of it, or, where it was
/// preempted, the longest part of a power of two that begins at a multiple of itself. So the rest
/// of any chain takes few launches, and few different graphs exist.
fn chain_part(chain: &Range<usize>, first: usize) -> Range<usize> {
    match first - chain.start {
        0 => chain.clone(),
        offset => first..chain.end.min(first + (1 << offset.trailing_zeros())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::layout::tests::{launch, step};
    use model::gpu::{Kernel, KernelFacts};

    fn plan(launch: Launch) -> GpuPlan {
        let kernel = Kernel::new(KernelFacts {
            source: String::new(),
            expression: "Op".to_string(),
            threads: 128,
            shared_bytes: 0,
            args_bytes: 24,
        });
        GpuPlan { kernels: vec![kernel], steps: vec![step(launch)], ..GpuPlan::default() }
    }

    #[test]
    fn refuses_inconsistent_plans() {
        assert_eq!(check(&plan(launch(4, 0))), Ok(()));
        let refuse = |launch: Launch| check(&plan(launch)).expect_err("a broken plan");
        assert!(refuse(Launch { kernel: 1, ..launch(4, 0) }).contains("unknown kernel"));
        assert!(refuse(Launch { args: vec![0; 8], ..launch(4, 0) }).contains("8 bytes"));
        assert!(refuse(Launch { cluster: 2, ..launch(4, 0) }).contains("cluster"));
        let mut large = plan(launch(4, 0));
        large.steps[0].choices.push(Launch { cluster: 16, ..launch(16, 0) });
        assert!(check(&large).expect_err("a broken plan").contains("clusters of 16"));
        assert!(refuse(launch(0, 0)).contains("0 tiles"));
        let mut no_choice = plan(launch(4, 0));
        no_choice.steps[0].be = 3;
        assert!(check(&no_choice).expect_err("a broken plan").contains("choice"));
    }

    #[test]
    fn chains_cover_all_steps_in_order() {
        assert_eq!(chains(&[false; 10], 4), [0..4, 4..8, 8..10]);
        assert_eq!(chains(&[false, false, true, false, false], 4), [0..2, 2..3, 3..5]);
        assert_eq!(chains(&[true, true], 4), [0..1, 1..2]);
        assert_eq!(chains(&[], 4), []);
    }

    #[test]
    fn rest_of_a_chain_takes_few_launches() {
        let chain = 32..48;
        assert_eq!(chain_part(&chain, 32), chain);
        for first in 33..48 {
            let (mut at, mut launches) = (first, 0);
            while at < chain.end {
                let next = chain_part(&chain, at);
                assert!(next.start == at && next.end > at && next.end <= chain.end, "{next:?}");
                (at, launches) = (next.end, launches + 1);
            }
            assert!(launches <= 4, "{launches} from {first}");
        }
        assert_eq!(chain_part(&(0..11), 8), 8..11, "a chain may be shorter");
    }

    #[test]
    fn steps_that_must_finish_a_tile_run_to_their_end() {
        let in_place = GpuStep {
            preemption: TilePreemption::AtTileBoundary("writes in place".to_string()),
            ..step(launch(4, 0))
        };
        assert!(runs_to_end(&in_place));
        assert!(!runs_to_end(&step(launch(4, 0))));
    }
}
