//! The CPU as a [`Device`].

use std::sync::{Arc, OnceLock};

use base::Bytes;
use device::{
    CompletionSink, Device, DeviceError, DeviceInfo, MachineLimits, PreemptionLevel, Program,
    Queue, QueueOptions,
};
use model::{HostMemory, LaunchPlan};

use crate::buffer;
use crate::device_state::DeviceState;
use crate::machine_probe;
use crate::program::CpuProgram;
use crate::queue::CpuQueue;

/// How much of the machine the device may use.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuOptions {
    /// The budget of weights, inputs, outputs and temporaries.
    pub memory: &'static HostMemory,
    /// Threads per queue. 0 means the cores divided by the queues, and all cores for the queue of
    /// high priority, for which the other queues are preempted.
    pub threads: usize,
    /// Queues that run concurrently, in addition to one of high priority; 0 means one.
    pub queues: usize,
}

/// The CPU of this machine.
pub struct CpuDevice {
    info: DeviceInfo,
    threads: usize,
    max_threads: usize,
    state: Arc<DeviceState>,
    limits: OnceLock<MachineLimits>,
}

/// How often tasks were preempted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PreemptionCounts {
    /// At a yield point inside a step.
    pub inside_step: u64,
    /// Between two steps.
    pub between_steps: u64,
}

impl CpuDevice {
    /// The CPU with `options`.
    pub fn new(options: CpuOptions) -> CpuDevice {
        let available = std::thread::available_parallelism().map_or(1, usize::from);
        let queues = options.queues.max(1);
        let fair_share = (available / queues).max(1);
        let (threads, max_threads) = match options.threads {
            0 => (fair_share, available),
            threads => (threads, threads),
        };
        let info = DeviceInfo {
            name: "cpu".to_string(),
            description: format!(
                "{} with {available} cores, {queues} x {threads} threads",
                std::env::consts::ARCH
            ),
            preemption: PreemptionLevel::TileBoundaries,
            memory: physical_memory(),
            // One more than requested: the real-time queue, for which the others are preempted.
            queues: queues + 1,
            rounding: 0.0,
        };
        let state = Arc::new(DeviceState::new(options.memory));
        CpuDevice { info, threads, max_threads, state, limits: OnceLock::new() }
    }

    /// How often tasks were preempted so far.
    pub fn preemption_counts(&self) -> PreemptionCounts {
        PreemptionCounts {
            inside_step: self.state.preempted_inside_step(),
            between_steps: self.state.preempted_between_steps(),
        }
    }
}

/// The machine's memory as Linux reports it; unlimited on other systems.
fn physical_memory() -> Bytes {
    let total_kib = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("MemTotal:"))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    });
    Bytes(total_kib.map_or(u64::MAX, |kib| kib.saturating_mul(1024)))
}

impl Device for CpuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn unsupported_steps(&self, plan: &LaunchPlan) -> Vec<DeviceError> {
        buffer::with_memory(self.state.memory(), || crate::program::unsupported_steps(plan))
    }

    fn load(&self, plan: Arc<LaunchPlan>) -> Result<Arc<dyn Program>, DeviceError> {
        let memory = self.state.memory();
        let program = buffer::with_memory(memory, || CpuProgram::load(plan, memory))?;
        Ok(Arc::new(program))
    }

    /// Those of the threads of one queue, measured by the first call for which there is memory.
    fn limits(&self) -> Option<MachineLimits> {
        if let Some(limits) = self.limits.get() {
            return Some(*limits);
        }
        let measured = machine_probe::measure(self.threads, self.state.memory())?;
        Some(*self.limits.get_or_init(|| measured))
    }

    fn open_queue(
        &self,
        options: QueueOptions,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<Box<dyn Queue>, DeviceError> {
        let threads = if options.high_priority { self.max_threads } else { self.threads };
        CpuQueue::open(options, threads, sink, self.state.clone())
            .map(|queue| Box::new(queue) as Box<dyn Queue>)
            .map_err(|reason| DeviceError::Faulted { device: self.info.name.clone(), reason })
    }
}
