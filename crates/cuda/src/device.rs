//! A GPU as a [`Device`].

use std::path::PathBuf;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use base::Bytes;
use device::residency::MemoryUse;
use device::{
    CompletionSink, Device, DeviceError, DeviceInfo, KernelCompiler, PreemptionLevel, Program,
    Queue, QueueCommand, QueueOptions,
};
use model::LaunchPlan;
use model::gpu::{GpuTarget, Precision};

use crate::compile::cubin_cache::CubinCache;
use crate::compile::kernel_cache::{CompileProgress, KernelCache};
use crate::compile::kernel_text::architecture;
use crate::compile::nvrtc::Nvrtc;
use crate::compile::toolkit::Toolkit;
use crate::compile::tuning::{self, Tuning};
use crate::driver::nvml::{Health, Nvml};
use crate::driver::{Context, DriverFacts, Priority, Stream};
use crate::error::OpenError;
use crate::hub::{CaptureStreams, Hub};
use crate::measure::profile::PlanProfile;
use crate::measure::timeline::Timeline;
use crate::memory::input_copier::InputCopier;
use crate::memory::weights::WeightLoader;
use crate::preempt::driver_backoff::DriverBackoff;
use crate::preempt::epoch_counters::EpochCounters;
use crate::preempt::rt_activity::RtActivity;
use crate::program::{CudaProgram, unsupported_steps};
use crate::queue::{BestEffortQueue, Dispatcher, Polling, RealTimeQueue};

/// The oldest GPU the kernels run on: they copy asynchronously.
const CAPABILITY_NEEDED: u32 = 80;

/// How a GPU is used.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// What activations and weights are stored in.
    pub precision: Precision,
    /// SmLocator compiled kernels and tuned choices are kept; nowhere when absent.
    pub cache_dir: Option<PathBuf>,
    /// A CUDA toolkit, tried before `CUDA_HOME`, `CUDA_PATH` and the usual places.
    pub toolkit: Option<PathBuf>,
    /// Queues the device says it runs side by side with profit.
    pub queues: usize,
    /// Best-effort steps that are launched as one; two such launches are in flight on a queue, so that the device has one to
    /// go on with while we hear of the other. Each step more adds the time of a kernel that leaves at once to how long
    /// leaving takes.
    pub chain_length: usize,
    /// Plans a program keeps, one for each set of sizes; the one used least recently goes.
    pub max_specializations: usize,
    /// Sizes to prepare for when a model is loaded, by symbol; others are guessed.
    pub sizes: Vec<(String, usize)>,
    /// Freed device memory kept for the next allocation.
    pub spare_bytes: u64,
    /// Weights come and go as they are told to ([`device::residency`]); otherwise they are brought when a model is loaded, and
    /// stay.
    pub weights_on_demand: bool,
    /// How much of weights is copied at once. Other copies get their turn in between.
    pub weights_chunk_bytes: u64,
    /// How queues wait for the device.
    pub polling: Polling,
    /// Multiprocessors of the partition to which best effort is held that goes on beside real time; none for 0.
    pub partition_multiprocessors: u32,
}

impl Default for CudaOptions {
    fn default() -> CudaOptions {
        CudaOptions {
            precision: Precision::default(),
            cache_dir: None,
            toolkit: None,
            queues: 6,
            chain_length: 16,
            max_specializations: 32,
            sizes: Vec::new(),
            spare_bytes: 1 << 30,
            weights_on_demand: false,
            weights_chunk_bytes: 2 << 20,
            polling: Polling::default(),
            partition_multiprocessors: 16,
        }
    }
}

/// One GPU.
pub struct CudaDevice {
    hub: Arc<Hub>,
    nvml: OnceLock<Result<Nvml, String>>,
}

impl CudaDevice {
    /// The GPU `ordinal`, whose kernels `compiler` makes.
    pub fn open(
        ordinal: usize,
        options: CudaOptions,
        compiler: Arc<dyn KernelCompiler>,
    ) -> Result<CudaDevice, OpenError> {
        let context = Context::open(ordinal)?;
        let memory = context.free_memory()?;
        CudaDevice::open_on(context, format!("cuda:{ordinal}"), memory, options, compiler)
    }

    /// The GPU `ordinal` as several devices, each with as many multiprocessors of its own and an equal share of the memory that
    /// is free now.
    pub fn open_parts(
        ordinal: usize,
        parts: usize,
        options: CudaOptions,
        compiler: Arc<dyn KernelCompiler>,
    ) -> Result<Vec<CudaDevice>, OpenError> {
        let contexts = Context::open_parts(ordinal, parts)?;
        let Some(first) = contexts.first() else { return Ok(Vec::new()) };
        let memory = Bytes(first.free_memory()?.0 / parts as u64);
        let open = |(index, context)| {
            let name = format!("cuda:{ordinal}/{parts}.{index}");
            CudaDevice::open_on(context, name, memory, options.clone(), compiler.clone())
        };
        contexts.into_iter().enumerate().map(open).collect()
    }

    fn open_on(
        context: Arc<Context>,
        name: String,
        memory: Bytes,
        options: CudaOptions,
        compiler: Arc<dyn KernelCompiler>,
    ) -> Result<CudaDevice, OpenError> {
        let facts = context.facts().clone();
        if facts.capability < CAPABILITY_NEEDED {
            let (capability, needed) = (facts.capability, CAPABILITY_NEEDED);
            return Err(OpenError::OldDevice { device: name, capability, needed });
        }
        context.keep_freed(options.spare_bytes)?;
        let toolkit = Toolkit::find(options.toolkit.as_deref())?;
        let nvrtc = Nvrtc::new(&toolkit, architecture(facts.capability), compiler.headers())
            .map_err(OpenError::NoCompiler)?;
        let cache = CubinCache::open(options.cache_dir.as_deref()).map_err(OpenError::Cache)?;
        let target = GpuTarget {
            capability: facts.capability,
            multiprocessors: facts.multiprocessors,
            precision: options.precision,
        };
        let info = DeviceInfo {
            name,
            description: describe(&facts, options.precision),
            preemption: PreemptionLevel::InsideTile,
            memory,
            queues: options.queues.max(1),
            rounding: match options.precision {
                Precision::F16 => 1.0 / 2048.0,
                Precision::BF16 => 1.0 / 256.0,
                Precision::F32 => 0.0,
            },
        };
        let partition = context.partition(options.partition_multiprocessors)?;
        let high = || Stream::new(&context, Priority::High);
        let capture_streams = CaptureStreams {
            high: high()?,
            low: Stream::new(&context, Priority::Low)?,
            partition: match &partition {
                Some(partition) => Some(Stream::in_partition(&context, partition)?),
                None => None,
            },
        };
        let memory_stream = Arc::new(Stream::new(&context, Priority::Low)?);
        let (rt_activity, driver_backoff) =
            (Arc::<RtActivity>::default(), Arc::<DriverBackoff>::default());
        let weights =
            Arc::new(WeightLoader::start(&memory_stream, &rt_activity, &driver_backoff, &options)?);
        let kernels = KernelCache::new(context.clone(), nvrtc, cache);
        let input_copier = InputCopier::new(&kernels, weights.loads(), options.weights_on_demand);
        let hub = Hub {
            kernels,
            input_copier: Arc::new(
                input_copier.map_err(|err| OpenError::NoCompiler(err.to_string()))?,
            ),
            epoch_counters: Arc::new(EpochCounters::new(
                Arc::new(high()?),
                options.polling.pause.is_zero(),
            )?),
            dispatcher: Dispatcher::default(),
            pinned_host_pool: OnceLock::new(),
            driver_backoff,
            best_effort: AtomicUsize::new(0),
            memory_stream: memory_stream.clone(),
            input_stream: Arc::new(high()?),
            partition,
            capture_streams: Mutex::new(capture_streams),
            timeline: Timeline::default(),
            tuning: RwLock::default(),
            weights,
            rt_activity,
            spares: Mutex::default(),
            context,
            info,
            target,
            options,
            compiler,
        };
        let device = CudaDevice { hub: Arc::new(hub), nvml: OnceLock::new() };
        if let Some(path) = device.tuning_path() {
            device.replace_tuning(Tuning::read(&path));
        }
        Ok(device)
    }

    pub(crate) fn hub(&self) -> &Arc<Hub> {
        &self.hub
    }

    /// What plans are made for.
    pub fn target(&self) -> GpuTarget {
        self.hub.target
    }

    /// The GPU's product name.
    pub fn gpu_name(&self) -> &str {
        &self.hub.context.facts().name
    }

    /// The driver's CUDA version, 13000 for 13.0, and the compiler's, (13, 0).
    pub fn versions(&self) -> (i32, (i32, i32)) {
        (self.hub.context.facts().driver_version, self.hub.kernels.compiler_version())
    }

    /// Loads as [`Device::load`] does and tells how many kernels are compiled.
    pub fn load_with(
        &self,
        plan: Arc<LaunchPlan>,
        progress: CompileProgress<'_>,
    ) -> Result<Arc<dyn Program>, DeviceError> {
        Ok(Arc::new(CudaProgram::load(self.hub.clone(), plan, progress)?))
    }

    /// How the GPU is doing; the reason when NVML does not tell.
    pub fn health(&self) -> Result<Health, String> {
        self.nvml().map(Nvml::health)
    }

    /// Memory used on the GPU by everybody, as NVML counts.
    pub(crate) fn memory_used(&self) -> Option<u64> {
        self.nvml().ok().and_then(Nvml::memory_used)
    }

    fn nvml(&self) -> Result<&Nvml, String> {
        let open = || Nvml::open(&self.hub.context.facts().pci_bus_id);
        self.nvml.get_or_init(open).as_ref().map_err(Clone::clone)
    }

    fn tuning_path(&self) -> Option<PathBuf> {
        let facts = self.hub.context.facts();
        let precision = match self.hub.options.precision {
            Precision::F16 => "f16",
            Precision::BF16 => "bf16",
            Precision::F32 => "f32",
        };
        let name = tuning::file_name(&facts.name, facts.driver_version, precision);
        Some(self.hub.options.cache_dir.as_ref()?.join(name))
    }

    fn replace_tuning(&self, tuning: Tuning) {
        *self.hub.tuning.write().unwrap_or_else(PoisonError::into_inner) = tuning;
    }

    /// The variants in use for plans made from now on.
    pub fn tuning(&self) -> Tuning {
        self.hub.tuning().clone()
    }

    /// Adds `tuning` to the variants in use, and keeps all of them on disk where there is a cache. Programs that are
    /// loaded already stay as they are.
    pub fn set_choices(&self, profile: &PlanProfile) -> Result<(), String> {
        let mut all = self.tuning();
        all.extend(profile.tuning(), &profile.pairs());
        if let Some(path) = self.tuning_path() {
            all.write(&path).map_err(|err| format!("{}: {err}", path.display()))?;
        }
        self.replace_tuning(all);
        Ok(())
    }
}

fn describe(facts: &DriverFacts, precision: Precision) -> String {
    format!(
        "{} with {} multiprocessors, compute capability {}.{}, CUDA {}.{}, {precision:?}",
        facts.name,
        facts.multiprocessors,
        facts.capability / 10,
        facts.capability % 10,
        facts.driver_version / 1000,
        facts.driver_version % 1000 / 10,
    )
}

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.hub.info
    }

    fn unsupported_steps(&self, plan: &LaunchPlan) -> Vec<DeviceError> {
        unsupported_steps(&self.hub, plan)
    }

    fn load(&self, plan: Arc<LaunchPlan>) -> Result<Arc<dyn Program>, DeviceError> {
        self.load_with(plan, &|_, _| {})
    }

    fn host_pool(&self) -> Option<Arc<dyn model::HostPool>> {
        let pinned_host_pool = self.hub.pinned_host_pool()?;
        Some(pinned_host_pool.clone())
    }

    fn memory_use(&self) -> Option<MemoryUse> {
        let system = self.memory_used().map(Bytes);
        Some(MemoryUse { system, ..self.hub.weights.memory_use() })
    }

    fn open_queue(
        &self,
        options: QueueOptions,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<Box<dyn Queue>, DeviceError> {
        self.hub.check_healthy()?;
        Ok(match options.preemptible {
            true => Box::new(BestEffortQueue::open(&self.hub, options, sink)?),
            false => Box::new(RealTimeQueue::open(self.hub.clone(), options, sink)?),
        })
    }

    fn best_effort_sms(&self) -> Option<u32> {
        self.hub.partition.as_ref().map(|partition| partition.multiprocessors())
    }

    fn command(&self, commands: &[(&dyn Queue, QueueCommand)]) {
        // Whoever is let out makes room for nobody.
        if commands.iter().any(|(_, command)| *command != QueueCommand::Confine(false)) {
            self.hub.driver_backoff.expect_launch();
        }
        let give = || commands.iter().for_each(|(queue, command)| queue.command(*command));
        self.hub.epoch_counters.batch(give);
    }
}
