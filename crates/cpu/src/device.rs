//! The CPU as a [`Device`].

use std::sync::Arc;
use std::sync::atomic::Ordering;

use base::Bytes;
use device::{
    CompletionSink, Device, DeviceError, DeviceInfo, PreemptionLevel, Program, Queue, QueueOptions,
};
use model::LaunchPlan;

use crate::program::CpuProgram;
use crate::queue::CpuQueue;
use crate::standing::Shared;

/// How much of the machine the device may use.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuOptions {
    /// Threads a queue computes with. When 0, all cores divided by the queues; all of them for a queue of high priority, which
    /// the others leave for.
    pub threads: usize,
    /// Queues that run side by side, beside one of high priority; one when 0.
    pub queues: usize,
}

/// The CPU of this machine.
pub struct CpuDevice {
    info: DeviceInfo,
    threads: usize,
    most_threads: usize,
    shared: Arc<Shared>,
}

/// How often tasks left when they were told to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leaves {
    /// In the middle of a step.
    pub inside: u64,
    /// Between two steps.
    pub between: u64,
}

impl CpuDevice {
    /// The CPU with `options`.
    pub fn new(options: CpuOptions) -> CpuDevice {
        let available = std::thread::available_parallelism().map_or(1, usize::from);
        let queues = options.queues.max(1);
        let fair_share = (available / queues).max(1);
        let (threads, most_threads) = match options.threads {
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
            // One more than asked for: real time's own, which takes the place of the others.
            queues: queues + 1,
            rounding: 0.0,
        };
        CpuDevice { info, threads, most_threads, shared: Arc::default() }
    }

    /// How often tasks have left so far.
    pub fn leaves(&self) -> Leaves {
        Leaves {
            inside: self.shared.left_inside.load(Ordering::Relaxed),
            between: self.shared.left_between.load(Ordering::Relaxed),
        }
    }
}

/// The machine's memory as Linux tells it; unlimited where nobody does.
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
        crate::program::unsupported_steps(plan)
    }

    fn load(&self, plan: Arc<LaunchPlan>) -> Result<Arc<dyn Program>, DeviceError> {
        Ok(Arc::new(CpuProgram::load(plan)?))
    }

    fn open_queue(
        &self,
        options: QueueOptions,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<Box<dyn Queue>, DeviceError> {
        let threads = if options.high_priority { self.most_threads } else { self.threads };
        CpuQueue::open(options, threads, sink, self.shared.clone())
            .map(|queue| Box::new(queue) as Box<dyn Queue>)
            .map_err(|reason| DeviceError::Faulted { device: self.info.name.clone(), reason })
    }
}
