//! What we hold of a device, by kind, for those who ask where memory went.

use device::DeviceError;
use serde::Serialize;

use crate::device::CudaDevice;
use crate::driver::ResourceKind;

/// Threads of a multiprocessor at once, on every GPU that the kernels run on and has room for the most.
const THREADS_OF_MULTIPROCESSOR: u64 = 2_048;

/// What is held of a GPU. All of it goes when models are unloaded, but for what is kept to be used again and what the driver
/// itself keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryReport {
    /// Weights on the device or arriving.
    pub weights_bytes: u64,
    /// Memory kept for weights, and empty.
    pub weights_spare_bytes: u64,
    /// Pieces of device memory under weights, kept ones included.
    pub pieces: u64,
    /// Their bytes.
    pub pieces_bytes: u64,
    /// Ranges of addresses that weights have; memory is only behind some.
    pub ranges: u64,
    /// Bytes of these addresses.
    pub ranges_bytes: u64,
    /// Runs that have memory, under way or kept.
    pub instances: u64,
    /// Activations, inputs and outputs of these.
    pub instances_bytes: u64,
    /// Places where inputs wait for their batch.
    pub input_pools: u64,
    /// Device memory of these.
    pub input_pools_bytes: u64,
    /// Buffers from the driver's pool, those of runs and inputs included.
    pub buffers: u64,
    /// Their bytes.
    pub buffers_bytes: u64,
    /// Buffers outside of the pool.
    pub fixed_buffers_bytes: u64,
    /// What the driver's pool has handed out, as it counts.
    pub pool_used_bytes: u64,
    /// What it has of the device.
    pub pool_reserved_bytes: u64,
    /// Compiled kernels on the device.
    pub modules: u64,
    /// Bytes of the images they were loaded from.
    pub modules_bytes: u64,
    /// Executable graphs.
    pub graphs: u64,
    /// Memory that the driver needs for what threads spill, by the kernel that spills most of all that were ever loaded: an
    /// estimate, since it does not tell. It keeps that room.
    pub local_bytes: u64,
    /// Pinned host memory in buffers of their own.
    pub pinned_bytes: u64,
    /// Pinned host memory that smaller buffers are cut from; kept.
    pub pinned_slabs_bytes: u64,
    /// Used on the GPU by everybody, as its driver counts.
    pub driver_used_bytes: Option<u64>,
    /// The same as NVML counts.
    pub nvml_used_bytes: Option<u64>,
}

impl CudaDevice {
    /// What is held now.
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

    /// Gives back to the driver what is kept for later runs and is not in use.
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
