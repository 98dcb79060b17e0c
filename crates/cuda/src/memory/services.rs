//! The memory of one device, for everything that allocates or copies.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;

use super::block_pool::BlockPool;
use super::input_copier::InputCopier;
use super::pinned_host_pool::PinnedHostPool;
use super::spare_memory::SpareMemory;
use super::weights::WeightLoader;
use crate::driver::Stream;

/// Streams, pools and the loader of one device.
pub(crate) struct MemoryServices {
    /// Orders allocations, frees and uploads.
    pub(crate) memory_stream: Arc<Stream>,
    /// Copies inputs to the device before their batch runs.
    pub(crate) input_stream: Arc<Stream>,
    /// Pinned memory that request bodies are read into; made on first use.
    pinned_host_pool: OnceLock<Option<Arc<PinnedHostPool>>>,
    pub(crate) input_copier: Arc<InputCopier>,
    pub(crate) weights: Arc<WeightLoader>,
    pub(crate) spares: Arc<SpareMemory>,
    /// Memory of runs.
    pub(crate) blocks: Arc<BlockPool>,
}

impl MemoryServices {
    pub(crate) fn new(
        memory_stream: Arc<Stream>,
        input_stream: Arc<Stream>,
        input_copier: Arc<InputCopier>,
        weights: Arc<WeightLoader>,
    ) -> MemoryServices {
        let spares = Arc::new(SpareMemory::new(memory_stream.clone()));
        let blocks = Arc::new(BlockPool::new(memory_stream.clone()));
        let owner: std::sync::Weak<BlockPool> = Arc::downgrade(&blocks);
        spares.register(owner);
        let owner: std::sync::Weak<WeightLoader> = Arc::downgrade(&weights);
        spares.register(owner);
        let pinned_host_pool = OnceLock::new();
        MemoryServices {
            memory_stream,
            input_stream,
            pinned_host_pool,
            input_copier,
            weights,
            spares,
            blocks,
        }
    }

    /// The pinned host pool; `None` when the driver refused the memory.
    pub(crate) fn pinned_host_pool(&self) -> Option<&Arc<PinnedHostPool>> {
        let made = || match PinnedHostPool::new(self.memory_stream.context()) {
            Ok(pool) => Some(Arc::new(pool)),
            Err(err) => {
                tracing::warn!(%err, "pinned host pool not available");
                None
            }
        };
        self.pinned_host_pool.get_or_init(made).as_ref()
    }

    /// Whether all of `inputs` can be copied to the device from where they are: they are in the
    /// pinned host pool, so no copy to a staging buffer is needed.
    pub(crate) fn are_in_host_pool(&self, inputs: &[&Bytes]) -> bool {
        let Some(Some(pool)) = self.pinned_host_pool.get() else { return false };
        inputs.iter().all(|raw| pool.contains(raw) && self.input_copier.copies_in_place(raw))
    }
}
