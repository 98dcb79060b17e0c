//! A loaded model: its weights, and its specializations for the sizes of requests.

pub(crate) mod batch_inputs;
mod batches;
pub(crate) mod graph_recorder;
pub(crate) mod instance;
pub(crate) mod layout;
pub(crate) mod lowering;
pub(crate) mod sizes_ahead;
pub(crate) mod specialization;
pub(crate) mod task;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use base::Bytes;
use device::residency::Residency;
use device::{
    DeviceError, LaunchChoices, LoweringTemplate, Program, RecordedStep, StagedInputs, StepWork,
    Task, TuningProgress, check_inputs,
};
use model::config::CopyTime;
use model::gpu::{GpuPlan, GpuStep};
use model::{LaunchPlan, Tensor};

use crate::compile::kernel_cache::{CompileProgress, LoadedKernel};
use crate::driver::Priority;
use crate::memory::SpareOwner;
use crate::memory::weights::{ProgramResidency, ProgramWeights};
use crate::program::batch_inputs::InputPools;
use crate::program::batches::{GatheredBatch, leading_symbol};
use crate::program::lowering::{
    Sizes, example, first_of, lower, lower_by, raw_bytes, sizes_of, sizes_of_shapes,
};
use crate::program::sizes_ahead::SizesAhead;
use crate::program::specialization::{Specialization, prefer_loaded, requests_of};
use crate::program::task::CudaTask;
use crate::services::DeviceServices;

/// Memory that specializations of sizes which requests brought keep for their next runs.
const MAX_SPARE_BYTES: u64 = 256 << 20;

/// A loaded model.
pub(crate) struct CudaProgram {
    /// First, so that its thread ends before the program's memory is freed.
    _sizes_ahead: Option<SizesAhead>,
    shared: Arc<ProgramState>,
}

/// What batching and tasks share of a program.
pub(crate) struct ProgramState {
    pub(crate) services: DeviceServices,
    pub(crate) plan: Arc<LaunchPlan>,
    /// What lowering the plan for other sizes begins with.
    template: Option<Arc<dyn LoweringTemplate>>,
    /// Most recently used last.
    plans: Mutex<Vec<(Sizes, Arc<Specialization>)>>,
    /// Every kernel that a specialization used, by its address: loading one takes longer than
    /// preparing a size.
    kernels: Mutex<HashMap<usize, Arc<LoadedKernel>>>,
    /// Requests are staged for batches: a specialization of more rows serves them too.
    staged: AtomicBool,
    /// Where inputs wait for their batch.
    pub(crate) pools: Mutex<InputPools>,
    /// After specializations and pools, so that it is dropped last: dropping weights trims the
    /// driver's memory pool.
    weights: Arc<ProgramWeights>,
    /// Held while a specialization is made: a thread that waits for it finds it made.
    compiling: Mutex<()>,
}

impl CudaProgram {
    /// Specializes `plan` for the configured sizes, or for others that it accepts: kernels,
    /// weights, and the memory of one run with its graphs. If no sizes are known, the first request
    /// brings them and waits for all that.
    pub(crate) fn load(
        services: DeviceServices,
        plan: Arc<LaunchPlan>,
        progress: CompileProgress<'_>,
    ) -> Result<CudaProgram, DeviceError> {
        services.device.check_healthy()?;
        let example = example(
            &*services.compile.compiler,
            services.device.target(),
            &plan,
            &services.device.options().sizes,
        )
        .map_err(first_of)?;
        let template = services.compile.compiler.template(&plan, services.device.target());
        let shared = Arc::new(ProgramState {
            template,
            weights: ProgramWeights::new(
                &services.device,
                &services.memory,
                &services.preemption.rt_activity,
                services.device.options().weights_on_demand,
            ),
            services,
            plan,
            plans: Mutex::default(),
            kernels: Mutex::default(),
            staged: AtomicBool::new(false),
            compiling: Mutex::default(),
            pools: Mutex::default(),
        });
        match example {
            Some((sizes, gpu)) => {
                let specialization = shared.prepare_batches(sizes, gpu, progress)?;
                shared.reserve_runs(&specialization, 1)?;
            }
            None => tracing::warn!("no sizes known for the model, compiled with its first request"),
        }
        let ahead = shared.services.device.options().sizes_ahead;
        let sizes_ahead = ahead.then(|| SizesAhead::start(&shared)).flatten();
        Ok(CudaProgram { _sizes_ahead: sizes_ahead, shared })
    }
}

impl ProgramState {
    pub(crate) fn plans(&self) -> MutexGuard<'_, Vec<(Sizes, Arc<Specialization>)>> {
        self.plans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The plan for `sizes`.
    pub(crate) fn lower(
        &self,
        sizes: &[(String, usize)],
        choices: LaunchChoices,
    ) -> Result<GpuPlan, Vec<DeviceError>> {
        match &self.template {
            Some(template) => lower_by(&**template, &self.plan, sizes, choices),
            None => lower(&self.services, &self.plan, sizes, choices),
        }
    }

    fn known(&self, sizes: &Sizes) -> Option<Arc<Specialization>> {
        let mut plans = self.plans();
        let at = plans.iter().rposition(|(known, _)| known == sizes)?;
        let entry = plans.remove(at);
        let specialization = entry.1.clone();
        plans.push(entry);
        Some(specialization)
    }

    /// The specialization for `sizes`, made now if it does not exist.
    pub(crate) fn specialization(
        &self,
        sizes: Sizes,
        progress: CompileProgress<'_>,
    ) -> Result<Arc<Specialization>, DeviceError> {
        if let Some(specialization) = self.known(&sizes) {
            return Ok(specialization);
        }
        let _lowering = self.compiling.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(specialization) = self.known(&sizes) {
            return Ok(specialization);
        }
        let began = Instant::now();
        let specialization = self.specialize_now(&sizes, progress)?;
        let assembled = began.elapsed();
        // The first run finds memory. Its graphs are recorded when there is a second one.
        let instance = specialization.take_instance(Priority::Low)?;
        specialization.return_instance(instance, Priority::Low);
        tracing::debug!(?sizes, ?assembled, all = ?began.elapsed(), "sizes prepared");
        self.keep(sizes, specialization.clone());
        Ok(specialization)
    }

    /// The variants estimated to be the fastest, unless others are tuned or their kernels are not
    /// loaded.
    fn specialize_now(
        &self,
        sizes: &Sizes,
        progress: CompileProgress<'_>,
    ) -> Result<Arc<Specialization>, DeviceError> {
        let services = &self.services;
        let began = Instant::now();
        let fastest = self.lower(sizes, LaunchChoices::Fastest).map_err(first_of)?;
        let tuned = services.compile.tuning().knows_any(&fastest);
        let loaded = |gpu: &GpuPlan| services.compile.kernels.are_loaded(&requests_of(gpu));
        let ready = !tuned && loaded(&fastest);
        tracing::debug!(ready, lowered = ?began.elapsed(), "lowered for a request");
        let gpu = if ready {
            fastest
        } else {
            let mut all = self.lower(sizes, LaunchChoices::All).map_err(first_of)?;
            services.compile.tuning().apply(&mut all);
            if !loaded(&all) {
                prefer_loaded(&mut all, |request| services.compile.kernels.is_loaded(request));
            }
            all
        };
        Specialization::selected(services, gpu, &self.weights, progress).map(Arc::new)
    }

    /// Keeps `gpu` as the specialization for `sizes`, with the memory and graph of one run.
    fn prepare_batches(
        &self,
        sizes: Sizes,
        gpu: GpuPlan,
        progress: CompileProgress<'_>,
    ) -> Result<Arc<Specialization>, DeviceError> {
        let services = &self.services;
        let specialization = Arc::new(Specialization::new(services, gpu, &self.weights, progress)?);
        // The first request finds memory and graph ready.
        let mut instance = specialization.take_instance(Priority::High)?;
        instance.prepare_graph(&specialization).map_err(|err| services.device.error(err))?;
        if self.weights.on_demand() {
            instance.prepare_parts(&specialization).map_err(|err| services.device.error(err))?;
        }
        specialization.return_instance(instance, Priority::High);
        self.keep(sizes, specialization.clone());
        Ok(specialization)
    }

    /// Keeps `specialization` for later requests. Those that were not used for long are dropped,
    /// and before them the memory that they keep.
    fn keep(&self, sizes: Sizes, specialization: Arc<Specialization>) {
        let services = &self.services;
        let owner: std::sync::Weak<Specialization> = Arc::downgrade(&specialization);
        services.memory.spares.register(owner);
        let used = specialization.kernels.iter();
        self.keep_kernels(
            used.flat_map(|step| [step.real_time.kernel.clone(), step.best_effort.kernel.clone()]),
        );
        let mut plans = self.plans();
        plans.push((sizes, specialization));
        let over = plans.len().saturating_sub(services.device.options().max_specializations.max(1));
        let dropped: Vec<_> = plans.drain(..over).collect();
        let mut kept: u64 = 0;
        let mut beyond = |plan: &Specialization| {
            kept += plan.spare_bytes();
            kept > MAX_SPARE_BYTES
        };
        let plain = plans.iter().rev().map(|(_, plan)| plan).filter(|plan| !plan.is_reserved());
        let trimmed: Vec<_> = plain.filter(|plan| beyond(plan)).cloned().collect();
        // Requests look for their specialization under this lock: graphs are destroyed without it.
        drop(plans);
        for plan in &trimmed {
            plan.drop_spares();
        }
        drop(dropped);
    }

    pub(crate) fn keep_kernels(&self, used: impl Iterator<Item = Arc<LoadedKernel>>) {
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        kernels.extend(used.map(|kernel| (Arc::as_ptr(&kernel) as usize, kernel)));
    }

    /// Whether a request of these sizes finds its specialization.
    fn is_prepared(&self, sizes: &Sizes) -> bool {
        if self.plans().iter().rev().any(|(known, _)| known == sizes) {
            return true;
        }
        let Some(batch) =
            leading_symbol(&self.plan).filter(|_| self.staged.load(Ordering::Relaxed))
        else {
            return false;
        };
        let rows = sizes.iter().find(|(name, _)| name == batch).map_or(0, |(_, rows)| *rows);
        let others: Sizes = sizes.iter().filter(|(name, _)| name != batch).cloned().collect();
        self.prepared_batches(&others).last().is_some_and(|largest| *largest >= rows)
    }
}

impl Program for CudaProgram {
    fn plan(&self) -> &Arc<LaunchPlan> {
        &self.shared.plan
    }

    fn resident(&self) -> Bytes {
        let weights = self.shared.weights.resident_bytes();
        let runs: u64 = self.shared.plans().iter().map(|(_, plan)| plan.spare_bytes()).sum();
        Bytes(weights + runs + self.shared.pool_bytes())
    }

    fn residency(&self) -> Option<Arc<dyn Residency>> {
        let weights = &self.shared.weights;
        weights
            .on_demand()
            .then(|| Arc::new(ProgramResidency(weights.clone())) as Arc<dyn Residency>)
    }

    fn prepare(&self, inputs: Vec<Tensor>) -> Result<Box<dyn Task>, DeviceError> {
        self.prepare_with_notice(inputs, &mut || {})
    }

    fn prepare_with_notice(
        &self,
        inputs: Vec<Tensor>,
        notify: &mut dyn FnMut(),
    ) -> Result<Box<dyn Task>, DeviceError> {
        let shared = &self.shared;
        shared.services.device.check_healthy()?;
        check_inputs(&shared.plan, &inputs)?;
        let specialization = shared.specialization(sizes_of(&shared.plan, &inputs), &|_, _| {})?;
        let raw = inputs.iter().map(raw_bytes).collect::<Result<Vec<_>, _>>()?;
        Ok(Box::new(CudaTask::new(specialization, &raw, notify)?))
    }

    fn recorded_steps(&self, shapes: &[Vec<usize>]) -> Vec<RecordedStep> {
        let sizes = sizes_of_shapes(&self.shared.plan, shapes.iter().map(Vec::as_slice));
        let Some(specialization) = self.shared.known(&sizes) else { return Vec::new() };
        let facts = |step: &GpuStep| RecordedStep {
            work: Some(StepWork { flops: step.flops, bytes: step.bytes }),
            ..RecordedStep::named(&step.name, step.op.clone())
        };
        specialization.gpu.steps.iter().map(facts).collect()
    }

    /// Of the sizes that were used last.
    fn tuning(&self) -> Option<TuningProgress> {
        let specialization = self.shared.plans().last().map(|(_, plan)| plan.clone())?;
        let (steps, tuning) = (&specialization.gpu.steps, self.shared.services.compile.tuning());
        let is_tuned = |step: &&GpuStep| tuning.is_tuned(&specialization.gpu, step);
        let tuned = steps.iter().filter(is_tuned).count();
        Some(TuningProgress { tuned, steps: steps.len() })
    }

    fn is_prepared(&self, inputs: &[Tensor]) -> bool {
        let shared = &self.shared;
        // What is refused needs no preparation.
        check_inputs(&shared.plan, inputs).is_err()
            || shared.is_prepared(&sizes_of(&shared.plan, inputs))
    }

    fn copies_on_caller(&self, inputs: &[Tensor]) -> bool {
        let raw: Option<Vec<&bytes::Bytes>> = inputs.iter().map(Tensor::raw).collect();
        raw.is_none_or(|raw| !self.shared.services.memory.are_in_host_pool(&raw))
    }

    fn specialize(&self, shapes: &[Vec<usize>]) -> Result<(), DeviceError> {
        let shared = &self.shared;
        shared.services.device.check_healthy()?;
        let sizes = sizes_of_shapes(&shared.plan, shapes.iter().map(Vec::as_slice));
        shared.specialization(sizes, &|_, _| {}).map(drop)
    }

    fn stage(
        &self,
        inputs: Vec<Tensor>,
        copy: CopyTime,
        notify: &mut dyn FnMut(),
    ) -> Result<Box<dyn StagedInputs>, DeviceError> {
        self.shared.stage(inputs, copy, notify)
    }

    fn gather(&self, staged: Vec<Box<dyn StagedInputs>>) -> Result<Box<dyn Task>, DeviceError> {
        match self.shared.gather(staged)? {
            GatheredBatch::Task(task) => Ok(task),
            GatheredBatch::Inputs(inputs) => self.prepare(inputs),
        }
    }

    fn prepared_batches(&self, sizes: &[(String, usize)]) -> Option<Vec<usize>> {
        Some(self.shared.prepared_batches(sizes))
    }

    fn prepare_batches(
        &self,
        sizes: &[(String, usize)],
        batches: &[usize],
    ) -> Result<(), DeviceError> {
        self.shared.make_batches_ready(sizes, batches)
    }
}
