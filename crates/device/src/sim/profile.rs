//! Profiles of a simulated GPU and its models, as data.

use base::{Bytes, Nanos};
use serde::{Deserialize, Serialize};

use crate::profile::KernelProfile;
use crate::{DeviceCapabilities, PreemptionLevel};

/// A GPU. Times are in nanoseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuProfile {
    /// The name of the GPU that it resembles.
    pub name: String,
    /// SMs (compute units).
    pub sms: u32,
    /// How finely it preempts.
    pub level: u8,
    /// Whether running kernels can be killed from outside.
    pub kills: bool,
    /// From enqueueing a segment to its first block on an idle GPU.
    pub launch_ns: u64,
    /// Between two kernels of one stream.
    pub gap_ns: u64,
    /// Minimum and maximum time of the hardware dispatcher to switch between busy streams.
    #[serde(default)]
    pub switch_ns: [u64; 2],
    /// From preempting a kernel inside a tile to its last block's exit.
    #[serde(alias = "leave_ns")]
    pub preempt_ns: u64,
    /// A block of a kernel that is preempted inside tiles is a loop over tiles of about this
    /// length; finished tiles stay finished.
    pub tile_ns: u64,
    /// Kernels of one stream that the hardware queues.
    pub queue_capacity: usize,
    /// Time to fetch a queued kernel that exits at once.
    pub evict_ns: u64,
    /// Time to empty the host queue of one stream.
    pub host_reset_ns: u64,
    /// Time to kill a running kernel.
    pub kill_ns: u64,
    /// Time of a device reset.
    pub reset_ns: u64,
    /// Fixed part of a copy.
    pub copy_ns: u64,
    /// Bytes copied per microsecond.
    pub copy_bytes_per_us: u64,
    /// Memory for weights.
    pub memory_bytes: u64,
}

impl GpuProfile {
    /// How finely it preempts.
    pub fn preemption(&self) -> PreemptionLevel {
        match self.level {
            0 => PreemptionLevel::None,
            1 => PreemptionLevel::BetweenLaunches,
            2 => PreemptionLevel::TileBoundaries,
            _ => PreemptionLevel::InsideTile,
        }
    }

    /// What policies may require of the simulated GPU. `queue_reset` also holds for GPUs that
    /// cannot kill a running kernel: there it finishes first.
    pub fn capabilities(&self) -> DeviceCapabilities {
        DeviceCapabilities {
            block_budgets: true,
            queue_reset: true,
            input_copies: true,
            sm_partition: false,
        }
    }

    /// Tiles that a block of `kernel` loops over.
    pub fn tiles_per_block(&self, kernel: &KernelProfile) -> u32 {
        match self.preemption() {
            PreemptionLevel::InsideTile => kernel.block_ns.div_ceil(self.tile_ns.max(1)) as u32,
            _ => 1,
        }
    }

    /// Tiles of `kernel`.
    pub fn tiles(&self, kernel: &KernelProfile) -> u32 {
        kernel.blocks * self.tiles_per_block(kernel)
    }

    /// Time to copy `bytes`.
    pub fn copy_time(&self, bytes: u64) -> Nanos {
        let moving = bytes.saturating_mul(1_000) / self.copy_bytes_per_us.max(1);
        Nanos(self.copy_ns) + Nanos(moving)
    }
}

/// A model: a list of kernels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelProfile {
    /// Its name.
    pub name: String,
    /// Kernels of one request, in order.
    pub kernels: Vec<KernelProfile>,
    /// Bytes of a request's inputs.
    pub input_bytes: u64,
    /// Bytes of its weights.
    pub weight_bytes: u64,
}

impl ModelProfile {
    /// Latency of one request alone on `gpu`, from launch to its last block.
    pub fn alone(&self, gpu: &GpuProfile) -> Nanos {
        let kernels: u64 = self.kernels.iter().map(|kernel| kernel.time_on(gpu.sms).0).sum();
        let gaps = gpu.gap_ns * (self.kernels.len().saturating_sub(1)) as u64;
        Nanos(gpu.launch_ns + kernels + gaps)
    }

    /// Memory of its weights.
    pub fn weights(&self) -> Bytes {
        Bytes(self.weight_bytes)
    }
}

/// A GPU and the models measured on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProfileSet {
    /// The GPU.
    pub gpu: GpuProfile,
    /// The models.
    pub models: Vec<ModelProfile>,
}

impl ProfileSet {
    /// The model of that name.
    pub fn model(&self, name: &str) -> Option<&ModelProfile> {
        self.models.iter().find(|model| model.name == name)
    }
}
