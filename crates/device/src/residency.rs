//! Weights that are loaded and evicted while their program stays.
//!
//! A device with less memory than its models need keeps their weights on the host. It does not
//! decide which are resident: [`Residency`] gets loads and evictions in an order that stays within
//! a memory budget.

use base::Bytes;

use crate::DeviceError;

/// Progress of a load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadProgress {
    /// Tasks may start: the remaining weights are on their way, and no step begins before its
    /// weights are there.
    Runnable,
    /// All weights are on the device.
    Loaded,
    /// The load failed; none of the weights are on the device.
    Failed(DeviceError),
}

/// Receives the progress of a load, on a thread of the device.
pub type LoadCallback = Box<dyn Fn(LoadProgress) + Send>;

/// The weights of one program.
///
/// A device carries out loads and evictions of all its programs one after another, in the order of
/// the calls: memory that an eviction frees is available to the load after it.
pub trait Residency: Send + Sync {
    /// Exact bytes that they occupy on the device. Grows when a program is prepared for more sizes,
    /// which run after the next load.
    fn bytes(&self) -> Bytes;

    /// Starts to load them and returns at once. [`LoadProgress::Runnable`] is reported at most
    /// once, then one of the others exactly once. Real time waits for an `urgent` load; other loads
    /// yield the copy engine to running real time.
    fn load(&self, urgent: bool, report: LoadCallback);

    /// Frees their device memory and returns at once. No task of the program may be running.
    fn evict(&self);
}

/// Use of a device's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Weights on the device, loading ones included.
    pub weights: Bytes,
    /// Maximum of `weights` so far.
    pub max_weights: Bytes,
    /// Reserved for weights and empty.
    pub spare: Bytes,
    /// Used by all processes, as the tools of the device count; `None` when unknown.
    pub system: Option<Bytes>,
}
