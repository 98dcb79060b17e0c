//! The node: the core, driven by real devices and a real clock.

use std::sync::Arc;

use base::{Bytes, Clock, Histogram, Nanos};
use device::{Device, DeviceError, Program};
use model::Tensor;
use model::config::{Class, ModelConfig};
use thiserror::Error;

/// A loaded model of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelKey(pub u32);

/// Limits of a node.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// Requests that may be under way at once, over all models.
    pub max_requests: usize,
    /// Least share of time, in percent, that best effort gets under saturating real-time load.
    pub best_effort_share_percent: u32,
}

/// One inference to do.
pub struct Request {
    /// The loaded model.
    pub model: ModelKey,
    /// One tensor per plan input, in the plan's order.
    pub inputs: Vec<Tensor>,
    /// Class; the model's default when absent.
    pub class: Option<Class>,
    /// Priority, 1 is the highest; the model's default when absent.
    pub priority: Option<u32>,
    /// Time from now until the answer is of no use; the model's default when absent.
    pub timeout: Option<Nanos>,
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
    /// First step began.
    pub started: Nanos,
    /// Last step ended.
    pub finished: Nanos,
    /// Time spent on the device.
    pub busy: Nanos,
    /// Times it was made to leave for other work.
    pub preemptions: u32,
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
    /// Requests waiting or running now.
    pub pending: u64,
    /// Times its work was made to leave for other work.
    pub preemptions: u64,
    /// Arrival to answer, of successes.
    pub latency: Histogram,
}

/// A node over one or more devices.
pub struct Node {
    _clock: Arc<dyn Clock>,
}

/// A request under way. Dropping it does nothing; [`RequestHandle::cancel`] gives it up.
pub struct RequestHandle {}

impl RequestHandle {
    /// Gives the request up: it leaves the queue, or the device at the next boundary. Its reply is
    /// still sent, once.
    pub fn cancel(&self) {}
}

impl Node {
    /// Starts the node on `device`.
    pub fn start(
        device: Arc<dyn Device>,
        options: NodeOptions,
        clock: Arc<dyn Clock>,
    ) -> Result<Node, DeviceError> {
        let _ = (device, options);
        Ok(Node { _clock: clock })
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn Device> {
        unimplemented!()
    }

    /// Makes a loaded program known under a new key. Requests may come at once.
    pub fn add_model(&self, program: Arc<dyn Program>, config: &ModelConfig) -> ModelKey {
        let _ = (program, config);
        unimplemented!()
    }

    /// Takes no more requests for `model`, lets those under way finish and frees it afterwards.
    /// `false` when there is no such model.
    pub fn remove_model(&self, model: ModelKey) -> bool {
        let _ = model;
        unimplemented!()
    }

    /// Takes a request in. `reply` is called exactly once, from any thread, also when the request is
    /// refused at once.
    pub fn submit(&self, request: Request, reply: Box<dyn FnOnce(Reply) + Send>) -> RequestHandle {
        let _ = (request, reply);
        unimplemented!()
    }

    /// What `model` has done so far.
    pub fn stats(&self, model: ModelKey) -> Option<ModelStats> {
        let _ = model;
        unimplemented!()
    }

    /// Memory its loaded programs hold.
    pub fn resident(&self) -> Bytes {
        unimplemented!()
    }

    /// Takes no more requests and returns when none is under way, or `false` after `limit`.
    pub fn drain(&self, limit: std::time::Duration) -> bool {
        let _ = limit;
        unimplemented!()
    }
}
