//! What the process holds on a device, by kind.

use device::DeviceError;
use serde::Serialize;

use crate::device::CudaDevice;
use crate::driver::ResourceKind;

/// Resident threads of an SM, on every supported GPU with the largest number of them.
const THREADS_OF_MULTIPROCESSOR: u64 = 2_048;

/// Resources held on a GPU. All of them are freed when models are unloaded, except for what is kept
/// for reuse and what the driver itself keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryReport {
    /// Weights that are resident or loading.
    pub weights_bytes: u64,
    /// Memory kept for weights, and unused.
    pub weights_spare_bytes: u64,
    /// Physical allocations for weights, kept ones included.
    pub pieces: u64,
    /// Their bytes.
    pub pieces_bytes: u64,
    /// Address ranges of weights; only some have memory mapped.
    pub ranges: u64,
    /// Bytes of these ranges.
    pub ranges_bytes: u64,
    /// Instances (memory of one run), in use or kept.
    pub instances: u64,
    /// Activations, inputs and outputs of these.
    pub instances_bytes: u64,
    /// Input pools.
    pub input_pools: u64,
    /// Device memory of these.
    pub input_pools_bytes: u64,
    /// Buffers from the driver's memory pool, those of instances and input pools included.
    pub buffers: u64,
    /// Their bytes.
    pub buffers_bytes: u64,
    /// Buffers outside of the memory pool.
    pub fixed_buffers_bytes: u64,
    /// Bytes that the driver's memory pool has handed out.
    pub pool_used_bytes: u64,
    /// Bytes that it has reserved on the device.
    pub pool_reserved_bytes: u64,
    /// Compiled kernels on the device.
    pub modules: u64,
    /// Bytes of the images they were loaded from.
    pub modules_bytes: u64,
    /// Executable graphs.
    pub graphs: u64,
    /// Estimate of what the driver reserves for spilled registers, from the kernel that spills most
    /// among all ever loaded. The driver does not report it and never frees it.
    pub local_bytes: u64,
    /// Pinned host memory in separate allocations.
    pub pinned_bytes: u64,
    /// Pinned host memory that small buffers are cut from; kept.
    pub pinned_slabs_bytes: u64,
    /// Memory in use on the GPU by all processes, as the driver counts.
    pub driver_used_bytes: Option<u64>,
    /// The same as NVML counts.
    pub nvml_used_bytes: Option<u64>,
}

impl CudaDevice {
    /// The resources held now.
    pub fn memory_report(&self) -> MemoryReport {
        let services = self.services();
        let (context, weights) = (services.device.context(), services.memory.weights.memory_use());
        let resource_counts = context.resource_counts();
        let (pieces, pieces_bytes) = resource_counts.read(ResourceKind::PhysicalMemory);
        let (ranges, ranges_bytes) = resource_counts.read(ResourceKind::Range);
        let (instances, instances_bytes) = resource_counts.read(ResourceKind::Instance);
        let (input_pools, input_pools_bytes) = resource_counts.read(ResourceKind::InputPool);
        let (buffers, buffers_bytes) = resource_counts.read(ResourceKind::Buffer);
        let (modules, modules_bytes) = resource_counts.read(ResourceKind::Module);
        let (pool_used_bytes, pool_reserved_bytes) = context.pool_bytes().unwrap_or_default();
        let threads =
            THREADS_OF_MULTIPROCESSOR * u64::from(services.device.target().multiprocessors);
        MemoryReport {
            weights_bytes: weights.weights.0,
            weights_spare_bytes: weights.spare.0,
            pieces,
            pieces_bytes,
            ranges,
            ranges_bytes,
            instances,
            instances_bytes,
            input_pools,
            input_pools_bytes,
            buffers,
            buffers_bytes,
            fixed_buffers_bytes: resource_counts.read(ResourceKind::FixedBuffer).1,
            pool_used_bytes,
            pool_reserved_bytes,
            modules,
            modules_bytes,
            graphs: resource_counts.read(ResourceKind::Graph).0,
            local_bytes: u64::from(resource_counts.local_bytes()) * threads,
            pinned_bytes: resource_counts.read(ResourceKind::Pinned).1,
            pinned_slabs_bytes: resource_counts.read(ResourceKind::PinnedSlab).1,
            driver_used_bytes: context.used_memory().ok().map(|bytes| bytes.0),
            nvml_used_bytes: self.memory_used(),
        }
    }

    /// Returns memory that is kept for later runs to the driver.
    pub fn trim(&self) -> Result<(), DeviceError> {
        let services = self.services();
        services.device.check_healthy()?;
        services.memory.spares.release();
        let trimmed = services
            .memory
            .memory_stream
            .synchronize()
            .and_then(|()| services.device.context().trim());
        trimmed.map_err(|err| services.device.error(err))
    }
}
