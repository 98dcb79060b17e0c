//! What the parts of one device share.

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, Weak};
use std::time::Instant;

use base::Bytes;
use bytes::Bytes as RawBytes;
use device::{DeviceError, DeviceInfo, KernelCompiler};
use model::gpu::GpuTarget;

use crate::compile::kernel_cache::KernelCache;
use crate::compile::tuning::Tuning;
use crate::device::CudaOptions;
use crate::driver::{Context, Graph, Priority, SmPartition, Stream};
use crate::error::CudaError;
use crate::measure::timeline::Timeline;
use crate::memory::input_copier::InputCopier;
use crate::memory::pinned_host_pool::PinnedHostPool;
use crate::memory::weights::WeightLoader;
use crate::preempt::driver_backoff::DriverBackoff;
use crate::preempt::epoch_counters::EpochCounters;
use crate::preempt::rt_activity::RtActivity;
use crate::program::specialization::Specialization;
use crate::queue::Dispatcher;

/// SmLocator on the device a launch runs, and who goes first there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LaunchTarget {
    /// Anywhere, before others.
    High,
    /// Anywhere, behind others.
    Low,
    /// In the device's partition, behind others.
    Partition,
}

impl From<Priority> for LaunchTarget {
    fn from(priority: Priority) -> LaunchTarget {
        match priority {
            Priority::High => LaunchTarget::High,
            Priority::Low => LaunchTarget::Low,
        }
    }
}

/// The streams that graphs are recorded on, by [`LaunchTarget`]: kernels take priority and partition over from them.
pub(crate) struct CaptureStreams {
    pub(crate) high: Stream,
    pub(crate) low: Stream,
    pub(crate) partition: Option<Stream>,
}

/// A device's parts.
pub(crate) struct Hub {
    pub(crate) context: Arc<Context>,
    pub(crate) info: DeviceInfo,
    pub(crate) target: GpuTarget,
    pub(crate) options: CudaOptions,
    pub(crate) compiler: Arc<dyn KernelCompiler>,
    pub(crate) kernels: KernelCache,
    /// Orders to leave.
    pub(crate) epoch_counters: Arc<EpochCounters>,
    pub(crate) dispatcher: Dispatcher,
    pub(crate) driver_backoff: Arc<DriverBackoff>,
    /// Queues that run best-effort work.
    pub(crate) best_effort: AtomicUsize,
    /// Real time, for whoever makes calls that hold it up.
    pub(crate) rt_activity: Arc<RtActivity>,
    /// Orders allocations, frees and uploads.
    pub(crate) memory_stream: Arc<Stream>,
    /// Memory for inputs, once somebody asked for it.
    pub(crate) pinned_host_pool: OnceLock<Option<Arc<PinnedHostPool>>>,
    /// Brings inputs past weights that are on their way.
    pub(crate) input_copier: Arc<InputCopier>,
    /// Brings inputs to the device ahead of their batches.
    pub(crate) input_stream: Arc<Stream>,
    /// Multiprocessors that best effort can be held to.
    pub(crate) partition: Option<Arc<SmPartition>>,
    /// SmLocator graphs are recorded, one at a time.
    pub(crate) capture_streams: Mutex<CaptureStreams>,
    pub(crate) timeline: Timeline,
    pub(crate) tuning: RwLock<Tuning>,
    /// SmLocator weights are put.
    pub(crate) weights: Arc<WeightLoader>,
    /// Plans that may keep memory for their next run.
    pub(crate) spares: Mutex<Vec<Weak<Specialization>>>,
}

impl Hub {
    /// Whether inputs need not be copied to pinned memory first: they are in some that was lent.
    pub(crate) fn are_in_host_pool(&self, inputs: &[&RawBytes]) -> bool {
        let Some(Some(pinned_host_pool)) = self.pinned_host_pool.get() else { return false };
        inputs
            .iter()
            .all(|raw| pinned_host_pool.contains(raw) && self.input_copier.copies_in_place(raw))
    }

    /// The memory it lends; `None` when the driver has none.
    pub(crate) fn pinned_host_pool(&self) -> Option<&Arc<PinnedHostPool>> {
        let made = || match PinnedHostPool::new(&self.context) {
            Ok(pinned_host_pool) => Some(Arc::new(pinned_host_pool)),
            Err(err) => {
                tracing::warn!("inputs are copied once more on the host: {err}");
                None
            }
        };
        self.pinned_host_pool.get_or_init(made).as_ref()
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn target(&self) -> &GpuTarget {
        &self.target
    }

    /// Whether a kernel's blocks may start before the previous kernel has ended.
    pub(crate) fn has_dependent_launches(&self) -> bool {
        self.target.capability >= 90
    }

    pub(crate) fn options(&self) -> &CudaOptions {
        &self.options
    }

    pub(crate) fn kernels(&self) -> &KernelCache {
        &self.kernels
    }

    pub(crate) fn memory_stream(&self) -> &Arc<Stream> {
        &self.memory_stream
    }

    pub(crate) fn input_stream(&self) -> &Arc<Stream> {
        &self.input_stream
    }

    pub(crate) fn tuning(&self) -> RwLockReadGuard<'_, Tuning> {
        self.tuning.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn spares(&self) -> MutexGuard<'_, Vec<Weak<Specialization>>> {
        self.spares.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers that `specialization` may keep memory.
    pub(crate) fn register_spares(&self, specialization: &Arc<Specialization>) {
        let mut spares = self.spares();
        spares.retain(|plan| plan.strong_count() > 0);
        spares.push(Arc::downgrade(specialization));
    }

    /// Frees the memory that plans keep for their next runs; whether there was any.
    pub(crate) fn drop_spares(&self) -> bool {
        let plans: Vec<Arc<Specialization>> =
            self.spares().iter().filter_map(Weak::upgrade).collect();
        let dropped = plans.iter().filter(|plan| plan.drop_spares()).count();
        let freed = self.memory_stream.synchronize().and_then(|()| self.context.trim());
        dropped > 0 && freed.is_ok()
    }

    /// Refuses once the device is faulted.
    pub(crate) fn check_healthy(&self) -> Result<(), DeviceError> {
        match self.context.fault() {
            None => Ok(()),
            Some(reason) => Err(DeviceError::Faulted {
                device: self.info.name.clone(),
                reason: reason.to_string(),
            }),
        }
    }

    /// `err` to the rest of the system.
    pub(crate) fn error(&self, err: CudaError) -> DeviceError {
        let free = || self.context.free_memory().unwrap_or(Bytes(0)).0;
        err.into_device_error(&self.info.name, free)
    }

    /// `err` as the failure of a step: what the driver refused, not what broke the device.
    pub(crate) fn step_error(&self, step: &str, op: &str, err: CudaError) -> DeviceError {
        match err {
            CudaError::Call { .. } => DeviceError::StepFailed {
                step: step.to_string(),
                op: op.to_string(),
                reason: err.to_string(),
            },
            other => self.error(other),
        }
    }

    /// What `record` queues, as a graph for that target.
    pub(crate) fn capture(
        &self,
        target: LaunchTarget,
        record: impl FnOnce(&Stream) -> Result<(), CudaError>,
    ) -> Result<Graph, CudaError> {
        let began = Instant::now();
        let streams = self.capture_streams.lock().unwrap_or_else(PoisonError::into_inner);
        let stream = match target {
            LaunchTarget::High => &streams.high,
            LaunchTarget::Low => &streams.low,
            LaunchTarget::Partition => streams
                .partition
                .as_ref()
                .ok_or(CudaError::Misuse("the device has no partition"))?,
        };
        let graph = stream.capture(record);
        tracing::debug!(?target, took = ?began.elapsed(), "launches were recorded");
        graph
    }
}
