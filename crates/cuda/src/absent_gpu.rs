//! A GPU that is not here: it says which steps one of its kind has no kernel for.

use std::sync::Arc;

use base::Bytes;
use device::{
    CompletionSink, Device, DeviceError, DeviceInfo, KernelCompiler, PreemptionLevel, Program,
    Queue, QueueOptions,
};
use model::LaunchPlan;
use model::gpu::GpuTarget;

use crate::program::lowering::{Sizes, steps_without_kernel};

/// A GPU of some kind, to cut plans for it. Nothing runs on it.
pub struct AbsentGpu {
    info: DeviceInfo,
    target: GpuTarget,
    compiler: Arc<dyn KernelCompiler>,
    sizes: Sizes,
}

impl AbsentGpu {
    /// A GPU of the kind `target`; symbols have the `sizes`, or sizes that a plan accepts.
    pub fn new(
        target: GpuTarget,
        compiler: Arc<dyn KernelCompiler>,
        sizes: Vec<(String, usize)>,
    ) -> AbsentGpu {
        let info = DeviceInfo {
            name: "absent".to_string(),
            description: "a GPU that is not here".to_string(),
            preemption: PreemptionLevel::InsideTile,
            memory: Bytes(0),
            queues: 1,
            rounding: target.precision.rounding(),
        };
        AbsentGpu { info, target, compiler, sizes }
    }

    fn absent(&self) -> DeviceError {
        DeviceError::Faulted {
            device: self.info.name.clone(),
            reason: "it is not here".to_string(),
        }
    }
}

impl Device for AbsentGpu {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn unsupported_steps(&self, plan: &LaunchPlan) -> Vec<DeviceError> {
        steps_without_kernel(&*self.compiler, &self.target, plan, &self.sizes)
    }

    fn load(&self, _: Arc<LaunchPlan>) -> Result<Arc<dyn Program>, DeviceError> {
        Err(self.absent())
    }

    fn open_queue(
        &self,
        _: QueueOptions,
        _: Arc<dyn CompletionSink>,
    ) -> Result<Box<dyn Queue>, DeviceError> {
        Err(self.absent())
    }
}
