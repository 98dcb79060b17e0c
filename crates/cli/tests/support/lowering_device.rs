//! The CPU in place of a GPU: it accepts what our compiler has GPU kernels for, at the sizes of
//! each task, and computes it on the CPU.

use std::sync::Arc;

use base::Bytes;
use compiler::gpu::{GpuCompiler, check};
use cpu::CpuDevice;
use device::{
    CompletionSink, Device, DeviceError, DeviceInfo, KernelCompiler, Program, Queue, QueueOptions,
    Task,
};
use model::gpu::{GpuTarget, Precision};
use model::{Dim, LaunchPlan, Tensor};

const TARGET: GpuTarget =
    GpuTarget { capability: 90, multiprocessors: 132, precision: Precision::F32 };

/// A CPU that refuses what has no GPU kernel.
pub(crate) struct LoweringDevice {
    inner: Arc<CpuDevice>,
    compiler: Arc<GpuCompiler>,
}

impl LoweringDevice {
    pub(crate) fn open(inner: Arc<CpuDevice>) -> Arc<LoweringDevice> {
        let compiler = Arc::new(GpuCompiler::new(Some(Arc::new(crate::CpuEvaluator))));
        Arc::new(LoweringDevice { inner, compiler })
    }
}

impl Device for LoweringDevice {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn unsupported_steps(&self, plan: &LaunchPlan) -> Vec<DeviceError> {
        cuda::steps_without_kernel(&*self.compiler, &TARGET, plan, &[])
    }

    fn load(&self, plan: Arc<LaunchPlan>) -> Result<Arc<dyn Program>, DeviceError> {
        if let Some(err) = self.unsupported_steps(&plan).into_iter().next() {
            return Err(err);
        }
        let (inner, compiler) = (self.inner.load(plan)?, self.compiler.clone());
        Ok(Arc::new(LoweringProgram { inner, compiler }))
    }

    fn open_queue(
        &self,
        options: QueueOptions,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<Box<dyn Queue>, DeviceError> {
        self.inner.open_queue(options, sink)
    }
}

/// A program that is lowered for the sizes of every task.
struct LoweringProgram {
    inner: Arc<dyn Program>,
    compiler: Arc<GpuCompiler>,
}

impl Program for LoweringProgram {
    fn plan(&self) -> &Arc<LaunchPlan> {
        self.inner.plan()
    }

    fn resident(&self) -> Bytes {
        self.inner.resident()
    }

    fn prepare(&self, inputs: Vec<Tensor>) -> Result<Box<dyn Task>, DeviceError> {
        let plan = self.plan();
        let mut sizes: Vec<(String, usize)> = Vec::new();
        for (id, tensor) in plan.inputs.iter().zip(&inputs) {
            for (dim, size) in plan.value(*id).shape.iter().flatten().zip(tensor.shape()) {
                if let Dim::Symbol(symbol) = dim
                    && !sizes.iter().any(|(known, _)| known == symbol)
                {
                    sizes.push((symbol.clone(), *size));
                }
            }
        }
        let unknown = || DeviceError::BadPlan("no reason".to_string());
        let refused = |all: Vec<DeviceError>| all.into_iter().next().unwrap_or_else(unknown);
        let gpu = self.compiler.lower(plan, &sizes, &TARGET).map_err(refused)?;
        assert_eq!(check::faults(&gpu), Vec::<String>::new(), "a plan with defects");
        self.inner.prepare(inputs)
    }
}
