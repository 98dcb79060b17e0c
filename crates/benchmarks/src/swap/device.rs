//! The device of `atoll bench swap`, which loads and evicts weights.

use std::sync::Arc;

use assembly::{DeviceArgs, Failure};
use cuda::CudaDevice;
use device::Device;
use device::paged::{PagedDevice, PagedDeviceOptions};

use super::args::SwapArgs;

/// A device that loads and evicts weights.
pub(crate) struct SwappingDevice {
    pub(crate) device: Arc<dyn Device>,
    gpu: Option<Arc<CudaDevice>>,
    link: f64,
}

impl SwappingDevice {
    pub(crate) fn open(args: &SwapArgs) -> Result<SwappingDevice, Failure> {
        let named = DeviceArgs { device: args.device.clone(), settings: args.settings.clone() };
        let link = args.link as f64 * 1e6;
        if args.device.starts_with("cuda") {
            let gpu = assembly::open_gpu_with(&named, |options| {
                options.weights_on_demand = true;
                options.weights_chunk_bytes = args.chunk_kib << 10;
            })?;
            let gpu = Arc::new(gpu);
            return Ok(SwappingDevice { device: gpu.clone(), gpu: Some(gpu), link });
        }
        let inner = assembly::open_device(&named)?;
        let options = PagedDeviceOptions {
            memory: inner.info().memory,
            bytes_per_second: args.link * 1_000_000,
            runnable_percent: 100,
            added: base::Bytes(0),
        };
        let device = Arc::new(PagedDevice::new(inner, options).map_err(Failure::failed)?);
        Ok(SwappingDevice { device, gpu: None, link })
    }

    /// What a GPU's memory is used for.
    pub(crate) fn memory_report(&self) -> Option<cuda::MemoryReport> {
        self.gpu.as_ref().map(|gpu| gpu.memory_report())
    }

    /// Frees cached memory that is not in use.
    pub(crate) fn trim(&self) -> Result<(), Failure> {
        self.gpu.as_ref().map_or(Ok(()), |gpu| gpu.trim().map_err(Failure::failed))
    }

    /// Speed of loading weights, in bytes per second.
    pub(crate) fn speed(&self) -> Result<f64, Failure> {
        match &self.gpu {
            Some(gpu) => gpu.copy_speed().map_err(Failure::failed),
            None => Ok(self.link),
        }
    }
}
