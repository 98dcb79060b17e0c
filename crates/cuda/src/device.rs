//! A GPU as a [`Device`].

use std::path::PathBuf;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use base::Bytes;
use device::residency::MemoryUse;
use device::{
    CompletionSink, Device, DeviceError, DeviceInfo, DeviceReadings, InjectedFault, KernelCompiler,
    MachineLimits, PreemptionLevel, Program, Queue, QueueCommand, QueueOptions,
};
use model::LaunchPlan;
use model::gpu::{GpuTarget, Precision};

use crate::compile::CompileService;
use crate::compile::kernel_cache::{CompileProgress, KernelCache, LoadedKernel};
use crate::compile::kernel_sources::KernelSources;
use crate::compile::kernel_text::architecture;
use crate::compile::tuning::{self, Tuning};
use crate::device_context::DeviceContext;
use crate::driver::nvml::{Health, Nvml};
use crate::driver::xid::XidWatch;
use crate::driver::{Context, DriverFacts, Priority, Stream, slow_calls};
use crate::error::{CudaError, OpenError};
use crate::fault_injection;
use crate::measure::timeline::Timeline;
use crate::memory::MemoryServices;
use crate::memory::input_copier::InputCopier;
use crate::memory::weights::WeightLoader;
use crate::options::CudaOptions;
use crate::preempt::PreemptionServices;
use crate::preempt::driver_backoff::DriverBackoff;
use crate::preempt::epoch_counters::EpochCounters;
use crate::preempt::rt_activity::RtActivity;
use crate::program::CudaProgram;
use crate::program::graph_recorder::GraphRecorder;
use crate::program::lowering::unsupported_steps;
use crate::queue::{BestEffortQueue, Dispatcher, RealTimeQueue};
use crate::services::DeviceServices;

/// The lowest compute capability with asynchronous copies to shared memory, which the kernels use.
const CAPABILITY_NEEDED: u32 = 80;

/// Readings of NVML are used for this long.
const READINGS_INTERVAL: Duration = Duration::from_secs(1);

/// One GPU.
pub struct CudaDevice {
    services: DeviceServices,
    /// Kernels of injected faults, which may still run.
    injected: Mutex<Vec<Arc<LoadedKernel>>>,
    dispatcher: Dispatcher,
    /// RT runs, while `atoll bench` records them.
    timeline: Arc<Timeline>,
    nvml: OnceLock<Result<Nvml, String>>,
    /// Reports errors of the hardware that no call returns.
    _xids: Option<XidWatch>,
    /// The last readings: NVML takes milliseconds, and every viewer asks for them.
    readings: Mutex<Option<(Instant, DeviceReadings)>>,
}

impl CudaDevice {
    /// Opens the GPU `ordinal`; `compiler` makes its kernels.
    pub fn open(
        ordinal: usize,
        options: CudaOptions,
        compiler: Arc<dyn KernelCompiler>,
    ) -> Result<CudaDevice, OpenError> {
        let context = Context::open(ordinal)?;
        let memory = context.free_memory()?;
        CudaDevice::open_on(context, format!("cuda:{ordinal}"), memory, options, compiler)
    }

    /// Opens the GPU `ordinal` as several devices, each with its own SMs, equally many, and an
    /// equal share of the memory that is free now.
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
        let architecture = architecture(facts.capability);
        let sources = KernelSources::open(&options, architecture, compiler.headers())?;
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
            rounding: options.precision.rounding(),
        };
        slow_calls::report_from(options.slow_call);
        let partition = context.partition(options.partition_multiprocessors)?;
        let recorder = GraphRecorder::new(&context, partition)?;
        let memory_stream = Arc::new(Stream::new(&context, Priority::Low)?);
        let (rt_activity, driver_backoff) =
            (Arc::<RtActivity>::default(), Arc::<DriverBackoff>::default());
        let weights =
            Arc::new(WeightLoader::start(&memory_stream, &rt_activity, &driver_backoff, &options)?);
        let kernels = KernelCache::new(context.clone(), sources, rt_activity.clone());
        let copier = InputCopier::new(&kernels, weights.loads(), options.weights_on_demand);
        let copier = Arc::new(copier.map_err(|err| OpenError::NoCompiler(err.to_string()))?);
        let high = || Stream::new(&context, Priority::High).map(Arc::new);
        let epoch_counters = EpochCounters::new(high()?, options.polling.pause.is_zero())?;
        let input_stream = high()?;
        let services = DeviceServices {
            recorder: Arc::new(recorder),
            preemption: Arc::new(PreemptionServices {
                epoch_counters: Arc::new(epoch_counters),
                driver_backoff,
                rt_activity,
                best_effort_runs: AtomicUsize::new(0),
            }),
            memory: Arc::new(MemoryServices::new(memory_stream, input_stream, copier, weights)),
            compile: Arc::new(CompileService::new(compiler, kernels)),
            device: Arc::new(DeviceContext { context, info, target, options }),
        };
        let device = CudaDevice {
            _xids: watch_xids(&services.device.context),
            services,
            injected: Mutex::default(),
            dispatcher: Dispatcher::default(),
            timeline: Arc::default(),
            nvml: OnceLock::new(),
            readings: Mutex::default(),
        };
        if let Some(path) = device.tuning_path() {
            device.services.compile.replace_tuning(Tuning::read(&path));
        }
        Ok(device)
    }

    pub(crate) fn services(&self) -> &DeviceServices {
        &self.services
    }

    /// The target that plans are compiled for.
    pub fn target(&self) -> GpuTarget {
        self.services.device.target
    }

    /// The GPU's product name.
    pub fn gpu_name(&self) -> &str {
        &self.services.device.context.facts().name
    }

    /// The driver's CUDA version, 13000 for 13.0, and the compiler's, (13, 0).
    pub fn versions(&self) -> (i32, (i32, i32)) {
        (
            self.services.device.context.facts().driver_version,
            self.services.compile.kernels.compiler_version(),
        )
    }

    /// Loads as [`Device::load`] does and reports how many kernels are compiled.
    pub fn load_with(
        &self,
        plan: Arc<LaunchPlan>,
        progress: CompileProgress<'_>,
    ) -> Result<Arc<dyn Program>, DeviceError> {
        Ok(Arc::new(CudaProgram::load(self.services.clone(), plan, progress)?))
    }

    /// Records when whole RT runs begin and end from now on; each run costs two more events.
    pub fn begin_timeline(&self) -> Result<(), CudaError> {
        self.timeline.begin(&self.services.memory.memory_stream)
    }

    /// The runs since [`Self::begin_timeline`] in microseconds, without their copies.
    pub fn end_timeline(&self) -> Vec<(f64, f64)> {
        self.timeline.end()
    }

    /// State of the GPU, or why NVML does not report it.
    pub fn health(&self) -> Result<Health, String> {
        self.nvml().map(Nvml::health)
    }

    /// Memory in use on the GPU by all processes, as NVML counts.
    pub(crate) fn memory_used(&self) -> Option<u64> {
        self.nvml().ok().and_then(Nvml::memory_used)
    }

    fn nvml(&self) -> Result<&Nvml, String> {
        let open = || Nvml::open(&self.services.device.context.facts().pci_bus_id);
        self.nvml.get_or_init(open).as_ref().map_err(Clone::clone)
    }

    pub(crate) fn tuning_path(&self) -> Option<PathBuf> {
        let facts = self.services.device.context.facts();
        let precision = self.services.device.options.precision.name();
        let headers = self.services.compile.compiler.headers();
        let name = tuning::file_name(&facts.name, facts.driver_version, precision, headers);
        Some(self.services.device.options.cache_dir.as_ref()?.join(name))
    }

    /// The variants that plans made from now on use.
    pub fn tuning(&self) -> Tuning {
        self.services.compile.tuning().clone()
    }
}

/// Makes the device faulted when its hardware fails, if NVML is there to report it.
fn watch_xids(context: &Arc<Context>) -> Option<XidWatch> {
    let (pci_bus_id, context) = (context.facts().pci_bus_id.clone(), Arc::downgrade(context));
    XidWatch::start(&pci_bus_id, move |xid| {
        if let Some(context) = context.upgrade() {
            context.set_faulted(&format!("the GPU reported Xid {xid}"));
        }
    })
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
        &self.services.device.info
    }

    fn unsupported_steps(&self, plan: &LaunchPlan) -> Vec<DeviceError> {
        unsupported_steps(&self.services, plan)
    }

    fn fault(&self) -> Option<DeviceError> {
        // A query finds faults of kernels that nobody waits for; its error is not needed.
        let _ = self.services.memory.memory_stream.is_idle();
        self.services.device.check_healthy().err()
    }

    fn give_up(&self, reason: &str) {
        self.services.device.context().set_faulted(reason);
    }

    fn inject(&self, fault: InjectedFault) -> Result<(), DeviceError> {
        let kernel = fault_injection::inject(&self.services, fault)?;
        self.injected.lock().unwrap_or_else(PoisonError::into_inner).extend(kernel);
        Ok(())
    }

    fn load(&self, plan: Arc<LaunchPlan>) -> Result<Arc<dyn Program>, DeviceError> {
        self.load_with(plan, &|_, _| {})
    }

    fn host_pool(&self) -> Option<Arc<dyn model::HostPool>> {
        let pinned_host_pool = self.services.memory.pinned_host_pool()?;
        Some(pinned_host_pool.clone())
    }

    fn limits(&self) -> Option<MachineLimits> {
        MachineLimits::of_gpu(self.gpu_name())
    }

    fn readings(&self) -> Option<DeviceReadings> {
        let tuned_steps = Some(self.services.compile.tuning().choices.len() as u64);
        let mut last = self.readings.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = last.as_ref().is_some_and(|(at, _)| at.elapsed() < READINGS_INTERVAL);
        if !fresh {
            *last = Some((Instant::now(), self.nvml().map(Nvml::readings).unwrap_or_default()));
        }
        let readings = last.as_ref().map(|(_, readings)| readings.clone()).unwrap_or_default();
        Some(DeviceReadings { tuned_steps, ..readings })
    }

    fn memory_use(&self) -> Option<MemoryUse> {
        let system = self.memory_used().map(Bytes);
        Some(MemoryUse { system, ..self.services.memory.weights.memory_use() })
    }

    fn open_queue(
        &self,
        options: QueueOptions,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<Box<dyn Queue>, DeviceError> {
        self.services.device.check_healthy()?;
        Ok(match options.preemptible {
            true => {
                Box::new(BestEffortQueue::open(&self.services, &self.dispatcher, options, sink)?)
            }
            false => {
                Box::new(RealTimeQueue::open(&self.services, self.timeline.clone(), options, sink)?)
            }
        })
    }

    fn best_effort_sms(&self) -> Option<u32> {
        self.services.recorder.partition.as_ref().map(|partition| partition.multiprocessors())
    }

    fn command(&self, commands: &[(&dyn Queue, QueueCommand)]) {
        // A queue that leaves the partition is not preempted for a launch.
        if commands.iter().any(|(_, command)| *command != QueueCommand::Confine(false)) {
            self.services.preemption.driver_backoff.expect_launch();
        }
        let give = || commands.iter().for_each(|(queue, command)| queue.command(*command));
        self.services.preemption.epoch_counters.batch(give);
    }
}
