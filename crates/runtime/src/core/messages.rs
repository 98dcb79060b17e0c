//! Events that the core consumes and actions that it emits.

use std::ops::Range;
use std::sync::Arc;

use base::Nanos;
use device::PreemptMode;
use device::profile::KernelProfile;
use model::config::Class;

use super::{ModelId, RequestId};
use crate::policy::PreemptionPoint;

#[cfg(doc)]
use {super::Core, device::DeviceCapabilities};

/// An input of the core.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A model accepts requests, of which at most `queue_capacity` wait.
    ModelAdded {
        /// Its number; not in use.
        model: ModelId,
        /// Steps of one request.
        steps: usize,
        /// Maximum number of waiting requests.
        queue_capacity: usize,
    },
    /// At most so many requests of a model wait from now on; those that wait already stay.
    ModelQueueCapacity {
        /// Its number.
        model: ModelId,
        /// The maximum.
        queue_capacity: usize,
    },
    /// How many real-time requests of a model may run at once, where there are queues for it; the
    /// default is one.
    ModelConcurrency {
        /// Its number.
        model: ModelId,
        /// The maximum.
        max_running: usize,
    },
    /// The weights of a model have so many bytes and are loaded and evicted. Sent again when they
    /// grow, or are pinned or no longer.
    ModelWeights {
        /// Its number.
        model: ModelId,
        /// Bytes on the device.
        bytes: u64,
        /// They are loaded at once and never evicted.
        pinned: bool,
    },
    /// Load the weights of a model if there is free memory.
    Preload {
        /// Its number.
        model: ModelId,
    },
    /// A model accepts no more requests. [`Action::FreeModel`] follows after its last one.
    ModelRemoved {
        /// Its number.
        model: ModelId,
    },
    /// A request arrived. Its number is from [`Core::next_request_id`].
    Arrival {
        /// Its number.
        request: RequestId,
        /// Its model.
        model: ModelId,
        /// Its class.
        class: Class,
        /// 1 is the highest.
        priority: u32,
        /// After this time its reply is of no use.
        deadline: Nanos,
    },
    /// A batch was formed for a job that was just launched.
    BatchFormed {
        /// Its number.
        request: RequestId,
        /// Rows it computes.
        rows: usize,
        /// The latest deadline of its members.
        deadline: Nanos,
    },
    /// A real-time request is announced: its inputs are almost staged. Best effort is preempted for
    /// it. [`Event::ExpectationEnded`] follows, after the arrival if there is one.
    ArrivalExpected {
        /// Its model.
        model: ModelId,
    },
    /// An announced request has arrived, or never will.
    ExpectationEnded,
    /// A segment has run all its steps.
    SegmentDone {
        /// The queue it ran on.
        queue: usize,
        /// Time it took.
        busy: Nanos,
    },
    /// The replies are sent that best effort waits for.
    RepliesSent,
    /// A segment was preempted.
    SegmentPreempted {
        /// The queue it ran on.
        queue: usize,
        /// How far it ran.
        point: PreemptionPoint,
        /// Time it took.
        busy: Nanos,
    },
    /// A segment failed; its task cannot be used any more.
    SegmentFailed {
        /// The queue it ran on.
        queue: usize,
        /// Time it took.
        busy: Nanos,
    },
    /// Enough weights of a model are loaded for tasks to start; each step waits for its weights.
    LoadRunnable {
        /// The model.
        model: ModelId,
    },
    /// The weights of a model could not be loaded; none are on the device.
    LoadFailed {
        /// The model.
        model: ModelId,
    },
    /// All weights of a model are on the device.
    LoadDone {
        /// The model.
        model: ModelId,
    },
    /// The device is lost, with everything on it. Only the simulated GPU reports it.
    DeviceLost,
    /// The device is usable again, and empty. Only the simulated GPU reports it.
    DeviceReady,
    /// The device was to be reset, and makes progress: its segments get their time once more.
    DeviceAlive,
    /// The request is cancelled.
    Cancel {
        /// Its number; ignored if it has ended.
        request: RequestId,
    },
    /// The time of [`Core::next_timer`] is reached.
    Timer,
    /// No more requests are accepted; pending ones finish.
    Drain,
    /// An event of the simulated GPU.
    Sim(SimEvent),
}

/// Events that only the simulated GPU reports.
#[derive(Clone, Debug, PartialEq)]
pub enum SimEvent {
    /// The profile of a model: its kernels for padding, its weights for the memory budget.
    ModelProfiled {
        /// Its number.
        model: ModelId,
        /// Its kernels, one per step; empty when unknown.
        kernels: Arc<[KernelProfile]>,
        /// Bytes of its weights, which are not loaded.
        weight_bytes: u64,
    },
    /// The inputs of a request are on the device.
    InputReady {
        /// Its number.
        request: RequestId,
    },
    /// A kernel of the running segment can be placed.
    StepReady {
        /// The queue.
        queue: usize,
        /// The kernel.
        step: usize,
    },
}

/// An output of the core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Run `steps` of the request's task on an idle queue.
    Launch {
        /// The queue.
        queue: usize,
        /// The request.
        request: RequestId,
        /// The steps.
        steps: Range<usize>,
        /// Tile of the first step to begin at.
        tile: u32,
    },
    /// Preempt the segment on this queue.
    Preempt {
        /// The queue.
        queue: usize,
        /// The preempt mode.
        how: PreemptMode,
    },
    /// Confine a queue to the SM partition, or end that.
    Confine {
        /// The queue.
        queue: usize,
        /// Whether it is confined.
        confined: bool,
    },
    /// Load the weights of a model.
    Load {
        /// The model.
        model: ModelId,
        /// Real time waits for it.
        urgent: bool,
    },
    /// Evict the weights of a model.
    Evict {
        /// The model.
        model: ModelId,
    },
    /// Reset the device: a segment never completed.
    ResetDevice,
    /// Reply to the request. Its number is free again.
    End {
        /// The request.
        request: RequestId,
        /// How it ended.
        end: End,
    },
    /// The model is not used any more.
    FreeModel {
        /// Its number, free again.
        model: ModelId,
    },
    /// An action of the simulated GPU.
    Sim(SimAction),
}

/// Actions that only the simulated GPU carries out. The core emits them only where the device
/// declares the capability ([`DeviceCapabilities`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SimAction {
    /// Limit a queue to `hold` SMs; new blocks are placed only up to `take`.
    SetBudget {
        /// The queue.
        queue: usize,
        /// SMs it may hold; `u32::MAX` for all.
        hold: u32,
        /// SMs up to which it may place new blocks.
        take: u32,
        /// When the limit shrinks, and to how many SMs: no tile is begun that would not end by
        /// then.
        expiry: Option<(Nanos, u32)>,
    },
    /// Fuse blocks of the kernel on this queue with the real-time kernel that starts now.
    Pad {
        /// The queue.
        queue: usize,
        /// The kernel.
        step: usize,
        /// SMs it gets.
        sms: u32,
        /// Blocks it may run.
        blocks: u32,
    },
    /// Copy the inputs of a request to the device.
    CopyInputs {
        /// The request.
        request: RequestId,
    },
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// All steps have run.
    Done,
    /// The device failed.
    Failed,
    /// The deadline passed.
    DeadlineExceeded,
    /// The client cancelled it.
    Cancelled,
    /// Too many requests waited.
    QueueFull,
    /// The model is not loaded.
    NoSuchModel,
    /// The node is draining.
    ShuttingDown,
}
