//! What is asked of a node, what it answers, and what it counts of both.

use base::{Histogram, Nanos};
use device::DeviceError;
use model::Tensor;
use model::config::Class;
use thiserror::Error;

use super::ModelKey;

/// One inference to do. It is passed by value from the server to the node that runs it; a device
/// group replaces its own name of the model by the node's.
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
    /// Time from now until the answer is of no use; the model's default when absent.
    pub timeout: Option<Nanos>,
}

impl<M> Request<M> {
    /// The same request of a model that goes by another name.
    pub fn with_model<N>(self, model: N) -> Request<N> {
        let Request { inputs, class, priority, timeout, .. } = self;
        Request { model, inputs, class, priority, timeout }
    }
}

/// Why a request got no outputs.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Rejection {
    /// The model was unloaded, or never there.
    #[error("the model is not loaded")]
    NoSuchModel,
    /// As many requests wait as may.
    #[error("the queue of the model is full ({capacity} requests)")]
    QueueFull {
        /// The bound that was met.
        capacity: usize,
    },
    /// The deadline passed before the work was done.
    #[error("the deadline passed")]
    DeadlineExceeded,
    /// The client went away or asked to.
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

/// When things happened to a request, by the node's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timing {
    /// Taken in.
    pub arrived: Nanos,
    /// Its inputs were where the device takes them from.
    pub prepared: Nanos,
    /// First step began.
    pub started: Nanos,
    /// The device had been told of all that was launched first.
    pub launched: Nanos,
    /// Last step ended.
    pub finished: Nanos,
    /// Time spent on the device.
    pub busy: Nanos,
    /// Times it was made to leave for other work.
    pub preemptions: u32,
    /// Rows of the batch it was in; 0 when it never ran in one.
    pub rows: usize,
    /// It is the first answer of its batch, or was none of one.
    pub first: bool,
}

/// Outputs in the plan's order, or why there are none.
pub type ReplyResult = Result<Vec<Tensor>, Rejection>;

/// The end of a request.
#[derive(Debug)]
pub struct Reply {
    /// What came of it.
    pub result: ReplyResult,
    /// When.
    pub timing: Timing,
}

/// What a model has done so far.
#[derive(Clone, Debug, Default)]
pub struct ModelStats {
    /// Requests answered with outputs.
    pub success: u64,
    /// Requests refused or dropped: queue full, deadline, draining.
    pub rejected: u64,
    /// Requests whose client went away.
    pub cancelled: u64,
    /// Requests the device failed.
    pub failed: u64,
    /// Runs of the model on the device; a batch is one.
    pub executions: u64,
    /// Requests waiting or running now.
    pub pending: u64,
    /// Times its work was made to leave for other work.
    pub preemptions: u64,
    /// Arrival to answer, of successes.
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
