//! What the core is told and what it says.

use std::ops::Range;
use std::sync::Arc;

use base::Nanos;
use device::PreemptMode;
use device::sim::KernelProfile;
use model::config::Class;

use super::{ModelId, RequestId};
use crate::policy::PreemptionPoint;

/// What happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A model can take requests, at most `queue_capacity` of them waiting.
    ModelAdded {
        /// Its number; not in use.
        model: ModelId,
        /// Launches one request needs.
        steps: usize,
        /// The most requests that may wait.
        queue_capacity: usize,
    },
    /// So many requests of a model may run as real time at once, where there are queues for it; one unless this is said.
    ModelConcurrency {
        /// Its number.
        model: ModelId,
        /// The most at once.
        max_running: usize,
    },
    /// What a model costs is known: its kernels for padding, its weights for the memory budget.
    ModelProfiled {
        /// Its number.
        model: ModelId,
        /// Its kernels, one per step; empty when unknown.
        kernels: Arc<[KernelProfile]>,
        /// Bytes of its weights, which are not on the device yet.
        weight_bytes: u64,
    },
    /// A model has so many bytes of weights, which come and go. Told again when there are more of them.
    ModelWeights {
        /// Its number.
        model: ModelId,
        /// Bytes on the device.
        bytes: u64,
        /// They are loaded at once and never evicted for others.
        pinned: bool,
    },
    /// A model's weights are to be loaded if there is room for them.
    Preload {
        /// Its number.
        model: ModelId,
    },
    /// A model takes no more requests. [`Action::FreeModel`] follows its last one.
    ModelRemoved {
        /// Its number.
        model: ModelId,
    },
    /// A request came. Its number was given out by [`Core::next_request_id`].
    Arrival {
        /// Its number.
        request: RequestId,
        /// Its model.
        model: ModelId,
        /// Its class.
        class: Class,
        /// 1 is the highest.
        priority: u32,
        /// When the answer is of no more use.
        deadline: Nanos,
    },
    /// Who rides on a request that has just been launched is settled.
    BatchFormed {
        /// Its number.
        request: RequestId,
        /// Rows it computes.
        rows: usize,
        /// When the answer is of no more use to any of them.
        deadline: Nanos,
    },
    /// A real-time request is about to arrive: its inputs are nearly where the device takes them from. Best effort makes room
    /// meanwhile. [`Event::ExpectationEnded`] follows, after the arrival where one comes.
    ArrivalExpected {
        /// Its model.
        model: ModelId,
    },
    /// A request that was expected has arrived, or never will.
    ExpectationEnded,
    /// A segment did all its steps.
    SegmentDone {
        /// The queue it ran on.
        queue: usize,
        /// Time it took.
        busy: Nanos,
    },
    /// The answers of real time are out for which best effort was kept waiting.
    RepliesSent,
    /// A segment left early.
    SegmentPreempted {
        /// The queue it ran on.
        queue: usize,
        /// How far it got.
        left: PreemptionPoint,
        /// Time it took.
        busy: Nanos,
    },
    /// A segment failed; its task is of no further use.
    SegmentFailed {
        /// The queue it ran on.
        queue: usize,
        /// Time it took.
        busy: Nanos,
    },
    /// A request's inputs are on the device.
    InputReady {
        /// Its number.
        request: RequestId,
    },
    /// A model's weights are arriving, and runs may start: the device holds each step until its weights are there.
    LoadRunnable {
        /// The model.
        model: ModelId,
    },
    /// A model's weights could not be loaded; none of them are on the device.
    LoadFailed {
        /// The model.
        model: ModelId,
    },
    /// A model's weights are on the device.
    LoadDone {
        /// The model.
        model: ModelId,
    },
    /// A kernel of the segment on this queue can be placed.
    StepReady {
        /// The queue.
        queue: usize,
        /// The kernel.
        step: usize,
    },
    /// The device fell over; everything on it is gone.
    DeviceLost,
    /// The device can be used again, empty.
    DeviceReady,
    /// Nobody waits for the request any more.
    Cancel {
        /// Its number; one that has ended already is ignored.
        request: RequestId,
    },
    /// The time that [`Core::next_timer`] named has come.
    Timer,
    /// No more requests are taken; those under way finish.
    Drain,
}

/// What is to be done.
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
    /// Make the segment on this queue leave: bump its epoch, or reset it.
    Preempt {
        /// The queue.
        queue: usize,
        /// How finely.
        how: PreemptMode,
    },
    /// Hold a queue to the device's partition, or no more: its work goes on.
    Confine {
        /// The queue.
        queue: usize,
        /// Whether it is held.
        confined: bool,
    },
    /// Let a queue hold at most so many multiprocessors, and place new blocks only up to `take`.
    SetBudget {
        /// The queue.
        queue: usize,
        /// What it may hold; `u32::MAX` for all.
        hold: u32,
        /// What it may fill with new blocks.
        take: u32,
        /// When that shrinks by itself, and to how many: no tile is begun there that would not end by then.
        expiry: Option<(Nanos, u32)>,
    },
    /// Fuse blocks of this queue's kernel with the real-time kernel that starts now.
    Pad {
        /// The queue.
        queue: usize,
        /// The kernel.
        step: usize,
        /// Multiprocessors it gets.
        sms: u32,
        /// Blocks it may run.
        blocks: u32,
    },
    /// Copy a request's inputs to the device.
    Copy {
        /// The request.
        request: RequestId,
    },
    /// Bring a model's weights to the device.
    Load {
        /// The model.
        model: ModelId,
        /// Real time waits for them.
        urgent: bool,
    },
    /// Free a model's weights on the device.
    Evict {
        /// The model.
        model: ModelId,
    },
    /// Reset the device: something on it is never heard of again.
    ResetDevice,
    /// Answer the request. Its number is free again.
    End {
        /// The request.
        request: RequestId,
        /// How it ended.
        end: End,
    },
    /// Nothing uses the model any more.
    FreeModel {
        /// Its number, free again.
        model: ModelId,
    },
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// All steps are done.
    Done,
    /// The device failed.
    Failed,
    /// The deadline passed.
    DeadlineExceeded,
    /// Nobody waited any more.
    Cancelled,
    /// As many requests waited as may.
    QueueFull,
    /// The model is not there.
    NoSuchModel,
    /// The node drains.
    ShuttingDown,
}
