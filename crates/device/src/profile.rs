//! Profiles of kernels, as plain data.
//!
//! Policies that divide SMs between kernels decide by them, and the simulated GPU executes them.

use base::Nanos;
use serde::{Deserialize, Serialize};

/// One kernel of a model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct KernelProfile {
    /// Number of blocks.
    pub blocks: u32,
    /// Time of one block.
    pub block_ns: u64,
    /// Blocks that fit on one SM; 1 to 10.
    pub occupancy: u32,
    /// Share of the memory bandwidth it uses when it runs alone, 0 to 1.
    pub memory_share: f32,
    /// Whether blocks may run twice.
    pub idempotent: bool,
}

impl KernelProfile {
    /// SMs that all blocks at once would fill; more than there are if it runs in waves.
    pub fn sms(&self) -> u32 {
        self.blocks.div_ceil(self.occupancy.max(1))
    }

    /// Time on `sms` SMs of its own.
    pub fn time_on(&self, sms: u32) -> Nanos {
        let at_once = u64::from(sms.max(1)) * u64::from(self.occupancy.max(1));
        Nanos(u64::from(self.blocks).div_ceil(at_once) * self.block_ns)
    }
}
