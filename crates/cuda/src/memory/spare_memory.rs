//! Memory that specializations keep for their next runs, freed when an allocation fails.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::driver::Stream;

/// Keeps device memory for later runs.
pub(crate) trait SpareOwner: Send + Sync {
    /// Drops the memory it keeps; false when it kept none.
    fn drop_spares(&self) -> bool;
}

/// Everything on one device that keeps memory for later runs.
pub(crate) struct SpareMemory {
    memory_stream: Arc<Stream>,
    owners: Mutex<Vec<Weak<dyn SpareOwner>>>,
}

impl SpareMemory {
    pub(crate) fn new(memory_stream: Arc<Stream>) -> SpareMemory {
        SpareMemory { memory_stream, owners: Mutex::default() }
    }

    fn owners(&self) -> MutexGuard<'_, Vec<Weak<dyn SpareOwner>>> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds `owner` to those asked to drop their memory.
    pub(crate) fn register(&self, owner: Weak<dyn SpareOwner>) {
        let mut owners = self.owners();
        owners.retain(|owner| owner.strong_count() > 0);
        owners.push(owner);
    }

    /// Frees all spare memory; false when there was none.
    pub(crate) fn release(&self) -> bool {
        let owners: Vec<_> = self.owners().iter().filter_map(Weak::upgrade).collect();
        let dropped = owners.iter().filter(|owner| owner.drop_spares()).count();
        let stream = &self.memory_stream;
        let freed = stream.synchronize().and_then(|()| stream.context().trim());
        dropped > 0 && freed.is_ok()
    }
}
