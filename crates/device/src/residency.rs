//! Weights that come and go under a program that stays.
//!
//! A device with less memory than its models need keeps their weights on the host and brings them when somebody says so. It does
//! not decide: [`Residency`] is told what to load and what to evict, in an order that keeps within a budget.

use base::Bytes;

use crate::DeviceError;

/// How a load is going.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadProgress {
    /// Runs may start: what is missing arrives in time, and no step begins before its weights are there.
    Runnable,
    /// All of it is on the device.
    Loaded,
    /// It is not, and nothing of it is.
    Failed(DeviceError),
}

/// Where a load tells how it is going. Called from a device's own thread.
pub type LoadReport = Box<dyn Fn(LoadProgress) + Send>;

/// The weights of one program.
///
/// A device carries orders out one after another, in the order they were given, over all its programs: memory that an eviction gives
/// back is there for the load behind it.
pub trait Residency: Send + Sync {
    /// What they take on the device when they are there, to the byte. Grows when a program learns to do more than before; what it
    /// learned can be run after the next load.
    fn bytes(&self) -> Bytes;

    /// Begins to bring them and returns at once. [`LoadProgress::Runnable`] comes at most once, then either of the others
    /// exactly once. Real time waits for what is `urgent`; anything else goes slower where it would hold up real time that runs.
    fn load(&self, urgent: bool, report: LoadReport);

    /// Gives their memory back, and returns at once. No run of the program may be under way.
    fn evict(&self);
}

/// What a device's memory is used for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Weights that are on the device or arriving.
    pub weights: Bytes,
    /// The most of them that were there at once so far.
    pub max_weights: Bytes,
    /// Held to put weights into, and empty.
    pub spare: Bytes,
    /// Used by everybody, as the device's own tools count; `None` where they do not tell.
    pub system: Option<Bytes>,
}
