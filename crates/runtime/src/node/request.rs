//! Requests to a node, their replies, and its counters.

use base::{Histogram, Nanos};
use device::DeviceError;
use model::Tensor;
use model::config::Class;
use thiserror::Error;

use super::ModelKey;

/// One inference. Passed by value from the server to the node that runs it; a device group only
/// replaces the name of the model.
pub struct Request<M = ModelKey> {
    /// The loaded model: a [`ModelKey`] of a node, or a
    /// [`GroupModelId`](crate::device_group::router::GroupModelId) of a device group.
    pub model: M,
    /// One tensor per plan input, in the plan's order.
    pub inputs: Vec<Tensor>,
    /// Class; the model's default when absent.
    pub class: Option<Class>,
    /// Priority, 1 is the highest; the model's default when absent.
    pub priority: Option<u32>,
    /// Time until its reply is of no use; the model's default when absent.
    pub timeout: Option<Nanos>,
}

impl<M> Request<M> {
    /// The same request with another name of the model.
    pub fn with_model<N>(self, model: N) -> Request<N> {
        let Request { inputs, class, priority, timeout, .. } = self;
        Request { model, inputs, class, priority, timeout }
    }
}

/// Why a request got no outputs.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Rejection {
    /// The model is not loaded.
    #[error("the model is not loaded")]
    NoSuchModel,
    /// Too many requests wait.
    #[error("the queue of the model is full ({capacity} requests)")]
    QueueFull {
        /// The limit.
        capacity: usize,
    },
    /// The deadline passed.
    #[error("the deadline passed")]
    DeadlineExceeded,
    /// The client disconnected or cancelled.
    #[error("the request was cancelled")]
    Cancelled,
    /// The policy runs no best effort.
    #[error("best-effort requests are not run under this policy; send it as real time")]
    RealTimeOnly,
    /// The node is draining.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The inputs do not fit, or the device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Times of a request, by the node's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timing {
    /// Arrival.
    pub arrived: Nanos,
    /// Inputs staged.
    pub prepared: Nanos,
    /// First step started.
    pub started: Nanos,
    /// First launch submitted to the device.
    pub launched: Nanos,
    /// Last step ended.
    pub finished: Nanos,
    /// Device time.
    pub busy: Nanos,
    /// Number of preemptions.
    pub preemptions: u32,
    /// Rows of its batch; 0 without a batch.
    pub rows: usize,
    /// Whether it is the first reply of its batch, or not batched.
    pub first: bool,
}

/// Outputs in the plan's order, or why there are none.
pub type ReplyResult = Result<Vec<Tensor>, Rejection>;

/// The reply to a request.
#[derive(Debug)]
pub struct Reply {
    /// Outputs or reason.
    pub result: ReplyResult,
    /// Its times.
    pub timing: Timing,
}

/// Counters of a model.
#[derive(Clone, Debug, Default)]
pub struct ModelStats {
    /// Requests that got outputs.
    pub success: u64,
    /// Requests refused or dropped: queue full, deadline, draining.
    pub rejected: u64,
    /// Cancelled requests.
    pub cancelled: u64,
    /// Requests that the device failed.
    pub failed: u64,
    /// Executions on the device; a batch is one.
    pub executions: u64,
    /// Requests waiting or running now.
    pub pending: u64,
    /// Preemptions of its work.
    pub preemptions: u64,
    /// Latency of successful requests, from arrival to reply.
    pub latency: Histogram,
}

impl ModelStats {
    pub(super) fn count(&mut self, result: &ReplyResult, timing: &Timing) {
        match result {
            Ok(_) => {
                self.success += 1;
                self.latency.record(timing.finished - timing.arrived);
            }
            Err(Rejection::Device(_)) => self.failed += 1,
            Err(Rejection::Cancelled) => self.cancelled += 1,
            Err(_) => self.rejected += 1,
        }
    }
}
