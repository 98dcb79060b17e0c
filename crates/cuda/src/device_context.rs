//! A GPU that was opened: its context, description and options, and how its errors are reported.

use std::sync::Arc;

use base::Bytes;
use device::{DeviceError, DeviceInfo};
use model::gpu::GpuTarget;

use crate::driver::Context;
use crate::error::CudaError;
use crate::options::CudaOptions;

/// An opened GPU. Everything that belongs to one device shares one of these.
pub(crate) struct DeviceContext {
    pub(crate) context: Arc<Context>,
    pub(crate) info: DeviceInfo,
    pub(crate) target: GpuTarget,
    pub(crate) options: CudaOptions,
}

impl DeviceContext {
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn target(&self) -> &GpuTarget {
        &self.target
    }

    pub(crate) fn options(&self) -> &CudaOptions {
        &self.options
    }

    /// Whether the blocks of a kernel may start before the previous kernel has ended.
    pub(crate) fn has_dependent_launches(&self) -> bool {
        self.target.capability >= 90
    }

    /// Fails once the device is faulted.
    pub(crate) fn check_healthy(&self) -> Result<(), DeviceError> {
        match self.context.fault() {
            None => Ok(()),
            Some(reason) => Err(DeviceError::Faulted {
                device: self.info.name.clone(),
                reason: reason.to_string(),
            }),
        }
    }

    /// `err` as an error of this device.
    pub(crate) fn error(&self, err: CudaError) -> DeviceError {
        let free = || self.context.free_memory().unwrap_or(Bytes(0)).0;
        err.into_device_error(&self.info.name, self.info.memory, free)
    }

    /// `err` as the failure of a step, where the driver refused a call. Errors that fault the
    /// device are reported as such.
    pub(crate) fn step_error(&self, step: &str, op: &str, err: CudaError) -> DeviceError {
        match err {
            CudaError::Call { .. } => DeviceError::Defect(format!("step '{step}' ({op}): {err}")),
            other => self.error(other),
        }
    }
}
