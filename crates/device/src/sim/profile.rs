//! What a simulated GPU and its models cost, as data.

use base::{Bytes, Nanos};
use serde::{Deserialize, Serialize};

use crate::PreemptionLevel;

/// A GPU in numbers. Times are nanoseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuProfile {
    /// What it resembles.
    pub name: String,
    /// Multiprocessors (compute units).
    pub sms: u32,
    /// How finely a kernel can be made to leave.
    pub level: u8,
    /// Whether running kernels can be killed from outside.
    pub kills: bool,
    /// From the enqueueing of a segment to its first block on an idle GPU.
    pub launch_ns: u64,
    /// Between two kernels of one stream.
    pub gap_ns: u64,
    /// Least and most it takes the dispatcher to turn from one busy stream to another.
    #[serde(default)]
    pub switch_ns: [u64; 2],
    /// From the word to leave to the moment the blocks are gone, for kernels left inside a tile.
    pub preempt_ns: u64,
    /// A block of a kernel that can be left inside is a loop over tiles of about this length; those it has
    /// finished stay finished.
    pub tile_ns: u64,
    /// Kernels of one stream that the hardware holds.
    pub queue_capacity: usize,
    /// For a queued kernel to be fetched and to find that it is not wanted.
    pub evict_ns: u64,
    /// To empty the host's queue of one stream.
    pub host_reset_ns: u64,
    /// To kill what runs.
    pub kill_ns: u64,
    /// For the device to be of use again after a reset.
    pub reset_ns: u64,
    /// Fixed part of a copy.
    pub copy_ns: u64,
    /// Bytes copied per microsecond.
    pub copy_bytes_per_us: u64,
    /// Memory for weights.
    pub memory_bytes: u64,
}

impl GpuProfile {
    /// How finely a kernel can be made to leave.
    pub fn preemption(&self) -> PreemptionLevel {
        match self.level {
            0 => PreemptionLevel::None,
            1 => PreemptionLevel::BetweenLaunches,
            2 => PreemptionLevel::TileBoundaries,
            _ => PreemptionLevel::InsideTile,
        }
    }

    /// Tiles that a block of `kernel` loops over: what stays finished when it is left inside.
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

    /// Time a copy of `bytes` takes.
    pub fn copy_time(&self, bytes: u64) -> Nanos {
        let moving = bytes.saturating_mul(1_000) / self.copy_bytes_per_us.max(1);
        Nanos(self.copy_ns) + Nanos(moving)
    }
}

/// One kernel of a model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct KernelProfile {
    /// Blocks.
    pub blocks: u32,
    /// Time of one block.
    pub block_ns: u64,
    /// Blocks that fit on one multiprocessor; 1 to 10.
    pub occupancy: u32,
    /// Share of the memory bandwidth it uses when it runs alone, 0 to 1.
    pub memory_share: f32,
    /// Whether blocks may run again without harm.
    pub idempotent: bool,
}

impl KernelProfile {
    /// Multiprocessors that all blocks at once would fill; more than there are for several waves.
    pub fn sms(&self) -> u32 {
        self.blocks.div_ceil(self.occupancy.max(1))
    }

    /// Time on `sms` multiprocessors of its own.
    pub fn time_on(&self, sms: u32) -> Nanos {
        let at_once = u64::from(sms.max(1)) * u64::from(self.occupancy.max(1));
        Nanos(u64::from(self.blocks).div_ceil(at_once) * self.block_ns)
    }
}

/// A model as a list of kernels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelProfile {
    /// Its name.
    pub name: String,
    /// What one request runs, in order.
    pub kernels: Vec<KernelProfile>,
    /// Bytes a request brings.
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
