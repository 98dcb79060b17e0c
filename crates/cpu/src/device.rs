//! The CPU as a [`Device`].

use std::sync::Arc;

use base::Bytes;
use device::{
    CompletionSink, Device, DeviceError, DeviceInfo, PreemptionLevel, Program, Queue, QueueOptions,
};
use model::LaunchPlan;

use crate::program::CpuProgram;
use crate::queue::CpuQueue;

/// How much of the machine the device may use.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuOptions {
    /// Threads a queue computes with; all cores divided by the queues when 0.
    pub threads: usize,
    /// Queues that run side by side; one when 0.
    pub queues: usize,
}

/// The CPU of this machine.
pub struct CpuDevice {
    info: DeviceInfo,
    threads: usize,
}

impl CpuDevice {
    /// The CPU with `options`.
    pub fn new(options: CpuOptions) -> CpuDevice {
        let available = std::thread::available_parallelism().map_or(1, usize::from);
        let queues = options.queues.max(1);
        let fair_share = (available / queues).max(1);
        let threads = if options.threads == 0 { fair_share } else { options.threads };
        let info = DeviceInfo {
            name: "cpu".to_string(),
            description: format!(
                "{} with {available} cores, {queues} x {threads} threads",
                std::env::consts::ARCH
            ),
            preemption: PreemptionLevel::BetweenLaunches,
            memory: physical_memory(),
            queues,
            rounding: 0.0,
        };
        CpuDevice { info, threads }
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
        CpuQueue::open(options, self.threads, sink)
            .map(|queue| Box::new(queue) as Box<dyn Queue>)
            .map_err(|reason| DeviceError::Faulted { device: self.info.name.clone(), reason })
    }
}
