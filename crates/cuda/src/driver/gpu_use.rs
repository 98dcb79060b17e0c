//! Which GPUs this process uses, and what a faulted one leaves behind.
//!
//! The primary context of a GPU serves everything that opens it. After a fault it must be destroyed
//! before it is made again, and that is safe only when nothing uses it any more: every object of
//! the driver holds a [`super::Context`], so the last of them destroys it. What outlives a context,
//! such as physical memory, cannot be freed while the GPU is faulted, and is kept until it is open
//! again.

use std::alloc::Layout;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{self, CUdevice, CUdeviceptr, CUmemGenericAllocationHandle};

/// What could not be freed when its GPU was faulted.
pub(super) enum Leftover {
    /// A physical allocation.
    Physical(CUmemGenericAllocationHandle),
    /// A reserved range, with offsets and sizes of what is mapped.
    Range { address: CUdeviceptr, bytes: u64, mapped: Vec<(u64, u64)> },
    /// Host memory of our own that was pinned; its address and layout.
    Host(usize, Layout),
}

#[derive(Default)]
struct GpuUse {
    contexts: usize,
    faulted: bool,
    leftovers: Vec<Leftover>,
}

static GPUS: Mutex<BTreeMap<CUdevice, GpuUse>> = Mutex::new(BTreeMap::new());

fn gpus() -> MutexGuard<'static, BTreeMap<CUdevice, GpuUse>> {
    GPUS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the GPU is faulted and something of it is still in use.
pub(super) fn is_faulted(device: CUdevice) -> bool {
    gpus().get(&device).is_some_and(|gpu| gpu.faulted)
}

/// A context uses the GPU.
pub(super) fn begin(device: CUdevice) {
    gpus().entry(device).or_default().contexts += 1;
}

/// A context of the GPU met an error that it does not recover from.
pub(super) fn set_faulted(device: CUdevice) {
    gpus().entry(device).or_default().faulted = true;
}

/// A context no longer uses the GPU: calls `reset` when it was the last one of a faulted GPU.
pub(super) fn end(device: CUdevice, reset: impl FnOnce()) {
    let mut gpus = gpus();
    let Some(gpu) = gpus.get_mut(&device) else { return };
    gpu.contexts = gpu.contexts.saturating_sub(1);
    if gpu.contexts == 0 && gpu.faulted {
        // Nobody can open the GPU meanwhile: that needs the lock, too.
        reset();
        gpu.faulted = false;
    }
}

/// Keeps `leftover` until the GPU is open again.
pub(super) fn keep(device: CUdevice, leftover: Leftover) {
    gpus().entry(device).or_default().leftovers.push(leftover);
}

/// Frees what earlier contexts have left behind; a context of the GPU is current.
pub(super) fn free_leftovers(device: CUdevice) {
    let leftovers = match gpus().get_mut(&device) {
        Some(gpu) => std::mem::take(&mut gpu.leftovers),
        None => return,
    };
    for leftover in leftovers {
        // SAFETY: the context that used it is destroyed, so neither the device nor anyone here uses
        // it. An error means that the driver has freed it already.
        unsafe {
            match leftover {
                Leftover::Physical(handle) => drop(sys::cuMemRelease(handle)),
                Leftover::Range { address, bytes, mapped } => {
                    for (at, size) in mapped {
                        let _ = sys::cuMemUnmap(address + at, size as usize);
                    }
                    let _ = sys::cuMemAddressFree(address, bytes as usize);
                }
                Leftover::Host(address, layout) => {
                    std::alloc::dealloc(address as *mut u8, layout);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_context_of_a_faulted_gpu_resets_it() {
        // A number that no GPU has.
        let device = 4_000;
        let mut resets = 0;
        begin(device);
        begin(device);
        end(device, || panic!("it is not faulted"));
        begin(device);
        set_faulted(device);
        assert!(is_faulted(device));
        end(device, || panic!("another context uses it"));
        end(device, || resets += 1);
        assert!(resets == 1 && !is_faulted(device));
        begin(device);
        end(device, || panic!("it is open again and not faulted"));
    }

    #[test]
    fn pinned_host_memory_of_a_faulted_gpu_is_freed_once_it_is_open_again() {
        let layout = Layout::from_size_align(4096, 4096).expect("a layout");
        // SAFETY: the size is not zero.
        let address = unsafe { std::alloc::alloc(layout) } as usize;
        keep(4_001, Leftover::Host(address, layout));
        free_leftovers(4_001);
        assert!(gpus()[&4_001].leftovers.is_empty());
    }
}
